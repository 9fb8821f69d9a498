"""Is a gradient the slope of its function? Central differences along random directions, in float64.

Moves the tensors that it is given and puts them back. Relative errors up to 1e-5 are right and from 1e-3 wrong
(A. Karpathy, CS231n notes on gradient checks); a kink between the two sides gives anything, and the narrower the
difference the fewer there are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from safe_trainer.preflight.float64 import Frozen, Moved, default_double
from safe_trainer.utils import rng

WIDTHS = (1e-5, 1e-6, 1e-7)
"""Of a tensor's own size. The middle one is right to 1e-9 in float64; the narrowest crosses one kink in ten million."""
RIGHT = 1e-5
"""Relative error up to which a gradient is right."""
WRONG = 1e-3
"""Relative error from which it is wrong."""
STEADY = 0.1
"""Of the disagreement: how far the quotients of the widths may lie apart. Where they do, there is no slope."""
EMPTY = 1e-9
"""A slope this small against the value is rounding: nothing is known of it."""
JITTER = 1e-2
"""By how much of its size a point is moved first: at the start many values lie on a kink exactly (biases of 0)."""


@dataclass
class Function:
    """Something with a value, the tensors that it can be varied by, and what puts back the state it keeps."""

    value: Callable[[], Tensor]
    variables: Sequence[Tensor]
    mode: Frozen
    back: Callable[[], None] = lambda: None

    def run(self, first: bool) -> Tensor:
        """Its value, with the same random numbers and state each time."""
        self.back()
        self.mode.begin(first)
        with rng.isolated(), default_double():
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            with torch.enable_grad(), self.mode:  # in all runs: what is a constant follows from the code alone
                return self.value()


@dataclass(frozen=True)
class Slope:
    """What the gradients say of one direction, and what the differences say."""

    gradient: float
    difference: float
    error: float
    """Relative."""
    is_wrong: bool
    """Whether the differences agree with each other and not with the gradients."""


class NotSmooth(Exception):
    """The function has no value, no gradient or no slope here; the message says which."""


def jitter(tensors: Sequence[Tensor], seed: int) -> None:
    """Move tensors a little, off the kinks that zeros and equal values lie on."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            tensor += JITTER * _size(tensor) * _noise(tensor, generator)


def slope(function: Function, seed: int, only: Sequence[Tensor] | None = None) -> Slope:
    """One random direction of the variables, or of `only` some of them.

    Raises:
        NotSmooth: there is no slope to compare with.
    """
    variables = list(function.variables if only is None else only)
    generator = torch.Generator().manual_seed(seed)
    directions = [_size(variable) * _noise(variable, generator) for variable in variables]
    gradients, value = _gradients(function, variables)
    parts = [float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None]
    spread = sum(float((g * d).square().sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    quotients = _quotients(function, variables, directions)
    return _judged(sum(parts), quotients, spread**0.5, abs(value))


def _judged(gradient: float, quotients: list[float], spread: float, value: float) -> Slope:
    nearest = min(quotients, key=lambda quotient: abs(quotient - gradient))
    scale = max(abs(gradient), *(abs(quotient) for quotient in quotients), spread)
    if scale <= EMPTY * max(value, 1e-30) or scale == 0:
        return Slope(gradient, nearest, 0.0, False)
    error = abs(nearest - gradient) / scale
    apart = (max(quotients) - min(quotients)) / scale
    return Slope(gradient, nearest, error, error > WRONG and apart < STEADY * error)


def _gradients(function: Function, variables: list[Tensor]) -> tuple[list[Tensor | None], float]:
    value = function.run(first=True)
    if not bool(value.isfinite()):
        raise NotSmooth("its value is not finite")
    if not value.requires_grad:
        raise NotSmooth("no gradient reaches it")
    with default_double():
        gradients = torch.autograd.grad(value, variables, allow_unused=True)
    if not all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None):
        raise NotSmooth("its gradients are not finite")
    return [None if gradient is None else gradient.detach().double() for gradient in gradients], float(value.detach())


def _quotients(function: Function, variables: list[Tensor], directions: list[Tensor]) -> list[float]:
    kept = [variable.detach().clone() for variable in variables]

    def at(distance: float) -> float:
        with torch.no_grad():
            for variable, origin, direction in zip(variables, kept, directions, strict=True):
                variable.copy_(origin + distance * direction)
        return float(function.run(first=False).detach())

    try:
        quotients = [(at(width) - at(-width)) / (2 * width) for width in WIDTHS]
    except Moved:
        raise NotSmooth("it takes another way beside the point") from None
    finally:
        with torch.no_grad():
            for variable, origin in zip(variables, kept, strict=True):
                variable.copy_(origin)
    if not all(map(np.isfinite, quotients)):
        raise NotSmooth("it is not finite beside the point")
    return quotients


def _size(tensor: Tensor) -> float:
    """The root of the mean square; of zeros 0.1, about the size of a small weight."""
    return float(tensor.detach().square().mean().sqrt()) or 0.1


def _noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
