"""SafeTrainer: the objects of a training program, checked, put together and run. Needs no Hydra and no YAML.

Touches the model (device, mode, weights), the optimizers and the run's folder.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from safe_trainer.alerts import Alerts
from safe_trainer.arguments import problems_of
from safe_trainer.checkpoint import Checkpoints, infinite_tensors, state_differences
from safe_trainer.config import Config, ConfigError, OnFault, parse
from safe_trainer.data import batches_in_epoch, length_of
from safe_trainer.diagnosis import Setting, largest_decay
from safe_trainer.diagnosis.causes import folded
from safe_trainer.ema import Average
from safe_trainer.evaluation import evaluate
from safe_trainer.findings import CheckResult, Finding, Report, SafetyError, Severity
from safe_trainer.guard import Guard, reachable_scalers, strangers, without_update
from safe_trainer.learning_rate_files import write_curve
from safe_trainer.loggers import JsonLines, TensorBoard
from safe_trainer.loggers.sink import Sink
from safe_trainer.loop import DEFAULT_EPOCHS, Loop, TrainStep
from safe_trainer.nonfinite import circumstances_of, finding_from_trace, load_attempt
from safe_trainer.output import Output
from safe_trainer.precision import Precision
from safe_trainer.preflight import Program, check_program, learning_rate, summary
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.learning_rate import LearningRateCurve
from safe_trainer.preflight.outcome import ProgramFailed, Skip
from safe_trainer.run_folder import new_run_folder, save_start, use_run_folder
from safe_trainer.run_lock import locked, refuse_leavings
from safe_trainer.run_state import NEEDED, restore
from safe_trainer.task import Supervised, Task, loss_of, to_device, value_of
from safe_trainer.terminal import Checklist, Progress
from safe_trainer.undo import step_back
from safe_trainer.untouched import untouched
from safe_trainer.utils import rng, tracer
from safe_trainer.utils.anomaly import AnomalyDetector
from safe_trainer.utils.monitors import Monitors
from safe_trainer.utils.program_facts import ProgramFacts

log = logging.getLogger(__name__)

RUNS = Path("runs")


class SafeTrainer:
    """Trains a PyTorch model and does not let it fail in silence.

    Args:
        model: the network; moved to the device of `config["device"]`.
        loss_fn: called as ``loss_fn(output, target)``; may be None with a `train_step` or a `task`.
        optimizer: holds the model's parameters.
        train_loader: any iterable of batches that can be read once for each epoch.
        val_loader: the same for held-out data; without it nothing is evaluated.
        scheduler: a learning-rate scheduler; advanced each epoch, or each step with ``scheduler_interval="step"``.
        train_step: callable(model, loss_fn, optimizer, batch) -> loss, the user's own step with ``optimizer.step()``
            in it. The trainer then sets no modes and clears no gradients.
        eval_step: callable(model, loss_fn, val_loader) -> float, lower is better; the user's own evaluation.
        other_optimizers: further optimizers that the user's own step drives.
        num_classes: of a classifier; for the checks of the first loss.
        config: overrides of the schema (safe_trainer.config.Config): any mapping, dotted keys allowed.
        task: callable(model, batch) -> mapping with ``loss``; see safe_trainer.task.
        metrics: a torchmetrics MetricCollection, or a mapping of name to metric, measured on held-out data.
        test_loader: data for one evaluation at the very end; it never selects a model.
        loggers: sinks of the log; None means JSON lines and TensorBoard.
        alerts: callables that get each finding that alerts, once; ``config["alerts.faults"]`` and
            ``config["alerts.severity"]`` say which do. What they raise is logged, and the run goes on.

    Raises:
        ConfigError: mistakes in `config` or in how the objects fit together, all at once.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any] | None,
        optimizer: Optimizer,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        scheduler: Any = None,
        *,
        train_step: TrainStep | None = None,
        eval_step: Callable[[nn.Module, Any, Any], Any] | None = None,
        other_optimizers: Sequence[Optimizer] = (),
        num_classes: int | None = None,
        config: Mapping[str, Any] | DictConfig | Config | None = None,
        task: Task | None = None,
        metrics: Any = None,
        test_loader: Iterable[Any] | None = None,
        loggers: Sequence[Sink] | None = None,
        alerts: Sequence[Callable[[Finding], object]] = (),
    ) -> None:
        self.config = config if isinstance(config, Config) else parse(_as_mapping(config))
        given = {
            "model": model, "loss_fn": loss_fn, "optimizer": optimizer, "train_loader": train_loader,
            "val_loader": val_loader, "scheduler": scheduler, "train_step": train_step, "eval_step": eval_step,
            "other_optimizers": other_optimizers, "task": task, "metrics": metrics, "test_loader": test_loader,
            "loggers": loggers, "alerts": alerts,
        }  # fmt: skip
        problems = problems_of(given, self.config, built=isinstance(config, Config))
        if problems:
            raise ConfigError(problems)
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.train_loader, self.val_loader, self.test_loader = train_loader, val_loader, test_loader
        self.scheduler, self.train_step, self.eval_step = scheduler, train_step, eval_step
        self.optimizers = [optimizer, *other_optimizers]
        self.num_classes = num_classes
        self.given_task, self.loggers, self.alerts = task, loggers, list(alerts)
        self.device = self._device()
        self.task: Task = task or Supervised(loss_fn or _no_loss)
        self.model.to(self.device)
        if self.config.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.precision = Precision(self.config.precision, self.device)
        self.metrics = _as_collection(metrics, self.device)
        self.average = self._average()
        self.report = Report()
        self.loop: Loop | None = None
        self._folder: Path | None = None

    # --- what a user calls -------------------------------------------------------------------------------------------

    def run(self) -> Report:
        """Check the program, then train it.

        Raises:
            SafetyError: an error was found and `on_fault` is stop; its ``report`` holds the findings.
        """
        if self.config.preflight.enabled and not self._goes_on():
            refuse_leavings(self.folder, self.config.resume)
            self.preflight()
            if not self.report.ok and self.config.on_fault is OnFault.stop:
                self._alert()
                raise SafetyError(self.report)
        return self.fit()

    def _alert(self) -> None:
        """Tell those who want alerts of a run that ends before its first step."""
        output, _ = self._output()
        for finding in self.report.findings:
            output.alerts.deliver(finding, output.sinks)
        output.close()

    def _goes_on(self) -> bool:
        """Whether this run was begun, and so checked, before."""
        return self.config.resume is not None and any((self.folder / "checkpoints").glob("*.pt"))

    def fit(self) -> Report:
        """Train without the checks before."""
        if self.loop is not None:
            raise RuntimeError("this trainer has run; make a new SafeTrainer for another run")
        with locked(self.folder):
            self._fit()
        if self.report.ok:
            self.report.metrics.update(self._test())
        if not self.report.ok and self.config.on_fault is OnFault.stop:
            raise SafetyError(self.report)
        return self.report

    def _fit(self) -> None:
        """Train in the run's folder; nothing in it changes before all that may be refused has been."""
        refuse_leavings(self.folder, self.config.resume)
        output, progress = self._output()
        self.loop = self._loop(output)
        self.loop.before = list(self.report.findings)
        self._resume(self.loop)
        save_start(self.folder, self.config, sys.argv)
        if self.config.resume is not None:
            output.start_after(self.loop.position.step)
        for finding in self.loop.before:
            output.alerts.deliver(finding, output.sinks)
        try:
            with progress:
                self._prepare_modes()
                self.loop.fit()
        finally:
            self._gather(self.loop)
            output.close()

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics on the held-out data, of the averaged weights where an average is kept."""
        if self.val_loader is None or self.config.limit_val_batches == 0:
            return {}
        if self.eval_step is not None:
            facts = contextlib.nullcontext() if self.loop is None else self.loop.facts.evaluating()
            with rng.isolated(), facts:
                result = self.eval_step(self.model, self.loss_fn, self.val_loader)
                return {"val/loss": float(value_of(result, "eval_step"))}
        if self.given_task is None and self.loss_fn is None:
            return {}  # a step of the user's own says nothing about how to judge a batch
        with contextlib.nullcontext() if self.loop is None else self.loop.facts.paused():
            return self._evaluated(self.val_loader, "val")

    def preflight(self) -> list[CheckResult]:
        """Check the program before it is trained, and leave it as it is; the results are in the report too."""
        options = self.config.preflight
        program = self._program()
        with Checklist(shown=self.config.progress) as checklist:
            results = check_program(program, options.checks, options.budget_s, checklist.tell)
        self.train_loader = program.train_loader
        self.report.checks = results
        found = {finding.fault: finding for result in reversed(results) for finding in reversed(result.findings)}
        self.report.findings = []
        self.report.add(*folded(list(found.values())[::-1]))
        return results

    def _program(self) -> Program:
        return Program(
            config=self.config,
            model=self.model,
            loss_fn=self.loss_fn,
            task=self.task,
            optimizers=self.optimizers,
            scheduler=self.scheduler,
            train_step=self.train_step,
            eval_step=self.eval_step,
            train_loader=self.train_loader,
            val_loader=self.val_loader,
            test_loader=self.test_loader,
            num_classes=self.num_classes,
            precision=self.precision,
            device=self.device,
        )

    def output_shapes(self) -> dict[str, str]:
        """What each module puts out for a batch of a few samples, by its name; empty where that cannot be told."""
        program = self._program()
        try:
            with program.preserved():
                return summary.output_shapes(program)
        except Exception as reason:  # for show only; what is wrong with the program is said when it is checked
            log.debug("No shapes of outputs: %s", reason)
            return {}
        finally:
            self.train_loader = program.train_loader

    def find_lr(self) -> LearningRateCurve:
        """Loss along a ramp of learning rates, and a suggestion; the program is left as it is. Files go to the folder.

        Raises:
            ConfigError: the program cannot be put on a ramp, or it raises.
        """
        program, clock = self._program(), Clock(self.config.preflight.budget_s)
        try:
            with program.preserved():
                curve = learning_rate.find(program, clock)
        except (Skip, ProgramFailed) as reason:
            raise ConfigError([f"no learning rate can be found: {reason}"]) from reason
        finally:
            self.train_loader = program.train_loader
        write_curve(curve, self.folder)
        return curve

    def replay(self, path: Path | str) -> Finding:
        """Run a step that blew the fuse, as it was saved in the run's folder, once more, and name what made it so.

        Weights, buffers, modes, gradients and generators are put back afterwards.

        Raises:
            ConfigError: `path` is no such step, or it belongs to another model.
        """
        attempt = load_attempt(Path(path))
        differences = state_differences(attempt["model"], self.model.state_dict())
        if differences:
            raise ConfigError([f"the saved step does not fit: {difference}" for difference in differences])
        batch = to_device(attempt["batch"], self.device, self.config.channels_last)
        ways_back = [] if self.train_step is None else step_back(self.train_step, self.model, self.optimizers)
        with rng.isolated(), untouched(self.model, self.optimizers):
            self.model.load_state_dict(attempt["model"])
            for name, module in self.model.named_modules():
                module.training = name not in attempt["in_eval"]
            rng.restore(attempt["generators"])
            step = without_update(lambda: self._forward_backward(batch), self.optimizers)
            trace = tracer.trace(step, model=self.model, batch=batch, watched=strangers(self.model, self.optimizers))
        for back in ways_back:
            back()
        return finding_from_trace(trace, circumstances_of(attempt))

    def _forward_backward(self, batch: Any) -> Any:
        """One step of this program, as far as the gradients."""
        if self.train_step is not None:
            return self.train_step(self.model, self.loss_fn, self.optimizer, batch)
        with self.precision.autocast():
            loss = loss_of(self.task(self.model, batch))
        self.precision.backward(loss)
        return loss

    def judge(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Loss and metrics of a checkpoint's weights on validation and test data.

        Raises:
            ConfigError: the checkpoint belongs to another model.
        """
        differences = state_differences(state["model"], self.model.state_dict())
        if differences:
            raise ConfigError([f"the checkpoint does not fit: {difference}" for difference in differences])
        self.model.load_state_dict(state["model"])
        if self.average is not None and state.get("ema") is not None:
            self.average.load_state_dict(state["ema"])
        return {**self.evaluate(), **self._test()}

    @property
    def folder(self) -> Path:
        """The run's folder; made when it is first asked for."""
        if self._folder is None:
            given = self.config.run_dir
            self._folder = use_run_folder(Path(given)) if given else new_run_folder(RUNS, self.config.name)
            self.report.path = self._folder
        return self._folder

    # --- how it is put together --------------------------------------------------------------------------------------

    def _device(self) -> torch.device:
        """The device of the run. Beside a train_step, auto leaves the model where it is: its step counts on that."""
        if self.config.device == "auto" and self.train_step is not None:
            return next((p.device for p in self.model.parameters()), torch.device("cpu"))
        return resolve_device(self.config.device)

    def _average(self) -> Average | None:
        return None if self.config.ema_decay is None else Average(self.model, self.config.ema_decay)

    def _loop(self, output: Output) -> Loop:
        config = self.config
        guard = Guard(
            config.guard,
            self.model,
            self.optimizers,
            on_fault=config.on_fault,
            folder=self.folder,
            restorable=[self.scheduler, self.average, self.precision.scaler],
            loss=self.loss_fn,
            step=self.train_step,
        )
        scaler_of_user = next(reachable_scalers(self.train_step), None) if self.train_step else None
        scaled = self.precision.scaler is not None or scaler_of_user is not None
        return Loop(
            config,
            self.model,
            self.task,
            self.optimizer,
            self.train_loader,
            scheduler=self.scheduler,
            precision=self.precision,
            guard=guard,
            anomaly=AnomalyDetector(config, self.optimizer, self.model, check_nan=not scaled),
            monitors=Monitors(self.model, self.optimizers, every=config.monitor.every),
            facts=ProgramFacts(self.model, self.optimizers, [self.scheduler], every=config.monitor.every),
            setting=Setting(
                planned_steps=total_steps(config, length_of(self.train_loader)),
                epoch_length=batches_in_epoch(config, self.train_loader),
                weight_decay=largest_decay(self.optimizers),
                scaled=scaled,
            ),
            output=output,
            checkpoints=self._checkpoints(),
            evaluate=self.evaluate,
            average=self.average,
            train_step=self._user_step() if self.train_step else None,
            scaler_of_user=scaler_of_user,
            held_out=self.val_loader,
            own_evaluation=self.eval_step is not None,
        )

    def _user_step(self) -> Callable[[Any], Any]:
        step, model, loss_fn, optimizer = self.train_step, self.model, self.loss_fn, self.optimizer
        assert step is not None
        return lambda batch: step(model, loss_fn, optimizer, batch)

    def _checkpoints(self) -> Checkpoints | None:
        options = self.config.checkpoint
        if not options.enabled:
            return None
        return Checkpoints(
            self.folder / "checkpoints",
            keep_last=options.keep_last,
            keep_best=options.keep_best,
            metric=options.metric,
            direction=options.direction,
            may_be_infinite=infinite_tensors({"model": self.model.state_dict()}),
        )

    def _output(self) -> tuple[Output, Progress]:
        folder = self.folder
        sinks = self.loggers if self.loggers is not None else (JsonLines(folder), TensorBoard(folder))
        length = length_of(self.train_loader)
        progress = Progress(
            total_steps=total_steps(self.config, length),
            total_epochs=None if self.config.max_steps else self.config.max_epochs or DEFAULT_EPOCHS,
            shown=self.config.progress,
        )
        return Output(sinks, progress, Alerts(self.config.alerts, self.alerts)), progress

    def _prepare_modes(self) -> None:
        """Training begins in training mode; parts that are in eval on purpose stay there."""
        assert self.loop is not None
        if self.config.seed is not None and self.loop.position.step == 0:
            rng.seed_everything(self.config.seed)
        if any(module.training for module in self.model.modules()):
            return
        self.model.train()
        self.report.add(
            Finding(
                fault="model.stuck_in_eval",
                severity=Severity.info,
                stage="training",
                evidence="every module was in eval mode at the start; the model was put into training mode",
                cause="pretrained models come in eval mode, and model.eval() stays in force until model.train()",
                remedy="call model.train() yourself, or model.train() on just the parts that are to learn",
            )
        )

    def _test(self) -> dict[str, float]:
        """Loss and metrics on the test data, if there are any and evaluation is not left out."""
        if self.test_loader is None or self.config.limit_val_batches == 0:
            return {}
        return self._evaluated(self.test_loader, "test")

    def _evaluated(self, loader: Iterable[Any], part: str) -> dict[str, float]:
        figures = evaluate(
            self.average.module if self.average is not None else self.model,
            self.task,
            loader,
            precision=self.precision,
            metrics=self.metrics,
            limit=self.config.limit_val_batches,
            channels_last=self.config.channels_last,
            part=part,
        )
        return {f"{part}/{name}": value for name, value in figures.items()}

    def _resume(self, loop: Loop) -> None:
        """Go on from a checkpoint, if the configuration says so and there is one."""
        which = self.config.resume
        if which is None:
            return
        store = loop.checkpoints or Checkpoints(self.folder / "checkpoints")
        if which == "last" and not store.all() and not any(store.folder.glob("*.pt")):
            log.warning("There is no checkpoint in %s yet: the run starts anew.", store.folder)
            return
        state, info = store.load(which)
        missing = ", ".join(sorted(NEEDED - set(state)))
        if missing:
            raise ConfigError([f"resume must name a checkpoint of a run (got {info.path}, which has no {missing})"])
        restore(loop, state)
        if loop.checkpoints is not None:
            loop.checkpoints.prune()  # what a kill left behind
        log.info("Going on from step %d (%s).", loop.position.step, info.path)

    def _gather(self, loop: Loop) -> None:
        """What the run has to say, also when it was broken off."""
        loop.history.flush()
        before = self.report.findings
        seen = [*loop.guard.findings, *loop.findings]
        self.report.findings = []
        self.report.add(*folded([*before, *(finding for finding in seen if not _is_told(finding, before))]))
        self.report.history = loop.history.columns
        self.report.metrics.update(loop.figures)


