"""One look at one training step: which gradients came, which were used, which weights have moved. Changes no tensor.

Figures stay on the device until the step is over and come to the host in one copy.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safe_trainer.utils.forward_watch import OwnHook
from safe_trainer.utils.measured_step import norms
from safe_trainer.utils.measures import plain
from safe_trainer.utils.program_record import Look, ParameterFacts, Record

__all__ = ["ProgramLook", "Weights"]

SAMPLE = 4096
"""Weights of a half-precision parameter that are remembered, evenly spread over it."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HALF = (torch.float16, torch.bfloat16)


class Weights:
    """What the weights were at the first look: a checksum of their bits, and of half precision a sample."""

    def __init__(self) -> None:
        self.checksums: dict[str, int] = {}
        self.samples: dict[str, Tensor] = {}
        self.touched: dict[str, Tensor] = {}
        """Which weights of the sample have had a gradient."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors by name."""
        return {
            "checksums": dict(self.checksums),
            "samples": {name: sample.clone() for name, sample in self.samples.items()},
            "touched": {name: touched.clone() for name, touched in self.touched.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` wrote."""
        self.checksums = dict(state["checksums"])
        self.samples, self.touched = dict(state["samples"]), dict(state["touched"])


class ProgramLook:
    """Hooks for one step: `attach` before it, `finish` after it, `detach` come what may."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        record: Record,
        look: Look,
        weights: Weights,
        compiled: bool = False,
    ) -> None:
        self.model, self.optimizers, self.record, self.look, self.weights = model, optimizers, record, look, weights
        self.parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not isinstance(parameter, nn.parameter.UninitializedParameter)
        }
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._compiled = compiled
        self._handles: list[Any] = []
        self._arrived: dict[str, Tensor | None] = {}
        self._used: dict[str, Tensor] = {}
        self._versions: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._present: set[str] = set()
        self._scale: Tensor | float = 1.0
        self._checksums: dict[str, Tensor] = {}
        self._calls: dict[str, bool] = {}
        self._shares: dict[str, tuple[Tensor, Tensor]] = {}
        self._weight_norms: list[Tensor] = []

    @torch.no_grad()
    def attach(self) -> None:
        """Hooks on, and the weights compared with those of the first look."""
        self._list()
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and parameter.is_leaf:
                hook = partial(self._gradient, name)
                handle = parameter.register_post_accumulate_grad_hook(hook)
                self._handles.append(handle)
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        for path, module in self._suspects():
            self._handles.append(module.register_forward_hook(OwnHook(partial(self._called, path))))
        self._compare()

    def detach(self) -> None:
        """Every hook off."""
        while self._handles:
            self._handles.pop().remove()

    def _list(self) -> None:
        held = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        known = self.record.parameters
        for name, parameter in self.parameters.items():
            if name not in known:
                dtype = str(parameter.dtype).removeprefix("torch.")
                known[name] = ParameterFacts(name, list(parameter.shape), dtype)
            known[name].trainable, known[name].held = parameter.requires_grad, id(parameter) in held
        for facts, optimizer in zip(self.record.optimizers, self.optimizers, strict=True):
            theirs = [p for group in optimizer.param_groups for p in group["params"]]
            facts.known = sum(id(p) in self.names for p in theirs)
            facts.strangers = len(theirs) - facts.known

    def _suspects(self) -> list[tuple[str, nn.Module]]:
        """Modules of their own weights that no gradient has reached so far; compiled ones must get no new hooks."""
        if self._compiled:
            return []
        paths = {
            name.rpartition(".")[0]
            for name, facts in self.record.parameters.items()
            if facts.trainable and not facts.arrived and name in self.parameters
        }
        return [(path, self.model.get_submodule(path)) for path in paths]

    def _compare(self) -> None:
        """Checksums of all weights; of half-precision samples, how much is as it was."""
        weights = {name: w for name, p in self.parameters.items() if (w := plain(p.detach())) is not None}
        trainable = [w for name, w in weights.items() if self.parameters[name].requires_grad and w.itemsize >= 4]
        self._weight_norms = list(torch._foreach_norm(trainable)) if trainable else []
        for name, weight in weights.items():
            if not self.record.parameters[name].moved and weight.element_size() in _BITS:
                self._checksums[name] = weight.view(_BITS[weight.element_size()]).sum(dtype=torch.int64)
            if self.parameters[name].dtype in _HALF:
                self._sample(name, weight)

    def _sample(self, name: str, weight: Tensor) -> None:
        now, kept = _sampled(weight), self.weights.samples.get(name)
        if kept is None or kept.shape != now.shape:
            self.weights.samples[name] = now.clone()
            self.weights.touched[name] = torch.zeros_like(now, dtype=torch.bool)
            return
        touched = self.weights.touched[name].to(now.device)
        self._shares[name] = ((kept.to(now.device) == now).logical_and(touched).sum(), touched.sum())

    # --- hooks -------------------------------------------------------------------------------------------------------

    def _called(self, path: str, module: nn.Module, arguments: Any, output: Any) -> None:
        self._calls[path] = self._calls.get(path, False) or torch.is_grad_enabled()

    @torch.no_grad()
    def _gradient(self, name: str, parameter: Tensor) -> None:
        """A backward pass has added to this gradient."""
        gradient = plain(parameter.grad)
        self._arrived[name] = None if gradient is None else _norm(gradient)

    def _before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if not any(callable(entry) for entry in (*arguments[1:], *options.values())):
            self._take(optimizer)
            self._scale = _loss_scale()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if any(callable(entry) for entry in (*arguments[1:], *options.values())):
            self._take(optimizer)  # a closure: its gradients were made within the step
        for name, parameter in self._held(optimizer):
            if parameter.grad is not None:
                self._versions[name] = (weakref.ref(parameter.grad), parameter.grad._version)

    @torch.no_grad()
    def _take(self, optimizer: Optimizer) -> None:
        """The gradients that the optimizer uses."""
        self._seen_strangers(optimizer)
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._held(optimizer):
            if parameter.grad is None:
                continue
            self._present.add(name)
            gradient = plain(parameter.grad)
            if gradient is None:
                continue
            gradients[name] = gradient
            touched = self.weights.touched.get(name)
            if touched is not None:
                sample = _sampled(gradient) != 0
                self.weights.touched[name] = touched.to(sample.device).logical_or(sample)
        self._used.update(zip(gradients, norms(list(gradients.values())), strict=True) if gradients else ())

    def _seen_strangers(self, optimizer: Optimizer) -> None:
        facts = self.record.optimizers[list(map(id, self.optimizers)).index(id(optimizer))]
        theirs = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self.names]
        facts.strangers_with_gradient = max(facts.strangers_with_gradient, sum(p.grad is not None for p in theirs))

    def _held(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        return [
            (self.names[id(p)], p) for group in optimizer.param_groups for p in group["params"] if id(p) in self.names
        ]

    # --- afterwards --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """All figures to the host, in one copy each of whole numbers and of others; the look is complete."""
        left = self._left()
        self._read_bits()
        numbers = _Numbers()
        scale = numbers.put(self._scale)
        arrived = {name: numbers.put(norm) for name, norm in self._arrived.items() if norm is not None}
        used = {name: numbers.put(norm) for name, norm in self._used.items()}
        left_norms = [numbers.put(norm) for norm in left]
        weights = [numbers.put(norm) for norm in self._weight_norms]
        shares = {name: (numbers.put(same), numbers.put(of)) for name, (same, of) in self._shares.items()}
        read = numbers.read()
        look = self.look
        factor = 1.0 / (read(scale) or 1.0)
        values = {name: read(place) for name, place in used.items()}
        look.norm_arrived = _length([read(place) * factor for place in arrived.values()])
        look.norm_used = _length(values.values()) if values else None
        look.norm_left = _length(map(read, left_norms)) if left_norms else None
        look.weight_norm = _length(map(read, weights)) or 0.0
        look.largest = max(values, key=lambda name: values[name], default=None)
        for name, (same, of) in shares.items():
            self.record.parameters[name].unchanged = read(same) / read(of) if read(of) else None
        self._note_gradients({name for name, value in values.items() if value != 0})

    def _note_gradients(self, nonzero: set[str]) -> None:
        look, parameters = self.look, self.record.parameters
        look.trainable = sum(parameter.requires_grad for parameter in self.parameters.values())
        look.arrived, look.present, look.nonzero = len(self._arrived), len(self._present), len(nonzero)
        if not self._arrived:
            return
        for name, parameter in self.parameters.items():
            facts, path = parameters[name], name.rpartition(".")[0]
            facts.looks += parameter.requires_grad
            facts.arrived += name in self._arrived
            facts.used += name in nonzero
            facts.called += path in self._calls
            facts.called_blind += not self._calls.get(path, True)

    def _left(self) -> list[Tensor]:
        """Lengths of gradients that were written to after the optimizer had used them, and not taken away."""
        written = []
        for name, (seen, version) in self._versions.items():
            gradient = self.parameters[name].grad
            if gradient is not None and seen() is gradient and gradient._version != version:
                written.append(plain(gradient))
        return [_norm(dense) for dense in written if dense is not None]

    def _read_bits(self) -> None:
        if not self._checksums:
            return
        device = next(iter(self._checksums.values())).device
        sums = torch.stack([checksum.to(device) for checksum in self._checksums.values()]).tolist()
        for name, checksum in zip(self._checksums, sums, strict=True):
            first = self.weights.checksums.setdefault(name, checksum)
            self.record.parameters[name].moved |= first != checksum


class _Numbers:
    """Numbers of several devices and kinds, for one transfer."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def put(self, value: Tensor | float) -> int:
        self._tensors.append(value if isinstance(value, Tensor) else torch.tensor(value))
        return len(self._tensors) - 1

    def read(self) -> Callable[[int], float]:
        devices = {tensor.device for tensor in self._tensors}
        device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        flat = [tensor.reshape(()).to(device, torch.float32, non_blocking=True) for tensor in self._tensors]
        numbers: list[float] = torch.stack(flat).tolist()
        return numbers.__getitem__


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.itemsize < 4 else None)
    return norm


def _length(parts: Any) -> float | None:
    squares = [part * part for part in parts]
    return float(sum(squares) ** 0.5) if squares else None


def _sampled(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE]


def _loss_scale() -> Tensor | float:
    """What a GradScaler that is calling the optimizer has multiplied the loss by."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            break
        scaler = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "_maybe_opt_step") else None
        if isinstance(scaler, torch.amp.GradScaler):
            scale = scaler._scale
            return 1.0 if scale is None else scale.clone()
        frame = frame.f_back
    return 1.0
