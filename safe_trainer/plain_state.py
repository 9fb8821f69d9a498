"""State as nested dicts of tensors and plain values: made safe to load, looked at, compared. Touches no file.

What is rebuilt here is all that ``torch.load(weights_only=True)`` accepts without being told of further classes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

WEIGHTS = ("model", "ema")
"""Parts of a state that hold weights: they are never saved with a NaN or an infinity in them."""
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def plain_state(state: Mapping[str, Any], *, copy: bool = False) -> dict[str, Any]:
    """`state` as only ``weights_only=True`` can load it: tensors detached on the CPU, NumPy values converted.

    Arrays of NumPy become tensors, its scalars Python's numbers. A view of a larger storage is copied, so that the file
    holds no more than is named; tensors that are one and the same stay one. With `copy` no tensor shares memory with
    `state`, which may then change while the result is written.

    Raises:
        TypeError: the dotted name of what cannot be saved, and what it is.
    """
    return cast("dict[str, Any]", _plain(dict(state), "", copy, {}))


def infinite_tensors(state: Mapping[str, Any]) -> frozenset[str]:
    """Dotted names of weights' tensors that hold an infinity but no NaN: in a model just built, they are its masks."""
    found = [(name, tensor) for name, tensor in weights(state) if not is_finite(tensor)]
    return frozenset(name for name, tensor in found if not bool(tensor.isnan().any()))


def state_differences(saved: Mapping[str, Any], model_state: Mapping[str, Any]) -> list[str]:
    """One sentence for each tensor that is missing, unexpected, or of another shape or dtype. Empty: they fit."""
    names = dict.fromkeys((*model_state, *saved))
    told = [_difference(name, saved.get(name), model_state.get(name)) for name in names]
    for prefix in ("_orig_mod.", "module."):  # torch.compile and DistributedDataParallel put these before every name
        if {name.removeprefix(prefix) for name in saved} == {name.removeprefix(prefix) for name in model_state} and (
            saved.keys() != model_state.keys()
        ):
            told.insert(0, f"the names differ by the prefix {prefix!r} alone: the model is wrapped in another way")
    return [sentence for sentence in told if sentence is not None]


def _difference(name: str, saved: Any, wanted: Any) -> str | None:
    if saved is None or wanted is None:
        return f"{name} is in the " + (
            "model but not in the checkpoint" if saved is None else "checkpoint but not in the model"
        )
    if not (isinstance(saved, Tensor) and isinstance(wanted, Tensor)) or is_lazy(wanted):
        return None  # a lazy tensor takes the shape it is given
    is_same = saved.shape == wanted.shape and saved.dtype == wanted.dtype
    return None if is_same else f"{name} is {_looks(saved)} in the checkpoint and {_looks(wanted)} in the model"


def _looks(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _plain(value: Any, where: str, copy: bool, seen: dict[Any, tuple[Tensor, Tensor]]) -> Any:
    """`value` rebuilt from what may stand in a file. `where` is its dotted name; `seen` keeps tied tensors tied."""
    if isinstance(value, Tensor):
        return _plain_tensor(value, where, copy, seen)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return _plain_tensor(torch.from_numpy(np.array(value, order="C")), where, False, seen)
    if isinstance(value, np.generic) and type(value.item()) in _PLAIN:
        return value.item()
    if type(value) in (dict, OrderedDict, Counter):
        return _plain_dict(value, where, copy, seen)
    if type(value) in (list, tuple, torch.Size):
        items = [_plain(item, f"{where}.{index}", copy, seen) for index, item in enumerate(value)]
        return items if type(value) is list else tuple(items)
    if value is None or type(value) in _PLAIN:
        return value
    raise TypeError(
        f"{where} in the state must be a tensor, a number, text, None, or a list, tuple or dict of those, so that the "
        f"checkpoint can be loaded safely (got {type(value).__module__}.{type(value).__qualname__})"
    )


def _plain_dict(value: dict[Any, Any], where: str, copy: bool, seen: dict[Any, tuple[Tensor, Tensor]]) -> Any:
    """The same kind of dict. A module's state dict carries ``_metadata``, the versions that its loading asks for."""
    plain = type(value)()
    for key, item in value.items():
        name = f"{where}.{key}" if where else str(key)
        if type(key) not in (str, int):
            raise TypeError(
                f"{name} in the state must have text or whole numbers as keys (got {type(key).__qualname__})"
            )
        plain[key] = _plain(item, name, copy, seen)
    if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
        plain._metadata = _plain(value._metadata, f"{where}._metadata", copy, seen)  # type: ignore[attr-defined]
    return plain


def _plain_tensor(tensor: Tensor, where: str, copy: bool, seen: dict[Any, tuple[Tensor, Tensor]]) -> Tensor:
    bare = tensor.detach()
    if type(bare) is not Tensor or bare.is_meta:
        what = "a tensor without data, on the meta device" if bare.is_meta else type(bare).__qualname__
        raise TypeError(f"{where} in the state must be a plain torch.Tensor that holds its own data (got {what})")
    if bare.layout != torch.strided:
        return bare.to("cpu", copy=copy)
    storage = bare.untyped_storage()
    key = (storage.data_ptr(), bare.device, bare.storage_offset(), bare.shape, bare.stride(), bare.dtype)
    if key not in seen:
        is_view = storage.nbytes() > bare.numel() * bare.element_size()
        must_copy = bare.device.type == "cpu" and (copy or is_view)  # from another device it comes as a copy anyway
        # The tensor itself is kept beside its copy: while it lives, no other can have its address.
        seen[key] = (bare, bare.clone() if must_copy else bare.cpu())
    return seen[key][1]


def _tensors(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{where}.{index}")


def weights(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for part in WEIGHTS:
        yield from _tensors(state.get(part), part)


def is_finite(tensor: Tensor) -> bool:
    """A finite sum has finite terms and costs a tenth of looking at each; a sum that overflows is looked into."""
    if is_lazy(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    values = values.float() if values.element_size() == 1 else values  # 8-bit floats have no arithmetic
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
