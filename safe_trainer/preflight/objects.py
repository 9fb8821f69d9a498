"""What a user's own objects (loaders, data sets, samplers, transforms) keep for themselves, and the way back.

Reads their attributes; writes only what has changed since. Tensors and arrays are kept up to a size: what is larger is
data, and no loader rewrites that between two batches without it being a fault of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LARGEST = 2**24
"""Elements of a tensor or array up to which it is kept: 64 MB of float32, copied in some ten milliseconds."""
DEPTH = 5
"""How deep objects in objects are followed: loader, sampler, data set, its inner data set, its transforms."""
LONG = 256
"""Entries of a list above which they are samples, and only the list itself is kept."""

Back = Callable[[], Any]


def objects_back(*roots: Any) -> list[Back]:
    """What puts all that these objects and those within them keep back to how it is now."""
    seen: set[int] = set()
    return [back for root in roots for back in _ways(root, DEPTH, seen)]


def _ways(thing: Any, depth: int, seen: set[int]) -> Iterator[Back]:
    if thing is None or id(thing) in seen or isinstance(thing, (type, str, bytes, int, float, nn.Module)):
        return
    seen.add(id(thing))
    own = _state_of(thing)
    if own is not None:
        yield own
        return
    if depth == 0:
        return
    if isinstance(thing, (list, tuple, dict, set)):
        yield from _of_container(thing, depth, seen)
    elif hasattr(thing, "__dict__") and type(thing).__module__.partition(".")[0] != "builtins":
        names = dict(vars(thing))
        yield _attributes(thing, names)
        for value in names.values():
            yield from _ways(value, depth - 1, seen)


def _of_container(thing: Any, depth: int, seen: set[int]) -> Iterator[Back]:
    if not isinstance(thing, tuple):
        kept = thing.copy()
        yield lambda: _refill(thing, kept)
    if len(thing) <= LONG:
        for value in thing.values() if isinstance(thing, dict) else thing:
            yield from _ways(value, depth - 1, seen)


def _refill(thing: Any, kept: Any) -> None:
    if isinstance(thing, list):
        thing[:] = kept
    else:
        thing.clear()
        thing.update(kept)


def _attributes(thing: Any, names: dict[str, Any]) -> Back:
    def back() -> None:
        now = vars(thing)
        for name in [name for name in now if name not in names]:
            del now[name]
        now.update(names)  # past __setattr__, which a DataLoader guards

    return back


def _state_of(thing: Any) -> Back | None:
    """The way back for generators, tensors and arrays; None for anything else."""
    if isinstance(thing, Tensor):
        return _tensor_back(thing)
    if isinstance(thing, np.ndarray):
        return _array_back(thing)
    return generator_back(thing)


def generator_back(thing: Any) -> Back | None:
    """What sets a random generator back to how it is now; None for anything else."""
    if isinstance(thing, torch.Generator):
        return partial(thing.set_state, thing.get_state())
    if isinstance(thing, random.Random):
        return partial(thing.setstate, thing.getstate())
    if isinstance(thing, np.random.RandomState):
        return partial(thing.set_state, thing.get_state())
    if isinstance(thing, np.random.Generator):
        return partial(setattr, thing.bit_generator, "state", thing.bit_generator.state)
    return None


def _tensor_back(tensor: Tensor) -> Back:
    if tensor.numel() > LARGEST or tensor.is_inference() or tensor.layout is not torch.strided:
        return lambda: None
    kept, version = tensor.detach().clone(), tensor._version

    @torch.no_grad()
    def back() -> None:
        if tensor._version != version or not torch.equal(tensor.detach(), kept):  # NumPy writes past the version
            tensor.detach().copy_(kept)

    return back


def _array_back(array: np.ndarray) -> Back:
    if array.size > LARGEST or array.dtype == object:
        return lambda: None
    kept = array.copy()

    def back() -> None:
        if array.flags.writeable and array.tobytes() != kept.tobytes():
            array[...] = kept

    return back
