"""From a configuration to objects. Every `_target_` is imported and held against its signature before one is built.

Besides the command line, the only file that imports Hydra. Touches the disk only through the data group.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from safe_trainer.combinations import combination_problems, too_few_outputs
from safe_trainer.config import Config, ConfigError, Interval, did_you_mean
from safe_trainer.data import build_loaders, length_of
from safe_trainer.guard import needs_closure
from safe_trainer.preflight.learning_rate import LearningRateCurve
from safe_trainer.trainer import SafeTrainer, resolve_device, total_steps
from safe_trainer.utils import rng

log = logging.getLogger(__name__)

SUPPLIED = {"optimizer": "params", "scheduler": "optimizer", "logger": "folder"}
"""Argument of each group's target that is given when it is built, not in the configuration."""

REQUIRED = ("model", "data", "optimizer")

CALLS = "alerts.call."
"""What the names of the callables begin with that alerts go to."""

NAMED = ("metrics", "logger")
"""Groups that hold several targets by name, any of which may be null."""

HYDRA_KEYS = frozenset({"_target_", "_args_", "_partial_", "_recursive_", "_convert_"})

HARMLESS = ("torch.optim.", "torch.nn.", "torchmetrics.", "safe_trainer.recipes.schedules.")
"""Targets that are built once on trial, beside a parameter of one element, since only they know their ranges."""


# --- checks before anything is built ---------------------------------------------------------------------------------


def target_problems(config: Config) -> list[str]:
    """Everything that is wrong with the groups: targets that cannot be imported, arguments that do not bind, and parts
    that cannot work together.
    """
    problems = [
        f"{group} must be given: {group}=NAME, one of conf/{group}" for group in REQUIRED if not getattr(config, group)
    ]
    if not config.loss and not config.task:
        problems.append("loss must be given when there is no task: loss=NAME, one of conf/loss")
    try:
        resolve_device(config.device)
    except ConfigError as error:
        problems += error.problems
    sound = []
    for group, node in _nodes(config):
        found = _node_problems(node, group, SUPPLIED.get(group.split(".")[0]))
        problems += found
        sound += [] if found else [(group, node)]
    task = locate(config.task["_target_"]) if config.task and "task" in dict(sound) else None
    return problems + combination_problems(config, task) + _trial_problems(sound)


def _nodes(config: Config) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each group's node with its dotted name; groups of named targets give one for each name."""
    for group in ("model", "data", "loss", "task", "optimizer", "scheduler"):
        node = getattr(config, group)
        if node:
            yield group, _without_auto(node) if group == "optimizer" else node
    for group in NAMED:
        for name, node in (getattr(config, group) or {}).items():
            if node is not None:
                yield f"{group}.{name}", node
    for name, node in (config.alerts.call or {}).items():
        if node is not None:
            yield f"{CALLS}{name}", node


def _node_problems(node: Any, where: str, supplied: str | None) -> list[str]:
    if not isinstance(node, Mapping):
        return [f"{where} must be a group with a _target_ (got {node!r})"]
    nested = [
        problem
        for key, value in node.items()
        if isinstance(value, Mapping) and "_target_" in value
        for problem in _node_problems(value, f"{where}.{key}", None)
    ]
    name = node.get("_target_")
    if not isinstance(name, str):
        return [*nested, f"{where}._target_ must name a class or function, as in package.module.Name (got {name!r})"]
    try:
        target = locate(name)
    except LookupError as error:
        return [*nested, f"{where}._target_ {error}"]
    arguments = node.get("_args_", ())
    if not isinstance(arguments, (list, tuple)):
        return [*nested, f"{where}._args_ must be a list of positional arguments (got {arguments!r})"]
    return nested + _argument_problems(target, name, node, where, supplied)


