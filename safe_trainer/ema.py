"""An exponential moving average of a model's weights, updated without waiting for the device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def copy_of(model: nn.Module) -> nn.Module:
    """A copy of the model that does not train.

    What a forward pass will compute anew, such as the weight of torch's old `weight_norm`, is a tensor with a history,
    which cannot be copied: the copy begins with its value.
    """
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    copied = copy.deepcopy(model, computed)
    for parameter in copied.parameters():
        if not is_lazy(parameter):
            parameter.requires_grad_(False)
    return copied


def is_averaged(parameter: Tensor) -> bool:
    """Whether a mean of its values is a value: not of indices, packed bits or masks."""
    return parameter.is_floating_point() or parameter.is_complex()


class Average:
    """A copy of a model whose weights follow it slowly. `module` is the copy, to evaluate and to save.

    The decay of update n is ``min(decay, (1 + n) / (10 + n))``, as TensorFlow's ExponentialMovingAverage has it: a
    short run is then not judged by its first weights. Buffers, such as BatchNorm's statistics, and weights that are no
    floating-point numbers are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.is_to_come = any(map(is_lazy, itertools.chain(model.parameters(), model.buffers())))
        """A lazy model has no shapes to copy before its first step; until then its average is the model itself."""
        self.module = model if self.is_to_come else copy_of(model)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Follow the model by one step."""
        self._begin(model)
        self.updates += 1
        weight = 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        ours: list[Tensor] = list(self.module.parameters())
        theirs: list[Tensor] = list(model.parameters())
        moving = [place for place, parameter in enumerate(ours) if is_averaged(parameter)]
        torch._foreach_lerp_([ours[place] for place in moving], [theirs[place] for place in moving], weight)
        fixed = [place for place, parameter in enumerate(ours) if not is_averaged(parameter)]
        ours = [ours[place] for place in fixed] + list(self.module.buffers())
        if ours:
            torch._foreach_copy_(ours, [theirs[place] for place in fixed] + list(model.buffers()))

    def _begin(self, model: nn.Module) -> None:
        if self.is_to_come:
            self.module, self.is_to_come = copy_of(model), False

    def state_dict(self) -> dict[str, Any]:
        """Weights of the copy and the number of updates."""
        return {"module": self.module.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier state."""
        self._begin(self.module)
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]
