"""Checkpoints that survive a kill, a full disk and a flipped bit. Writes in one folder and reads files; builds nothing.

Commit protocol: the data goes to a temporary name in the same folder, is synced to the disk and renamed; a small marker
(JSON: size, digest, figures) follows the same way, last. A data file without its marker is no checkpoint. State is
nested dicts, lists and tuples of tensors and plain values, so that every file loads with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import operator
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from safe_trainer.atomic import DigestingFile, is_being_written, publish, temporary_file
from safe_trainer.checkpoint_file import (
    FORMAT,
    HEADER,
    CheckpointInfo,
    UnusableError,
    marker_text,
    read_checkpoint,
    read_marker,
    size_on_disk,
)
from safe_trainer.config import ConfigError, Direction
from safe_trainer.plain_state import infinite_tensors, is_finite, plain_state, state_differences, weights

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "Checkpoints",
    "infinite_tensors",
    "is_better",
    "is_lower_better",
    "state_differences",
]
_DATA = re.compile(r"step-\d{8,}(-\d+)?\.pt")
_MARKER = re.compile(r"step-\d{8,}(-\d+)?\.json")
_TEMPORARY = re.compile(r"\.step-\d{8,}.*\.tmp")
_log = logging.getLogger(__name__)


class CheckpointError(OSError):
    """A checkpoint could not be written. Those that were there before are whole; the text says what to do."""


def is_lower_better(metric: str, direction: str | Direction = "auto") -> bool:
    """Whether a smaller `metric` is the better one; `direction` is min, max or auto.

    Under auto the name decides: loss, error, perplexity, mse, mae and rmse fall, all else rises.
    """
    choice = direction.value if isinstance(direction, Direction) else direction
    if choice not in ("min", "max", "auto"):
        raise ValueError(f"direction must be min, max or auto (got {choice!r})")
    falling = ("loss", "error", "perplexity", "mse", "mae", "rmse")
    return choice == "min" or (choice == "auto" and any(word in metric.lower() for word in falling))


def is_better(value: float, than: float, *, lower: bool, min_delta: float = 0.0) -> bool:
    """Whether `value` improves on `than` by more than `min_delta`. A NaN never does; any number improves on a NaN."""
    if math.isnan(value) or math.isnan(than):
        return not math.isnan(value)
    return than - value > min_delta if lower else value - than > min_delta


class Checkpoints:
    """The checkpoints of one run: one folder, one process that writes.

    Args:
        folder: where they live; made at the first save.
        keep_last: how many of the newest stay, at least 1.
        keep_best: how many of the best by `metric` stay; 0 keeps none.
        metric: the figure that says which is best; one that is missing or not finite is never the best.
        direction: min, max or auto (see ``is_lower_better``).
        may_be_infinite: dotted names of tensors that hold infinities on purpose, as attention masks full of -inf do;
            ``infinite_tensors`` gives them for a model as it was built. A NaN in them is refused all the same.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int = 1,
        keep_best: int = 1,
        metric: str = "val/loss",
        direction: str | Direction = "auto",
        may_be_infinite: Collection[str] = (),
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last must be at least 1 and keep_best 0 or more (got {keep_last} and {keep_best}): "
                "a run must keep something to go on from"
            )
        self.folder = Path(folder)
        self.keep_last, self.keep_best = keep_last, keep_best
        self.metric, self.lower = metric, is_lower_better(metric, direction)
        self.may_be_infinite = frozenset(may_be_infinite)
        self._refused = False
        self._damaged: set[tuple[Path, int]] = set()  # by sequence too: a name may be used again

    def save(
        self, state: Mapping[str, Any], *, step: int, epoch: int, metrics: Mapping[str, float] | None = None
    ) -> Path | None:
        """Commit `state` and drop what need not be kept. Returns the file, or None if the weights are not finite.

        Raises:
            TypeError: something in `state` is no tensor or plain value; its dotted name is given.
            CheckpointError: disk full, no permission. The checkpoints from before are whole, nothing is left over.
        """
        if HEADER in state:
            raise ValueError(f"the key {HEADER!r} of a state is taken: it holds step, epoch and metrics; rename yours")
        contents = plain_state(state)
        bad = [name for name, tensor in weights(contents) if not self._may_be_saved(name, tensor)]
        if bad:
            self._refuse(bad, step)
            return None
        self._refused = False
        figures = {name: float(value) for name, value in (metrics or {}).items()}
        position = {"step": operator.index(step), "epoch": operator.index(epoch)}
        return self.commit({**contents, HEADER: {"format": FORMAT, **position, "metrics": figures}})

    def commit(self, contents: dict[str, Any]) -> Path:
        """Write what ``save`` has made plain and checked. It touches no device and may run beside the training."""
        path = self.folder
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.folder, unmarked=False)  # first: they may be what fills the disk
            path = self._free_name(contents[HEADER]["step"])
            self._write(path, contents)
        except OSError as error:
            raise self._explained(error, path) from error
        self.prune()
        return path

    def prune(self) -> None:
        """Drop what the rules do not keep, and what killed writes left; ``save`` does so, once the new one is there.

        Marker first: killed in between, the rest is a leftover like any other. Without a whole checkpoint all stays.
        """
        whole = self._whole()
        keep = {info.path for info in whole[-self.keep_last :] + self._ranked(whole)[: self.keep_best]}
        # A run whose figures have turned NaN has finite weights and is lost all the same: the last good one stays.
        keep |= {info.path for info in [info for info in whole if _has_finite_metrics(info)][-1:]}
        try:
            for info in self.all() if whole else ():
                if info.path not in keep:
                    info.path.with_suffix(".json").unlink(missing_ok=True)
                    info.path.unlink(missing_ok=True)
            _remove_leftovers(self.folder, unmarked=bool(whole))
        except OSError as error:  # too many files are no reason to end a run
            _log.warning("Old checkpoints in %s could not be removed: %s", self.folder, error)

    def all(self) -> list[CheckpointInfo]:
        """Every checkpoint with a marker, the oldest write first."""
        found = [read_marker(path) for path in _files(self.folder) if _MARKER.fullmatch(path.name)]
        return sorted((info for info in found if info is not None), key=lambda info: info.sequence)

    def latest(self) -> CheckpointInfo | None:
        """The newest one whose size is right; its digest is checked when it is loaded."""
        whole = self._whole()
        return whole[-1] if whole else None

    def best(self) -> CheckpointInfo | None:
        """The best one by the metric, the earliest of equals; None if none has a finite figure of that name."""
        ranked = self._ranked(self._whole())
        return ranked[0] if ranked else None

    def load(self, which: str | Path = "last") -> tuple[dict[str, Any], CheckpointInfo]:
        """State (tensors on the CPU) and description of `last`, `best`, or of a path (file, marker or run folder).

        A damaged `last` or `best` is dropped with a warning for the next whole one; a path is taken or refused.

        Raises:
            ConfigError: nothing can be loaded; the text says what was looked for and what is there.
        """
        if which not in ("last", "best"):
            return self._load_path(Path(which))
        for path in _files(self.folder):
            if _DATA.fullmatch(path.name) and read_marker(path.with_suffix(".json")) is None:
                _log.warning(
                    "Checkpoint %s is left out: it has no readable marker, so its writing was cut short.", path
                )
        dropped = []
        for info in self.all()[::-1] if which == "last" else self._ranked(self.all()):
            try:
                return read_checkpoint(info)
            except UnusableError as reason:
                _log.warning("Checkpoint %s is dropped: it %s. The one before it is tried instead.", info.path, reason)
                if not isinstance(reason.__cause__, OSError):  # a file that may be readable tomorrow is not damaged
                    self._damaged.add((info.path, info.sequence))
                dropped.append(f"{info.path.name} {reason}")
        raise ConfigError([self._nothing(str(which), dropped)])

    def _load_path(self, path: Path) -> tuple[dict[str, Any], CheckpointInfo]:
        """One file as named; a folder stands for the newest checkpoint in it."""
        if path.is_dir():
            inner = path / "checkpoints"
            return Checkpoints(inner if inner.is_dir() else path).load("last")
        if path.suffix == ".json":
            path = path.with_suffix(".pt")
        if not path.exists():
            raise ConfigError([f"there is no checkpoint {path}; {_describe_folder(path.parent)}"])
        marker = read_marker(path.with_suffix(".json"))
        try:
            return read_checkpoint(marker or CheckpointInfo(path=path, step=0, epoch=0, metrics={}))
        except UnusableError as reason:
            raise ConfigError([f"the checkpoint {path} {reason}; {_describe_folder(path.parent)}"]) from reason

    def _may_be_saved(self, name: str, tensor: Tensor) -> bool:
        return is_finite(tensor) or (name in self.may_be_infinite and not bool(tensor.isnan().any()))

    def _refuse(self, names: list[str], step: int) -> None:
        """Said once for a stretch of refusals: a run that logs it at every step hides everything else."""
        level = logging.DEBUG if self._refused else logging.WARNING
        self._refused = True
        kept = self.latest()
        rest = f"the newest healthy one stays: {kept.path}" if kept else "there is no healthy one yet"
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        _log.log(
            level, "No checkpoint at step %d: NaN or infinity in %d tensors (%s); %s.", step, len(names), listed, rest
        )

    def _free_name(self, step: int) -> Path:
        """A name of no checkpoint: a step that is saved again must not spoil the one which is there.

        Data that a killed write left without its marker is no checkpoint: its name is free, and it is replaced.
        """
        taken = {path.stem for path in _files(self.folder) if path.suffix == ".json" or is_being_written(path)}
        stem, again = f"step-{step:08d}", 1
        while stem in taken:
            again += 1
            stem = f"step-{step:08d}-{again}"
        return self.folder / f"{stem}.pt"

    def _write(self, path: Path, contents: dict[str, Any]) -> None:
        """Data, then marker. The data file stays locked until the marker stands, so that no other save sweeps it."""
        with temporary_file(path) as (temporary, file):
            sink = DigestingFile(file)
            torch.save(contents, cast("Any", sink))
            sink.finish()
            try:
                publish(temporary, path, file)
                self._write_marker(path.with_suffix(".json"), contents[HEADER], sink)
            except BaseException:
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise

    def _write_marker(self, path: Path, header: dict[str, Any], data: DigestingFile) -> None:
        sequence = 1 + max((info.sequence for info in self.all()), default=0)
        with temporary_file(path) as (temporary, file):
            sink = DigestingFile(file)
            sink.write(marker_text(header, sequence=sequence, size=data.size, sha256=data.digest.hexdigest()))
            sink.finish()
            publish(temporary, path, file)

    def _whole(self) -> list[CheckpointInfo]:
        """Those not known to be hurt, by their size and by what loading found; digests would mean reading them all."""
        known = self._damaged
        return [
            info
            for info in self.all()
            if (info.path, info.sequence) not in known and size_on_disk(info.path) == info.size
        ]

    def _ranked(self, infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
        counted = [info for info in infos if math.isfinite(info.metrics.get(self.metric, math.nan))]
        return sorted(counted, key=lambda info: info.metrics[self.metric] * (1 if self.lower else -1))

    def _explained(self, error: OSError, path: Path) -> CheckpointError:
        """What went wrong in writing, and what to do about it."""
        try:
            free = f"{shutil.disk_usage(self.folder).free / 1e6:.1f} MB are free"
        except OSError:
            free = "free space unknown"
        denied = "writing is not allowed there: change the folder's permissions, or set run_dir to another place"
        cause = {
            errno.ENOSPC: f"the disk is full ({free}): free some space, or set run_dir to another disk",
            errno.EDQUOT: "your disk quota is used up: free some space, or set run_dir to another disk",
            errno.EFBIG: "the file is larger than the file system or the limit of this shell (ulimit -f) allows",
            errno.EACCES: denied,
            errno.EPERM: denied,
            errno.EROFS: "the file system is read-only: set run_dir to another place",
        }.get(error.errno or 0, str(error))
        kept: list[str] = []
        with contextlib.suppress(OSError):  # what cannot be written to may not be readable either
            kept = [info.path.name for info in self._whole()]
        rest = f"Whole checkpoints there from before: {', '.join(kept)}." if kept else "No checkpoint is there yet."
        explained = CheckpointError(f"The checkpoint {path} could not be written: {cause}. {rest}")
        explained.errno = error.errno
        return explained

    def _nothing(self, which: str, dropped: list[str]) -> str:
        parts = [f"no checkpoint that can be loaded as {which!r}; {_describe_folder(self.folder)}", *dropped]
        names = sorted({name for info in self.all() for name in info.metrics})
        if which == "best" and names and self.metric not in names:
            parts.append(f"none has the figure {self.metric!r} (checkpoint.metric); they have {', '.join(names)}")
        return "; ".join(parts) + ". Start anew, or give the path of another checkpoint"


def _has_finite_metrics(info: CheckpointInfo) -> bool:
    return all(math.isfinite(value) for value in info.metrics.values())


def _remove_leftovers(folder: Path, *, unmarked: bool) -> None:
    """Remove what a killed write left: temporary files; with `unmarked` also data or marker without the other."""
    names = {path.name for path in _files(folder)}
    for path in _files(folder):
        is_half = (_DATA.fullmatch(path.name) and path.with_suffix(".json").name not in names) or (
            _MARKER.fullmatch(path.name) and path.with_suffix(".pt").name not in names
        )
        if (_TEMPORARY.fullmatch(path.name) or (unmarked and is_half)) and not is_being_written(path):
            with contextlib.suppress(PermissionError, FileNotFoundError):
                path.unlink()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _describe_folder(folder: Path) -> str:
    """What a user may choose from."""
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    names = [path.name + _unfinished(path) for path in _files(folder) if path.suffix == ".pt"]
    return f"{folder} holds {', '.join(names)}" if names else f"{folder} holds no checkpoint"


def _unfinished(path: Path) -> str:
    return " (no marker)" if _DATA.fullmatch(path.name) and read_marker(path.with_suffix(".json")) is None else ""
