"""A learning rate that does harm, one that does nothing, and a decay that eats the weights. Pure.

Proof of harm are probes: the same batch, with the same random numbers, before and after the step that it caused.
"""

from __future__ import annotations

import math
from statistics import median_high

from safe_trainer.diagnosis.curve import has_learned, last_level
from safe_trainer.diagnosis.evidence import Evidence
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.measurements import Measurement

__all__ = ["rate_too_high", "rate_too_low", "weights_decay_away"]

WORSE = 1.25
"""A step that makes its own batch's loss so many times larger has gone far beyond the valley. Healthy runs do that
too, in their first steps; they recover, which is why the loss is looked at again after `SETTLED` steps."""
SETTLED = 100
TINY_STEP = 2e-5
"""Update over weight of the median layer. Healthy: 7e-4 to 1e-2, and 2e-4 at the end of a cosine; a rate of a millionth
gave 1e-6."""
NOTHING = 1e-3
"""Share of its loss that a step takes off its own batch: less is nothing. Healthy ones took 0.3 % and more."""
PROBES = 3
EATEN = 0.1
"""Norm of all weights over what it was at the first step; no healthy run lost half of it."""


def rate_too_high(evidence: Evidence) -> list[Finding]:
    """Steps make their own batch worse, and after a good while the loss is no better than at the start."""
    losses = [loss for loss in evidence.columns.get("loss", ()) if math.isfinite(loss)]
    worse = [probe for probe in evidence.probes if probe.before > 0 and not probe.after < WORSE * probe.before]
    level = last_level(evidence)
    if len(losses) < SETTLED or not worse or level is None or level < 0.95 * median_high(losses[:3]):
        return []
    rate = _rate_at(evidence, worse[0].step)
    return [
        Finding(
            fault="optimizer.lr_too_high",
            severity=Severity.warning,
            stage="training",
            step=worse[0].step,
            evidence=f"step {worse[0].step} took the loss of its own batch from {worse[0].before:.4g} to "
            f"{worse[0].after:.4g}, and {len(losses):,} steps in it is {level:.4g} (it began at {losses[0]:.4g})",
            cause=f"the learning rate{rate} is too high: steps overshoot, and what they break does not come back",
            remedy="take a tenth of it; warm it up over the first steps; or clip the gradients with clip_norm",
            symptoms=("training.diverging", "training.oscillating", "activation.dead"),
        )
    ]  # fmt: skip


def rate_too_low(evidence: Evidence) -> list[Finding]:
    """Updates are tiny beside the weights in every measured step, and no step helps even its own batch."""
    steps, probes = len(evidence.columns.get("loss", ())), evidence.probes[-PROBES:]
    if steps < SETTLED or len(probes) < PROBES or has_learned(evidence):
        return []
    measured: list[Measurement] = []
    ratios: list[float] = []
    for entry in reversed(evidence.measurements):
        ratio = _typical_update(entry)
        if ratio is not None:
            if ratio >= TINY_STEP:
                return []
            measured, ratios = [entry, *measured], [ratio, *ratios]
    if len(ratios) < PROBES:
        return []
    helped = max(abs(probe.before - probe.after) / (abs(probe.before) or 1.0) for probe in probes)
    if not 0 < max(ratios) < TINY_STEP or helped > NOTHING:
        return []
    return [
        Finding(
            fault="optimizer.lr_too_low",
            severity=Severity.warning,
            stage="training",
            step=measured[-1].step,
            evidence=f"a step changes a layer's weights by {max(ratios):.1e} of their norm at most, and its own "
            f"batch's loss by {helped:.1e} of it; after {steps:,} steps the loss is where it began",
            cause=f"the learning rate{_rate_at(evidence, measured[-1].step)} is far too low for these weights",
            remedy="raise it tenfold, and again, until a step changes weights by about a thousandth of their norm",
        )
    ]


def weights_decay_away(evidence: Evidence) -> list[Finding]:
    """Weight decay takes the weights to nothing, and with them what the network could say."""
    if not evidence.setting.weight_decay or len(evidence.measurements) < 2 or has_learned(evidence):
        return []
    first, last = _weight_norm(evidence.measurements[0]), _weight_norm(evidence.measurements[-1])
    if not 0 < last < EATEN * first:
        return []
    return [
        Finding(
            fault="optimizer.weight_decay",
            severity=Severity.warning,
            stage="training",
            step=evidence.measurements[-1].step,
            evidence=f"the norm of all weights fell from {first:.3g} to {last:.3g}, with a weight decay of "
            f"{evidence.setting.weight_decay:g}; the loss is where it began",
            cause="weight decay pulls the weights to zero faster than the gradients can build them up",
            remedy="take a weight decay of 1e-4 to 1e-2 (0.1 at most with AdamW); leave norms and biases out of it",
        )
    ]


def _typical_update(measured: Measurement) -> float | None:
    """Update over weight of the median weight matrix that moved."""
    ratios = [
        parameter.update_ratio
        for parameter in measured.parameters.values()
        if len(parameter.shape) > 1 and parameter.update_ratio
    ]
    return median_high(ratios) if ratios and all(map(math.isfinite, ratios)) else None


def _weight_norm(measured: Measurement) -> float:
    return math.sqrt(sum(p.weight_norm**2 for p in measured.parameters.values() if len(p.shape) > 1))


def _rate_at(evidence: Evidence, step: int) -> str:
    """In words, the learning rate of a step, if that is known."""
    steps, rates = evidence.columns.get("step", ()), evidence.columns.get("lr", ())
    known = [rate for number, rate in zip(steps, rates, strict=False) if number == step]
    return f" of {known[0]:.3g}" if known else ""
