"""The schema: the one place where an option is declared, described and held to its range. Builds nothing.

``parse(values)`` turns any mapping (nested, dotted keys allowed) into a ``Config`` or raises one ``ConfigError`` that
lists every mistake. The reference page in docs/ is made from the docstrings below the fields.
"""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from safe_trainer.catalogue import CATALOGUE


class ConfigError(ValueError):
    """Mistakes in a configuration, all of them: ``problems`` holds one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = list(problems)
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems))


class Mode(Enum):
    """What a run does."""

    train = "train"
    preflight = "preflight"
    find_lr = "find_lr"
    evaluate = "evaluate"
    recipes = "recipes"
    replay = "replay"
    report = "report"
    explain = "explain"


class Precision(Enum):
    """Arithmetic of forward and backward; the weights stay in float32 throughout."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class OnFault(Enum):
    """What an error finding does to the run."""

    stop = "stop"
    report = "report"


class Interval(Enum):
    """How often the scheduler advances."""

    step = "step"
    epoch = "epoch"


class Nonfinite(Enum):
    """What the guard does about a non-finite step."""

    stop = "stop"
    skip = "skip"
    rollback = "rollback"


class Strategy(Enum):
    """How several processes share the work."""

    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"


class Direction(Enum):
    """Which way a metric gets better; auto reads it from the name (loss, error and the like fall, all else rises)."""

    auto = "auto"
    min = "min"
    max = "max"


class LeastSeverity(Enum):
    """From which severity on any finding alerts; members are those of safe_trainer.findings.Severity."""

    info = "info"
    warning = "warning"
    error = "error"


Rule = tuple[str, str, Callable[[Any], bool]]


def _hold(section: object, *rules: Rule) -> None:
    """Raise one ConfigError for all rules (field, what must hold, test) that a set value breaks."""
    problems = []
    for name, must, holds in rules:
        value = getattr(section, name)
        if value is not None and not holds(value):
            problems.append(f"{name} must be {must} (got {value!r})")
    if problems:
        raise ConfigError(problems)


def _at_least(bound: int) -> Callable[[Any], bool]:
    return lambda value: value >= bound


