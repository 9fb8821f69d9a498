"""What comes through the untrained model: units that answer nothing, units at their limits, gradients that get lost.

Figures of 98 healthy programs: before training up to 47 % of a layer's units were silent over a batch, at most 1.5 % of
tanh values above 0.97, and the smallest layer gradient at least 0.05 of the largest in 95 % of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import tensors
from safe_trainer.preflight.traced import Call, trace_step
from safe_trainer.task import first_length

RECTIFIERS = ("relu", "relu_", "threshold", "threshold_", "relu6", "hardtanh", "hardtanh_")
SQUASHERS = {"tanh": 0.97, "sigmoid": 0.985, "tanh_": 0.97, "sigmoid_": 0.985}
"""Functions with two limits, and the value beyond which their slope is under 6 % of its greatest."""
DEAD = 0.95
"""Share of a layer's units that must be silent: healthy layers stay below 0.5."""
SATURATED = 0.6
"""Share of values at their limits: healthy starts stay below 0.02, and the faulty one seen had 0.85."""
LOST = 1e-6
"""Smallest over largest gradient of the layers: float32 has no more digits than that to add up an update from."""
SAMPLES = 64
"""Samples over which a unit must be silent."""


def dead_layers(program: Program, clock: Clock) -> Iterator[Finding]:
    """Rectified layers in which hardly any unit answers to any of the samples."""
    active: dict[tuple[str | None, int], Tensor] = {}
    seen, calls = 0, dict[tuple[str | None, int], Call]()
    for batch in program.batches():
        step = trace_step(program, batch)
        count: dict[str | None, int] = {}
        for call in step.named(*RECTIFIERS):
            if isinstance(call.output, Tensor) and call.output.dim() >= 2 and call.module is not None:
                number = count[call.module] = count.get(call.module, 0) + 1
                units = _per_unit(call.output.detach() > 0)
                key = call.module, number
                known = active.get(key)
                active[key] = units if known is None or known.shape != units.shape else known | units
                calls[key] = call
        seen += first_length(batch) or 1
        if seen >= SAMPLES or clock.left() < clock.seconds / 3:
            break
    if seen < min(SAMPLES, 16):
        return
    for place, units in active.items():
        silent = 1.0 - float(units.float().mean())
        if len(units) >= 4 and silent >= DEAD:
            yield _dead(program, calls[place], silent, len(units), seen)
            return  # what lies behind gets nothing to work with


def _dead(program: Program, call: Call, silent: float, units: int, samples: int) -> Finding:
    where = _weights_before(program, call.module or "")
    return finding(
        "init.dead",
        "error",
        where=where,
        source=call.source,
        evidence=f"{silent:.0%} of the {units} units behind {where} are zero for all {samples} samples before training",
        cause="their pre-activations are negative for every input: biases start far below zero, or weights or inputs "
        "are all of one sign; no gradient comes through such a unit",
        remedy="start biases at 0 (or slightly above) and weights at random around 0, and standardise the inputs",
    )  # fmt: skip


def saturated_layers(program: Program, clock: Clock) -> Iterator[Finding]:
    """Hidden tanh or sigmoid layers that are at their limits for most samples."""
    step = trace_step(program, program.batch(SAMPLES))
    squashed = [call for call in step.named(*SQUASHERS) if isinstance(call.output, Tensor) and call.module]
    last = step.model_calls()[-1].output if step.model_calls() else None
    for call in squashed:
        values = call.output.detach().float()
        if call.output is last or values.dim() < 2 or not call.output.requires_grad:
            continue  # an output may well be sure
        limit = SQUASHERS[call.name]
        at_limit = values.abs() > limit if "tanh" in call.name else (values > limit) | (values < 1 - limit)
        share = float(at_limit.float().mean())
        if share > SATURATED:
            where = _weights_before(program, call.module or "")
            yield finding(
                "activation.saturated",
                "warning",
                where=where,
                source=call.source,
                evidence=f"{share:.0%} of the values of {call.name} behind {where} are at its limits before training "
                f"(|{call.name}| beyond {limit})",
                cause="what goes into it is far too large: the weights start too wide, or the inputs are not "
                "standardised; at its limits the slope is nearly zero and gradients get lost",
                remedy="start the weights with torch.nn.init.xavier_uniform_ and standardise the inputs",
            )  # fmt: skip
            return


def vanishing_gradient(program: Program, clock: Clock) -> Iterator[Finding]:
    """A chain of layers whose lower end gets a gradient that is lost in rounding."""
    program.backward(program.batch(SAMPLES))
    sizes = {
        name: float(parameter.grad.float().square().mean().sqrt())
        for name, parameter in program.model.named_parameters()
        if parameter.grad is not None and not parameter.grad.is_sparse and parameter.dim() >= 2
    }
    known = {name: size for name, size in sizes.items() if size > 0}
    if len(known) < 4:
        return  # no depth to get lost in
    least = min(known, key=lambda name: known[name])
    most = max(known, key=lambda name: known[name])
    order = list(sizes)
    if known[least] / known[most] > LOST or order.index(least) >= order.index(most):
        return
    yield finding(
        "gradient.vanishing",
        "warning",
        where=least.rpartition(".")[0] or least,
        evidence=f"before training the gradient of {least} is {known[least]:.2g} (root mean square), that of {most} "
        f"{known[most]:.2g}: {known[most] / known[least]:.1g} times as large",
        cause="each layer passes on a small part of the gradient only: many sigmoids or tanhs in a row, or weights "
        "that start too small",
        remedy="use ReLU-like activations, normalisation layers or residual connections, and Kaiming or Xavier weights",
    )  # fmt: skip


def _per_unit(active: Tensor) -> Tensor:
    """Whether each unit is active for any sample: channels of pictures (dim 1), else the last dimension."""
    dim = 1 if active.dim() >= 4 else active.dim() - 1
    others = [other for other in range(active.dim()) if other != dim]
    return active.sum(dim=others) > 0


def _weights_before(program: Program, name: str) -> str:
    """The module with weights that stands before this one, which is where the fault is; the module itself if it has."""
    before = name
    for other, module in program.model.named_modules():
        if any(True for _ in module.parameters(recurse=False)) and not isinstance(
            module, nn.modules.batchnorm._NormBase
        ):
            before = other
        if other == name:
            break
    return before


def half_overflow(program: Program, clock: Clock) -> Iterator[Finding]:
    """Half-precision arithmetic that turns finite numbers into +infinity, even where the loss stays finite.

    Masks put -inf on purpose, and no sound program puts +inf.
    """
    step = trace_step(program, program.batch())
    for call in step.calls:
        output = call.output
        if not isinstance(output, Tensor) or output.dtype not in (torch.float16, torch.bfloat16) or not call.with_grad:
            continue
        bad = torch.isposinf(output.detach())
        given = list(tensors((call.args, call.kwargs)))
        if not given or not bool(bad.any()) or not all(bool(tensor.detach().isfinite().all()) for tensor in given):
            continue
        most = max(float(tensor.detach().abs().max()) for tensor in given if tensor.numel())
        yield finding(
            "precision.overflow",
            "error",
            where=call.module,
            source=call.source,
            evidence=f"{call.name} gives +inf in {int(bad.sum())} of {output.numel()} elements in {output.dtype}; its "
            f"inputs are finite, at most {most:.4g}",
            cause=f"the result is beyond the greatest number of {output.dtype} "
            f"({torch.finfo(output.dtype).max:.4g}): squares and sums get there quickly",
            remedy="do this operation in float32 (tensor.float(), or autocast off around it), or scale its input down",
        )
        return
