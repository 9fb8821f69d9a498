"""Loss and metrics over held-out data. Leaves the model's modes, all generators and all gradients as they were."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from safe_trainer.config import ConfigError
from safe_trainer.precision import Precision
from safe_trainer.task import Task, count_of, describe_batch, extra_figures, loss_of, to_device
from safe_trainer.utils import rng


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode and give every module back its own mode afterwards, also when the body raises."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate(
    model: nn.Module,
    task: Task,
    batches: Iterable[Any],
    *,
    precision: Precision,
    metrics: Any = None,
    limit: int | None = None,
    channels_last: bool = False,
    part: str = "val",
) -> dict[str, float]:
    """Mean loss (by samples), what else the task reports, and the metrics, over at most `limit` batches.

    Args:
        metrics: a torchmetrics.MetricCollection or None; it is reset before and after.
        part: val or test; for messages.

    Raises:
        ConfigError: there was no batch, or a metric is not one number.
        Exception: whatever model, task or metrics raise, with a note that says where.
    """
    totals: dict[str, Tensor] = {}
    wide = torch.float32 if precision.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    seen = 0
    if metrics is not None:
        metrics.reset()
    with rng.isolated(), evaluation_mode(model), torch.no_grad():
        for number, raw in enumerate(itertools.islice(batches, limit), 1):
            with _told(f"in batch {number} of the {part} data, {describe_batch(raw)}"):
                batch = to_device(raw, precision.device, channels_last)
                with precision.autocast():
                    outcome = task(model, batch)
                count = count_of(outcome, batch)
                seen += count
                # the mean over nothing, a NaN more often than not, does not count
                for name, value in {"loss": loss_of(outcome), **extra_figures(outcome)}.items() if count else ():
                    totals[name] = totals.get(name, 0.0) + value.detach().reshape(()).to(wide) * count
                if metrics is not None:
                    metrics.update(*_compared(outcome))
    if not seen:
        raise ConfigError([no_batches(part)])
    figures = {name: value.item() / seen for name, value in totals.items()}
    if metrics is not None:
        with _told(f"when the metrics of the {part} data were computed"):
            figures.update(_numbers(metrics.compute()))
        metrics.reset()
    return figures


def no_batches(part: str) -> str:
    """What to say about held-out data without a batch."""
    return (
        f"the {part} loader must give at least one batch at every evaluation (got none); give it data, take a loader "
        "that can be read again and again (an iterator can be read once), or set limit_val_batches=0"
    )


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    """Say with an exception where it came from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised in the evaluation {where}")
        raise


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as numbers.

    Raises:
        ConfigError: one is not a single number.
    """
    wrong = [
        f"metric {name!r} must give one number (got {describe_batch(value)}); many take an option for that, such as "
        "average=macro"
        for name, value in values.items()
        if not (isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1))
    ]
    if wrong:
        raise ConfigError(wrong)
    return {name: float(value) for name, value in values.items()}


def _compared(outcome: Mapping[str, Any]) -> tuple[Any, Any]:
    """What the metrics compare.

    Raises:
        TypeError: the task does not give it.
    """
    missing = [key for key in ("prediction", "target") if key not in outcome]
    if missing:
        raise TypeError(
            f"a task must return {' and '.join(missing)} when there are metrics (got the keys {sorted(outcome)}); "
            "add them, or set metrics=none"
        )
    return outcome["prediction"], outcome["target"]
