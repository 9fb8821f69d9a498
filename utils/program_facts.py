"""Facts about a running training program, tested on state and not on calls. Changes nothing that training computes.

Steps 1, 10, 30, every 100th, and the one right after each of those are looked at; the others pay for three hooks that
return at once. Nothing is drawn from a generator, no gradient is touched, and hooks go when a step ends or raises.

>>> import torch
>>> from torch import nn
>>> from safe_trainer.utils.program_facts import ProgramFacts
>>> _ = torch.manual_seed(0)
>>> model = nn.Linear(4, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> facts = ProgramFacts(model, [optimizer])
>>> with facts:
...     for step in range(1, 6):
...         with facts.looking(step):  # there is no zero_grad in this loop
...             model(torch.randn(8, 4)).square().mean().backward()
...             optimizer.step()
>>> [step for step, _ in facts.record.used_again]
[2, 3, 4]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from safe_trainer.utils.forward_watch import ForwardWatch
from safe_trainer.utils.gradient_tracks import GradientTracks
from safe_trainer.utils.measured_step import compiled
from safe_trainer.utils.program_look import ProgramLook, Weights
from safe_trainer.utils.program_record import Look, OptimizerFacts, Record, SchedulerFacts

__all__ = ["ProgramFacts"]

LOOKS = 64
"""Looks kept: the first sixteen and the latest."""
RATE_EVERY = 10
"""Steps between two readings of the learning rate."""
LOW = 1e-6
"""Share of its peak below which a rate moves nothing: a sound schedule ends at 1e-3 to 1e-5 of it, or at zero."""
MOST_THROWN = 50


class _Step:
    """The context of a step that is not looked at: it only says that one is open."""

    def __init__(self, facts: ProgramFacts) -> None:
        self._facts = facts

    def __enter__(self) -> None:
        self._facts._begin(None)

    def __exit__(self, *_: object) -> None:
        self._facts.forwards.end()


class ProgramFacts:
    """Watches a training program and keeps what it sees in `record`.

    Use it as a context around the whole run, and `looking(step)` around each step. Without the outer context the steps
    that are looked at are seen all the same, but not what happens between them.

    Args:
        model: its modules and parameters are listed anew at each look.
        optimizers: all that move the model.
        schedulers: those that move the optimizers' rates.
        every: steps between two looks; 0 switches them off.
        first: further steps to look at, counted from 1.

    Raises:
        ValueError: `every` is negative.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any] = (),
        *,
        every: int = 100,
        first: tuple[int, ...] = (1, 10, 30),
    ) -> None:
        if every < 0:
            raise ValueError(f"every must be 0 (off) or more steps (got {every})")
        self.model = getattr(model, "_orig_mod", model)  # of a compiled model
        self.optimizers, self.schedulers = list(optimizers), [s for s in schedulers if s is not None]
        self.every, self.first = every, first
        self.record = Record(optimizers=[_optimizer_facts(optimizer) for optimizer in optimizers])
        self._compiled = compiled(model)
        self.forwards = ForwardWatch(model, self.record)
        self._tracks = GradientTracks(self._again, self._thrown, self._complete)
        self._weights = Weights()
        self._handles: list[Any] = []
        self._plain = _Step(self)
        self._open = self._dropped = False

    # --- around a run and its steps --------------------------------------------------------------------------------

    def __enter__(self) -> ProgramFacts:
        """Hooks on, for the whole run: one on the model, one in each optimizer's step."""
        if not self._handles and self.every:
            self.forwards.attach()
            self._handles = [
                optimizer.register_step_post_hook(self._moved(index)) for index, optimizer in enumerate(self.optimizers)
            ]
        return self

    def __exit__(self, *_: object) -> None:
        """Every hook off."""
        self.forwards.detach()
        self._tracks.release()
        while self._handles:
            self._handles.pop().remove()

    def due(self, step: int) -> bool:
        """Whether this step, counted from 1, is looked at."""
        return self.every > 0 and (
            step % self.every == 0
            or step in self.first
            or step - 1 in self.first
            or (step > self.every and (step - 1) % self.every == 0)
        )

    def looking(self, step: int) -> AbstractContextManager[None]:
        """Context for one training step, forward to the optimizer's step. A further one within it does nothing."""
        if self._open or not self.every:
            return _nothing()
        self.record.steps = step
        due = self.due(step)
        if due or step % RATE_EVERY == 0:
            self._read_rate(step)
        return self._look(step) if due else self._plain

    def evaluating(self) -> AbstractContextManager[None]:
        """Context for an evaluation: a forward in training mode is wrong in there."""
        return self.forwards.evaluating()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The body is not part of the program: a replay of a step, or an evaluation of somebody else's."""
        before, self.forwards.paused = self.forwards.paused, True
        try:
            yield
        finally:
            self.forwards.paused = before

    def drop(self) -> None:
        """Within a step: what is seen of it does not count, for it is being undone."""
        self._dropped = True

    def _begin(self, look: Look | None) -> None:
        self._tracks.next_step(self.record.steps)
        self.forwards.begin(look)

    @contextmanager
    def _look(self, step: int) -> Iterator[None]:
        borrowed = not self._handles
        if borrowed:
            self.__enter__()
        look = Look(step=step, rate=self.record.rate)
        self._begin(look)
        watch = ProgramLook(self.model, self.optimizers, self.record, look, self._weights, self._compiled)
        self._open = True
        try:
            watch.attach()
            self._tracks.arm(step, self.optimizers, watch.names)
            moves, self._dropped = self.forwards.moves, False
            yield
            if self._dropped:
                return
            look.stepped = self.forwards.moves - moves
            watch.finish()
            self._read_schedulers()
            self.record.looks = _thinned([*self.record.looks, look])
        finally:
            watch.detach()
            self.forwards.end()
            self._open = False
            if borrowed:
                self.__exit__()

    # --- what the hooks tell -----------------------------------------------------------------------------------------

    def _moved(self, index: int) -> Any:
        facts, record, forwards = self.record.optimizers[index], self.record, self.forwards

        def after(*_: Any) -> None:
            if forwards.paused:
                return
            facts.steps += 1
            forwards.moved()
            record.longest_gap = max(record.longest_gap, record.steps - record.last_move)
            record.last_move = record.steps
            self._tracks.moved(index)

        return after

    def _again(self, name: str) -> None:
        if len(self.record.used_again) < MOST_THROWN:
            self.record.used_again.append([self.record.steps, name])

    def _thrown(self) -> None:
        if len(self.record.thrown_away) < MOST_THROWN and not self.forwards.paused:
            self.record.thrown_away.append(self.record.steps)

    def _complete(self) -> None:
        self.record.intervals += 1

    def _read_rate(self, step: int) -> None:
        """The highest rate of all groups, and since when it is next to nothing."""
        rates = [group.get("lr", 1.0) for optimizer in self.optimizers for group in optimizer.param_groups]
        known = [float(rate) for rate in rates if isinstance(rate, int | float) or rate.device.type == "cpu"]
        if not known:
            return
        record = self.record
        record.rate = max(known)
        record.peak_rate = max(record.peak_rate, record.rate)
        if record.rate >= LOW * record.peak_rate and record.rate > 0:
            record.low_since = record.zero_since = None
            return
        record.low_since = record.low_since or step
        record.zero_since = (record.zero_since or step) if record.rate == 0 else None

    def _read_schedulers(self) -> None:
        groups = {id(group) for optimizer in self.optimizers for group in optimizer.param_groups}
        self.record.schedulers = [
            _scheduler_facts(scheduler, groups, self.record.steps) for scheduler in self.schedulers
        ]

    # --- what a checkpoint keeps -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The record, and what later looks are compared with; plain types and tensors."""
        return {
            "record": self.record.state_dict(),
            "weights": self._weights.state_dict(),
            "modes": dict(self.forwards.first_modes),
            "moves": self.forwards.moves,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one stood."""
        loaded = Record.from_state(state["record"])
        for name, value in vars(loaded).items():
            if name != "optimizers":
                setattr(self.record, name, value)
        for mine, theirs in zip(self.record.optimizers, loaded.optimizers, strict=False):
            vars(mine).update(vars(theirs))  # the hooks hold on to these objects
        self._weights.load_state_dict(state["weights"])
        self.forwards.first_modes = dict(state["modes"])
        self.forwards.moves = state["moves"]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _thinned(looks: list[Look]) -> list[Look]:
    return looks if len(looks) <= LOOKS else looks[:16] + looks[17:]


def _optimizer_facts(optimizer: Optimizer) -> OptimizerFacts:
    defaults = getattr(optimizer, "defaults", {})
    eps, momentum = defaults.get("eps"), defaults.get("momentum", 0.0)
    return OptimizerFacts(
        kind=type(optimizer).__name__,
        eps=float(eps) if isinstance(eps, int | float) else None,
        momentum=float(momentum) if isinstance(momentum, int | float) else 0.0,
    )


def _scheduler_facts(scheduler: Any, groups: set[int], step: int) -> SchedulerFacts:
    theirs = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    facts = SchedulerFacts(
        kind=type(scheduler).__name__,
        bound=theirs is None or any(id(group) in groups for group in theirs),
        count=int(getattr(scheduler, "last_epoch", 0) or 0),
        seen_at=step,
    )
    horizon = getattr(scheduler, "T_max", None) or getattr(scheduler, "total_steps", None)
    facts.horizon = int(horizon) if isinstance(horizon, int | float) else None
    gamma, milestones = getattr(scheduler, "gamma", None), getattr(scheduler, "milestones", None)
    if isinstance(gamma, float | int) and hasattr(milestones, "values") and milestones:
        facts.last_milestone, facts.decay = int(max(milestones)), float(gamma) ** sum(milestones.values())
    return facts
