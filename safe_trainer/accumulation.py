"""The open group of batches whose gradients add up to one optimizer step: its weights, and how it outlives a stop.

Reads and writes the parts of a Loop that the group's update changes. A run that ends within a group steps with what it
has; one that goes on from there has to complete the group, so a checkpoint also holds how things stood before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from safe_trainer.plain_state import plain_state

if TYPE_CHECKING:
    from safe_trainer.loop import Loop


@dataclass
class Group:
    """Batches whose gradients wait for their step, their weight, and the samples of the first that has any."""

    batches: int = 0
    weight: float = 0.0
    size: int = 0

    def begin(self) -> None:
        """A group begins with nothing."""
        self.batches, self.weight, self.size = 0, 0.0, 0

    def share(self, count: int) -> float:
        """Weight of a batch of `count` samples, relative to the group's first: equal batches have weight 1.

        A batch whose loss is a mean over nothing, all padding perhaps, has no weight.
        """
        self.size = self.size or count
        share = count / self.size if self.size else 0.0
        self.weight += share
        return share

    def average(self, gradients: list[Tensor]) -> None:
        """Turn weighted sums into means, in place. Gradients of a group that counts nothing are zero already."""
        if self.weight not in (0.0, 1.0):
            torch._foreach_div_(gradients, self.weight)


def parts_of(loop: Loop) -> dict[str, Any]:
    """State of all that an update changes: model, optimizers, and of scheduler, scaler and average what there is."""
    return {
        "model": loop.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in loop.guard.optimizers],
        **{name: None if part is None else part.state_dict() for name, part in optional_parts(loop).items()},
    }


def load_parts(loop: Loop, state: Mapping[str, Any]) -> None:
    """The way back from `parts_of`."""
    loop.model.load_state_dict(state["model"])
    for optimizer, kept in zip(loop.guard.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(kept)
    for name, part in optional_parts(loop).items():
        if part is not None:
            part.load_state_dict(state[name])


def optional_parts(loop: Loop) -> dict[str, Any]:
    """Parts that a run may lack, by the names that they have in a state."""
    return {"scheduler": loop.scheduler, "scaler": loop.precision.scaler, "ema": loop.average}


def open_group_of(loop: Loop) -> dict[str, Any]:
    """Copies, on the CPU, of the group's gradients and of what its update will change."""
    group = loop.group
    counts = {"batches": group.batches, "weight": group.weight, "size": group.size, "updates": loop.position.updates}
    return plain_state(
        {**parts_of(loop), "gradients": [parameter.grad for parameter in loop.parameters], "counts": counts}, copy=True
    )


def reopen(loop: Loop, state: Mapping[str, Any]) -> None:
    """Stand where the group was open, its gradients waiting for more."""
    load_parts(loop, state)
    counts = dict(state["counts"])
    loop.position.updates = counts.pop("updates")
    loop.group = Group(**counts)
    for parameter, gradient in zip(loop.parameters, state["gradients"], strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
