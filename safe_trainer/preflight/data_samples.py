"""What the data check looks at: samples as training gets them, read batch by batch into tables. Only reads the loaders.

The runner puts generators, samplers and data sets back afterwards, so a loader is read here like any iterable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from safe_trainer.data import Positioned
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import ProgramFailed
from safe_trainer.preflight.reading import in_this_process, is_read_once

SAMPLES = 20_000
"""Samples that are kept of a split at most: enough to see classes of a thousandth twenty times."""
ELEMENTS = 2**24
"""Numbers that are kept of a split at most: 64 MB of float32."""
TARGET_NAMES = frozenset({"target", "targets", "label", "labels", "y"})
"""Keys under which a batch in a mapping holds its targets, as Hugging Face, torchvision and most tutorials have it."""


@dataclass
class Table:
    """Samples of one split in the order in which they came."""

    pieces: dict[str, list[Tensor]] = field(default_factory=dict)
    """The tensors of each field, one a batch, on the CPU."""
    sizes: list[int] = field(default_factory=list)
    """Samples in each batch."""
    aligned: bool = True
    """Whether all tensors of each batch have the samples in front."""
    indices: list[Any] = field(default_factory=list)
    """Places of the samples in the data set, as the sampler gave them; empty if unknown."""
    complete: bool = False
    """Whether this is a whole epoch."""
    targets: set[str] = field(default_factory=set)
    """Fields that are targets."""

    def __len__(self) -> int:
        return sum(self.sizes)

    def whole(self, name: str) -> Tensor | None:
        """A field of all samples, samples in front; None where batches differ in shape or have no common length."""
        pieces = self.pieces.get(name, [])
        if not self.aligned or len({(piece.shape[1:], piece.dtype) for piece in pieces}) != 1:
            return None
        return torch.cat(pieces)

    def inputs(self) -> dict[str, Tensor]:
        """Every field that is no target, whole."""
        return self._wholes([name for name in self.pieces if name not in self.targets])

    def outcomes(self) -> dict[str, Tensor]:
        """Every field that is a target, whole."""
        return self._wholes([name for name in self.pieces if name in self.targets])

    def _wholes(self, names: list[str]) -> dict[str, Tensor]:
        return {name: whole for name in names if (whole := self.whole(name)) is not None}

    def only_input(self) -> Tensor | None:
        """The input where there is just one field of it."""
        names = [name for name in self.pieces if name not in self.targets]
        return self.whole(names[0]) if len(names) == 1 else None

    def place(self, row: int) -> str:
        """Where the sample of this row is found, in words."""
        if row < len(self.indices):
            return f"sample {self.indices[row]} of the data set"
        return f"sample {row} as they are read"


def leaves(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by name: input and target of a pair, the keys of a mapping, else their positions."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return {**_named("input", batch[0]), **_named("target", batch[1])}
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        batch = batch._asdict()
    if isinstance(batch, Mapping):
        return {name: tensor for key, value in batch.items() for name, tensor in _named(str(key), value).items()}
    return _named("batch", batch)


def _named(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        strided = value.layout is torch.strided and not value.is_complex() and not value.is_quantized
        return {name: value} if strided else {}
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {}
    return {inner: tensor for key, item in items for inner, tensor in _named(f"{name}.{key}", item).items()}


def is_target(name: str) -> bool:
    """Whether a field of this name is a target, going by the name alone."""
    return name.partition(".")[0] in TARGET_NAMES


def table_of(batches: Iterator[Any] | list[Any], seconds: float, indices: list[Any] | None = None) -> Table:
    """The samples of batches, as many as fit the time and the memory."""
    table, clock, elements, broken_off = Table(), Clock(seconds), 0, False
    for batch in batches:
        found = {name: tensor.detach() for name, tensor in leaves(batch).items()}
        _append(table, found)
        elements += sum(tensor.numel() for tensor in found.values())
        if clock.left() == 0 or len(table) >= SAMPLES or elements >= ELEMENTS:
            broken_off = True
            break
    table.complete = not broken_off
    table.targets = {name for name in table.pieces if is_target(name)}
    flat = [index for batch in (indices or []) for index in (batch if isinstance(batch, (list, tuple)) else [batch])]
    table.indices = flat[: len(table)] if table.aligned and len(flat) >= len(table) else []
    return table


def _append(table: Table, found: dict[str, Tensor]) -> None:
    lengths = {tensor.shape[0] if tensor.dim() else -1 for tensor in found.values()}
    fields = table.pieces.keys()
    if len(lengths) != 1 or -1 in lengths or (fields and fields != found.keys()):
        table.aligned = False
    table.sizes.append(max(0, min(lengths, default=0)))
    for name, tensor in found.items():
        table.pieces.setdefault(name, []).append(tensor.cpu())


class _Noted:
    """A sampler that writes down what it gives."""

    def __init__(self, sampler: Any, notes: list[Any]) -> None:
        self.sampler, self.notes = sampler, notes

    def __iter__(self) -> Iterator[Any]:
        for item in self.sampler:
            self.notes.append(item)
            yield item

    def __len__(self) -> int:
        return len(self.sampler)


def read_table(loader: Any, seconds: float, batches: int | None = None) -> Table:
    """The samples of a loader that can be read again, in its own order; empty where it is an iterator.

    Args:
        seconds: how long reading may take; the batch that passes it is the last one.
        batches: how many to read at most.

    Raises:
        ProgramFailed: the loader raises.
    """
    if loader is None or batches == 0 or is_read_once(loader):
        return Table()
    notes: list[Any] = []
    alone = in_this_process(loader)
    if isinstance(alone, Positioned):
        notes = [batch.tolist() for batch in alone.batches(0)]
    if isinstance(alone, DataLoader) and not isinstance(alone.dataset, IterableDataset):
        name = "batch_sampler" if alone.batch_sampler is not None else "sampler"
        vars(alone)[name] = _Noted(getattr(alone, name), notes)
    limit = math.inf if batches is None else batches
    try:
        return table_of(_first(alone, limit), seconds, notes)
    except Exception as error:
        raise ProgramFailed(f"the loader raised {type(error).__name__}: {error}") from error


def _first(loader: Any, limit: float) -> Iterator[Any]:
    for count, batch in enumerate(loader, 1):
        yield batch
        if count >= limit:
            return


def dataset_of(loader: Any) -> Any:
    """The data set behind a loader where samples can be asked for by number; None otherwise."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        return None
    return dataset if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") else None


def describe(values: Tensor) -> str:
    """Shape of one sample, dtype, mean and deviation, in words."""
    shape, dtype = tuple(values.shape[1:]), str(values.dtype).removeprefix("torch.")
    if not values.is_floating_point():
        return f"{shape} {dtype} from {values.min()} to {values.max()}" if values.numel() else f"{shape} {dtype}"
    numbers = values.float()
    return f"{shape} {dtype} mean {float(numbers.mean()):.3g} sd {float(numbers.std(unbiased=False)):.3g}"
