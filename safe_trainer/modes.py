"""What ``mode=`` can be: each function takes a checked configuration and does one thing. Prints; knows no Hydra.

Exceptions go through: __main__ turns them into messages and exit codes.
"""

from __future__ import annotations

import contextlib
import logging
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from safe_trainer.config import Config, ConfigError, Mode, did_you_mean, parse
from safe_trainer.findings import SafetyError

if TYPE_CHECKING:
    from safe_trainer.trainer import SafeTrainer

Build = Callable[[Config, Path], "SafeTrainer"]

LIST_WIDTH, WIDEST_COMMAND = 100, 48
"""Columns of the list of recipes, and of a command that has its description beside it: about half for each."""

LATER = {
    Mode.report: "the report page comes with a later version; metrics.jsonl and TensorBoard have the figures",
}
"""Modes that are named already and not there yet, with what to do meanwhile."""


def train(config: Config, build: Build) -> float | None:
    """Train; the figure that a sweep looks at."""
    from safe_trainer.terminal import verdict

    if config.resume == "last" and config.run_dir is None:
        raise ConfigError(["resume=last needs run_dir=FOLDER, the folder of the run to go on with (got none)"])
    folder = _new_folder(config)
    with log_file(folder / "train.log"):
        trainer = build(config, folder)
        trainer.report.path = folder
        if config.progress:
            _show_start(config, trainer, folder)
        ended: str | None = f"The run was broken off; {folder} holds its log and its checkpoints."
        try:
            trainer.run()
            ended = None
        except SafetyError:
            ended = None
            raise
        finally:
            if config.progress or not trainer.report.ok:
                verdict(trainer.report, ended)
    return trainer.report.metrics.get(config.checkpoint.metric)


def _show_start(config: Config, trainer: SafeTrainer, folder: Path) -> None:
    from safe_trainer.terminal import show_start

    facts = {"run": config.name, "device": trainer.device, "folder": folder}
    shapes = trainer.output_shapes() if config.preflight.enabled and config.resume is None else {}
    show_start(facts, trainer.model, shapes=shapes)


def preflight(config: Config, build: Build) -> None:
    """Only the checks before a run.

    Raises:
        SafetyError: one has failed.
    """
    from safe_trainer.findings import Status
    from safe_trainer.terminal import verdict

    folder = _new_folder(config)
    with log_file(folder / "train.log"):
        trainer = build(config, folder)
        trainer.report.path = folder
        if config.progress:
            _show_start(config, trainer, folder)
        results = trainer.preflight()
        (folder / "preflight.json").write_text(trainer.report.to_json(indent=2), encoding="utf-8")
        failed = [result.name for result in results if result.status is Status.failed]
        verdict(trainer.report, f"Preflight failed: {', '.join(failed)}." if failed else "Preflight is over.")
        if failed:
            raise SafetyError(trainer.report)


def find_lr(config: Config, build: Build) -> float | None:
    """Only the learning-rate finder; its suggestion."""
    folder = _new_folder(config)
    trainer = build(config, folder)
    curve = trainer.find_lr()
    print(f"{len(curve.rates)} rates from {curve.rates[0]:g} to {curve.rates[-1]:.3g}: {curve.reason}.")
    print(f"folder  {folder} (lr_finder.csv, lr_finder.png, plot_lr_finder.py)")
    return curve.suggestion


def _new_folder(config: Config) -> Path:
    """The run's folder, which the configuration names from now on."""
    from safe_trainer.run_folder import new_run_folder, use_run_folder
    from safe_trainer.trainer import RUNS

    folder = use_run_folder(Path(config.run_dir)) if config.run_dir else new_run_folder(RUNS, config.name)
    config.run_dir = str(folder)
    return folder


def evaluate(config: Config, build: Build) -> None:
    """Judge a checkpoint of an earlier run on its validation and test data."""
    from safe_trainer.checkpoint import Checkpoints
    from safe_trainer.terminal import show_figures

    run = config_of(config)
    folder, rules = Path(_path_of(config)), run.checkpoint
    trainer = build(run, folder)
    which = config.weights or "best"
    store = Checkpoints(folder / "checkpoints", metric=rules.metric, direction=rules.direction)
    if which == "best" and store.best() is None:
        which = "last"
    state, info = store.load(which)
    show_figures(trainer.judge(state), f"{which} checkpoint, step {info.step:,}, of {folder}")


