"""Parts of a configuration that are sound one by one and cannot work together. Pure functions; nothing is built.

Each check looks at a Config and yields sentences. Only what is certain to fail, or to do nothing, is refused: a model,
a task or a metric of the user's own may mean anything by its arguments, so those checks know our parts and PyTorch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from safe_trainer.config import Config, Interval, did_you_mean

Check = Callable[[Config], Iterator[str]]

OUR_TASKS = "safe_trainer.recipes.tasks."
EXTRA_FIGURES = {f"{OUR_TASKS}NextToken": ("val/bits_per_token",)}
"""What our tasks report beside the loss."""

ELEMENTWISE = tuple(f"torch.nn.{name}Loss" for name in ("MSE", "L1", "SmoothL1", "Huber", "BCE", "BCEWithLogits"))
"""Losses that compare number with number, so that prediction and target have one shape."""

ONE_OUTPUT_PER_CLASS = ("safe_trainer.recipes.models.", "torchvision.models.")
"""Models whose `num_classes` is known to be the number of their outputs."""

ONE_NUMBER_EACH = ("torchmetrics.classification.", "torchmetrics.regression.", "torchmetrics.Mean")
"""Metrics that give one figure, under their own name."""

ONE_CYCLE = ("torch.optim.lr_scheduler.OneCycleLR", "safe_trainer.recipes.schedules.one_cycle")


def combination_problems(config: Config, task: Any = None) -> list[str]:
    """Everything in `config` that cannot work together, in sentences.

    Args:
        config: one whose targets have all been found.
        task: the class or function that config.task names.
    """
    problems = [sentence for check in CHECKS for sentence in check(config)]
    return problems + list(task_without_loss(config, task))


def task_without_loss(config: Config, task: Any) -> Iterator[str]:
    """The task asks for a loss and there is none."""
    if task is None or config.loss or "loss_fn" in (config.task or {}):
        return
    parameter = inspect.signature(task).parameters.get("loss_fn")
    if parameter is not None and parameter.default is parameter.empty:
        yield f"loss must be given: {_target(config.task)} takes a loss_fn (got null)"


def too_few_outputs(config: Config, classes: int | None) -> list[str]:
    """A model with fewer outputs than the data, once loaded, have classes: cross-entropy would index beyond them."""
    outputs = (config.model or {}).get("num_classes")
    known = _target(config.model).startswith(ONE_OUTPUT_PER_CLASS) and _is_our_task(config)
    if not known or _target(config.loss) != "torch.nn.CrossEntropyLoss":
        return []
    if classes is None or not isinstance(outputs, int) or outputs >= classes:
        return []
    return [f"model.num_classes must be at least the {classes} classes of the data (got {outputs})"]


def plateau_each_step(config: Config) -> Iterator[str]:
    """ReduceLROnPlateau looks at a figure that there is once an epoch."""
    if _target(config.scheduler).endswith(".ReduceLROnPlateau") and config.scheduler_interval is Interval.step:
        yield "scheduler_interval must be epoch for ReduceLROnPlateau: it looks at a figure of the epoch (got step)"


def schedule_too_short(config: Config) -> Iterator[str]:
    """A one-cycle schedule raises when it is advanced beyond its end."""
    length = (config.scheduler or {}).get("total_steps")
    if _target(config.scheduler) not in ONE_CYCLE or not isinstance(length, int) or config.early_stopping.patience:
        return
    if config.scheduler_interval is Interval.step and config.max_steps is not None:
        needed = config.max_steps // config.accumulate
        if needed > length:
            yield f"scheduler.total_steps must be at least the run's {needed} optimizer steps, or auto (got {length})"
    if config.scheduler_interval is Interval.epoch and config.max_steps is None and (config.max_epochs or 0) > length:
        yield f"scheduler.total_steps must be at least max_epochs={config.max_epochs}, or auto (got {length})"


def stopping_without_evaluation(config: Config) -> Iterator[str]:
    """Early stopping counts evaluations; without any, it has nothing to look at."""
    if config.early_stopping.patience is not None and config.limit_val_batches == 0:
        yield "limit_val_batches must not be 0 with early_stopping.patience, which counts evaluations (got 0)"


def unknown_figure(config: Config) -> Iterator[str]:
    """early_stopping and checkpoint watch a figure that no evaluation gives."""
    watched = {}
    if config.early_stopping.patience is not None:
        watched["early_stopping.metric"] = config.early_stopping.metric
    if config.checkpoint.enabled and config.checkpoint.keep_best:
        watched["checkpoint.metric"] = config.checkpoint.metric
    figures = _figures(config)
    for option, name in watched.items():
        if not name.startswith("val/"):
            yield f"{option} must be a figure of the validation data, as in val/loss: no other selects (got {name!r})"
        elif figures is not None and name not in figures:
            meant = did_you_mean(name, sorted(figures))
            yield f"{option} must be one of {', '.join(sorted(figures))}: metrics gives no other (got {name!r}){meant}"


def other_number_of_classes(config: Config) -> Iterator[str]:
    """A metric over the classes of a model that has another number of them."""
    classes = (config.model or {}).get("num_classes")
    if not (
        _target(config.model).startswith(ONE_OUTPUT_PER_CLASS) and isinstance(classes, int) and _is_our_task(config)
    ):
        return
    for name, node in _multiclass(config):
        if isinstance(node.get("num_classes"), int) and node["num_classes"] != classes:
            yield f"metrics.{name}.num_classes must be model.num_classes={classes} (got {node['num_classes']})"


def classes_counted_of_numbers(config: Config) -> Iterator[str]:
    """A loss or a task over numbers beside a metric that counts right classes."""
    if not _is_our_task(config):
        return
    over_numbers = _target(config.task) in (f"{OUR_TASKS}Regression", f"{OUR_TASKS}Reconstruction")
    own_loss = "loss_fn" in (config.task or {})
    culprit = "task" if over_numbers else "loss" if _target(config.loss) in ELEMENTWISE and not own_loss else ""
    for name, node in _multiclass(config) if culprit else ():
        yield (
            f"metrics.{name} must go with a loss over classes: {node['_target_']} compares class numbers, "
            f"{_target(getattr(config, culprit))} numbers; take metrics=regression or none, or another {culprit} "
            f"(got {culprit}={_target(getattr(config, culprit))})"
        )


def tokens_as_numbers(config: Config) -> Iterator[str]:
    """Tokens are classes; a loss over numbers would compare a score with a token's place in the vocabulary."""
    if _target(config.task) == f"{OUR_TASKS}NextToken" and _target(config.loss) in ELEMENTWISE:
        yield f"loss must be one over classes, as loss=cross_entropy, with task=next_token (got {_target(config.loss)})"


