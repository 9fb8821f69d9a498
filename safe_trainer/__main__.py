"""``python -m safe_trainer``: compose, validate, build, run, and say how it ended by the exit code.

0 good, 1 unexpected crash, 2 config or data error, 3 preflight failed, 4 stopped by a fault in training,
130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped]
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from safe_trainer import modes
from safe_trainer.checkpoint import CheckpointError
from safe_trainer.command_line import (
    CONF_DEFAULTS,
    composed,
    conf_folders,
    described,
    first_of_each,
    options,
    readable_overrides,
)
from safe_trainer.config import Config, ConfigError, Mode, parse
from safe_trainer.findings import SafetyError
from safe_trainer.run_folder import plain_config

PRINTING = (Mode.recipes, Mode.explain)
"""Modes that only print: they make no run and no folder."""

BUILDING = (Mode.train, Mode.preflight, Mode.find_lr)
"""Modes that build what this configuration says; the others take the configuration of an earlier run."""

EXIT_CRASH, EXIT_CONFIG, EXIT_PREFLIGHT, EXIT_FAULT, EXIT_INTERRUPTED = 1, 2, 3, 4, 130
EXIT_PIPE = 141
"""128 + SIGPIPE: who read our output has gone, as in ``mode=recipes | head -1``."""


def main() -> None:
    """The command line."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # the console script: targets in the working folder
        sys.path.insert(0, "")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")  # a sign that the terminal lacks must not cost the whole line
    try:
        arguments = get_args_parser().parse_args()
        folders = conf_folders(arguments.config_dir)
        overrides = readable_overrides(arguments.overrides, folders, sweep=arguments.multirun)
        if arguments.cfg == "job" and not arguments.package:
            sys.exit(show(checked(composed(overrides, arguments.config_dir))))
        if arguments.multirun:
            check_sweep(first_of_each(overrides), arguments.config_dir)
        if not (arguments.multirun or arguments.cfg or arguments.info or arguments.hydra_help or arguments.help):
            sys.exit(run_once(composed(overrides, arguments.config_dir), folders))
        sys.exit(run_through_hydra(arguments.overrides, overrides))
    except ConfigError as error:
        sys.exit(refuse(error))
    except KeyboardInterrupt:  # before a run has begun, which deals with it itself
        sys.exit(130)


def run_once(composition: DictConfig, folders: list[Path]) -> int:
    """One run, without Hydra's job: the exit code.

    Raises:
        ConfigError: the configuration is wrong.
    """
    config = checked(composition)
    configure_log(composition.hydra.job_logging, composition.hydra.verbose)
    if config.mode in PRINTING:
        return guarded(lambda: print_only(config, folders))[0]
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
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints what went wrong in its own way and ends the process
    try:
        hydra.main(version_base="1.3", config_path="pkg://safe_trainer.conf", config_name="config")(job)()
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError([f"Hydra cannot run this: {' '.join(str(error).split())}"]) from error
    except OSError as error:
        must = "hydra.sweep.dir must be a folder that can be written"
        raise ConfigError([f"{must} (got {error.filename or '?'}: {error.strerror or error})"]) from error
    return max(codes, default=0)


def check_sweep(first: list[str], config_dir: str | None) -> None:
    """Mistakes that all runs of a sweep share are told once, before the first.

    Raises:
        ConfigError: there are some, or the mode makes no run.
    """
    mode = checked(composed(first, config_dir)).mode
    if mode is not Mode.train:
        raise ConfigError([f"--multirun needs mode=train (got mode={mode.name}, which makes no run)"])


def show(config: Config) -> int:
    """Print the whole configuration as a run would get it, every option with its value."""
    print(yaml.safe_dump(plain_config(config), sort_keys=False, allow_unicode=True), end="")
    return 0


# --- the configuration -----------------------------------------------------------------------------------------------


def checked(composition: DictConfig) -> Config:
    """The configuration, held against the schema and its targets against their signatures.

    Raises:
        ConfigError: all mistakes at once.
    """
    from safe_trainer.build import target_problems

    own = OmegaConf.masked_copy(composition, [str(key) for key in composition if key != "hydra"])
    values, problems = resolved(own)
    missing = set(map(_group_of, problems))
    try:
        config = parse(values)
    except ConfigError as error:
        problems += error.problems
        config = parse({key: value for key, value in values.items() if _is_group(key, value)})
    if config.mode in BUILDING:
        problems += [
            problem
            for problem in target_problems(config)
            if problem.split(maxsplit=1)[0].partition(".")[0] not in missing
        ]
    if problems:
        raise ConfigError(problems)
    return config


def _group_of(problem: str) -> str:
    """The group that a sentence on a mistake is about: its first word begins with it."""
    return problem.partition(" ")[0].partition(".")[0]


def resolved(own: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """Each key's value with its interpolations filled in, and a sentence on each that cannot be; it is left out."""
    values: dict[str, Any] = {}
    problems = []
    for key in map(str, own):
        try:
            node: Any = own._get_node(key)
            container = OmegaConf.is_config(node) and not node._is_none() and not node._is_interpolation()
            values[key] = OmegaConf.to_container(node, resolve=True) if container else own[key]
        except OmegaConfBaseException as error:
            problems.append(f"{error.full_key or key} cannot be resolved: {str(error).splitlines()[0]}")
        except RecursionError:
            problems.append(f"{key} cannot be resolved: it refers to itself")
    return values, problems


def _is_group(key: str, value: Any) -> bool:
    """Whether this key is a group of targets that can be checked even when other parts are wrong."""
    return key in CONF_DEFAULTS - {"distributed"} and (value is None or isinstance(value, dict))


# --- one run ---------------------------------------------------------------------------------------------------------


def execute(config: Config) -> float | None:
    """Do what the mode says; the figure that a sweep looks at."""
    if config.mode in modes.LATER:
        raise ConfigError([f"mode={config.mode.name}: {modes.LATER[config.mode]}"])
    from safe_trainer.build import build

    if config.mode is Mode.train:
        return modes.train(config, build)
    if config.mode is Mode.find_lr:
        return modes.find_lr(config, build)
    if config.mode is Mode.preflight:
        modes.preflight(config, build)
    elif config.mode is Mode.evaluate:
        modes.evaluate(config, build)
    else:
        modes.replay(config, build)
    return None


def print_only(config: Config, folders: list[Path]) -> None:
    """The modes that only print."""
    if config.mode is Mode.explain:
        modes.explain(config)
    else:
        modes.recipes([described(name, folders) for name in options("recipe", folders)])


def guarded(work: Callable[[], float | None]) -> tuple[int, float | None]:
    """Run `work`; whatever goes wrong ends in one message and an exit code."""
    try:
        figure = work()
        sys.stdout.flush()
        return 0, figure
    except ConfigError as error:
        return refuse(error), None
    except CheckpointError as error:
        print(f"safe_trainer: {error}", file=sys.stderr)
        return EXIT_CRASH, None
    except SafetyError as error:
        before = all(finding.stage == "preflight" for finding in error.report.findings if finding.severity == "error")
        return EXIT_PREFLIGHT if before else EXIT_FAULT, None
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED, None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return EXIT_PIPE, None
    except Exception as error:
        traceback.print_exception(error)
        return EXIT_CRASH, None


def refuse(error: ConfigError) -> int:
    """Say what is wrong with the configuration or the data; the exit code for it."""
    print(f"safe_trainer: {error}", file=sys.stderr)
    return EXIT_CONFIG


if __name__ == "__main__":
    main()
