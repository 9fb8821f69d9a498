"""One checkpoint: a file of tensors and plain values, and the small JSON marker beside it. Reads files, writes none."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

FORMAT = 1
HEADER = "checkpoint"
"""Key of the file that holds format, step, epoch and metrics beside the state, for files that lost their marker."""


class UnusableError(Exception):
    """Why a file cannot be loaded, as the end of a sentence that begins with its name."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What is known of a checkpoint without loading it."""

    path: Path
    step: int
    """Batches trained on when it was written."""
    epoch: int
    metrics: Mapping[str, float]
    sequence: int = 0
    """Counts the writes in a folder: the newest is the last written, which after a rollback is not the last step."""
    size: int | None = None
    """Bytes; None for a file without a marker, of which nothing can be held against it."""
    sha256: str | None = None


def size_on_disk(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def read_marker(path: Path) -> CheckpointInfo | None:
    """What a marker says, or None if there is none that can be read."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        metrics = {str(name): float(value) for name, value in facts["metrics"].items()}
        numbers = {name: operator.index(facts[name]) for name in ("step", "epoch", "sequence")}
        size, sha256 = operator.index(facts["bytes"]), str(facts["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return CheckpointInfo(path=path.with_suffix(".pt"), metrics=metrics, size=size, sha256=sha256, **numbers)


def read_checkpoint(info: CheckpointInfo) -> tuple[dict[str, Any], CheckpointInfo]:
    """State and description, held against the marker's size and digest if `info` has them."""
    size = size_on_disk(info.path)
    if size is None:
        raise UnusableError("is gone, though its marker is there")
    if info.size is not None and size != info.size:
        raise UnusableError(f"is damaged: it has {size} bytes, {info.size} were written")
    try:
        with info.path.open("rb") as file:
            if info.sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != info.sha256:
                raise UnusableError("is damaged: its bytes are not those that were written (SHA-256 differs)")
        contents = _load_plain(info.path)
    except OSError as error:
        raise UnusableError(f"cannot be read ({error})") from error
    header = contents.pop(HEADER, None) if isinstance(contents, dict) else None
    if not isinstance(header, dict) or not {"format", "step", "epoch", "metrics"} <= header.keys():
        raise UnusableError(f"is no checkpoint of a run: it has no entry {HEADER!r} with step, epoch and metrics")
    if header["format"] > FORMAT:
        raise UnusableError(f"is of format {header['format']} and this version reads up to {FORMAT}: update it")
    if info.size is None:
        info = CheckpointInfo(path=info.path, **{name: header[name] for name in ("step", "epoch", "metrics")})
    return cast("dict[str, Any]", contents), info


def _load_plain(path: Path) -> Any:
    """What torch reads without running any code in the file. Damage shows as nearly any exception, so all are taken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on loading such files; what is raised here says enough
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):  # these say nothing of the file
        raise
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if named:
            reason = f"is refused: it asks for {named[1]}, and a file that names code can run it when it is loaded"
        else:
            first_line = (str(error).splitlines() or [""])[0][:120]
            reason = f"cannot be read as a checkpoint ({type(error).__name__}: {first_line})"
        raise UnusableError(reason) from error


def marker_text(header: Mapping[str, Any], *, sequence: int, size: int, sha256: str) -> bytes:
    """The marker's content. Strict JSON has no NaN: such figures are written as text, which float() reads back."""
    metrics = {name: value if math.isfinite(value) else str(value) for name, value in header["metrics"].items()}
    facts = {**header, "metrics": metrics, "sequence": sequence, "finite": True, "bytes": size, "sha256": sha256}
    return (json.dumps(facts, indent=1, allow_nan=False) + "\n").encode()
