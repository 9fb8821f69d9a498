"""Signals that grow or fade from layer to layer: `activation.exploding` and `gradient.vanishing`. Pure.

Sizes alone prove nothing: zero-initialised branches have no gradient at first, a converged network has little. So the
ends of one network are compared at one step, the ratio must last, and the loss must show the harm.
"""

from __future__ import annotations

import itertools
import math
from statistics import median_high

from safe_trainer.diagnosis.curve import first_level, has_learned
from safe_trainer.diagnosis.evidence import Evidence
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.measurements import Measurement

__all__ = ["growing_outputs", "vanishing_gradients"]

FADED = 1e-4
"""Gradient of the first third of the weights over that of the last third, each by weight norm. In healthy runs the
smallest layer's gradient is at least 0.05 of the largest (95 %); a deep sigmoid stack had 6e-9."""
MEASURED = 3
"""Measured steps in a row that must show it."""
GROWN = 1e4
"""Spread of the last layers' outputs over that of the first ones at the first step. Healthy networks keep it within a
factor of 100, with or without normalisation; thirty residual blocks with He-scaled branches reach 4e6."""
LEAST_LAYERS = 6
"""Layers, or weights, below which there is no depth to speak of."""


def vanishing_gradients(evidence: Evidence) -> list[Finding]:
    """The first weights learn next to nothing beside the last ones, and neither does the network."""
    if len(evidence.measurements) < MEASURED or has_learned(evidence):
        return []
    having = (measured for measured in reversed(evidence.measurements) if _gradients(measured))
    latest = list(itertools.islice(having, MEASURED))[::-1]
    if len(latest) < MEASURED:
        return []
    ratios = [_ratio_of_gradients(measured) for measured in latest]
    if not all(ratio is not None and 0 < ratio < FADED for ratio in ratios):
        return []
    names = list(_gradients(latest[-1]))
    where = names[0].rpartition(".")[0] or names[0]
    return [
        Finding(
            fault="gradient.vanishing",
            severity=Severity.warning,
            stage="training",
            where=where,
            step=latest[-1].step,
            evidence=f"beside their weights, the gradients of the first third of the layers are {ratios[-1]:.1e} of "
            f"those of the last third, in {MEASURED} measured steps in a row; the loss is where it began",
            cause="each layer on the way back scales the gradient down: many sigmoid or tanh layers, or small weights",
            remedy="use ReLU or GELU, normalisation, residual connections, or an initialisation that fits the function",
        )
    ]  # fmt: skip


def growing_outputs(evidence: Evidence) -> list[Finding]:
    """Outputs grow from layer to layer until the loss is beyond all measure, at the very first step."""
    if not evidence.measurements or evidence.measurements[0].step != 1:
        return []
    spreads = {
        name: layer.root_mean_square
        for name, layer in evidence.measurements[0].layers.items()
        if layer.root_mean_square > 0
    }
    values, third = list(spreads.values()), len(spreads) // 3
    losses = list(evidence.columns.get("loss", ()))
    if len(values) < LEAST_LAYERS or not losses:
        return []
    growth = median_high(values[-third:]) / median_high(values[:third]) if math.isfinite(sum(values)) else math.inf
    first, level = losses[0], first_level(evidence)
    harmed = not math.isfinite(first) or level is None or not has_learned(evidence) or any(map(math.isnan, losses))
    if growth < GROWN or not harmed:
        return []
    where = next((name for name, spread in spreads.items() if not spread < GROWN**0.5 * values[0]), list(spreads)[-1])
    return [
        Finding(
            fault="activation.exploding",
            severity=Severity.warning,
            stage="training",
            where=where,
            step=1,
            evidence=f"at the first step the outputs grow {growth:.1e} times from the first third of the layers to the "
            f"last; the first loss is {first:.3g}",
            cause="each layer, or each residual block, scales the signal up, and no normalisation holds it",
            remedy="add normalisation, scale the weights to the number of inputs (nn.init.kaiming_normal_), or start "
            "the last layer of each residual branch at zero",
            symptoms=("gradient.exploding", "init.loss_off"),
        )
    ]


def _gradients(measured: Measurement) -> dict[str, float]:
    """Gradient over weight norm of each weight matrix that has both, in the model's order."""
    return {
        name: parameter.gradient_norm / parameter.weight_norm
        for name, parameter in measured.parameters.items()
        if len(parameter.shape) > 1 and parameter.gradient_norm and parameter.weight_norm
    }


def _ratio_of_gradients(measured: Measurement) -> float | None:
    values = list(_gradients(measured).values())
    if len(values) < LEAST_LAYERS or not all(map(math.isfinite, values)):
        return None
    third = len(values) // 3
    return median_high(values[:third]) / median_high(values[-third:])
