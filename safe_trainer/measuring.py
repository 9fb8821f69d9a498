"""A measured step of a loop: the monitors' hooks on, and what follows at once from what they see.

Reads and calls the parts of a Loop. Whatever is run besides the step itself, an eager pass or a probe, leaves no trace;
only `repair.dead_units`, if it is asked for, changes weights.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor

from safe_trainer import probe
from safe_trainer.diagnosis import Probe
from safe_trainer.diagnosis.dead import dead_layers
from safe_trainer.repair import revive_dead_units
from safe_trainer.task import loss_of
from safe_trainer.undo import containers
from safe_trainer.untouched import untouched
from safe_trainer.utils import rng
from safe_trainer.utils.program_facts import RATE_EVERY

if TYPE_CHECKING:
    from safe_trainer.loop import Loop

log = logging.getLogger(__name__)

WINDOW = 3
"""Measured steps over which a unit must be silent to count as inactive: not one, as a batch may lack what it answers
to, and few, as the window begins anew only when it is full.
"""


def is_measured(loop: Loop) -> bool:
    """Whether the monitors look at this batch; under accumulation at the group's last, which moves the weights."""
    every, step = loop.config.accumulate, loop.position.step
    if every == 1:
        return loop.monitors.due(step)
    return loop.group.batches == every - 1 and any(map(loop.monitors.due, range(step - every + 1, step + 1)))


def next_look(loop: Loop) -> int:
    """The next step that monitors or facts ask for; 0, which is every one, where that cannot be told beforehand."""
    if loop.watches_all or loop.config.accumulate > 1:
        return 0
    following = itertools.count(loop.position.step + 1)
    return next(k for k in following if k % RATE_EVERY == 0 or loop.monitors.due(k) or loop.facts.due(k))


def measured(loop: Loop, batch: Any) -> dict[str, Tensor | float]:
    """One step with the monitors' hooks on. Under compile, which passes hooks by, they see an eager pass more."""
    step, monitors = loop.position.step, loop.monitors
    began, compiled = rng.Snapshot(), loop.forward_model is not loop.model
    with monitors.measure(step, loss_scale=_loss_scale(loop), eager=compiled):
        if compiled:
            _eager_pass(loop, containers(batch), began)
        figures = loop.any_step(batch)
    if not monitors.kept(step):  # the step was not finite, and has been undone
        return figures
    if monitors.history[-1].window_steps >= WINDOW:
        if loop.config.repair.dead_units:
            _revive(loop)
        monitors.read()
    if loop.train_step is None and loop.config.accumulate == 1:
        _probe(loop, batch, float(figures["loss"]), began)
    return figures


def _loss_scale(loop: Loop) -> Tensor | float | None:
    """What the loss is multiplied by before backward, by our scaler or by one that the user's step holds."""
    scaler = loop.precision.scaler or loop.scaler_of_user
    return None if scaler is None else getattr(scaler, "_scale", None)


def _eager_pass(loop: Loop, batch: Any, began: rng.Snapshot) -> None:
    """Forward and backward uncompiled, for the monitors; undone."""
    group = loop.group.weight, loop.group.size
    with loop.not_counted(), untouched(loop.model, loop.guard.optimizers):
        loop.again(batch)
    loop.group.weight, loop.group.size = group
    began.restore()


def _revive(loop: Loop) -> None:
    """Give mostly dead layers new incoming weights for their dead units."""
    latest, inactive = loop.monitors.history[-1], loop.monitors.inactive_units()
    dead = {layer.name: inactive[layer.name] for layer in dead_layers(latest)}
    seed, order = (loop.config.seed or 0) + loop.position.step, list(latest.layers)
    for name, units in revive_dead_units(loop.model, dead, loop.guard.optimizers, order=order, seed=seed).items():
        log.info("Step %d: %d dead units behind %s got new weights.", loop.position.step, units, name)


def _probe(loop: Loop, batch: Any, before: float, began: rng.Snapshot) -> None:
    """Look at the loss of the same batch after its step, if the curve leaves that in doubt."""
    loop.history.gather()
    if not probe.is_wanted([*loop.history.columns["loss"], before]):
        return

    def loss() -> Tensor:  # with a graph: checkpoints, and penalties on gradients, need one
        with loop.precision.autocast():
            return loss_of(loop.task(loop.model, containers(batch)))

    with loop.not_counted():
        after = probe.loss_again(loss, began, loop.model, loop.task)
    if after is not None:
        loop.probes.append(Probe(step=loop.position.step, before=before, after=after))
