"""Labels: out of range, rounded away, rare, masked out of the loss, or nothing to do with the inputs they stand by."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.samples import Samples

REGRESSIONS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
RARE = 20.0
"""Times as many samples in the largest class as in the smallest: twice the customary 10:1, which many programs bear."""
SHARE = 0.04
"""Share of the smallest class, at most: a batch of 64 then holds two or three of it."""
ENOUGH = 200
"""Samples from which shares of classes mean something."""
SIGMAS = 4.0
"""Standard deviations above chance at which a relation is proven: once in 30,000 by accident."""


def rounded_targets(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """Targets of a regression that a cast to whole numbers has made one and the same."""
    targets = train.targets
    if targets is None or targets.is_floating_point() or len(targets) < 16 or len(targets.unique()) != 1:
        return
    yield finding(
        "loss.wrong_target_dtype",
        "error",
        evidence=f"all {targets.numel()} targets read are {int(targets.flatten()[0])}, of type {targets.dtype}",
        cause="the targets were cast to whole numbers: what lies between 0 and 1 becomes 0",
        remedy="keep the targets of a regression as float32, from the file to the loss",
    )


def label_range(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """Class labels that the model has no output for."""
    targets, loss = train.targets, program.loss_fn
    if targets is None or targets.is_floating_point() or not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return
    prediction = program.forward(program.batch(2)).get("prediction") if program.has_forward else None
    if not isinstance(prediction, Tensor) or prediction.dim() < 2:
        return
    used = targets[targets != loss.ignore_index]
    wrong = used[(used < 0) | (used >= prediction.shape[1])]
    if len(wrong):
        yield finding(
            "data.label_range",
            "error",
            evidence=f"{len(wrong)} labels are outside 0 to {prediction.shape[1] - 1}: "
            f"{sorted(wrong.unique().tolist())[:5]}",
            cause="labels are counted from 1, hold a fill value, or the model has too few outputs",
            remedy="count labels from 0, give the loss ignore_index, or give the last layer one output for each class",
        )


def imbalance(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """A class so rare, in the batches as they come, that a network does well never to name it."""
    classes = train.classes
    if classes is None or len(classes) < ENOUGH or _is_weighted(program.loss_fn):
        return
    values, counts = classes.unique(return_counts=True)
    least, most = int(counts.min()), int(counts.max())
    if len(values) > 20 or most < RARE * least or least / len(classes) > SHARE:
        return
    yield finding(
        "data.imbalance",
        "warning",
        evidence=f"class {int(values[counts.argmin()])} has {least} of the {len(classes)} samples read, class "
        f"{int(values[counts.argmax()])} has {most}: {most / least:.0f} to 1",
        cause="a network that never names the rare class is right nearly always, so accuracy and loss look good",
        remedy="draw the classes equally often (WeightedRandomSampler), weight the loss (weight, pos_weight), and "
        "watch recall or F1 of the rare class instead of accuracy",
    )


def _is_weighted(loss: object) -> bool:
    return any(getattr(loss, name, None) is not None for name in ("weight", "pos_weight", "alpha", "gamma"))


def label_masked(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """One class of several that the loss is told to ignore."""
    classes, ignored = train.classes, getattr(program.loss_fn, "ignore_index", None)
    if classes is None or not isinstance(ignored, int) or ignored < 0 or len(classes) < 16:
        return
    share = float((classes == ignored).float().mean())
    if share > 0.01:
        yield finding(
            "data.label_masked",
            "warning",
            where="loss_fn",
            evidence=f"ignore_index is {ignored}, and {share:.0%} of the {len(classes)} samples read are of class "
            f"{ignored}",
            cause="these samples are left out of the loss: the class is never learned",
            remedy="use an ignore_index that no class has, such as -100, the default",
        )


def misaligned(program: Program, train: Samples, held_out: Samples, clock: Clock) -> Iterator[Finding]:
    """Labels that belong to the neighbouring sample, or to none: simple models find nothing, and elsewhere they do."""
    inputs, classes = train.inputs, train.classes
    if inputs is None or classes is None or not inputs.is_floating_point() or len(classes) < ENOUGH:
        return
    if float(classes.unique(return_counts=True)[1].max()) > 0.7 * len(classes):
        return  # little room above the largest class's share
    if inputs.flatten(1).shape[1] > 20_000 or clock.left() < clock.seconds / 5:
        return
    own = _above_chance(inputs, classes)
    if own > SIGMAS / 2:
        return
    ordered = _in_order(program, train)
    if ordered is not None:
        for shift in (1, -1):
            if _above_chance(ordered[0], ordered[1].roll(shift)) > 2 * SIGMAS:
                yield _misaligned(
                    f"a simple model does no better than chance on {len(classes)} samples ({own:.1f} standard "
                    f"deviations), but does when labels are shifted by {shift}", "the labels have slipped by one "
                    "against the inputs",
                )  # fmt: skip
                return
    if held_out.inputs is None or held_out.classes is None or len(held_out.classes) < 60:
        return
    other = _above_chance(held_out.inputs, held_out.classes)
    if other > 2 * SIGMAS:
        yield _misaligned(
            f"simple models find no relation between inputs and labels in {len(classes)} training samples ({own:.1f} "
            f"standard deviations above chance), and do in the {len(held_out.classes)} validation samples "
            f"({other:.0f})",
            "inputs and labels of the training data were put in order separately, so they do not belong together",
        )


def _misaligned(evidence: str, cause: str) -> Finding:
    return finding(
        "data.label_misaligned", "error", evidence=evidence, cause=cause,
        remedy="shuffle and split inputs and labels by one and the same index, and look at some samples with their "
        "labels",
    )  # fmt: skip


def _in_order(program: Program, train: Samples) -> tuple[Tensor, Tensor] | None:
    """Inputs and classes in the order of the data set, where it can be indexed."""
    dataset = getattr(program.train_loader, "dataset", None)
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) == 2 and tensors[1].dim() == 1 and len(tensors[0]) <= 20_000:
        return tensors[0].float(), tensors[1].long()
    return None


def _above_chance(inputs: Tensor, classes: Tensor) -> float:
    """By how many standard deviations the better of two simple models beats the largest class, on held-out halves.

    Nearest neighbours and a linear model: one of them sees something in nearly all data that can be learned at all from
    a few hundred samples.
    """
    from sklearn.linear_model import RidgeClassifier
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.preprocessing import StandardScaler

    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(classes), generator=generator)[:2000]
    values = StandardScaler().fit_transform(inputs[order].flatten(1).float().nan_to_num().numpy())
    labels = classes[order].numpy()
    half = len(labels) // 2
    best = -math.inf
    for model in (KNeighborsClassifier(5), RidgeClassifier(alpha=10.0)):
        right = total = 0
        for fitted, judged in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
            model.fit(values[fitted], labels[fitted])
            right += int((model.predict(values[judged]) == labels[judged]).sum())
            total += len(labels[judged])
        chance = max((labels == value).mean() for value in set(labels.tolist()))
        deviation = math.sqrt(chance * (1 - chance) * total) or 1.0
        best = max(best, (right - chance * total) / deviation)
    return best
