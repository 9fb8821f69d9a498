"""The training loop itself, from the first batch to the last; `fit` is the table of contents.

Touches the model, the optimizer, the scheduler and the average of the weights; writes through `Output` and
`Checkpoints` only. What a step may leave behind when it goes wrong is the guard's matter.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from safe_trainer.accumulation import Group, open_group_of, reopen
from safe_trainer.checkpoint import Checkpoints
from safe_trainer.config import Config, ConfigError, Interval, OnFault
from safe_trainer.data import batches_in_epoch, no_training_batches
from safe_trainer.diagnosis import Diagnosis, Evidence, Probe, Setting, take_in
from safe_trainer.diagnosis.causes import explained
from safe_trainer.diagnosis.clip_norm import suggested_clip_norm
from safe_trainer.early_stopping import EarlyStopping
from safe_trainer.ema import Average
from safe_trainer.findings import Finding, Severity
from safe_trainer.guard import Action, Attempt, Guard, norm_of
from safe_trainer.history import History
from safe_trainer.loader_state import LoaderState
from safe_trainer.measuring import is_measured, measured, next_look
from safe_trainer.output import Output
from safe_trainer.precision import SCALE_FLOOR, Precision, scale_floor_finding
from safe_trainer.run_state import state_of
from safe_trainer.task import Task, count_of, extra_figures, loss_of, to_device, value_of
from safe_trainer.undo import containers
from safe_trainer.utils import rng
from safe_trainer.utils.anomaly import AnomalyDetector, raised_by_anomaly_mode
from safe_trainer.utils.monitors import Monitors
from safe_trainer.utils.program_facts import RATE_EVERY, ProgramFacts

log = logging.getLogger(__name__)

DEFAULT_EPOCHS = 10

FIRST_CLIP = 1.0
"""Gradient norm that clip_norm=auto allows until it knows enough healthy ones: what most published recipes clip to."""

TrainStep = Callable[[nn.Module, Any, Optimizer, Any], Any]


@dataclass
class Position:
    """How far a run has come: batches trained on, epochs completed, batches of this epoch, optimizer steps.

    A checkpoint can lie between an epoch's last batch and the evaluation that is due after it.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    updates: int = 0
    evaluated: int = 0
    """The step after which the last evaluation was."""
    evaluation_is_due: bool = False
    """The run was broken off in the evaluation after this step: it is made before anything else."""
    epoch_is_over: bool = False
    """Whether that evaluation stands at the end of an epoch."""


@dataclass
class Pending:
    """A step whose flag is still on its way from the device."""

    attempt: Attempt
    finite: Tensor
    states_before: int