def _within(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: least <= value <= most


def _positive(value: Any) -> bool:
    return math.isfinite(value) and value > 0  # false for NaN too


@dataclass(kw_only=True)
class LoaderConfig:
    """How a recipe's data sets become batches. A loader of your own is taken as it is."""

    batch_size: int = 64
    """Samples in a training batch."""
    eval_batch_size: int | None = None
    """Samples in a batch of validation or test data; null takes four times batch_size, since no gradients are kept."""
    num_workers: int = 0
    """Processes that prepare batches; any number gives the same batches, bit for bit."""
    drop_last: bool = False
    """Leave out the last training batch of an epoch if it is smaller than the others."""

    def __post_init__(self) -> None:
        _hold(
            self,
            ("batch_size", "at least 1, and at most 2**31", _within(1, 2**31)),
            ("eval_batch_size", "at least 1, and at most 2**31, or null", _within(1, 2**31)),
            ("num_workers", "0 or more", _at_least(0)),
        )


@dataclass(kw_only=True)
class EarlyStoppingConfig:
    """When to end a run that no longer gets better."""

    patience: int | None = None
    """Evaluations without an improvement after which the run ends; null never ends it early."""
    metric: str = "val/loss"
    """The figure to watch, as it is named in the log."""
    direction: Direction = Direction.auto
    """min, max or auto: which way the metric gets better."""
    min_delta: float = 0.0
    """An improvement smaller than this does not count, in units of the metric."""

    def __post_init__(self) -> None:
        _hold(
            self,
            ("patience", "at least 1, or null", _at_least(1)),
            ("min_delta", "0 or more", lambda value: math.isfinite(value) and value >= 0),
        )


CHECKS = ("summary", "data", "init", "wiring", "modes", "gradcheck", "overfit", "learning_rate", "short_run")
"""Ids of the preflight's checks, in running order."""


@dataclass(kw_only=True)
class PreflightConfig:
    """The checks before the run; they leave everything as it was."""

    enabled: bool = True
    """Check the program before training."""
    checks: list[str] | None = None
    """Ids of the checks to run; null runs all."""
    budget_s: float = 60.0
    """Seconds that all checks together may take."""
    label_noise: bool = False
    """Let the data check list samples whose label is likely wrong; needs the extra label-noise (cleanlab)."""

    def __post_init__(self) -> None:
        _hold(
            self,
            ("budget_s", "greater than 0", _positive),
            ("checks", f"a list of {', '.join(CHECKS)}, or null", lambda names: set(names) <= set(CHECKS)),
        )


@dataclass(kw_only=True)
class GuardConfig:
    """The fuse around each step: a non-finite loss or gradient never reaches the weights."""

    enabled: bool = True
    """Check every step's loss and gradients."""
    nonfinite: Nonfinite = Nonfinite.stop
    """stop the run, skip the batch, or roll back to the last good snapshot with a lower learning rate."""
    max_skips: int = 50
    """Non-finite steps in a row after which the run ends, whatever the policy; 50 are no accident of the data."""
    max_rollbacks: int = 3
    """Rollbacks after which the run ends: what comes back three times will come back again."""
    snapshot_every: int = 100
    """Steps between two in-memory snapshots that a rollback can return to."""
    rollback_lr_factor: float = 0.5
    """Factor on every learning rate at a rollback."""

    def __post_init__(self) -> None:
        _hold(
            self,
            ("max_skips", "at least 1", _at_least(1)),
            ("max_rollbacks", "at least 1", _at_least(1)),
            ("snapshot_every", "at least 1", _at_least(1)),
            ("rollback_lr_factor", "greater than 0 and at most 1", lambda value: 0 < value <= 1),
        )


@dataclass(kw_only=True)
class AnomalyConfig:
    """When autograd's anomaly mode is on, once `anomaly_detection` is true."""

    warmup_steps: int = 1
    """First steps of a run under anomaly mode: initialisation shows its faults at once."""
    after_lr_change: int = 3
    """Steps under anomaly mode after the learning rate jumped."""
    lr_jump: float = 2.0
    """Factor from one step to the next, up or down, that counts as a jump; a smooth schedule stays far below it."""
    modules: list[str] | None = None
    """Dotted names of the submodules to limit the check to; null checks all."""

    def __post_init__(self) -> None:
        _hold(
            self,
            ("warmup_steps", "0 or more", _at_least(0)),
            ("after_lr_change", "0 or more", _at_least(0)),
            ("lr_jump", "greater than 1", lambda value: math.isfinite(value) and value > 1),
        )


@dataclass(kw_only=True)
class MonitorConfig:
    """When every layer is measured, for the rules."""

    every: int = 100
    """Steps between two measured steps, besides steps 1, 10 and 30; 0 switches the monitors off."""

    def __post_init__(self) -> None:
        _hold(self, ("every", "0 or more", _at_least(0)))


ALERTING = (
    "forward.nonfinite",
    "gradient.nonfinite",
    "data.nonfinite",
    "loss.log_of_zero",
    "precision.overflow",
    "activation.dead",
    "init.dead",
    "activation.exploding",
    "gradient.exploding",
)
"""What alerts by default: each name that the fuse gives to a NaN or an infinity, and what kills or blows up a layer."""


@dataclass(kw_only=True)
class RepairConfig:
    """What may be mended while training."""

    dead_units: bool = False
    """Start units anew that have been dead over a whole window."""


@dataclass(kw_only=True)
class AlertsConfig:
    """Which findings are worth a call, and who is called besides the loggers; each finding is delivered once."""

    faults: list[str] = field(default_factory=lambda: list(ALERTING))
    """Faults that alert whatever their severity: NaN and infinity wherever they come from, layers with 80 % and more
    dead units, exploding activations and gradients."""
    severity: LeastSeverity = LeastSeverity.error
    """Any other finding alerts from this severity on."""
    call: dict[str, Any] | None = None
    """Callables by name (`_target_` and its arguments), called with the finding: a function is called itself, with the
    finding first; a class is built, and its object is called. alerts.call.NAME=null drops one."""

    def __post_init__(self) -> None:
        known = sorted(CATALOGUE)
        _hold(self, ("faults", "ids of faults, as docs/faults.md has them", lambda names: set(names) <= set(known)))


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is kept of a run, and how often."""

    enabled: bool = True
    """Write checkpoints."""
    every_steps: int | None = None
    """Steps between two checkpoints, besides those at the end of each epoch and of the run."""
    keep_last: int = 1
    """How many of the newest checkpoints stay."""
    keep_best: int = 1
    """How many of the best checkpoints stay; 0 keeps none. They need validation data."""
    metric: str = "val/loss"
    """The figure that says which is best, as it is named in the log."""
    direction: Direction = Direction.auto
    """min, max or auto: which way the metric gets better."""

    def __post_init__(self) -> None:
        _hold(
            self,
            ("every_steps", "at least 1, or null", _at_least(1)),
            ("keep_last", "at least 1", _at_least(1)),
            ("keep_best", "0 or more", _at_least(0)),
        )


@dataclass(kw_only=True)
class DistributedConfig:
    """How several processes train one model. It comes with a later version."""

    strategy: Strategy = Strategy.none
    """none, ddp or fsdp."""


@dataclass(kw_only=True)
class ReportConfig:
    """The report page. It comes with a later version."""

    enabled: bool = True
    """Write report.html into the run's folder."""


@dataclass(kw_only=True)
class Config:
    """Everything a run can be told."""

    mode: Mode = Mode.train
    """train, preflight, find_lr, evaluate, recipes, replay, report or explain."""
    name: str = "run"
    """What the run is called; its folder is runs/<name>/<time>."""
    run_dir: str | None = None
    """The run's folder; null makes a new one under runs/."""
    seed: int | None = None
    """Seeds every generator right before the first batch; null touches none. The command line sets 0."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps ...; auto takes an accelerator if there is one."""
    precision: Precision = Precision.fp32
    """fp32, bf16, fp16 (with loss scaling) or auto: bf16 on an accelerator that has it, else fp32."""
    max_epochs: int | None = None
    """Passes over the training data; null means 10, or no bound once max_steps is given. max_steps wins over it."""
    max_steps: int | None = None
    """Training steps; a step is one batch."""
    limit_train_batches: int | None = None
    """Use only so many training batches in each epoch."""
    limit_val_batches: int | None = None
    """Use only so many batches of validation data, and of test data at the end; 0 leaves evaluation out."""
    accumulate: int = 1
    """Batches whose gradients are averaged, by samples, before the optimizer steps."""
    clip_norm: float | str | None = None
    """Greatest global gradient norm; larger gradients are scaled down to it. auto takes 1 for the first steps, and then
    twice the 90 % quantile of the norms so far, looked up whenever a row is logged."""
    clip_value: float | None = None
    """Greatest absolute value of any gradient entry."""
    ema_decay: float | None = None
    """Keep a moving average of the weights with this decay a step (less at first), and evaluate it; null keeps none."""
    compile: bool = False
    """Run the model through torch.compile."""
    channels_last: bool = False
    """Keep images and convolution weights in channels-last memory format: faster on recent GPUs and CPUs."""
    decay_norms_and_biases: bool = True
    """false takes biases and normalisation weights (parameters of one dimension) out of weight decay."""
    scheduler_interval: Interval = Interval.epoch
    """Whether the scheduler advances each step or each epoch."""
    on_fault: OnFault = OnFault.stop
    """stop ends the run at an error finding; report records it and goes on."""
    anomaly_detection: bool = False
    """Run some steps under autograd's anomaly mode; true when the environment has DEBUG_ANOMALY=true, at every step."""
    sample_rate: int = 100
    """With anomaly_detection, one step in so many runs under anomaly mode; 1 means every step."""
    log_every: int = 50
    """Steps between two rows of the log. Losses are read from the device only then."""
    progress: bool = True
    """Show progress on the terminal."""
    resume: str | None = None
    """Go on from a checkpoint: last (of run_dir) or the path of one."""
    weights: str | None = None
    """mode=evaluate: which checkpoint to judge: best or last of run_dir, or the path of one."""
    path: str | None = None
    """mode=replay, mode=report: the folder of a run."""
    fault: str | None = None
    """mode=explain: the id of a fault, as in activation.dead."""
    error: str | None = None
    """mode=explain: a file with an error message that PyTorch gave."""
    model: dict[str, Any] | None = None
    """Group: the network (`_target_` and its arguments)."""
    data: dict[str, Any] | None = None
    """Group: what gives the data sets."""
    loss: dict[str, Any] | None = None
    """Group: the loss, called as loss(output, target)."""
    task: dict[str, Any] | None = None
    """Group: how a batch becomes a loss; null means that a batch is (input, target)."""
    optimizer: dict[str, Any] | None = None
    """Group: the optimizer."""
    scheduler: dict[str, Any] | None = None
    """Group: the learning-rate scheduler; an argument that is `auto` becomes the length of the run."""
    metrics: dict[str, Any] | None = None
    """Group: torchmetrics by name, measured on validation data."""
    logger: dict[str, Any] | None = None
    """Group: sinks of the log by name; logger.tensorboard=null drops one."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    anomaly: AnomalyConfig = field(default_factory=AnomalyConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    repair: RepairConfig = field(default_factory=RepairConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    def __post_init__(self) -> None:
        _hold(
            self,
            ("name", "a folder name without slashes and line breaks", _is_folder_name),
            ("seed", "from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63),
            ("max_epochs", "at least 1, or null", _at_least(1)),
            ("max_steps", "at least 1, or null", _at_least(1)),
            ("limit_train_batches", "at least 1, or null", _at_least(1)),
            ("limit_val_batches", "0 or more, or null", _at_least(0)),
            ("accumulate", "at least 1", _at_least(1)),
            ("clip_norm", "greater than 0, auto, or null", lambda value: value == "auto" or _is_positive_number(value)),
            ("clip_value", "greater than 0, or null", _positive),
            ("clip_value", "null when clip_norm is set: clip by norm or by value", lambda _: self.clip_norm is None),
            ("ema_decay", "between 0 and 1, or null", lambda value: 0 < value < 1),
            ("sample_rate", "at least 1", _at_least(1)),
            ("log_every", "at least 1", _at_least(1)),
        )


def parse(values: Mapping[str, Any] | DictConfig | None) -> Config:
    """Hold `values` against the schema: keys may be nested or dotted; what is not named takes its default.

    Raises:
        ConfigError: unknown keys, wrong types and values out of range, all at once.
    """
    problems: list[str] = []
    if isinstance(values, DictConfig):
        values = typing.cast("Mapping[str, Any]", OmegaConf.to_container(values, resolve=True))
    tree = _read_environment(_nested(values or {}, problems), problems)
    config = _parse_section(Config, tree, "", problems)
    if problems:
        raise ConfigError(problems)
    assert isinstance(config, Config)
    return config


def option_names(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Full dotted name of every option below `schema`, sections included."""
    hints = typing.get_type_hints(schema)
    for option in fields(schema):
        yield prefix + option.name
        if is_dataclass(hints[option.name]):
            yield from option_names(hints[option.name], f"{prefix}{option.name}.")


def did_you_mean(name: str, known: list[str]) -> str:
    """A clause that suggests the nearest known names, or nothing."""
    section, _, leaf = name.rpartition(".")
    beside = [candidate for candidate in known if candidate.rpartition(".")[0] == section]
    same_leaf = [candidate for candidate in known if candidate.rpartition(".")[2] == leaf]  # right but for its section
    close = difflib.get_close_matches(leaf, [candidate.rpartition(".")[2] for candidate in beside], n=2, cutoff=0.6)
    found = same_leaf[:2] or [f"{section}.{match}" if section else match for match in close]
    found = found or difflib.get_close_matches(name, known, n=2, cutoff=0.75)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _nested(values: Mapping[Any, Any], problems: list[str], prefix: str = "") -> dict[str, Any]:
    """Dotted keys turned into nested mappings; several ways to name one section are merged."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            problems.append(f"{prefix}{key!r} must be a string: every option has a name (got {type(key).__name__})")
            continue
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            below = node.setdefault(section, {})
            if not isinstance(below, dict):
                below = node[section] = {}
            node = below
        if isinstance(value, Mapping):
            value = _nested(value, problems, f"{prefix}{key}.")
        if isinstance(value, dict) and isinstance(node.get(leaf), dict):
            node[leaf].update(value)
        else:
            node[leaf] = value
    return tree


def _read_environment(tree: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """DEBUG_ANOMALY=true puts every step under anomaly mode, whatever the configuration says."""
    setting = os.environ.get("DEBUG_ANOMALY", "").strip().lower()
    if setting in ("true", "1", "yes", "on"):
        return {**tree, "anomaly_detection": True, "sample_rate": 1}
    if setting not in ("", "false", "0", "no", "off"):
        problems.append(f"DEBUG_ANOMALY in the environment must be true or false (got {setting!r})")
    return tree


def _parse_section(schema: Any, given: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    """An instance of `schema`; what is wrong goes to `problems` and is replaced by its default."""
    hints = typing.get_type_hints(schema)
    typed = OmegaConf.structured(schema)
    accepted: dict[str, Any] = {}
    for key, value in given.items():
        name = prefix + key
        if key not in hints:
            problems.append(f"{name} is not an option (got {value!r}){did_you_mean(name, list(option_names()))}")
        elif is_dataclass(hints[key]):
            if isinstance(value, Mapping):
                accepted[key] = _parse_section(hints[key], value, f"{name}.", problems)
            else:
                problems.append(f"{name} must be a section with keys of its own (got {_as_yaml(value)})")
        else:
            try:
                typed[key] = float(value) if _is_whole_for_float(value, hints[key]) else value
                accepted[key] = OmegaConf.to_container(typed)[key]  # type: ignore[index, call-overload]
            except OmegaConfBaseException:
                problems.append(f"{name} must be {_describe(hints[key])} (got {value!r})")
    try:
        return schema(**accepted)
    except ConfigError as error:
        problems.extend(prefix + problem for problem in error.problems)
        return schema()


def _as_yaml(value: object) -> str:
    return "null" if value is None else repr(value)


def _is_whole_for_float(value: object, hint: Any) -> bool:
    """Whether `value` is an int for a union that has float in it: OmegaConf converts those only for a plain float."""
    return isinstance(value, int) and not isinstance(value, bool) and float in typing.get_args(hint)


def _is_positive_number(value: object) -> bool:
    return not isinstance(value, str) and _positive(value)


def _is_folder_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and name.isprintable()


def _describe(hint: Any) -> str:
    """A type as a user would say it: `a whole number, or null`."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        Any: "anything",
    }
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return ", or ".join(_describe(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return "a list"
    if typing.get_origin(hint) is dict:
        return "a group with keys of its own"
    return words.get(hint, str(hint))
