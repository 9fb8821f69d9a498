"""Answers that should not be there: validation samples in the training data, the label among the inputs, the future."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import ProgramFailed, finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.samples import Samples
from safe_trainer.preflight.traced import ModuleCall, module_calls

OVERLAP = 0.05
"""Share of validation samples that also stand in the training data: twins in real data are a per cent or two."""
LEAST = 5


def split_overlap(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """Validation samples, inputs and labels, that were trained on. Inputs with few possible values are left alone."""
    if train.inputs is None or held_out.inputs is None or train.inputs.shape[1:] != held_out.inputs.shape[1:]:
        return
    known = set(_keys(train))
    keys = _keys(held_out)
    share = sum(key in known for key in keys) / len(keys)
    twins = 1 - len(set(keys)) / len(keys)
    own_twins = 1 - len(known) / len(train.inputs)
    if share * len(keys) < LEAST or share < OVERLAP or max(twins, own_twins) > share / 2:
        return
    yield finding(
        "data.split_overlap",
        "error",
        evidence=f"{share:.0%} of the {len(keys)} validation samples read are in the training data too, to the bit",
        cause="the validation data were drawn from all data, or the data hold copies that fell on both sides",
        remedy="remove copies first, then split once, and keep the indices of the two parts apart",
    )


def _keys(samples: Samples) -> list[bytes]:
    assert samples.inputs is not None
    assert samples.targets is not None
    inputs = samples.inputs.flatten(1).contiguous().numpy()
    targets = samples.targets.flatten(1) if samples.targets.dim() > 1 else samples.targets.unsqueeze(1)
    labels = targets.contiguous().numpy()
    return [row.tobytes() + label.tobytes() for row, label in zip(inputs, labels, strict=True)]


def label_among_inputs(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """A column of a table that is the target itself, or a straight line through it."""
    inputs, targets = train.inputs, train.targets
    if inputs is None or targets is None or inputs.dim() != 2 or not inputs.is_floating_point() or len(inputs) < 50:
        return
    if targets.numel() != len(targets) or inputs.shape[1] < 2:
        return
    goal = targets.flatten().double()
    goal = goal - goal.mean()
    columns = inputs.double() - inputs.double().mean(0)
    size = columns.square().sum(0) * goal.square().sum()
    relation = (columns * goal.unsqueeze(1)).sum(0).square() / torch.where(size > 0, size, torch.ones_like(size))
    if float(relation.max()) > 1 - 1e-9:
        column = int(relation.argmax())
        yield finding(
            "data.target_leak",
            "error",
            evidence=f"column {column} of the {inputs.shape[1]} inputs is the target, up to scale and offset, in all "
            f"{len(inputs)} samples read",
            cause="the label was left in the table, or something that is only known with it",
            remedy=f"take column {column} out of the inputs, and look for others that come after the event to be "
            "foretold",
        )


def future_seen(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """A model that is to foretell the next token, and looks at it: later inputs change earlier outputs."""
    if not train.pairs or not program.has_forward:
        return
    inputs, targets = train.pairs[0]
    if inputs.dim() != 2 or targets.shape != inputs.shape or inputs.shape[1] < 4 or inputs.is_floating_point():
        return
    if not torch.equal(inputs[:, 1:], targets[:, :-1]):
        return
    middle = inputs.shape[1] // 2
    other = inputs.clone()
    other[:, middle + 1 :] = inputs[:, middle + 1 :].flip(0).roll(1, 1)
    program.model.eval()
    try:
        with torch.no_grad():
            before, after = (_modules(program, program.on_device((x, targets))) for x in (inputs, other))
    except ProgramFailed:
        return
    if len(before) != len(after) or _moved(before[-1], after[-1], inputs.shape[1], middle) < 1e-4:
        return
    where = next(
        (b.name for b, a in zip(before, after, strict=True) if _moved(b, a, inputs.shape[1], middle) > 1e-4), None
    )
    yield finding(
        "data.target_leak",
        "error",
        where=where or None,
        evidence=f"the target is the input shifted by one, and other inputs behind position {middle} change the "
        f"outputs up to it, first in {where or 'the model'}",
        cause="a causal mask is missing, or does not fit: each position sees the token that it is to foretell",
        remedy="mask attention to later positions (is_causal=True, or a triangular mask), and pad convolutions on the "
        "left",
    )


def _modules(program: Program, batch: object) -> list[ModuleCall]:
    calls: list[ModuleCall] = []
    with module_calls(program.model, calls):
        program.forward(batch)
    return calls


def _moved(before: ModuleCall, after: ModuleCall, length: int, middle: int) -> float:
    """Change of an output at the positions up to `middle`, where one axis alone has the length of the sequence."""
    one, other = before.output, after.output
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.dim() < 3 or one.shape != other.shape:
        return 0.0
    axes = [axis for axis, side in enumerate(one.shape) if axis and side == length]
    if len(axes) != 1:
        return 0.0
    ours, theirs = (t.float().narrow(axes[0], 0, middle + 1) for t in (one, other))
    return float((ours - theirs).abs().max()) / (float(one.float().abs().mean()) or 1.0)
