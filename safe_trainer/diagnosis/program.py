"""Rules over the facts of a training program: steps that are missing, gradients never cleared, graphs kept. Pure.

`rules(record)` may be called as often as one likes; it gives all findings as they now stand, each with the step at
which it was established. An exact invariant whose breach makes training wrong is an error, all else a warning at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from safe_trainer.diagnosis.clipping import clipped_too_late, overclipped
from safe_trainer.diagnosis.modes import evaluation_in_training_mode, started_in_eval, training_in_eval_mode
from safe_trainer.diagnosis.parameters import (
    blind_modules,
    eps_is_zero,
    no_gradient_at_all,
    not_in_an_optimizer,
    swallowed_updates,
)
from safe_trainer.diagnosis.plan import Plan, found
from safe_trainer.diagnosis.schedules import (
    cycles_within_an_epoch,
    decayed_too_early,
    rate_is_gone,
    schedule_never_runs,
    schedules_another,
)
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.program_record import Record

__all__ = ["rules"]

ADD_UP = 256
"""Batches whose gradients may add up before a step without anybody being told: few go beyond 128."""
FEW = 30
"""Steps below which a run may be a trial that ends within its first accumulated group."""
GRAPHS = 4
"""Steps whose graph is alive although the optimizer has moved twice since; a best loss or two may be kept."""


def rules(
    record: Record, *, planned_steps: int | None = None, epoch_length: int | None = None, finished: bool = False
) -> list[Finding]:
    """All findings that the facts prove, as they now stand.

    Args:
        planned_steps: training steps of the whole run, if that is known.
        epoch_length: batches of one pass over the training data, if that is known.
        finished: the run is over: what has not happened yet will not happen.
    """
    plan = Plan(planned_steps, epoch_length, finished)
    return [finding for rule in RULES for finding in rule(record, plan)]


def accumulating(record: Record, plan: Plan) -> Iterator[Finding]:
    """A backward pass adds to a gradient that an optimizer has used, and the sum is used again."""
    hits = record.used_again
    if len(hits) < 2 or 2 * len(hits) < record.intervals:
        return
    yield found(
        "gradient.accumulating",
        Severity.error,
        hits[1][0],
        f"in {len(hits)} of {record.intervals} intervals between two optimizer steps the gradient (of {hits[0][1]} "
        "among others) that the first step had used was still there, and was added to and used again",
        "gradients are not cleared between optimizer steps, so each step uses a sum of old gradients",
        "call optimizer.zero_grad() once for each optimizer.step(), before the backward pass or right after the step",
    )


def never_steps(record: Record, plan: Plan) -> Iterator[Finding]:
    """Gradients come, and no optimizer ever uses them."""
    gradients = [look for look in record.looks if look.arrived]
    moved = any(facts.moved for facts in record.parameters.values())
    if len(gradients) < 2 or moved or any(facts.steps for facts in record.optimizers):
        return
    thrown = [step for step in record.thrown_away if step >= 3]
    if record.steps >= FEW and len(thrown) >= 3:
        evidence = f"{len(thrown)} times gradients were cleared that no optimizer had used"
    elif record.steps >= max(ADD_UP, 2 * (plan.epoch_length or 0)) or (plan.finished and record.steps >= FEW):
        evidence = "gradients add up and are never used"
    else:
        return
    yield found(
        "optimizer.step_missing",
        Severity.error,
        gradients[-1].step if plan.finished else max(30, thrown[2] if len(thrown) > 2 else ADD_UP),
        f"no optimizer made a step in {record.steps} training steps, and no weight has changed: {evidence}",
        "optimizer.step() is never reached: a condition around it is never true, or the call is missing",
        "look at the condition (for accumulation: (index + 1) % n == 0), and call optimizer.step() after backward",
    )


def steps_stopped(record: Record, plan: Plan) -> Iterator[Finding]:
    """Optimizers moved once, and no longer do although gradients come."""
    idle = record.steps - record.last_move
    late = [look for look in record.looks if look.arrived and look.step > record.last_move]
    if not record.last_move or len(late) < 3 or idle < max(200, 10 * record.longest_gap):
        return
    yield found(
        "optimizer.step_missing",
        Severity.warning,
        late[2].step,
        f"no optimizer has moved for {idle} steps (before, never more than {record.longest_gap} steps passed), "
        "although gradients come",
        "optimizer.step() is no longer reached",
        "look at the condition around optimizer.step()",
    )


def graphs_kept(record: Record, plan: Plan) -> Iterator[Finding]:
    """Graphs of steps long past are alive, and ever more of them."""
    kept = [look for look in record.looks if look.graphs_alive >= GRAPHS and look.graphs_alive >= 0.8 * look.graphs]
    if len(kept) < 2 or kept[-1].step != record.looks[-1].step:
        return
    before = [look.graphs_alive for look in record.looks if look.step < kept[-1].step]
    if kept[-1].graphs_alive <= min(before):
        return
    yield found(
        "memory.graph_retained",
        Severity.warning,
        kept[1].step,
        f"of {kept[-1].graphs} earlier steps that were looked at, the graphs of {kept[-1].graphs_alive} are still in "
        f"memory at step {kept[-1].step}",
        "a loss or an output is kept together with its graph: summed up, or put into a list, as a tensor",
        "keep plain values: loss.item() or loss.detach(); evaluate under torch.no_grad()",
    )


Rule = Callable[[Record, Plan], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    accumulating,
    not_in_an_optimizer,
    never_steps,
    steps_stopped,
    no_gradient_at_all,
    blind_modules,
    eps_is_zero,
    swallowed_updates,
    training_in_eval_mode,
    started_in_eval,
    evaluation_in_training_mode,
    schedules_another,
    rate_is_gone,
    decayed_too_early,
    cycles_within_an_epoch,
    schedule_never_runs,
    overclipped,
    clipped_too_late,
    graphs_kept,
)
