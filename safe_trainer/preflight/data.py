"""Check: the samples that training gets, and their targets. Reads the loaders and runs a few steps of the program.

Reads as much as fits the time; every part that cannot look says why in the evidence, and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from safe_trainer.findings import CheckResult, Finding
from safe_trainer.preflight import (
    data_balance,
    data_causal,
    data_labels,
    data_leak,
    data_noise,
    data_order,
    data_probe,
    data_scale,
    data_splits,
    data_storage,
    data_values,
    data_workers,
)
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.data_loss import Labels, LossCall, labels_of, loss_calls, quantity_of
from safe_trainer.preflight.data_samples import Table, describe, is_target, read_table, table_of
from safe_trainer.preflight.outcome import ProgramFailed, Skip, judged
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import is_read_once

log = logging.getLogger(__name__)

READING = 0.2
"""Share of the time left that reading training samples may take, and of what is then left, held-out ones."""


@dataclass
class Look:
    """What was read and recorded."""

    train: Table
    held_out: Table
    calls: list[LossCall]
    labels: Labels | None
    quantity: tuple[str, Tensor] | None
    notes: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""

    @property
    def tables(self) -> dict[str, Table]:
        return {"training": self.train, "validation": self.held_out}


def check(program: Program, clock: Clock) -> CheckResult:
    """All questions to the data; evidence is what was read, and what could not be looked at."""
    look = _look(program, clock)
    findings: list[Finding] = []
    for name, part in _parts(program, look, clock):
        if clock.left() == 0:
            look.notes.append(f"no time for {name}")
            continue
        try:
            with program.preserved():
                findings += part()
        except (Skip, ProgramFailed) as reason:
            look.notes.append(f"{name}: {reason}")
        except Exception as error:
            log.debug("The part %s of the data check failed.", name, exc_info=True)
            look.notes.append(f"{name}: {type(error).__name__}: {error}")
    return judged(_evidence(look), findings)


def _parts(program: Program, look: Look, clock: Clock) -> Iterator[tuple[str, Callable[[], list[Finding]]]]:
    """The questions in their order, each with its name; those of the values first, for others build on them."""
    train, held_out, calls, labels = look.train, look.held_out, look.calls, look.labels
    yield "values", lambda: data_values.nonfinite(program, look.tables)
    yield "variation", lambda: data_values.constant(train, labels)
    yield "label range", lambda: data_labels.label_range(calls, look.tables)
    yield "target type", lambda: data_labels.wrong_dtype(calls, look.tables)
    yield "constant targets", lambda: data_labels.constant_numbers(program, calls, train)
    yield "masked labels", lambda: data_labels.label_masked(calls, train)
    yield "splits", lambda: data_splits.overlap(program, train, held_out)
    yield "order", lambda: data_order.not_shuffled(program, train, labels, look.quantity, clock)
    yield "batches", lambda: data_order.same_batch(program, train)
    yield "stored data", lambda: data_storage.mutated(program, clock)
    yield "workers", lambda: data_workers.worker_seed(program, train, clock)
    yield "columns", lambda: data_leak.column(train, labels, look.quantity)
    yield "sequences", lambda: data_causal.later_inputs(program, calls)
    yield "relation", lambda: data_probe.misaligned(train, held_out, labels, look.quantity, clock)
    yield "scale", lambda: data_scale.unnormalized(program, train, calls, clock)
    yield "balance", lambda: data_balance.imbalance(program, train, labels, clock)
    if program.config.preflight.label_noise:
        yield "label noise", lambda: data_noise.label_noise(train, labels)


def _look(program: Program, clock: Clock) -> Look:
    batches = program.batches()
    limit = program.config.limit_train_batches
    with program.preserved():
        train = (
            table_of(batches, clock.seconds)
            if is_read_once(program.train_loader)
            else read_table(program.train_loader, clock.left() * READING, limit)
        )
    if not train.pieces:
        raise Skip("the batches hold no tensors")
    held_out, notes = Table(), []
    try:
        with program.preserved():
            held_out = read_table(program.val_loader, clock.left() * READING, program.config.limit_val_batches)
    except ProgramFailed as failure:
        notes.append(f"validation: {failure}")
    with program.preserved():
        calls, failure_text = loss_calls(program, batches[0])
    if failure_text:
        notes.append(f"a step: {failure_text}")
    for table in (train, held_out):
        found = {call.field for call in calls if call.field is not None}
        if not any(map(is_target, table.pieces)):  # a batch that is neither a pair nor a mapping
            table.targets |= found & table.pieces.keys()
    return Look(train, held_out, calls, labels_of(calls, train, held_out), quantity_of(calls, train), notes)


def _evidence(look: Look) -> str:
    inputs = [f"{name} {describe(values)}" for name, values in look.train.inputs().items()]
    parts = [f"{len(look.train):,} samples read" if look.train.aligned else f"{len(look.train.sizes)} batches read"]
    parts += inputs[:3]
    if look.labels is not None:
        counts = look.labels.counts()
        if counts:
            parts.append(f"{len(counts)} classes of {min(counts.values()):,} to {max(counts.values()):,}")
    elif look.quantity is not None:
        name, values = look.quantity
        parts.append(f"{name} mean {float(values.mean()):.3g} sd {float(values.std(unbiased=False)):.3g}")
    if len(look.held_out):
        parts.append(f"{len(look.held_out):,} held-out samples")
    return ", ".join(parts) + "".join(f"; {note}" for note in look.notes)
