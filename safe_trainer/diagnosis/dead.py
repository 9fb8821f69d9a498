"""Units of a layer that answer to nothing: `activation.dead`, and `init.dead` if they were so from the start. Pure.

A unit counts if a rectifier gave exactly zero in it for every sample and place of several measured steps: a rectifier
passes no gradient where it gives zero, so nothing that feeds the unit can change through it. The share of zeros among
all outputs says nothing, as it is 30 to 80 % in healthy networks; whole units silent for a batch were at most 47 % in
98 healthy runs, and 97 to 100 % in layers that had been killed. In between lie sparse layers that do well: they are a
warning if the loss is where it began, and an info, which is no alarm, if the network learns.
"""

from __future__ import annotations

import re

from safe_trainer.diagnosis.curve import has_learned
from safe_trainer.diagnosis.evidence import Evidence
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.measurements import LayerStatistics, Measurement

__all__ = ["DEAD", "dead_layers", "dead_units"]

KILLED, DEAD = 0.97, 0.8
"""Share of dead units of a layer that is a warning anyway, and if the loss has not come down; see above."""
LEAST_STEPS = 2
"""Measured steps in the window: a single batch may lack what a unit answers to."""
_RECTIFIER = re.compile(r"relu6?(\(\))?|threshold|hardtanh(\(\))?", re.IGNORECASE)


def dead_units(evidence: Evidence) -> list[Finding]:
    """One finding for all dead layers; it names the first, since those behind it may starve because of it."""
    windows = [measured for measured in evidence.measurements if measured.window_steps >= LEAST_STEPS]
    layers = dead_layers(windows[-1], DEAD) if windows else []
    if not layers:
        return []
    sparse = has_learned(evidence) and max(layer.inactive_window_share for layer in layers) < KILLED
    latest, worst = windows[-1], layers[0]
    begin = evidence.measurements[0]
    born = begin.step == 1 and worst.name in begin.layers and begin.layers[worst.name].inactive_share >= DEAD
    others = f" (and of {len(layers) - 1} more layers)" if len(layers) > 1 else ""
    if born:
        cause = "they were dead from the first step: a bias far below zero, weights of one sign, or inputs too far out"
        remedy = "look at how the layer's bias and weights are initialised, and at the scale of its inputs"
    else:
        cause = (
            "an update pushed their inputs below zero for all data, mostly because the learning rate was too high; "
            "without a gradient they cannot come back"
        )
        remedy = "lower the learning rate or warm it up; use LeakyReLU or GELU; repair.dead_units=true revives units"
    return [
        Finding(
            fault="init.dead" if born else "activation.dead",
            severity=Severity.info if sparse else Severity.warning,
            stage="training",
            where=worst.name,
            step=latest.step,
            evidence=f"{worst.inactive_window_share:.0%} of the {worst.units} units of {worst.name} ({worst.kind})"
            f"{others} gave exactly zero for all samples of {latest.window_steps} measured steps: no gradient passes"
            f"{'; the network learns all the same' if sparse else ''}",
            cause=cause,
            remedy=remedy,
        )
    ]


def dead_layers(measured: Measurement, share: float = DEAD) -> list[LayerStatistics]:
    """Rectified layers with at least this share of dead units, in the order they run."""
    return [
        layer
        for layer in measured.layers.values()
        if _RECTIFIER.fullmatch(layer.kind)
        and layer.units > 1
        and layer.needs_gradient
        and layer.finite
        and layer.inactive_window_share >= share
    ]
