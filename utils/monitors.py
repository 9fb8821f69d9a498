"""Monitors: see every layer of a network in training at almost no cost. Changes nothing that training computes.

Steps 1, 10, 30 and every 100th are measured: hooks go on for that step and off after it; all other steps pay nothing.

>>> import torch
>>> from torch import nn
>>> from safe_trainer.utils.monitors import Monitors
>>> _ = torch.manual_seed(0)
>>> model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> monitors = Monitors(model, optimizer, every=20)
>>> for step in range(1, 41):
...     inputs = torch.randn(64, 10)
...     with monitors.measured(step):
...         loss = nn.functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long())
...         optimizer.zero_grad()
...         loss.backward()
...         optimizer.step()
...     monitors.note_loss(loss)
>>> [measurement.step for measurement in monitors.read()]
[1, 10, 20, 30, 40]
>>> relu = monitors.history[-1].layers["1"]
>>> relu.kind, relu.units, relu.inactive_share
('ReLU', 32, 0.0)
>>> 1e-4 < monitors.history[-1].parameters["0.weight"].update_ratio < 0.1
True

`monitors.report()` prints all of it as tables.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safe_trainer.utils.measured_step import Layer, MeasuredStep, compiled, to_host
from safe_trainer.utils.measurements import Mask, Measurement, read_layer, read_parameter, thinned
from safe_trainer.utils.measures import plain

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Monitors"]

HISTORY = 128
"""Measurements kept; of the older half every second goes when it is full, so the whole run stays in sight."""
LOSSES = 2000
"""Latest losses kept for the report."""
_NOTHING = nullcontext()
_HANDS_THROUGH = (
    nn.Identity, nn.Flatten, nn.Unflatten, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList,
    nn.ParameterDict, nn.modules.dropout._DropoutNd,
)  # fmt: skip
"""Not measured: what comes out is what another layer put in, here and there set to zero on purpose."""


class Monitors:
    """Statistics of activations, gradients, weights and updates of measured steps, kept as plain numbers.

    Measured are leaf modules (but not those that hand their input on: dropout, flatten, identity), modules whose class
    name matches `layers`, and modules of several parts that end with an activation function of their own
    (``return torch.relu(x + y)``), known by what autograd recorded. Integer, complex and sparse values are left out.
    The first dimension of an output is taken for the batch.

    Gradients of outputs are those that arrive in backward. Gradients of parameters are taken right before the
    optimizer uses them, or without an `optimizer` at the end of the step, which must not have cleared them then.

    Args:
        model: modules and parameters are listed once, here; call `prepare` after you exchange some.
        optimizer: one or several; they tell whether a step was made, and when gradients are ready.
        every: steps between two measured ones; 0 switches the monitors off.
        first: further steps to measure, counted from 1: most faults show at once.
        layers: regular expression for class names of modules with parts of their own that are measured too. A
            MultiheadAttention, the default, uses its parts without calling them.

    Raises:
        ValueError: `every` is negative.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        every: int = 100,
        first: tuple[int, ...] = (1, 10, 30),
        layers: str = "MultiheadAttention",
    ) -> None:
        if every < 0:
            raise ValueError(f"every must be 0 (off) or more steps (got {every})")
        self.model, self.every, self.first, self.layers = model, every, first, layers
        given = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
        self.optimizers: tuple[Optimizer, ...] = given
        self.history: list[Measurement] = []
        """Of the whole run, oldest first; the far past is thinned out."""
        self._unread: deque[Measurement] = deque(maxlen=HISTORY)
        self._window: dict[str, Mask] = {}
        self._window_steps = 0
        self._losses: deque[float | Tensor] = deque(maxlen=LOSSES)
        self._buffer: Tensor | None = None
        self._measuring = False
        self._record: MeasuredStep | None = None
        self.prepare()

    def prepare(self) -> None:
        """List the model's modules and parameters anew."""
        inner = getattr(self.model, "_orig_mod", self.model)  # of a compiled model
        self._layers = [
            Layer(name or "(model)", module, self._whole(module))
            for name, module in inner.named_modules()
            if not isinstance(module, (*_HANDS_THROUGH, torch.jit.ScriptModule))
        ]
        self._parameters: dict[str, nn.Parameter] = dict(inner.named_parameters())

    def due(self, step: int) -> bool:
        """Whether this step, counted from 1, is to be measured."""
        return self.every > 0 and (step % self.every == 0 or step in self.first)

    def measured(
        self, step: int, *, loss_scale: Tensor | float | None = None, eager: bool = False
    ) -> AbstractContextManager[None]:
        """Context for forward, backward and the optimizer's step of one step; it does nothing if that is not due.

        If the body raises, the hooks go and nothing is recorded. Within a measured step a further one does nothing.

        Args:
            step: counted from 1.
            loss_scale: what the loss was multiplied by before backward, such as ``scaler._scale`` of a GradScaler: a
                tensor is read at the end and costs no wait.
            eager: the body calls a compiled model uncompiled, so that its hooks can be used.
        """
        return self.measure(step, loss_scale=loss_scale, eager=eager) if self.due(step) else _NOTHING

    def measure(
        self, step: int, *, loss_scale: Tensor | float | None = None, eager: bool = False
    ) -> AbstractContextManager[None]:
        """The same for a step that need not be due."""
        return _NOTHING if self._measuring else self._measure(step, loss_scale, eager)

    def drop(self) -> None:
        """Within a measured step: hooks off now, and nothing of it is kept. The step is being undone."""
        if self._record is not None:
            self._record.detach()
            self._record = None

    def kept(self, step: int) -> bool:
        """Whether there is a measurement of this step."""
        return bool(self.history) and self.history[-1].step == step

    @contextmanager
    def _measure(self, step: int, loss_scale: Tensor | float | None, eager: bool) -> Iterator[None]:
        layers = self._layers if eager else self._reachable()
        trainable = {name: p for name, p in self._parameters.items() if p.requires_grad and _has_norm(p)}
        record = MeasuredStep(layers, trainable, self.optimizers, loss_scale)
        self._measuring, self._record = True, record
        try:
            record.attach()
            yield
        finally:
            record.detach()
            kept, self._record, self._measuring = self._record is record, None, False
        if not kept:
            return
        self._buffer, of_outputs, of_parameters = record.collect(self._buffer)
        self._keep(step, record, of_outputs, of_parameters)

    def _reachable(self) -> list[Layer]:
        """Layers that do not run as part of compiled code."""
        if self.model is not getattr(self.model, "_orig_mod", self.model) or compiled(self.model):
            return []
        within = {id(part) for module in self.model.modules() if compiled(module) for part in module.modules()}
        return [layer for layer in self._layers if id(layer.module) not in within] if within else self._layers

    def _whole(self, module: nn.Module) -> bool:
        parts = [name for name, _ in module.named_children() if name != "parametrizations"]
        return not parts or re.fullmatch(self.layers, type(module).__name__) is not None

    def _keep(self, step: int, record: MeasuredStep, of_outputs: float, of_parameters: float) -> None:
        self._window_steps += 1
        layers = {}
        for name, calls in record.calls.items():
            layers[name], self._window[name] = read_layer(
                name,
                record.kinds[name],
                calls,
                record.gradients.get(name, []),
                self._window.get(name),
                needs=name in record.needs,
                scale=of_outputs,
            )
        updates = record.update_norms or [None] * len(record.parameters)
        parameters = {
            name: read_parameter(
                name, tuple(parameter.shape), weight, record.parameter_gradients.get(name), update, of_parameters
            )
            for (name, parameter), weight, update in zip(
                record.parameters.items(), record.weight_norms, updates, strict=True
            )
        }
        measurement = Measurement(
            step=step,
            window_steps=self._window_steps,
            layers=layers,
            parameters=parameters,
            notes=self._notes(record),
        )
        self.history = thinned([*self.history, measurement], HISTORY)
        self._unread.append(measurement)

    def _notes(self, record: MeasuredStep) -> tuple[str, ...]:
        notes = []
        hidden = len(self._layers) - len(record.layers)
        if hidden:
            notes.append(
                f"{hidden} of {len(self._layers)} modules run compiled, where hooks are ignored: their activations "
                "were not seen, their parameters were; measure a step without torch.compile to see both"
            )
        elif not record.calls:
            notes.append("no module of the model was called in this step: is the model that trains the one given here?")
        if record.parameters and not record.parameter_gradients:
            notes.append(
                "no parameter had a gradient"
                + ("" if self.optimizers else ": if the step clears them, give the monitors the optimizer")
            )
        if self.optimizers and not record.stepped:
            notes.append("the optimizer made no step, so there are no updates (gradients may be accumulating)")
        return tuple(notes)

    def read(self) -> list[Measurement]:
        """Measurements since the last read, oldest first; a new window of inactive units begins."""
        fresh = list(self._unread)
        self._unread.clear()
        self._window.clear()
        self._window_steps = 0
        return fresh

    def inactive_units(self) -> dict[str, Mask]:
        """For each layer which of its units put out nothing but zeros since the window began; shape (units,)."""
        return {name: mask.copy() for name, mask in self._window.items()}

    def note_loss(self, loss: Tensor | float) -> None:
        """Remember a step's loss for the report; nothing waits for the device."""
        self._losses.append(loss.detach().clone() if isinstance(loss, Tensor) else float(loss))

    def losses(self) -> list[float]:
        """The latest losses that were noted; those still on the device come over in one copy."""
        waiting = [loss.reshape(()) for loss in self._losses if isinstance(loss, Tensor)]
        if waiting:
            numbers = iter(to_host(torch.stack([loss.to(waiting[0].device).float() for loss in waiting])).tolist())
            known = [next(numbers) if isinstance(loss, Tensor) else loss for loss in self._losses]
            self._losses = deque(known, maxlen=LOSSES)
        return [float(loss) for loss in self._losses]

    def report(self, console: Console | None = None) -> None:
        """Print the health of loss, activations, gradients and updates as tables of the latest measured step."""
        from safe_trainer.utils.monitor_tables import print_report

        print_report(self.history, self.losses(), console)

    def state_dict(self) -> dict[str, Any]:
        """History, window and losses, in plain types and tensors."""
        return {
            "history": [measurement.state_dict() for measurement in self.history],
            "unread": [measurement.state_dict() for measurement in self._unread],
            "window": {name: torch.from_numpy(mask.copy()) for name, mask in self._window.items()},
            "window_steps": self._window_steps,
            "losses": self.losses(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where other monitors stood."""
        self.history = [Measurement.from_state(entry) for entry in state["history"]]
        self._unread = deque((Measurement.from_state(entry) for entry in state["unread"]), maxlen=HISTORY)
        self._window = {name: mask.numpy().copy() for name, mask in state["window"].items()}
        self._window_steps = state["window_steps"]
        self._losses = deque(state["losses"], maxlen=LOSSES)


def _has_norm(parameter: nn.Parameter) -> bool:
    """Whether a parameter is real and has a shape: a lazy layer makes its own at the first call."""
    return not isinstance(parameter, nn.parameter.UninitializedParameter) and plain(parameter.detach()) is not None