def locate(name: str) -> Any:
    """The object of a dotted name.

    Raises:
        LookupError: it cannot be imported or does not exist; the text says which part, and what is like it.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise LookupError(f"must be a dotted name, as in package.module.Name (got {name!r})")
    found: Any = None
    for count, part in enumerate(parts):
        path = ".".join(parts[: count + 1])
        if found is not None and hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name and not (path == error.name or path.startswith(error.name + ".")):
                raise LookupError(f"cannot be imported: {path} needs the module {error.name} (got {name!r})") from error
            raise LookupError(_not_found(name, parts, count, found)) from error
        except (Exception, SystemExit) as error:  # a module that is a script may end the process
            reason = f"{type(error).__name__}: {error}"
            raise LookupError(f"cannot be imported: importing {path} raised {reason} (got {name!r})") from error
    if not callable(found):
        raise LookupError(f"must name something that can be called (got {name!r}, a {type(found).__name__})")
    return found


def _not_found(name: str, parts: list[str], count: int, parent: Any) -> str:
    if parent is None:
        return f"cannot be imported: there is no module {parts[0]!r} in this environment or folder (got {name!r})"
    place = ".".join(parts[:count])
    known = [entry for entry in dir(parent) if not entry.startswith("_")]
    return f"cannot be imported: {place} has no {parts[count]!r} (got {name!r}){did_you_mean(parts[count], known)}"


def _argument_problems(target: Any, name: str, node: Mapping[str, Any], where: str, supplied: str | None) -> list[str]:
    """Unknown, missing and wrongly typed arguments of one target."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return []
    given = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    problems = [
        f"{where}.{key} is not an argument of {name} (got {value!r})"
        + did_you_mean(f"{where}.{key}", [f"{where}.{known}" for known in names if known != supplied])
        for key, value in given.items()
        if key not in names and not takes_any
    ]
    if where.startswith(CALLS) and not inspect.isclass(target):
        supplied = names[0] if names else None  # a function is called with the finding first
    positional = len(node.get("_args_", ()))
    ready = {supplied, "loss_fn", *names[:positional], *given}
    if not node.get("_partial_"):
        problems += [
            f"{where}.{p.name} must be given: {name} needs it (got nothing)"
            for p in parameters.values()
            if p.name in names and p.default is p.empty and p.name not in ready
        ]
    hints = _hints(target)
    for key, value in given.items():
        wildcard = where == "scheduler" and value == "auto"
        if key in names and key in hints and not wildcard and not fits(value, hints[key]):
            problems.append(f"{where}.{key} must be {_words(hints[key])} (got {value!r})")
        elif isinstance(value, float) and _is_no_setting(value, where):
            problems.append(f"{where}.{key} must be a finite number (got {value!r})")
    return problems


def _is_no_setting(value: float, where: str) -> bool:
    """NaN sets nothing anywhere; an infinity may be a norm's order, but no rate, momentum or decay."""
    return math.isnan(value) or (math.isinf(value) and where in ("optimizer", "scheduler"))


def _hints(target: Any) -> dict[str, Any]:
    """Annotations of a target's arguments; none where they cannot be evaluated."""
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # annotations may name anything, also what is only there for type checkers
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value out of YAML can serve an argument of this annotation; true where that cannot be told."""
    if isinstance(value, Mapping) and "_target_" in value:
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if hint in (None, type(None)):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if hint is torch.Tensor:
        return False  # YAML holds no tensors
    return not (hint in (list, tuple) or typing.get_origin(hint) in (list, tuple)) or isinstance(value, (list, tuple))


def _words(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [_words(option) for option in typing.get_args(hint) if option is not torch.Tensor]
        return " or ".join(dict.fromkeys(options))
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _trial_problems(nodes: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Values out of range, as only the targets themselves know: harmless ones are built once beside one parameter."""
    problems: list[str] = []
    trial: torch.optim.Optimizer | None = None
    with rng.isolated():
        for group, node in nodes:
            if not str(node["_target_"]).startswith(HARMLESS) or group == "model":
                continue
            try:
                if group == "optimizer":
                    trial = make(node, group, params=[nn.Parameter(torch.zeros(1))])
                    if needs_closure(trial):
                        problems.append(
                            f"optimizer must be one without a closure (got {node['_target_']}): a closure needs "
                            "a train_step of your own, which only a program with SafeTrainer can give"
                        )
                elif group == "scheduler":
                    if trial is not None:
                        make(_with_length(node, 100), group, optimizer=trial)
                elif not group.startswith("logger"):
                    make(node, group)
            except ConfigError as error:
                problems += error.problems
    return problems


# --- building --------------------------------------------------------------------------------------------------------


