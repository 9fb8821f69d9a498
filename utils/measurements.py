"""What one measured step told: plain figures per layer and per parameter, and how they are read off raw numbers.

Pure host code on what `measures` left in one array; it touches no tensor of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from safe_trainer.utils.measures import Layout, Saturation

__all__ = ["LayerStatistics", "Measurement", "ParameterStatistics", "Piece", "thinned"]

Numbers = NDArray[np.float32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStatistics:
    """One layer in one measured step, over all its calls. Shares lie in [0, 1]; None is 'does not apply'."""

    name: str
    """Dotted path; "(model)" for the model itself."""
    kind: str
    """Class of the module, or the operation that it ends with: "ReLU", "relu()"."""
    calls: int
    shape: tuple[int, ...]
    """Of the output of the first call; its first floating-point tensor, if there are several."""
    units: int
    """Channels or features; 1 if the output has none of its own."""
    mean: float
    std: float
    abs_max: float
    """Over every element; NaN or infinite as soon as one element is."""
    zero_share: float
    inactive_share: float
    """Units whose output was exactly zero for every sample and place of this step."""
    inactive_window_share: float
    """The same over all measured steps since the window began."""
    saturated_share: float | None
    """Outputs where the function is flat (derivative below 1e-3); of rows, for a softmax."""
    sample_spread: float | None
    """Standard deviation across the first dimension, at fixed places, over that of all elements: 0 if every sample
    gives the same output, about 1 if all variation is between samples. None for a batch of one or a constant."""
    needs_gradient: bool
    """Some output was part of the graph."""
    gradient_norm: float | None
    """Of the loss with respect to the outputs. None: no backward pass came by."""
    gradient_abs_max: float | None
    gradient_zero_share: float | None
    gradient_idle_share: float | None
    """Units whose every gradient was exactly zero: nothing that feeds them is trained through them."""

    @property
    def finite(self) -> bool:
        """Whether every output was."""
        return math.isfinite(self.abs_max)

    @property
    def root_mean_square(self) -> float:
        """Of the outputs."""
        return math.hypot(self.mean, self.std)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterStatistics:
    """One trainable parameter in one measured step."""

    name: str
    shape: tuple[int, ...]
    weight_norm: float
    """Before the step."""
    gradient_norm: float | None
    """Of the gradient that the optimizer was about to use (unscaled and clipped, if it was); None without one."""
    gradient_abs_max: float | None
    gradient_zero_share: float | None
    """Elements that are exactly zero."""
    gradient_idle_rows: float | None
    """Share of the entries of the first dimension (units, words of an embedding) whose gradient is zero as a whole;
    None for vectors."""
    update_norm: float | None
    """Of the change from the step's begin to its end; None if the optimizer did not step."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def update_ratio(self) -> float | None:
        """Norm of the update over norm of the weights; None for weights that were all zero, or without an update."""
        return self.update_norm / self.weight_norm if self.update_norm is not None and self.weight_norm else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """All layers, in the order they were first run, and all trainable parameters at one step."""

    step: int
    window_steps: int
    """Measured steps in the window of `inactive_window_share`, this one included."""
    layers: Mapping[str, LayerStatistics]
    parameters: Mapping[str, ParameterStatistics]
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    def state_dict(self) -> dict[str, Any]:
        """Plain types, one list per field."""
        layers = {entry.name: [getattr(layer, entry.name) for layer in self.layers.values()] for entry in _LAYER}
        parameters = {entry.name: [getattr(p, entry.name) for p in self.parameters.values()] for entry in _PARAMETER}
        rest = {"step": self.step, "window_steps": self.window_steps, "notes": list(self.notes)}
        return {**rest, "layers": layers, "parameters": parameters}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Measurement:
        """The measurement that `state_dict` was taken of."""
        return Measurement(
            step=state["step"],
            window_steps=state["window_steps"],
            notes=tuple(state["notes"]),
            layers={
                row["name"]: LayerStatistics(**row | {"shape": tuple(row["shape"])}) for row in _rows(state["layers"])
            },
            parameters={row["name"]: ParameterStatistics(**row) for row in _rows(state["parameters"])},
        )


_LAYER, _PARAMETER = fields(LayerStatistics), fields(ParameterStatistics)


def _rows(columns: Mapping[str, Sequence[Any]]) -> Iterable[dict[str, Any]]:
    for row in zip(*columns.values(), strict=True):
        named = dict(zip(columns, row, strict=True))
        yield named | {"shape": tuple(named["shape"])}


def thinned(history: list[Measurement], keep: int) -> list[Measurement]:
    """At most `keep` of them: the newer half as it is, of the older every second, so the far past grows sparse."""
    while len(history) > keep:
        middle = len(history) // 2
        history = history[:middle:2] + history[middle:]
    return history


