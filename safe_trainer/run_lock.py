"""One run at a time in a run's folder, and none into the leavings of another. Touches the file .lock there."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from safe_trainer.config import ConfigError

try:
    import fcntl
except ImportError:  # Windows has no POSIX locks: there the folder is not guarded against other processes
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

LOCK = ".lock"

_held: set[Path] = set()
"""Folders of runs in this process: a POSIX lock does not keep its own process out."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of the folder while the body runs.

    A POSIX record lock: it ends with the process however that ends, and the workers of a DataLoader do not inherit it.

    Raises:
        ConfigError: a run is at work there.
    """
    place = folder.resolve()
    if place in _held:
        raise ConfigError([_taken(folder, "another trainer of this process")])
    file = _lock(folder)
    _held.add(place)
    try:
        yield
    finally:
        _held.discard(place)
        if file is not None:
            file.close()  # and with it the lock ends


def refuse_leavings(folder: Path, resume: str | None) -> None:
    """Refuse a folder that holds another run than the one that goes on in it.

    Args:
        resume: as in the configuration: null for a new run, last, or the path of a checkpoint.

    Raises:
        ConfigError: rows and checkpoints of two runs would be mixed there.
    """
    if resume == "last" or not (folder / "environment.json").exists():
        return
    if resume is not None and folder.resolve() in Path(resume).expanduser().resolve().parents:
        return
    if resume is not None and folder.resolve() == Path(resume).expanduser().resolve():
        return
    got = f"got {folder}, which holds a run of {_time(folder)}"
    raise ConfigError(
        [
            f"run_dir must be a new or empty folder for a new run ({got}); go on with that one by resume=last, or name "
            "another folder"
        ]
    )


def _lock(folder: Path) -> TextIO | None:
    """The locked file, which says who has it; None where the system has no such locks."""
    if not HAS_LOCKS:
        return None
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ConfigError([_taken(folder, owner)]) from None
        return None  # some network file systems have none: no reason not to train
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _taken(folder: Path, owner: str) -> str:
    return f"run_dir must be a folder in which no run is at work (got {folder}, in use by {owner}); name another folder"


def _time(folder: Path) -> str:
    """When the run in the folder began, in words."""
    try:
        return str(json.loads((folder / "environment.json").read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown time"
