"""Batches for the checks, read so that training finds its loader as if nobody had looked.

Reads loaders inside `preserved`, which puts generators and attributes back. Two kinds need more: a DataLoader is read
through a shallow copy in this process, since its persistent workers would live on; an iterator can be read once only,
so what was read is handed back.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from safe_trainer.preflight.outcome import ProgramFailed, Skip
from safe_trainer.utils import rng


class HandedBack:
    """An iterator together with the batches that were read from it before; each is given once, in its order."""

    def __init__(self, batches: list[Any], rest: Iterator[Any], after: dict[str, Any] | None) -> None:
        self._batches, self._rest, self._after = batches, rest, after

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._batches:
            return next(self._rest)
        batch = self._batches.pop(0)
        if self._after is not None:  # reading it drew random numbers, and whoever trains goes on after them
            rng.restore(self._after)
            self._after = None
        return batch


def is_read_once(loader: Any) -> bool:
    """Whether the loader is an iterator itself."""
    return iter(loader) is loader if hasattr(loader, "__next__") else False


def read(loader: Any, count: int) -> list[Any]:
    """The first batches of a loader that can be read again.

    Raises:
        ProgramFailed: reading it raises.
        Skip: it is an iterator.
    """
    if is_read_once(loader):
        raise Skip("the loader is an iterator, which can be read once only")
    try:
        return list(itertools.islice(iter(in_this_process(loader)), count))
    except Exception as error:
        raise ProgramFailed(f"the loader raised {type(error).__name__}: {error}") from error


def read_once(loader: Iterator[Any], count: int) -> tuple[list[Any], HandedBack]:
    """The first batches of an iterator, and what to train on in its place.

    Where reading draws from the global generators only one batch is read: the draws of the second would have to come
    after those of the first training step.
    """
    began = rng.capture()
    batches = list(itertools.islice(loader, 1))
    after = rng.capture()
    drew = not _same(began, after)
    if not drew:
        batches += itertools.islice(loader, count - 1)
    return [clone(batch) for batch in batches], HandedBack(batches, loader, after if drew else None)


def in_this_process(loader: Any) -> Any:
    """A DataLoader without workers over the same data; anything else as it is."""
    if not isinstance(loader, DataLoader):
        if hasattr(loader, "set_position"):
            loader.set_position(0, 0)
        return loader
    alone = copy.copy(loader)
    vars(alone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, _iterator=None)
    if hasattr(alone, "_DataLoader__multiprocessing_context"):
        vars(alone)["_DataLoader__multiprocessing_context"] = None
    return alone


def clone(value: Any) -> Any:
    """A batch of its own: a step may change what it is given."""
    if isinstance(value, Tensor):
        return value.detach().clone() if not value.requires_grad else value.detach().clone().requires_grad_()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(clone, value))
    if type(value) in (list, tuple):
        return type(value)(map(clone, value))
    if type(value) is dict:
        return {key: clone(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied is shared, as it is between two training steps
        return value


def cut(batch: Any, size: int) -> Any:
    """The first `size` samples of a batch whose tensors all have the samples in front; the whole batch otherwise."""
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors(batch)}
    if len(lengths) != 1 or min(lengths) <= size:
        return batch
    return _cut(batch, size)


def _cut(value: Any, size: int) -> Any:
    if isinstance(value, Tensor):
        return value[:size]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(item, size) for item in value))
    if type(value) in (list, tuple):
        return type(value)([_cut(item, size) for item in value])
    if type(value) is dict:
        return {key: _cut(item, size) for key, item in value.items()}
    return value


def tensors(value: Any) -> Iterable[Tensor]:
    """Every tensor of a nested batch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return all(_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
