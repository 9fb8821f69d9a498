"""A loss that is lowest where the answers are worst: its slope points away from the right answers.

The loss's gradient with respect to the model's output is held against that of a plain loss for the same targets: the
cross-entropy for classes, the squared error for numbers. Any sound loss agrees with it in direction, if not in size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from safe_trainer.findings import Finding
from safe_trainer.preflight.one_batch import Course
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program
from safe_trainer.task import loss_of

AGAINST = -0.5
"""Cosine of the two gradients below which they point apart; with the sign turned it is near -1."""
FELL = 0.2
"""Share by which the loss must have come down on its one batch: it does what it says, and that is the wrong thing."""


def agreement_with_answers(program: Program, batch: object) -> float | None:
    """Cosine between the slope of the loss and that of a plain one; None where the targets do not say what is right."""
    if not program.has_forward:
        return None
    outcome = program.forward(batch)
    prediction, target = outcome.get("prediction"), outcome.get("target")
    if not isinstance(prediction, Tensor) or not isinstance(target, Tensor) or not prediction.requires_grad:
        return None
    plain = _plain_loss(prediction, target)
    if plain is None:
        return None
    ours: Tensor | None = torch.autograd.grad(loss_of(outcome), prediction, retain_graph=True, allow_unused=True)[0]
    theirs = torch.autograd.grad(plain, prediction)[0]
    if ours is None:
        return None
    return float(functional.cosine_similarity(ours.float().flatten(), theirs.float().flatten(), dim=0))


def _plain_loss(prediction: Tensor, target: Tensor) -> Tensor | None:
    """Cross-entropy for classes, squared error for numbers. Targets of two values may stand for "close" and "far"."""
    if not prediction.is_floating_point() or prediction.dim() < 1:
        return None
    if not target.is_floating_point():
        if (
            prediction.dim() < 2
            or prediction.shape[1] < 2
            or target.shape != prediction.shape[:1] + prediction.shape[2:]
        ):
            return None
        if bool(((target < 0) | (target >= prediction.shape[1])).any()):
            return None
        return functional.cross_entropy(prediction.float(), target.long())
    if prediction.shape != target.shape or len(target.unique()) <= 2:
        return None
    return (prediction.float() - target.float()).square().mean()


def wrong_sign(own: Course, agreement: float | None) -> Iterator[Finding]:
    """The loss falls on its batch, and its slope points away from the answers."""
    if agreement is None or agreement > AGAINST or own.best_fall < FELL:
        return
    yield finding(
        "loss.wrong_sign",
        "error",
        where="loss_fn",
        evidence=f"on one batch the loss falls from {own.first:.4g} to {own.last:.4g}, and its slope points away from "
        f"the right answers (cosine {agreement:.2f} with that of a plain loss for the same targets)",
        cause="the loss is lowest where the answers are worst: a minus sign is missing (or one too many)",
        remedy="minimise the negative log-likelihood: put the minus in front of the mean of log-probabilities",
    )
