"""The order of the samples: sorted by class, or the same batch again and again. Reads tables and the data set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.data_loss import Labels
from safe_trainer.preflight.data_samples import Table, dataset_of, read_table
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program

BATCHES = 4
"""Batches below which an order says nothing: nearly all of the data is in each step."""
FEW = 0.65
"""Classes in a batch over what a random order gives, below which the order is by class; two classes sorted give 0.5."""
DEVIATIONS = 6.0
"""How far equal neighbours must exceed chance, in standard deviations: never by chance."""
SORTED = 0.995
"""Share of neighbours in ascending order from which a quantity is sorted; a few pieces may be joined."""
ELSEWHERE = 48
"""Samples drawn from all over the data set where those read have one class."""


def not_shuffled(
    program: Program, table: Table, labels: Labels | None, quantity: tuple[str, Tensor] | None, clock: Clock
) -> list[Finding]:
    """Training samples that come sorted by class or by target, so that each step sees a part of the task only."""
    if len(table.sizes) < BATCHES or not table.aligned or max(table.sizes) < 2:
        return []
    if labels is not None and len(labels.values) == len(table):
        return _by_class(program, table, labels, clock)
    return [] if quantity is None else _by_quantity(program, table, *quantity, clock)


def _by_class(program: Program, table: Table, labels: Labels, clock: Clock) -> list[Finding]:
    values = labels.values
    classes = len(values.unique())
    if classes == 1:
        return _one_class(program, table, labels)
    seen = _classes_a_batch(values, table.sizes)
    expected = _classes_a_batch(values[torch.randperm(len(values))], table.sizes)
    if seen > FEW * expected or _excess(values) < DEVIATIONS:
        return []
    runs = 1 + int((values[1:] != values[:-1]).sum())
    blocks = runs <= 3 * classes and len(values) / runs >= 2 * max(table.sizes) / 3
    if not blocks and not _same_again(program, table, labels.field, clock):
        return []  # batches of a few classes each, drawn anew: as metric learning wants them
    return [
        _unshuffled(
            program,
            labels.field,
            f"a batch of {max(table.sizes)} holds {seen:.1f} of the {classes} classes on average, {expected:.1f} in a "
            f"random order; {len(values):,} samples come in {runs} runs of one class",
        )
    ]


def _classes_a_batch(values: Tensor, sizes: list[int]) -> float:
    batches = values.split(sizes)
    return sum(len(batch.unique()) for batch in batches) / len(batches)


def _excess(values: Tensor) -> float:
    """Equal neighbours beyond those of a random order, in standard deviations (a runs test)."""
    share = torch.unique(values, return_counts=True)[1].double() / len(values)
    chance, pairs = float((share**2).sum()), len(values) - 1
    equal = float((values[1:] == values[:-1]).sum())
    return float((equal - pairs * chance) / max(1e-9, (pairs * chance * (1 - chance)) ** 0.5))


def _one_class(program: Program, table: Table, labels: Labels) -> list[Finding]:
    """All samples read are of one class, and the data set has others."""
    dataset = dataset_of(program.train_loader)
    if dataset is None or table.complete or labels.field != "target" or len(table) < 32:
        return []
    places = [(step * len(dataset)) // ELSEWHERE for step in range(ELSEWHERE)]
    others = {_class_of(dataset[place]) for place in places} - {None}
    if len(others) < 2:
        return []
    evidence = (
        f"the first {len(table):,} samples are all of class {int(labels.values[0])}, and the data set has {len(others)}"
    )
    return [_unshuffled(program, labels.field, evidence)]


def _class_of(sample: Any) -> int | None:
    """The class of a sample that is a pair of an input and one whole number."""
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        return None
    label = torch.as_tensor(sample[1]) if isinstance(sample[1], (int, Tensor)) else torch.tensor([])
    return int(label) if label.numel() == 1 and not label.is_floating_point() else None


def _by_quantity(program: Program, table: Table, name: str, values: Tensor, clock: Clock) -> list[Finding]:
    """Targets in ascending or descending order all the way."""
    steps = values[1:] - values[:-1]
    rising, falling = float((steps >= 0).float().mean()), float((steps <= 0).float().mean())
    if max(rising, falling) < SORTED or len(values) < 64 or len(values.unique()) < 0.2 * len(values):
        return []
    way = "rise" if rising > falling else "fall"
    evidence = (
        f"the targets {way} from each sample to the next in {100 * max(rising, falling):.1f} % of {len(values):,}"
    )
    return [_unshuffled(program, name, evidence)]


def _same_again(program: Program, table: Table, field: str, clock: Clock) -> bool:
    """Whether the next epoch comes in the same order."""
    again = read_table(program.train_loader, clock.part(0.2).seconds, len(table.sizes))
    first, second = table.whole(field), again.whole(field)
    if first is None or second is None:
        return False
    count = min(len(first), len(second))
    return bool(torch.equal(first[:count], second[:count]))


def _unshuffled(program: Program, field: str, evidence: str) -> Finding:
    return finding(
        "data.not_shuffled",
        "warning",
        where=_sampler(program.train_loader),
        evidence=f"{field}: {evidence}",
        cause="the loader keeps the order of the files or rows, and these are sorted",
        remedy="DataLoader(..., shuffle=True); a stream needs a buffer that shuffles",
    )


def _sampler(loader: Any) -> str:
    sampler = getattr(loader, "sampler", None)
    return "train_loader" if sampler is None else f"train_loader ({type(sampler).__name__})"


def same_batch(program: Program, table: Table) -> list[Finding]:
    """Every batch has the very same samples although the loader has more, or is no list of one batch on purpose."""
    pieces = [pieces for pieces in table.pieces.values() if pieces]
    if len(table.sizes) < 3 or not pieces or isinstance(program.train_loader, (list, tuple)):
        return []
    if not all(piece.shape == own[0].shape and torch.equal(piece, own[0]) for own in pieces for piece in own[1:]):
        return []
    if not any(bool((own[0] != own[0][:1]).any()) for own in pieces if own[0].dim()):
        return []  # samples that are all the same are another fault
    return [
        finding(
            "data.not_shuffled",
            "warning",
            where=_sampler(program.train_loader),
            evidence=f"all {len(table.sizes)} batches read have the very same {table.sizes[0]} samples in one order",
            cause="the loader begins anew at each batch, or its sampler always draws the same",
            remedy="make one iterator an epoch, as in `for batch in loader`, and check the sampler",
        )
    ]
