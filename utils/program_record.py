"""What is known of a training program from watching its state: plain numbers, names and lists. Touches nothing.

`ProgramFacts` fills it; rules read it. All of it can be written as JSON and read back, so that a resumed run knows what
the run before it knew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Episode", "Look", "OptimizerFacts", "ParameterFacts", "Record", "SchedulerFacts"]


@dataclass
class ParameterFacts:
    """One parameter of the model, over all looks."""

    name: str
    sides: list[int]
    dtype: str
    trainable: bool = True
    held: bool = False
    """Whether an optimizer has it, at the latest look."""
    looks: int = 0
    """Looks at which it was trainable and at least one parameter of the model got a gradient."""
    arrived: int = 0
    """Looks at which a backward pass brought it a gradient."""
    used: int = 0
    """Looks at which it had a gradient other than zero when its optimizer moved."""
    moved: bool = False
    """Whether its bits have changed since the first look."""
    called: int = 0
    """Looks at which the module that owns it ran in a training forward."""
    called_blind: int = 0
    """Those of them at which it only ran with gradients switched off."""
    unchanged: float | None = None
    """Half precision only: share of its weights with the very bits of the first look, of those with a gradient."""


@dataclass
class OptimizerFacts:
    """One optimizer."""

    kind: str
    eps: float | None = None
    momentum: float = 0.0
    steps: int = 0
    """Steps that it made since the run began."""
    strangers: int = 0
    """Tensors that it holds and the model does not have."""
    strangers_with_gradient: int = 0
    """Those of them that ever had a gradient at a look."""
    known: int = 0
    """Tensors that it holds and the model has."""


@dataclass
class SchedulerFacts:
    """One learning-rate scheduler."""

    kind: str
    bound: bool = True
    """Whether it moves the rate of an optimizer of this run."""
    count: int = 0
    """How often it had been stepped."""
    seen_at: int = 0
    """Training step in which it was asked."""
    horizon: int | None = None
    """Its T_max or total_steps."""
    last_milestone: int | None = None
    decay: float | None = None
    """What is left of the rate behind the last milestone."""


@dataclass
class Look:
    """One step that was looked at."""

    step: int
    stepped: int = 0
    """Optimizer steps within it."""
    trainable: int = 0
    arrived: int = 0
    """Trainable parameters that a backward pass brought a gradient."""
    present: int = 0
    """Parameters of the model with a gradient when an optimizer moved."""
    nonzero: int = 0
    norm_arrived: float | None = None
    """Length of all gradients together as backward left them, without a GradScaler's factor."""
    norm_used: float | None = None
    """The same when the optimizer used them."""
    norm_left: float | None = None
    """The same at the end of the step, where they were written to after the optimizer had used them."""
    largest: str | None = None
    """The parameter with the largest gradient."""
    weight_norm: float = 0.0
    rate: float = 0.0
    forwards: int = 0
    """Calls of the model with gradients, within the step."""
    left: list[str] = field(default_factory=list)
    """Modules that were in training mode at the first look, and in all forwards of this step are in eval."""
    graphs: int = 0
    """Earlier steps that were looked at, behind which optimizers have moved twice."""
    graphs_alive: int = 0
    """Those of them of which a graph is still alive."""


@dataclass
class Episode:
    """Calls of the model in training mode without gradients, one after the other, outside of training."""

    step: int
    function: str
    source: str | None
    layers: list[str]
    """Layers, one of a kind, whose output depends on the mode."""
    declared: bool = False
    """Whether the program had said that it is evaluating."""
    inside: bool = False
    """Whether it happened within a training step, behind the optimizer's."""
    count: int = 1
    repeated: bool = False
    """Whether one input was put in twice in a row, or one that was trained on in the same step."""


@dataclass
class Record:
    """All that is known of a program."""

    steps: int = 0
    """Training steps begun."""
    last_move: int = 0
    """Step in which an optimizer moved last; 0 before the first."""
    longest_gap: int = 0
    """Most steps from one move to the next."""
    looks: list[Look] = field(default_factory=list)
    parameters: dict[str, ParameterFacts] = field(default_factory=dict)
    optimizers: list[OptimizerFacts] = field(default_factory=list)
    schedulers: list[SchedulerFacts] = field(default_factory=list)
    intervals: int = 0
    """Times that the gradients between two moves of an optimizer were followed."""
    used_again: list[list[Any]] = field(default_factory=list)
    """Step, parameter: its gradient had been used, was added to without being cleared, and was used once more."""
    thrown_away: list[int] = field(default_factory=list)
    """Steps before which gradients were cleared that no optimizer had used."""
    episodes: list[Episode] = field(default_factory=list)
    evaluates: bool = False
    """Whether the model was ever called in eval without gradients: then the program knows of modes."""
    started_in_eval: list[str] = field(default_factory=list)
    """Layers, one of a kind, whose output depends on the mode, if the model was in eval from its first look on."""
    peak_rate: float = 0.0
    rate: float = 0.0
    low_since: int | None = None
    """Step since which the rate is under a millionth of its peak."""
    zero_since: int | None = None
    """Step since which it is exactly zero."""

    def state_dict(self) -> dict[str, Any]:
        """All of it in plain types."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Record:
        """What `state_dict` wrote."""
        values = dict(state)
        for name, kind in (
            ("looks", Look), ("optimizers", OptimizerFacts), ("schedulers", SchedulerFacts), ("episodes", Episode),
        ):  # fmt: skip
            values[name] = [kind(**entry) for entry in values[name]]
        values["parameters"] = {name: ParameterFacts(**entry) for name, entry in values["parameters"].items()}
        return cls(**values)
