"""Loss and metrics over held-out data. Leaves the model's modes, all generators and all gradients as they were."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from safe_trainer.precision import Precision
from safe_trainer.task import Task, count_of, extra_figures, loss_of, to_device
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
) -> dict[str, float]:
    """Mean loss (by samples), what else the task reports, and the metrics, over at most `limit` batches.

    Args:
        metrics: a torchmetrics.MetricCollection or None; it is reset before and after.

    Raises:
        ValueError: there was no batch.
    """
    totals: dict[str, Tensor] = {}
    wide = torch.float32 if precision.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    seen = 0
    if metrics is not None:
        metrics.reset()
    with rng.isolated(), evaluation_mode(model), torch.no_grad():
        for raw in itertools.islice(batches, limit):
            batch = to_device(raw, precision.device, channels_last)
            with precision.autocast():
                outcome = task(model, batch)
            count = count_of(outcome, batch)
            seen += count
            for name, value in {"loss": loss_of(outcome), **extra_figures(outcome)}.items():
                totals[name] = totals.get(name, 0.0) + value.detach().reshape(()).to(wide) * count
            if metrics is not None:
                metrics.update(*_compared(outcome))
    if not seen:
        raise ValueError("evaluation got no batch; give a validation loader with data, or set limit_val_batches=0")
    figures = {name: value.item() / seen for name, value in totals.items()}
    if metrics is not None:
        figures.update({name: float(value) for name, value in metrics.compute().items()})
        metrics.reset()
    return figures


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
