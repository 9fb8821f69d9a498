"""The fuse around one step: a non-finite loss or gradient never reaches the weights, and what made it is named.

May touch: gradients (dropped when the fuse blows), buffers and generators (put back to where the step began), and, on
a rollback, weights and optimizer. It decides nothing about the loop: `trip` says what is to happen, the loop does it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safe_trainer.config import GuardConfig, Nonfinite, OnFault
from safe_trainer.findings import Finding, Severity
from safe_trainer.nonfinite import finding_from_trace, save_attempt
from safe_trainer.task import describe_batch
from safe_trainer.utils import rng, tracer

log = logging.getLogger(__name__)

MAX_REPLAYS = 3
"""Trips that are replayed: a replay costs some ten steps, and the fourth tells what the first three told."""

SCALE_FLOOR = 1.0
"""A loss scale below this means that true gradients, not scaled ones, overflow half precision."""


class Action(Enum):
    """What the loop has to do after a trip."""

    go_on = "go_on"
    rollback = "rollback"
    stop = "stop"


class Buffers:
    """A model's buffers as they were: one copy into storage that is kept, so that taking it costs no allocation."""

    def __init__(self, model: nn.Module) -> None:
        # (dict, name) and not the tensor: a forward may replace a buffer by a new one
        self._places: list[tuple[dict[str, Any], str]] = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if isinstance(buffer, Tensor)
        ]
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Remember the buffers of this moment."""
        current = [place[name] for place, name in self._places]
        if not current:
            return
        if [t.shape for t in self._kept] != [t.shape for t in current]:
            self._kept = [t.clone() for t in current]
        else:
            torch._foreach_copy_(self._kept, current)

    @torch.no_grad()
    def copy_to(self, other: nn.Module) -> None:
        """Write the remembered values into a copy of the model."""
        names = (place[name] for place, name in Buffers(other)._places)
        for buffer, kept in zip(names, self._kept, strict=True):
            buffer.copy_(kept)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the remembered values back."""
        for (place, name), kept in zip(self._places, self._kept, strict=True):
            current = place[name]
            if isinstance(current, Tensor) and current.shape == kept.shape:
                current.copy_(kept)
            else:
                place[name] = kept.clone()


@dataclass
class Attempt:
    """One try at a step: its batch, and where the generators and buffers stood before it."""

    buffers: Buffers
    generators: rng.Snapshot = field(default_factory=rng.Snapshot)
    step: int = 0
    batch: Any = None

    def begin(self, step: int, batch: Any) -> None:
        """Remember where step `step` begins; the batch is kept, not copied."""
        self.step, self.batch = step, batch
        self.generators.take()
        self.buffers.take()


