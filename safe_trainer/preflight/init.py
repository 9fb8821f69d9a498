"""Check: the untrained model on real batches: does it run, is all finite, does its loss begin where chance begins,
are its units different and alive, do signal and gradient come through its depth.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

from safe_trainer.explain import explain
from safe_trainer.findings import CheckResult, Finding
from safe_trainer.gate import strangers
from safe_trainer.nonfinite import Circumstances, finding_from_trace
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.first_loss import loss_off
from safe_trainer.preflight.first_signal import dead_layers, half_overflow, saturated_layers, vanishing_gradient
from safe_trainer.preflight.outcome import ProgramFailed, finding, judged
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.symmetry import symmetric_layers
from safe_trainer.preflight.traced import trace_step
from safe_trainer.task import describe_batch, first_length
from safe_trainer.utils import tracer

Look = Callable[[Program, Clock], Iterator[Finding]]

TRACE_COST = 10
"""A traced step in plain steps, at most: it looks at every operation's result."""

LOOKS: tuple[Look, ...] = (loss_off, symmetric_layers, dead_layers, saturated_layers, vanishing_gradient, half_overflow)


def check(program: Program, clock: Clock) -> CheckResult:
    """Forward and backward of the batches read, then the looks at what they show."""
    try:
        first = trace_step(program, program.batch())
    except ProgramFailed as failure:
        return judged(f"the first step raises {failure}", list(_known(failure)))
    findings = list(_nonfinite(program, clock))
    if not findings:
        for look in LOOKS:
            with program.preserved():
                findings += look(program, clock)
    shapes = [str(tuple(call.output.shape)) for call in first.model_calls() if hasattr(call.output, "shape")]
    shape = f", output {shapes[0]}" if shapes else ""
    return judged(f"first loss {first.loss:.4g}{shape}; loss and gradients finite" if not findings else
                  f"first loss {first.loss:.4g}{shape}", findings)  # fmt: skip


FAULTS = (
    ("loss.wrong_target_dtype", r"expected scalar type Long|not implemented for '(Float|Double|Int|Long)'|Found dtype"),
    ("data.label_range", r"[Tt]arget -?\d+ is out of bounds|index out of range in self"),
    ("gradient.missing", r"does not require grad"),
    ("loss.input_domain", r"all elements of (input|target) should be between 0 and 1"),
)
"""Errors of PyTorch's that stand for a fault of the catalogue."""


def _known(failure: ProgramFailed) -> Iterator[Finding]:
    """What an error of PyTorch's is known to mean."""
    for fault, pattern in FAULTS:
        if re.search(pattern, str(failure)):
            meant = explain(failure.__cause__ or str(failure))
            yield finding(
                fault,
                "error",
                evidence=f"the first step raises {failure}",
                cause=meant.cause,
                remedy=meant.remedy,
                source=meant.where,
            )
            return


def _nonfinite(program: Program, clock: Clock) -> Iterator[Finding]:
    """The first batch whose loss or gradients are not finite, traced to the operation that made them so."""
    began, small = clock.spent(), program.batch()
    program.backward(small)
    share = (first_length(program.batches()[0]) or 1) / (first_length(small) or 1)
    fits = TRACE_COST * (clock.spent() - began) * share < clock.left() / 4
    for batch in program.batches() if fits else [small]:
        if clock.left() < clock.seconds / 2:
            return
        with program.preserved():
            trace = tracer.trace(
                functools.partial(program.forward_backward, batch),
                model=program.model,
                batch=batch,
                watched=strangers(program.model, program.optimizers),
            )
        if isinstance(trace.error, Exception) or not trace.reproduced:
            continue
        known = finding_from_trace(trace, Circumstances(step=0, batch=describe_batch(batch)))
        if program.precision.scaler is not None and known.fault == "gradient.nonfinite":
            continue  # an overflow under loss scaling is normal
        yield finding(
            known.fault, "error", where=known.where, source=known.source, evidence=known.evidence, cause=known.cause,
            remedy=known.remedy,
        )  # fmt: skip
        return
