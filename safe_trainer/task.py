"""How a batch becomes a loss: the default task, and what the trainer asks of any task. Touches no state.

A task is any callable ``task(model, batch) -> Mapping`` with the keys

- ``loss``: the loss, a tensor of one element (required);
- ``prediction``, ``target``: what the metrics compare;
- ``count``: how many samples (or tokens) the loss is a mean over; without it, the length of ``prediction``;
- any other key with a tensor of one element is logged under its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from safe_trainer.config import ConfigError

Task = Callable[[nn.Module, Any], Mapping[str, Any]]

OWN_KEYS = frozenset({"loss", "prediction", "target", "count"})
RESERVED = frozenset({"step", "epoch", "lr", "grad_norm"})
"""Columns of the history that are the loop's own."""


@dataclass(frozen=True)
class Supervised:
    """The default task: a batch is ``(input, target)`` and the loss is ``loss_fn(model(input), target)``."""

    loss_fn: Callable[[Any, Any], Tensor]

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                f"without a task, a batch must be (input, target) (got {describe_batch(batch)}); "
                "pass task=..., a callable (model, batch) -> {'loss': ...}, or a train_step of your own"
            )
        prediction = model(batch[0])
        return {"loss": self.loss_fn(prediction, batch[1]), "prediction": prediction, "target": batch[1]}


def loss_of(outcome: Mapping[str, Any]) -> Tensor:
    """The loss of a task's outcome.

    Raises:
        TypeError: the outcome has no loss, or the loss is not one number.
    """
    if not isinstance(outcome, Mapping) or "loss" not in outcome:
        keys = f"the keys {sorted(outcome)}" if isinstance(outcome, Mapping) else type(outcome).__name__
        raise TypeError(f"a task must return a mapping with the key 'loss' (got {keys})")
    loss = outcome["loss"]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the loss must be a tensor with one element (got {got}); take its mean")
    return loss


def count_of(outcome: Mapping[str, Any], batch: Any) -> int:
    """How many samples the loss of this outcome is a mean over; 0 if the task says so: all of it was padding.

    Raises:
        ValueError: the task's count is no whole number from 0.
    """
    count = outcome.get("count")
    if count is not None:
        return _whole(count)
    for value in (outcome.get("prediction"), batch):
        size = first_length(value)
        if size:
            return size
    return 1


def _whole(count: Any) -> int:
    """A task's count as a number of Python's."""
    shape = tuple(getattr(count, "shape", ()))
    number = float(count) if isinstance(count, SupportsFloat) and math.prod(shape) == 1 else math.nan
    if not number.is_integer() or number < 0:
        got = f"shape {shape}" if shape else repr(count)
        raise ValueError(
            f"a task's count, of the samples its loss is a mean over, must be whole and not negative (got {got})"
        )
    return int(number)


def first_length(value: Any) -> int | None:
    """Length of the first dimension of the first tensor in a nested structure; None where there is no such tensor."""
    if isinstance(value, Tensor):
        return len(value) if value.dim() else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((size for size in map(first_length, value) if size), None)
    return None


def extra_figures(outcome: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a task reports besides its loss: every other tensor of one element, as it is now.

    Raises:
        ConfigError: a figure has the name of one of the loop's own.
    """
    figures = {
        name: value.detach().clone()  # it may be a weight, which moves before the figure is read
        for name, value in outcome.items()
        if name not in OWN_KEYS and isinstance(value, Tensor) and value.numel() == 1
    }
    taken = sorted(figures.keys() & RESERVED)
    if taken:
        raise ConfigError(
            [
                f"a task's figures must not be called {', '.join(sorted(RESERVED))}, which the loop records itself "
                f"(got {', '.join(taken)}); give them other names"
            ]
        )
    return figures


def value_of(loss: Any, source: str) -> Tensor | float:
    """What a step or an evaluation of the user's own returned, as one number; a tensor stays on its device.

    Args:
        source: train_step or eval_step; for the message.

    Raises:
        TypeError: it returned nothing, or not one number.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach().reshape(()).clone()  # the next one may be added to the very tensor
    if isinstance(loss, SupportsFloat) and not isinstance(loss, (bool, Tensor)) and getattr(loss, "shape", ()) == ():
        return float(loss)  # also NumPy's scalars
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise TypeError(f"{source} must return the loss, one number (got {got}); end it with `return loss`")


def to_device(value: Any, device: torch.device, channels_last: bool = False) -> Any:
    """Move every tensor of a nested batch to `device`; structures keep their types."""
    if isinstance(value, Tensor):
        if not channels_last and value.device == device:
            return value
        if channels_last and value.dim() == 4 and value.is_floating_point():
            return value.to(device, non_blocking=True, memory_format=torch.channels_last)
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device, channels_last) for item in value))
    if type(value) in (list, tuple):
        return type(value)([to_device(item, device, channels_last) for item in value])
    if type(value) is dict:
        return {key: to_device(item, device, channels_last) for key, item in value.items()}
    if hasattr(value, "to") and not isinstance(value, type):  # PackedSequence, BatchEncoding, graph batches
        return value.to(device)
    return value


def describe_batch(value: Any, depth: int = 2) -> str:
    """A batch in words: shapes and dtypes, nested structures to a small depth."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping) and depth:
        inner = ", ".join(f"{key}: {describe_batch(item, depth - 1)}" for key, item in list(value.items())[:8])
        return f"{{{inner}}}"
    if isinstance(value, (list, tuple)) and depth:
        inner = ", ".join(describe_batch(item, depth - 1) for item in value[:8])
        more = ", ..." if len(value) > 8 else ""
        return f"{type(value).__name__} of {len(value)}: ({inner}{more})"
    return type(value).__name__
