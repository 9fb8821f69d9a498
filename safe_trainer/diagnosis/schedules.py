"""Rules over the learning rate and its schedulers. Pure.

A scheduler that is stepped at the wrong interval raises nothing: the rate is gone before the run has begun, or never
leaves its warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator

from safe_trainer.diagnosis.plan import Plan, found
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.program_record import Record, SchedulerFacts

FAULT = "optimizer.scheduler_misuse"
EARLY = 0.5
"""Share of the run before which no sound schedule has taken the rate to a millionth: exponential ones come to 1e-3."""
LONG_UNKNOWN = 200
"""Steps at next to no rate where the length of the run is not known."""
STEP_BY_STEP = 0.9
"""Scheduler steps for each training step that mean that it is stepped each batch."""
LITTLE_LEFT = 0.1
"""What is left behind the last milestone where that alone is no reason to speak."""


def schedules_another(record: Record, plan: Plan) -> Iterator[Finding]:
    """A scheduler moves the rate of an optimizer that trains nothing here."""
    for scheduler in record.schedulers:
        if not scheduler.bound and record.last_move:
            yield found(
                FAULT,
                Severity.error,
                record.looks[0].step if record.looks else 1,
                f"the {scheduler.kind} is bound to an optimizer that is not the one that trains the model",
                "the optimizer was built anew after the scheduler",
                "build the scheduler last, from the optimizer that is used",
            )


def rate_is_gone(record: Record, plan: Plan) -> Iterator[Finding]:
    """The rate has fallen to nothing long before the end, and stays there."""
    since, planned = record.low_since, plan.planned_steps
    if since is None or record.peak_rate == 0 or any(s.kind == "ReduceLROnPlateau" for s in record.schedulers):
        return
    idle = record.steps - since
    if planned is None:
        gone = idle >= max(LONG_UNKNOWN, since)
    elif record.zero_since is not None:
        gone = since <= 0.85 * planned and idle >= 0.1 * planned
    else:
        gone = since <= EARLY * planned and idle >= 0.2 * planned
    if not gone:
        return
    what = "is exactly zero" if record.zero_since is not None else f"is {record.rate:.2g}"
    yield found(
        FAULT,
        Severity.warning,
        record.steps if planned is None else since + int((0.1 if record.zero_since is not None else 0.2) * planned),
        f"the learning rate {what} since about step {since}"
        + (f" of {planned}" if planned else "")
        + f"; its peak was {record.peak_rate:.2g}",
        _why_gone(record),
        "count in one unit: an epoch's schedule is stepped once an epoch, or its numbers are multiplied by the "
        "batches of an epoch; a factor of 0 ends training",
    )


def _why_gone(record: Record) -> str:
    for scheduler in record.schedulers:
        often = "each batch" if _each_batch(scheduler) else f"{scheduler.count} times in {scheduler.seen_at} steps"
        return f"the {scheduler.kind} is stepped {often}, and has taken the rate to nothing"
    return "a scheduler is stepped more often than its numbers mean, or multiplies by zero"


def _each_batch(scheduler: SchedulerFacts) -> bool:
    return scheduler.seen_at >= 10 and scheduler.count >= STEP_BY_STEP * (scheduler.seen_at - 1)


def decayed_too_early(record: Record, plan: Plan) -> Iterator[Finding]:
    """All milestones lie in the first of many epochs, since the scheduler is stepped each batch."""
    planned, epoch = plan.planned_steps, plan.epoch_length
    if planned is None or epoch is None or planned < 4 * epoch:
        return
    for scheduler in record.schedulers:
        last, left = scheduler.last_milestone, scheduler.decay
        if last is None or left is None or left > LITTLE_LEFT or record.low_since is not None:
            continue
        if _each_batch(scheduler) and last <= min(epoch, 0.15 * planned) and record.steps >= last + epoch:
            yield found(
                FAULT,
                Severity.warning,
                max(last + epoch, 10),
                f"the {scheduler.kind} is stepped each batch and has passed its last milestone, {last}, within the "
                f"first epoch of {epoch} batches; the rest of the run, {planned - last} of {planned} steps, has "
                f"{left:.1g} of the rate",
                "its milestones are meant in epochs",
                "step it once an epoch, or multiply the milestones by the batches of an epoch",
            )


def cycles_within_an_epoch(record: Record, plan: Plan) -> Iterator[Finding]:
    """A cosine swings up and down several times in each epoch: its T_max is meant in epochs."""
    for scheduler in record.schedulers:
        period, epoch = scheduler.horizon, plan.epoch_length
        if scheduler.kind != "CosineAnnealingLR" or not period or epoch is None or 2 * period > epoch:
            continue
        if _each_batch(scheduler) and scheduler.count >= 6 * period:
            yield found(
                FAULT,
                Severity.warning,
                max(10, 6 * period),
                f"CosineAnnealingLR has T_max={period} and was stepped {scheduler.count} times, each batch: the rate "
                f"falls to its minimum and rises again {epoch / (2 * period):.0f} times an epoch",
                "T_max is meant in epochs, and the scheduler is stepped each batch",
                "step it once an epoch, or give T_max in batches",
            )


def schedule_never_runs(record: Record, plan: Plan) -> Iterator[Finding]:
    """A one-cycle schedule made for batches is stepped once an epoch, and stays in its warm-up."""
    planned, epoch = plan.planned_steps, plan.epoch_length
    if planned is None or epoch is None or epoch < 4:
        return
    for scheduler in record.schedulers:
        total = scheduler.horizon
        if scheduler.kind != "OneCycleLR" or not total or scheduler.count < 3:
            continue
        each_epoch = abs(scheduler.count - scheduler.seen_at / epoch) <= 1.5
        if each_epoch and total > 5 * (planned / epoch):
            yield found(
                FAULT,
                Severity.warning,
                3 * epoch,
                f"OneCycleLR is made for {total} steps and is stepped once an epoch: {planned / epoch:.0f} times in "
                f"the whole run",
                "its total_steps are meant in batches",
                "step it after each batch",
            )
