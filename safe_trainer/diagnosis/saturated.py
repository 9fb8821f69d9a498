"""A sigmoid or tanh layer on the flat ends of its curve from the start: `activation.saturated`. Pure.

Flat is a derivative below 1e-3. In 98 healthy runs at most 2 % of a hidden layer's outputs lay there at the first step
(a faulty start: 71 %), and 17 % at the end. Layers that become flat by training may be right to be sure, an output
layer above all; so the first step decides, and the latest must not have mended it.
"""

from __future__ import annotations

from safe_trainer.diagnosis.evidence import Evidence
from safe_trainer.findings import Finding, Severity

__all__ = ["saturated_from_the_start"]

FLAT = 0.4
"""Share of flat outputs: twenty times what healthy layers start with, half of what wide weights give."""


def saturated_from_the_start(evidence: Evidence) -> list[Finding]:
    """One finding for all such layers; it names the first."""
    if len(evidence.measurements) < 2 or evidence.measurements[0].step != 1:
        return []
    begin, latest = evidence.measurements[0], evidence.measurements[-1]
    hidden = list(begin.layers.values())[:-1]  # the last to run is the output
    flat = [
        layer
        for layer in hidden
        if layer.saturated_share is not None
        and layer.saturated_share >= FLAT
        and "softmax" not in layer.kind.lower()
        and layer.name in latest.layers
        and (latest.layers[layer.name].saturated_share or 0.0) >= FLAT
    ]
    if not flat:
        return []
    first = flat[0]
    others = f" (and of {len(flat) - 1} more layers)" if len(flat) > 1 else ""
    return [
        Finding(
            fault="activation.saturated",
            severity=Severity.warning,
            stage="training",
            where=first.name,
            step=latest.step,
            evidence=f"{first.saturated_share:.0%} of the outputs of {first.name} ({first.kind}){others} lay where the "
            f"function is flat at the first step, {latest.layers[first.name].saturated_share:.0%} still do",
            cause="the layer's inputs are too large: weights drawn too wide for the number of inputs, or raw features",
            remedy="draw the weights by nn.init.xavier_uniform_, scale the inputs, or normalise in front of the layer",
        )
    ]
