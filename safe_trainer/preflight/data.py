"""Check: the data as the model will get them: values, labels, their relation, order, splits, workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from safe_trainer.findings import CheckResult, Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.data_labels import imbalance, label_masked, label_range, misaligned, rounded_targets
from safe_trainer.preflight.data_leak import future_seen, label_among_inputs, split_overlap
from safe_trainer.preflight.data_order import changed_by_reading, not_shuffled, same_workers
from safe_trainer.preflight.data_values import constant_input, nonfinite, unnormalized
from safe_trainer.preflight.outcome import judged
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.samples import Samples, read_samples
from safe_trainer.task import describe_batch

Look = Callable[[Program, Samples, Samples, Clock], Iterator[Finding]]

LOOKS: tuple[Look, ...] = (
    nonfinite, constant_input, rounded_targets, label_range, changed_by_reading, same_workers, not_shuffled, imbalance,
    label_masked, split_overlap, label_among_inputs, future_seen, misaligned, unnormalized,
)  # fmt: skip
"""In running order; a data set that is not finite or constant is not looked at further."""


def check(program: Program, clock: Clock) -> CheckResult:
    """Read training and validation data as far as the time goes, and look at them from each side."""
    train = read_samples(program.train_loader, clock)
    if not train.batches:
        train = Samples(program.batches(), False)
    held_out = read_samples(program.val_loader, clock.part(0.5))
    findings: list[Finding] = []
    for number, look in enumerate(LOOKS):
        with program.preserved():
            findings += look(program, train, held_out, clock)
        if (number == 1 and findings) or clock.left() <= 0:
            break
    return judged(_told(train), findings)


def _told(train: Samples) -> str:
    """What was read, in words."""
    inputs, classes = train.inputs, train.classes
    if inputs is None:
        return f"{len(train.batches)} batches read: {describe_batch(train.batches[0])}"
    kind = f"{tuple(inputs.shape[1:])} {str(inputs.dtype).removeprefix('torch.')}"
    parts = [f"{len(inputs):,} samples read{'' if train.complete else ', not all'}: {kind}"]
    if inputs.is_floating_point():
        parts[0] += f", mean {float(inputs.mean()):.3g}, spread {float(inputs.std()):.3g}"
    if classes is not None:
        counts = classes.unique(return_counts=True)[1]
        parts.append(f"{len(counts)} classes of {int(counts.min())} to {int(counts.max())} samples")
    return "; ".join(parts)
