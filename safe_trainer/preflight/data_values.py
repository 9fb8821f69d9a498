"""Values that no training gets along with: NaN and infinity, inputs that are the same for all samples. Reads tables.

May run single steps of the program, to see whether it copes with what looks bad.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.data_loss import Labels
from safe_trainer.preflight.data_samples import Table, leaves
from safe_trainer.preflight.outcome import ProgramFailed, Skip, finding
from safe_trainer.preflight.program import Program

FEWEST = 8
"""Samples below which nothing is said about their variation: fewer may well be alike."""
ALIKE = 0.95
"""Share of samples with the very same input from which the others cannot carry a task."""


def nonfinite(program: Program, tables: dict[str, Table]) -> list[Finding]:
    """NaN and infinity in any field. An error where a step on such a sample gives no finite loss; else an info."""
    found = []
    for split, table in tables.items():
        for name, pieces in table.pieces.items():
            bad = [_bad_rows(piece) for piece in pieces]
            if any(bool(rows.any()) for rows in bad) and not _is_mask(pieces):
                found.append(_nonfinite(program, split, table, name, bad))
    return found


def _bad_rows(piece: Tensor) -> Tensor:
    """Which samples of a batch hold a value that is not finite."""
    if not piece.is_floating_point() or not piece.dim():
        return torch.zeros(1, dtype=torch.bool)
    return ~torch.isfinite(piece).reshape(len(piece), -1).all(1) if piece.numel() else torch.zeros(1, dtype=torch.bool)


def _is_mask(pieces: list[Tensor]) -> bool:
    """Only 0 and minus infinity: an additive attention mask."""
    return all(bool(((piece == 0) | (piece == -math.inf)).all()) for piece in pieces)


def _nonfinite(program: Program, split: str, table: Table, name: str, bad: list[Tensor]) -> Finding:
    rows = torch.cat(bad)
    number = next(index for index, batch in enumerate(bad) if bool(batch.any()))
    first = int(rows.nonzero()[0])
    values = table.pieces[name][number]
    copes = _copes(program, table, number)
    evidence = (
        f"{_kind(values)} in {name}{_columns(table, name)}: {int(rows.sum())} of the {len(rows):,} {split} samples "
        f"read, first in {table.place(first)}"
        f"{'; a step on them gives a finite loss and gradients all the same' if copes else ''}"
    )
    return finding(
        "data.nonfinite",
        "info" if copes else "error",
        where=name,
        evidence=evidence,
        cause="values that are missing, or a logarithm or division in the preprocessing",
        remedy="fill or drop these values before training: torch.nan_to_num hides them, so look at them first",
    )


def _kind(values: Tensor) -> str:
    parts = [("NaN", torch.isnan(values)), ("infinity", torch.isinf(values))]
    return " and ".join(name for name, which in parts if bool(which.any()))


def _columns(table: Table, name: str) -> str:
    """Which columns or channels are hit, where there are few of them."""
    pieces = [piece for piece in table.pieces[name] if piece.dim() >= 2]
    if not pieces or len({piece.shape[1:] for piece in pieces}) != 1:
        return ""
    per = [(~torch.isfinite(piece)).reshape(len(piece), piece.shape[1], -1).any(2).any(0) for piece in pieces]
    hit = torch.stack(per).any(0).nonzero().reshape(-1).tolist()
    word = "column" if pieces[0].dim() == 2 else "channel or position"
    shown = ", ".join(map(str, hit[:5])) + (f" and {len(hit) - 5} more" if len(hit) > 5 else "")
    return f" ({word} {shown})"


def _copes(program: Program, table: Table, number: int) -> bool:
    """Whether a step on the batch gives a finite loss and finite gradients: the program knows of such values."""
    batch = _rebuilt(program, table, number)
    if batch is None:
        return False
    try:
        with program.preserved():
            loss = program.backward(batch)
            grads = [p.grad for p in program.model.parameters() if p.grad is not None]
            return math.isfinite(loss) and all(bool(torch.isfinite(grad).all()) for grad in grads)
    except (ProgramFailed, Skip):
        return False


def _rebuilt(program: Program, table: Table, number: int) -> Any:
    """The batch of this number once more, in the shape the program knows; None where its fields do not tell."""
    fields = {name: pieces[number] for name, pieces in table.pieces.items() if number < len(pieces)}
    return program.on_device(rebuilt(program.batches()[0], fields))


def rebuilt(like: Any, fields: dict[str, Tensor]) -> Any:
    """A batch built as `like`, with its tensors replaced by those of the same names; None if a name is missing."""
    names = {id(tensor): name for name, tensor in leaves(like).items()}
    if set(names.values()) != fields.keys():
        return None

    def build(value: Any) -> Any:
        if isinstance(value, Tensor):
            return fields[names[id(value)]].clone() if id(value) in names else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(build, value))
        if type(value) in (list, tuple):
            return type(value)(map(build, value))
        return {key: build(item) for key, item in value.items()} if type(value) is dict else value

    return build(like)


def constant(table: Table, labels: Labels | None) -> list[Finding]:
    """Inputs that do not tell samples apart although the targets differ."""
    inputs, targets = table.inputs(), table.outcomes()
    if not inputs or len(table) < FEWEST or len(inputs) != len(table.pieces) - len(targets):
        return []
    if not any(_varies(target) for target in targets.values()):
        return []
    if not any(_varies(values) for values in inputs.values()):
        return [_constant(table, inputs)]
    return _mostly_alike(table, inputs, labels)


def _varies(values: Tensor) -> bool:
    return bool((values != values[:1]).any())


def _constant(table: Table, inputs: dict[str, Tensor]) -> Finding:
    name, values = next(iter(inputs.items()))
    low, high = float(values.min()), float(values.max())
    what = f"{low:.3g} everywhere" if low == high else f"values from {low:.3g} to {high:.3g}"
    return finding(
        "data.constant_input",
        "error",
        where=name,
        evidence=f"all {len(table):,} samples read have the very same {' and '.join(inputs)}: {what}, sd over "
        "samples 0",
        cause="a cast to whole numbers after scaling to 0..1, one file read each time, or a mask that takes all out",
        remedy="look at five samples as the network gets them, and follow one of them back to its file",
    )


def _mostly_alike(table: Table, inputs: dict[str, Tensor], labels: Labels | None) -> list[Finding]:
    """Nearly all inputs are one and the same, and it stands for every class alike."""
    if labels is None or len(table) < 100 or len(labels.values) != len(table):
        return []
    rows = [tuple(values[row].numpy().tobytes() for values in inputs.values()) for row in range(len(table))]
    common = max(set(rows), key=rows.count) if len(set(rows)) < (1 - ALIKE) * len(rows) + 1 else None
    which = torch.tensor([row == common for row in rows])
    if common is None or float(which.float().mean()) < ALIKE:
        return []
    if _entropy(labels.values[which]) < 0.9 * _entropy(labels.values):  # an empty window that means "nothing happened"
        return []
    return [
        finding(
            "data.constant_input",
            "error",
            where=next(iter(inputs)),
            evidence=f"{int(which.sum()):,} of {len(rows):,} samples read have the very same input, in every class "
            "alike",
            cause="files that could not be read, or a transform that blanks most samples",
            remedy="look at five samples as the network gets them, and follow one of them back to its file",
        )
    ]


def _entropy(labels: Tensor) -> float:
    share = torch.unique(labels, return_counts=True)[1].double() / max(1, len(labels))
    return float(-(share * share.log()).sum())
