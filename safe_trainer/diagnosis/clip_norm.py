"""Gradients that explode, `gradient.exploding`, and the `clip_norm` that would have held them. Pure.

In 98 healthy runs the largest gradient norm was at most 362 times the median, and 31 times in 95 % of them: a single
large one proves nothing. So most of three steps in a row must be far beyond the run's own past, and the loss must not
come back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high

from safe_trainer.diagnosis.evidence import Evidence
from safe_trainer.findings import Finding, Severity

__all__ = ["exploding_gradients", "suggested_clip_norm"]

LEAST = 30
"""Healthy norms that a suggestion takes."""
RECENT = 200
"""Norms that a suggestion looks back on: as the network learns, gradients change."""
WILD = 10.0
"""Norms beyond so many medians are no part of the healthy ones."""
QUANTILE, ROOM = 0.9, 2.0
"""The suggestion is so many times this quantile: it leaves nearly every healthy step as it is."""
FAR = 100.0
"""Norms beyond so many medians of the past are exploding, if they come two in three; see above."""
HARM = 1.5
"""Loss afterwards over the loss before."""


def suggested_clip_norm(norms: Sequence[float]) -> float | None:
    """A bound that leaves healthy steps alone: twice the 90 % quantile of the latest healthy norms, in two digits."""
    finite = [norm for norm in norms if math.isfinite(norm) and norm > 0][-RECENT:]
    if len(finite) < LEAST:
        return None
    usual = median_high(finite)
    healthy = sorted(norm for norm in finite if norm <= WILD * usual)
    return float(f"{ROOM * healthy[int(QUANTILE * (len(healthy) - 1))]:.2g}")


def exploding_gradients(evidence: Evidence) -> list[Finding]:
    """The global norm leaves the run's own past by a factor of a hundred, and the loss goes with it."""
    norms, losses = list(evidence.columns.get("grad_norm", ())), list(evidence.columns.get("loss", ()))
    place = _onset(norms)
    if place is None:
        return []
    before = [loss for loss in losses[max(0, place - LEAST) : place] if math.isfinite(loss)]
    after = losses[place + 1 :][-LEAST:]
    finite = [loss for loss in after if math.isfinite(loss)]
    lost = len(after) >= 3 and (not finite or (before and median_high(finite) > HARM * abs(median_high(before))))
    if not lost:
        return []
    clip, usual = suggested_clip_norm(norms[:place]), median_high(filter(math.isfinite, norms[:place]))
    step = int(evidence.columns["step"][place])
    advice = f"clip the gradients, clip_norm={clip:g} (twice what healthy steps had)" if clip else "clip the gradients"
    return [
        Finding(
            fault="gradient.exploding",
            severity=Severity.warning,
            stage="training",
            step=step,
            evidence=f"the gradient norm rose to {norms[place]:.3g} at step {step:,} (median before: {usual:.3g}), and "
            "the loss has not come back",
            cause="a step into a steep place: no normalisation, a recurrent network, or a learning rate too high",
            remedy=f"{advice}, or clip_norm=auto; lower the learning rate; normalise",
            symptoms=("training.diverging",),
        )
    ]


def _onset(norms: Sequence[float]) -> int | None:
    """Where the norms leave their past: the first of two in three that are far beyond its median."""
    past: list[float] = []
    least = math.inf
    for place, norm in enumerate(norms):
        # The median is no less than the smallest so far, which is quicker to know.
        if len(past) >= LEAST and not norm <= FAR * least:
            bound = FAR * median_high(past[-RECENT:])
            if not norm <= bound and sum(not value <= bound for value in norms[place : place + 3]) >= 2:
                return place
        if math.isfinite(norm):
            past.append(norm)
            least = min(least, norm)
    return None
