"""Does the first loss lie where chance puts it? An untrained classifier that is far worse is sure of wrong answers.

The reference is the user's own loss of outputs that are all equal: for cross-entropy the logarithm of the number of
classes. Of 98 healthy programs the first loss was 0.94 to 1.45 times that, of faulty ones 11 times and more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program

FAR = 5.0
"""Times the loss of chance: well above the healthy 1.45, well below the faulty 11."""


def loss_off(program: Program, clock: Clock) -> Iterator[Finding]:
    """A classification whose first loss is FAR times the loss of equal outputs, on each of the batches."""
    if program.train_step is not None or program.loss_fn is None:
        return
    first, chance = [], []
    with torch.no_grad():
        for batch in program.batches()[:3]:
            outcome = program.forward(batch)
            prediction, target = outcome.get("prediction"), outcome.get("target")
            if not isinstance(prediction, Tensor) or not _is_classes(prediction, target):
                return
            first.append(float(outcome["loss"]))
            chance.append(float(program.loss_fn(torch.zeros_like(prediction), target)))
    if not all(math.isfinite(value) and value > 0 for value in (*first, *chance)):
        return
    factors = [loss / reference for loss, reference in zip(first, chance, strict=True)]
    if min(factors) < FAR:
        return
    yield finding(
        "init.loss_off",
        "warning",
        where=_last_layer(program),
        evidence=f"the first loss is {first[0]:.4g}, {factors[0]:.3g} times the {chance[0]:.4g} of equal outputs",
        cause="the untrained outputs are large, so the model is sure of wrong answers: the last layer's weights, or "
        "the activations before it, start too large",
        remedy="let the last layer start small (PyTorch's default, or a standard deviation of 0.01), and check the "
        "scale of activations through the depth; the first steps otherwise only undo this",
    )  # fmt: skip


def _is_classes(prediction: Tensor, target: object) -> bool:
    """Whether targets are class indices, or zeros and ones, for these outputs."""
    if not isinstance(target, Tensor) or not prediction.is_floating_point():
        return False
    if not target.is_floating_point():
        return (
            prediction.dim() > 1
            and prediction.shape[1] > 1
            and target.shape == prediction.shape[:1] + prediction.shape[2:]
        )
    return target.shape == prediction.shape and bool(((target == 0) | (target == 1)).all())


def _last_layer(program: Program) -> str | None:
    """The last layer with weights, which is where to look first."""
    names = [name for name, module in program.model.named_modules() if module._parameters.get("weight") is not None]
    return names[-1] if names else None
