"""Hardly any samples of one class, and a program that does not make up for it. Trains for a while, all put back."""

from __future__ import annotations

from typing import Any

import torch

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.data_loss import Labels
from safe_trainer.preflight.data_samples import Table
from safe_trainer.preflight.data_values import rebuilt
from safe_trainer.preflight.outcome import ProgramFailed, finding
from safe_trainer.preflight.program import Program

RATIO = 20
"""Most frequent over rarest class from which it is looked at. The usual advice says 10:1, but classes of natural tasks
differ by 15:1 and are learnt in the end."""
RAREST = 0.04
"""Share of the rarest class above which cross-entropy manages without help."""
MOST_CLASSES = 20
"""Classes above which a long tail is the nature of the task, as with words."""
RECALL = 0.3
"""Share of the rarest class's training samples that, once found, say the program learns it all the same."""
STEPS = 300
"""Steps of the short training at most."""
FEWEST = 100
"""Samples below which shares are chance."""


def imbalance(program: Program, table: Table, labels: Labels | None, clock: Clock) -> list[Finding]:
    """A class of under RAREST that the loss and the sampler treat like any other, and that training does not find."""
    if labels is None or labels.call is None or labels.call.is_weighted or len(labels.kept()) < FEWEST:
        return []
    counts = labels.counts()
    common, rare = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    share = counts[rare] / sum(counts.values())
    if not 2 <= len(counts) <= MOST_CLASSES or counts[common] < RATIO * counts[rare] or share > RAREST:
        return []
    recall, steps = _recall(program, table, labels, rare, clock)
    harmful = recall is None or recall < RECALL
    learnt = "" if recall is None else f"; after {steps} steps the model finds {100 * recall:.0f} % of it"
    return [
        finding(
            "data.imbalance",
            "warning" if harmful else "info",
            where=labels.field,
            evidence=f"class {rare} has {counts[rare]:,} of {sum(counts.values()):,} labels read "
            f"({100 * share:.1f} %), class {common} {counts[common]:,}; neither the loss nor the sampler makes up for "
            f"it{learnt}",
            cause="one class is rare in the data, and the loss can be small without it",
            remedy="WeightedRandomSampler or class weights in the loss; judge by recall or F1, not by accuracy",
        )
    ]


def _recall(program: Program, table: Table, labels: Labels, rare: int, clock: Clock) -> tuple[float | None, int]:
    """Share of the rare class that a short training finds, and its steps; None where it cannot be tried."""
    planned = program.config.max_steps or STEPS
    batches, part, done = _batches(program, table), clock.part(0.4), 0
    if not batches:
        return None, 0
    try:
        with program.preserved():
            while done < min(planned, STEPS) and part.left():
                program.step(batches[done % len(batches)])
                done += 1
            return _found(program, batches, labels, rare), done
    except ProgramFailed:
        return None, done


def _batches(program: Program, table: Table) -> list[Any]:
    like = program.batches()[0]
    built = (
        rebuilt(like, {name: pieces[number] for name, pieces in table.pieces.items()})
        for number in range(len(table.sizes))
    )
    return [program.on_device(batch) for batch in built if batch is not None]


@torch.no_grad()
def _found(program: Program, batches: list[Any], labels: Labels, rare: int) -> float | None:
    """Share of the rare class among the predictions for its samples, in evaluation mode."""
    program.model.eval()
    hits = count = 0
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            return None
        which = batch[1].reshape(-1) == rare
        if not bool(which.any()):
            continue
        output = program.model(batch[0])
        if not isinstance(output, torch.Tensor) or len(output) != len(which):
            return None
        flat = output.reshape(len(output), -1)
        guess = flat.argmax(1) if flat.shape[1] > 1 else (flat[:, 0] > _threshold(labels)).long()
        hits, count = hits + int((guess[which] == rare).sum()), count + int(which.sum())
    return hits / count if count else None


def _threshold(labels: Labels) -> float:
    return 0.5 if labels.call is not None and labels.call.name == "binary_cross_entropy" else 0.0