class Weights:
    """Weights and optimizer state in memory, to go back to. Costs one copy of both."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], others: Sequence[Any] = ()) -> None:
        self._parts: list[Any] = [model, *optimizers, *(other for other in others if other is not None)]
        self._state: list[Any] | None = None
        self._candidate: list[Any] | None = None

    def take(self) -> None:
        """A new state to go back to, once `confirm` has been called: the next step may show that it was bad."""
        self._candidate = [copy.deepcopy(part.state_dict()) for part in self._parts]

    def confirm(self) -> None:
        """The step after `take` was finite, so what was taken is good."""
        if self._candidate is not None:
            self._state, self._candidate = self._candidate, None

    def restore(self) -> bool:
        """Go back; false if there is nothing to go back to yet."""
        if self._state is None:
            return False
        for part, state in zip(self._parts, self._state, strict=True):
            part.load_state_dict(copy.deepcopy(state))  # a copy: an optimizer goes on to change what it loads
        self._candidate = None
        return True


class Guard:
    """The fuse. `begin` before a step; `holds` before the optimizer moves; `trip` when it must not.

    For a step that is not ours, `gate` stands in every optimizer's step as a pre-hook and drops non-finite gradients:
    an optimizer that finds no gradient leaves weights and state untouched.
    """

    def __init__(
        self,
        config: GuardConfig,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        on_fault: OnFault = OnFault.stop,
        folder: Path | None = None,
        restorable: Sequence[Any] = (),
    ) -> None:
        self.config = config
        self.model = model
        self.optimizers = list(optimizers)
        self.on_fault = on_fault
        self.folder = folder
        self.findings: list[Finding] = []
        self.skipped: list[int] = []
        self.in_a_row = 0
        self.rollbacks = 0
        self.replaying = False
        self.gate_tripped = False
        buffers = [Buffers(model), Buffers(model)]  # two: a late flag is read when the next step has begun
        self._attempts = [Attempt(buffer) for buffer in buffers]
        self._turn = 0
        self._rolling = Weights(model, optimizers, restorable) if config.nonfinite is Nonfinite.rollback else None
        self._undo = Weights(model, optimizers) if self._moves_before_it_knows() else None
        self._repeats: dict[tuple[str, str | None, str | None], int] = {}

    def _moves_before_it_knows(self) -> bool:
        """Whether weights can move before the flag is known: several optimizers, or one that evaluates the model."""
        return len(self.optimizers) > 1 or any(map(needs_closure, self.optimizers))

    # --- around a step -------------------------------------------------------------------------------------------

    def begin(self, step: int, batch: Any) -> Attempt:
        """Remember the generators and buffers before the step."""
        self._turn ^= 1
        attempt = self._attempts[self._turn]
        attempt.begin(step, batch)
        self.gate_tripped = False
        if self._undo is not None:
            self._undo.take()
            self._undo.confirm()
        return attempt

    def holds(self, loss: Tensor, norm: Tensor | None, gradients: Sequence[Tensor]) -> bool:
        """Whether loss and gradients are finite. Waits for the device once.

        Args:
            norm: global gradient norm, shared with clipping; a norm can overflow while every gradient is finite,
                so a bad one is looked at element by element.
        """
        if math.isfinite(loss.item() if norm is None else (loss.detach() + norm).item()):
            return True
        if not bool(torch.isfinite(loss.detach()).all()):
            return False
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    def passed(self, step: int) -> None:
        """A step was finite and has been applied."""
        self.in_a_row = 0
        if self._rolling is not None:
            self._rolling.confirm()
            if step == 1 or step % self.config.snapshot_every == 0:
                self._rolling.take()

    # --- the gate in a step that is not ours ---------------------------------------------------------------------

    def gate(self, optimizer: Optimizer, *_: object) -> None:
        """Step pre-hook: drop every gradient if any of this optimizer's is not finite."""
        if self.replaying:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        if not self._finite(gradients):
            self.gate_tripped = True
            for parameter in parameters:
                parameter.grad = None

    def install_gate(self) -> list[Any]:
        """Put the gate into every optimizer; the handles take it out again."""
        return [optimizer.register_step_pre_hook(self.gate) for optimizer in self.optimizers]

    def state_dict(self) -> dict[str, Any]:
        """Counts and findings, of plain types."""
        return {
            "skipped": list(self.skipped),
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
            "findings": [
                {**asdict(f), "severity": f.severity.value, "symptoms": list(f.symptoms)} for f in self.findings
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where an earlier run stood."""
        self.skipped, self.in_a_row, self.rollbacks = list(state["skipped"]), state["in_a_row"], state["rollbacks"]
        self.findings = [Finding(**kept) for kept in state["findings"]]

    def _finite(self, gradients: Sequence[Tensor]) -> bool:
        if not gradients:
            return True
        return math.isfinite(global_norm(gradients).item()) or all(bool(torch.isfinite(g).all()) for g in gradients)

    # --- when it blows -------------------------------------------------------------------------------------------

    def trip(
        self, attempt: Attempt, replay: Callable[[], Any] | None, *, error: BaseException | None = None
    ) -> tuple[Finding, Action]:
        """Undo what the step left behind, name what made it non-finite, and say what is to happen.

        Args:
            replay: runs the very same forward and backward again and returns the loss; None if that is not possible.
            error: what autograd's anomaly mode raised, if that is how the step was caught.
        """
        self.in_a_row += 1
        self.skipped.append(attempt.step)
        self._drop_gradients()
        if self._undo is not None:
            self._undo.restore()
        after = rng.capture()  # the generators go on from where the step left them, as if it had been applied
        attempt.buffers.restore()
        if len(self.skipped) <= MAX_REPLAYS:
            finding = self._name(attempt, replay, error)
        else:
            finding = replace(self.findings[-1], step=attempt.step)
        rng.restore(after)
        action = self._decide()
        finding = replace(finding, severity=Severity.warning if self._is_wanted(action) else Severity.error)
        return self._merge(finding), action

    def _name(self, attempt: Attempt, replay: Callable[[], Any] | None, error: BaseException | None) -> Finding:
        trace = None
        if self.folder is not None:
            save_attempt(self.folder, attempt.step, attempt.batch, self.model, attempt.generators)
        if replay is not None:
            attempt.generators.restore()
            self.replaying = True
            try:
                step = without_update(replay, self.optimizers)
                trace = tracer.trace(step, model=self.model, batch=attempt.batch, watched=self._strangers())
            finally:
                self.replaying = False
                self._drop_gradients()
                attempt.buffers.restore()
                if self._undo is not None:
                    self._undo.restore()
        return finding_from_trace(trace, attempt.step, describe_batch(attempt.batch), error)

    def _strangers(self) -> list[Tensor]:
        """Parameters that an optimizer moves and the model does not know."""
        known = set(self.model.parameters())
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"] if parameter not in known]

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _decide(self) -> Action:
        if self.in_a_row >= self.config.max_skips:
            return Action.stop
        if self.config.nonfinite is Nonfinite.stop and self.on_fault is OnFault.stop:
            return Action.stop
        if self._rolling is not None and self.rollbacks < self.config.max_rollbacks and self._rolling.restore():
            self.rollbacks += 1
            self._lower_rates()
            return Action.rollback
        if self._rolling is not None and self.rollbacks >= self.config.max_rollbacks:
            return Action.stop
        return Action.go_on

    def _lower_rates(self) -> None:
        factor = self.config.rollback_lr_factor**self.rollbacks  # the restored rates know nothing of earlier rollbacks
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _is_wanted(self, action: Action) -> bool:
        """Whether the user asked for what happens: a step dropped under `skip` is no error."""
        return self.config.nonfinite is not Nonfinite.stop and action is not Action.stop

    def _merge(self, finding: Finding) -> Finding:
        """One finding a cause: the same operation at the same place again is counted, not reported anew."""
        key = (finding.fault, finding.where, finding.source)
        for index, earlier in enumerate(self.findings):
            if (earlier.fault, earlier.where, earlier.source) == key:
                self._repeats[key] = self._repeats.get(key, 1) + 1
                evidence = f"{earlier.evidence.split(' [again')[0]} [again up to step {finding.step}: "
                evidence += f"{self._repeats[key]} steps in all]"
                self.findings[index] = replace(earlier, evidence=evidence, severity=finding.severity)
                return self.findings[index]
        self.findings.append(finding)
        return finding


def without_update(step: Callable[[], Any], optimizers: Sequence[Optimizer]) -> Callable[[], Any]:
    """The same step, in which the optimizers move nothing; its gradients are there when it is over."""

    def replayed() -> Any:
        with _blocked(optimizers):
            return step()

    return replayed


@contextlib.contextmanager
def _blocked(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Hide the gradients from the optimizers' steps, and give them back at the end."""

    def hide(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept[parameter], parameter.grad = parameter.grad, None

    kept: dict[Tensor, Tensor] = {}
    handles = [optimizer.register_step_pre_hook(hide) for optimizer in optimizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, gradient in kept.items():
            if parameter.grad is None:
                parameter.grad = gradient


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all gradients as one tensor, without waiting for the device."""
    return torch.nn.utils.get_total_norm(gradients)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step must be given a closure, as LBFGS' is."""
    step = getattr(type(optimizer), "step", optimizer.step)
    parameter = inspect.signature(step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def reachable_scalers(step: Callable[..., Any]) -> Iterator[torch.amp.GradScaler]:
    """The GradScalers that a user's own step can reach: in its closure, its globals or the object it belongs to."""
    function = inspect.unwrap(step)
    owner = function if not inspect.isroutine(function) else getattr(function, "__self__", None)
    places: list[Any] = list(vars(owner).values()) if hasattr(owner, "__dict__") else []
    code = type(function).__call__ if owner is function else getattr(function, "__func__", function)
    try:
        names = inspect.getclosurevars(code)
        places += [*names.nonlocals.values(), *names.globals.values()]
    except TypeError:  # a callable without Python code
        pass
    yield from (place for place in places if isinstance(place, torch.amp.GradScaler))
