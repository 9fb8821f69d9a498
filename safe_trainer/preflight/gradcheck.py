"""Check: are the gradients the slopes of the outputs? In float64, on a copy, along random directions.

PyTorch's own functions have the right gradients. A wrong one takes a backward pass written by hand, or a value changed
behind autograd's back; so an error needs one of the two in the graph, and a disagreement without is told, no more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from safe_trainer.findings import CheckResult, Finding
from safe_trainer.preflight import own_functions
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.float64 import Frozen, HiddenWrite, OwnCall, double, double_copy, floats, on_graph
from safe_trainer.preflight.outcome import ProgramFailed, Skip, finding, judged
from safe_trainer.preflight.outer_calls import OuterCall, outer_calls
from safe_trainer.preflight.own_functions import Verdict, judge, projected
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.slopes import Function, NotSmooth, Slope, jitter, slope
from safe_trainer.preflight.state import state_back
from safe_trainer.preflight.traced import ModuleCall, module_calls
from safe_trainer.task import Supervised, loss_of

SAMPLES = 8
"""Samples of the batch: the slope of a few is as exact as that of many."""
DIRECTIONS = 3
"""Random directions that must all disagree, each at a point of its own; one that agrees is enough to pass."""
CALLS = 4
"""Runs of the model in one step that are looked at: a siamese net has two or three."""
NAMED = 3
"""Parameters with wrong gradients that the evidence names."""
ROUNDINGS = frozenset({"round", "round_", "sign", "sign_", "floor", "ceil", "heaviside", "argmax", "one_hot",
                       "bernoulli", "bernoulli_", "sgn", "trunc"})  # fmt: skip
"""Calls beside which a value changed through .data is a straight-through estimator."""
REFUSED = (
    RuntimeError,
    TypeError,
    ValueError,
    NotImplementedError,
    AttributeError,
    IndexError,
    KeyError,
    AssertionError,
)
"""What a model raises that does not run in float64, or a part that does not run by itself."""


def check(program: Program, clock: Clock) -> CheckResult:
    """The model's own runs in a training step first, then the loss as a function of what the model puts out."""
    model = _copied(program.model)
    variables = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    if not variables:
        raise Skip("no parameter of the model is trainable")
    batch = program.batch(SAMPLES)
    calls = outer_calls(program, batch)[:CALLS]
    if not calls:
        raise Skip("the training step does not call the model or a part of it")
    mode = Frozen(model)
    jitter(variables, 0)
    modules = dict(model.named_modules())
    given = [(call, double(call.args), double(call.kwargs)) for call in calls]

    def outputs() -> Tensor:
        return sum((projected(modules[c.name](*on_graph(a), **on_graph(k))) for c, a, k in given), torch.zeros(()))

    found = _looked_at(Function(outputs, variables, mode, state_back(model)), model, calls, clock)
    lost, why = _of_loss(program, model, batch, clock) if not found.findings and program.has_forward else (None, "")
    findings = [*found.findings, *(lost.findings if lost else ())]
    return judged("; ".join(part for part in (found.told, lost.told if lost else why) if part), findings)


@dataclass
class Look:
    """What was seen of one function, in words and findings."""

    told: str
    findings: list[Finding] = field(default_factory=list)


def _copied(model: nn.Module) -> nn.Module:
    model = getattr(model, "_orig_mod", model)  # a compiled one is tested as it was written
    if any(parameter.is_complex() for parameter in model.parameters()):
        raise Skip("the model has complex parameters")
    try:
        return double_copy(model)
    except Exception as error:
        raise Skip(f"the model cannot be copied: {type(error).__name__}: {error}") from error


