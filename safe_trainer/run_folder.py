"""A run's folder, and what is written there at the start: the resolved config and the environment it runs in.

Creates folders and two files (config.yaml, environment.json). Reads the git state of the working folder; starts no GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf

import safe_trainer
from safe_trainer.config import Config, ConfigError

PACKAGES = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf", "torchmetrics", "scikit-learn", "tensorboard")
"""Libraries whose version can change what a run does."""

VARIABLES = (
    "DEBUG_ANOMALY",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONHASHSEED",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
)
"""The only environment variables that are written down: the others may hold secrets."""

GIT_SECONDS = 2.0
"""Longest wait for git: a working folder on a slow network disk must not hold up the run."""

MASK = "***"
_SECRET = (
    r"[\w-]*(?:password|passwd|passphrase|secret|credentials?|(?:api|access|auth|private|secret|account|license)[_-]?key)"
    r"|(?:(?:api|access|auth|bearer|hf|hub|github|wandb)[_-])?token"  # but not pad_token: that is a model's option
)
_SECRET_OPTION = re.compile(rf"(?<!\w)-*(?:{_SECRET}|[\w-]*[_-]key)", re.IGNORECASE)
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
_LOGIN = re.compile(r"(\w+://[^\s/:@]*:)[^\s/@]+@")
_KEY_LENGTH = 16
"""Shortest value that any other option called *_key hides in config.yaml: keys of services are longer, the names of
columns (image_key: jpg) are shorter and part of what the run does."""


def new_run_folder(base: Path, name: str) -> Path:
    """A new folder ``base/name/2026-01-31_09-30-00``; a second one in the same second ends in _2.

    Raises:
        ConfigError: the folder cannot be made.
    """
    parent = Path(base) / name
    with _writing(parent):
        parent = parent.expanduser()
        parent.mkdir(parents=True, exist_ok=True)
        start = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        for number in count(1):
            folder = parent / (start if number == 1 else f"{start}_{number}")
            try:
                folder.mkdir()  # fails if another run was faster: that is what makes the name unique
                break
            except FileExistsError:
                continue
    return folder


def use_run_folder(path: Path) -> Path:
    """The folder `path`, made if it does not exist, for a run that was told its run_dir.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    folder = Path(path)
    with _writing(folder):
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    return folder


def save_start(folder: Path, config: Mapping[str, Any] | DictConfig | Config, command: list[str]) -> None:
    """Write config.yaml (every option, defaults too) and environment.json; secrets in either are masked.

    To be called once the run's device is known: GPUs are named only if CUDA is in use by then. In a folder that holds
    an environment.json already, as when a run is resumed, the earlier starts are kept under ``earlier``.

    Raises:
        ConfigError: the folder cannot be written.
    """
    environment = describe_environment(command)
    with _writing(folder):
        (folder / "config.yaml").write_text(
            yaml.safe_dump(plain_config(config), sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
        environment["earlier"] = _earlier_starts(folder / "environment.json")
        (folder / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")


def describe_environment(command: list[str]) -> dict[str, Any]:
    """What a result may depend on: versions, machine, commit of the working folder, command line, time."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(mask_command(command)),
        "folder": str(Path.cwd()),
        "git": git_state(Path.cwd()),
        "python": platform.python_version(),
        "safe_trainer": safe_trainer.__version__,
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpus": len(affinity(0)) if affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "executable": sys.executable,
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository that `folder` lies in and whether tracked files differ from it; None if not known."""
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # reads only: no lock in the user's repository
    try:
        done = subprocess.run(
            command, cwd=folder, env=quiet, timeout=GIT_SECONDS, capture_output=True, text=True, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):  # no git, or a repository too slow to wait for
        return None
    lines = done.stdout.splitlines()
    commits = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
    if done.returncode != 0 or not commits:
        return None
    return {"commit": commits[0], "changed": any(not line.startswith("#") for line in lines)}


def mask_command(command: list[str]) -> list[str]:
    """The command with all that stands behind api_key=, token=, --password and the like replaced by ***."""
    masked: list[str] = []
    for position, word in enumerate(command):
        before = command[position - 1] if position else ""
        if before.startswith("-") and _SECRET_OPTION.fullmatch(before):
            masked.append(MASK)
            continue
        # All of the word's rest is hidden: where a secret ends cannot be told.
        hidden = re.sub(rf"({_SECRET_OPTION.pattern})(\s*[=:]\s*).+", rf"\1\2{MASK}", word, flags=re.I | re.S)
        masked.append(_LOGIN.sub(rf"\1{MASK}@", hidden))
    return masked


def plain_config(value: Any, name: str = "") -> Any:
    """`value` as YAML can hold it: enums as their words, paths and what else there is as text, secrets masked."""
    if isinstance(value, DictConfig):
        value = OmegaConf.to_container(value, resolve=True)
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain_config(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain_config(item, name) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) else int(value)  # NumPy's numbers are kinds of these
    return _masked(name.rpartition(".")[2], str(value))


def _masked(name: str, text: str) -> str:
    """The text of an option, or *** if its name says that it is secret."""
    long_key = name.lower().endswith("_key") and len(text) >= _KEY_LENGTH
    return MASK if text and (long_key or _SECRET_NAME.fullmatch(name)) else _LOGIN.sub(rf"\1{MASK}@", text)


def _version(package: str) -> str | None:
    """The installed version, read from the package's record: importing it would take seconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """Names of the GPUs if CUDA is in use; to ask otherwise would start it."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _earlier_starts(path: Path) -> list[Any]:
    """What an environment.json that is there already says, oldest start first."""
    try:
        last = json.loads(path.read_text(encoding="utf-8"))
        return [*last.pop("earlier", []), last]
    except (OSError, ValueError, AttributeError, TypeError):  # none there, or not one of ours: start afresh
        return []


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into a sentence for the user."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # a RuntimeError: ~ of a user without a home
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            [f"run_dir must be a folder that can be written (got {folder}: {reason}); name another by run_dir=FOLDER"]
        ) from error
