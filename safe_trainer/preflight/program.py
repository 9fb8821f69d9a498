"""The training program as the checks see it: its parts, some of its batches, and ways to run it that leave no trace.

May run and change anything of the program, but only inside `preserved`, which puts all of it back.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from safe_trainer.config import Config
from safe_trainer.gate import without_update
from safe_trainer.precision import Precision
from safe_trainer.preflight import reading
from safe_trainer.preflight.objects import objects_back
from safe_trainer.preflight.outcome import ProgramFailed, Skip
from safe_trainer.task import Supervised, Task, loss_of, to_device, value_of
from safe_trainer.undo import attributes_back, step_back, way_back
from safe_trainer.untouched import untouched
from safe_trainer.utils import rng

SAMPLES = 32
"""Samples in a check's batch at most: as many as the customer's overfit test takes, and quick on any machine."""
BATCHES = 8
"""Training batches that are read for the checks."""


@dataclass(kw_only=True)
class Program:
    """Everything that SafeTrainer was given. A check gets one and works inside `preserved`."""

    config: Config
    model: nn.Module
    loss_fn: Any
    task: Task
    optimizers: list[Optimizer]
    scheduler: Any
    train_step: Callable[[nn.Module, Any, Optimizer, Any], Any] | None
    eval_step: Callable[[nn.Module, Any, Any], Any] | None
    train_loader: Any
    val_loader: Any
    test_loader: Any
    num_classes: int | None
    precision: Precision
    device: torch.device
    _batches: list[Any] | None = field(default=None, repr=False)

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer, which the user's step is given."""
        return self.optimizers[0]

    @property
    def has_forward(self) -> bool:
        """Whether it is known how a batch becomes a loss; a user's own step alone does not tell."""
        return self.train_step is None

    # --- batches -----------------------------------------------------------------------------------------------------

    def batches(self) -> list[Any]:
        """Copies of the first training batches, on the device; at most BATCHES.

        Raises:
            Skip: the loader gives none.
            ProgramFailed: it raises.
        """
        if self._batches is None:
            if reading.is_read_once(self.train_loader):
                if self.config.seed is not None:  # training seeds before it reads, and this reads in its place
                    rng.seed_everything(self.config.seed)
                self._batches, self.train_loader = reading.read_once(self.train_loader, BATCHES)
            else:
                limit = self.config.limit_train_batches
                count = BATCHES if limit is None else min(BATCHES, limit)
                self._batches = [reading.clone(batch) for batch in reading.read(self.train_loader, count)]
        if not self._batches:
            raise Skip("the training loader gives no batch")
        return [self.on_device(reading.clone(batch)) for batch in self._batches]

    def batch(self, size: int = SAMPLES) -> Any:
        """A copy of the first training batch, on the device, cut to `size` samples where it can be cut."""
        return reading.cut(self.batches()[0], size)

    def on_device(self, batch: Any) -> Any:
        """The batch where the model is."""
        return to_device(batch, self.device, self.config.channels_last)

    # --- running it --------------------------------------------------------------------------------------------------

    def forward(self, batch: Any) -> dict[str, Any]:
        """The task's outcome for a batch: loss, and prediction and target where the task tells them.

        Raises:
            Skip: only the user's own step knows how a batch becomes a loss.
            ProgramFailed: the user's code raises.
        """
        if not self.has_forward:
            raise Skip("the training step is the program's own, and does not tell how a batch becomes a loss")
        with _program(), self.precision.autocast():
            return dict(self.task(self.model, reading.clone(batch)))

    def loss(self, batch: Any) -> Tensor:
        """Loss of a batch, with its graph."""
        with _program():
            return loss_of(self.forward(batch))

    def backward(self, batch: Any) -> float:
        """Loss of a batch; its gradients are in ``.grad`` afterwards, all others cleared. Nothing steps.

        Works for a user's own step too: its optimizers are kept from stepping.
        """
        loss = self.forward_backward(batch)
        return float(loss.detach()) if isinstance(loss, Tensor) else float(loss)

    def forward_backward(self, batch: Any) -> Tensor | float:
        """The same; the loss as the program made it."""
        self.clear()
        if self.train_step is None:
            loss = self.loss(batch)
            with _program():
                loss.backward()
            return loss
        with _program():
            step = without_update(self.train_step, self.optimizers)
            loss = step(self.model, self.loss_fn, self.optimizer, reading.clone(batch))
            value_of(loss, "train_step")
            return cast(Tensor | float, loss)

    def step(self, batch: Any) -> float:
        """One training step as training makes it; its loss."""
        if self.train_step is not None:
            with _program():
                loss = self.train_step(self.model, self.loss_fn, self.optimizer, reading.clone(batch))
                return float(value_of(loss, "train_step"))
        self.optimizer.zero_grad(set_to_none=True)  # as training clears them, whatever that does
        loss = self.loss(batch)
        with _program():
            loss.backward()
        if isinstance(self.config.clip_norm, (int, float)):
            torch.nn.utils.clip_grad_norm_(self.parameters(), float(self.config.clip_norm))
        if self.config.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters(), self.config.clip_value)
        with _program():
            self.optimizer.step()
        return float(loss.detach())

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in [*self.model.parameters(), *self.parameters()]:
            parameter.grad = None

    def parameters(self) -> list[Tensor]:
        """What the optimizers hold."""
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]

    # --- leaving it as it was ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Put everything back on exit, also when the body raises: weights, buffers, gradients, modes, optimizers,
        scheduler, generators, hooks, and what step, task, model, loaders and data sets keep for themselves.

        Raises:
            Skip: the model has parameters without a shape, which a forward pass would make for good.
        """
        if any(is_lazy(parameter) for parameter in self.model.parameters()):
            raise Skip("the model has parameters that get their shape in the first forward pass; run one batch through "
                       "it before it is given to the trainer, and it can be checked")  # fmt: skip
        modules = [self.model] + ([self.loss_fn] if isinstance(self.loss_fn, nn.Module) else [])
        ways = [way_back(part) for part in (*modules[1:], self.scheduler) if part is not None]
        flags = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        hooks = [back for module in modules for part in module.modules() for back in _hooks_back(part)]
        for function in (self.train_step, self.eval_step, self.task):
            if function is not None and not isinstance(function, Supervised):
                ways += step_back(function, self.model, self.optimizers)
        with rng.isolated(), untouched(self.model, self.optimizers):
            ways += [way for module in modules for way in attributes_back(module)]
            ways += objects_back(self.train_loader, self.val_loader, self.test_loader)
            if not any(module.training for module in self.model.modules()):
                self.model.train()
            try:
                yield
            finally:
                for back in [*ways, *hooks]:
                    back()
                for parameter, flag in flags:
                    if parameter.requires_grad is not flag:
                        parameter.requires_grad_(flag)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks_back(module: nn.Module) -> Iterator[Callable[[], None]]:
    """What takes away the hooks that a check, broken off, has left."""
    for name in _HOOKS:
        hooks = vars(module)[name]
        kept = dict(hooks)

        def back(hooks: Any = hooks, kept: dict[int, Any] = kept) -> None:
            for key in [key for key in hooks if key not in kept]:
                del hooks[key]

        yield back


@contextlib.contextmanager
def _program() -> Iterator[None]:
    """What raises in here is the user's code; its warnings come when it is trained."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (Skip, ProgramFailed):
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ProgramFailed(f"{type(error).__name__}: {first}") from error
