"""Backward passes that somebody wrote by hand: found in a graph, run again one by one, and held against their slopes.

Replaces the forward of the functions it looks at by one that notes its arguments, for as long as a run takes.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from safe_trainer.preflight.float64 import Frozen, OwnCall, double, floats, on_graph
from safe_trainer.preflight.slopes import Function, NotSmooth, Slope, jitter, slope
from safe_trainer.utils.source_lines import read_stack

DIRECTIONS = 3
"""Random directions that must all disagree, each at a point of its own."""
FEW = 8
"""Values for each different one among them from which an output counts as quantised: a smooth one has no two alike."""
_MEANT = re.compile(
    r"(?i:revers|straight|surrogate|quant(?!il|um)|binar|ternar|round(?!trip)|spik|heaviside|bound(?!ary)|clamp|clip)|"
    r"(?i:grad(ient)?_?(scal|mult|ident|filter|norm)|(scal|mult|stop|pass|guid)\w*_?grad|discret|(?<!soft)sign(?!al|oid))|"
    r"STE|Ste(?![a-z])|ste_|_ste|GRL|Grl"
)
"""Names of functions whose gradient is meant to be another than the slope."""


@dataclass(frozen=True)
class Verdict:
    """What became of a function's test."""

    call: OwnCall
    slopes: tuple[Slope, ...]
    """One for each direction, of the argument whose gradient is wrong; empty if all are right."""
    argument: int = 0
    """Which of the floating-point arguments."""
    meant: str = ""
    """Why it looks deliberate; empty if it does not."""

    @property
    def is_wrong(self) -> bool:
        """Whether the gradient is not the slope, on purpose or not."""
        return bool(self.slopes)


