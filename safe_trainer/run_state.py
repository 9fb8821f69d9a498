"""All state of a run as plain types and tensors, and the way back from it. Reads and writes the parts of a Loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from safe_trainer.checkpoint import state_differences
from safe_trainer.config import ConfigError
from safe_trainer.diagnosis import Probe, take_in
from safe_trainer.utils import rng

if TYPE_CHECKING:
    from safe_trainer.loop import Loop

NEEDED = frozenset({"position", "model", "optimizers", "generators", "loader", "history"})
"""What a state must hold for a run to go on from it."""


def state_of(loop: Loop) -> dict[str, Any]:
    """Everything that `restore` needs to go on to the same bits."""
    return {
        "position": asdict(loop.position),
        "model": loop.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in loop.guard.optimizers],
        **{name: None if part is None else part.state_dict() for name, part in _optional_parts(loop).items()},
        "anomaly": loop.anomaly.state_dict(),
        "guard": loop.guard.state_dict(),
        "early_stopping": {"best": loop.early_stopping.best, "waited": loop.early_stopping.waited},
        "history": loop.history.state_dict(),
        "diagnosis": loop.diagnosis.state_dict(),
        "monitors": loop.monitors.state_dict(),
        "probes": [asdict(entry) for entry in loop.probes],
        "evaluations": [dict(entry) for entry in loop.evaluations],
        "figures": dict(loop.figures),
        "loader": loop.place.state_dict(),
        "generators": rng.capture(),
    }


def restore(loop: Loop, state: Mapping[str, Any]) -> None:
    """Go on where the run that wrote `state` stood. The generators are put back once the loader has begun.

    Raises:
        ConfigError: model, optimizers or the like are not those of the checkpoint; all differences at once.
    """
    differences = _differences(loop, state)
    if differences:
        raise ConfigError([f"the checkpoint does not fit: {difference}" for difference in differences])
    loop.model.load_state_dict(state["model"])
    for optimizer, kept in zip(loop.guard.optimizers, state["optimizers"], strict=True):
        _load_optimizer(optimizer, kept)
    for name, part in _optional_parts(loop).items():
        if part is not None:
            part.load_state_dict(state[name])
    loop.position = type(loop.position)(**state["position"])
    loop.anomaly.load_state_dict(state["anomaly"])
    loop.guard.load_state_dict(state["guard"])
    loop.early_stopping.best = state["early_stopping"]["best"]
    loop.early_stopping.waited = state["early_stopping"]["waited"]
    loop.history.load_state_dict(state["history"])
    loop.diagnosis.load_state_dict(state["diagnosis"])
    loop.monitors.load_state_dict(state["monitors"])
    loop.probes = [Probe(**entry) for entry in state["probes"]]
    loop.evaluations = [dict(entry) for entry in state["evaluations"]]
    for finding in loop.diagnosis.findings:
        take_in(loop.findings, finding)
    loop.figures = dict(state["figures"])
    loop.place.load_state_dict(state["loader"])
    loop.generators = state["generators"]


def _optional_parts(loop: Loop) -> dict[str, Any]:
    return {"scheduler": loop.scheduler, "scaler": loop.precision.scaler, "ema": loop.average}


def _differences(loop: Loop, state: Mapping[str, Any]) -> list[str]:
    found = state_differences(state["model"], loop.model.state_dict())
    if len(state["optimizers"]) != len(loop.guard.optimizers):
        found.append(f"it has {len(state['optimizers'])} optimizers, the program {len(loop.guard.optimizers)}")
    for length in ("total_steps", "T_max"):  # loading would quietly take the other length
        theirs, ours = (state["scheduler"] or {}).get(length), getattr(loop.scheduler, length, None)
        if theirs is not None and ours is not None and theirs != ours:
            found.append(f"its schedule is {theirs} steps long, the program's {ours}; give the run its first length")
    for name, part in _optional_parts(loop).items():
        if (state[name] is None) != (part is None):
            theirs, ours = ("no", "one") if state[name] is None else ("a", "none")
            found.append(f"it has {theirs} {name}, the program has {ours}")
    return found


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    try:
        optimizer.load_state_dict(state)
    except (ValueError, KeyError) as error:
        raise ConfigError([f"the checkpoint does not fit: its {type(optimizer).__name__} state: {error}"]) from error