def replay(config: Config, build: Build) -> None:
    """Run the steps that blew the fuse of an earlier run once more, and name what made them non-finite."""
    from safe_trainer.nonfinite import saved_attempts

    folder = Path(_path_of(config))
    attempts = [folder] if folder.is_file() else saved_attempts(folder)
    if not attempts:
        raise ConfigError([f"path must be the run of a blown fuse (got {folder}, which holds no nonfinite/step-*.pt)"])
    trainer = build(config_of(config), folder if folder.is_dir() else folder.parent.parent)
    for path in attempts:
        print(f"{path.name}: {trainer.replay(path).paragraph()}\n")


def recipes(listed: list[tuple[str, str]]) -> None:
    """List the lines that run a recipe, each beside what the recipe reaches, in two columns of LIST_WIDTH in all."""
    fitting = [len(command) for command, _ in listed if len(command) <= WIDEST_COMMAND]
    column = max(fitting, default=0) + 2
    for command, reaches in listed:
        lines = _broken(reaches, LIST_WIDTH - column)
        if len(command) + 2 > column:  # stays in one piece, so that it can be copied
            print(command)
        else:
            print(f"{command:<{column}}{lines.pop(0)}".rstrip())
        for line in lines:
            print(" " * column + line)


def _broken(text: str, width: int) -> list[str]:
    """Lines of at most `width`; one that is too long is broken behind its last comma first."""
    head, comma, tail = text.rpartition(", ")
    parts = [text] if len(text) <= width or not comma else [f"{head},", tail]
    return [line for part in parts for line in textwrap.wrap(part, width)] or [""]


def explain(config: Config) -> None:
    """Explain a fault of the catalogue, or an error message of PyTorch's."""
    from safe_trainer.explain import explain as explained

    if config.fault is not None:
        print(fault_entry(config.fault))
        return
    if config.error is None:
        raise ConfigError(
            ["mode=explain needs fault=ID, or error=FILE, a file with the message that PyTorch printed (got neither)"]
        )
    try:
        text = Path(config.error).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError([f"error must be a file that can be read (got {config.error}: {error.strerror})"]) from error
    print(explained(text))


def fault_entry(name: str) -> str:
    """An entry of the catalogue as plain text.

    Raises:
        ConfigError: there is none of that id.
    """
    from safe_trainer.catalogue import CATALOGUE

    if name not in CATALOGUE:
        raise ConfigError(
            [f"fault must be an id of docs/faults.md (got {name!r}){did_you_mean(name, list(CATALOGUE))}"]
        )
    fault = CATALOGUE[name]
    proof = fault.established if fault.live else f"{fault.established} (comes with a later version)"
    parts = [
        ("established by", (proof,)),
        ("likely causes", fault.causes),
        ("remedies", fault.remedies),
        ("looks like it and is healthy", (fault.looks_like_it,) if fault.looks_like_it else ()),
    ]
    lines = [f"{fault.id}: {fault.title}"]
    for label, texts in parts:
        lines += [f"\n{label}", *(_item(text) for text in texts)] if texts else []
    return "\n".join(lines)


def _item(text: str) -> str:
    return textwrap.fill(text, 80, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)


def config_of(config: Config) -> Config:
    """The configuration that an earlier run was started with, on this command's device.

    Raises:
        ConfigError: there is none, or the run was started from a program of its own.
    """
    folder = Path(_path_of(config))
    if not folder.exists():
        raise ConfigError([f"path must be the folder of a run (got {folder}, which does not exist)"])
    file = (folder if folder.is_dir() else folder.parent.parent) / "config.yaml"
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, ValueError, YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError([f"path must be the folder of a run (got {folder}: {reason})"]) from error
    run = parse({**values, "device": config.device, "run_dir": None, "resume": None, "mode": "train"})
    if run.model is None:
        raise ConfigError([f"{folder} was not started from a recipe, so its model cannot be built from here; "
                           "build it in your program and call SafeTrainer(...).replay(path)"])  # fmt: skip
    return run


def _path_of(config: Config) -> str:
    if config.path is None:
        raise ConfigError([f"mode={config.mode.name} needs path=RUN_FOLDER (got none)"])
    return config.path


class RunLog(logging.FileHandler):
    """A log file that may fail, its folder deleted or the disk full, without ending the run."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; logging itself lets the error of a file that cannot be opened through."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)  # one line to standard error


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """What is logged meanwhile is kept in a file too."""
    handler = RunLog(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