def make(node: Mapping[str, Any], where: str, **supplied: Any) -> Any:
    """Build one target.

    Raises:
        ConfigError: the target refused its arguments, or a file it needs is not there.
    """
    try:
        return instantiate(dict(node), **supplied, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        is_ours = str(node["_target_"]).startswith((*HARMLESS, "safe_trainer."))
        if isinstance(cause, ConfigError):
            raise ConfigError(cause.problems) from error
        if isinstance(cause, OSError) or (is_ours and isinstance(cause, (ValueError, TypeError))):
            raise ConfigError([f"{where}: {node['_target_']} says: {cause}"]) from error
        raise cause from None


def build(config: Config, folder: Path) -> SafeTrainer:
    """The whole program of a configuration that has passed `target_problems`, ready to run in `folder`."""
    assert config.model is not None
    assert config.data is not None
    assert config.optimizer is not None
    if config.seed is not None:
        rng.seed_everything(config.seed)  # the weights are part of what a seed determines
    model = make(config.model, "model")
    if not isinstance(model, nn.Module):
        raise ConfigError([f"model._target_ must give a torch.nn.Module (got {type(model).__name__})"])
    loss_fn = make(config.loss, "loss") if config.loss else None
    task = _task(config, loss_fn)
    device = resolve_device(config.device)
    loaders = build_loaders(make(config.data, "data"), config.loader, seed=config.seed, device=device)
    problems = too_few_outputs(config, loaders.num_classes)
    if problems:
        raise ConfigError(problems)
    model.to(device)
    optimizer = make(_without_auto(config.optimizer), "optimizer", params=_parameters(model, config))
    if config.optimizer.get("lr") == "auto":
        found = SafeTrainer(model, loss_fn, optimizer, loaders.train, config=config, task=task).find_lr()
        config = _with_rate(config, optimizer, found)
    scheduler = _scheduler(config, optimizer, length_of(loaders.train))
    metrics = {name: make(node, f"metrics.{name}") for name, node in (config.metrics or {}).items() if node is not None}
    sinks = [
        make(node, f"logger.{name}", folder=folder) for name, node in (config.logger or {}).items() if node is not None
    ]
    calls = [_call(node, name) for name, node in (config.alerts.call or {}).items() if node is not None]
    return SafeTrainer(
        model,
        loss_fn,
        optimizer,
        loaders.train,
        loaders.val,
        scheduler,
        num_classes=loaders.num_classes,
        config=config,
        task=task,
        metrics=metrics,
        test_loader=loaders.test,
        loggers=sinks,
        alerts=calls,
    )


def _without_auto(node: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's node without a rate that is still to be found."""
    return {key: value for key, value in node.items() if not (key == "lr" and value == "auto")}


def _with_rate(config: Config, optimizer: torch.optim.Optimizer, curve: LearningRateCurve) -> Config:
    """Train with the rate that a curve suggests; a scheduler that is to reach the optimizer's rate gets it too.

    Raises:
        ConfigError: it suggests none.
    """
    rate = curve.suggestion
    if rate is None:
        raise ConfigError([f"optimizer.lr=auto found no rate ({curve.reason}); set optimizer.lr to a number"])
    log.info("optimizer.lr=auto: %s.", curve.reason)
    for group in optimizer.param_groups:
        group["lr"] = rate
    scheduler = {
        key: rate if value == "auto" and key.endswith("lr") else value
        for key, value in (config.scheduler or {}).items()
    }
    return replace(config, scheduler=scheduler or None)


def _call(node: Mapping[str, Any], name: str) -> Any:
    """What an alert calls: an object of the class that is named, or the function itself with its further arguments."""
    given = dict(node) if inspect.isclass(locate(node["_target_"])) else {**node, "_partial_": True}
    return make(given, f"{CALLS}{name}")


def _task(config: Config, loss_fn: Any) -> Any:
    """The task, given the loss where its signature asks for one; None for the default."""
    if not config.task:
        return None
    parameters = inspect.signature(locate(config.task["_target_"])).parameters
    takes_loss = "loss_fn" in parameters and "loss_fn" not in config.task
    return make(config.task, "task", **({"loss_fn": loss_fn} if takes_loss else {}))


def _parameters(model: nn.Module, config: Config) -> list[Any]:
    """What the optimizer gets: all parameters, or two groups if norms and biases are to be spared weight decay."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if config.decay_norms_and_biases:
        return trainable
    spared = [p for p in trainable if p.dim() <= 1]
    decayed = [p for p in trainable if p.dim() > 1]
    return [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]


def _scheduler(config: Config, optimizer: torch.optim.Optimizer, batches: int | None) -> Any:
    """The scheduler, an argument `auto` replaced by the number of times that it will be advanced."""
    if not config.scheduler:
        return None
    node = config.scheduler
    if "auto" in node.values():
        steps = total_steps(config, batches)
        if steps is None:
            raise ConfigError(["max_steps must be given: the scheduler needs the length of the run, and the training "
                               "data has none (got null)"])  # fmt: skip
        per_epoch = batches if batches is not None else steps
        if config.limit_train_batches is not None:
            per_epoch = min(per_epoch, config.limit_train_batches)
        node = _with_length(node, scheduler_intervals(config, steps, per_epoch))
    return make(node, "scheduler", optimizer=optimizer)


def scheduler_intervals(config: Config, steps: int, per_epoch: int) -> int:
    """How often the scheduler is advanced in a run of `steps` batches: once an epoch, or once an optimizer step."""
    epochs, rest = divmod(steps, per_epoch)
    if config.scheduler_interval is Interval.epoch:
        return epochs + bool(rest)
    return epochs * -(-per_epoch // config.accumulate) + -(-rest // config.accumulate)


def _with_length(node: Mapping[str, Any], length: int) -> dict[str, Any]:
    return {key: length if value == "auto" else value for key, value in node.items()}
