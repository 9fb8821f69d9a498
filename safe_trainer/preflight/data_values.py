"""Values of inputs and targets: not finite, all the same, or of a scale that keeps the program from learning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import ProgramFailed, finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import tensors
from safe_trainer.preflight.samples import Samples

FEW = 8
"""Samples below which nothing is said about all of them."""
SCALE = 10.0
"""Size or spread beyond which inputs are suspected: standardised ones have 1, pictures of 0..1 less."""
UNEQUAL = 100.0
"""Largest over smallest spread of the features beyond which they are suspected."""
STEPS = 60
"""Steps of the two trainings that are compared."""
NOT_LEARNED, LEARNED = 0.8, 0.5
"""Shares of the loss of a constant answer: raw data leave more than the first of it, standardised ones less than the
second. Between lies all that is merely slower.
"""
DIVERGED, BETTER = 2.0, 0.7
"""The same where the raw data throw the loss up: then anything that learns proves it."""


def nonfinite(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """NaN or infinity; masks, of 0 and -inf only, are legal."""
    for part, samples in (("training", train), ("validation", held_out)):
        bad, first = 0, ""
        for number, batch in enumerate(samples.batches):
            for place, tensor in enumerate(tensors(batch)):
                wrong = _wrong(tensor)
                if wrong is None:
                    continue
                bad += int(wrong.flatten(1).any(1).sum()) if wrong.dim() > 1 else int(wrong.sum())
                if not first:
                    index = ", ".join(str(int(i)) for i in wrong.nonzero()[0])
                    first = f"the first is {float(tensor[tuple(wrong.nonzero()[0])])} in tensor {place} of batch "
                    first += f"{number}, at [{index}]"
        if bad:
            yield finding(
                "data.nonfinite",
                "error",
                evidence=f"{bad} {part} samples hold a NaN or an infinity; {first}",
                cause="missing values, a division by zero or a logarithm of zero in how the data were prepared",
                remedy="fill in, drop or mask these samples; use log1p or clamp in the preparation",
            )
            return


def _wrong(tensor: Tensor) -> Tensor | None:
    """Where it is not finite; None if it is, or is a mask."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.dim():
        return None
    wrong = ~torch.isfinite(tensor)
    if not bool(wrong.any()) or bool(((tensor == 0) | torch.isneginf(tensor)).all()):
        return None
    return wrong


def constant_input(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """Inputs that are the same for every sample, or blank each."""
    inputs = train.inputs
    if inputs is None or len(inputs) < FEW or inputs.numel() == len(inputs):
        return
    flat = inputs.flatten(1)
    alike = bool((flat == flat[:1]).all())
    blank = flat.shape[1] >= FEW and float((flat == flat[:, :1]).all(1).float().mean())
    if not alike and not (blank and blank > 0.9):
        return
    values = ", ".join(f"{float(value):g}" for value in flat.unique()[:3])
    yield finding(
        "data.constant_input",
        "error",
        evidence=(f"all {len(inputs)} inputs read are the same" if alike else
                  f"{blank:.0%} of {len(inputs)} inputs read hold one value each") + f" (values {values})",
        cause="the preparation has wiped the content out: a cast to whole numbers after scaling to 0..1, a wrong "
        "normalisation, a file that is not there",
        remedy="look at some samples as they come out of the loader; scale after the cast, not before",
    )  # fmt: skip


def unnormalized(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """Inputs or targets of a scale that is shown to keep this program from learning: standardised, it does."""
    inputs, targets = train.inputs, train.targets
    if inputs is None or targets is None or len(inputs) < 4 * FEW or not program.has_forward:
        return
    for what, index, values in (("inputs", 0, inputs), ("targets", 1, targets)):
        if not values.is_floating_point() or not _is_suspect(values):
            continue
        raw = _left(program, train.pairs, clock)
        mean, spread = _moments(values)
        standard = [
            tuple((t - mean) / spread if place == index else t for place, t in enumerate(pair)) for pair in train.pairs
        ]
        better = _left(program, standard, clock) if raw is not None and not raw < NOT_LEARNED else None
        if raw is None or better is None or not better < (BETTER if raw > DIVERGED else LEARNED):
            continue
        yield finding(
            "data.unnormalized",
            "warning",
            evidence=f"{what} have a mean of {float(values.mean()):.4g} and a spread of {float(values.std()):.4g}"
            f" ({float(values.min()):.4g} to {float(values.max()):.4g}); {STEPS} steps leave {raw:.0%} of the loss of "
            f"a constant answer, and {better:.0%} of it with standardised {what}",
            cause="weights, rates and losses are made for numbers around 1",
            remedy=f"standardise the {what}: subtract the training data's mean and divide by its standard deviation"
            + (", and turn predictions back with the same numbers" if what == "targets" else ""),
        )
        return


def _is_suspect(values: Tensor) -> bool:
    flat = values.flatten(1).float() if values.dim() > 1 else values.float().unsqueeze(1)
    spreads = flat.std(0)
    spreads = spreads[spreads > 0]
    if not len(spreads):
        return False
    size = float(flat.abs().mean(0).max())
    return (
        size > SCALE
        or float(spreads.max()) > SCALE
        or (flat.shape[1] <= 1000 and values.dim() == 2 and float(spreads.max() / spreads.min()) > UNEQUAL)
    )


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread: of each feature of a table, of each channel of pictures, of all of anything else."""
    dims = [0] if values.dim() <= 2 else [0, *range(2, values.dim())]
    mean, spread = values.mean(dims, keepdim=True), values.std(dims, keepdim=True)
    return mean, torch.where(spread > 0, spread, torch.ones_like(spread))


def _left(program: Program, pairs: list[tuple[Any, ...]], clock: Clock) -> float | None:
    """Share of a constant answer's loss that is left after STEPS steps on these batches; infinity if it overflows."""
    if clock.left() < clock.seconds / 10:
        return None
    with program.preserved():
        kept, constant = [], []
        for number in range(STEPS):
            batch = program.on_device(pairs[number % len(pairs)])
            try:
                loss = program.step(batch)
            except ProgramFailed:
                return None
            if not math.isfinite(loss):
                return math.inf
            kept.append(loss)
        for pair in pairs[:5]:
            reference = _constant_loss(program, program.on_device(pair))
            if reference is None:
                return None
            constant.append(reference)
    reference = sum(constant) / len(constant)
    return sum(kept[-10:]) / 10 / reference if reference > 0 else None


@torch.no_grad()
def _constant_loss(program: Program, batch: Any) -> float | None:
    """Loss of the best answer that does not look at the input: equal scores, or the mean of the targets."""
    outcome = program.forward(batch)
    prediction, target = outcome.get("prediction"), outcome.get("target")
    if not isinstance(prediction, Tensor) or not isinstance(target, Tensor) or program.loss_fn is None:
        return None
    answer = torch.zeros_like(prediction)
    if target.is_floating_point() and target.numel() == prediction.numel() and len(target.unique()) > 2:
        answer += target.mean()
    return float(program.loss_fn(answer, target))