@dataclass(slots=True)
class Piece:
    """What one call of one layer, or one parameter's gradient, left on the device, and what is needed to read it."""

    vectors: list[Tensor]
    """Largest and smallest value of each unit; the largest alone where none is negative; or all values as they are."""
    scalars: list[Tensor]
    shape: tuple[int, ...]
    layout: Layout
    sample: int
    """Elements that the scalars were taken from."""
    flat: Saturation | None = None
    size: int = 0
    """Elements of the whole tensor."""
    abs_max: Numbers = field(default_factory=lambda: np.empty(0, np.float32))
    """Of each unit, NaN where it holds one; of each element if the vector was all values. Known once on the host."""
    largest: float = math.nan
    values: list[float] = field(default_factory=list)
    """The scalars, once they are on the host."""

    def fill(self, vectors: list[Numbers], values: list[float]) -> None:
        """Take the numbers that have come to the host; the device's are let go."""
        self.abs_max = np.abs(vectors[0]) if len(vectors) == 1 else np.maximum(np.abs(vectors[0]), np.abs(vectors[1]))
        self.largest = float(self.abs_max.max())
        self.values, self.vectors, self.scalars = values, [], []

    def zero_share(self, root_of_nonzeros: float) -> float:
        """The sample's, unless the extremes, which saw every element, say otherwise."""
        zeros = self.sample - round(root_of_nonzeros**2) if math.isfinite(root_of_nonzeros) else self.sample
        exact = 0 if zeros < 1e-6 * self.sample else zeros  # which is as far as float32 counts
        return 1.0 if self.largest == 0 else min(exact / self.sample, 1.0)


def read_layer(
    name: str, kind: str, calls: list[Piece], gradients: list[Piece], window: Mask | None, *, needs: bool, scale: float
) -> tuple[LayerStatistics, Mask]:
    """Statistics of a layer over its calls, and which of its units were inactive over the window.

    `window` is what the window said before; it is left out if the number of units has changed. `scale` is what the
    loss was multiplied by.
    """
    total = sum(call.size for call in calls)
    weights = [call.size / total for call in calls]
    variances = [call.values[1] ** 2 / call.sample for call in calls]
    mean = _dot(weights, [call.values[0] for call in calls])
    apart = [(call.values[0] - mean) ** 2 for call in calls]
    inactive = _all_zero(calls)
    quiet = inactive if window is None or window.shape != inactive.shape else inactive & window
    statistics = LayerStatistics(
        name=name,
        kind=kind,
        calls=len(calls),
        shape=calls[0].shape,
        units=len(inactive),
        mean=mean,
        std=math.sqrt(_dot(weights, variances) + _dot(weights, apart)),
        abs_max=_largest(calls),
        zero_share=_dot(weights, [call.zero_share(call.values[2]) for call in calls]),
        inactive_share=_share(inactive),
        inactive_window_share=_share(quiet),
        saturated_share=_saturated(calls, weights),
        sample_spread=_spread(calls, weights, variances),
        needs_gradient=needs,
        **_read_gradients(gradients, scale),
    )
    return statistics, quiet


def _read_gradients(pieces: list[Piece], scale: float) -> dict[str, float | None]:
    names = ("gradient_norm", "gradient_abs_max", "gradient_zero_share", "gradient_idle_share")
    if not pieces:
        return dict.fromkeys(names)
    total = sum(piece.size for piece in pieces)
    zeros = sum(piece.zero_share(piece.values[1]) * piece.size for piece in pieces) / total
    norm = math.hypot(*(piece.values[0] for piece in pieces))
    return dict(zip(names, (norm / scale, _largest(pieces) / scale, zeros, _share(_all_zero(pieces))), strict=True))


def _dot(weights: list[float], values: list[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def _share(mask: NDArray[Any] | np.bool_) -> float:
    return int(np.count_nonzero(mask)) / np.size(mask)


def _largest(pieces: list[Piece]) -> float:
    return pieces[0].largest if len(pieces) == 1 else float(np.max([piece.largest for piece in pieces]))


def _all_zero(pieces: list[Piece]) -> Mask:
    """Units that are zero in every piece with as many units as the first."""
    zero: Mask = pieces[0].abs_max == 0
    for piece in pieces[1:]:
        if len(piece.abs_max) == len(zero):
            zero = zero & (piece.abs_max == 0)
    return zero


def _saturated(calls: list[Piece], weights: list[float]) -> float | None:
    shares = []
    for call in calls:
        if call.flat is None:
            return None
        length = 1 if call.flat.per_row is None else call.shape[call.flat.per_row]
        shares.append(min(call.values[-1] * length, 1.0))
    return _dot(weights, shares)


def _spread(calls: list[Piece], weights: list[float], variances: list[float]) -> float | None:
    compared = [place for place, call in enumerate(calls) if call.layout.rows > 1]
    overall = sum(weights[place] * variances[place] for place in compared)
    if not overall > 0:
        return None
    between = sum(weights[place] * calls[place].values[3] ** 2 / calls[place].sample for place in compared)
    return math.sqrt(between / overall)


def read_parameter(
    name: str,
    shape: tuple[int, ...],
    weight_norm: float,
    gradient: Piece | None,
    update_norm: float | None,
    scale: float,
) -> ParameterStatistics:
    """Statistics of a parameter; `scale` is what its gradient was still multiplied by."""
    norm = largest = zeros = idle = None
    if gradient is not None:
        values, several = gradient.abs_max, len(gradient.shape) > 1
        largest = gradient.largest / scale
        if gradient.sample == 0:  # sent as it was
            norm, zeros = float(np.linalg.norm(values.astype(np.float64))) / scale, _share(values == 0)
            idle = _share(~values.reshape(gradient.shape[0], -1).any(1)) if several else None
        else:
            norm, zeros = gradient.values[0] / scale, gradient.zero_share(gradient.values[1])
            idle = _share(values == 0) if several else None
    return ParameterStatistics(
        name=name,
        shape=shape,
        weight_norm=weight_norm,
        gradient_norm=norm,
        gradient_abs_max=largest,
        gradient_zero_share=zeros,
        gradient_idle_rows=idle,
        update_norm=update_norm,
    )
