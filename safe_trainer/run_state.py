"""All state of a run as plain types and tensors, and the way back from it. Reads and writes the parts of a Loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from safe_trainer.accumulation import load_parts, optional_parts, parts_of
from safe_trainer.checkpoint import state_differences
from safe_trainer.config import ConfigError
from safe_trainer.diagnosis import Probe, take_in
from safe_trainer.utils import rng

if TYPE_CHECKING:
    from safe_trainer.loop import Loop

log = logging.getLogger(__name__)

OF_THE_STATE = ("seed", "lr")
"""Settings that the checkpoint's own state overrules."""

NEEDED = frozenset({
    "position", "model", "optimizers", "generators", "loader", "history", "diagnosis", "monitors", "facts",
})  # fmt: skip
"""What a state must hold for a run to go on from it."""


def state_of(loop: Loop) -> dict[str, Any]:
    """Everything that `restore` needs to go on to the same bits."""
    return {
        "position": asdict(loop.position),
        "open_group": loop.open_group,
        "program": program_of(loop),
        **parts_of(loop),
        "anomaly": loop.anomaly.state_dict(),
        "guard": loop.guard.state_dict(),
        "early_stopping": {"best": loop.early_stopping.best, "waited": loop.early_stopping.waited},
        "history": loop.history.state_dict(),
        "open_row": loop.history.open_row,
        "held_out": loop.held_out.generators(),
        "diagnosis": loop.diagnosis.state_dict(),
        "monitors": loop.monitors.state_dict(),
        "facts": loop.facts.state_dict(),
        "probes": [asdict(entry) for entry in loop.probes],
        "evaluations": [dict(entry) for entry in loop.evaluations],
        "clip_norm": loop.clip_norm,
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
    for name, (theirs, ours) in _changes(loop, state).items():
        log.warning("%s was %s when the checkpoint was written and is %s now: the run goes on with %s.",
                    name, theirs, ours, theirs if name in OF_THE_STATE else ours)  # fmt: skip
    try:
        load_parts(loop, state)
    except (ValueError, KeyError) as error:
        raise ConfigError([f"the checkpoint does not fit: {error}"]) from error
    loop.position = type(loop.position)(**state["position"])
    loop.open_group = state.get("open_group")
    loop.anomaly.load_state_dict(state["anomaly"])
    loop.guard.load_state_dict(state["guard"])
    loop.early_stopping.best = state["early_stopping"]["best"]
    loop.early_stopping.waited = state["early_stopping"]["waited"]
    loop.history.load_state_dict(state["history"])
    loop.history.open_row = state.get("open_row", {})
    loop.held_out.set_generators(state.get("held_out", []))
    if loop.position.updates:
        for optimizer in loop.guard.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch takes the scheduler's step for early
    loop.diagnosis.load_state_dict(state["diagnosis"])
    loop.monitors.load_state_dict(state["monitors"])
    loop.facts.load_state_dict(state["facts"])
    loop.probes = [Probe(**entry) for entry in state["probes"]]
    loop.evaluations = [dict(entry) for entry in state["evaluations"]]
    for finding in loop.diagnosis.findings:
        take_in(loop.findings, finding)
    if loop.config.clip_norm == "auto":
        loop.clip_norm = state.get("clip_norm") or loop.clip_norm
    loop.figures = dict(state["figures"])
    loop.place.load_state_dict(state["loader"])
    loop.generators = state["generators"]


def program_of(loop: Loop) -> dict[str, Any]:
    """What the state of the parts does not tell, but a run must not change unnoticed when it goes on."""
    return {
        "optimizer": [type(optimizer).__name__ for optimizer in loop.guard.optimizers],
        "scheduler": None if loop.scheduler is None else type(loop.scheduler).__name__,
        "seed": loop.config.seed,
        "accumulate": loop.config.accumulate,
        "scheduler_interval": loop.config.scheduler_interval.value,
        "precision": loop.precision.choice.value,
        "clip_norm": loop.config.clip_norm,
        "clip_value": loop.config.clip_value,
        "lr": loop.given_rates,
        "parameters": _parameter_names(loop),
        "loader": _order_of(loop.loader),
    }


def _parameter_names(loop: Loop) -> list[list[str]]:
    """Names of the parameters in each group of each optimizer, in order; "?" for one that the model does not have."""
    names = {parameter: name for name, parameter in loop.model.named_parameters()}
    groups = [group for optimizer in loop.guard.optimizers for group in optimizer.param_groups]
    return [[names.get(parameter, "?") for parameter in group["params"]] for group in groups]


def _order_of(loader: Any) -> dict[str, int]:
    """What the order of a loader that is set to a position follows from."""
    known = ("batch_size", "count") if hasattr(loader, "set_position") else ()
    return {name: getattr(loader, name) for name in known if hasattr(loader, name)}


def _changes(loop: Loop, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ between the checkpoint and now, and do not keep the run from going on."""
    theirs, ours = state.get("program", {}), program_of(loop)
    changes = {
        name: (theirs[name], ours[name])
        for name in ("seed", "lr", "accumulate", "clip_norm", "clip_value", "scheduler_interval", "precision")
        if name in theirs and theirs[name] != ours[name]
    }
    if "loader" in theirs and not state["position"]["batch"]:
        changes.update(
            {
                name: (was, ours["loader"][name])
                for name, was in theirs["loader"].items()
                if was != ours["loader"].get(name)
            }
        )
    return changes


def _other_program(loop: Loop, state: Mapping[str, Any]) -> list[str]:
    """Parts of another kind, whose state means something else, and a place that other batches do not have."""
    theirs, ours = state.get("program", {}), program_of(loop)
    found = []
    for name in ("optimizer", "scheduler"):
        was, now = theirs.get(name), ours[name]
        if was and now and was != now:
            kinds = (", ".join(was), ", ".join(now)) if isinstance(was, list) else (was, now)
            found.append(f"its {name} is {kinds[0]}, the program's {kinds[1]}; go on with the same, or start a new run")
    if theirs.get("parameters", ours["parameters"]) != ours["parameters"]:
        found.append("its optimizer holds the parameters in other groups or another order than the program's")
    for name, was in theirs.get("loader", {}).items():
        now = ours["loader"].get(name)
        if state["position"]["batch"] and now != was:
            found.append(f"it stands within an epoch of {name} {was}, the program's is {now}; set it back to {was}")
    return found


def _differences(loop: Loop, state: Mapping[str, Any]) -> list[str]:
    found = state_differences(state["model"], loop.model.state_dict()) + _other_program(loop, state)
    if len(state["optimizers"]) != len(loop.guard.optimizers):
        found.append(f"it has {len(state['optimizers'])} optimizers, the program {len(loop.guard.optimizers)}")
    waiting = state["open_group"]["counts"]["batches"] if state.get("open_group") else 0
    if waiting >= loop.config.accumulate:
        found.append(
            f"{waiting} batches wait in it for the rest of their group, accumulate is {loop.config.accumulate}"
        )
    for length in ("total_steps", "T_max"):  # loading would quietly take the other length
        theirs, ours = (state["scheduler"] or {}).get(length), getattr(loop.scheduler, length, None)
        if theirs is not None and ours is not None and theirs != ours:
            found.append(f"its schedule is {theirs} steps long, the program's {ours}; give the run its first length")
    for name, part in optional_parts(loop).items():
        if (state[name] is None) != (part is None):
            theirs, ours = ("no", "one") if state[name] is None else ("a", "none")
            found.append(f"it has {theirs} {name}, the program has {ours}")
    return found
