"""A copy of a model in float64 and a mode that keeps its arithmetic there, whatever the code between casts to.

The mode also holds constant, in every further run, what autograd takes for constant: results of detach, of no_grad
and of item(). So a difference quotient is the slope that the author means, and a stopped gradient is no fault. Works on
copies and on what is computed from them.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from safe_trainer.preflight.reading import tensors
from safe_trainer.utils.source_lines import Place, read_stack

_SMALL = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = ("float", "half", "bfloat16")
_STOPS = frozenset({"detach", "data", "item", "tolist", "numpy", "__array__", "__float__", "__int__"})
"""Ways to take a value out of the graph. ``if tensor:`` is not among them: a branch is taken as it comes."""
_STRAIGHT = frozenset({"fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine",
                       "fused_moving_avg_obs_fake_quant"})  # fmt: skip
"""PyTorch's own functions whose gradient is straight-through by design: the rounding is left out."""


_SHIPPED = frozenset({"aten", "prim", "prims", "torchvision", "torchaudio", "_C", "c10d", "inductor"})
"""Namespaces of operators that come with PyTorch."""


class Moved(Exception):
    """A further run took another way than the first: there is no slope between the two."""


@dataclass(frozen=True)
class HiddenWrite:
    """A tensor of the graph that was overwritten without autograd's knowledge."""

    name: str
    """The call that wrote, as in clamp_."""
    place: Place | None
    module: str | None


@dataclass(frozen=True)
class OwnCall:
    """One application of a hand-written function."""

    name: str
    apply: Callable[..., Any]
    args: tuple[Any, ...]
    wanted: tuple[bool, ...]
    """For each floating-point tensor among the arguments, whether a gradient is wanted."""
    module: str | None
    place: Place | None


