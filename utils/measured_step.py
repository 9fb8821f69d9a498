"""Hooks for one step: on when it begins, off when it ends, and what they saw in one array. Changes no tensor.

Forward hooks, `Tensor.register_hook` on outputs and step hooks of the optimizers; never full backward hooks, which
wrap outputs and so break modules that work in place, ReLU in torchvision's ResNet among them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from safe_trainer.utils.measurements import Numbers, Piece
from safe_trainer.utils.measures import (
    Saturation,
    activation,
    floats,
    functional_saturation,
    gradient,
    layout,
    never_negative,
    parameter_gradient,
    plain,
    saturation,
)

__all__ = ["Layer", "MeasuredStep", "to_host"]

FUNCTIONS = {
    "ReluBackward0": "relu()", "SigmoidBackward0": "sigmoid()", "TanhBackward0": "tanh()", "GeluBackward0": "gelu()",
    "SiluBackward0": "silu()", "LeakyReluBackward0": "leaky_relu()", "EluBackward0": "elu()",
    "SoftmaxBackward0": "softmax()", "HardtanhBackward0": "hardtanh()", "HardsigmoidBackward0": "hardsigmoid()",
    "HardswishBackward0": "hardswish()",
}  # fmt: skip
"""Activation functions that a module of several parts may end with, by what autograd calls them."""
CHANNELS_LAST_IN_SHAPE = (
    nn.Linear,
    nn.Bilinear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Embedding,
    nn.RNNBase,
    nn.MultiheadAttention,
)
MOST_OUTPUTS = 16
"""Tensors of one output that get a gradient hook."""


@dataclass(frozen=True)
class Layer:
    """A module to watch."""

    name: str
    module: nn.Module
    whole: bool
    """Measured at every call; the others only where they end with an activation function of their own."""


@dataclass
class MeasuredStep:
    """What is recorded during one step. `attach` before it, `detach` after it, come what may, then `collect`."""

    layers: Sequence[Layer]
    parameters: Mapping[str, nn.Parameter]
    optimizers: Sequence[Optimizer]
    loss_scale: Tensor | float | None = None
    calls: dict[str, list[Piece]] = field(default_factory=dict)
    gradients: dict[str, list[Piece]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)
    """Layers with an output that is part of the graph."""
    parameter_gradients: dict[str, Piece] = field(default_factory=dict)
    stepped: bool = False
    _handles: list[Any] = field(default_factory=list)
    _before: list[Tensor] = field(default_factory=list)
    _following: tuple[int, int] | None = None
    _latest: weakref.ref[Tensor] | None = None
    _gradient_scale: Tensor | None = None
    weight_norms: Sequence[Any] = ()
    update_norms: Sequence[Any] = ()

    @torch.no_grad()
    def attach(self) -> None:
        """Hooks on; a copy of the trainable weights is taken, and let go of in `collect`."""
        for layer in self.layers:
            self._handles.append(layer.module.register_forward_hook(partial(self._forward, layer)))
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        weights = [weight.detach() for weight in map(plain, self.parameters.values()) if weight is not None]
        if weights:
            self._before = [torch.empty_like(weight) for weight in weights]
            torch._foreach_copy_(self._before, weights)
            self.weight_norms = norms(weights)

    def detach(self) -> None:
        """Every hook off."""
        while self._handles:
            self._handles.pop().remove()

    @torch.no_grad()
    def _forward(self, layer: Layer, module: nn.Module, arguments: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        tensors = list(islice(floats(output), MOST_OUTPUTS))
        if not tensors:
            return
        first, name = tensors[0], layer.name
        node = first.grad_fn
        if not layer.whole:
            if node is None or node.name() not in FUNCTIONS or (self._latest and self._latest() is first):
                return  # handed through what a part returned, or nothing that is an activation for certain
            self.kinds.setdefault(name, FUNCTIONS[node.name()])
        self.kinds.setdefault(name, type(module).__name__)
        unit = self._unit(module, first)
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint runs it again, inside of backward
            self._latest = weakref.ref(first)
            flat = saturation(module) or (functional_saturation(node) if node is not None else None)
            self._activation(name, first, unit, flat, never_negative(module, node))
        for tensor in tensors:
            if tensor.requires_grad:
                self.needs.add(name)
                of = unit if tensor is first else self._unit(module, tensor)
                hook = partial(self._backward, name, of)
                self._handles.append(tensor.register_hook(hook))

    def _activation(self, name: str, output: Tensor, unit: int | None, flat: Saturation | None, positive: bool) -> None:
        dense = plain(output.detach())
        assert dense is not None  # `floats` hands out no others
        sides = tuple(dense.shape)
        shape = layout(sides, unit)
        vectors, scalars, size = activation(dense, shape, flat, nonnegative=positive)
        self.calls.setdefault(name, []).append(Piece(vectors, scalars, sides, shape, size, flat, dense.numel()))

    @torch.no_grad()
    def _backward(self, name: str, unit: int | None, incoming: Tensor) -> None:
        dense = plain(incoming)
        if dense is None:
            return
        sides = tuple(dense.shape)
        shape = layout(sides, unit)
        vectors, scalars, size = gradient(dense, shape)
        self.gradients.setdefault(name, []).append(Piece(vectors, scalars, sides, shape, size, None, dense.numel()))

    def _unit(self, module: nn.Module, output: Tensor) -> int | None:
        """Dimension of channels or features. What has none of its own follows the layer that ran before it."""
        sides = output.dim()
        if sides < 2:
            return None
        own: int | None = None
        if isinstance(module, _ConvNd):
            own = sides - len(module.kernel_size) - 1
        elif isinstance(module, (_NormBase, nn.GroupNorm)):
            own = 1
        elif isinstance(module, nn.LayerNorm) and output.shape[-1] != module.normalized_shape[-1]:
            own = 1  # a LayerNorm for pictures that turns the channels to the end and back
        elif isinstance(module, CHANNELS_LAST_IN_SHAPE):
            own = sides - 1
        if own is not None:
            self._following = (own, sides)
            return own
        if self._following is not None and self._following[1] == sides:
            return self._following[0]
        return 1 if sides > 3 else sides - 1

    def _before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """Right before the update gradients are what the optimizer uses: unscaled, clipped, not yet set to zero."""
        if any(callable(entry) for entry in (*arguments, *options.values())):
            return  # a closure: its gradients are made inside of the step, and taken at the end
        self._gradient_scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer under a GradScaler
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._parameter_gradients({name: p for name, p in self.parameters.items() if id(p) in held})

    def _after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        self.stepped = True

    @torch.no_grad()
    def _parameter_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            dense = plain(parameter.grad)
            if dense is None:
                continue
            vectors, scalars = parameter_gradient(dense)
            shape = layout(tuple(dense.shape), 0 if dense.dim() > 1 else None)
            size = dense.numel() if scalars else 0
            self.parameter_gradients[name] = Piece(vectors, scalars, tuple(dense.shape), shape, size)

    @torch.no_grad()
    def collect(self, buffer: Tensor | None) -> tuple[Tensor | None, float, float]:
        """Bring all numbers to the host, into the pieces; the buffer is handed back for the next time.

        Returns also what outputs' and parameters' gradients are to be divided by.
        """
        self._parameter_gradients({n: p for n, p in self.parameters.items() if n not in self.parameter_gradients})
        weights = [weight.detach() for weight in map(plain, self.parameters.values()) if weight is not None]
        moved = len(weights) == len(self._before) > 0 and (self.stepped or not self.optimizers)
        if moved:
            torch._foreach_sub_(self._before, weights)
        updates = norms(self._before) if moved else []
        self._before = []
        scales = (self.loss_scale, self._gradient_scale)
        heads = [*self.weight_norms, *updates, *(scale.reshape(()) for scale in scales if isinstance(scale, Tensor))]
        pieces = [piece for group in (self.calls, self.gradients) for entries in group.values() for piece in entries]
        pieces += self.parameter_gradients.values()
        buffer, numbers = _transfer(heads, pieces, buffer)
        rest = iter(numbers)
        self.weight_norms, self.update_norms = list(islice(rest, len(weights))), list(islice(rest, len(updates)))
        loss_scale, gradient_scale = (next(rest) if isinstance(scale, Tensor) else scale or 1.0 for scale in scales)
        return buffer, loss_scale, gradient_scale


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """Euclidean norm of each, in float32 at least."""
    if all(tensor.itemsize >= 4 for tensor in tensors):
        return list(torch._foreach_norm(tensors))
    return [torch.linalg.vector_norm(tensor, dtype=_wide(tensor)) for tensor in tensors]


def _wide(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.itemsize < 4 else None


def _transfer(heads: list[Tensor], pieces: list[Piece], buffer: Tensor | None) -> tuple[Tensor | None, list[float]]:
    """Fill the pieces' numbers; returns the buffer and the numbers of `heads`."""
    scalars = [*heads, *(scalar for piece in pieces for scalar in piece.scalars)]
    vectors = [vector for piece in pieces for vector in piece.vectors]
    if not scalars and not vectors:
        return buffer, []
    devices = {tensor.device for tensor in (*scalars, *vectors)}
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    parts = [torch.stack([_at(scalar, device) for scalar in scalars])] if scalars else []
    parts += [_at(vector, device) for vector in vectors]
    size = sum(part.numel() for part in parts)
    if buffer is None or buffer.numel() < size or buffer.device != device:
        buffer = torch.empty(size, dtype=torch.float32, device=device)
    torch.cat(parts, out=buffer[:size])
    numbers = to_host(buffer[:size])
    values, end = numbers[: len(scalars)].tolist(), len(scalars)
    place = len(heads)
    for piece in pieces:
        parted = []
        for vector in piece.vectors:
            parted.append(numbers[end : end + vector.numel()])
            end += vector.numel()
        begin, place = place, place + len(piece.scalars)
        piece.fill(parted, values[begin:place])
    return buffer, values[: len(heads)]


def _at(tensor: Tensor, device: torch.device) -> Tensor:
    """Mostly as it is; on one accelerator if the model is spread over several, for only there nothing need wait."""
    return tensor.to(device, torch.float32, non_blocking=device.type != "cpu")


def to_host(numbers: Tensor) -> Numbers:
    """All numbers of a measured step in one copy: the only place where the host waits for the device."""
    on_host: Numbers = numbers.cpu().numpy()
    return on_host.copy() if numbers.device.type == "cpu" else on_host  # there it is the buffer itself


def compiled(module: nn.Module) -> bool:
    """Whether calls of this module run compiled code, which knows nothing of hooks attached later."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled without it
        return False
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
