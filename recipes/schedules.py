"""Learning-rate schedules of the recipes, where PyTorch's own need a word of care."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR


def one_cycle(
    optimizer: Optimizer, max_lr: float, total_steps: int, pct_start: float = 0.25, **options: Any
) -> OneCycleLR:
    """PyTorch's OneCycleLR, for a run of any length.

    PyTorch divides by zero when the rise is exactly one step long, as in a run cut down to four steps with a rise of a
    quarter. A rise a ten-thousandth longer gives the same rates.

    Args:
        total_steps: how often the schedule will be advanced, at least 1.
        pct_start: share of the run in which the rate rises, between 0 and 1.
        options: further arguments of OneCycleLR.
    """
    if pct_start * total_steps == 1:
        pct_start *= 1.0001
    return OneCycleLR(optimizer, max_lr, total_steps=total_steps, pct_start=pct_start, **options)
