"""The training loss goes on falling while the validation loss has long turned: `training.overfitting`. Pure.

One noisy evaluation proves nothing, and a gap alone is normal (dropout and augmentation even turn it round). So both
curves must part: the validation loss rises over the later half of the evaluations, stays far above its best in the last
quarter, and the training loss has meanwhile fallen to a fraction of what it was at that best.
"""

from __future__ import annotations

import math
from statistics import median_high

from safe_trainer.diagnosis.evidence import Evidence
from safe_trainer.findings import Finding, Severity

__all__ = ["overfitting"]

LEAST = 6
"""Evaluations after the best one: fewer may be noise."""
ABOVE = 1.5
"""Ratio of the later validation losses to the best; in healthy runs single evaluations reach it, never all of them."""
FALLEN = 0.5
"""Training loss over that at the best evaluation."""
NEAR = 20
"""Steps at most whose median is the training loss there; no more than up to the next evaluation."""
FEWEST = 3
"""Steps at least: one loss is chance."""


def overfitting(evidence: Evidence) -> list[Finding]:
    """One warning, once the curves have parted for good."""
    rows = [row for row in evidence.evaluations if math.isfinite(row.get("val/loss", math.nan))]
    losses = [row["val/loss"] for row in rows]
    if len(losses) <= LEAST or min(losses) <= 0:
        return []
    best = losses.index(min(losses))
    later = losses[best + 1 :]
    half, end = later[len(later) // 2 :], later[-max(LEAST // 2, len(later) // 4) :]
    rises = len(later) >= LEAST and median_high(half) > median_high(later[: len(later) // 2])
    if not rises or min(end) < ABOVE * losses[best]:
        return []
    # After the best evaluation, not before: the first epoch's losses are mostly those of an untrained network.
    until = min(rows[best]["step"] + NEAR, max(rows[best + 1]["step"], rows[best]["step"] + FEWEST))
    then = _training_loss(evidence, rows[best]["step"], until)
    now = _training_loss(evidence, rows[-1]["step"] - NEAR, rows[-1]["step"])
    if then is None or now is None or now > FALLEN * then:
        return []
    return [
        Finding(
            fault="training.overfitting",
            severity=Severity.warning,
            stage="training",
            step=int(rows[-1]["step"]),
            evidence=f"the validation loss was best at step {int(rows[best]['step']):,} ({losses[best]:.4g}) and has "
            f"risen to {losses[-1]:.4g}, while the training loss fell from {then:.4g} to {now:.4g}",
            cause="the network learns its training samples by heart: too few of them, or too noisy, for its size",
            remedy="stop early (early_stopping.patience), take the best checkpoint, add data or augmentation, weight "
            "decay or dropout, or a smaller network",
        )
    ]


def _training_loss(evidence: Evidence, after: float, until: float) -> float | None:
    """Median training loss of the steps behind `after`, up to `until`."""
    steps, losses = evidence.columns.get("step", ()), evidence.columns.get("loss", ())
    near = [loss for k, loss in zip(steps, losses, strict=False) if after < k <= until and math.isfinite(loss)]
    return median_high(near) if near else None
