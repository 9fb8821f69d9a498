"""Leave a model as it was found: weights, buffers, gradients, modes, and the optimizers' state and rates.

For replays and checks that must use the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from safe_trainer.gate import held
from safe_trainer.undo import way_back


@contextlib.contextmanager
def untouched(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Iterator[None]:
    """Put all of it back on exit, also when the body raises. The body begins without gradients."""
    ways = [way_back(part) for part in (model, *optimizers)]
    parameters: dict[Tensor, None] = dict.fromkeys(model.parameters())
    parameters.update(dict.fromkeys(parameter for optimizer in optimizers for parameter in held(optimizer)))
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    modes = [(module, module.training) for module in model.modules()]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for back in ways:
            back()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
