"""What the innermost modules are given in a training step, and in which mode they run. Runs one step, steps nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import clone


@dataclass(frozen=True)
class TrainingRun:
    """One module's first run with gradients."""

    name: str
    module: nn.Module
    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def training_runs(program: Program, batch: Any) -> list[TrainingRun]:
    """The first run with gradients of each module without children that has a mode to speak of.

    Raises:
        ProgramFailed: the user's code raises.
    """
    runs: dict[str, TrainingRun] = {}
    handles = [
        module.register_forward_pre_hook(_note(name, runs), with_kwargs=True)
        for name, module in program.model.named_modules()
        if depends_on_mode(module)
    ]
    try:
        program.backward(batch)
    finally:
        for handle in handles:
            handle.remove()
    return list(runs.values())


def _note(name: str, runs: dict[str, TrainingRun]) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if name not in runs and torch.is_grad_enabled():
            runs[name] = TrainingRun(name, module, module.training, clone(args), clone(kwargs))

    return note


def depends_on_mode(module: nn.Module) -> bool:
    """Dropout that drops, and whatever keeps statistics: PyTorch's own and hand-written ones."""
    if any(True for _ in module.children()) or isinstance(module, torch.jit.ScriptModule):
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return bool(statistics_of(module))


def statistics_of(module: nn.Module) -> list[str]:
    """Names of the buffers that hold a mean or a variance."""
    return [
        name
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point() and any(word in name.lower() for word in ("running", "mean", "var", "std"))
    ]
