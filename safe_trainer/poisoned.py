"""Who made a weight non-finite: told from the optimizer that holds it. Reads weights and optimizer state only.

The fuse lets no non-finite gradient through, so what is left is the optimizer's own doing, or the program's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from safe_trainer.gate import all_finite, held

HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "eps")
"""Numbers of a group that make every weight non-finite in one step if they are so themselves."""

BACK = "go back to a checkpoint from before"


@dataclass(frozen=True)
class Poison:
    """A non-finite weight: what was seen, why it is so, what to do."""

    evidence: str
    cause: str
    remedy: str


def bad_weights(named: Mapping[str, Tensor]) -> list[str]:
    """Names of the weights that hold a NaN or an infinity. Waits for the device."""
    kept = {name: p.detach() for name, p in named.items() if not is_lazy(p) and _has_values(p)}
    if all_finite(list(kept.values())):
        return []
    return [name for name, parameter in kept.items() if not all_finite([parameter])]


def explain(name: str, parameter: Tensor, optimizers: Sequence[Optimizer], applied: int) -> Poison:
    """Who made the weight `name` non-finite.

    Args:
        applied: steps of this run that have moved the weights so far.
    """
    if applied == 0:
        return Poison(
            "no step of this run has moved the weights yet",
            f"{name} came into the run like this: its initialisation or the file that it was loaded from made it so",
            "check the weights when they are made or loaded: all(p.isfinite().all() for p in model.parameters())",
        )
    owner = next((o for o in optimizers if any(p is parameter for p in held(o))), None)
    if owner is None:
        return Poison(
            "no optimizer holds it, so no training step has written it",
            "the program itself wrote it: an assignment, copy_ or load_state_dict between two steps, or in forward",
            f"look for the line that writes {name}",
        )
    kind = type(owner).__name__
    group = next(g for g in owner.param_groups if any(p is parameter for p in g["params"]))
    for option, value in ((option, value) for option, value in _numbers(group) if not math.isfinite(value)):
        return Poison(
            f"{kind} has {option}={value:g}",
            f"{kind}'s {option} is {value:g}, and the step multiplies the weights or their gradients by it",
            f"look at what sets {option} (a scheduler that divides by 0?), and {BACK}",
        )
    for key, total, bad in _bad_state(owner.state.get(parameter, {})):
        return Poison(
            f"{kind}'s state {key} of it holds a NaN or an infinity in {bad} of {total} elements",
            f"{kind}'s own state made the weight so; the gradients were finite",
            f"{BACK}; if the state came with a checkpoint or was written by hand, start it anew: "
            "optimizer.state.clear()",
        )
    rate, decay = _number(group.get("lr")) or 0.0, _number(group.get("weight_decay")) or 0.0
    factor = 1 - rate * decay
    if abs(factor) > 1:
        return Poison(
            f"{kind} has lr={rate:g} and weight_decay={decay:g}",
            f"weight decay blows the weights up: a step multiplies them by 1 - lr * weight_decay = {factor:g}",
            f"lower weight_decay until lr * weight_decay is far below 1 (0.0001 is common), and {BACK}",
        )
    settings = ", ".join(f"{option}={value:g}" for option, value in _numbers(group))
    return Poison(
        f"{kind} holds it ({settings}); its state and the gradients were finite",
        "the step itself overflowed, because the learning rate is too high for these gradients, or the program wrote "
        "the weight between two steps",
        f"lower the learning rate or clip the gradients (clip_norm=1.0), and {BACK}; look for code that writes {name}",
    )


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The options of a group that its step multiplies by."""
    for option in HYPERPARAMETERS:
        value = _number(group.get(option))
        if value is not None:
            yield option, value


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float, Tensor)) else None


def _bad_state(state: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Name, number of elements and of bad ones of each entry that has some."""
    for key, value in state.items():
        if isinstance(value, Tensor) and _has_values(value):
            bad = int((~torch.isfinite(value)).sum())
            if bad:
                yield key, value.numel(), bad


def _has_values(tensor: Tensor) -> bool:
    return (
        (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout is torch.strided and tensor.itemsize > 1
    )
