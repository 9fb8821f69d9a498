"""``python -m safe_trainer``: compose, validate, build, run, and say how it ended by the exit code.

0 good, 1 unexpected crash, 2 config or data error, 3 preflight failed, 4 stopped by a fault in training,
130 interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import configure_log
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from safe_trainer.config import Config, ConfigError, Mode, did_you_mean, parse
from safe_trainer.findings import SafetyError

COMMAND_MODES = (Mode.recipes, Mode.explain)
"""Modes that only print: they make no run and no folder."""

EXIT_CONFIG, EXIT_PREFLIGHT, EXIT_FAULT, EXIT_INTERRUPTED = 2, 3, 4, 130


def main() -> None:
    """The command line."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # the console script: targets in the working folder
        sys.path.insert(0, "")
    try:
        arguments = get_args_parser().parse_args()
        folders = conf_folders(arguments.config_dir)
        overrides = readable_overrides(arguments.overrides, folders)
        if not (arguments.multirun or arguments.cfg or arguments.info or arguments.hydra_help or arguments.help):
            sys.exit(run_once(composed(overrides, arguments.config_dir), folders))
    except ConfigError as error:
        sys.exit(refuse(error))
    sys.exit(run_through_hydra(arguments.overrides, overrides))


def run_once(composition: DictConfig, folders: list[Path]) -> int:
    """One run, without Hydra's job: the exit code.

    Raises:
        ConfigError: the configuration is wrong.
    """
    config = checked(composition)
    configure_log(composition.hydra.job_logging, composition.hydra.verbose)
    if config.mode in COMMAND_MODES:
        return print_command(config, folders)
    return guarded(lambda: execute(config))[0]


def run_through_hydra(given: list[str], overrides: list[str]) -> int:
    """A sweep, or one of Hydra's own commands such as --cfg and --help."""
    codes: list[int] = []

    def job(composition: DictConfig) -> float | None:
        def work() -> float | None:
            config = checked(composition)
            config.run_dir = HydraConfig.get().runtime.output_dir
            return execute(config)

        code, figure = guarded(work)
        codes.append(code)
        return figure

    sys.argv[1:] = [word for word in sys.argv[1:] if word not in given] + overrides
    hydra.main(version_base="1.3", config_path="pkg://safe_trainer.conf", config_name="config")(job)()
    return max(codes, default=0)


# --- the configuration -----------------------------------------------------------------------------------------------


def conf_folders(extra: str | None) -> list[Path]:
    """Folders that hold configuration groups: ours, and the one of --config-dir."""
    import safe_trainer.conf

    ours = Path(safe_trainer.conf.__path__[0])
    return [ours, Path(extra)] if extra else [ours]


def groups(folders: list[Path]) -> set[str]:
    """Names of all configuration groups."""
    return {entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir() if _holds_yaml(entry)}


def options(group: str, folders: list[Path]) -> list[str]:
    """What can be chosen in a group; an option in a sub-folder has a slash in its name."""
    found: set[str] = set()
    for folder in folders:
        root = folder / group
        found |= {str(path.relative_to(root).with_suffix("")).replace("\\", "/") for path in root.rglob("*.yaml")}
    return sorted(found)


def _holds_yaml(folder: Path) -> bool:
    return folder.is_dir() and any(folder.rglob("*.yaml"))


def readable_overrides(given: list[str], folders: list[Path]) -> list[str]:
    """The command line's overrides, rewritten so that Hydra takes every key: the schema then judges them all at once.

    Raises:
        ConfigError: an override that cannot be read, or a choice that a group does not offer.
    """
    known = groups(folders)
    parser = OverridesParser.create()
    problems, rewritten = [], []
    for text in given:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = " ".join(str(error).split("\nSee")[0].split())
            problems.append(f"{text!r} cannot be read as key=value: {reason}")
            continue
        name = override.key_or_group
        choice = override.value()
        if name in known and (choice is None or isinstance(choice, str)) and not override.is_delete():
            offered = options(name, folders)
            if choice is not None and choice not in offered:
                problems.append(
                    f"{name} must be one of {', '.join(offered)} (got {choice!r}){did_you_mean(choice, offered)}"
                )
            in_defaults = name != "recipe" and (CONF_DEFAULTS is None or name in CONF_DEFAULTS)
            rewritten.append(text if override.is_add() or in_defaults else f"+{text}")
        elif override.is_delete() or override.is_force_add() or name.startswith("hydra"):
            rewritten.append(text)
        else:
            rewritten.append("++" + text.lstrip("+"))
    if problems:
        raise ConfigError(problems)
    return rewritten


