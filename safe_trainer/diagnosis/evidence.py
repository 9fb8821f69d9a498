"""All that a rule may look at: the histories of one run, and what kind of run it is. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from safe_trainer.utils.measurements import Measurement
from safe_trainer.utils.program_record import Record

__all__ = ["Evidence", "Probe", "Setting", "largest_decay"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What kind of run it is. None is 'not known'."""

    planned_steps: int | None = None
    """Training steps of the whole run."""
    epoch_length: int | None = None
    """Batches of an epoch."""
    weight_decay: float = 0.0
    """Largest of all parameter groups."""
    scaled: bool = False
    """A GradScaler leaves out steps whose gradients overflow, at the start many in a row."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The loss of one training batch before and after the step it caused, with the same random numbers."""

    step: int
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The histories so far. They grow; what stands in them never changes."""

    setting: Setting = field(default_factory=Setting)
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """step, epoch, loss, lr, grad_norm (before clipping) and a task's own figures: one entry a batch, NaN if absent."""
    measurements: Sequence[Measurement] = ()
    """Measured steps, oldest first; the far past is thinned out."""
    probes: Sequence[Probe] = ()
    """Only where a rule asked for one."""
    evaluations: Sequence[Mapping[str, float]] = ()
    """What each evaluation gave, val/loss and metrics, with the step and the epoch it stands for."""
    program: Record | None = None
    """What the looks at the program's state have found."""
    ended: bool = False
    """The run is over: no more will come."""


def largest_decay(optimizers: Sequence[Optimizer]) -> float:
    """Weight decay of the parameter group that has most of it."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return max((float(group.get("weight_decay") or 0.0) for group in groups), default=0.0)
