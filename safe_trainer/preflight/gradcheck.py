"""Check: are the gradients the slopes of the loss? In float64, on a copy, along random directions.

One directional derivative tests all parameters at once: the change of the loss a little to either side against the sum
of gradient times direction. Where they disagree each module is tested by itself, the inner ones first, so that the one
whose backward is wrong is named and not all those before it. Relative errors under 1e-5 are right and above 1e-3 wrong
(A. Karpathy, CS231n notes on gradient checks); kinks as ReLU's give values between, so an error must be much larger.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from safe_trainer.findings import CheckResult, Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import ProgramFailed, Skip, finding, judged
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import clone, tensors
from safe_trainer.preflight.traced import ModuleCall, TracedStep, trace, trace_step
from safe_trainer.task import Supervised, loss_of
from safe_trainer.utils import rng

STEPS = (1e-3, 1e-4, 1e-5, 1e-6)
"""Widths of the difference: two neighbours must agree, or a kink or coarse arithmetic lies between."""
AGREE = 1e-3
"""Relative error up to which two widths agree."""
WRONG = 0.005
"""Relative error from which a gradient is called wrong, along each direction: five times what two widths may differ."""
DIRECTIONS = 3
"""Random directions that must all disagree."""
JITTER = 0.01
"""By how much of their size a module's inputs are moved before it is tested by itself."""
SAMPLES = 8
"""Samples of the batch: the slope of a few is as exact as that of many."""


def check(program: Program, clock: Clock) -> CheckResult:
    """The whole loss first; where that is wrong, the modules one by one."""
    batch = program.batch(SAMPLES)
    step = trace_step(program, batch)
    try:
        whole = _whole(program, batch, step)
        errors = [error for error in (_error(whole, seed) for seed in range(DIRECTIONS)) if error is not None]
    except (RuntimeError, TypeError, ValueError, NotImplementedError, ProgramFailed) as error:
        raise Skip(f"a copy of the model in float64 does not run: {str(error).splitlines()[0]}") from error
    if not errors:
        return judged("no direction along which the loss is smooth was found")
    told = f"{len(errors)} random directions in float64, largest relative error {max(errors):.1g}"
    if min(errors) < WRONG:
        return judged(told)
    return judged(told, list(_blamed(program, step, whole, errors)))


@dataclass
class Function:
    """Something with a value and with tensors that it can be varied by."""

    value: Callable[[], Tensor]
    variables: Sequence[Tensor]


def _whole(program: Program, batch: Any, step: TracedStep) -> Function:
    """The loss of a copy in float64; for a step of the user's own a random projection of the model's output."""
    model = copy.deepcopy(program.model).double()
    variables = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    if not variables:
        raise Skip("no parameter of the model is trainable")
    if program.has_forward:
        task = program.task
        if isinstance(task, Supervised):
            task = Supervised(copy.deepcopy(program.loss_fn).double()
                              if isinstance(program.loss_fn, nn.Module) else program.loss_fn)  # fmt: skip
        doubled = _double(clone(batch))
        return Function(lambda: loss_of(task(model, clone(doubled))), variables)
    if not step.model_calls():
        raise Skip("the training step does not call the model as a whole")
    call = step.model_calls()[0]
    return Function(_projection(model, call), variables)


def _projection(module: nn.Module, call: ModuleCall) -> Callable[[], Tensor]:
    """A fixed random combination of all that a module puts out for the inputs that it was given."""
    args, kwargs = _double(clone(call.args)), _double(clone(call.kwargs))

    def value() -> Tensor:
        outputs = [tensor for tensor in tensors(module(*clone_graph(args), **clone_graph(kwargs)))
                   if tensor.is_floating_point()]  # fmt: skip
        generator = torch.Generator().manual_seed(1234)  # not a direction's: a transpose is symmetric along equal ones
        total = torch.zeros((), dtype=torch.float64)
        for output in outputs:
            weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device)
            total = total.to(output.device) + (output * weights).sum()
        return total

    return value


