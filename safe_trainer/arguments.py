"""What SafeTrainer is given: whether each object is what it must be, and whether they fit together.

Arguments in, sentences out; makes and changes nothing. A caller's types are a promise that nobody has checked.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from safe_trainer.config import Config, Interval
from safe_trainer.data import length_of
from safe_trainer.evaluation import no_batches
from safe_trainer.gate import needs_closure

GROUPS = ("model", "data", "loss", "task", "optimizer", "scheduler", "metrics", "logger")
"""Config groups that name objects to build; the library takes the objects themselves."""

SINK = ("log", "text", "flush", "truncate_after", "close")
"""What a sink of the log must be able to do."""

OWN_STEP = (("accumulate", 1), ("clip_norm", None), ("clip_value", None), ("compile", False))
"""Options of our step, and their value where the step is the user's own."""


def problems_of(given: Mapping[str, Any], config: Config, *, built: bool = False) -> list[str]:
    """All that is wrong with the arguments of SafeTrainer, by their names, in sentences.

    Args:
        built: the objects come from `config` itself, whose groups then name them rightly.
    """
    found = [*_kinds(given), *_loaders(given, config), *_metrics(given.get("metrics"))]
    found += _together(given, config)
    if not built:
        found += [
            f"{group} must not be in config: pass the object itself (got {getattr(config, group)})"
            for group in GROUPS
            if getattr(config, group) is not None
        ]
        if config.alerts.call:
            found.append(f"alerts.call must not be in config: pass alerts=[callable] (got {config.alerts.call})")
    return found


def _kinds(given: Mapping[str, Any]) -> Iterator[str]:
    """Objects of another kind than they must be."""
    if not isinstance(given["model"], nn.Module):
        yield f"model must be a torch.nn.Module (got {_kind(given['model'])})"
    if not isinstance(given["optimizer"], Optimizer):
        yield f"optimizer must be a torch.optim.Optimizer (got {_kind(given['optimizer'])})"
    others = given["other_optimizers"]
    if isinstance(others, Optimizer) or not isinstance(others, Iterable):
        yield f"other_optimizers must be a list of optimizers (got {_kind(others)}); write [optimizer]"
    else:
        for optimizer in others:
            if not isinstance(optimizer, Optimizer):
                yield f"other_optimizers must hold torch.optim.Optimizer objects (got {_kind(optimizer)})"
    for name, call in (
        ("loss_fn", "(output, target) -> loss"),
        ("train_step", "(model, loss_fn, optimizer, batch) -> loss"),
        ("eval_step", "(model, loss_fn, val_loader) -> number"),
        ("task", "(model, batch) -> {'loss': ...}"),
    ):
        value = given[name]
        if value is not None and (not callable(value) or isinstance(value, type)):
            got = f"the class {value.__name__}; make an object of it" if isinstance(value, type) else _kind(value)
            yield f"{name} must be a callable {call} (got {got})"
    scheduler = given["scheduler"]
    if scheduler is not None and not _can(scheduler, ("step", "state_dict", "load_state_dict")):
        yield f"scheduler must be a learning-rate scheduler with step and state_dict (got {_kind(scheduler)})"
    loggers = given["loggers"]
    if loggers is not None and not isinstance(loggers, Sequence):
        yield f"loggers must be a list of sinks (got {_kind(loggers)})"
    for sink in loggers if isinstance(loggers, Sequence) else ():
        if not _can(sink, SINK):
            yield f"loggers must hold sinks with the methods {', '.join(SINK)} (got {_kind(sink)})"
    yield from calls_that_cannot_be(given["alerts"])


def calls_that_cannot_be(alerts: Any) -> Iterator[str]:
    """Alerts that are no list of callables."""
    if isinstance(alerts, str) or not isinstance(alerts, Sequence):
        yield f"alerts must be a list of callables (finding) -> None (got {_kind(alerts)}); write [callable]"
        return
    for call in alerts:
        if not callable(call) or isinstance(call, type):
            yield f"alerts must hold callables (finding) -> None (got {_kind(call)})"


