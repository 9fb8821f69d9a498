"""Rows of the log as one table in the run's folder (metrics.csv). Touches that one file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from safe_trainer.loggers.sink import Trouble, as_row, drop_torn_line, replace_lines


class Csv:
    """One line a row, one column a value, a cell left empty where a row has no such value; texts are left out.

    A value that appears for the first time gets a new last column: the table is then written anew, in one stroke. That
    happens a few times in a run, as when the first evaluation is logged. What is not finite reads nan, inf and -inf.
    """

    def __init__(self, folder: Path, filename: str = "metrics.csv") -> None:
        self.path = Path(folder) / filename
        self.trouble = Trouble(f"the log {self.path}")
        self.columns: list[str] = []
        self.file: TextIO | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row."""
        if self.trouble.met:
            return
        row = as_row(step, values)
        with self.trouble.contained():
            if self.file is None or not row.keys() <= set(self.columns):
                self.file = self._open_with(list(row))
            self.file.write(_line([row.get(name, "") for name in self.columns]))

    def text(self, step: int, name: str, text: str) -> None:
        """Do nothing: a table of numbers has no place for texts."""

    def flush(self) -> None:
        """Wait until the rows are on the disk itself."""
        if self.file is not None and not self.trouble.met:
            with self.trouble.contained():
                os.fsync(self.file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps, and a last row that was cut short by a kill."""
        self.close()
        with self.trouble.contained():
            self._rewrite(lambda row: _step_of(row) <= step)

    def close(self) -> None:
        """Close the file; a later row opens it again."""
        file, self.file = self.file, None
        if file is not None:
            with self.trouble.contained():
                file.close()

    def _open_with(self, names: list[str]) -> TextIO:
        """The file, ready for a row of `names`; columns that it lacks are added behind those it has."""
        if self.file is not None:
            self.file.close()
        drop_torn_line(self.path)
        header = next(_rows(self.path), [])
        self.columns = list(dict.fromkeys([*header, *names]))
        if self.columns != header:
            self._rewrite(lambda row: True)
        return self.path.open("a", encoding="utf-8", newline="", buffering=1)  # 1: each line is written at its end

    def _rewrite(self, keep: Callable[[dict[str, str]], bool]) -> None:
        """Write the table anew with all columns known by now and the rows that are to be kept."""
        drop_torn_line(self.path)
        header = next(_rows(self.path), [])
        self.columns = list(dict.fromkeys([*header, *self.columns]))
        if self.columns:
            replace_lines(self.path, _table(self.path, header, self.columns, keep))


def _table(path: Path, header: list[str], columns: list[str], keep: Callable[[dict[str, str]], bool]) -> Iterator[str]:
    """The lines of the table in `path` under new columns."""
    yield _line(columns)
    for number, cells in enumerate(_rows(path)):
        row = dict(zip(header, cells, strict=False))
        if number > 0 and keep(row):
            yield _line([row.get(name, "") for name in columns])


def _rows(path: Path) -> Iterator[list[str]]:
    """The cells of each line, the header first; nothing if there is no file."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            yield from csv.reader(file)


def _line(cells: Sequence[object]) -> str:
    """Cells as one line, quoted where needed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _step_of(row: dict[str, str]) -> float:
    """The step of a row; infinity, which is after any step, for a line that has none."""
    try:
        return float(row["step"])
    except (ValueError, KeyError):
        return float("inf")
