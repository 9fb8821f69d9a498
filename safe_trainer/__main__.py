"""``python -m safe_trainer``: compose, validate, build, run, and say how it ended by the exit code.

0 good, 1 unexpected crash, 2 config or data error, 3 preflight failed, 4 stopped by a fault in training,
130 interrupted.
"""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Callable
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

from safe_trainer import modes
from safe_trainer.checkpoint import CheckpointError
from safe_trainer.config import Config, ConfigError, Mode, did_you_mean, parse
from safe_trainer.findings import SafetyError

PRINTING = (Mode.recipes, Mode.explain)
"""Modes that only print: they make no run and no folder."""

BUILDING = (Mode.train, Mode.preflight, Mode.find_lr)
"""Modes that build what this configuration says; the others take the configuration of an earlier run."""

EXIT_CRASH, EXIT_CONFIG, EXIT_PREFLIGHT, EXIT_FAULT, EXIT_INTERRUPTED = 1, 2, 3, 4, 130


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


def described(name: str, folders: list[Path]) -> tuple[str, str]:
    """The line that runs a recipe, and what the recipe says that it reaches: both stand in its first comment.

    The folder in the line is the one that was given, whatever the comment calls it.
    """
    for folder in folders:
        path = folder / "recipe" / f"{name}.yaml"
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            comment = next((line for line in lines if line.startswith("#") and "@package" not in line), "")
            command, _, reaches = comment.lstrip("# ").partition("  ")
            options = command.partition(f"+recipe={name}")[2]
            place = "" if folder is folders[0] else f" --config-dir {shlex.quote(str(folder))}"
            return f"python -m safe_trainer{place} +recipe={name}{options}", reaches.strip()
    return "", ""


def shadowed(folders: list[Path]) -> list[str]:
    """Files of --config-dir that Hydra would not read, since ours of the same name come first."""
    ours, *others = folders
    return [
        f"{path} must have a name of its own: {path.relative_to(folder)} of safe_trainer is read in its place"
        for folder in others
        for path in sorted(folder.rglob("*.yaml"))
        if (own := ours / path.relative_to(folder)).is_file() and own.read_bytes() != path.read_bytes()
    ]


def _holds_yaml(folder: Path) -> bool:
    return folder.is_dir() and any(folder.rglob("*.yaml"))


def readable_overrides(given: list[str], folders: list[Path]) -> list[str]:
    """The command line's overrides, rewritten so that Hydra takes every key: the schema then judges them all at once.

    Raises:
        ConfigError: an override that cannot be read, or a choice that a group does not offer.
    """
    known = groups(folders)
    parser = OverridesParser.create()
    problems, rewritten = shadowed(folders), []
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
                meant = did_you_mean(choice, offered)
                problems.append(f"{name} must be one of {', '.join(offered)} (got {choice!r}){meant}")
            rewritten.append(_as_choice(text, name, choice, override.is_add()))
        elif override.is_delete() or override.is_force_add() or name.startswith("hydra"):
            rewritten.append(text)
        else:
            rewritten.append("++" + text.lstrip("+"))
    if problems:
        raise ConfigError(problems)
    return rewritten


def _as_choice(text: str, name: str, choice: str | None, added: bool) -> str:
    """A choice in a group, as Hydra wants it: null takes the group out, a group beside the defaults is added."""
    if choice is None:
        return f"~{name}"
    return text if added or name in CONF_DEFAULTS else f"+{text}"


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
    if config.mode in BUILDING:
        problems = problems + target_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


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
    if config.mode is Mode.evaluate:
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
        return 0, work()
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
    except Exception as error:
        traceback.print_exception(error)
        return EXIT_CRASH, None


def refuse(error: ConfigError) -> int:
    """Say what is wrong with the configuration or the data; the exit code for it."""
    print(f"safe_trainer: {error}", file=sys.stderr)
    return EXIT_CONFIG


if __name__ == "__main__":
    main()