def _looked_at(function: Function, model: nn.Module, calls: list[OuterCall], clock: Clock, part: str = "") -> Look:
    """Hand-written functions one by one, then all parameters at once."""
    try:
        value = function.run(first=True)
        applied = _applied(function, value, model)
    except (*REFUSED, ProgramFailed) as error:
        if part:
            return Look(f"{part} does not run in float64")
        raise Skip(f"a copy of the model in float64 does not run: {_first_line(error)}") from error
    verdicts = _verdicts(applied, clock)
    wrong = [verdict for verdict in verdicts if verdict.is_wrong and not verdict.meant]
    slopes, why = _directions(function, clock)
    told = _told(slopes, why, verdicts, part)
    if wrong:
        return Look(told, list(_of_functions(wrong, function, clock, part)))
    meant = [verdict for verdict in verdicts if verdict.is_wrong]
    if not slopes or not all(each.is_wrong for each in slopes) or len(slopes) < DIRECTIONS:
        return Look(told, [_meant(meant[0])] if meant else [])
    writes, names = function.mode.harmful(), function.mode.names
    if writes:
        return Look(told, list(_of_write(writes[0], slopes, model, calls, bool(names & ROUNDINGS or meant), part)))
    opaque = own_functions.opaque_nodes(function.run(first=True))
    if opaque and not meant:
        return Look(told, [_of_extension(opaque, slopes, _culprit(model, calls), part)])
    return Look(told, [_meant(meant[0])] if meant else [])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _applied(function: Function, value: Tensor, model: nn.Module) -> list[OwnCall]:
    """The hand-written functions that a run applies, in their order."""
    classes = own_functions.hand_written(value)
    calls: list[OwnCall] = []
    if classes:
        with own_functions.noted(classes, model, calls):
            function.run(first=True)
    return calls + function.mode.operators


def _verdicts(calls: list[OwnCall], clock: Clock) -> list[Verdict]:
    """One for each function: the first application of it that is wrong, else its first.

    It is told at the function's very first application, whose input may need no gradient: the fault is the same.
    """
    verdicts: dict[str, Verdict] = {}
    for call in calls:
        known = verdicts.get(call.name)
        if known is None:
            verdicts[call.name] = judge(call)
        elif not known.is_wrong and clock.left() > 0:
            verdicts[call.name] = replace(judge(call), call=known.call)
    return list(verdicts.values())


def _directions(function: Function, clock: Clock) -> tuple[list[Slope], str]:
    """Slopes until one agrees; why there are none."""
    slopes: list[Slope] = []
    why = ""
    for seed in range(2 * DIRECTIONS):
        if clock.left() <= 0 and (slopes or seed):
            break
        if seed:
            jitter(function.variables, seed)
        try:
            slopes.append(slope(function, seed))
        except NotSmooth as reason:
            why = str(reason)
            continue
        except REFUSED as error:
            return slopes, _first_line(error)
        if not slopes[-1].is_wrong or len(slopes) == DIRECTIONS:
            break
    return slopes, why


def _told(slopes: list[Slope], why: str, verdicts: list[Verdict], part: str) -> str:
    functions = f"{len(verdicts)} hand-written: {', '.join(v.call.name for v in verdicts)}" if verdicts else ""
    if not slopes:
        text = f"no slope of {part or 'the outputs'} to compare with ({why or 'out of time'})"
    else:
        best = min(each.error for each in slopes)
        text = f"{part or 'all parameters'}: relative error {best:.1g} along {len(slopes)} random directions in float64"
    return "; ".join(filter(None, (text, functions)))


# --- the loss --------------------------------------------------------------------------------------------------------


def _of_loss(program: Program, model: nn.Module, batch: Any, clock: Clock) -> tuple[Look | None, str]:
    """The loss as a function of the model's outputs, which are put in the place of what the copy computes."""
    task = program.task
    if isinstance(task, Supervised):
        loss_fn = task.loss_fn
        task = Supervised(copy.deepcopy(loss_fn).double() if isinstance(loss_fn, nn.Module) else loss_fn)
    doubled, outputs, position = double(batch), list[Any](), [0]

    def answer(module: nn.Module, args: Any, output: Any) -> Any:
        if position[0] == len(outputs):
            outputs.append(double(output))
        position[0] += 1
        return on_graph(outputs[position[0] - 1])

    def value() -> Tensor:
        position[0] = 0
        return loss_of(task(model, double(doubled))).sum()

    handle = model.register_forward_hook(answer)
    try:
        function = Function(value, [], Frozen(model), state_back(model))
        function.run(first=True)
        variables = [tensor.requires_grad_() for tensor in floats(outputs)]
        if not variables or not function.run(first=True).requires_grad:
            return None, ""
        function.variables = variables
        return _looked_at(function, model, [], clock, "the loss"), ""
    except (*REFUSED, ProgramFailed) as error:
        return None, f"the loss does not run in float64: {_first_line(error)}"
    finally:
        handle.remove()


# --- who is to blame -------------------------------------------------------------------------------------------------


