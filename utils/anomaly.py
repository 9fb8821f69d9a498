"""When autograd's anomaly mode is on, who is to blame for a bad gradient, and a trial run of a changed module.

``AnomalyDetector`` switches the mode on in chosen steps only, because it costs 1.4 to 4.7 times a step. The setting is
one for the whole process; it is put back as found, whatever happens in between. ``validate_module`` runs a model over
some batches and leaves model, gradients, buffers and generators as they were. Nothing here draws from a global
generator, changes a number or waits for a GPU outside a window.

    detector = AnomalyDetector({"anomaly_detection": True, "sample_rate": 100}, optimizer)
    for batch in loader:
        with detector:
            loss = model(batch)
            loss.backward()
        optimizer.step()

Outside a window a step costs 2.3 us, with an optimizer 2.8, along a schedule by step 7 (measured on one core).
"""

from __future__ import annotations

import difflib
import math
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from safe_trainer.utils.blame import AnomalyError, Blame, validate_module
from safe_trainer.utils.rng import item_seed

__all__ = ["AnomalyDetector", "AnomalyError", "raised_by_anomaly_mode", "validate_module"]

_WINDOWS_KEPT = 1000  # numbers of past windows to remember: a few KB in a checkpoint
_ROUNDING = 1e-6  # a warm-up of 1, 2, 3 ... is a ratio of exactly 2 at its second step, but for rounding


@dataclass(kw_only=True)
class _Options:
    """What the configuration says: the first three at its top, the rest in the section `anomaly`."""

    anomaly_detection: bool
    sample_rate: int = 1
    seed: int = 0
    warmup_steps: int = 1
    after_lr_change: int = 3
    lr_jump: float = 2.0
    modules: list[str] | None = None


@dataclass
class _Rate:
    """The learning rate of one parameter group, and how it last moved."""

    value: float
    change: float | None = None
    """How far the last change went; None before the first."""
    changed_at: int = 0
    """The step that first ran with the present value."""
    gap: int = 1
    """Steps between the last two changes: 1 for a schedule by step, the length of an epoch for one by epoch."""
    smooth: bool = True
    """Whether the last change belonged to a smooth schedule."""

    def moved(self, value: float, step: int, base: float, limit: float) -> tuple[_Rate, bool]:
        """The rate after a change to `value`, and whether that was a jump: by more than `limit` times, and abruptly.

        Near its end a smooth schedule changes by large factors, too: a cosine by 9/4, 4 and infinity, a linear decay
        to 1e-6 by 100 in its last step, and a warm-up from next to nothing by as much in its first. So a large factor
        is no jump if it goes on from the change before, in distance (a parabola's steps grow by at most 3) and in
        pace, or if it is the very first change and leads up to a rate still below `base`. A rate of 0 moves no weight
        and is no jump. The restart of a cosine (``CosineAnnealingWarmRestarts``) is one: it takes the weights from
        their smallest to their largest updates.
        """
        change, gap = abs(value - self.value), step - self.changed_at
        low, high = sorted((value, self.value))
        steep = high > limit * low * (1 + _ROUNDING)
        goes_on = self.change is not None and self.smooth and change <= 3.01 * self.change and gap <= 2 * self.gap
        warms_up = self.change is None and self.value < value < base * (1 - _ROUNDING)
        smooth = not steep or goes_on or warms_up
        return _Rate(value, change, step, gap, smooth), not smooth and value != 0


@dataclass
class _Progress:
    """What a checkpoint keeps of a detector."""

    step: int = 0
    active_steps: int = 0
    windows: list[int] = field(default_factory=list)
    steps_left: int = 0
    """Steps that the window after a jump still has."""
    jump: str = ""
    rates: list[_Rate | None] = field(default_factory=list)


