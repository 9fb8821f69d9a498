"""Shapes that run without an error and are wrong: a loss that broadcasts, a softmax over an axis of one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.traced import Call, TracedStep

PAIRED = frozenset({
    "sub", "__sub__", "__rsub__", "rsub", "subtract", "mul", "__mul__", "__rmul__", "multiply", "add", "__add__",
    "__radd__", "eq", "__eq__", "div", "__truediv__", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "dist",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss", "gaussian_nll_loss", "where",
})  # fmt: skip
"""Functions of two tensors that go element by element."""


def broadcast_in_loss(program: Program, step: TracedStep) -> Iterator[Finding]:
    """A prediction and a target of equally many elements that are both enlarged by meeting.

    Deliberate pairs, as in contrastive losses, are made of two tensors that both hang on the model, or by indexing with
    None on either side; a prediction and a target that differ in a dimension of one are not.
    """
    for call in step.calls:
        if call.module is not None or call.name not in PAIRED:
            continue
        pair = _pair(call)
        if pair is None:
            continue
        prediction, target = pair
        enlarged = _enlarged(prediction, target)
        if enlarged is None:
            continue
        yield finding(
            "loss.broadcast",
            "error",
            where="train_step" if program.train_step is not None else "loss_fn",
            source=call.source,
            evidence=f"{call.name} meets a prediction of shape {tuple(prediction.shape)} and a target of shape "
            f"{tuple(target.shape)} and makes {enlarged} of them: each of {prediction.numel()} predictions is compared "
            "with every target",
            cause="one of the two has a dimension of one that the other lacks, and PyTorch spreads both: the best "
            "answer to such a loss is the mean of all targets",
            remedy="give both the same shape: prediction.squeeze(-1), or target.unsqueeze(-1), and assert that the "
            "shapes are equal",
        )  # fmt: skip
        return


def _pair(call: Call) -> tuple[Tensor, Tensor] | None:
    """Prediction and target: the one that hangs on the model, and the one that does not."""
    found = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
    if len(found) < 2 or found[0].requires_grad == found[1].requires_grad:
        return None
    return (found[0], found[1]) if found[0].requires_grad else (found[1], found[0])


def _enlarged(first: Tensor, second: Tensor) -> tuple[int, ...] | None:
    """The shape both are spread to; None if they fit, or are no such pair."""
    if first.numel() != second.numel() or first.numel() < 2 or first.shape == second.shape:
        return None
    if [side for side in first.shape if side != 1] != [side for side in second.shape if side != 1]:
        return None
    try:
        shape = torch.broadcast_shapes(first.shape, second.shape)
    except RuntimeError:
        return None
    return tuple(shape) if shape.numel() > first.numel() else None


def softmax_of_one(program: Program, step: TracedStep) -> Iterator[Finding]:
    """A softmax over an axis of length one beside a longer one that is not the batch: its result is 1 everywhere."""
    for call in step.named("softmax", "log_softmax"):
        values, dim = call.argument(0, "input"), call.argument(1, "dim")
        if not isinstance(values, Tensor) or not isinstance(dim, int) or values.dim() < 2 or not values.requires_grad:
            continue
        others = [side for axis, side in enumerate(values.shape) if axis not in (0, dim % values.dim())]
        if values.shape[dim] != 1 or max(others, default=1) == 1:
            continue
        yield finding(
            "activation.collapsed",
            "error",
            where=call.module,
            source=call.source,
            evidence=f"{call.name} runs over axis {dim} of a tensor of shape {tuple(values.shape)}, which has length "
            "1: its result is the same for any input, and nothing before it gets a gradient",
            cause="the softmax runs over the wrong axis",
            remedy=f"give it the axis that the scores lie along (here one of length {max(others)})",
        )
        return