class Frozen(TorchFunctionMode):
    """Keeps arithmetic in float64; notes what the first run takes out of the graph, and gives it to all others.

    ``with mode: ...`` after ``begin(first=True)`` is the run with gradients, after ``begin(first=False)`` another one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self.parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._kept: list[tuple[str, Any]] = []
        self._sources: list[tuple[Tensor, Tensor, int]] = []
        """A tensor of the graph, its values then, and the number of the call that gave an alias of it."""
        self._written: set[int] = set()
        self._first, self._position, self._bottom = True, 0, _outside.__code__
        self.writes: list[HiddenWrite] = []
        self.names: set[str] = set()
        """What the first run called."""
        self.operators: list[OwnCall] = []
        """Operators of torch.library that are not PyTorch's, as the first run called them."""

    def begin(self, first: bool) -> None:
        """What follows is the first run, or a further one with other values."""
        self._first, self._position = first, 0
        if first:
            self._kept, self._sources, self._written, self.writes, self.names = [], [], set(), [], set()
            self.operators = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = _name_of(func)
        if name in _CASTS and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return args[0].double()
        if name == "gumbel_softmax":
            return func(*args[:2], **{**kwargs, "hard": False})
        if name in _STRAIGHT:
            return args[0]
        if name == "register_hook":  # a gradient that is changed on purpose; the slope is of the graph without it
            return contextlib.nullcontext()
        args = tuple(torch.float64 if _is_small(value) else value for value in args)
        kwargs = {key: torch.float64 if _is_small(value) else value for key, value in kwargs.items()}
        if not self._is_stop(name, args):
            return self._watched(name, func, args, kwargs)
        return self._noted(name, func, args, kwargs) if self._first else self._given(name, func, args, kwargs)

    def _is_stop(self, name: str, args: tuple[Any, ...]) -> bool:
        if in_function():
            return False
        if name in _STOPS:
            return isinstance(args[0], Tensor) and args[0].is_floating_point()
        return not torch.is_grad_enabled()

    def _noted(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if source is not None and _is_write(name):
            self._note_write(name, source)
        output = func(*args, **kwargs)
        if source is not None and name in ("data", "detach", "numpy") and _is_inner(source):
            self._sources.append((source, source.detach().clone(), len(self._kept)))
        self._kept.append((name, _copied(output)))
        return output

    def _given(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        number, self._position = self._position, self._position + 1
        if number >= len(self._kept) or self._kept[number][0] != name:
            raise Moved
        output, kept = func(*args, **kwargs), self._kept[number][1]  # run in any case: modes are switched by calls too
        if number in self._written or output is None:
            return output
        if _is_write(name) or kwargs.get("out") is not None:  # statistics, codebooks: what is written is the same
            fits = isinstance(output, Tensor) and isinstance(kept, Tensor) and output.shape == kept.shape
            if fits and not _is_inner(output):
                output.copy_(kept)
            return output
        return _copied(kept)

    def _watched(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if self._first:
            self.names.add(name)
            if isinstance(func, torch._ops.OpOverload) and func.namespace not in _SHIPPED:
                self._note_operator(func, args, kwargs)
            if args and isinstance(args[0], Tensor) and _is_write(name) and not in_function():
                self._note_write(name, args[0])
        return func(*args, **kwargs)

    def _note_operator(self, func: Any, args: Any, kwargs: Any) -> None:
        stack = read_stack(self._names.get, self._bottom)
        wanted = tuple(tensor.requires_grad for tensor in floats(args))
        self.operators.append(
            OwnCall(str(func), lambda *given: func(*given, **kwargs), double(args), wanted, stack.module, stack.place)
        )

    def _note_write(self, name: str, target: Tensor) -> None:
        """Remember that this call writes, unseen by autograd, to memory that a tensor of the graph has too."""
        replaced = name == "data.__set__"
        if target.requires_grad and torch.is_grad_enabled() and not replaced:
            return
        memory = _memory(target)
        for source, _, number in self._sources:
            if memory is not None and _memory(source) == memory:
                self._written.add(number)
                self._blame(name)
        if (replaced or not torch.is_grad_enabled()) and _is_inner(target):
            self._sources.append((target, target.detach().clone(), -1))
            self._blame(name)

    def _blame(self, name: str) -> None:
        stack = read_stack(self._names.get, self._bottom)
        self.writes.append(HiddenWrite(name, stack.place, stack.module))

    def harmful(self) -> list[HiddenWrite]:
        """The hidden writes of the first run, if values of the graph are others than they were."""
        changed = [
            source for source, kept, _ in self._sources if source.shape != kept.shape or not torch.equal(source, kept)
        ]
        return self.writes if changed else []


def _outside() -> None:
    """A frame that is on no stack: stacks are read to the end of the runs, whose frames are this package's own."""


def _name_of(func: Any) -> str:
    full_name: str = resolve_name(func) or getattr(func, "__name__", "")
    name = full_name.rpartition(".")[2]
    if name == "__get__":
        return full_name.split(".")[-2]
    if name == "__set__":
        return f"{full_name.split('.')[-2]}.__set__"
    return name


def _is_small(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _SMALL


def _is_write(name: str) -> bool:
    """Whether a call of this name changes its first argument in place."""
    if name in ("data.__set__", "__setitem__") or (
        name.startswith("__i") and name != "__int__" and name != "__invert__"
    ):
        return True
    return name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_", "retain_grad_")


def _is_inner(tensor: Tensor) -> bool:
    """Whether it was computed from something that gets gradients."""
    return tensor.requires_grad and tensor.grad_fn is not None


def _memory(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return copy.copy(value)


def in_function() -> bool:
    """Whether the forward of an autograd.Function runs: in there autograd never records."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename.endswith("function.py"):
            return "cls" in frame.f_code.co_varnames
        names = frame.f_code.co_varnames
        if names and names[0] == "ctx" and isinstance(frame.f_locals.get("ctx"), torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back
    return False


# --- the copy --------------------------------------------------------------------------------------------------------


def double_copy(model: nn.Module) -> nn.Module:
    """A deep copy in float64, with tensors kept as plain attributes too, and without hooks on the backward pass.

    Raises:
        Exception: whatever keeps the model from being copied.
    """
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    memo = {id(tensor): tensor.detach().clone() for tensor in held if tensor.grad_fn is not None}
    copied = copy.deepcopy(model, memo).double()
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.dtype in _SMALL:
                vars(module)[name] = value.double()
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.max_norm = None  # it rewrites the weight in the forward pass, and with it the point looked at
    return copied


def double(value: Any) -> Any:
    """Floating-point tensors in float64; whole numbers, labels among them, as they are."""
    if isinstance(value, Tensor):
        return value.detach().double() if value.is_floating_point() else value.detach().clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(double, value))
    if type(value) in (list, tuple):
        return type(value)(map(double, value))
    if type(value) is dict:
        return {key: double(item) for key, item in value.items()}
    return value


def on_graph(value: Any) -> Any:
    """A copy of nested tensors that hangs on the originals: what a module changes in place is its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(on_graph, value))
    if type(value) in (list, tuple):
        return type(value)(map(on_graph, value))
    if type(value) is dict:
        return {key: on_graph(item) for key, item in value.items()}
    return value


@contextlib.contextmanager
def default_double() -> Iterator[None]:
    """New tensors are float64 while the body runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def floats(value: Any) -> list[Tensor]:
    """The floating-point tensors of a nested value, each once."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensor in tensors(value) if tensor.is_floating_point()}
    return list(found.values())