CHECKS: tuple[Check, ...] = (
    plateau_each_step,
    schedule_too_short,
    stopping_without_evaluation,
    unknown_figure,
    other_number_of_classes,
    classes_counted_of_numbers,
    tokens_as_numbers,
)


def _target(node: Mapping[str, Any] | None) -> str:
    return str((node or {}).get("_target_", ""))


def _is_our_task(config: Config) -> bool:
    """Whether it is known what goes to the metrics: the model's output and the target."""
    return not config.task or _target(config.task).startswith(OUR_TASKS)


def _metrics(config: Config) -> dict[str, Mapping[str, Any]]:
    return {name: node for name, node in (config.metrics or {}).items() if isinstance(node, Mapping)}


def _multiclass(config: Config) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Metrics that compare class numbers and look at what they are given."""
    for name, node in _metrics(config).items():
        if (
            _target(node).startswith("torchmetrics.classification.Multiclass")
            and node.get("validate_args") is not False
        ):
            yield name, node


def _figures(config: Config) -> set[str] | None:
    """Names of all figures of an evaluation; None where they cannot be known."""
    metrics = _metrics(config)
    plain = all(
        _target(node).startswith(ONE_NUMBER_EACH) and "Fairness" not in _target(node) for node in metrics.values()
    )
    if not (_is_our_task(config) and plain):
        return None
    return {"val/loss", *EXTRA_FIGURES.get(_target(config.task), ()), *(f"val/{name}" for name in metrics)}
