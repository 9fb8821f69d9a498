"""One step of the program under the eye of PyTorch's function mode: every call with its tensors, module and line.

Runs the step it is given; what it records are references to the step's own tensors. Calls within PyTorch's own
functions are not seen: `cross_entropy` is one call, not a log-softmax and a selection.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import tensors
from safe_trainer.utils.source_lines import Place, read_stack


@dataclass
class Call:
    """One call of a PyTorch function or of a tensor's method."""

    name: str
    """Last part of its name, as in cross_entropy, softmax, __add__."""
    full_name: str
    """As in torch.nn.functional.cross_entropy."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    module: str | None
    """Dotted name of the innermost module that was running; None outside of the model."""
    place: Place | None
    """The user's line."""
    with_grad: bool
    """Whether autograd recorded."""
    in_function: bool = False
    """Whether it ran in the forward of an autograd.Function, where autograd never records."""

    @property
    def source(self) -> str | None:
        """The user's line, as in model.py:42."""
        return None if self.place is None else str(self.place)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by its position or its name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


@dataclass
class ModuleCall:
    """One run of a module: what went in and came out."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass
class TracedStep:
    """What one forward and backward pass did."""

    calls: list[Call] = field(default_factory=list)
    modules: list[ModuleCall] = field(default_factory=list)
    """In the order in which they ended; the model itself has the name ""."""
    loss: float = float("nan")

    def model_calls(self) -> list[ModuleCall]:
        """The runs of the model as a whole."""
        return [call for call in self.modules if call.name == ""]

    def named(self, *names: str) -> list[Call]:
        """The calls of functions with these last names."""
        return [call for call in self.calls if call.name in names]


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls
        self._names = {module: name for name, module in model.named_modules()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        full_name = resolve_name(func) or getattr(func, "__name__", "")
        name = full_name.rpartition(".")[2]
        if name in ("__get__", "__set__"):
            name, full_name = full_name.split(".")[-2], full_name
            if name not in ("data", "T", "mT", "real", "grad"):
                return output
        if next(iter(tensors((args, kwargs, output))), None) is not None:
            stack = read_stack(self._names.get, _traced.__code__)
            grad = torch.is_grad_enabled()
            self._calls.append(
                Call(
                    name, full_name, args, kwargs, output, stack.module, stack.place, grad, not grad and _in_function()
                )
            )
        return output


def _in_function() -> bool:
    """Whether the forward of an autograd.Function runs: a frame whose first argument is such a function's context."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _traced.__code__:
        names = frame.f_code.co_varnames
        if names and isinstance(frame.f_locals.get(names[0]), torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back
    return False


def trace_step(program: Program, batch: Any) -> TracedStep:
    """Forward and backward of one batch, nothing stepped; gradients are in ``.grad`` afterwards.

    Raises:
        ProgramFailed: the user's code raises.
    """
    step = TracedStep()
    step.loss = trace(lambda: program.backward(batch), program.model, step)
    return step


def trace(run: Callable[[], Any], model: nn.Module, step: TracedStep) -> Any:
    """Let `run` run, what it calls noted in `step`; its result."""
    with module_calls(model, step.modules):
        return _traced(run, model, step.calls)


def _traced(run: Callable[[], Any], model: nn.Module, calls: list[Call]) -> Any:
    """The bottom frame of every stack that is read."""
    with _Recorder(model, calls):
        return run()


@contextlib.contextmanager
def module_calls(model: nn.Module, calls: list[ModuleCall]) -> Iterator[None]:
    """Note each module's runs while the body runs."""

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append(ModuleCall(name, module, args, kwargs, output))

        return note

    handles = [
        module.register_forward_hook(hook(name), with_kwargs=True)
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor of a nested value."""
    return next(iter(tensors(value)), None)
