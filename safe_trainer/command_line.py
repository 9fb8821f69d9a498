"""The command line's words, and the folders they choose from: overrides read, judged and made into a composition.

Reads the YAML files of the groups; builds and runs nothing.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from safe_trainer.config import ConfigError, did_you_mean, option_names


def conf_folders(extra: str | None) -> list[Path]:
    """Folders that hold configuration groups: ours, and the one of --config-dir.

    Raises:
        ConfigError: there is no such folder.
    """
    import safe_trainer.conf

    ours = Path(safe_trainer.conf.__path__[0])
    if extra and not Path(extra).is_dir():
        raise ConfigError([f"--config-dir must be a folder (got {extra!r}, which is none)"])
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


def readable_overrides(given: list[str], folders: list[Path], *, sweep: bool = False) -> list[str]:
    """The command line's overrides, rewritten so that Hydra takes every key: the schema then judges them all at once.

    Args:
        sweep: an override may name several values, each for a run of its own.

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
            problems.append(f"{text!r} cannot be read as key=value: {reason}{_quoting(text)}")
            continue
        name = override.key_or_group
        problems += _sweep_problems(override, sweep)
        if override.is_delete() and name not in known and "." not in name and not name.startswith("hydra"):
            problems += _unknown(name)
        if name in known and not override.is_delete() and not _is_node(override):
            offered = options(name, folders)
            for choice in _choices(override):
                problems += _not_offered(name, choice, offered) + _unpackaged(name, choice, folders)
            rewritten.append(_as_choice(text, name, override))
        elif override.is_delete() or override.is_force_add() or name.startswith("hydra"):
            rewritten.append(text)
        else:
            rewritten.append("++" + text.lstrip("+"))
    if problems:
        raise ConfigError(problems)
    return rewritten


def first_of_each(overrides: list[str]) -> list[str]:
    """The overrides of a sweep's first run, as far as they can be told without Hydra's sweeper."""
    parser, first = OverridesParser.create(), []
    for text in overrides:
        override = parser.parse_override(text)
        if not override.is_sweep_override():
            first.append(text)
        elif override.is_choice_sweep() or override.is_range_sweep():
            value = next(iter(override.sweep_string_iterator()), None)
            first += [] if value is None else [f"{text.partition('=')[0]}={value}"]
    return first


def _is_node(override: Override) -> bool:
    """Whether a group is given as a whole, in braces, and not by the name of a choice."""
    return isinstance(override.value(), dict)


def _choices(override: Override) -> list[Any]:
    """What an override chooses in a group; one glob stands for whatever it finds."""
    if override.is_sweep_override():
        return [value.strip("'\"") for value in override.sweep_string_iterator()] if override.is_choice_sweep() else []
    return [override.value()]


def _not_offered(name: str, choice: Any, offered: list[str]) -> list[str]:
    if choice is None or choice in offered:
        return []
    meant = did_you_mean(choice, offered) if isinstance(choice, str) else ""
    if isinstance(choice, list) and name == "recipe":
        meant = "; one recipe a run, or --multirun +recipe=a,b for a run of each"
    return [f"{name} must be one of {', '.join(offered)} (got {choice!r}){meant}"]


def _sweep_problems(override: Override, sweep: bool) -> list[str]:
    """Several values without --multirun, and what a sweep sets itself."""
    name = override.key_or_group
    if sweep and name in ("run_dir", "resume"):
        return [
            f"{name} must not be given with --multirun, which gives each run a folder of its own under hydra.sweep.dir "
            f"(got {override.input_line!r})"
        ]
    if not sweep and override.is_sweep_override():
        return [
            f"{override.input_line!r} names several values: add --multirun for a run of each, or quote a text with a "
            f"comma, {name}=\"'a,b'\""
        ]
    return []


def _unknown(name: str) -> list[str]:
    names = list(option_names())
    if name in names:
        return []
    return [f"~{name} takes out what is not there: {name} is not an option{did_you_mean(name, names)}"]


def _quoting(text: str) -> str:
    """How to write a value that holds characters of Hydra's own language."""
    key, equals, value = text.partition("=")
    return f"; quote it, {key}=\"'{value}'\"" if equals and "'" not in value else ""


def _unpackaged(name: str, choice: Any, folders: list[Path]) -> list[str]:
    """A recipe of --config-dir whose keys Hydra would put under `recipe`, for want of its first line."""
    paths = [folder / name / f"{choice}.yaml" for folder in folders[1:] if name == "recipe"]
    return [
        f"{path} must begin with the line `# @package _global_`, so that its keys are those of the configuration"
        for path in paths
        if path.is_file() and not any("@package" in line for line in _comments(path))
    ]


def _comments(path: Path) -> list[str]:
    """The comments at the head of a file, where Hydra looks for its package."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.startswith("#")]


def _as_choice(text: str, name: str, override: Override) -> str:
    """A choice in a group, as Hydra wants it: null takes the group out, a group beside the defaults is added."""
    if not override.is_sweep_override() and override.value() is None:
        return f"~{name}"
    return text if override.is_add() or name in CONF_DEFAULTS else f"+{text}"


CONF_DEFAULTS = frozenset(
    {"model", "data", "loss", "task", "optimizer", "scheduler", "metrics", "logger", "distributed"}
)
"""Groups that stand in config.yaml's defaults; a choice in any other is added to them."""


def composed(overrides: list[str], config_dir: str | None) -> DictConfig:
    """What Hydra makes of the configuration tree and the overrides.

    Raises:
        ConfigError: it cannot be composed.
    """
    search = [f"hydra.searchpath=['{_escaped(f'file://{Path(config_dir).resolve()}')}']"] if config_dir else []
    try:
        with initialize_config_module("safe_trainer.conf", version_base="1.3"):
            return compose("config", overrides=[*overrides, *search], return_hydra_config=True)
    except MissingConfigException as error:
        choice = str(error.missing_cfg_file or "").rpartition("/")[2]
        meant = did_you_mean(choice, list(error.options or ()))
        where = str(error).split("Config search path")[0].split("Check that")[0]
        raise ConfigError([" ".join(where.split()) + meant]) from error
    except YAMLError as error:
        raise ConfigError([_of_yaml(error)]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"a YAML file of --config-dir must be text in UTF-8 ({error})"]) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([" ".join(str(error).split())]) from error


def _escaped(text: str) -> str:
    """A text within single quotes, as Hydra wants it: a backslash means something there before a quote only."""
    return re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)


def _of_yaml(error: YAMLError) -> str:
    """What is wrong in a YAML file, and where."""
    mark = getattr(error, "problem_mark", None)
    place = f" (got line {mark.line + 1}, column {mark.column + 1} of {mark.name})" if mark is not None else ""
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"a configuration file must be YAML: {reason}{place}"
