"""Check: can the program learn one batch by heart, with its own step and optimizer; and if not, at which rate can it?

Learning one batch is what a wired-up network always can do (A. Karpathy, "A Recipe for Training Neural Networks",
2019). That it cannot is told apart: a wrong rate (another one can), a loss that adds up over the batch, a loss of the
wrong sign (it falls, and the answers get worse), or none of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from safe_trainer.findings import CheckResult, Finding, Status
from safe_trainer.gate import needs_closure
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.one_batch import Course, train_on_one
from safe_trainer.preflight.outcome import ProgramFailed, Skip, finding, judged
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import clone, cut
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
SELDOM = 0.5
"""Of chance: so seldom a true class comes first where a classifier has learned the opposite; and the mean rank of the
true class is then worse than the middle, where chance puts it."""
OPPOSED = 0.8
"""Minus the correlation of answers and targets from which a regression has learned the opposite."""


def check(program: Program, clock: Clock) -> CheckResult:
    """Learn one batch; where that fails, learn it at lower rates."""
    if len(program.optimizers) > 1:
        raise Skip("several optimizers work against or beside each other: one batch learned by heart proves nothing")
    if needs_closure(program.optimizer):
        raise Skip("the optimizer's step evaluates the loss several times, which takes its own time")
    batch = _fitting(program, clock)
    with program.preserved():
        start = _answers(program, batch)
        own = train_on_one(program, batch, STEPS, clock.part(0.4))
        end = _answers(program, batch)
    size = first_length(batch) or 1
    told = f"{size} samples, {len(own.losses)} steps: loss {own.first:.4g} to {own.last:.4g}"
    findings = list(_wrong_sign(program, own, start, end))
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


# --- a loss of the wrong sign ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrongness:
    """How wrong the model's answers are: mean rank of the true class, or minus the correlation with the targets."""

    value: float
    first: float | None = None
    """Share of samples whose true class comes first, in multiples of chance; None for a regression."""

    @property
    def is_opposite(self) -> bool:
        """Whether nothing but the opposite of the right answers explains this, after a loss has fallen."""
        if self.first is None:
            return self.value >= OPPOSED
        return self.first <= SELDOM and self.value > 0.5


def _answers(program: Program, batch: Any) -> Wrongness | None:
    """What is known of the answers to a batch, where the targets tell what is right."""
    if not program.has_forward:
        return None
    with torch.no_grad():
        outcome = program.forward(clone(batch))
    prediction, target = outcome.get("prediction"), outcome.get("target")
    if not isinstance(prediction, Tensor) or not isinstance(target, Tensor) or not prediction.is_floating_point():
        return None
    if not target.is_floating_point():
        return _ranks(prediction, target)
    if prediction.shape != target.shape or len(target.unique()) <= 2:
        return None  # of two values either may stand for "close", as in losses of distances
    both = torch.stack([prediction.float().flatten(), target.float().flatten()])
    return None if both.shape[1] < 4 else Wrongness(-float(torch.corrcoef(both)[0, 1]))


def _ranks(prediction: Tensor, target: Tensor) -> Wrongness | None:
    if prediction.dim() < 2 or prediction.shape[1] < 2 or target.shape != prediction.shape[:1] + prediction.shape[2:]:
        return None
    if bool(((target < 0) | (target >= prediction.shape[1])).any()):
        return None
    true = prediction.gather(1, target.unsqueeze(1).long())
    ranks = (prediction > true).float().sum(1)
    return Wrongness(
        float(ranks.mean() / (prediction.shape[1] - 1)), float((ranks == 0).float().mean()) * prediction.shape[1]
    )


def _wrong_sign(program: Program, own: Course, start: Wrongness | None, end: Wrongness | None) -> Iterator[Finding]:
    """The loss falls, and the answers end at the wrong end of the scale."""
    if start is None or end is None or own.fall < 4 * NOTHING:
        return
    if not end.is_opposite or end.value <= start.value:
        return
    how = (
        f"the true class comes first {end.first:.2g} times as often as by chance; its mean rank went from "
        f"{start.value:.2f} to {end.value:.2f} (0 is first, 1 last)"
        if end.first is not None
        else f"the answers' correlation with the targets went from {-start.value:.2f} to {-end.value:.2f}"
    )
    yield finding(
        "loss.wrong_sign",
        "error",
        where="loss_fn",
        evidence=f"on one batch the loss falls from {own.first:.4g} to {own.last:.4g} while {how}",
        cause="the loss is lowest where the answers are worst: a minus sign is missing (or one too many)",
        remedy="minimise the negative log-likelihood: put the minus in front of the mean of log-probabilities",
    )
