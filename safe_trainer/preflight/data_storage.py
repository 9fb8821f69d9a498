"""Data sets that reading changes. Reads single samples under generators that are set back before each reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.data_samples import dataset_of, leaves
from safe_trainer.preflight.objects import DEPTH, LARGEST, LONG, generator_back
from safe_trainer.preflight.outcome import ProgramFailed, finding
from safe_trainer.preflight.program import Program
from safe_trainer.utils import rng

EXACT = 1e-3
"""How well, over the spread of a sample, one linear map must lead from reading to reading: rounding is far below."""
ROWS = 2
"""Rows of a stored array that reading one sample may touch."""


def mutated(program: Program, clock: Clock) -> list[Finding]:
    """A sample that is another one at each reading because reading it changes what is stored."""
    for loader, name in ((program.train_loader, "train_loader"), (program.val_loader, "val_loader")):
        dataset = dataset_of(loader)
        if dataset is None or len(dataset) < 2 or clock.left() == 0:
            continue
        try:
            found = _mutated(dataset, name)
        except Exception as error:
            raise ProgramFailed(f"the data set raised {type(error).__name__}: {error}") from error
        if found:
            return [found]
    return []


def _mutated(dataset: Any, name: str) -> Finding | None:
    first, other = 0, len(dataset) - 1
    generators = [back for thing in _inner(dataset, 2 * DEPTH, set()) if (back := generator_back(thing)) is not None]
    began = rng.capture()

    def sample(index: int) -> dict[str, Tensor]:
        rng.restore(began)
        for back in generators:
            back()
        return {key: value.detach().clone().double() for key, value in leaves(_as_tensors(dataset[index])).items()}

    stored = list(_arrays(dataset))
    before = [array.copy() for array in stored]
    aside = sample(other)
    readings = [sample(first) for _ in range(3)]
    again = sample(other)
    for key, value in readings[0].items():
        one, two, three = value, readings[1].get(key), readings[2].get(key)
        if two is None or three is None or one.shape != two.shape != three.shape or not _differ(one, two, three):
            continue
        touched = [array for array, old in zip(stored, before, strict=True) if _touched(array, old)]
        if touched or _drifts(one, two, three, aside.get(key), again.get(key)):
            return _found(name, key, one, two, three, type(dataset).__name__, len(touched))
    return None


def _differ(one: Tensor, two: Tensor, three: Tensor) -> bool:
    return bool(one.numel()) and not torch.equal(one, two) and not torch.equal(two, three)


def _touched(array: np.ndarray, old: np.ndarray) -> bool:
    """Whether a stored array has changed in those few rows that the readings were of."""
    changed = (array != old) & ~((array != array) & (old != old))
    rows = changed.reshape(len(array), -1).any(1) if array.ndim else changed.reshape(1)
    return bool(rows.any()) and len(rows) > 2 * ROWS and int(rows.sum()) <= ROWS


def _drifts(one: Tensor, two: Tensor, three: Tensor, aside: Tensor | None, again: Tensor | None) -> bool:
    """Whether one linear map, applied anew, leads from each reading to the next, for another sample as well."""
    if one.numel() < 4 or aside is None or again is None or aside.shape != one.shape or float(one.std()) == 0:
        return False
    x, y = one.reshape(-1), two.reshape(-1)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    offset = y.mean() - slope * x.mean()
    return all(_close(slope * a + offset, b) for a, b in ((one, two), (two, three), (aside, again)))


def _close(guess: Tensor, truth: Tensor) -> bool:
    return bool((guess - truth).abs().max() <= EXACT * (truth.std() + truth.mean().abs()).clamp_min(1e-12))


def _as_tensors(sample: Any) -> Any:
    """A sample with arrays and numbers as tensors."""
    if isinstance(sample, np.ndarray) and sample.dtype.kind in "fiub":
        return torch.from_numpy(sample.copy())
    if type(sample) in (list, tuple):
        return type(sample)(map(_as_tensors, sample))
    return {key: _as_tensors(value) for key, value in sample.items()} if type(sample) is dict else sample


def _inner(thing: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Generators, tensors and arrays that an object keeps, and those of the objects within it."""
    if thing is None or id(thing) in seen or isinstance(thing, (str, bytes, int, float, type)) or depth < 0:
        return
    seen.add(id(thing))
    if isinstance(thing, (Tensor, np.ndarray)) or generator_back(thing) is not None:
        yield thing
    elif isinstance(thing, (list, tuple)):
        for value in thing if len(thing) <= LONG else ():
            yield from _inner(value, depth - 1, seen)
    elif isinstance(thing, dict):
        yield from _inner(list(thing.values()), depth - 1, seen)
    elif hasattr(thing, "__dict__"):
        yield from _inner(list(vars(thing).values()), depth - 1, seen)


def _arrays(dataset: Any) -> Iterator[np.ndarray]:
    """The numbers that the data set keeps, without a copy."""
    for thing in _inner(dataset, 2 * DEPTH, set()):
        if isinstance(thing, np.ndarray) and thing.dtype.kind in "fiub" and 0 < thing.size <= LARGEST:
            yield thing
        elif isinstance(thing, Tensor) and 0 < thing.numel() <= LARGEST and _has_numpy(thing):
            yield thing.numpy()


def _has_numpy(thing: Tensor) -> bool:
    on_cpu = thing.device.type == "cpu" and thing.layout is torch.strided
    return on_cpu and not thing.requires_grad and thing.dtype is not torch.bfloat16


def _found(place: str, key: str, one: Tensor, two: Tensor, three: Tensor, kind: str, touched: int) -> Finding:
    steps = " -> ".join(f"mean {float(v.mean()):.3g} sd {float(v.std(unbiased=False)):.3g}" for v in (one, two, three))
    stored = (
        f"; {touched} stored array{'s' if touched != 1 else ''} changed in the rows that were read" if touched else ""
    )
    return finding(
        "data.mutated_inplace",
        "error",
        where=f"{place}.dataset ({kind})",
        evidence=f"sample 0, read three times under the same random state, has {key}: {steps}{stored}",
        cause="an operation in place (sub_, div_, -=, out=) on a view of what the data set stores",
        remedy="work on a copy: tensor.clone(), array.copy(); or use operations without an underscore",
    )
