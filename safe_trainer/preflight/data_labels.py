"""Targets that do not fit their loss: out of range, of the wrong kind, or left out of it. Reads tables and losses."""

from __future__ import annotations

import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.data_loss import BINARY, CLASSES, REGRESSION, LossCall, out_of_range
from safe_trainer.preflight.data_samples import Table, is_target, leaves
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program

ROUNDING = 1e-3
"""How far probabilities may lie outside 0..1, or their sums from 1: half precision is no better."""
ALL_BUT_CONSTANT = 0.98
"""Share of one whole number from which a regression has lost its target; counts of rare events stay below."""
FEWEST = 20
"""Samples below which a target may be constant by accident."""


def label_range(calls: list[LossCall], tables: dict[str, Table]) -> list[Finding]:
    """Labels that the loss is not defined for, in the recorded calls and in all samples read; one finding a field."""
    found: dict[str, Finding] = {}
    for call in calls:
        for split, place, values in _targets(call, tables):
            if place in found:
                continue
            if call.of_classes:
                found.update(_classes_out_of_range(call, split, place, values))
            elif call.name in BINARY:
                found.update(_shares_out_of_range(call, split, place, values))
    return list(found.values())


def _targets(call: LossCall, tables: dict[str, Table]) -> list[tuple[str, str, Tensor]]:
    """Split, field and values of a loss's targets: of all samples read where their field is known."""
    wholes = {split: table.whole(call.field) if call.field else None for split, table in tables.items()}
    known = [(split, str(call.field), whole) for split, whole in wholes.items() if whole is not None and whole.numel()]
    return known or [("training", call.field or "target", call.target.cpu())]


def _classes_out_of_range(call: LossCall, split: str, place: str, values: Tensor) -> dict[str, Finding]:
    bad = out_of_range(values.long(), call.outputs, call.ignored)
    if not bool(bad.any()):
        return {}
    kept = values[values != call.ignored]
    low, high = int(kept.min()), int(kept.max())
    from_one = low == 1 and high == call.outputs
    evidence = (
        f"labels in {place} go from {low} to {high}, and the model has {call.outputs} outputs (0 to "
        f"{call.outputs - 1}): "
        f"{int(bad.sum()):,} of {values.numel():,} {split} labels lie outside, such as {int(values[bad][0])}"
    )
    cause = (
        "the classes are counted from 1" if from_one else "more classes in the data than outputs, or a code for none"
    )
    remedy = (
        "subtract 1 from the labels" if from_one else "give the model one output a class, and ignore_index to others"
    )
    return {place: finding("data.label_range", "error", where=place, evidence=evidence, cause=cause, remedy=remedy)}


def _shares_out_of_range(call: LossCall, split: str, place: str, values: Tensor) -> dict[str, Finding]:
    numbers = values.double()
    bad = (numbers < -ROUNDING) | (numbers > 1 + ROUNDING)
    if not bool(bad.any()):
        return {}
    low, high = float(numbers.min()), float(numbers.max())
    evidence = (
        f"{call.name} takes targets from 0 to 1, and those in {place} go from {low:.4g} to {high:.4g}: "
        f"{int(bad.sum()):,} of {values.numel():,} {split} values lie outside"
    )
    cause = "masks read from pictures hold 0 and 255" if high == 255 else "labels of another loss: -1 and 1, or classes"
    remedy = "divide the mask by 255" if high == 255 else "bring the targets to 0..1, or take cross_entropy for classes"
    return {place: finding("data.label_range", "error", where=place, evidence=evidence, cause=cause, remedy=remedy)}


# --- the kind of the targets ----------------------------------------------------------------------------------------


def wrong_dtype(calls: list[LossCall], tables: dict[str, Table]) -> list[Finding]:
    """Targets that a cast has emptied, or that are no classes where the loss wants classes; the first one."""
    for call in calls:
        found = _lost_fractions(call, tables) if call.name in REGRESSION else _not_classes(call)
        if found:
            return [found]
    return []


def constant_numbers(program: Program, calls: list[LossCall], table: Table) -> list[Finding]:
    """Whole targets that are all the same, for a loss that is not PyTorch's and reckons with them."""
    if calls or not program.has_forward:
        return []
    for name, values in table.outcomes().items():
        if values.is_floating_point() or values.dtype is torch.bool or len(values) < FEWEST or len(values.unique()) > 1:
            continue
        losses = []
        for moved in (0, 1):
            batch = program.batch()
            leaves(batch)[name].add_(moved)
            losses.append(float(program.loss(batch).detach()))
        if losses[0] != losses[1]:
            evidence = f"{name} is {values.dtype} and {int(values.flatten()[0])} in all {len(values):,} samples"
            return [_wrong(name, evidence, "a cast to whole numbers: what lies between 0 and 1 becomes 0")]
    return []


