"""Check and finder: the loss along a ramp of learning rates, from nothing to far too much, and what it suggests.

The range test is L. N. Smith's ("Cyclical Learning Rates for Training Neural Networks", 2017): one step for each rate,
the rates evenly spaced on a log axis, the loss smoothed with the start's bias corrected, an end where it diverges.
Everything is put back by the caller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from safe_trainer.findings import CheckResult, Finding
from safe_trainer.gate import needs_closure
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.one_batch import train_on_one
from safe_trainer.preflight.outcome import ProgramFailed, Skip, finding, judged
from safe_trainer.preflight.program import Program

LEAST, MOST = 1e-7, 10.0
"""Ends of the ramp: below the one no recipe trains, above the other hardly any."""
POINTS = 100
"""Steps of the ramp: 12 for each power of ten."""
SMOOTHING = 0.9
"""Weight of the past in the smoothed loss: about the last ten steps."""
DIVERGED = 4.0
"""Times the best smoothed loss, above its first, at which the ramp ends (the customary factor of range tests)."""
FELL = 0.05
"""Share of the first loss that must be gone at some rate before a suggestion is more than noise."""
BEGUN = 0.1
"""Share of the whole fall after which it has begun: a steep step before that is noise."""
BEYOND = 10.0
"""Times the rate at which the ramp diverged from which a configured rate is called too high: the ramp diverges somewhat
late, as its steps have only just begun to be large, and an optimizer with momentum later still."""
HOPELESS = 1e-4
"""Share of the suggestion below which a rate is called too low: fine-tuning takes a hundredth of it at the least."""
NOTHING = 1e-3
"""Share of the first loss that 30 steps on one batch move at least, at any rate that trains."""


@dataclass(kw_only=True)
class LearningRateCurve:
    """What a range test showed."""

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """As they came, one for each rate."""
    smoothed: list[float] = field(default_factory=list)
    """Their running average, with the differences between the batches taken out."""
    suggestion: float | None = None
    """A tenth of the rate at which the loss falls fastest (on a log axis); None if the curve does not show one."""
    valley: float | None = None
    """The rate two thirds down the longest fall, another customary choice."""
    diverged_at: float | None = None
    """The rate at which the ramp ended; None if it came to its upper end."""
    reason: str = ""
    """Why there is, or is not, a suggestion."""


def check(program: Program, clock: Clock) -> CheckResult:
    """Draw the curve, and hold the configured rate against it."""
    group = program.optimizer.param_groups[0]
    configured = max(float(group["lr"]), float(group.get("initial_lr", 0.0)))  # a warm-up begins far below its rate
    with program.preserved():
        curve = find(program, clock.part(0.7))
    told = (
        f"{len(curve.rates)} rates from {LEAST:g} to {curve.rates[-1]:.2g}; {curve.reason}; configured {configured:g}"
    )
    return judged(told, _too_high(program, configured, curve, clock) or _too_low(program, configured, curve, clock))


def _too_high(program: Program, configured: float, curve: LearningRateCurve, clock: Clock) -> list[Finding]:
    """A rate far beyond the divergence, where a trial at that rate confirms it."""
    if curve.diverged_at is None or configured < BEYOND * curve.diverged_at or curve.suggestion is None:
        return []
    with program.preserved():
        trial = train_on_one(program, program.batch(), 30, clock)
    if trial.best_fall > FELL:
        return []
    return [
        finding(
            "optimizer.lr_too_high",
            "warning",
            evidence=f"the loss diverges at a rate of {curve.diverged_at:.2g}; the configured one is {configured:g}, "
            f"and 30 steps with it take the loss of one batch from {trial.first:.4g} to {trial.last:.4g}",
            cause="the learning rate is too high for this program: each step overshoots",
            remedy=f"try lr={curve.suggestion:.2g}",
        )
    ]


def _too_low(program: Program, configured: float, curve: LearningRateCurve, clock: Clock) -> list[Finding]:
    """A rate far below all that moves the loss, where a trial at that rate confirms it."""
    if curve.suggestion is None or not 0 < configured < HOPELESS * curve.suggestion:
        return []
    current = float(program.optimizer.param_groups[0]["lr"])
    trials = []
    for rate in (configured, 0.0):  # with the same random numbers: what differs is what the rate does
        with program.preserved():
            factor = rate / current if current else 1.0
            trials.append(train_on_one(program, program.batch(), 30, clock, factor=factor))
    trial, still = trials
    if not current or trial.broke or still.broke or abs(trial.last - still.last) > NOTHING * abs(trial.first):
        return []
    return [
        finding(
            "optimizer.lr_too_low",
            "warning",
            evidence=f"30 steps at the configured rate {configured:g} take the loss of one batch from "
            f"{trial.first:.5g} to {trial.last:.5g}, and a rate of 0 to {still.last:.5g}; on the ramp the loss falls "
            f"fastest at {10 * curve.suggestion:.2g}",
            cause="the learning rate is too low: the weights hardly move",
            remedy=f"try lr={curve.suggestion:.2g}",
        )
    ]


def find(program: Program, clock: Clock) -> LearningRateCurve:
    """One step for each rate, on the batches that were read, in turn.

    Raises:
        Skip: a ramp makes no sense for this program.
    """
    if len(program.optimizers) > 1 or needs_closure(program.optimizer):
        raise Skip("a ramp of rates needs one optimizer that steps once for each batch")
    curve, batches = LearningRateCurve(), program.batches()
    baseline: list[float] = []
    groups = program.optimizer.param_groups
    first = float(groups[0]["lr"]) or 1.0
    shares = [float(group["lr"]) / first or 1.0 for group in groups]
    average = 0.0
    for number in range(POINTS):
        rate = LEAST * (MOST / LEAST) ** (number / (POINTS - 1))
        for group, share in zip(groups, shares, strict=True):
            group["lr"] = rate * share
        try:
            loss = program.step(batches[number % len(batches)])
        except ProgramFailed:
            if not number:
                raise
            loss = math.nan
        if not math.isfinite(loss):
            curve.diverged_at = rate
            break
        if number < len(batches):
            baseline.append(loss)
        # Less what the batch had at rates that change nothing: else the curve shows which batches are hard.
        level = baseline[0] + loss - baseline[number % len(batches)]
        average = SMOOTHING * average + (1 - SMOOTHING) * level
        curve.rates.append(rate)
        curve.losses.append(loss)
        curve.smoothed.append(average / (1 - SMOOTHING ** (number + 1)))
        if _has_diverged(curve.smoothed):
            curve.diverged_at = rate
            break
        if clock.left() <= 0 and number >= POINTS // 2:
            break
    if not curve.rates:
        raise Skip("the loss of the first step is not finite")
    _suggest(curve)
    return curve


def _has_diverged(smoothed: list[float]) -> bool:
    """Whether the loss has left its best value behind for good; a loss may be negative, so by its distance to it."""
    best, first = min(smoothed), smoothed[0]
    return smoothed[-1] - best > (DIVERGED - 1) * max(abs(best), 0.1 * abs(first)) and smoothed[-1] > first


def _suggest(curve: LearningRateCurve) -> None:
    smoothed, rates = curve.smoothed, curve.rates
    best = min(range(len(smoothed)), key=smoothed.__getitem__)
    fell = (smoothed[0] - smoothed[best]) / max(abs(smoothed[0]), 1e-12)
    if fell < FELL or best < 3:
        curve.reason = f"no suggestion: the loss never fell by more than {max(fell, 0):.1%}"
        return
    mark = smoothed[0] - BEGUN * (smoothed[0] - smoothed[best])
    begun = max(1, *(at for at in range(best) if smoothed[at] > mark))
    steepest = min(range(begun, best), key=lambda at: smoothed[at + 1] - smoothed[at - 1])
    curve.suggestion, curve.valley = rates[steepest] / 10, _valley(curve, begun)
    curve.reason = (
        f"suggested {curve.suggestion:.2g}, a tenth of where the loss falls fastest (valley: {curve.valley:.2g})"
    )


def _valley(curve: LearningRateCurve, begun: int) -> float:
    """The rate two thirds down the longest run of points that only falls, once the fall has begun."""
    start, longest = begun, (0, begun)
    for at in range(begun + 1, len(curve.smoothed)):
        if curve.smoothed[at] >= curve.smoothed[at - 1]:
            start = at
        longest = max(longest, (at - start, start))
    length, start = longest
    return curve.rates[start + 2 * length // 3]
