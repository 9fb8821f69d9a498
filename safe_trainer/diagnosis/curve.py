"""What several rules ask of the loss curve: has the run learned anything? Pure."""

from __future__ import annotations

import math
from statistics import median_high

from safe_trainer.diagnosis.evidence import Evidence

__all__ = ["first_level", "has_learned", "last_level"]

ENDS = 10
"""Finite losses at either end whose median is the level there: few, as a loss soon falls; not one, which is noise."""
LEARNED = 0.1
"""Least fall from the first level, as a share of it, to call it learning. Healthy runs fall by more within 60 steps."""


def first_level(evidence: Evidence) -> float | None:
    """Median of the first finite losses."""
    losses = [loss for loss in list(evidence.columns.get("loss", ()))[: 2 * ENDS] if math.isfinite(loss)]
    return median_high(losses[:ENDS]) if losses else None


def last_level(evidence: Evidence) -> float | None:
    """Median of the latest finite losses."""
    losses = [loss for loss in list(evidence.columns.get("loss", ()))[-2 * ENDS :] if math.isfinite(loss)]
    return median_high(losses[-ENDS:]) if losses else None


def has_learned(evidence: Evidence) -> bool:
    """Whether the loss has come down at all; true also where that cannot be told."""
    first, last = first_level(evidence), last_level(evidence)
    return first is None or last is None or last < first - LEARNED * abs(first)
