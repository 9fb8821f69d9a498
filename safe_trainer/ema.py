"""An exponential moving average of a model's weights, updated without waiting for the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Average:
    """A copy of a model whose weights follow it slowly. `module` is the copy, to evaluate and to save.

    The decay of update n is ``min(decay, (1 + n) / (10 + n))``, as TensorFlow's ExponentialMovingAverage has it: a
    short run is then not judged by its first weights. Buffers, such as BatchNorm's statistics, are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Follow the model by one step."""
        self.updates += 1
        weight = 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.module.parameters()), list(model.parameters()), weight)
        buffers = list(self.module.buffers())
        if buffers:
            torch._foreach_copy_(buffers, list(model.buffers()))

    def state_dict(self) -> dict[str, Any]:
        """Weights of the copy and the number of updates."""
        return {"module": self.module.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier state."""
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]
