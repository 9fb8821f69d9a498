"""Bring dead units back: new incoming weights, and an optimizer that remembers nothing of the old ones.

Touches the weights of the layers that feed dead units, and the optimizers' state for these very weights. Draws from a
generator of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from safe_trainer.utils.measurements import Mask

__all__ = ["revive_dead_units"]

log = logging.getLogger(__name__)


@torch.no_grad()
def revive_dead_units(
    model: nn.Module,
    dead: Mapping[str, Mask],
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    order: Sequence[str] | None = None,
    seed: int = 0,
) -> dict[str, int]:
    """Draw the incoming weights of dead units anew, as Kaiming He and others draw them for rectifiers (2015).

    Weights are uniform with standard deviation ``sqrt(2 / inputs)``, biases zero; a normalisation in between gets
    weight 1 and bias 0 there. The optimizers' state of these entries (momentum, second moments) is set to zero.

    Args:
        dead: for each activation's name which of its units are dead, shape (units,); `Monitors.inactive_units` has it.
        optimizers: those that move the model.
        order: names of layers in the order in which they run; without it, in which the model lists them.
        seed: of the generator that draws; the global ones are left alone.

    Returns:
        For each layer whose weights were drawn anew, how many of its units that were. Nothing is said of an activation
        before which no layer with that many units runs.
    """
    generator = torch.Generator().manual_seed(seed)
    held = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    names = [name for name, _ in model.named_modules() if name] if order is None else list(order)
    revived = {}
    for activation, mask in dead.items():
        units = torch.from_numpy(mask.copy()).nonzero().flatten()
        if not len(units) or activation not in names:
            continue
        for name, module in _feeding(model, names[: names.index(activation)], len(mask)):
            parameters = _redraw(module, units, generator)
            for parameter in parameters:
                _forget(parameter, units, held)
            if not isinstance(module, _NormBase):
                revived[name] = len(units)
    return revived


def _feeding(model: nn.Module, before: Sequence[str], units: int) -> Iterator[tuple[str, nn.Module]]:
    """The layer that makes these units, and the normalisation behind it if there is one."""
    for name in reversed(before):
        try:
            module = model.get_submodule(name)
        except AttributeError:
            return
        if isinstance(module, _NormBase) and module.affine and module.num_features == units:
            yield name, module
        elif isinstance(module, nn.Linear | _ConvNd):
            made = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            if made == units and not (isinstance(module, _ConvNd) and module.transposed):
                yield name, module
            return


def _redraw(module: nn.Module, units: Tensor, generator: torch.Generator) -> list[Tensor]:
    """New values for the entries of these units; the parameters that have some."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    places = units.to(weight.device)
    if isinstance(module, _NormBase):
        weight[places] = 1.0
    else:
        bound = math.sqrt(3.0) * math.sqrt(2.0 / weight[0].numel())
        drawn = torch.empty((len(units), *weight.shape[1:])).uniform_(-bound, bound, generator=generator)
        weight[places] = drawn.to(weight.device, weight.dtype)
    if not isinstance(bias, Tensor):
        return [weight]
    bias[places] = 0.0
    return [weight, bias]


def _forget(parameter: Tensor, units: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Zero what the optimizers keep of these entries."""
    for optimizer in optimizers:
        for kept in optimizer.state.get(parameter, {}).values():
            if isinstance(kept, Tensor) and kept.shape == parameter.shape:
                kept[units.to(kept.device)] = 0
