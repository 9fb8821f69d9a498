"""Whether the loss gets anywhere: `training.not_decreasing`, `training.oscillating` and `training.plateau`. Pure.

A loss that stands still is legal: the run began at its optimum, labels are noise, two networks are opposed, the loss is
a surrogate. So an alarm takes proof by the very batch: its loss is looked at again right after the step that it caused.
At an optimum of noisy data a step still does its own batch good; where it does none, or harm, something is wrong.
All of these are symptoms: where a cause is known they are told under it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from safe_trainer.diagnosis.curve import first_level, has_learned, last_level
from safe_trainer.diagnosis.evidence import Evidence, Probe
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.statistics import location_and_spread, trend

__all__ = ["not_decreasing", "oscillating", "plateau"]

LEAST_STEPS = 100
"""Losses before anything is said; sigmoid stacks of two or three layers may need some dozens until they move."""
FALLING = 0.9
"""Probability of a falling line from which on a loss may be falling."""
PROBES = 6
"""Probes that must agree. A step that has nothing to do with its batch does it good every other time: 2^-6 is 1.6 %."""
NOTHING = 1e-6
"""Relative change of a loss that float32 rounding explains (its last digit is 6e-8, and a loss is a sum of many)."""
VARIES = 1e-3
"""Relative spread of losses from batch to batch; with less, the loss may be exactly at its floor: a hinge that is
satisfied, the one batch of a full-batch run at its optimum."""
SWING = 50
"""Latest losses that are looked at for a swing."""
TURNS = 0.9
"""Share of losses that are above, or below, both neighbours. Of independent noise it is 2/3, with a deviation of 6 %
among 48 (Bienaymé), so this is 3.8 of them beyond it; what remembers its past turns less."""
LATELY = 3
"""Latest probes, of the run's second half, one of which at least must show harm to its own batch."""
HARM = 0.02
"""Rise of its own batch's loss, as a share of the level that the run began at, from which on a step did harm: a run
that has converged to nothing may swing there by large factors."""
LONG = 400
"""Steps before a plateau is spoken of."""
HIGH = 0.5
"""Share of the first level that is far from any floor that we could guess."""


def not_decreasing(evidence: Evidence) -> list[Finding]:
    """At the end: the loss is no better than at the start, and steps do no good to their own batch.

    A warning with that proof; without it an info, since the loss may have begun at its floor.
    """
    losses = _finite(evidence)
    level, began = last_level(evidence), first_level(evidence)
    if not evidence.ended or len(losses) < LEAST_STEPS or has_learned(evidence) or level is None or began is None:
        return []
    if 1 - trend(losses).probability_rising >= FALLING:
        return []
    proof = _no_good(evidence.probes, losses)
    return [
        Finding(
            fault="training.not_decreasing",
            severity=Severity.warning if proof else Severity.info,
            stage="training",
            step=int(evidence.columns["step"][-1]),
            evidence=f"the loss began at {began:.4g} and ends at {level:.4g} after {len(losses):,} steps, without a "
            f"falling trend{proof and '; ' + proof}",
            cause="steps do not lead downhill: a gradient that is not the loss's, a part of the network that nothing "
            "passes, or a rate far too high or low"
            if proof
            else "the loss may have begun at its floor, or the labels may not depend on the inputs",
            remedy="fit one batch of eight samples by itself: a sound program takes its loss to nearly nothing",
        )
    ]


def oscillating(evidence: Evidence) -> list[Finding]:
    """The loss goes up and down in turn and no longer falls, and steps throw up the loss of their own batch."""
    losses = _finite(evidence)
    recent = losses[-SWING:]
    began = first_level(evidence)
    if len(losses) < LEAST_STEPS or began is None:
        return []
    turns = [(b - a) * (c - b) < 0 for a, b, c in zip(recent, recent[1:], recent[2:], strict=False)]
    share = sum(turns) / len(turns)
    harmful = [p for p in _lately(evidence) if p.after - p.before > HARM * abs(began)]
    if share < TURNS or not harmful or 1 - trend(recent).probability_rising >= FALLING:
        return []
    return [
        Finding(
            fault="training.oscillating",
            severity=Severity.warning,
            stage="training",
            step=harmful[-1].step,
            evidence=f"of the latest {len(recent)} losses {share:.0%} are above or below both neighbours (noise: 67 %)"
            f", between {min(recent):.4g} and {max(recent):.4g}, and step {harmful[-1].step:,} took its own batch "
            f"from {harmful[-1].before:.4g} to {harmful[-1].after:.4g}",
            cause="steps leap from one wall of the valley to the other: the learning rate is too high",
            remedy="take a third of the learning rate, and again; less momentum",
        )
    ]


def plateau(evidence: Evidence) -> list[Finding]:
    """At the end: the loss came down, and has long stood still far above nothing. An info: it may be the floor."""
    losses = _finite(evidence)
    level, began = last_level(evidence), first_level(evidence)
    if not evidence.ended or len(losses) < LONG or level is None or began is None or not has_learned(evidence):
        return []
    half = losses[len(losses) // 2 :]
    quarter = len(half) // 2
    early, late = location_and_spread(half[:quarter]), location_and_spread(half[quarter:])
    stands = abs(early[0] - late[0]) <= 0.02 * abs(early[0]) and 1 - trend(half).probability_rising < FALLING
    if min(losses) <= 0 or level < HIGH * began or not stands:
        return []
    return [
        Finding(
            fault="training.plateau",
            severity=Severity.info,
            stage="training",
            step=int(evidence.columns["step"][-1]),
            evidence=f"the loss came down from {began:.4g}, and for the last {len(half):,} steps it has stood at "
            f"{late[0]:.4g}",
            cause="noise in the labels sets a floor; or the network is too small, or the rate too high to settle",
            remedy="lower the rate by a schedule; then try a wider network: if its training loss is lower, this one is "
            "too small",
        )
    ]


def _finite(evidence: Evidence) -> list[float]:
    return [loss for loss in evidence.columns.get("loss", ()) if math.isfinite(loss)]


def _lately(evidence: Evidence) -> list[Probe]:
    """The latest looks at what a step did to its own batch.

    Where an epoch is one batch, each loss is that of the step before on the same batch. That is needed there: in a
    swing of period two, all measured steps may lie on its way down.
    """
    steps, losses = list(evidence.columns.get("step", ()))[-SWING:], list(evidence.columns.get("loss", ()))[-SWING:]
    if evidence.setting.epoch_length == 1:
        return [Probe(step=int(k), before=b, after=a) for k, b, a in zip(steps, losses, losses[1:], strict=False)]
    return [probe for probe in evidence.probes[-LATELY:] if steps and probe.step > steps[-1] // 2]


def _no_good(probes: Sequence[Probe], losses: Sequence[float]) -> str:
    """Words on steps that all do their own batch no good; empty if that is not proven."""
    known = [probe for probe in probes if math.isfinite(probe.before)]
    if len(known) < PROBES:
        return ""
    changes = [(probe.after - probe.before) / (abs(probe.before) or 1.0) for probe in known]
    if all(not change <= NOTHING for change in changes):
        return f"each of {len(known)} steps that were looked at made the loss of its own batch worse"
    middle, spread = location_and_spread(losses)
    if all(abs(change) <= NOTHING for change in changes) and spread > VARIES * abs(middle):
        return f"none of {len(known)} steps that were looked at changed the loss of its own batch"
    return ""
