"""Units that start alike and stay alike: a layer of them computes one thing, however wide it is."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import ProgramFailed, finding
from safe_trainer.preflight.program import Program

STEPS = 3
"""Steps after which units must differ. A branch that starts at zero on purpose does after the first or, behind another
that does, the second.
"""

ROUNDING = 1e-3
"""Of the way that the weights went: units apart by less have not been told apart but by rounding."""


def symmetric_layers(program: Program, clock: Clock) -> Iterator[Finding]:
    """Weights whose units begin equal to the bit and have moved as one after some steps."""
    held = {id(parameter) for parameter in program.parameters()}
    alike = {
        name: parameter
        for name, parameter in program.model.named_parameters()
        if parameter.requires_grad and id(parameter) in held and _are_alike(parameter)
    }
    if not alike:
        return
    before = {name: parameter.detach().clone() for name, parameter in alike.items()}
    batches = program.batches()
    try:
        for number in range(STEPS):
            program.step(batches[number % len(batches)])
    except ProgramFailed:
        return
    still = [name for name, parameter in alike.items() if _stayed_alike(parameter, before[name])]
    if not still:
        return
    name, shape = still[0], tuple(alike[still[0]].shape)
    yield finding(
        "init.zero_symmetric",
        "error",
        where=name.rpartition(".")[0] or name,
        evidence=f"all {shape[0]} units of {name} start with the same weights and still have them after {STEPS} steps"
        + (f"; so do {len(still) - 1} more" if len(still) > 1 else ""),
        cause="units with equal weights get equal gradients: nothing ever tells them apart, and the layer is one unit "
        "wide",
        remedy="start the weights at random (torch.nn.init.kaiming_normal_ or xavier_uniform_); only biases may be "
        "equal",
    )  # fmt: skip


def _are_alike(parameter: Tensor) -> bool:
    """Whether a weight has several units, each of several numbers, and all are the same."""
    if parameter.dim() < 2 or len(parameter) < 2 or not parameter.is_floating_point():
        return False
    values = parameter.detach()
    return bool((values == values[:1]).all())


def _stayed_alike(parameter: Tensor, before: Tensor) -> bool:
    """Whether all units have moved alike, or not at all, rounding apart."""
    values = parameter.detach()
    apart = float((values - values.mean(0, keepdim=True)).abs().max())
    return apart <= ROUNDING * float((values - before).abs().max())
