"""Check: can the program learn one batch by heart, with its own step and optimizer; and if not, at which rate can it?

Learning one batch is what a wired-up network always can do (A. Karpathy, "A Recipe for Training Neural Networks",
2019). That it cannot is told apart: a wrong rate (another one can), a loss that adds up over the batch, a loss of the
wrong sign (it falls, and the answers get worse), or none of these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from safe_trainer.findings import CheckResult, Finding, Status
from safe_trainer.gate import needs_closure
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.one_batch import Course, train_on_one
from safe_trainer.preflight.outcome import ProgramFailed, Skip, finding, judged
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import cut
from safe_trainer.preflight.wrong_sign import agreement_with_answers, wrong_sign
from safe_trainer.task import first_length

STEPS = 120
"""Steps on the batch: a sound small network needs some dozens."""
LITTLE = 0.25
"""A loss that came down by more than this share is being learned from, if slowly: floors (label smoothing), dropout."""
LEARNED = 0.75
"""Share of the loss that a lower rate must take away before the configured one, which takes away LITTLE, is blamed."""
THROWN = 10.0
"""Times the first loss that a rate throws a loss up to before it overflows; what overflows without has other causes."""
NOTHING = 0.05
"""A loss that came down by less than this share has not been learned from."""
RESCUES = (0.1, 0.01, 0.001)
"""Multiples of the configured rate that are tried when it does not work."""


def check(program: Program, clock: Clock) -> CheckResult:
    """Learn one batch; where that fails, learn it at lower rates."""
    if len(program.optimizers) > 1:
        raise Skip("several optimizers work against or beside each other: one batch learned by heart proves nothing")
    if needs_closure(program.optimizer):
        raise Skip("the optimizer's step evaluates the loss several times, which takes its own time")
    batch = _fitting(program, clock)
    with program.preserved():
        agreement = agreement_with_answers(program, batch)
        own = train_on_one(program, batch, STEPS, clock.part(0.4))
    size = first_length(batch) or 1
    told = f"{size} samples, {len(own.losses)} steps: loss {own.first:.4g} to {own.last:.4g}"
    findings = list(wrong_sign(own, agreement))
    if findings or own.best_fall > LITTLE:
        return judged(told, findings)
    if program.scheduler is not None and abs(own.fall) < NOTHING:
        return judged(f"{told}; a scheduler changes the rate later on, so this says little")
    if own.broke and max(own.losses, default=0.0) < THROWN * abs(own.first):
        return replace(judged(f"{told}; then the loss is not finite, which the fuse traces"), status=Status.warned)
    findings, more = _rescued(program, batch, own, clock)
    result = judged(told + more, findings)
    return result if findings or own.best_fall > NOTHING else replace(result, status=Status.warned)


def _fitting(program: Program, clock: Clock) -> Any:
    """The first training batch as it is if its steps fit the time, else some samples of it."""
    whole, small = program.batches()[0], program.batch()
    with program.preserved():
        began = clock.spent()
        program.step(small)
        took = clock.spent() - began
    share = (first_length(whole) or 1) / (first_length(small) or 1)
    return whole if STEPS * took * share < 0.25 * clock.seconds else small


def _rescued(program: Program, batch: Any, own: Course, clock: Clock) -> tuple[list[Finding], str]:
    """Try lower rates; what that says, as findings and as words."""
    for number, factor in enumerate(RESCUES):
        with program.preserved():
            course = train_on_one(program, batch, STEPS, clock.part(1 / (len(RESCUES) + 1 - number)), factor=factor)
        if course.fall >= LEARNED or (min(own.fall, own.best_fall) < -1 and course.fall > LITTLE):
            return [_too_high(program, batch, own, course)], ""
        if clock.left() <= 0:
            break
    rates = ", ".join(f"{factor:g}" for factor in RESCUES)
    return [], f"; it is not learned at {rates} times the rate either: look at wiring, data and capacity"


def _too_high(program: Program, batch: Any, own: Course, course: Course) -> Finding:
    rate = float(program.optimizer.param_groups[0]["lr"])
    became = "is no longer finite" if own.broke else f"goes from {own.first:.4g} to {own.last:.4g}"
    evidence = (
        f"on one batch the loss {became} in {len(own.losses)} steps at the configured rate {rate:g}, and from "
        f"{course.first:.4g} to {course.last:.4g} at {rate * course.factor:g}"
    )
    if _adds_up(program, batch):
        size = first_length(batch) or 1
        return finding(
            "loss.reduction",
            "warning",
            where="train_step" if program.train_step else "loss_fn",
            evidence=f"{evidence}; the loss of half the batch is half the loss: it is a sum over {size} samples",
            cause="a sum makes gradients as many times larger as there are samples, so the rate is too high by that "
            "factor and depends on the batch size",
            remedy="take the mean over the batch (reduction='mean'), or divide the rate by the batch size",
        )
    return finding(
        "optimizer.lr_too_high",
        "warning",
        evidence=evidence,
        cause="the learning rate is too high for this program: each step overshoots",
        remedy=f"try lr={rate * course.factor:g}; mode=find_lr draws the whole curve",
    )


def _adds_up(program: Program, batch: Any) -> bool:
    """Whether the loss of a batch is the sum, and not the mean, of what its halves give."""
    size = first_length(batch) or 1
    half = cut(batch, size // 2)
    if size < 4 or first_length(half) != size // 2:
        return False
    program.model.eval()
    try:
        whole, part = program.backward(batch), program.backward(half)
    except ProgramFailed:
        return False
    finally:
        program.model.train()
    return part != 0 and 1.6 < whole / part < 2.4