class Loop:
    """One run of training. Built by SafeTrainer; `fit` may be called once."""

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        task: Task,
        optimizer: Optimizer,
        loader: Iterable[Any],
        *,
        scheduler: Any,
        precision: Precision,
        guard: Guard,
        anomaly: AnomalyDetector,
        monitors: Monitors,
        facts: ProgramFacts,
        setting: Setting,
        output: Output,
        checkpoints: Checkpoints | None,
        evaluate: Callable[[], dict[str, float]],
        average: Average | None = None,
        train_step: Callable[[Any], Any] | None = None,
        scaler_of_user: torch.amp.GradScaler | None = None,
        held_out: Any = (),
        own_evaluation: bool = False,
    ) -> None:
        self.config, self.model, self.task, self.optimizer, self.loader = config, model, task, optimizer, loader
        self.scheduler, self.precision, self.guard, self.anomaly = scheduler, precision, guard, anomaly
        self.output, self.checkpoints, self.evaluate = output, checkpoints, evaluate
        self.average, self.train_step = average, train_step
        self.forward_model: nn.Module = torch.compile(model) if config.compile else model  # type: ignore[assignment]
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.clip_norm = FIRST_CLIP if config.clip_norm == "auto" else _number(config.clip_norm)
        self.position = Position()
        self.history = History()
        self.early_stopping = EarlyStopping(config.early_stopping)
        self.figures: dict[str, float] = {}
        self.findings: list[Finding] = []
        self.before: list[Finding] = []
        """What the preflight has found: it is not told again, nor what follows from it."""
        self.monitors, self.facts, self.setting = monitors, facts, setting
        self.diagnosis = Diagnosis(opposed=len(guard.optimizers) > 1)
        self.probes: list[Probe] = []
        self.evaluations: list[dict[str, float]] = []
        self.group = Group()
        self.open_group: dict[str, Any] | None = None
        """How things stood before the step of a group that the end of the run cut short."""
        self.late = guard.config.enabled and reads_late(config, optimizer, precision, train_step)
        self.pending: Pending | None = None
        self.moves_batches = precision.device.type != "cpu" or config.channels_last
        self.place = LoaderState(loader)
        self.held_out = LoaderState(held_out)
        self.given_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.scaler_of_user = scaler_of_user
        self.next_look = 0
        """The next step that monitors or facts ask for; 0 is every one."""
        self.watches_all = train_step is not None or own_evaluation
        """Whether facts are gathered in every step: what is ours does nothing behind the looks' back."""
        self.epoch_length, self.epoch_is_over = batches_in_epoch(config, loader), False
        self.generators: dict[str, Any] | None = None
        self.stopped = ""

    # --- the whole run -------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train until the steps are done, a fault ends the run, or the run no longer gets better."""
        handles = self.guard.install_gate() if self.needs_gate() else []
        try:
            with self.facts if self.watches_all else contextlib.nullcontext():
                self.run_epochs()
        finally:
            for handle in handles:
                handle.remove()
            self.optimizer.__dict__.pop("found_inf", None)

    def run_epochs(self) -> None:
        """The epochs, batch by batch."""
        if self.position.evaluation_is_due:
            self.go_on_with_evaluation()
        while not self.is_done():
            batches = self.batches_of_epoch()
            for batch in batches:
                self.position.step += 1
                self.position.batch += 1
                self.train_on(batch)
                self.output.advance(self.position.step, self.position.epoch)
                if self.position.step % self.config.log_every == 0:
                    self.write_row()
                elif self.facts.due(self.position.step):
                    self.diagnose()
                is_last = self.position.step == self.config.max_steps
                if self.is_checkpoint_due() and not (is_last or self.epoch_is_over):  # `end_epoch` writes one
                    self.save()
                if self.stopped or is_last:
                    if self.epoch_is_over:
                        next(batches, None)  # read to the very end: samplers draw once more there
                    break
            self.end_epoch()

    def needs_gate(self) -> bool:
        """Whether the guard must stand in the optimizers' steps: in a user's step, and where a fused optimizer is left
        to pass over an overflow by itself, since a fused SGD makes its first momentum of uninitialised memory then.
        """
        if self.train_step is not None:
            return self.config.guard.enabled
        return self.precision.scaler is not None and hasattr(self.optimizer, "_step_supports_amp_scaling")

    def is_done(self) -> bool:
        """Whether the run has come to its end; max_steps wins over max_epochs."""
        if self.stopped or self.early_stopping.has_run_out():
            return True
        if self.config.max_steps is not None:
            return self.position.step >= self.config.max_steps
        return self.position.epoch >= (self.config.max_epochs or DEFAULT_EPOCHS)

    def batches_of_epoch(self) -> Iterator[Any]:
        """The batches of this epoch that have not been trained on, at most limit_train_batches in all."""
        epoch, done = self.position.epoch, self.position.batch
        resumed, self.generators = self.generators, None
        if resumed is not None:
            rng.restore(resumed)
        if self.open_group is not None:
            reopen(self, self.open_group)
            self.open_group = None
        batches = self.place.begin(epoch, done)
        if resumed is not None and done:  # beginning an epoch in its middle drew from them once more
            rng.restore(resumed)
        limit, count = self.config.limit_train_batches, done
        self.epoch_is_over = False
        for batch in batches if limit is None else itertools.islice(batches, max(0, limit - done)):
            count += 1
            self.epoch_is_over = count == self.epoch_length
            yield batch
        self.epoch_is_over = True
        if not count:
            raise ConfigError([no_training_batches(epoch)])

    def end_epoch(self) -> None:
        """What is due between epochs and at the end: the open group, evaluation, scheduler, log row, checkpoint.

        A run that was broken off within it does it again; what had been evaluated by then is not evaluated twice.
        """
        self.settle()
        is_due = self.position.evaluated != self.position.step
        if self.group.batches:
            self.end_group()
            is_due = True  # the weights are others now
        if is_due and not self.stopped and self.config.guard.enabled:
            self.check_weights()
        if self.stopped:
            self.write_row()
            return
        figures = self.evaluate_or_save() if is_due else self.figures
        training_loss = self.history.mean("loss", self.position.epoch) if self.epoch_is_over else None
        if self.epoch_is_over:
            self.position.epoch, self.position.batch = self.position.epoch + 1, 0
            self.advance_scheduler(Interval.epoch, {"train/loss": training_loss, **figures})
        if not is_due:  # evaluated before the epoch was known to be over, which counts only now
            self.history.flush()
            if self.epoch_is_over and self.early_stopping.wants_to_stop(figures):
                self.stopped = self.early_stopping.reason()
            return
        self.position.evaluated = self.position.step
        self.figures.update(figures)
        self.evaluations.append({"step": self.position.step, "epoch": self.position.epoch, **figures})
        self.write_row(figures, aside=not self.epoch_is_over)
        if self.epoch_is_over and self.early_stopping.wants_to_stop(figures):
            self.stopped = self.early_stopping.reason()
        self.save(figures)

    def end_group(self) -> None:
        """Step with the batches that there are; a run that goes on from within an epoch will have more of them."""
        if not self.epoch_is_over and self.checkpoints is not None:
            self.open_group = open_group_of(self)
        self.update(None)
        self.settle()

    def go_on_with_evaluation(self) -> None:
        """Make the evaluation in which the run was broken off."""
        self.epoch_is_over, self.position.evaluation_is_due = self.position.epoch_is_over, False
        if self.generators is not None:
            rng.restore(self.generators)
            self.generators = None
        self.end_epoch()

    def evaluate_or_save(self) -> dict[str, float]:
        """The figures of an evaluation. If it fails, the epoch before it is not lost: a resumed run begins with it."""
        generators = self.held_out.generators()
        try:
            figures = self.evaluate()
            if not self.epoch_is_over:  # a run that goes on here would not have evaluated
                self.held_out.set_generators(generators)
            self.early_stopping.check(figures)
            return figures
        except BaseException:
            self.position.evaluation_is_due, self.position.epoch_is_over = True, self.epoch_is_over
            self.save()
            raise

    # --- one batch -----------------------------------------------------------------------------------------------

    def train_on(self, batch: Any) -> None:
        """One batch: forward, backward, and the optimizer's step if the batch completes its group."""
        if self.moves_batches:
            batch = to_device(batch, self.precision.device, self.config.channels_last)
        try:
            figures = self.step(batch) if self.position.step < self.next_look else self.looked_at(batch)
        except Exception as error:
            error.add_note(self.output.place_of(error, self.position.step, batch, self.model))
            raise
        self.history.add(self.position.step, self.position.epoch, figures)

    def looked_at(self, batch: Any) -> dict[str, Tensor | float]:
        """A step that somebody may want to see; the others go straight to `step`, which is all that they cost."""
        figures = measured(self, batch) if is_measured(self) else self.any_step(batch)
        self.next_look = next_look(self)
        return figures

    def any_step(self, batch: Any) -> dict[str, Tensor | float]:
        """The user's own step, or ours."""
        step, own = self.position.step, self.train_step is None
        take = self.step if own else self.step_of_user
        if not (self.watches_all or self.facts.due(step) or step % RATE_EVERY == 0):
            return take(batch)
        with self.facts.looking(step):
            figures = take(batch)
            if self.guard.dropped:  # the program itself has cleared nothing
                self.facts.drop()
            return figures

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """What the body runs is no step of the program: a replay, a probe."""
        with self.anomaly.suspended(), self.facts.paused():
            yield

    def step(self, batch: Any) -> dict[str, Tensor | float]:
        """The loop's own step."""
        attempt = self.guard.begin(self.position.step, batch) if self.config.guard.enabled else None
        rate = self.rate()
        try:
            loss, figures = self.forward_backward(batch)
        except RuntimeError as error:
            if attempt is None or not raised_by_anomaly_mode(error):
                raise
            if not self.settle(attempt):  # the step before blew as well, so this one began from its traces
                attempt.buffers.take()
            self.blow(attempt, self.again, error)
            return {"loss": float("nan"), "lr": rate}
        if attempt and self.pending and not self.settle(attempt):  # it blew: this one began from its traces
            attempt.generators.restore()
            attempt.buffers.take()
            with self.anomaly.suspended():  # the same step again, not another one
                loss, figures = self.forward_backward(containers(attempt.batch))
        figures.update(loss=loss.detach(), lr=rate)
        self.group.batches += 1
        if self.group.batches >= self.config.accumulate:
            norm = self.update(attempt, loss)
            if norm is not None:
                figures["grad_norm"] = norm
        elif attempt and not self.is_finite(loss):
            self.blow(attempt, self.again)
        return figures

    def rate(self) -> Tensor | float:
        """The learning rate of this step: the scheduler writes the next one into the same tensor, if it is one."""
        rate: Tensor | float = self.optimizer.param_groups[0]["lr"]
        return rate.detach().clone() if isinstance(rate, Tensor) else rate

    def again(self, batch: Any) -> Tensor:
        """The same step for a replay, uncompiled; its loss."""
        return self.forward_backward(batch, self.model)[0]

    def forward_backward(self, batch: Any, model: nn.Module | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Loss of the batch, its gradients added to those of the group; a group begins with none."""
        if self.group.batches == 0:
            self.optimizer.zero_grad(set_to_none=True)
            self.group.begin()
        with self.anomaly if self.anomaly.enabled else self.precision.nothing:
            with self.precision.autocast():
                outcome = self.task(self.forward_model if model is None else model, batch)
                loss = loss_of(outcome)
            if self.config.accumulate == 1:
                self.precision.backward(loss)
            else:
                self.precision.backward(loss * self.group.share(count_of(outcome, batch)))
        return loss, extra_figures(outcome)

    def update(self, attempt: Attempt | None, loss: Tensor | None = None) -> Tensor | float | None:
        """Clip and step the optimizer with the group's gradients, if they are finite; their norm before clipping."""
        self.precision.unscale(self.optimizer)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.config.accumulate > 1:
            self.group.average(gradients)
        self.group.batches = 0
        norm = self.norm_and_clip(gradients)
        if attempt is None or loss is None:
            self.apply()
        elif self.late:
            self.apply_late(attempt, loss, norm)
        elif self.is_finite(loss, norm, gradients):
            self.apply()
            self.guard.passed(attempt.step)
        else:
            self.blow(attempt, self.again)
        return norm

    def norm_and_clip(self, gradients: list[Tensor]) -> Tensor | float | None:
        """Global norm before clipping, computed once for the fuse and for clipping."""
        if self.clip_norm is not None:
            return torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        norm = norm_of(gradients) if self.config.guard.enabled and gradients else None
        if self.config.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, self.config.clip_value)
        return norm

    def is_finite(
        self, loss: Tensor, norm: Tensor | float | None = None, gradients: list[Tensor] | None = None
    ) -> bool:
        """The fuse's question. Under loss scaling only the loss counts: the scaler sees to overflowing gradients."""
        if self.precision.scaler is not None:
            return self.guard.holds(loss, None, ())
        if gradients is None:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
        if norm is None and gradients:
            norm = norm_of(gradients)
        return self.guard.holds(loss, norm, gradients)

    def apply(self) -> None:
        """Step the optimizer and let what follows a step follow."""
        if self.precision.step(self.optimizer):
            self.commit()
        elif self.precision.scaler is not None and self.precision.scaler.get_scale() < SCALE_FLOOR:
            self.tell_scale_floor(self.precision.scaler.get_scale())

    def commit(self, following: Attempt | None = None) -> None:
        """What follows an applied step: the average of the weights and the scheduler. A skipped step has neither.

        Args:
            following: the step that has begun since, if one has: the model's buffers are its own by now.
        """
        self.position.updates += 1
        if self.average is not None:
            self.average.update(self.model)
            if following is not None:
                following.buffers.copy_to(self.average.module)
        self.advance_scheduler(Interval.step)

    def advance_scheduler(self, interval: Interval, figures: Mapping[str, float | None] | None = None) -> None:
        """Advance the scheduler if this is its interval. One that waits for a plateau looks at the validation loss, or
        without validation data at the epoch's mean training loss.
        """
        if self.scheduler is None or self.config.scheduler_interval is not interval:
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            figures = figures or {}
            watched = figures.get("val/loss", figures.get("train/loss"))
            if watched is not None:
                self.scheduler.step(watched)
        else:
            self.scheduler.step()

    # --- a flag that is read one step late: the host never waits for an accelerator ---------------------------------

    def apply_late(self, attempt: Attempt, loss: Tensor, norm: Tensor | float | None) -> None:
        """Let the device itself leave the step out if it is not finite; the host looks when it has queued the next."""
        finite = torch.isfinite(loss.detach() if norm is None else loss.detach() + norm)
        states = len(self.optimizer.state)
        self.optimizer.found_inf = (~finite).float().reshape(())  # type: ignore[attr-defined]
        self.optimizer.step()
        if finite.is_cuda:
            host = torch.empty(finite.shape, dtype=finite.dtype, pin_memory=True)
            finite = host.copy_(finite, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            finite.arrived = event  # type: ignore[attr-defined]
        self.pending = Pending(attempt, finite, states)

    def settle(self, following: Attempt | None = None) -> bool:
        """Read the flag of the step before, if one is on its way; false if that step was not finite."""
        if self.pending is None:
            return True
        pending, self.pending = self.pending, None
        if hasattr(pending.finite, "arrived"):
            pending.finite.arrived.synchronize()
        if bool(pending.finite):
            self.commit(following)
            self.guard.passed(pending.attempt.step)
            return True
        for parameter in list(self.optimizer.state)[pending.states_before :]:
            del self.optimizer.state[parameter]  # a fused SGD leaves the momentum of a skipped first step uninitialised
        self.blow(pending.attempt, self.again)
        return False

    # --- a step that is the user's own -------------------------------------------------------------------------------

    def step_of_user(self, batch: Any) -> dict[str, Tensor | float]:
        """Run the user's step; its optimizer's steps pass through the guard's gate."""
        assert self.train_step is not None
        attempt = self.guard.begin(self.position.step, batch) if self.config.guard.enabled else None
        rate = self.rate()
        train_step = self.train_step
        try:
            with self.anomaly:
                loss = value_of(train_step(batch), "train_step")
        except RuntimeError as error:
            if attempt is None or not raised_by_anomaly_mode(error):
                raise
            self.blow(attempt, train_step, error)
            return {"loss": float("nan"), "lr": rate}
        if attempt is None:
            self.commit()
        elif self.guard.gate_tripped or not bool(torch.isfinite(torch.as_tensor(loss)).all()):
            self.blow(attempt, train_step)
        else:
            if self.anomaly.check_nan:  # without a scaler in sight, whose overflows are normal
                with self.facts.paused():
                    self.guard.look_at_waiting(attempt, train_step)
            self.commit()
            self.guard.passed(attempt.step)
        return {"loss": loss, "lr": rate}

    # --- faults ------------------------------------------------------------------------------------------------------

    def blow(self, attempt: Attempt, replay: Callable[[Any], Any], error: BaseException | None = None) -> None:
        """The fuse has blown: undo the step, replay it, and do what the policy says."""
        self.group.batches = 0
        self.monitors.drop()
        self.facts.drop()
        with self.not_counted():
            finding, action = self.guard.trip(attempt, replay, error=error)
        scaler = self.precision.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale())  # forget that gradients of the dropped step were unscaled already
        self.output.finding(finding)
        if action is Action.stop:
            in_a_row = self.guard.in_a_row
            self.stopped = f"{in_a_row} non-finite steps in a row" if in_a_row > 1 else "a non-finite step"
        self.group.batches = 0

    def check_weights(self) -> None:
        """The last step of an epoch has none after it that could trip over what it made of the weights."""
        outcome = self.guard.check_weights(self.position.step)
        if outcome is not None:
            self.output.finding(outcome[0])
            if outcome[1] is Action.stop:
                self.stopped = "a weight that is not finite"

    def tell_scale_floor(self, scale: float) -> None:
        """The loss scale has fallen to its floor."""
        finding = scale_floor_finding(scale, self.position.step)
        if take_in(self.findings, finding):
            self.output.finding(finding)
        if self.config.on_fault is OnFault.stop:
            self.stopped = "the loss scale fell to its floor"

    # --- rows and checkpoints ----------------------------------------------------------------------------------------

    def write_row(self, figures: dict[str, float] | None = None, *, aside: bool = False) -> None:
        """One row of the log: means since the last row, and what an evaluation gave. The one wait for the device.

        Args:
            aside: a row that a run would not have that goes on here; the next one is what it would have been.
        """
        means = self.history.flush(keep=aside)
        if self.config.clip_norm == "auto" and not aside:
            self.clip_norm = suggested_clip_norm(self.history.columns.get("grad_norm", ())) or self.clip_norm
        row = {f"train/{name}": value for name, value in means.items()} | (figures or {})
        epoch = self.position.epoch - (self.position.batch == 0)  # the one that the last batch belongs to
        if row:
            self.output.row(self.position.step, epoch, row)
        self.diagnose()

    def diagnose(self) -> None:
        """Let the rules look at what the history has gained; an update of what was told before is not told again."""
        self.history.gather()
        evidence = Evidence(
            setting=self.setting,
            columns=self.history.columns,
            measurements=self.monitors.history,
            probes=self.probes,
            evaluations=self.evaluations,
            program=self.facts.record,
            ended=self.is_done(),
        )
        for finding in self.diagnosis.feed(evidence):
            if take_in(self.findings, finding):
                self.output.finding(finding, explained=finding.fault in self.explained)
            if finding.severity is Severity.error and self.config.on_fault is OnFault.stop:
                self.stopped = f"{finding.fault} in step {self.position.step}"

    @property
    def explained(self) -> frozenset[str]:
        """Faults that need no word by themselves: told before the run, or following from what was found."""
        return explained([*self.before, *self.findings]) | {found.fault for found in self.before if found.is_alarm}

    def is_checkpoint_due(self) -> bool:
        """Whether checkpoint.every_steps asks for one now, at the end of a group."""
        every = self.config.checkpoint.every_steps
        return every is not None and self.position.step % every == 0 and self.group.batches == 0

    def save(self, figures: dict[str, float] | None = None) -> None:
        """Write a checkpoint of everything that the run needs to go on.

        Args:
            figures: of an evaluation of these very weights, if there was one; they say which checkpoint is best.
        """
        if self.checkpoints is None:
            return
        self.settle()
        self.output.flush()
        position = self.position
        self.checkpoints.save(state_of(self), step=position.step, epoch=position.epoch, metrics=figures or {})


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def reads_late(config: Config, optimizer: Optimizer, precision: Precision, train_step: object) -> bool:
    """Whether the device can leave out a non-finite step by itself, so that the host need not wait for the flag.

    It takes an accelerator (on a CPU there is nothing to wait for) and a fused optimizer, which reads `found_inf`.
    """
    if (
        precision.device.type != "cuda"
        or precision.scaler is not None
        or train_step is not None
        or config.accumulate > 1
    ):
        return False
    return all(group.get("fused") for group in optimizer.param_groups)
