"""One operation of a step, its arguments sorted by what it does with them.

Reads schemas; nothing here runs or changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from safe_trainer.utils.provenance import plain

REWRITING = frozenset(
    [
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "bernoulli_",
        "exponential_",
        "random_",
        "geometric_",
        "log_normal_",
        "cauchy_",
        "_foreach_copy_",
        "_foreach_zero_",
        "set_",
        "resize_",
    ]
)
"""In-place operations that overwrite their target without reading it: what was in there is of no account."""

RUNNING = ("running_mean", "running_var")
"""Arguments that batch normalisation updates although its schema does not say so."""


@dataclass
class Call:
    """One operation with its arguments by name."""

    name: str
    pointwise: bool
    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    """What it reads."""
    written: list[tuple[str, Tensor]] = field(default_factory=list)
    """What it changes in place and also reads."""
    targets: list[Tensor] = field(default_factory=list)
    """What it overwrites unread."""
    others: dict[str, Any] = field(default_factory=dict)

    def taken(self, name: str) -> Tensor | None:
        """Where an operation that chooses between operands takes its elements from this one; None if it does not."""
        tensors = dict(self.inputs)
        if self.name == "aten.where" and name in ("self", "other"):
            return tensors["condition"] if name == "self" else ~tensors["condition"]
        if self.name in ("aten.masked_fill", "aten.masked_fill_") and name == "self":
            return ~tensors["mask"]
        return None


def tensors_in(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in an argument or a result, with its name and position."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from tensors_in(f"{name}[{position}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(f"{name}.{key}", item)


def read_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Sort the arguments of an operation by what it does with them, as its schema declares."""
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    if schema is None:
        reads = list(tensors_in("input", list(args))) + list(tensors_in("input", kwargs))
        return Call(str(func), False, [(name, dense) for name, value in reads if (dense := plain(value)) is not None])
    name = schema.name.replace("::", ".")
    call = Call(name, torch.Tag.pointwise in func.tags)
    rewrites = name.rpartition(".")[2] in REWRITING
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        changes = argument.name in RUNNING or (argument.alias_info is not None and argument.alias_info.is_write)
        found = list(tensors_in(argument.name, value))
        if not found:
            call.others[argument.name] = value
        for label, tensor in found:
            if argument.is_out or (changes and rewrites):
                call.targets.append(tensor)
            else:
                (call.written if changes else call.inputs).append((label, tensor))
    return call
