"""Who produced which non-finite tensor: the records that the tracer walks back along.

Holds references to non-finite tensors only, so that their addresses are not used again; reads values, changes none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from safe_trainer.utils.source_lines import Place

Key = tuple[str, int | None, int]

WRITERS_KEPT = 64
"""Regions remembered for one storage; a loop that fills a buffer row by row would otherwise cost rows squared."""


@dataclass(frozen=True)
class Operand:
    """One tensor that an operation read. Minimum and maximum are over its finite elements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    minimum: float | None = None
    maximum: float | None = None
    bad_count: int = 0
    value: float | None = None
    """Its element at the first bad element of the result, where shapes allow to say."""


@dataclass(frozen=True)
class Damage:
    """How a result went bad."""

    value: str
    """'nan' if any element is NaN, else 'inf' or '-inf'."""
    bad_count: int
    total: int
    first_index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False, slots=True)
class Event:
    """One operation with a non-finite result, or one tensor that came in non-finite (then `parents` is empty)."""

    index: int
    operation: str
    kind: str
    damage: Damage
    node: str | None = None
    place: Place | None = None
    applied: Place | None = None
    module: str | None = None
    name: str | None = None
    rows: tuple[int, ...] = ()
    parents: list[Event] = field(default_factory=list)
    legal: bool = False
    """Its only non-finite values are minus infinities that somebody wrote on purpose, as masks do."""
    reduces: bool = False
    """Its result has fewer elements than the bad tensors that it read."""
    writes: bool = False
    """It puts given values into a tensor, as an assignment does."""
    passed_on: bool = False
    """Some operation read it, and either made it finite or is an event itself."""
    operands: tuple[Operand, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def has_nan(self) -> bool:
        """Whether a NaN is among its values."""
        return self.damage.value == "nan"

    @property
    def origin(self) -> bool:
        """Whether the fault starts here: nothing non-finite went in, save masks that it turned into NaN."""
        return not self.legal and all(parent.legal for parent in self.parents)


def plain(value: object) -> Tensor | None:
    """The dense floating or complex tensor that holds a tensor's values, None if it can hold no infinity."""
    if not isinstance(value, Tensor) or value.is_meta:
        return None
    if hasattr(value, "__tensor_flatten__"):  # a wrapper subclass: the values are in the tensors that it is made of
        parts = [dense for name in value.__tensor_flatten__()[0] if (dense := plain(getattr(value, name))) is not None]
        return next((part for part in parts if is_bad(part)), parts[0] if parts else None)
    if value.is_nested:
        value = value.values()
    if value.layout is torch.sparse_coo:
        value = value._values()
    elif value.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        value = value.values()
    if value.layout is not torch.strided or not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return None
    return value


def bad_mask(tensor: Tensor) -> Tensor:
    """True where an element is NaN or infinite; same shape."""
    return ~torch.isfinite(tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor)


def is_bad(tensor: Tensor) -> bool:
    """Whether any element is NaN or infinite. Waits for the device: only a replay may call it."""
    try:
        return bool(bad_mask(tensor).any())
    except RuntimeError:  # a backend or wrapper without these operations: nothing can be said, so nothing is said
        return False


def is_mask(tensor: Tensor) -> bool:
    """Whether it holds nothing but 0 and -inf: an additive attention mask, not data gone wrong."""
    return not tensor.is_complex() and bool(((tensor == 0) | (tensor == -math.inf)).all())


def storage_key(tensor: Tensor) -> Key | None:
    """Address of a tensor's storage; None where there is no memory behind it."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    return (tensor.device.type, tensor.device.index, address) if address else None


def measure(tensor: Tensor) -> Damage:
    """Count and find the bad elements of a tensor that has some."""
    dtype = tensor.dtype
    tensor = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
    bad = bad_mask(tensor)
    first = int(bad.flatten().to(torch.uint8).argmax())
    index = tuple(int(i) for i in np.unravel_index(first, tuple(tensor.shape))) if tensor.dim() else ()
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    value = "nan" if bool(real.isnan().any()) else "inf" if bool((real == math.inf).any()) else "-inf"
    return Damage(value, int(bad.sum()), tensor.numel(), index, tuple(tensor.shape), dtype)


def glance(tensor: Tensor) -> Damage:
    """What a bad tensor needs to be followed: whether it holds a NaN. Most results after a fault are never reported."""
    value = "nan" if bool(tensor.isnan().any()) else "inf"
    return Damage(value, 0, tensor.numel(), (), tuple(tensor.shape), tensor.dtype)


def survey(name: str, tensor: Tensor, damage: Damage | None = None) -> Operand:
    """Shape, type and range of an operand, and its element where the result first went bad."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    dense = plain(tensor)
    if dense is None:
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel() or dtype is torch.bool:
            return Operand(name, shape, dtype)
        dense = tensor
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    wide = (real if real.dtype is torch.float64 else real.float()) if real.is_floating_point() else real.long()
    bad = bad_mask(wide)
    finite = wide[~bad]
    low, high = (float(edge) for edge in finite.aminmax()) if finite.numel() else (None, None)
    single = dense.abs() if dense.is_complex() else dense
    return Operand(name, shape, dtype, low, high, int(bad.sum()), None if damage is None else _value_at(single, damage))


def _value_at(tensor: Tensor, damage: Damage) -> float | None:
    try:
        return float(tensor.expand(damage.shape)[damage.first_index])
    except RuntimeError:  # not of a shape that broadcasts to the result
        return None


def flatten_batch(batch: object, name: str = "batch", depth: int = 5) -> Iterator[tuple[str, Tensor]]:
    """Every tensor and NumPy array (as a tensor on the same memory) in a batch, with the expression that gives it."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, np.ndarray):
        if batch.dtype.kind in "fc" and batch.dtype.isnative and batch.flags.writeable:
            yield name, torch.from_numpy(batch)
    elif depth and isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from flatten_batch(value, f"{name}[{key!r}]", depth - 1)
    elif depth and isinstance(batch, (list, tuple)):
        for position, value in enumerate(batch):
            yield from flatten_batch(value, f"{name}[{position}]", depth - 1)
    elif depth and is_dataclass(batch):
        for entry in fields(batch):
            yield from flatten_batch(getattr(batch, entry.name), f"{name}.{entry.name}", depth - 1)
    elif depth and hasattr(batch, "__dict__") and not isinstance(batch, (type, torch.nn.Module)):
        for attribute, value in vars(batch).items():
            yield from flatten_batch(value, f"{name}.{attribute}", depth - 1)


class Producers:
    """Which event wrote the bad elements of which region of memory.

    Keyed by the address of the storage, because views, and saved tensors when backward reads them, are new tensors
    on the same storage.
    """

    def __init__(self) -> None:
        self._writers: dict[Key, list[tuple[Event, Tensor]]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self._writers) and storage_key(tensor) in self._writers

    def add(self, tensor: Tensor, event: Event) -> None:
        """Note that `event` wrote `tensor`, of which some elements are bad."""
        key = storage_key(tensor)
        if key is None:
            return
        # An alias keeps the memory without raising the tensor's own count, by which autograd decides to copy gradients.
        writers = self._writers.setdefault(key, [])
        writers.append((event, tensor.detach()))
        if len(writers) > WRITERS_KEPT:
            del writers[1]

    def forget_healed(self, tensor: Tensor) -> None:
        """Drop the writers on this storage whose elements have all been overwritten by finite ones."""
        key = storage_key(tensor)
        if key is None or key not in self._writers:
            return
        left = [(event, alias) for event, alias in self._writers[key] if _readable(alias) and is_bad(alias)]
        if left:
            self._writers[key] = left
        else:
            del self._writers[key]

    def of(self, tensor: Tensor) -> list[Event]:
        """The events that wrote the bad elements of `tensor`; empty when nobody on record did."""
        key = storage_key(tensor)
        writers = self._writers.get(key, []) if key is not None else []
        if len(writers) <= 1:
            return [event for event, _ in writers]
        found: list[Event] = []
        left = _positions(tensor)
        for event, alias in reversed(writers):
            if not _readable(alias):
                continue
            mine = torch.isin(left, _positions(alias))
            if bool(mine.any()):
                found.append(event)
                left = left[~mine]
        return list(dict.fromkeys(found))


def _readable(alias: Tensor) -> bool:
    """False once the storage was cut down under the alias, as sharded training does with its parameters."""
    span = sum((size - 1) * stride for size, stride in zip(alias.shape, alias.stride(), strict=True)) + 1
    return alias.untyped_storage().nbytes() >= (alias.storage_offset() + span) * alias.itemsize


def _positions(tensor: Tensor) -> Tensor:
    """Byte offsets of the bad elements in the storage, of both halves of a complex number as its real view has them."""
    indices = bad_mask(tensor).nonzero()
    strides = torch.tensor(tensor.stride(), dtype=torch.long, device=indices.device)
    offsets = ((indices * strides).sum(dim=1) + tensor.storage_offset()) * tensor.itemsize
    if not tensor.is_complex():
        return offsets
    half = tensor.itemsize // 2
    return torch.cat((offsets, offsets + half))


def overlap(operand: Tensor, result: Tensor, test: Callable[[Tensor], Tensor]) -> bool:
    """Whether `test` holds for both at one element at least, in an operation that works element by element."""
    try:
        return bool((test(operand).expand(result.shape) & test(result)).any())
    except RuntimeError:  # shapes that do not broadcast: then it is not element by element
        return True


def non_finite_numbers(arguments: Iterable[Any]) -> list[float]:
    """The NaN and infinite Python numbers among an operation's arguments, lists included."""
    flat = itertools.chain.from_iterable(a if isinstance(a, (list, tuple)) else (a,) for a in arguments)
    return [number for number in flat if isinstance(number, float) and not math.isfinite(number)]
