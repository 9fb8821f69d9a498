"""How a batch becomes a loss, for the common kinds of work. Pure functions of model and batch; they keep no state.

A task is called as ``task(model, batch)`` and returns a mapping: "loss" (a tensor of one element), "prediction" and
"target" for the metrics, "count" (what the loss is a mean over), and further figures to log. One of your own is a class
of this size, or a function; nothing has to be registered or inherited.

A batch may be a tuple or list, or a dict. Of a dict, every key that is not the target goes to the model by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

LossFunction = Callable[[Any, Any], Tensor]


@dataclass
class Classification:
    """Scores for classes against the number of the right one, or one score against 0 and 1."""

    loss_fn: LossFunction = cross_entropy
    """Called as loss_fn(scores, target); one that takes probabilities of 0 and 1 gets the target as floats."""
    target: str = "target"
    """Key of the target in a dict; in a tuple it is the last."""

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, target = split(batch, self.target)
        prediction = forward(model, inputs)
        if prediction.dim() == target.dim() + 1 and prediction.shape[-1] == 1:
            prediction = prediction.squeeze(-1)
        one_score = prediction.shape == target.shape
        loss = self.loss_fn(prediction, target.to(prediction.dtype) if one_score else target)
        return {"loss": loss, "prediction": prediction, "target": target, "count": len(target)}


@dataclass
class Regression:
    """Numbers against numbers. A prediction of shape (batch, 1) is squeezed to meet a target of shape (batch,)."""

    loss_fn: LossFunction = mse_loss
    """Called as loss_fn(prediction, target)."""
    target: str = "target"
    """Key of the target in a dict; in a tuple it is the last."""

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, target = split(batch, self.target)
        prediction = forward(model, inputs)
        if prediction.dim() == target.dim() + 1 and prediction.shape[-1] == 1:
            prediction = prediction.squeeze(-1)
        if prediction.shape != target.shape:
            raise ValueError(
                f"prediction and target must have one shape (got {tuple(prediction.shape)} and {tuple(target.shape)}): "
                "a loss would broadcast them silently"
            )
        target = target.to(prediction.dtype)
        return {"loss": self.loss_fn(prediction, target), "prediction": prediction, "target": target}


@dataclass
class NextToken:
    """Every token of a sequence from those before it; the loss is a mean over tokens, in nats."""

    loss_fn: LossFunction = cross_entropy
    """Called as loss_fn(scores, target) with shapes (tokens, vocabulary) and (tokens,)."""
    tokens: str = "tokens"
    """Key of the tokens in a dict, shape (batch, length + 1); in a tuple they are the first."""

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        tokens = part(batch, self.tokens)
        prediction = model(tokens[:, :-1]).flatten(0, 1)
        target = tokens[:, 1:].flatten()
        loss = self.loss_fn(prediction, target)
        return {
            "loss": loss,
            "prediction": prediction,
            "target": target,
            "count": len(target),
            "bits_per_token": loss.detach() / math.log(2),
        }


@dataclass
class Reconstruction:
    """The input from itself; labels, if a batch has any, are not looked at."""

    loss_fn: LossFunction = mse_loss
    """Called as loss_fn(rebuilt, input)."""
    input: str = "input"
    """Key of the input in a dict; in a tuple it is the first."""

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        samples = part(batch, self.input)
        prediction = model(samples)
        return {"loss": self.loss_fn(prediction, samples), "prediction": prediction, "target": samples}


def split(batch: Any, target: str) -> tuple[Any, Tensor]:
    """Inputs and target of a batch: a dict without the target's key, or all parts of a tuple but the last.

    Raises:
        TypeError: the batch has no such parts.
    """
    if isinstance(batch, Mapping):
        if target not in batch:
            raise TypeError(f"a batch must have the key {target!r}, the target (got {sorted(map(str, batch))})")
        return {key: value for key, value in batch.items() if key != target}, batch[target]
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return list(batch[:-1]), batch[-1]
    raise TypeError(f"a batch must be (input, ..., target) or a dict (got {type(batch).__name__})")


def forward(model: nn.Module, inputs: Any) -> Tensor:
    """Call the model with inputs by name or by position."""
    output: Tensor = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    return output


def part(batch: Any, key: str) -> Tensor:
    """The part of a dict under `key`, the first of a tuple, or the batch itself if it is a tensor.

    Raises:
        TypeError: there is no such part.
    """
    if isinstance(batch, Mapping) and key not in batch:
        raise TypeError(f"a batch must have the key {key!r} (got {sorted(map(str, batch))})")
    found = batch[key] if isinstance(batch, Mapping) else batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(found, Tensor):
        raise TypeError(f"the first part of a batch must be a tensor (got {type(found).__name__})")
    return found
