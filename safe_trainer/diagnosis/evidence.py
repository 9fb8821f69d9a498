"""All that a rule may look at: the histories of one run, and what kind of run it is. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safe_trainer.utils.measurements import Measurement

__all__ = ["Evidence", "Probe", "Setting"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What kind of run it is. None is 'not known'."""

    planned_steps: int | None = None
    """Training steps of the whole run."""
    epoch_length: int | None = None
    """Batches of an epoch."""
    optimizers: tuple[str, ...] = ()
    """Class names, the one whose learning rate the history holds first."""
    scale_free: bool = False
    """Whether every optimizer's update is independent of the gradient's scale, as Adam's is."""
    weight_decay: float = 0.0
    """Largest of all parameter groups."""
    momentum: float = 0.0
    """Largest of all parameter groups; beta1 of Adam and the like."""
    accumulate: int = 1
    clip_norm: float | None = None
    precision: str = "fp32"
    num_classes: int | None = None
    own_step: bool = False
    """The step is the user's own: what happens within it is not known."""
    monitored: bool = True
    """Whether there are measurements at all."""


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
    ended: bool = False
    """The run is over: no more will come."""