def clone_graph(value: Any) -> Any:
    """A copy of nested tensors that hangs on the originals: what a module changes in place is its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(clone_graph, value))
    if type(value) is dict:
        return {key: clone_graph(item) for key, item in value.items()}
    return value


def _double(value: Any) -> Any:
    """Floating-point tensors in float64; whole numbers, labels among them, as they are."""
    if isinstance(value, Tensor):
        return value.detach().double() if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_double, value))
    if type(value) in (list, tuple):
        return type(value)(map(_double, value))
    if type(value) is dict:
        return {key: _double(item) for key, item in value.items()}
    return value


def _error(function: Function, seed: int) -> float | None:
    """Relative error of the gradient along one random direction; None where the function is not smooth enough."""
    slopes = _slopes(function, seed)
    if slopes is None:
        return None
    numeric, analytic = slopes
    size = max(abs(numeric), abs(analytic))
    return abs(numeric - analytic) / size if size > 1e-12 else 0.0


def _slopes(function: Function, seed: int) -> tuple[float, float] | None:
    """The difference quotient and what the gradients say of it, along one random direction."""
    generator = torch.Generator().manual_seed(seed)
    directions = [
        torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.device)
        * (float(v.detach().square().mean().sqrt()) or 0.1)
        for v in function.variables
    ]
    with torch.enable_grad():
        value = _steady(function)
        if not value.requires_grad or not bool(value.isfinite()):
            return None
        gradients = torch.autograd.grad(value, list(function.variables), allow_unused=True)
    analytic = sum(
        float((gradient.double() * direction).sum())
        for gradient, direction in zip(gradients, directions, strict=True)
        if gradient is not None
    )
    numeric = _quotient(function, directions)
    return None if numeric is None or not math.isfinite(analytic) else (numeric, analytic)


def _quotient(function: Function, directions: Sequence[Tensor]) -> float | None:
    """The central difference, at the first width that agrees with the one before it."""
    before: float | None = None
    kept = [variable.detach().clone() for variable in function.variables]
    for width in STEPS:
        values = []
        for side in (width, -width):
            with torch.no_grad():
                for variable, origin, direction in zip(function.variables, kept, directions, strict=True):
                    variable.copy_(origin + side * direction)
                values.append(float(_steady(function)))
        with torch.no_grad():
            for variable, origin in zip(function.variables, kept, strict=True):
                variable.copy_(origin)
        quotient = (values[0] - values[1]) / (2 * width)
        if not math.isfinite(quotient):
            return None
        if before is not None and abs(quotient - before) <= AGREE * max(abs(quotient), abs(before), 1e-9):
            return quotient
        before = quotient
    return None


def _steady(function: Function) -> Tensor:
    """Its value with the same random numbers each time."""
    with rng.isolated():
        torch.manual_seed(0)
        return function.value()


# --- who is to blame -------------------------------------------------------------------------------------------------


def _blamed(program: Program, step: TracedStep, whole: Function, errors: list[float]) -> list[Finding]:
    """The innermost module whose own gradients are wrong; else the loss."""
    copied = copy.deepcopy(program.model).double()
    modules = dict(copied.named_modules())
    for call in step.modules:
        module = modules[call.name]
        inputs = [tensor for tensor in tensors((call.args, call.kwargs)) if tensor.is_floating_point()]
        if not inputs and not any(True for _ in module.parameters()):
            continue
        local = _local(module, call)
        if local is None:
            continue
        found = _slopes_of(local)
        if len(found) < 2 or sorted(error for error, _ in found)[1] < WRONG:  # one direction may miss a fault by chance
            continue
        return [_named(copied, call, found)]
    return (
        [
            finding(
                "gradient.incorrect",
                "error",
                where="loss_fn",
                evidence=f"in float64 the gradients miss the slope of the loss by {min(errors):.0%} to "
                f"{max(errors):.0%} along {len(errors)} random directions, while those of each module are right: the "
                "loss is to blame",
                cause="a custom backward, or a value changed behind autograd's back (.data, detach, NumPy), in the "
                "loss",
                remedy="check it with torch.autograd.gradcheck in float64",
            )
        ]
        if not _cuts(step, None)
        else []
    )


def _local(module: nn.Module, call: ModuleCall) -> Function | None:
    """One module as a function of its own inputs and parameters; None if it cannot be run by itself."""
    value = _projection(module, call)
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    given = [t for name in ("args", "kwargs") for t in tensors(cells[name].cell_contents) if t.is_floating_point()]
    generator = torch.Generator().manual_seed(4321)
    for tensor in given:  # off the kinks: what a ReLU has cut off lies at 0 exactly, where the next one has no slope
        spread = JITTER * float(tensor.square().mean().sqrt())
        tensor += spread * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
        tensor.requires_grad_()
    variables = [*given, *(p for p in module.parameters() if p.requires_grad)]
    return Function(value, variables) if variables else None


def _slopes_of(local: Function) -> list[tuple[float, tuple[float, float]]]:
    found = []
    for seed in range(DIRECTIONS):
        try:
            slopes = _slopes(local, seed)
        except (RuntimeError, TypeError, ValueError):
            return []
        if slopes is not None:
            size = max(abs(slopes[0]), abs(slopes[1]))
            found.append((abs(slopes[0] - slopes[1]) / size if size > 1e-12 else 0.0, slopes))
    return found


def _named(model: nn.Module, call: ModuleCall, found: list[tuple[float, tuple[float, float]]]) -> Finding:
    seen = TracedStep()
    module = dict(model.named_modules())[call.name]
    args, kwargs = _double(clone(call.args)), _double(clone(call.kwargs))
    with torch.enable_grad():
        trace(lambda: module(*args, **kwargs), module, seen)
    through_data = next((made for made in seen.calls if made.name == "data"), None)
    deliberate = through_data is None and (_cuts(seen, module) or all(abs(numeric) < 1e-9 for _, (numeric, _) in found))
    deliberate = deliberate or (through_data is None and _is_straight_through(module, call))
    where = call.name or None
    source = through_data.source if through_data else _own_line(seen)
    return finding(
        "gradient.incorrect",
        "info" if deliberate else "error",
        where=where,
        source=source,
        evidence=f"in float64 the gradients of {type(module).__name__} {where or ''} miss the slope by "
        f"{min(error for error, _ in found):.0%} to {max(error for error, _ in found):.0%} along {len(found)} random "
        "directions of its inputs and weights" + ("; it seems to be meant so" if deliberate else ""),
        cause="values are changed through .data, which autograd does not see: its gradient belongs to another function"
        if through_data
        else "its backward does not fit its forward: a transposed matrix, a factor, or the incoming gradient left out",
        remedy="take .data away and use the operation itself (clamp, not clamp_ on .data), in torch.no_grad() if need "
        "be"
        if through_data
        else "derive the backward anew, and test it with torch.autograd.gradcheck in float64",
    )


def _cuts(seen: TracedStep, module: nn.Module | None) -> bool:
    """Whether the graph is cut on purpose: a gradient that is stopped differs from the slope by design."""
    names = ("detach", "detach_", "round", "floor", "ceil", "sign", "argmax", "argmin", "one_hot", "round_", "sign_")
    outside = [call for call in seen.calls if not call.in_function and call.place is not None]
    return any(call.name in names or not call.with_grad for call in outside)


def _is_straight_through(module: nn.Module, call: ModuleCall) -> bool:
    """Whether the input's gradient is the output's times one number, or zero: straight-through and reversal layers."""
    args = _double(clone(call.args))
    given = [tensor.requires_grad_() for tensor in tensors(args) if tensor.is_floating_point()]
    if not given or any(True for _ in module.parameters()):
        return False
    with torch.enable_grad():
        output = next((t for t in tensors(module(*clone_graph(args))) if t.is_floating_point()), None)
        if output is None or output.shape != given[0].shape or not output.requires_grad:
            return False
        sent = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
        came = torch.autograd.grad(output, given[0], sent.to(output.device), allow_unused=True)[0]
    if came is None:
        return True
    ratio = came / sent.to(came.device)
    passed = ratio[ratio != 0]
    return passed.numel() == 0 or bool(torch.allclose(passed, passed[0].expand_as(passed), rtol=1e-6))


def _own_line(seen: TracedStep) -> str | None:
    """The line of the module that applied a function of its own; else its last line."""
    lines = [call.source for call in seen.calls if call.source is not None]
    return lines[-1] if lines else None
