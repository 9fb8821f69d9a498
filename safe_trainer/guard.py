"""The fuse around one step: a non-finite loss or gradient never reaches the weights, and what made it is named.

May touch: gradients (dropped when the fuse blows), buffers and generators (put back to where the step began), and, on
a rollback, weights and optimizer. It decides nothing about the loop: `trip` says what is to happen, the loop does it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safe_trainer.config import GuardConfig, Nonfinite, OnFault
from safe_trainer.findings import Finding, Severity
from safe_trainer.gate import (
    Arguments,
    Ears,
    after_closure,
    all_finite,
    held,
    needs_closure,
    norm_of,
    strangers,
    without_update,
)
from safe_trainer.nonfinite import Circumstances, finding_from_trace, finding_of_weight, save_attempt
from safe_trainer.poisoned import bad_weights, explain
from safe_trainer.task import describe_batch
from safe_trainer.undo import Attempt, Buffers, Weights, containers, reachable_scalers, step_back
from safe_trainer.utils import rng, tracer

__all__ = ["Action", "Attempt", "Buffers", "Guard", "needs_closure", "norm_of", "reachable_scalers", "strangers",
           "without_update"]  # fmt: skip

log = logging.getLogger(__name__)

MAX_REPLAYS = 3
"""Trips that are replayed: a replay costs some ten steps, and the fourth tells what the first three told."""

Replay = Callable[[Any], Any]
"""Runs forward and backward of a batch again, and returns the loss."""


class Action(Enum):
    """What the loop has to do after a trip."""

    go_on = "go_on"
    rollback = "rollback"
    stop = "stop"


class Guard:
    """The fuse. `begin` before a step; `holds` before the optimizer moves; `trip` when it must not.

    For a step that is not ours, `gate` stands in every optimizer's step as a pre-hook and drops non-finite gradients:
    an optimizer that finds no gradient leaves weights and state untouched.

    Args:
        restorable: what a rollback takes back besides model and optimizers: scheduler, average, scaler.
        loss: the loss function; the buffers of one that is a module are guarded like the model's.
        step: the user's own step, if there is one: what it counts for itself must not count a replay.
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
        loss: Any = None,
        step: Callable[..., Any] | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.optimizers = list(optimizers)
        self.on_fault = on_fault
        self.folder = folder
        self.step = step
        self.findings: list[Finding] = []
        self.skipped: list[int] = []
        self.in_a_row = 0
        self.rollbacks = 0
        self.applied = 0
        self.replaying = False
        self.gate_tripped = False
        self.dropped = False
        """Whether the gate took an optimizer's gradients away in the present step, be it for a normal overflow."""
        self.moves = 0
        """How often the optimizers moved within the present step of the user's own."""
        self._modules = [model, loss] if isinstance(loss, nn.Module) else [model]
        # two: a late flag is read when the next step has begun
        self._attempts = [Attempt(Buffers(*self._modules)) for _ in range(2)]
        self._turn = 0
        self._rolling = Weights(model, optimizers, restorable) if config.nonfinite is Nonfinite.rollback else None
        self._undo = Weights(model, optimizers) if self._moves_before_it_knows() else None
        self._repeats: dict[tuple[str, str | None, str | None], int] = {}
        self._gated = False
        self._losses: list[Tensor] = []
        """What backward was called on since an optimizer moved last."""
        self._waiting: Finding | None = None
        self._bad_from_start = set(bad_weights(self._weights())) if config.enabled else set()

    def _moves_before_it_knows(self) -> bool:
        """Whether weights can move before the flag is known: several optimizers, or one that evaluates the model."""
        return len(self.optimizers) > 1 or any(map(needs_closure, self.optimizers))

    # --- around a step -------------------------------------------------------------------------------------------

    def begin(self, step: int, batch: Any) -> Attempt:
        """Remember the generators and buffers before the step."""
        self._turn ^= 1
        attempt = self._attempts[self._turn]
        attempt.begin(step, batch)
        if self._gated:
            self._waiting = None  # the optimizer has moved since: what waited was finite after all
        self.gate_tripped, self.dropped, self._gated, self.moves, self._losses = False, False, False, 0, []
        if self._undo is not None:
            self._undo.take()
            self._undo.confirm()
        return attempt

    def holds(self, loss: Tensor, norm: Tensor | float | None, gradients: Sequence[Tensor]) -> bool:
        """Whether loss and gradients are finite. Waits for the device once.

        Args:
            norm: global gradient norm, shared with clipping; a norm can overflow while every gradient is finite,
                so a bad one is looked at element by element.
        """
        if norm is None or isinstance(norm, float):
            finite = math.isfinite(loss.item() + (norm or 0.0))
        else:
            finite = math.isfinite((loss.detach() + norm).item())
        if finite:
            return True
        return bool(torch.isfinite(loss.detach()).all()) and all_finite(gradients)

    def passed(self, step: int) -> None:
        """A step was finite and has been applied."""
        self.in_a_row = 0
        self.applied += 1
        for attempt in self._attempts:
            if attempt.step == step:
                attempt.let_go()
        if self._rolling is not None:
            self._rolling.confirm()
            if step == 1 or step % self.config.snapshot_every == 0:
                self._rolling.take()

    # --- the gate in a step that is not ours ---------------------------------------------------------------------

    def gate(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Step pre-hook: drop all gradients of this optimizer if one is not finite; after its closure if it has one."""
        if self.replaying:
            return None
        behind_closure = after_closure(args, kwargs, lambda _: self._judge(optimizer))
        if behind_closure is None:
            self._judge(optimizer)
        return behind_closure

    def _judge(self, optimizer: Optimizer) -> None:
        self._gated = True
        parameters = [parameter for parameter in held(optimizer) if parameter.grad is not None]
        overflow = getattr(optimizer, "found_inf", None)  # a GradScaler's own flag, which it hands to a fused optimizer
        if isinstance(overflow, Tensor):
            drop = bool(overflow)  # normal, and no trip; but a fused SGD would leave its first momentum uninitialised
        else:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            device = gradients[0].device if gradients else None
            drop = not all_finite([*gradients, *(loss.reshape(1).to(device) for loss in self._losses)])
            self.gate_tripped |= drop
        self._losses = []
        self.moves += not drop
        self.dropped |= drop
        for parameter in parameters if drop else ():
            parameter.grad = None

    def install_gate(self) -> list[Any]:
        """Put the gate into every optimizer, and listen to what backward is called on; the handles end both."""
        return [Ears(self._hear), *(optimizer.register_step_pre_hook(self.gate) for optimizer in self.optimizers)]

    def _hear(self, loss: Tensor) -> None:
        """A non-finite loss can have finite gradients: the step may not move the weights by those either."""
        if not self.replaying:
            self._losses.append(loss)

    def look_at_waiting(self, attempt: Attempt, replay: Replay) -> None:
        """After a step of the user's own that only added to the gradients: replay it at once if they are bad now.

        The optimizer will trip over them in a later step, whose own batch is innocent. Until then nothing is told: a
        scaler that nobody can see may know of the overflow.
        """
        if self._gated or self._waiting is not None or len(self.skipped) >= MAX_REPLAYS:
            return
        gradients = [(p, p.grad) for p in self._weights().values() if p.grad is not None]
        if all_finite([gradient for _, gradient in gradients]):
            return
        after, generators = Buffers(*self._modules), rng.capture()
        after.take()
        self._drop_gradients()
        finding, named, _ = self._name(attempt, replay, None)
        after.restore()
        rng.restore(generators)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._waiting = finding if named else None

    # --- when it blows -------------------------------------------------------------------------------------------

    def trip(
        self, attempt: Attempt, replay: Replay | None, *, error: BaseException | None = None
    ) -> tuple[Finding, Action]:
        """Undo what the step left behind, name what made it non-finite, and say what is to happen.

        Args:
            replay: runs the very same forward and backward of a batch again and returns the loss; None if that is not
                possible.
            error: what autograd's anomaly mode raised, if that is how the step was caught.
        """
        self.in_a_row += 1
        self.skipped.append(attempt.step)
        self._drop_gradients()
        attempt.buffers.restore()
        if self._undo is not None:
            self._undo.restore()
        lasting = False
        after = rng.capture()  # the generators go on from where the step left them, as if it had been applied
        if len(self.skipped) <= MAX_REPLAYS or not self.findings:
            finding, named, lasting = self._name(attempt, replay, error)
            if not named and self._waiting is not None:
                told = (
                    f"{self._waiting.evidence}; its gradients waited until the optimizer's step in step {attempt.step}"
                )
                finding = replace(self._waiting, evidence=told)
        else:
            finding = replace(self.findings[-1], step=attempt.step)
        rng.restore(after)
        action = self._decide(lasting)
        finding = replace(finding, severity=Severity.warning if self._is_wanted(action) else Severity.error)
        return self._merge(finding), action

    def check_weights(self, step: int) -> tuple[Finding, Action] | None:
        """At the end of an epoch: a weight that the last step made non-finite, since no step came that could trip.

        Waits for the device. Weights that were infinite when the run began are let be.
        """
        weights = self._weights()
        bad = [name for name in bad_weights(weights) if name not in self._bad_from_start]
        if not bad or any(finding.where == bad[0] for finding in self.findings):
            return None
        poison = explain(bad[0], weights[bad[0]], self.optimizers, self.applied)
        finding, action = finding_of_weight(bad[0], len(bad) - 1, step, poison), self._decide(lasting=True)
        return self._merge(finding), action

    def _name(self, attempt: Attempt, replay: Replay | None, error: BaseException | None) -> tuple[Finding, bool, bool]:
        """What the replay shows; whether that names the culprit; whether it is one that no other batch can mend."""
        weights, trace = self._weights(), None
        known = Circumstances(
            step=attempt.step, batch=describe_batch(attempt.batch), error=error, changed=attempt.changed(),
            moves=0 if self._undo is not None else self.moves, tripped=self.gate_tripped,
            poisons={n: explain(n, weights[n], self.optimizers, self.applied) for n in bad_weights(weights)},
        )  # fmt: skip
        if self.folder is not None:
            save_attempt(self.folder, attempt.batch, self.model, attempt.generators, known)
        if replay is not None:
            ways_back = [] if self.step is None else step_back(self.step, self.model, self.optimizers)
            trace = self._replayed(attempt, replay)
            for back in ways_back:
                back()
        culprit = trace.culprit if trace is not None else None
        lasting = culprit is not None and culprit.kind in ("parameter", "buffer")
        return finding_from_trace(trace, known), culprit is not None, lasting

    def _replayed(self, attempt: Attempt, replay: Replay) -> tracer.Trace | None:
        attempt.generators.restore()
        step = without_update(lambda: replay(containers(attempt.batch)), self.optimizers)
        self.replaying = True
        try:
            return tracer.trace(
                step, model=self.model, batch=attempt.batch, watched=strangers(self.model, self.optimizers)
            )
        except Exception:  # whatever it is, it must not hide the fault
            log.warning("The tracer failed on step %d; please report this.", attempt.step, exc_info=True)
            return None
        finally:
            self.replaying = False
            self._drop_gradients()
            attempt.buffers.restore()
            if self._undo is not None:
                self._undo.restore()

    def _weights(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **strangers(self.model, self.optimizers)}

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _decide(self, lasting: bool = False) -> Action:
        """What is to happen.

        Args:
            lasting: a weight or a buffer is non-finite: dropping batches would drop every one of them.
        """
        if self.in_a_row >= self.config.max_skips:
            return Action.stop
        if self.config.nonfinite is Nonfinite.stop:
            return Action.stop if self.on_fault is OnFault.stop else Action.go_on
        if self._rolling is not None:
            if self.rollbacks >= self.config.max_rollbacks:
                return Action.stop
            if self._rolling.restore():
                self.rollbacks += 1
                self._lower_rates()
                return Action.rollback
        return Action.stop if lasting else Action.go_on

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
                evidence += f"{self._repeats[key]} steps in all"
                evidence += f", the first {MAX_REPLAYS} replayed]" if len(self.skipped) > MAX_REPLAYS else "]"
                self.findings[index] = replace(earlier, evidence=evidence, severity=finding.severity)
                return self.findings[index]
        self.findings.append(finding)
        return finding

    # --- what a checkpoint keeps -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counts and findings, of plain types."""
        return {
            "skipped": list(self.skipped),
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
            "applied": self.applied,
            "repeats": [[*key, count] for key, count in self._repeats.items()],
            "findings": [finding.state_dict() for finding in self.findings],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where an earlier run stood."""
        self.skipped, self.in_a_row, self.rollbacks = list(state["skipped"]), state["in_a_row"], state["rollbacks"]
        self.applied = state["applied"]
        self._repeats = {(fault, where, source): count for fault, where, source, count in state["repeats"]}
        self.findings = [Finding(**kept) for kept in state["findings"]]