def graph_nodes(tensor: Tensor) -> list[Any]:
    """Every node of the graph that made a tensor."""
    seen: dict[Any, None] = {}
    open_nodes = [tensor.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            seen[node] = None
            open_nodes += [following for following, _ in node.next_functions]
    return list(seen)


def hand_written(tensor: Tensor) -> list[type]:
    """The classes of the autograd.Functions in a tensor's graph that are not PyTorch's own."""
    classes: dict[type, None] = {}
    for node in graph_nodes(tensor):
        made = getattr(node, "_forward_cls", None)
        if made is not None and not made.__module__.startswith("torch."):
            classes[made] = None
    return list(classes)


def opaque_nodes(tensor: Tensor) -> list[str]:
    """Nodes of compiled extensions, which cannot be run again alone."""
    return sorted({node.name() for node in graph_nodes(tensor) if "CppNode" in node.name()})


@contextlib.contextmanager
def noted(classes: list[type], model: nn.Module, calls: list[OwnCall]) -> Iterator[None]:
    """Note each application of these functions while the body runs."""
    names = {module: name for name, module in model.named_modules()}
    kept = [(made, made.__dict__.get("forward")) for made in classes]
    for made in classes:
        _set_forward(made, _noting(made, names, calls))
    try:
        yield
    finally:
        for made, forward in kept:
            if forward is None:
                delattr(made, "forward")
            else:
                _set_forward(made, forward)


def _set_forward(made: type, forward: Any) -> None:
    setattr(made, "forward", forward)  # noqa: B010  (a plain assignment is no valid one to a method for mypy)


def _noting(made: Any, names: dict[nn.Module, str], calls: list[OwnCall]) -> Any:
    forward = made.forward
    with_context = made.setup_context is torch.autograd.function._SingleLevelFunction.setup_context

    def note(*args: Any) -> Any:
        given = args[1:] if with_context else args
        stack = read_stack(names.get, _noting.__code__)
        tensors = floats(given)
        calls.append(OwnCall(made.__name__, made.apply, double(given), tuple(t.requires_grad for t in tensors),
                             stack.module, stack.applied or stack.place))  # fmt: skip
        return forward(*args)

    return staticmethod(functools.wraps(forward)(note))


# --- one function ----------------------------------------------------------------------------------------------------


def judge(call: OwnCall) -> Verdict:
    """Test every argument that gets a gradient, one at a time."""
    for number, wanted in enumerate(call.wanted):
        if not wanted:
            continue
        slopes = _wrong_slopes(call, number)
        if slopes:
            verdict = Verdict(call, tuple(slopes), number)
            return replace(verdict, meant=_meant(call, number))
    return Verdict(call, ())


def _wrong_slopes(call: OwnCall, number: int) -> list[Slope]:
    """The slopes along all directions if each of them is wrong; none otherwise, also where there are none."""
    found: list[Slope] = []
    for seed in range(DIRECTIONS):
        for moved in (True, False):
            try:
                function = _as_function(call, number, seed if moved else None)
                found.append(slope(function, seed))
                break
            except (NotSmooth, RuntimeError, TypeError, ValueError, NotImplementedError):
                continue  # off its domain: without the jitter once more
        else:
            return []
        if not found[-1].is_wrong:
            return []
    return found


def _as_function(call: OwnCall, number: int, seed: int | None) -> Function:
    args = double(call.args)
    variable = floats(args)[number]
    if seed is not None:
        jitter([variable], seed)
    variable.requires_grad_()

    def value() -> Tensor:
        return projected(call.apply(*on_graph(args)))

    return Function(value, [variable], Frozen(nn.Module()))


def projected(output: Any) -> Tensor:
    """A fixed random combination of all floating-point numbers that have a gradient."""
    generator = torch.Generator().manual_seed(1234)
    total = torch.zeros((), dtype=torch.float64)
    for tensor in floats(output):
        weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
        if tensor.requires_grad:
            total = total.to(tensor.device) + (tensor * weights).sum()
    return total


# --- on purpose? -----------------------------------------------------------------------------------------------------


def _meant(call: OwnCall, number: int) -> str:
    """Why the gradient is another than the slope on purpose; empty where nothing speaks for that."""
    if _MEANT.search(call.name):
        return f"its name, {call.name}, says so"
    args = double(call.args)
    variable = floats(args)[number]
    jitter([variable], 0)
    variable.requires_grad_()
    output = next((tensor for tensor in floats(call.apply(*on_graph(args))) if tensor.requires_grad), None)
    if output is None:
        return "nothing comes back"
    values = output.detach()
    if values.numel() >= 2 * FEW and len(set(values.flatten().tolist())) * FEW <= values.numel():
        return "its output takes few values: it is quantised"
    if output.shape != variable.shape:
        return ""
    point = variable.detach()
    if torch.allclose(values, point, rtol=1e-9, atol=0.0):
        return "it passes its input on, and changes the gradient only"
    return _surrogate(call, args, variable, output)


def _surrogate(call: OwnCall, args: Any, variable: Tensor, output: Tensor) -> str:
    """A function of each number by itself whose gradient differs only where it is flat: straight-through."""
    point, width = variable.detach().clone(), 1e-6
    sent = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(output.device)
    came = torch.autograd.grad(output, variable, sent, allow_unused=True)[0]

    def at(offset: Tensor | float) -> Tensor:
        with torch.no_grad():
            variable.copy_(point + offset)
            return next(iter(floats(call.apply(*on_graph(args))))).clone()

    every_other = (torch.arange(point.numel(), device=point.device) % 2).reshape(point.shape).double()
    middle, beside = at(0.0), at(width * every_other)
    slopes = (at(width) - at(-width)) / (2 * width)
    if came is None or not torch.equal(middle[every_other == 0], beside[every_other == 0]):
        return ""
    ratio = came / sent
    differs = (ratio - slopes).abs() > 1e-3 * slopes.abs().clamp(min=1.0)
    if bool((slopes[differs].abs() > 1e-9).any()):
        return ""
    rectifier = torch.equal(middle, point.clamp(min=0)) and bool(torch.allclose(ratio, torch.ones_like(ratio)))
    return "" if rectifier else "it differs only where the function is flat: a straight-through or surrogate gradient"