class AnomalyDetector:
    """A context manager around a step (forward and backward) that runs some steps under autograd's anomaly mode.

    Args:
        config: any mapping (also a DictConfig) or object with `anomaly_detection` and `sample_rate` (1 if a mapping
            names none), optionally `seed`, and a section `anomaly` with `warmup_steps`, `after_lr_change`, `lr_jump`
            and `modules`. ``DEBUG_ANOMALY=true`` in the environment overrides it: every step is a window.
        optimizer: one, or several, whose learning rates are watched for jumps. Rates that are tensors on a GPU are
            not read, since that would wait for it.
        model: needed for `anomaly.modules`: names of submodules to limit the check to.
        check_nan: False records where each operation came from but raises nothing; for a loop with a ``GradScaler``,
            whose overflows are no faults. It can be set between steps.

    The outermost entry is one step; an entry inside it changes nothing. Steps count from 1. A step is a window if it
    is among the first `warmup_steps`; or one of `after_lr_change` from a jump of the learning rate on; or the one that
    is drawn in its block of `sample_rate` steps. The draw depends on (`seed`, block) alone: it is the same on all
    ranks and after a resume. With `modules` only these are judged: AnomalyError names the one whose incoming gradient
    was finite and whose outgoing one is not, infinities included, where the mode itself reports NaN only. A compiled
    model runs past the hooks that this needs.

    Build it once, outside the loop. Where it is built anew in each step from the same config object, as in
    ``with AnomalyDetector(config): ...``, the steps are counted on all the same.

    ValueError if the configuration or a module's name is wrong.
    """

    def __init__(
        self,
        config: Any,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        model: nn.Module | None = None,
        *,
        check_nan: bool = True,
    ) -> None:
        options = _read(config)
        self.enabled = options.anomaly_detection
        self.sample_rate = options.sample_rate
        self.check_nan = check_nan
        self.reason = ""
        self._options = options
        self._optimizers = _optimizers(optimizer)
        self._blame = _blame(options.modules, model)
        self._depth = 0
        self._active = False
        self._before = (False, True)
        self._draw = (-1, 0)  # a block and the place drawn in it: a draw costs 1.3 us, so once a block
        self._record = _recorded(self, config)

    @property
    def _progress(self) -> _Progress:
        return self._record.progress

    @property
    def active(self) -> bool:
        """Whether the present step is a window."""
        return self._active

    @property
    def step(self) -> int:
        """Steps begun so far; inside a step, its number."""
        return self._progress.step

    @step.setter
    def step(self, number: int) -> None:
        self._progress.step = number

    @property
    def active_steps(self) -> int:
        """How many steps were windows."""
        return self._progress.active_steps

    @property
    def windows(self) -> list[int]:
        """Numbers of the last 1000 windows."""
        return self._progress.windows

    def due(self) -> str:
        """Why the next step will be a window, or an empty string. Asking changes nothing."""
        return self._decide()[0]

    def __enter__(self) -> AnomalyDetector:
        if self._depth == 0:
            self._begin()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._active:
            self._active = False
            if self._blame is not None:
                self._blame.detach()
            torch.autograd.set_detect_anomaly(*self._before)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Entries in the body are no steps and no windows: for a replay of a step that was already counted."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def state_dict(self) -> dict[str, Any]:
        """Position, windows and the memory of the learning rates: numbers, strings and lists only."""
        return asdict(self._progress)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; ValueError if it is not one."""
        names = {option.name for option in fields(_Progress)}
        if set(state) != names:
            raise ValueError(f"a detector's state must have the keys {', '.join(sorted(names))} (got {sorted(state)})")
        rates = [None if rate is None else _Rate(**rate) for rate in state["rates"]]
        self._record.progress = _Progress(**{**state, "rates": rates, "windows": list(state["windows"])})

    def _begin(self) -> None:
        progress = self._progress
        self.reason, progress.rates, progress.jump, progress.steps_left = self._decide()
        progress.step += 1
        self._record.entries += 1
        if self.reason:
            progress.active_steps += 1
            progress.windows = [*progress.windows[1 - _WINDOWS_KEPT :], progress.step]
            self._before = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
            self._active = True
            torch.autograd.set_detect_anomaly(True, self.check_nan and self._blame is None)
            if self._blame is not None and self.check_nan:
                self._blame.attach()

    def _decide(self) -> tuple[str, list[_Rate | None], str, int]:
        """For the next step: the reason for a window, and the memory of the learning rates with what is left to do."""
        progress, options = self._progress, self._options
        if not self.enabled:
            return "", progress.rates, "", 0
        step = progress.step + 1
        rates, jump = self._follow_rates(step)
        left = options.after_lr_change if jump else progress.steps_left
        jump = jump or progress.jump
        if self.sample_rate == 1:
            reason = "every step"
        elif step <= options.warmup_steps:
            reason = "warm-up"
        elif left > 0:
            reason = jump
        else:
            reason = "drawn" if self._drawn(step) else ""
        return reason, rates, jump, max(left - 1, 0)

    def _drawn(self, step: int) -> bool:
        block, place = divmod(step - 1, self.sample_rate)
        if block != self._draw[0]:
            self._draw = (block, item_seed(self._options.seed, 0, block) % self.sample_rate)
        return place == self._draw[1]

    def _follow_rates(self, step: int) -> tuple[list[_Rate | None], str]:
        """The rates of all groups now, and a sentence on the first that jumped."""
        known, jump = self._progress.rates, ""
        rates: list[_Rate | None] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                old = known[len(rates)] if len(rates) < len(known) else None
                value = _number(group["lr"])
                if value is None or old is None:
                    rates.append(None if value is None else _Rate(value, changed_at=step))
                elif value == old.value:
                    rates.append(old)
                else:
                    rate, jumped = old.moved(value, step, _base(optimizer, group, step), self._options.lr_jump)
                    rates.append(rate)
                    if jumped and not jump:
                        jump = f"learning rate jumped from {old.value:.6g} to {value:.6g}"
        return rates, jump


def raised_by_anomaly_mode(error: BaseException) -> bool:
    """Whether a window raised this: autograd's anomaly mode itself, or the judgement on `anomaly.modules`."""
    return isinstance(error, AnomalyError) or (
        isinstance(error, RuntimeError)
        and re.match(r"Function '.+' returned nan values in its \d+th output", str(error)) is not None
    )


