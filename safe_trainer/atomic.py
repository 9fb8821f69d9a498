"""Files that are whole or not there: written under a locked temporary name, synced, renamed. Touches nothing else."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

if sys.platform != "win32":
    import fcntl

ABANDONED_SECONDS = 3600.0
"""On a file system without locks, a temporary file untouched for so long is a leftover: no write pauses for an hour."""


class DigestingFile:
    """What torch.save writes to: the file, its digest and size. Raw: what is written is with the system at once."""

    def __init__(self, file: FileIO) -> None:
        self.file, self.digest, self.size = file, hashlib.sha256(), 0
        self.failure: BaseException | None = None

    def write(self, data: bytes) -> int:
        """Takes all of `data`. An exception must not go through torch's C++ writer: it waits for ``finish``."""
        rest = memoryview(data).cast("B")
        if self.failure is None:
            try:
                self._write_all(rest)
            except BaseException as error:  # re-raised by finish()
                self.failure = error
        return len(rest)

    def _write_all(self, rest: memoryview) -> None:
        self.digest.update(rest)
        self.size += len(rest)
        while rest:
            rest = rest[self.file.write(rest) :]

    def flush(self) -> None:
        """Nothing is held back."""

    def finish(self) -> None:
        """All of it is on the disk when this returns; what failed on the way is raised."""
        if self.failure is not None:
            raise self.failure
        os.fsync(self.file.fileno())


@contextlib.contextmanager
def temporary_file(target: Path) -> Iterator[tuple[Path, FileIO]]:
    """A locked file beside `target` under a name nobody has; removed if the body raises before it was published."""
    path = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    file = _open_locked(path)
    try:
        with file:
            yield path, file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _open_locked(path: Path) -> FileIO:
    """A new file with a lock that ends with this process, however it ends: a leftover is one without its lock."""
    while True:
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666), "wb")
        if sys.platform != "win32":
            with contextlib.suppress(OSError):  # a file system without locks; see is_being_written
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink == 0:  # another save swept it in between
                file.close()
                continue
        return file


def publish(temporary: Path, target: Path, file: FileIO) -> None:
    """Give a synced file its name. The folder is synced too, or the name could be lost with the power."""
    if sys.platform == "win32":
        file.close()  # an open file cannot be renamed there
    os.replace(temporary, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    if sys.platform == "win32":  # no such thing there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def is_being_written(path: Path) -> bool:
    """Whether a live process holds the lock that every write takes."""
    if sys.platform == "win32":
        return False  # an open file cannot be removed there: the attempt fails and is forgiven
    try:
        with FileIO(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except (BlockingIOError, FileNotFoundError):
        return True
    except OSError:  # no locks here, or not ours
        return time.time() - path.stat().st_mtime < ABANDONED_SECONDS
