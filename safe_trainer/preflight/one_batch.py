"""Training on one batch for a while, at any multiple of the configured rates; what becomes of the loss.

Runs the program's own steps inside `preserved`, so nothing of it stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import ProgramFailed
from safe_trainer.preflight.program import Program

TAIL = 5
"""Last losses whose mean says where a run ended: dropout makes single ones jump."""

ENOUGH = 0.005
"""Share of the first loss that ends the steps: what is left is learned by heart."""

BOTTOMLESS = 20.0
"""A loss that fell by so many times its first size has no lower bound, and only goes on until it overflows."""


@dataclass
class Course:
    """Losses of some steps on one batch."""

    factor: float
    """Multiple of the configured learning rates."""
    losses: list[float] = field(default_factory=list)
    broke: bool = False
    """A loss that is not finite, or an error, ended it."""

    @property
    def first(self) -> float:
        """Loss before any step."""
        return self.losses[0] if self.losses else math.nan

    @property
    def last(self) -> float:
        """Where it ended; infinity if it broke."""
        if self.broke or not self.losses:
            return math.inf
        tail = self.losses[-TAIL:]
        return sum(tail) / len(tail)

    @property
    def fall(self) -> float:
        """By how much the loss came down, as a share of its size at the start; negative if it rose."""
        if not self.losses or not math.isfinite(self.first):
            return -math.inf
        return (self.first - self.last) / max(abs(self.first), 1e-12)

    @property
    def best_fall(self) -> float:
        """The same at the best moment: a loss without a lower bound may learn its batch so well that it overflows."""
        if len(self.losses) < TAIL:
            return -math.inf
        means = (sum(self.losses[at : at + TAIL]) / TAIL for at in range(1, len(self.losses) - TAIL + 1))
        return (self.first - min(means, default=math.inf)) / max(abs(self.first), 1e-12)


def train_on_one(program: Program, batch: Any, steps: int, clock: Clock, *, factor: float = 1.0) -> Course:
    """Up to `steps` steps on `batch`, fewer where the clock runs out or hardly anything is left of the loss."""
    course = Course(factor)
    for optimizer in program.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
    for number in range(steps):
        try:
            loss = program.step(batch)
        except ProgramFailed:
            course.broke = True
            break
        if not math.isfinite(loss):
            course.broke = True
            break
        course.losses.append(loss)
        is_learned = 0 <= course.last < ENOUGH * abs(course.first) or course.fall > BOTTOMLESS
        if number >= TAIL and (is_learned or clock.left() <= 0):
            break
    return course