def _number(rate: Any) -> float | None:
    """A learning rate as a number; None for one that only a GPU knows."""
    if rate.__class__ is float:  # nearly always, and three times faster than the next line
        return rate
    if isinstance(rate, Tensor):
        return float(rate) if rate.device.type == "cpu" else None
    return float(rate)


def _base(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], step: int) -> float:
    """The rate that a warm-up leads to. Without a scheduler (which leaves `initial_lr`) it must begin at once."""
    goals = [group.get("initial_lr"), group.get("max_lr")]
    if step <= 2 or goals[0] is not None:
        goals.append(optimizer.defaults.get("lr"))
    return max((number for goal in goals if goal is not None and (number := _number(goal)) is not None), default=0.0)


def _optimizers(given: Any) -> list[torch.optim.Optimizer]:
    if given is None:
        return []
    return [given] if hasattr(given, "param_groups") else list(given)


def _blame(names: list[str] | None, model: nn.Module | None) -> Blame | None:
    """Who judges the chosen modules; ValueError if there is no model, or no such module."""
    if names is None:
        return None
    if model is None:
        raise ValueError("anomaly.modules needs the model: AnomalyDetector(config, model=model)")
    known = dict(model.named_modules())
    unknown = [name for name in names if name not in known]
    if unknown:
        complaints = [f"{name!r} is no submodule of the model{_did_you_mean(name, known)}" for name in unknown]
        raise ValueError("anomaly.modules must name submodules of the model: " + "; ".join(complaints))
    return Blame(model, names)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(match) for match in close)}?" if close else ""


def _read(config: Any) -> _Options:
    """The options, or a ValueError that lists all that is wrong with them."""
    given: dict[str, Any] = {}
    section = _lookup(config, "anomaly")
    for option in fields(_Options):
        inside = option.name not in ("anomaly_detection", "sample_rate", "seed")
        value = _lookup(config, f"anomaly.{option.name}" if inside else option.name)
        if inside and value is None and section is not None:
            value = _lookup(section, option.name)
        if value is not None:
            given[option.name] = value
    if _debug_everywhere():
        given |= {"anomaly_detection": True, "sample_rate": 1}
    problems = [*_strangers(section), *_problems(given)]
    if problems:
        raise ValueError("AnomalyDetector's configuration: " + "; ".join(problems))
    return _Options(**given)


def _lookup(config: Any, name: str) -> Any:
    """An option of a mapping or an object, None if it has none."""
    return config.get(name) if hasattr(config, "get") else getattr(config, name, None)


def _strangers(section: Any) -> Iterator[str]:
    """A sentence for each key of the section that is no option."""
    known = [option.name for option in fields(_Options)][3:]
    for key in section if isinstance(section, Mapping) else ():
        if key not in known:
            yield f"anomaly.{key} is not an option{_did_you_mean(str(key), known)}"


def _problems(given: dict[str, Any]) -> Iterator[str]:
    """A sentence for each value out of its range."""
    if "anomaly_detection" not in given:
        yield "anomaly_detection must be given, true or false"
    elif not isinstance(given["anomaly_detection"], bool):
        yield f"anomaly_detection must be true or false (got {given['anomaly_detection']!r})"
    for name, least in (("sample_rate", 1), ("seed", 0), ("warmup_steps", 0), ("after_lr_change", 0)):
        value = given.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            yield f"{name} must be a whole number of at least {least} (got {value!r})"
    jump = given.get("lr_jump", 2.0)
    if not isinstance(jump, int | float) or not 1 < jump < math.inf:
        yield f"lr_jump must be a number greater than 1 (got {jump!r})"
    modules = given.get("modules", [])
    if isinstance(modules, str) or not all(isinstance(name, str) for name in modules):
        yield f"modules must be a list of names (got {modules!r})"
    else:
        given.update({"modules": list(modules)} if "modules" in given else {})


def _debug_everywhere() -> bool:
    """Whether the environment asks for every step; ValueError if it says neither yes nor no."""
    setting = os.environ.get("DEBUG_ANOMALY", "").strip().lower()
    if setting not in ("", "true", "1", "yes", "on", "false", "0", "no", "off"):
        raise ValueError(f"DEBUG_ANOMALY in the environment must be true or false (got {setting!r})")
    return setting in ("true", "1", "yes", "on")


@dataclass
class _Record:
    """The detector built last, as far as it outlives itself."""

    detector: weakref.ref[AnomalyDetector]
    config: Any
    progress: _Progress
    entries: int = 0


_latest: _Record | None = None


def _recorded(detector: AnomalyDetector, config: Any) -> _Record:
    """A new detector's record: with the last one's progress if a loop builds one a step, else with a new beginning.

    A loop around ``with AnomalyDetector(config):`` shows by the very same config object, and by a last detector that
    is gone after its one step. Without this, each step would be the first of a run: a warm-up, always on.
    """
    global _latest
    goes_on = _latest is not None and _latest.detector() is None and _latest.config is config and _latest.entries == 1
    progress = _latest.progress if goes_on and _latest is not None else _Progress()
    _latest = _Record(weakref.ref(detector), config, progress)
    return _latest
