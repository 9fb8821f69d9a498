"""The fuse and the monitors around a loop that is not ours: two lines in an existing script.

Touches what the guard touches when a step goes wrong (gradients, buffers, generators; on a rollback weights and
optimizers) and nothing in a healthy step. Writes files only if `config` names a `run_dir`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safe_trainer.alerts import Alerts
from safe_trainer.arguments import calls_that_cannot_be
from safe_trainer.config import Config, ConfigError, OnFault, parse
from safe_trainer.diagnosis import Diagnosis, Evidence, Setting, largest_decay, take_in
from safe_trainer.diagnosis.causes import folded
from safe_trainer.findings import Finding, Report, SafetyError, Severity
from safe_trainer.guard import Action, Attempt, Guard, reachable_scalers
from safe_trainer.history import History
from safe_trainer.loggers import JsonLines
from safe_trainer.module_facts import what_modules_show
from safe_trainer.output import Output
from safe_trainer.run_folder import save_start, use_run_folder
from safe_trainer.run_lock import locked, refuse_leavings
from safe_trainer.terminal import Progress
from safe_trainer.undo import containers
from safe_trainer.utils.anomaly import AnomalyDetector, raised_by_anomaly_mode
from safe_trainer.utils.monitors import Monitors
from safe_trainer.utils.program_facts import ProgramFacts

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

NO_REPLAY = (
    "no replay: the body of a with statement cannot run twice; give watch() the loss_fn, if the step is "
    "loss_fn(model(input), target), or put the step into a function under @guard.wrap"
)


class watch:
    """Watch a training loop that you wrote yourself.

    A context around the loop, with ``with guard.step(batch):`` around each step, or ``@guard.wrap`` on a function that
    makes one. A non-finite loss or gradient never reaches the weights: it is caught in ``optimizer.step()``.

    Args:
        model: the network that is trained.
        optimizer: one, or several, that move it.
        loss_fn: what a ``with`` body computes as ``loss_fn(model(input), target)`` of a batch ``(input, target)``, so
            that a bad step can be run again and its cause named. Not needed under ``wrap``.
        config: overrides of the schema (safe_trainer.config.Config): any mapping, dotted keys allowed. What it says of
            data, epochs, checkpoints and precision is the loop's own matter and has no effect.
        scheduler: one, or several; they are looked at, and taken back on a rollback.
        alerts: callables that get each finding that alerts, once, as in SafeTrainer.

    Raises:
        ConfigError: mistakes in `config` or in what was passed.
        SafetyError: an error was found and `on_fault` is stop; or the guard's policy is at its end.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        loss_fn: Callable[[Any, Any], Any] | None = None,
        config: Mapping[str, Any] | Config | None = None,
        *,
        scheduler: Any = None,
        alerts: Sequence[Callable[[Finding], object]] = (),
    ) -> None:
        self.config = config if isinstance(config, Config) else parse(config)
        self.model, self.loss_fn = model, loss_fn
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.schedulers = list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler] if scheduler else []
        self._hold_together(alerts)
        self.folder = use_run_folder(Path(self.config.run_dir)) if self.config.run_dir else None
        self.guard = Guard(
            self.config.guard, model, self.optimizers, on_fault=self.config.on_fault, folder=self.folder,
            restorable=self.schedulers, loss=loss_fn,
        )  # fmt: skip
        scaled = any(isinstance(value, torch.amp.GradScaler) for value in _names_of_caller())
        self.anomaly = AnomalyDetector(self.config, self.optimizers, model, check_nan=not scaled)
        self.monitors = Monitors(model, self.optimizers, every=self.config.monitor.every)
        self.facts = ProgramFacts(model, self.optimizers, self.schedulers, every=self.config.monitor.every)
        self.history = History()
        self.diagnosis = Diagnosis(opposed=len(self.optimizers) > 1)
        self.setting = Setting(
            planned_steps=self.config.max_steps, weight_decay=largest_decay(self.optimizers), scaled=scaled
        )
        self.findings: list[Finding] = []
        self.number = 0
        """Steps begun."""
        self._alerts = Alerts(self.config.alerts, alerts)
        self._output = Output([], Progress(shown=False), self._alerts)
        self._lock = ExitStack()
        self._handles: list[Any] = []
        self._entered = self._open = False
        self._loss: Tensor | float | None = None

    def _hold_together(self, alerts: Any) -> None:
        problems = list(calls_that_cannot_be(alerts))
        model: Any = self.model  # a caller's types are a promise that nobody has checked
        if not isinstance(model, nn.Module):
            problems.append(f"model must be a torch.nn.Module (got {type(model).__name__})")
        optimizers: list[Any] = self.optimizers
        wrong = [type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, Optimizer)]
        if wrong or not optimizers:
            problems.append(f"optimizer must be a torch.optim.Optimizer, or several (got {', '.join(wrong) or 'none'})")
        if problems:
            raise ConfigError(problems)

    # --- what a user calls -------------------------------------------------------------------------------------------

    def __enter__(self) -> watch:
        """Begin to watch."""
        if self._entered:
            raise RuntimeError("a watch can be entered once; make a new one for another loop")
        self._entered = True
        if self.folder is not None:
            self._lock.enter_context(locked(self.folder))
            refuse_leavings(self.folder, resume=None)
            save_start(self.folder, self.config, sys.argv)
            self._output = Output([JsonLines(self.folder)], Progress(shown=False), self._alerts)
        if self.config.guard.enabled:
            self._handles = self.guard.install_gate()
        self.facts.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Stop watching: every hook goes, and what only the end can show is looked at."""
        self.facts.__exit__()
        while self._handles:
            self._handles.pop().remove()
        try:
            self._write_row()
            self._diagnose(finished=error is None)
            if error is None and self.config.guard.enabled:
                outcome = self.guard.check_weights(self.number)
                if outcome is not None:
                    self._tell(outcome[0])
        finally:
            self._output.close()
            self._lock.close()
        if error is None:
            self._stop_on_error()

    def step(self, batch: Any) -> AbstractContextManager[None]:
        """Context for one step: forward, backward, ``optimizer.step()``. A further one within it does nothing.

        Args:
            batch: what the step learns from; kept until the step is over, and saved if it goes wrong.
        """
        return nullcontext() if self._open else _Step(self, batch, self._default_replay())

    def loss(self, loss: Tensor | float) -> None:
        """Tell the step's loss, for the history and the rules over it. Nothing waits for the device."""
        self._loss = loss.detach() if isinstance(loss, Tensor) else float(loss)

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """A step function that is watched, and that can be run again when it goes wrong.

        It takes the batch, in one argument or several, and makes the whole step. If it returns the loss (also first in
        a tuple, under ``loss`` in a mapping, or as ``.loss``), that is the step's loss.
        """
        self.guard.step = function
        if any(reachable_scalers(function)):
            self.anomaly.check_nan = False

        @functools.wraps(function)
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._open:
                return function(*args, **kwargs)

            batch: Any = args[0] if len(args) == 1 else args

            def replay(given: Any) -> Any:
                again: Any = function
                return _loss_in(again(*((given,) if len(args) == 1 else given), **kwargs))

            result: Any = float("nan")  # what is handed out if the step was broken off and is left out
            with _Step(self, batch, replay, exact=True):
                result = function(*args, **kwargs)
                loss = _loss_in(result)
                if loss is not None:
                    self.loss(loss)
            given_back: R = result
            return given_back

        return watched

    @property
    def report(self) -> Report:
        """What there is to say so far, or in all once the watch is over."""
        self.history.flush()
        return Report(
            findings=folded([*self.guard.findings, *self.findings]),
            history=self.history.columns,
            path=self.folder or Path(),
        )

    # --- a step ------------------------------------------------------------------------------------------------------

    def _default_replay(self) -> Callable[[Any], Any] | None:
        loss_fn = self.loss_fn
        if loss_fn is None:
            return None

        def replay(batch: Any) -> Tensor:
            loss: Tensor = loss_fn(self.model(batch[0]), batch[1])
            loss.backward()
            return loss

        return replay

    def _settle_look(self) -> None:
        """What the gate took away the program has not cleared."""
        if self.guard.dropped:
            self.facts.drop()

    def _ended(self, attempt: Attempt | None, replay: Callable[[Any], Any] | None, exact: bool) -> None:
        """The step's body is over: was it finite, what do the rules say?"""
        loss = self._loss
        if attempt is not None:
            finite = loss is None or bool(torch.isfinite(torch.as_tensor(loss)).all())
            if self.guard.gate_tripped or not finite:
                self._blow(attempt, replay, exact)
            else:
                if exact and replay is not None and self.anomaly.check_nan:
                    with self._not_counted():
                        self.guard.look_at_waiting(attempt, replay)
                self.guard.passed(attempt.step)
        figures: dict[str, Tensor | float] = {"lr": _rate(self.optimizers[0])}
        self.history.add(self.number, 0, figures if loss is None else {"loss": loss, **figures})
        if self.number % self.config.log_every == 0:
            self._write_row()
        if self.facts.due(self.number):
            self._diagnose()
        self._stop_on_error()

    def _not_counted(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(self.anomaly.suspended())
        stack.enter_context(self.facts.paused())
        return stack

    def _blow(
        self, attempt: Attempt, replay: Callable[[Any], Any] | None, exact: bool, error: BaseException | None = None
    ) -> None:
        """The fuse has blown: undo the step, say why as far as it can be told, and do what the policy says."""
        with self._not_counted():
            finding, action = self.guard.trip(attempt, replay, error=error)
            if not exact and finding.source is None and finding.where is None:
                finding = self._without_replay(finding, attempt, tried=replay is not None)
        self._tell(finding)
        if action is Action.stop:
            raise SafetyError(self._error_report(finding))

    def _without_replay(self, finding: Finding, attempt: Attempt, tried: bool) -> Finding:
        """Nothing named an operation: look which module's output is bad, and say why there is no more."""
        shown, where = what_modules_show(self.model, attempt)
        why = "replay: loss_fn(model(input), target) of the batch was finite, so the step does something else; use "
        why = f"{why}@guard.wrap" if tried else NO_REPLAY
        told = replace(
            finding,
            where=where,
            evidence=f"loss or gradients of the step were not finite; {shown}",
            cause=f"not named, {why}" if where is None else f"{where} made it ({why})",
            remedy="put the step into a function under @guard.wrap, and the operation will be named",
        )
        for index, earlier in enumerate(self.guard.findings):
            if earlier is finding:
                self.guard.findings[index] = told
        return told

    # --- findings ----------------------------------------------------------------------------------------------------

    def _write_row(self) -> None:
        means = self.history.flush()
        if means:
            self._output.row(self.number, 0, {f"train/{name}": value for name, value in means.items()})
        self._diagnose()

    def _diagnose(self, finished: bool = False) -> None:
        self.history.gather()
        evidence = Evidence(
            setting=self.setting,
            columns=self.history.columns,
            measurements=self.monitors.history,
            program=self.facts.record,
            ended=finished,
        )
        for finding in self.diagnosis.feed(evidence):
            if take_in(self.findings, finding):
                self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        """Say it at once; `report` has all of it."""
        level = logging.INFO if finding.severity is Severity.info else logging.WARNING
        log.log(level, "%s: %s", finding.severity, finding.headline())
        self._output.finding(finding)

    def _stop_on_error(self) -> None:
        if self.config.on_fault is OnFault.stop and any(f.severity is Severity.error for f in self.findings):
            raise SafetyError(self.report)

    def _error_report(self, finding: Finding) -> Report:
        """The report of a run that cannot go on, whatever severity a single step's finding has."""
        report = self.report
        if report.ok:
            report.add(replace(finding, severity=Severity.error))
        return report


class _Step:
    """One step of a watch."""

    def __init__(self, owner: watch, batch: Any, replay: Callable[[Any], Any] | None, exact: bool = False) -> None:
        self.owner, self.batch, self.replay, self.exact = owner, batch, replay, exact
        self.attempt: Attempt | None = None

    def __enter__(self) -> None:
        owner = self.owner
        if not owner._entered:
            raise RuntimeError("a step is watched within `with watch(...) as guard:`; open that around the loop")
        owner.number += 1
        owner._open, owner._loss = True, None
        self.stack = ExitStack()
        if owner.config.guard.enabled:
            self.attempt = owner.guard.begin(owner.number, self.batch)
        self.stack.enter_context(owner.facts.looking(owner.number))
        self.stack.enter_context(owner.monitors.measured(owner.number))
        self.stack.enter_context(owner.anomaly)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        owner = self.owner
        try:
            owner._settle_look()
            self.stack.__exit__(kind, error, trace)
            if error is None:
                owner._ended(self.attempt, self.replay, self.exact)
            elif self.attempt is not None and isinstance(error, RuntimeError) and raised_by_anomaly_mode(error):
                owner._blow(self.attempt, self.replay, self.exact, error)
                return True
            elif isinstance(error, Exception):
                error.add_note(owner._output.place_of(error, owner.number, containers(self.batch), owner.model))
        finally:
            owner._open = False
            self.batch = self.attempt = None
        return False


def _loss_in(result: Any) -> Any:
    """The loss in what a step function returned; None if it is not to be found."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif isinstance(result, tuple | list) and result:
        result = result[0]
    elif not isinstance(result, Tensor | float | int):
        result = getattr(result, "loss", None)
    if isinstance(result, Tensor):
        return result if result.numel() == 1 else None
    return float(result) if isinstance(result, float | int) and not isinstance(result, bool) else None


def _rate(optimizer: Optimizer) -> Any:
    return optimizer.param_groups[0].get("lr", 0.0)


def _names_of_caller() -> Iterable[Any]:
    """What the function that calls `watch` has by name: a GradScaler among it, whose overflows are no faults."""
    frame = sys._getframe(2)
    own = getattr(frame.f_locals.get("self"), "__dict__", {})
    return [*frame.f_locals.values(), *own.values(), *frame.f_globals.values()]