def _loaders(given: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Loaders that cannot be read, or not as often as they will be."""
    for name in ("train_loader", "val_loader", "test_loader"):
        loader, part = given[name], name.removesuffix("_loader")
        if loader is None and part != "train":
            continue
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            yield f"{name} must be an iterable of batches (got {_kind(loader)})"
        elif part == "train" or config.limit_val_batches == 0:
            continue
        elif length_of(loader) == 0 and (part == "test" or given["eval_step"] is None):
            yield no_batches(part)
        elif part == "val" and _is_read_once(loader) and given["eval_step"] is None:
            yield (
                f"val_loader must be an iterable that can be read at every evaluation (got {_kind(loader)}, an "
                "iterator, which can be read once); pass a DataLoader or a list of batches"
            )


def _is_read_once(loader: Any) -> bool:
    """Whether it is an iterator that cannot start anew. Some of a user's own can; itertools.cycle never ends."""
    return isinstance(loader, (types.GeneratorType, _BaseDataLoaderIter)) or (
        hasattr(loader, "__next__") and type(loader).__module__ == "builtins"
    )


def _metrics(metrics: Any) -> Iterator[str]:
    """Metrics that are none, and names that the evaluation uses itself."""
    if not metrics:
        return
    from torchmetrics import Metric  # half a second; only where metrics are used

    if isinstance(metrics, Metric):
        yield f"metrics must be a mapping of name to metric (got {_kind(metrics)}); write {{'name': metric}}"
    elif not isinstance(metrics, Mapping) and not isinstance(metrics, nn.ModuleDict):
        yield f"metrics must be a mapping of name to torchmetrics metric (got {_kind(metrics)})"
    else:
        for name, metric in metrics.items():
            if not isinstance(metric, Metric):
                yield f"metrics must hold torchmetrics metrics (got {_kind(metric)} as {name!r})"
            if name == "loss":
                yield "a metric must not be called loss, which the evaluation reports itself; give it another name"


def _together(given: Mapping[str, Any], config: Config) -> Iterator[str]:
    """What does not fit together."""
    own_step, scheduler = given["train_step"] is not None, given["scheduler"]
    others = given["other_optimizers"] if isinstance(given["other_optimizers"], Sequence) else ()
    for optimizer in (given["optimizer"], *others):
        if isinstance(optimizer, Optimizer) and needs_closure(optimizer) and not own_step:
            yield (
                f"optimizer {type(optimizer).__name__} evaluates the model itself through a closure; "
                "pass a train_step that calls optimizer.step(closure)"
            )
    judges = given["loss_fn"] is not None or given["task"] is not None
    if not judges and not own_step:
        yield "loss_fn must be given when there is neither a task nor a train_step (got None)"
    if not judges and own_step and given["test_loader"] is not None and config.limit_val_batches != 0:
        yield "test_loader needs a loss_fn or a task: a train_step does not judge a batch (got neither)"
    if others and not own_step:
        yield "other_optimizers need a train_step that drives them (got none)"
    for option, unset in OWN_STEP:
        if own_step and getattr(config, option) != unset:
            got = getattr(config, option)
            yield f"{option} must stay {unset} beside a train_step: do it in the step itself (got {got})"
    if own_step and config.precision.value not in ("fp32", "auto"):
        yield f"precision must stay fp32 beside a train_step: use autocast in it (got {config.precision.value})"
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and config.scheduler_interval is Interval.step:
        yield "scheduler_interval must be epoch for ReduceLROnPlateau: it looks at a metric (got step)"
    evaluates = given["val_loader"] is not None and config.limit_val_batches != 0
    if config.early_stopping.patience is not None and not (evaluates and (judges or given["eval_step"] is not None)):
        missing = "a val_loader" if given["val_loader"] is None else "evaluations"
        yield f"early_stopping.patience needs {missing}: it counts evaluations without improvement (got none)"


def _can(value: Any, methods: Sequence[str]) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, method, None)) for method in methods)


def _kind(value: Any) -> str:
    """A value in a word or two: 'the string "step"' tells more than str."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, int, float, bool)) or value is None:
        return repr(value)
    return type(value).__name__
