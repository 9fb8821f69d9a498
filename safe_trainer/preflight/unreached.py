"""Parameters that the loss depends on and that no gradient reaches, because something on the way has none.

Runs forward and backward of a few batches, and the forward with such parameters drawn anew: that is the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from safe_trainer.diagnosis.parameters import common_module
from safe_trainer.findings import Finding
from safe_trainer.preflight.graph import leaves
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reach import CUTS
from safe_trainer.preflight.reading import tensors
from safe_trainer.preflight.traced import Call, TracedStep
from safe_trainer.utils import rng

FLAT = ("round", "round_", "floor", "floor_", "ceil", "ceil_", "sign", "sign_", "trunc", "trunc_", "sgn", "heaviside")
"""Calls whose gradient is zero everywhere."""
BATCHES = 4
"""Batches in none of which a gradient may come: an expert that a router chose for no sample of one has a day off."""
MOVED = 1e-6
"""Share of the loss by which it must move, beyond float32's rounding, when the parameters are drawn anew."""


def unreached(program: Program, step: TracedStep) -> Iterator[Finding]:
    """Trainable parameters in the optimizer, in front of a call without a gradient, that the loss depends on."""
    if not program.has_forward or len(program.optimizers) > 1:
        return
    waiting = _waiting(program)
    cuts = [(call, {id(leaf) for leaf in leaves(*_given(call))}) for call in step.calls if _cuts(call)]
    # Zeros come from a call that is flat, and from dead units; only a missing gradient comes from a cut.
    behind = {
        name: p
        for name, p in waiting.items()
        if any(id(p) in found and (p.grad is None) is (call.name not in FLAT) for call, found in cuts)
    }
    for batch in program.batches()[1:BATCHES] if behind else ():
        program.backward(batch)
        behind = {name: p for name, p in behind.items() if _is_without(p)}
    if not behind or not _matter(program, behind):
        return
    call = next(call for call, found in cuts if any(id(p) in found for p in behind.values()))
    names = ", ".join(list(behind)[:3]) + (" ..." if len(behind) > 3 else "")
    yield finding(
        "gradient.missing",
        "warning",
        where=common_module([name.rpartition(".")[0] or name for name in behind]),
        source=call.source,
        evidence=f"{len(behind)} trainable parameters in the optimizer ({names}) got no gradient in {BATCHES} batches, "
        f"and the loss is another one when they are drawn anew: {call.name} on the way has no gradient",
        cause="a choice or a rounding (argmax, round, a cast to whole numbers) or a detach stands between them and the "
        "loss: they stay as they were drawn",
        remedy="weigh in place of choosing (softmax, gumbel_softmax, a straight-through estimator), take the detach "
        "away, or set requires_grad_(False) if they are not to learn",
    )  # fmt: skip


def _waiting(program: Program) -> dict[str, nn.Parameter]:
    """Trainable parameters in the optimizer, of modules that train, without a gradient, where others have one."""
    held = {id(parameter) for parameter in program.parameters()}
    found, others = {}, False
    for path, module in program.model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not _is_without(parameter):
                others = True
            elif parameter.requires_grad and id(parameter) in held and module.training:
                found[f"{path}.{name}".lstrip(".")] = parameter
    return found if others else {}


def _is_without(parameter: nn.Parameter) -> bool:
    """Whether there is no gradient, or one of nothing but zeros."""
    return parameter.grad is None or not bool(parameter.grad.any())


def _given(call: Call) -> list[torch.Tensor]:
    return list(tensors((call.args, call.kwargs)))


def _cuts(call: Call) -> bool:
    """Whether a call with autograd on takes what hangs on the graph and gives what does not, or passes zeros back."""
    if not call.with_grad or not any(tensor.requires_grad for tensor in _given(call)):
        return False
    ends = call.name in CUTS and not any(tensor.grad_fn is not None for tensor in tensors(call.output))
    return ends or call.name in FLAT


def _matter(program: Program, parameters: dict[str, nn.Parameter]) -> bool:
    """Whether the loss moves with these parameters, and forward does not set them itself, as running averages do."""
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    before = _loss(program)
    own = any(program.model.get_parameter(name) is not p or not torch.equal(p, kept[name])
              for name, p in parameters.items())  # fmt: skip
    if own or not math.isfinite(before) or before != _loss(program):
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters.values():
            spread = float(parameter.float().std()) if parameter.numel() > 1 else 0.0
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(drawn * (spread or 1.0))
        after = _loss(program)
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    return math.isfinite(after) and abs(after - before) > MOVED * max(abs(before), 1e-12)


def _loss(program: Program) -> float:
    """Loss of the first batch, with the same random numbers each time."""
    with rng.isolated():
        torch.manual_seed(0)
        return float(program.loss(program.batch()).detach())
