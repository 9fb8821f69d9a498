"""How samples come: sorted by class, changed by being read, or made twice by workers with the same random numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import clone, tensors
from safe_trainer.preflight.samples import Samples
from safe_trainer.utils import rng

PURE = 0.95
"""Mean share of a batch's largest class from which batches count as sorted; mixed ones have little more than it has."""
MIXED = 0.7
"""Largest class of all samples, at most: more, and batches of one class are chance."""


def not_shuffled(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """Batches of one class each, of data that have several."""
    if train.classes is None or len(train.pairs) < 4 or min(len(y) for _, y in train.pairs[:-1]) < 8:
        return
    overall = _largest(train.classes)
    shares = [_largest(y.flatten()) for _, y in train.pairs]
    if overall > MIXED or sum(shares) / len(shares) < max(PURE, overall + 0.2):
        return
    yield finding(
        "data.not_shuffled",
        "warning",
        evidence=f"{sum(share == 1 for share in shares)} of {len(shares)} batches hold one class only, though the "
        f"largest class has {overall:.0%} of the samples",
        cause="the data lie in order of their classes, and the loader does not shuffle: the network is dragged to one "
        "class after the other",
        remedy="shuffle=True in the training loader",
    )


def _largest(classes: Tensor) -> float:
    return float(classes.unique(return_counts=True)[1].max()) / len(classes)


def changed_by_reading(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """A stored sample that is another one after it was read, and gives another one when it is read again."""
    dataset = getattr(program.train_loader, "dataset", None)
    if dataset is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return
    stored = dict(_stored(dataset, len(dataset)))
    if not stored:
        return
    index = len(dataset) // 2
    before = {name: np.array(value[index], copy=True) for name, value in stored.items()}
    try:
        with rng.isolated():
            torch.manual_seed(0)
            first = [tensor.clone() for tensor in tensors(clone(dataset[index]))]
            torch.manual_seed(0)
            second = [tensor.clone() for tensor in tensors(clone(dataset[index]))]
    except Exception:  # a data set that wants other indices is not looked at
        return
    moved = [name for name, value in stored.items() if not _equal(before[name], np.asarray(value[index]))]
    if not moved or all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
        return
    yield finding(
        "data.mutated_inplace",
        "error",
        where=type(dataset).__name__,
        evidence=f"reading sample {index} twice gives two different samples, and what {type(dataset).__name__}."
        f"{moved[0]} holds of it has changed",
        cause="the data set computes in place (-=, /=, sub_, normalize_ on a view) on the array that it keeps: each "
        "visit does it once more",
        remedy="work on a copy: x = self.data[i].clone() (NumPy: .copy()), or use x - mean instead of x -= mean",
    )


def _stored(dataset: Any, length: int) -> Iterator[tuple[str, Any]]:
    for name, value in vars(dataset).items() if hasattr(dataset, "__dict__") else ():
        is_array = (isinstance(value, Tensor) and value.device.type == "cpu") or isinstance(value, np.ndarray)
        if is_array and len(value.shape) and len(value) == length:
            yield name, value


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    return bool(np.array_equal(first, second, equal_nan=first.dtype.kind == "f"))


def same_workers(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """Workers that hand out the same batch each: their random numbers are the same."""
    loader = program.train_loader
    if not isinstance(loader, DataLoader) or loader.num_workers < 2 or clock.left() < clock.seconds / 4:
        return
    alone = copy.copy(loader)
    vars(alone).update(persistent_workers=False, _iterator=None)
    iterator = iter(alone)
    try:
        batches = [clone(batch) for batch in itertools.islice(iterator, loader.num_workers)]
    finally:
        del iterator
    if len(batches) < 2:
        return
    pairs = zip(tensors(batches[0]), tensors(batches[1]), strict=False)
    floats = [(one, other) for one, other in pairs if one.is_floating_point() and one.numel() > 8]
    if not floats or not all(one.shape == other.shape and torch.equal(one, other) for one, other in floats):
        return
    if all(bool((one == one.flatten()[0]).all()) for one, _ in floats):
        return
    yield finding(
        "data.worker_seed",
        "error",
        evidence=f"the first batches of two of the {loader.num_workers} workers are the same to the bit",
        cause="each worker is a copy of the process with the same generator: NumPy's and any that the data set holds "
        "are not seeded anew, so workers, and epochs, repeat each other",
        remedy="draw from torch's generator, which is seeded for each worker, or seed in worker_init_fn from "
        "torch.initial_seed(); make generators in there, not in __init__",
    )
