"""Inputs or targets far from the scale that weights and rates are made for, where that harms: short trainings compared.

Trains the program from its own start with its own optimizer, inside `preserved`: as it is, and on standardised data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.data_loss import REGRESSION, LossCall, loss_calls
from safe_trainer.preflight.data_samples import Table, leaves
from safe_trainer.preflight.data_values import rebuilt
from safe_trainer.preflight.outcome import ProgramFailed, finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import tensors
from safe_trainer.preflight.traced import trace_step

OFF = 10.0
"""Root mean square from which numbers are far from standard (its inverse below): pixels of 0 to 255 have about 100."""
STEPS = 60
"""Steps of each training in the first comparison: Adam at 1e-3 has moved each weight by some hundredths by then."""
LONGER = 240
"""Steps in the second comparison, which must say the same."""
ENOUGH = 0.15
"""Share of what chance loses that standardised data must have won for the comparison to say anything."""
QUARTER = 0.25
"""Raw data that win less than this share of it are harmed."""
BATCHES = 24
"""Batches that the trainings go round."""


@dataclass
class Shift:
    """How a field is standardised."""

    field: str
    mean: Tensor
    deviation: Tensor
    scale: float
    """Root mean square of the raw numbers."""
    words: str

    def applied(self, value: Tensor) -> Tensor:
        """The field standardised."""
        mean, deviation = self.mean.to(value.device), self.deviation.to(value.device)
        return ((value.float() - mean) / deviation).to(value.dtype)


def unnormalized(program: Program, table: Table, calls: list[LossCall], clock: Clock) -> list[Finding]:
    """Inputs, and targets of a regression, that the program learns clearly worse from than from standardised ones."""
    regression = next((call for call in calls if call.name in REGRESSION and call.field in table.targets), None)
    names = [name for name in table.inputs() if name not in table.targets]
    fields = [*names, *([str(regression.field)] if regression is not None else [])]
    found = []
    for name in fields:
        shift = _shift(table, name)
        if shift is None:
            continue
        if name in table.targets and any(_equal(table, name, other) for other in names):
            continue  # an autoencoder: both would have to be shifted
        judged = _compared(program, table, shift, regression if name in table.targets else None, clock)
        if judged is not None:
            found.append(judged)
    return found


def _equal(table: Table, first: str, second: str) -> bool:
    a, b = table.whole(first), table.whole(second)
    return a is not None and b is not None and a.shape == b.shape and bool(torch.equal(a, b))


def _shift(table: Table, name: str) -> Shift | None:
    """How to standardise a field of floats that is far off; None for others. Features are channels or last dims."""
    values = table.whole(name)
    if values is None or not values.is_floating_point() or len(values) < 8 or not bool(torch.isfinite(values).all()):
        return None
    values = values.float()
    over = _over(values)
    mean, deviation = values.mean(over, keepdim=True), values.std(over, keepdim=True, unbiased=False)
    deviation = torch.where(deviation > 1e-12 * values.abs().max().clamp_min(1e-30), deviation, torch.ones(()))
    scale = float(values.square().mean().sqrt())
    moving = deviation[deviation != 1]
    if not len(moving) or 1 / OFF < scale < OFF:
        return None
    low, high = float(moving.min()), float(moving.max())
    words = f"root mean square {scale:.3g}, values from {float(values.min()):.3g} to {float(values.max()):.3g}"
    if len(moving) > 1:
        words += f", deviations of its features from {low:.3g} to {high:.3g}"
    return Shift(name, mean, deviation, scale, words)


def _over(values: Tensor) -> list[int]:
    """The dimensions that a mean is taken over: all but columns, channels of pictures, features of sequences."""
    feature = {1: None, 2: 1, 3: 2}.get(values.dim(), 1)
    return [place for place in range(values.dim()) if place != feature]


def _compared(
    program: Program, table: Table, shift: Shift, regression: LossCall | None, clock: Clock
) -> Finding | None:
    raw = _batches(program, table, None)
    standard = _batches(program, table, shift)
    if len(raw) < 1 or len(raw) != len(standard) or not _is_finite(program, raw[0]):
        return None
    longest = min(LONGER, program.config.max_steps or LONGER)
    first = second = 0.0
    for steps in sorted({min(STEPS, longest), longest}):
        part = clock.part(0.5)
        of_raw = _won(program, raw, steps, regression, part.part(0.5))
        of_standard = _won(program, standard, steps, regression, part)
        if of_raw is None or of_standard is None or of_standard < ENOUGH or of_raw > QUARTER * of_standard:
            return None
        first, second = of_raw, of_standard
    what = "of the target's variance is explained" if regression is not None else "of the loss at the start is gone"
    return finding(
        "data.unnormalized",
        "warning",
        where=shift.field,
        evidence=f"{shift.field} has {shift.words}; after {longest} steps {100 * max(0.0, first):.0f} % {what}, and "
        f"{100 * second:.0f} % after as many on standardised values",
        cause="raw units: weights and learning rate are made for numbers of about 1",
        remedy="subtract the training set's mean and divide by its deviation, the same for held-out data",
    )


def _is_finite(program: Program, batch: Any) -> bool:
    """Whether every module gives finite numbers at the start; what overflows inside has another cause."""
    with program.preserved():
        try:
            step = trace_step(program, batch)
        except ProgramFailed:
            return False
    outputs = [tensor for call in step.modules for tensor in tensors(call.output) if tensor.is_floating_point()]
    return all(bool(torch.isfinite(output).all()) for output in outputs)


def _batches(program: Program, table: Table, shift: Shift | None) -> list[Any]:
    like, made = program.batches()[0], []
    for number in range(min(BATCHES, len(table.sizes))):
        fields = {name: pieces[number] for name, pieces in table.pieces.items()}
        if shift is not None:
            fields[shift.field] = shift.applied(fields[shift.field])
        batch = rebuilt(like, fields)
        if batch is not None:
            made.append(program.on_device(batch))
    return made


def _won(program: Program, batches: list[Any], steps: int, regression: LossCall | None, clock: Clock) -> float | None:
    """What a training has won over chance, 1 at best; below 0 where it is worse. None where it cannot be told."""
    with program.preserved():
        try:
            losses = []
            for step in range(steps):
                losses.append(program.step(batches[step % len(batches)]))
                if not math.isfinite(losses[0]):
                    return None  # what is not finite from the start has another cause
                if clock.left() == 0:
                    return None
            if regression is not None:
                return _explained(program, batches)
            chance = _chance(program, batches)
        except ProgramFailed:
            return None
    tail = losses[-max(1, min(len(batches), steps // 4)) :]
    end = sum(tail) / len(tail)
    if not math.isfinite(end):
        return -1.0
    chance = losses[0] if chance is None else chance
    return (chance - end) / chance if chance > 0 else None


def _chance(program: Program, batches: list[Any]) -> float | None:
    """Loss of the best constant answer: the entropy of the classes, or the variance of the target."""
    calls, _ = loss_calls(program, batches[0])
    call = calls[0] if len(calls) == 1 else None
    if call is None or call.options.get("reduction") not in (None, "mean"):
        return None
    targets = [leaves(batch).get(call.field or "") for batch in batches]
    if any(target is None for target in targets):
        return None
    whole = torch.cat([target.reshape(-1) for target in targets if target is not None])
    if call.of_classes:
        share = torch.unique(whole, return_counts=True)[1].double() / len(whole)
        return float(-(share * share.log()).sum())
    if call.name == "mse_loss":
        return float(whole.float().var(unbiased=False))
    return None


def _explained(program: Program, batches: list[Any]) -> float | None:
    """Share of the targets' variance that the predictions explain (R squared)."""
    predictions, targets = [], []
    for batch in batches:
        calls, _ = loss_calls(program, batch)
        call = next((call for call in calls if call.name in REGRESSION), None)
        if call is None or call.prediction.shape != call.target.shape:
            return None
        predictions.append(call.prediction.float().reshape(-1))
        targets.append(call.target.float().reshape(-1))
    prediction, target = torch.cat(predictions), torch.cat(targets)
    if not bool(torch.isfinite(prediction).all()):
        return -1.0
    return float(1 - (prediction - target).square().mean() / target.var(unbiased=False).clamp_min(1e-30))
