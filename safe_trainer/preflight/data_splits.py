"""Samples that are in the training set and in the held-out one. Reads tables and the indices of subsets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from safe_trainer.findings import Finding
from safe_trainer.preflight.data_samples import Table
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program

SHARE = 0.05
"""Share of held-out samples from which their figures are flattered by what matters."""
COUNT = 5
"""Samples below which it is chance."""
HALF = 0.5
"""Share from which the held-out figures mean nothing."""
DEVIATIONS = 5.0
"""How far the share must exceed that of natural duplicates, in standard deviations."""


def overlap(program: Program, train: Table, held_out: Table) -> list[Finding]:
    """Samples of the held-out set that training has too, beyond what repeats in the data by nature."""
    if program.val_loader is None:
        return []
    found = _common_indices(program) or _common_samples(train, held_out)
    if not found:
        return []
    count, total, how = found
    share = count / total
    if program.val_loader is program.train_loader:
        severity = "info"  # somebody wants the figures on the training data
    else:
        severity = "error" if share >= HALF and not _same_data(program) else "warning"
    return [
        finding(
            "data.split_overlap",
            severity,
            where="val_loader",
            evidence=f"{count:,} of {total:,} validation samples ({100 * share:.0f} %) are in the training data too "
            f"({how})",
            cause="the split was made after oversampling or augmentation, or with overlapping indices",
            remedy="split first, by object or by time, and drop what occurs twice; figures so far are too good",
        )
    ]


def _same_data(program: Program) -> bool:
    first, second = (getattr(loader, "dataset", None) for loader in (program.train_loader, program.val_loader))
    return first is not None and first is second


def _common_indices(program: Program) -> tuple[int, int, str] | None:
    """Two subsets of one data set with common indices."""
    first, second = (getattr(loader, "dataset", None) for loader in (program.train_loader, program.val_loader))
    if not isinstance(first, Subset) or not isinstance(second, Subset) or first.dataset is not second.dataset:
        return None
    used = set(map(int, first.indices))
    common = sum(int(index) in used for index in second.indices)
    if common < COUNT or common < SHARE * len(second.indices):
        return None
    return common, len(second.indices), "the same indices of one data set"


def _common_samples(train: Table, held_out: Table) -> tuple[int, int, str] | None:
    """Inputs of the same bytes, compared with how often training inputs repeat among themselves."""
    names = sorted(train.inputs().keys() & held_out.inputs().keys())
    if not names or len(train.inputs()) != len(held_out.inputs()) or len(held_out) < 2 * COUNT:
        return None
    first, second = (_once(table, _keys(table, names)) for table in (train, held_out))
    counts, total = Counter(key for _, key in first), len(second)
    both = [(row, key) for row, key in second if key in counts]
    share, natural = len(both) / total, sum(n for n in counts.values() if n > 1) / len(first)
    if len(both) < COUNT or share < SHARE or len(counts) < COUNT:
        return None
    if not _is_continuous(train, names) and not _beyond(share, natural, total):
        return None
    agreeing = _agreeing(train, held_out, first, both)
    if agreeing is not None and agreeing < HALF:
        return None  # inputs that say little: the same one has many answers
    how = "the same bytes" + ("" if agreeing is None else f", {100 * agreeing:.0f} % of them with the same target")
    return len(both), total, how


def _keys(table: Table, names: list[str]) -> list[int]:
    wholes = [table.inputs()[name].contiguous() for name in names]
    arrays = [whole.reshape(len(whole), -1).view(torch.uint8).numpy() for whole in wholes]
    return [hash(tuple(array[row].tobytes() for array in arrays)) for row in range(len(table))]


def _once(table: Table, keys: list[int]) -> list[tuple[int, int]]:
    """Row and key of each sample, samples that a sampler drew several times only once."""
    if len(table.indices) != len(keys):
        return list(enumerate(keys))
    return list(
        {str(index): (row, key) for row, (index, key) in enumerate(zip(table.indices, keys, strict=True))}.values()
    )


def _beyond(share: float, natural: float, total: int) -> bool:
    """A held-out sample finds its like in training about as often as a training sample finds another one."""
    spread = math.sqrt(max(natural * (1 - natural), 1 / total) / total)
    return share > natural + DEVIATIONS * spread + SHARE


def _is_continuous(table: Table, names: Iterable[str]) -> bool:
    """Whether equal samples cannot be an accident: fractions, hardly any value twice, in several columns."""
    for name in names:
        values = table.inputs()[name]
        if not values.is_floating_point() or not bool((values != values.round()).any()):
            continue
        flat = values.reshape(len(values), -1)[:1000].float()
        rows = len(flat.unique(dim=0))
        columns = [len(column.unique()) for column in flat[:, :20].T]
        if sum(count > 0.5 * rows for count in columns) >= 3:
            return rows >= 3 * COUNT
    return False


def _agreeing(train: Table, held_out: Table, first: Any, both: Any) -> float | None:
    """Share of the common samples that have the same target in both; None without comparable targets."""
    answers = [_target_keys(table) for table in (train, held_out)]
    if answers[0] is None or answers[1] is None:
        return None
    known: dict[int, set[bytes]] = {}
    for row, key in first:
        known.setdefault(key, set()).add(answers[0][row])
    return sum(answers[1][row] in known[key] for row, key in both) / len(both)


def _target_keys(table: Table) -> list[bytes] | None:
    wholes: list[Tensor] = list(table.outcomes().values())
    if len(wholes) != 1:
        return None
    flat = wholes[0].reshape(len(wholes[0]), -1).float().numpy()  # the dtypes of the splits may differ
    return [row.tobytes() for row in flat]
