"""What a training step asks the model for: runs of the model, or of the parts that the step calls one by one.

Runs one forward and backward pass; keeps copies of what went in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import clone


@dataclass(frozen=True)
class OuterCall:
    """A run of a module that no other module of the model had called."""

    name: str
    """Dotted name, "" for the model itself."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def outer_calls(program: Program, batch: Any) -> list[OuterCall]:
    """The outermost runs with gradients in one training step, in their order, nothing stepped.

    Raises:
        ProgramFailed: the user's code raises.
    """
    calls: list[OuterCall] = []
    depth = [0]
    handles = []
    for name, module in program.model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_pre_hook(_entry(name, depth, calls), with_kwargs=True))
            handles.append(module.register_forward_hook(_exit(depth), always_call=True))
    try:
        program.backward(batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _entry(name: str, depth: list[int], calls: list[OuterCall]) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if depth[0] == 0 and torch.is_grad_enabled() and not torch._C._current_graph_task_id() >= 0:
            calls.append(OuterCall(name, clone(args), clone(kwargs)))
        depth[0] += 1

    return note


def _exit(depth: list[int]) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        depth[0] -= 1

    return note
