"""A layer that gives the same answer whatever comes in, `activation.collapsed`. Pure.

Two proofs that hold by themselves: what feeds the layer gets a gradient of exactly zero, or infinities stand before it.
That samples come out the same counts only while the loss is where it began, for a network that begins at nothing gives
the same answer to all at first.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence

from safe_trainer.diagnosis.curve import has_learned
from safe_trainer.diagnosis.evidence import Evidence
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.measurements import LayerStatistics, Measurement

__all__ = ["collapsed"]

ALIKE = 1e-5
"""Spread between samples over that of all outputs. Rounding leaves 1e-7 where all samples come out the same; the least
of 98 healthy runs was 0.2."""
APART = 1e-2
"""The same where samples still differ."""
MEASURED = 3
"""Measured steps that must agree: a single batch may be odd."""
LEAST_STEPS = 100
"""Losses before samples that come out alike mean anything."""
_RECTIFIER = re.compile(r"relu6?(\(\))?|threshold|hardtanh(\(\))?|hardswish(\(\))?|dropout.*", re.IGNORECASE)


def collapsed(evidence: Evidence) -> list[Finding]:
    """One finding, of the first kind that is proven."""
    latest = list(evidence.measurements)[-MEASURED:]
    if len(latest) < MEASURED:
        return []
    if (name := _agreed(latest, _constant)) is not None:
        return [_told_of_constant(name, latest)]
    if has_learned(evidence):
        return []
    if (name := _agreed(latest, _overflowing)) is not None:
        return [_told_of_overflow(name, latest)]
    if len(evidence.columns.get("loss", ())) >= LEAST_STEPS and (name := _agreed(latest, _loses_its_input)) is not None:
        return [_told_of_loss(name, latest)]
    return []


def _agreed(latest: Sequence[Measurement], find: Callable[[Measurement], str | None]) -> str | None:
    names = {find(measured) for measured in latest}
    return names.pop() if len(names) == 1 else None


def _constant(measured: Measurement) -> str | None:
    """A layer without weights that gives one number throughout; what feeds it varies and gets no gradient at all."""
    owners = {name.rpartition(".")[0] for name in measured.parameters}
    layers = list(measured.layers.values())
    for place, layer in enumerate(layers):
        if layer.std != 0 or not layer.gradient_norm or layer.name in owners or _RECTIFIER.fullmatch(layer.kind):
            continue
        before = next((other for other in reversed(layers[:place]) if other.shape == layer.shape), None)
        if before is not None and before.std > 0 and before.gradient_norm == 0 and math.prod(layer.shape) > 1:
            return layer.name
    return None


def _overflowing(measured: Measurement) -> str | None:
    """A layer that gives an infinity, before one whose outputs no longer depend on the sample."""
    layers = list(measured.layers.values())
    for before, after in itertools.pairwise(layers):
        weight = measured.parameters.get(f"{after.name}.weight")
        if before.abs_max == math.inf and _is_alike(after) and weight is not None and weight.gradient_norm == 0:
            return before.name
    return None


def _loses_its_input(measured: Measurement) -> str | None:
    """The first layer behind which all samples are the same to the end, though they differ in the layer before."""
    layers = [layer for layer in measured.layers.values() if layer.finite and layer.shape and layer.shape[0] > 1]
    if len(layers) < 2 or not _is_alike(layers[-1]):
        return None
    differ = [place for place, layer in enumerate(layers) if (layer.sample_spread or 0.0) > APART]
    if not differ or not all(map(_is_alike, layers[differ[-1] + 1 :])):
        return None
    return layers[differ[-1] + 1].name


def _is_alike(layer: LayerStatistics) -> bool:
    """Whether every sample comes out the same; a spread is not defined where every single number does."""
    return layer.std == 0 if layer.sample_spread is None else layer.sample_spread < ALIKE


def _told_of_constant(name: str, latest: Sequence[Measurement]) -> Finding:
    layer = latest[-1].layers[name]
    return _finding(
        name,
        latest,
        f"{name} ({layer.kind}, shape {layer.shape}) gave {layer.mean:g} for every sample and place in {len(latest)} "
        "measured steps in a row, and what feeds it gets a gradient of exactly zero",
        "it normalises over a dimension of length one, or lies wholly where its function is flat",
        "look at the dimension that it works on: a softmax or a normalisation needs more than one entry there",
    )


def _told_of_overflow(name: str, latest: Sequence[Measurement]) -> Finding:
    return _finding(
        name,
        latest,
        f"{name} ({latest[-1].layers[name].kind}) gives infinite values in {len(latest)} measured steps in a row; "
        "behind it all samples are the same, and the next layer's weights get a gradient of exactly zero",
        "a number overflows there (float16 ends at 65504); dividing by the infinity gives zeros, so no NaN is in sight",
        "compute it in float32, or scale its input down before it is squared or added up",
    )


def _told_of_loss(name: str, latest: Sequence[Measurement]) -> Finding:
    return _finding(
        name,
        latest,
        f"from {name} ({latest[-1].layers[name].kind}) on all samples of a batch come out the same, in {len(latest)} "
        "measured steps in a row; the loss is where it began",
        "the network's answer no longer depends on its input: what tells samples apart is lost there",
        "look at the weights and the scale of the layer, and at the learning rate",
    )


def _finding(where: str, latest: Sequence[Measurement], evidence: str, cause: str, remedy: str) -> Finding:
    return Finding(
        fault="activation.collapsed",
        severity=Severity.warning,
        stage="training",
        where=where,
        step=latest[-1].step,
        evidence=evidence,
        cause=cause,
        remedy=remedy,
    )
