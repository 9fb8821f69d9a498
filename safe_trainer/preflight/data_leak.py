"""Inputs that hold the answer as a column. Reads tables only."""

from __future__ import annotations

import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.data_loss import Labels
from safe_trainer.preflight.data_samples import Table
from safe_trainer.preflight.outcome import finding

COLUMNS = 5
"""Columns from which one that solves the task alone is suspicious; with fewer, features are chosen for that."""
FEWEST = 50
"""Samples below which a column may fit by chance."""
OTHERS = 0.9
"""Accuracy of the next best column from which the task is easy and no column leaks; also a correlation."""
EXACT = 1e-5
"""How far a copy may be from the target, over its deviation: rounding of float32."""


def column(table: Table, labels: Labels | None, quantity: tuple[str, Tensor] | None) -> list[Finding]:
    """A column of a table that is the target under another name."""
    values = table.only_input()
    if values is None or values.dim() != 2 or not values.is_floating_point() or values.shape[1] < COLUMNS:
        return []
    if len(values) < FEWEST or not bool(torch.isfinite(values).all()):
        return []
    if labels is not None and len(labels.values) == len(values):
        return _of_classes(values, labels)
    if quantity is not None and len(quantity[1]) == len(values):
        known = torch.isfinite(quantity[1])  # a loss may leave missing targets out
        if int(known.sum()) >= FEWEST:
            return _of_quantity(values[known].double(), quantity[0], quantity[1][known].double())
    return []


def _of_classes(values: Tensor, labels: Labels) -> list[Finding]:
    kinds = labels.values.unique()
    if not 2 <= len(kinds) <= 100 or len(values) < 5 * len(kinds):
        return []
    perfect = [number for number in range(values.shape[1]) if _splits(values[:, number], labels.values, len(kinds))]
    if len(perfect) != 1:
        return []
    rest = [number for number in range(values.shape[1]) if number != perfect[0]]
    best = max(_accuracy(values[:, number], labels.values, kinds) for number in rest)
    continuous = sum(len(values[:, number].unique()) > 10 for number in rest)
    if best > OTHERS or (len(kinds) == 2 and 2 * continuous < len(rest)):
        return []
    copied = len(values[:, perfect[0]].unique()) == len(kinds)
    how = f"has one value for each of the {len(kinds)} classes" if copied else "tells the classes apart by wide gaps"
    evidence = (
        f"column {perfect[0]} {how} in all {len(values):,} samples read; the best other column is right in "
        f"{100 * best:.0f} %"
    )
    return [_found(table_name(perfect[0]), evidence, "error" if copied else "warning")]


def table_name(number: int) -> str:
    """How a column of the input is called in findings."""
    return f"input column {number}"


def _splits(values: Tensor, labels: Tensor, count: int) -> bool:
    """Whether each class has a range of the column to itself, with gaps wider than the ranges."""
    order = values.argsort(stable=True)
    column, classes = values[order], labels[order]
    borders = (classes[1:] != classes[:-1]).nonzero().reshape(-1)
    if len(borders) != count - 1:
        return False
    gaps = column[borders + 1] - column[borders]
    starts = torch.cat([torch.zeros(1, dtype=torch.long), borders + 1])
    ends = torch.cat([borders, torch.tensor([len(column) - 1])])
    return bool(gaps.min() > 0) and bool(gaps.min() > (column[ends] - column[starts]).max())


def _accuracy(values: Tensor, labels: Tensor, kinds: Tensor) -> float:
    """Of the nearest class mean, and of the best majority in twenty slices of equal size."""
    means = torch.stack([values[labels == kind].mean() for kind in kinds])
    nearest = kinds[(values[:, None] - means).abs().argmin(1)]
    slices = labels[values.argsort(stable=True)].split(max(5, len(values) // 20))
    majority = sum(int((part == part.mode().values).sum()) for part in slices) / len(values)
    return max(float((nearest == labels).double().mean()), majority)


def _of_quantity(values: Tensor, name: str, target: Tensor) -> list[Finding]:
    deviation = target.std()
    if float(deviation) == 0 or len(target.unique()) < COLUMNS:
        return []
    centred = (values - values.mean(0)) / values.std(0).clamp_min(1e-30)
    correlations = (centred * ((target - target.mean()) / deviation)[:, None]).mean(0).abs()
    best = int(correlations.argmax())
    others = torch.cat([correlations[:best], correlations[best + 1 :]])
    if float(correlations[best]) < 0.99 or float(others.max()) > OTHERS:
        return []
    same = bool(((values[:, best] - target).abs() <= EXACT * deviation).all())
    residual = (centred[:, best] * centred[:, best].mul((target - target.mean()) / deviation).mean().sign()) - (
        target - target.mean()
    ) / deviation
    if not same and float(residual.abs().max()) > 100 * EXACT:
        return []
    what = "equals" if same else "is a straight line of"
    evidence = (
        f"column {best} {what} {name} in all {len(values):,} samples read; the best other column correlates "
        f"{float(others.max()):.2f}"
    )
    return [_found(table_name(best), evidence, "error" if same else "warning")]


def _found(where: str, evidence: str, severity: str) -> Finding:
    return finding(
        "data.target_leak",
        severity,
        where=where,
        evidence=evidence,
        cause="a column made from the target, or known only after it",
        remedy="leave the column out, and ask of each column whether it is known when the model is used",
    )
