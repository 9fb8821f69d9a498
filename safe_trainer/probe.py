"""The same batch once more, right after its step: did the step do that batch any good? Leaves everything as it was.

Kept and put back: generators, buffers, and what model and task count for themselves. Gradients and weights are not
touched by a forward pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from statistics import median_high
from typing import Any

from torch import nn

from safe_trainer.undo import Buffers, attributes_back, step_back
from safe_trainer.utils import rng

log = logging.getLogger(__name__)

RECENT = 10
"""Losses at either end that are compared: few, as a probe may be wanted soon, but more than one, which is noise."""
NOT_MUCH = 0.2
"""A loss that has come down by more than this share of where it began needs no probe: learning is proven."""


def is_wanted(losses: Sequence[float]) -> bool:
    """Whether the curve so far leaves in doubt that steps do any good; only then a probe is worth its forward pass."""
    first = [loss for loss in losses[: 2 * RECENT] if math.isfinite(loss)][:RECENT]
    last = [loss for loss in losses[-2 * RECENT :] if math.isfinite(loss)][-RECENT:]
    return bool(first and last) and median_high(last) >= median_high(first) - NOT_MUCH * abs(median_high(first))


def loss_again(
    loss: Callable[[], Any], began: rng.Snapshot, model: nn.Module, task: Callable[..., Any]
) -> float | None:
    """Value of `loss()`, a forward pass of `model` through `task`, from where the generators stood at `began`.

    None if it fails: a model may refuse the same batch a second time, and that must not end the run.
    """
    buffers = Buffers(model)
    buffers.take()
    ways = [*attributes_back(model), *step_back(task, model, ())]
    for forward in {type(module).forward for module in model.modules()}:
        if not forward.__module__.startswith("torch."):  # a user's: it may work with something of its closure
            ways += step_back(forward, model, ())
    try:
        with rng.isolated():
            began.restore()
            return float(loss().detach())
    except Exception as error:
        log.debug("The batch could not be looked at again: %s: %s", type(error).__name__, error)
        return None
    finally:
        buffers.restore()
        for back in ways:
            back()
