"""What every sink of the log can do, and the parts that sinks share. Touches the files it is told to, nothing else."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

RESERVED = ("step", "time", "name", "text")
"""Keys of a row that are not values."""


class Sink(Protocol):
    """A place that rows of the log go to, built as ``Target(folder=Path, **options)``.

    A sink may have one more method, ``alert(finding)``, which is called with each safe_trainer.Finding that alerts.

    Nothing is opened before the first row, so that `truncate_after` can come first. A sink whose disk, file or server
    fails says so once through logging and is silent from then on: a log must not stop a training run.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row: what was measured at training step `step`, by name (train/loss, val/accuracy, train/lr)."""

    def text(self, step: int, name: str, text: str) -> None:
        """Write a plain text that belongs to a step, if this kind of sink can hold one."""

    def flush(self) -> None:
        """Return when all rows so far would survive a kill; to be called before a checkpoint is committed."""

    def truncate_after(self, step: int) -> None:
        """Forget the rows of steps after `step`, for a run that goes on from a checkpoint at `step`."""

    def close(self) -> None:
        """Write what is left and let go of the file; a second call does nothing."""


class Trouble:
    """Lets a sink fail without harm: the first error inside ``with trouble.contained():`` is logged, once."""

    def __init__(self, sink: str) -> None:
        self.sink = sink
        self.met = False
        """Whether the sink has failed; it should do nothing more."""

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Log the first exception of the body as a warning and swallow all of them; Ctrl-C passes."""
        try:
            yield
        except Exception as error:  # whatever the backend raises: its libraries have error types of their own
            if not self.met:
                logger.warning(
                    "%s failed and is switched off for the rest of the run; training goes on (%s: %s)",
                    self.sink, type(error).__name__, error,
                )  # fmt: skip
            self.met = True


def as_row(step: int, values: Mapping[str, float]) -> dict[str, float]:
    """A row to write: the step, the time in seconds since 1970, the values as floats.

    A value whose name is one of `RESERVED` gets an underscore behind it, so that nothing is lost.
    """
    numbers = {f"{name}_" if name in RESERVED else name: float(value) for name, value in values.items()}
    return {"step": int(step), "time": now(), **numbers}


def now() -> float:
    """Seconds since 1970, to the millisecond: finer digits only make the files longer."""
    return round(time.time(), 3)


def drop_torn_line(path: Path) -> None:
    """Cut off a last line without an end: its writer was killed, and the next row must not stick to it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:  # usually one turn: a row is much shorter than a block
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Write `path` anew in one stroke: a kill at any instant leaves either the old file or the new one."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
