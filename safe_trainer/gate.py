"""What stands in an optimizer's step: hooks that hide gradients from it, and that look at them also after a closure.

An optimizer that finds no gradient leaves weights and state untouched, bit for bit. Touches gradients alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

HALF = (torch.float16, torch.bfloat16)
WIDE = (torch.float32, torch.float64)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all gradients as one tensor in float32, without waiting for the device.

    Half the time of torch's get_total_norm on a small model; float32, since a square overflows half precision early.
    """
    if any(gradient.is_sparse for gradient in gradients):
        gradients = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    halves = [gradient for gradient in gradients if gradient.dtype in HALF]
    others = [gradient for gradient in gradients if gradient.dtype not in HALF] if halves else gradients
    norms = list(torch._foreach_norm(list(others))) if others else []
    if halves:
        norms += torch._foreach_norm(halves, 2, dtype=torch.float32)
    device = norms[0].device
    total: Tensor = torch.stack([norm if norm.device == device else norm.to(device) for norm in norms]).norm()
    return total


def norm_of(gradients: Sequence[Tensor]) -> Tensor | float:
    """The same, as soon as it can be had: a number on a CPU, where there is nothing to wait for, else a tensor.

    Right after backward every operation is cold. So what counts is how many different ones there are: reading the
    norms one by one took 56 us where stacking them first, and then the norm of those, took 94 (8 gradients).
    """
    if not gradients[0].is_cpu:
        return global_norm(gradients)
    try:
        norms = torch._foreach_norm(list(gradients))
    except (RuntimeError, NotImplementedError):  # sparse ones
        return global_norm(gradients)
    if not all(norm.dtype in WIDE for norm in norms):
        return global_norm(gradients)
    return math.hypot(*(norm.item() for norm in norms))


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether there is no NaN and no infinity. Waits for the device; a norm can overflow while all is finite."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors or math.isfinite(norm_of(tensors)):
        return True
    return all(bool(torch.isfinite(t._values() if t.layout is torch.sparse_coo else t).all()) for t in tensors)


def held(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer moves."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def strangers(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Parameters that an optimizer moves and the model does not know, by the expression that finds them."""
    known = set(model.parameters())
    return {
        f"{'optimizer' if number == 0 else f'other_optimizers[{number - 1}]'}"
        f".param_groups[{position}]['params'][{index}]": parameter
        for number, optimizer in enumerate(optimizers)
        for position, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter not in known
    }


def after_closure(args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[Any], None]) -> Arguments | None:
    """The arguments of an optimizer's step with its closure followed by `then(loss)`; None if it has no closure.

    Where there is a closure, the gradients that count are not there before the step but after the closure has run.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    def followed() -> Any:
        loss = closure()
        then(loss)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": followed}
    return (args[0], followed, *args[2:]), kwargs


class Ears:
    """Hears of every loss that backward is called on, in the thread that made it, until it is removed.

    PyTorch has no hook for that, so it stands in for ``torch.autograd.backward``, which ``Tensor.backward`` calls too.
    """

    def __init__(self, heard: Callable[[Tensor], None]) -> None:
        self._heard: Callable[[Tensor], None] | None = heard
        self._thread = threading.get_ident()
        self._true = torch.autograd.backward

        @functools.wraps(self._true)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(tensors)
            return self._true(tensors, *args, **kwargs)

        self._ours = torch.autograd.backward = backward

    def _note(self, tensors: Any) -> None:
        if self._heard is None or threading.get_ident() != self._thread:
            return
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
            if isinstance(tensor, Tensor) and tensor.numel() == 1:
                self._heard(tensor.detach())

    def remove(self) -> None:
        """Stop. If somebody has put another function in our place since, ours stays under it and only hands on."""
        self._heard = None
        if torch.autograd.backward is self._ours:
            torch.autograd.backward = self._true


def without_update(step: Callable[..., Any], optimizers: Sequence[Optimizer]) -> Callable[..., Any]:
    """The same step, in which the optimizers move nothing; its gradients are there when it is over.

    But for those that cannot do without: LBFGS evaluates at places that it moves to, so whoever runs this puts back
    what it has moved.
    """

    def replayed(*args: Any) -> Any:
        with _blocked([optimizer for optimizer in optimizers if not needs_closure(optimizer)]):
            return step(*args)

    return replayed


@contextlib.contextmanager
def _blocked(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Hide the gradients from the optimizers' steps, and give them back at the end."""

    def hide(optimizer: Optimizer) -> None:
        for parameter in held(optimizer):
            if parameter.grad is not None:
                kept[parameter], parameter.grad = parameter.grad, None

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        hide(optimizer)
        return after_closure(args, kwargs, lambda _: hide(optimizer))

    kept: dict[Tensor, Tensor] = {}
    handles = [optimizer.register_step_pre_hook(hook) for optimizer in optimizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, gradient in kept.items():
            if parameter.grad is None:
                parameter.grad = gradient


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step must be given a closure, as LBFGS' is."""
    step = getattr(type(optimizer), "step", optimizer.step)
    parameter = inspect.signature(step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty
