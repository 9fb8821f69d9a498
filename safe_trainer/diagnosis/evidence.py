"""All that a rule may look at: the histories of one run, and what kind of run it is. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from safe_trainer.config import Config
from safe_trainer.utils.measurements import Measurement
from safe_trainer.utils.program_record import Record

__all__ = ["Evidence", "Probe", "Setting", "setting_of"]

SCALE_FREE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Rprop", "Adadelta", "Adafactor",
              "Lion", "Muon", "SparseAdam")  # fmt: skip
"""Optimizers whose update does not grow with the gradient."""


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
    scaled: bool = False
    """A GradScaler leaves out steps whose gradients overflow, at the start many in a row."""
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
    program: Record | None = None
    """What the looks at the program's state have found."""
    ended: bool = False
    """The run is over: no more will come."""


def setting_of(
    config: Config,
    optimizers: Sequence[Optimizer],
    *,
    planned_steps: int | None = None,
    epoch_length: int | None = None,
    num_classes: int | None = None,
    own_step: bool = False,
    scaled: bool = False,
) -> Setting:
    """What the rules may know of the kind of run."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names = tuple(type(optimizer).__name__ for optimizer in optimizers)
    return Setting(
        planned_steps=planned_steps,
        epoch_length=epoch_length,
        optimizers=names,
        scale_free=all(name in SCALE_FREE for name in names),
        weight_decay=max((float(group.get("weight_decay") or 0.0) for group in groups), default=0.0),
        momentum=max((float(group.get("momentum", group.get("betas", (0,))[0])) for group in groups), default=0.0),
        accumulate=config.accumulate,
        clip_norm=config.clip_norm if isinstance(config.clip_norm, float) else None,
        precision=config.precision.value,
        num_classes=num_classes,
        own_step=own_step,
        scaled=scaled,
        monitored=config.monitor.every > 0,
    )
