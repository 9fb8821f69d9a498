"""Check: is everything connected as it was meant, from one traced step: parameters, graph, loss and what it is fed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from safe_trainer.findings import CheckResult, Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.loss_inputs import loss_inputs
from safe_trainer.preflight.outcome import judged
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reach import foreign_leaves, nothing_reached
from safe_trainer.preflight.shapes import broadcast_in_loss, softmax_of_one
from safe_trainer.preflight.traced import TracedStep, trace_step
from safe_trainer.preflight.unreached import unreached

Look = Callable[[Program, TracedStep], Iterator[Finding]]

LOOKS: tuple[Look, ...] = (nothing_reached, unreached, foreign_leaves, broadcast_in_loss, softmax_of_one, loss_inputs)


def check(program: Program, clock: Clock) -> CheckResult:
    """Trace one small batch and look at it from each side."""
    step = trace_step(program, program.batch())
    trainable = [parameter for parameter in program.model.parameters() if parameter.requires_grad]
    reached = sum(parameter.grad is not None for parameter in trainable)
    findings = [found for look in LOOKS for found in look(program, step)]
    return judged(
        f"{reached} of {len(trainable)} trainable parameters get a gradient; {len(step.calls)} calls seen", findings
    )