def _of_functions(wrong: list[Verdict], function: Function, clock: Clock, part: str) -> Iterator[Finding]:
    for verdict in wrong:
        call = verdict.call
        steepest = max(verdict.slopes, key=lambda each: each.error)
        where = call.module or ("loss_fn" if part else call.name)
        parameters = "" if part else _wrong_parameters(function, clock)
        yield finding(
            "gradient.incorrect",
            "error",
            where=where,
            source=None if call.place is None else str(call.place),
            evidence=f"{call.name}, in float64 and alone: along {len(verdict.slopes)} random directions of its tensor "
            f"{verdict.argument + 1} the backward pass misses the slope by {min(s.error for s in verdict.slopes):.0%} "
            f"or more (difference {steepest.difference:.4g}, gradient {steepest.gradient:.4g}){parameters}",
            cause="its backward does not fit its forward: a transposed matrix, a factor or a term left out, or the "
            "incoming gradient forgotten",
            remedy="derive the backward anew and test it with torch.autograd.gradcheck in float64, or let autograd "
            "derive it from the forward",
        )


def _wrong_parameters(function: Function, clock: Clock) -> str:
    """The parameters whose own gradients are wrong, found one tensor at a time, in words."""
    names = function.mode.parameter_names
    wrong: list[str] = []
    for variable in function.variables:
        if clock.left() <= 0 or len(wrong) > NAMED:
            break
        try:
            if slope(function, 0, [variable]).is_wrong and slope(function, 1, [variable]).is_wrong:
                wrong.append(names.get(id(variable), "a parameter"))
        except (NotSmooth, *REFUSED):
            continue
    more = " and more" if len(wrong) > NAMED else ""
    return f"; wrong with it: the gradients of {', '.join(wrong[:NAMED])}{more}" if wrong else ""


def _of_write(
    write: HiddenWrite, slopes: list[Slope], model: nn.Module, calls: list[OuterCall], meant: bool, part: str
) -> Iterator[Finding]:
    name = write.name.removesuffix(".__set__")
    yield finding(
        "gradient.incorrect",
        "info" if meant else "error",
        where=write.module or ("loss_fn" if part else _culprit(model, calls)),
        source=None if write.place is None else str(write.place),
        evidence=f"{name} overwrites values of the graph without autograd's knowledge; along {len(slopes)} random "
        f"directions in float64 the gradients miss the slope by {min(s.error for s in slopes):.0%} or more"
        + ("; it stands beside a rounding and seems to be meant so" if meant else ""),
        cause="values are changed through .data, detach() or no_grad, so the gradient belongs to another function",
        remedy="use the operation itself on the tensor, not in place and not on .data, as in x = x.clamp(min=0)",
    )


def _of_extension(opaque: list[str], slopes: list[Slope], where: str | None, part: str) -> Finding:
    return finding(
        "gradient.incorrect",
        "error",
        where="loss_fn" if part else where,
        evidence=f"along {len(slopes)} random directions in float64 the gradients miss the slope by "
        f"{min(s.error for s in slopes):.0%} or more, and the graph has the compiled {', '.join(opaque)}",
        cause="the backward of an extension does not fit its forward",
        remedy="test the operator with torch.autograd.gradcheck in float64",
    )


def _meant(verdict: Verdict) -> Finding:
    call = verdict.call
    return finding(
        "gradient.incorrect",
        "info",
        where=call.module or call.name,
        source=None if call.place is None else str(call.place),
        evidence=f"the gradient of {call.name} is not the slope of its forward, meant so as it seems: {verdict.meant}",
        cause="a straight-through, surrogate or reversed gradient",
        remedy="nothing to do if it is meant so",
    )


def _culprit(model: nn.Module, calls: list[OuterCall]) -> str | None:
    """The innermost module whose own gradients are wrong; None if it is the model's own code."""
    runs: list[ModuleCall] = []
    modules = dict(model.named_modules())
    with torch.no_grad(), module_calls(model, runs):
        for call in calls:
            modules[call.name](*double(call.args), **double(call.kwargs))
    for run in runs:
        if run.name and _alone_is_wrong(model, run):
            return run.name
    return None


def _alone_is_wrong(model: nn.Module, run: ModuleCall) -> bool:
    args, kwargs = double(run.args), double(run.kwargs)
    given = floats((args, kwargs))
    jitter(given, 0)
    variables = [*(t.requires_grad_() for t in given), *(p for p in run.module.parameters() if p.requires_grad)]

    def value() -> Tensor:
        return projected(run.module(*on_graph(args), **on_graph(kwargs)))

    function = Function(value, variables, Frozen(model), state_back(model))
    try:
        return bool(variables) and all(slope(function, seed).is_wrong for seed in range(DIRECTIONS))
    except (NotSmooth, *REFUSED):
        return False