def _is_told(finding: Finding, before: Sequence[Finding]) -> bool:
    """Whether the preflight has told the same, of the same place as far as both name one."""
    return any(
        (other.is_alarm and other.fault == finding.fault and None in (other.where, finding.where))
        or (other.fault, other.where) == (finding.fault, finding.where)
        for other in before
    )


def total_steps(config: Config, batches: int | None) -> int | None:
    """Training steps of the whole run, where that is known beforehand."""
    if config.max_steps is not None:
        return config.max_steps
    if batches is None:
        return None
    limit = config.limit_train_batches
    return (batches if limit is None else min(limit, batches)) * (config.max_epochs or DEFAULT_EPOCHS)


def resolve_device(choice: str) -> torch.device:
    """The device that `choice` names; auto takes an accelerator if there is one.

    Raises:
        ConfigError: it is not there.
    """
    if choice == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(choice)
        torch.empty(1, device=device)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError([f"device must be auto or one that is there (got {choice!r}: {reason})"]) from error
    return device


def _as_mapping(config: Any) -> Any:
    """The configuration, if it is one.

    Raises:
        ConfigError: it is something else.
    """
    if config is None or isinstance(config, (Mapping, DictConfig)):
        return config
    raise ConfigError([f"config must be a mapping of options, as in {{'max_steps': 100}} (got {config!r})"])


def _as_collection(metrics: Any, device: torch.device) -> Any:
    if not metrics:
        return None
    from torchmetrics import MetricCollection  # half a second; only where metrics are used

    collection = metrics if isinstance(metrics, MetricCollection) else MetricCollection(dict(metrics))
    return collection.to(device)


def _no_loss(*_: object) -> Any:
    raise ConfigError(["evaluation needs a loss_fn, a task or an eval_step (got none)"])
