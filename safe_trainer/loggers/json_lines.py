"""Rows of the log as JSON lines in the run's folder (metrics.jsonl, alerts.jsonl). Touches these files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from safe_trainer.findings import Finding, json_number
from safe_trainer.loggers.sink import Trouble, as_row, drop_torn_line, now, replace_lines


class JsonLines:
    """One JSON object a row: ``{"step": 50, "time": 1767225600.0, "train/loss": 0.31}``.

    Values that are not finite are the words "NaN", "Infinity" and "-Infinity", since JSON has no such numbers; Python's
    ``float`` and JavaScript's ``Number`` read them. A text is a row ``{"step", "time", "name", "text"}``. Each row goes
    to the operating system at once, so a killed process loses none; `flush` also makes them outlive a power cut.
    A finding that alerts is a row ``{"step", "time", "alert": {"fault": ...}}`` of a file of its own, alerts.jsonl.
    """

    def __init__(self, folder: Path, filename: str = "metrics.jsonl") -> None:
        self.path = Path(folder) / filename
        self.alerts_path = Path(folder) / "alerts.jsonl"
        self.trouble = Trouble(f"the log {self.path}")
        self.file: TextIO | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row."""
        self._append({name: json_number(value) for name, value in as_row(step, values).items()})

    def text(self, step: int, name: str, text: str) -> None:
        """Append a text as a row of its own."""
        self._append({"step": int(step), "time": now(), "name": name, "text": text})

    def alert(self, finding: Finding) -> None:
        """Append a finding to alerts.jsonl; a run has few, if any, so the file is not kept open."""
        row = {"step": int(finding.step or 0), "time": now(), "alert": finding.state_dict()}
        if self.trouble.met:
            return
        with self.trouble.contained():
            drop_torn_line(self.alerts_path)
            with self.alerts_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Wait until the rows are on the disk itself."""
        if self.file is not None and not self.trouble.met:
            with self.trouble.contained():
                os.fsync(self.file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps, and a last row that was cut short by a kill."""
        self.close()
        with self.trouble.contained():
            for path in (self.path, self.alerts_path):
                if path.exists():
                    replace_lines(path, _lines_until(path, step))

    def close(self) -> None:
        """Close the file; a later row opens it again."""
        file, self.file = self.file, None
        if file is not None:
            with self.trouble.contained():
                file.close()

    def _append(self, row: dict[str, Any]) -> None:
        if self.trouble.met:
            return
        line = json.dumps(row, allow_nan=False) + "\n"
        with self.trouble.contained():
            if self.file is None:
                drop_torn_line(self.path)
                self.file = self.path.open("a", encoding="utf-8", buffering=1)  # 1: each line is written at its end
            self.file.write(line)


def _lines_until(path: Path, step: int) -> Iterator[str]:
    """The whole lines of `path` that are rows of `step` or before."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n") and _step_of(line) <= step:
                yield line


def _step_of(line: str) -> float:
    """The step of a row; infinity, which is after any step, for a line that is none."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