CONF_DEFAULTS = frozenset(
    {"model", "data", "loss", "task", "optimizer", "scheduler", "metrics", "logger", "distributed"}
)
"""Groups that stand in config.yaml's defaults; a choice in any other is added to them."""


def composed(overrides: list[str], config_dir: str | None) -> DictConfig:
    """What Hydra makes of the configuration tree and the overrides.

    Raises:
        ConfigError: it cannot be composed.
    """
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError([f"--config-dir must be a folder (got {config_dir!r})"])
    try:
        with initialize_config_module("safe_trainer.conf", version_base="1.3"):
            return compose("config", overrides=[*overrides, *search], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([" ".join(str(error).split())]) from error


def checked(composition: DictConfig) -> Config:
    """The configuration, held against the schema and its targets against their signatures.

    Raises:
        ConfigError: all mistakes at once.
    """
    from safe_trainer.build import target_problems

    own = OmegaConf.masked_copy(composition, [str(key) for key in composition if key != "hydra"])
    try:
        values: Any = OmegaConf.to_container(own, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([f"{error.full_key} cannot be resolved: {str(error).splitlines()[0]}"]) from error
    problems: list[str] = []
    try:
        config = parse(values)
    except ConfigError as error:
        problems = error.problems
        config = parse({key: value for key, value in values.items() if _is_group(key, value)})
    if config.mode not in COMMAND_MODES:
        problems = problems + target_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def _is_group(key: str, value: Any) -> bool:
    """Whether this key is a group of targets that can be checked even when other parts are wrong."""
    return key in CONF_DEFAULTS - {"distributed"} and (value is None or isinstance(value, dict))


# --- one run ---------------------------------------------------------------------------------------------------------


def execute(config: Config) -> float | None:
    """One run; the figure that a sweep looks at."""
    from safe_trainer.build import build
    from safe_trainer.run_folder import new_run_folder, use_run_folder
    from safe_trainer.terminal import show_start, verdict
    from safe_trainer.trainer import RUNS

    if config.mode is not Mode.train:
        raise ConfigError([f"mode={config.mode.name} comes with a later version; there are train and recipes"])
    if config.resume == "last" and config.run_dir is None:
        raise ConfigError(["resume=last needs run_dir=FOLDER, the folder of the run to go on with (got none)"])
    folder = use_run_folder(Path(config.run_dir)) if config.run_dir else new_run_folder(RUNS, config.name)
    config.run_dir = str(folder)
    with log_file(folder / "train.log"):
        trainer = build(config, folder)
        trainer.report.path = folder
        if config.progress:
            show_start({"run": config.name, "device": trainer.device, "folder": folder}, trainer.model)
        ended = f"The run was broken off; {folder} holds its log and its checkpoints."
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


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """What is logged meanwhile is kept in a file too."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def guarded(work: Callable[[], float | None]) -> tuple[int, float | None]:
    """Run `work`; whatever goes wrong ends in one message and an exit code."""
    try:
        return 0, work()
    except ConfigError as error:
        return refuse(error), None
    except SafetyError as error:
        before = all(finding.stage == "preflight" for finding in error.report.findings if finding.severity == "error")
        return EXIT_PREFLIGHT if before else EXIT_FAULT, None
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED, None
    except Exception as error:
        traceback.print_exception(error)
        logging.getLogger(__name__).debug("the run crashed", exc_info=True)
        return 1, None


def refuse(error: ConfigError) -> int:
    """Say what is wrong with the configuration or the data; the exit code for it."""
    print(f"safe_trainer: {error}", file=sys.stderr)
    return EXIT_CONFIG


def print_command(config: Config, folders: list[Path]) -> int:
    """The modes that only print."""
    if config.mode is Mode.recipes:
        for name in options("recipe", folders):
            print(f"python -m safe_trainer +recipe={name}")
        return 0
    raise ConfigError(["mode=explain comes with a later version"])


if __name__ == "__main__":
    main()