def _lost_fractions(call: LossCall, tables: dict[str, Table]) -> Finding | None:
    """A regression whose targets are whole: all the same, or with fractions in the held-out data."""
    cut = _cut_in_the_program(call)
    if cut is not None:
        return cut
    values = tables["training"].whole(call.field) if call.field else None
    if values is None or values.is_floating_point() or values.dtype is torch.bool or len(values) < FEWEST:
        return None
    kinds, counts = torch.unique(values, return_counts=True)
    share = float(counts.max()) / values.numel()
    held_out = tables["validation"].whole(str(call.field))
    fractions = held_out is not None and _has_fractions(held_out)
    if share < ALL_BUT_CONSTANT and not fractions:
        return None
    common = int(kinds[counts.argmax()])
    evidence = (
        f"{call.field} is {values.dtype} with {len(kinds)} different values, {100 * share:.1f} % of them {common}, in "
        f"{len(values):,} samples, and goes into {call.name}"
        + ("; the held-out targets have fractions" if fractions else "")
    )
    return _wrong(str(call.field), evidence, "a cast to whole numbers (LongTensor, .long(), astype(int)) cut them off")


def _cut_in_the_program(call: LossCall) -> Finding | None:
    """The loss gets whole numbers, and the batch holds the same ones with fractions."""
    if call.field is not None or _has_fractions(call.target):
        return None
    for name, values in call.fields.items():
        if not is_target(name) or values.numel() != call.target.numel() or not _has_fractions(values):
            continue
        given = values.cpu().reshape(-1).double()
        target = call.target.cpu().reshape(-1).double()
        if any(torch.equal(whole, target) for whole in (given.trunc(), given.round(), given.floor())):
            evidence = (
                f"{name} holds fractions, and {call.name} gets them cut down to {len(target.unique())} whole numbers"
            )
            return _wrong(name, evidence, "a cast to whole numbers between the batch and the loss")
    return None


def _has_fractions(values: Tensor) -> bool:
    return values.is_floating_point() and bool((values != values.round()).any())


def _not_classes(call: LossCall) -> Finding | None:
    """Cross-entropy over floats that are neither classes nor probabilities."""
    if call.name not in CLASSES or call.outputs < 2:
        return None
    target = call.target
    if not target.is_floating_point():
        if target.dtype in (torch.int64, torch.uint8):
            return None
        evidence = f"{call.name} wants classes as torch.int64 (torch.long), and gets {target.dtype}"
        return _wrong(call.field or "target", evidence, "labels of another whole-number type", "labels.long()")
    if target.shape != call.prediction.shape:
        evidence = f"{call.name} gets {target.dtype} of shape {tuple(target.shape)} for {call.outputs} classes"
        return _wrong(call.field or "target", evidence, "class numbers stored as floats", "labels.long()")
    if bool((target < -ROUNDING).any()) or bool((target > 1 + ROUNDING).any()):
        low, high = float(target.min()), float(target.max())
        evidence = f"{call.name} takes float targets as probabilities, and gets {low:.4g} to {high:.4g}"
        return _wrong(call.field or "target", evidence, "scores, logits or class numbers in place of probabilities")
    return None


def _wrong(place: str, evidence: str, cause: str, remedy: str = "") -> Finding:
    remedy = remedy or "keep floats for a regression, torch.long for class indices, probabilities for soft labels"
    return finding("loss.wrong_target_dtype", "error", where=place, evidence=evidence, cause=cause, remedy=remedy)


# --- targets that the loss leaves out -------------------------------------------------------------------------------

INSIDE = 0.2
"""Share of sequences with the ignored label between two others from which it is no padding."""


def label_masked(calls: list[LossCall], table: Table) -> list[Finding]:
    """An ignore_index that is a class of the data."""
    for call in calls:
        if not call.of_classes or not 0 <= call.ignored < call.outputs:
            continue
        whole = table.whole(call.field) if call.field else None
        values = call.target.cpu() if whole is None else whole
        out = values == call.ignored
        reason = _is_real(values, out)
        if reason:
            return [_masked(call, values, out, reason)]
    return []


def _is_real(values: Tensor, out: Tensor) -> str:
    """Why the ignored label is a class and no padding; empty if it may be padding."""
    if values.numel() < FEWEST or not bool(out.any()):
        return ""
    left = values[~out].unique()
    if len(left) == 1:
        return f"the loss sees class {int(left[0])} alone"
    if values.numel() == len(values):
        rare = 0.3 / max(1, len(left) + 1)  # a class as any other has about 1 / classes
        return "each sample has one label, so it is no padding" if float(out.float().mean()) > rare else ""
    if values.dim() != 2 or values.shape[1] < 4:
        return ""
    inside = _inside(out).any(1).float().mean()
    return f"it stands between other labels in {100 * float(inside):.0f} % of the sequences" if inside > INSIDE else ""


def _inside(out: Tensor) -> Tensor:
    """Places that are ignored and have a label before and behind them."""
    kept = (~out).long()
    before, behind = kept.cumsum(1) > 0, kept.flip(1).cumsum(1).flip(1) > 0
    return out & before & behind


def _masked(call: LossCall, values: Tensor, out: Tensor, reason: str) -> Finding:
    evidence = (
        f"ignore_index={call.ignored} takes {int(out.sum()):,} of {values.numel():,} labels "
        f"({100 * float(out.float().mean()):.1f} %) out of {call.name}, and {call.ignored} is one of the "
        f"{call.outputs} classes: {reason}"
    )
    return finding(
        "data.label_masked",
        "warning",
        where=call.field,
        evidence=evidence,
        cause="ignore_index, or the id of the padding, is also a class",
        remedy="give padding an id of its own, such as -100, and let the loss count all classes",
    )
