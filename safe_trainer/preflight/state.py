"""What a module keeps between two runs besides its weights, and the way back to it. Writes buffers and attributes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from safe_trainer.undo import attributes_back


def state_back(module: nn.Module) -> Callable[[], None]:
    """Puts buffers, kept tensors and plain attributes back to how they are now; any number of times."""
    ways = attributes_back(module)
    kept: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for part in module.modules():
        for names in (part._buffers, {name: v for name, v in vars(part).items() if isinstance(v, Tensor)}):
            holder = part._buffers if names is part._buffers else vars(part)
            kept += [(holder, name, tensor) for name, tensor in names.items() if tensor is not None]
    values = [tensor.detach().clone() for _, _, tensor in kept]

    @torch.no_grad()
    def back() -> None:
        for way in ways:
            way()
        for (holder, name, tensor), value in zip(kept, values, strict=True):
            if not torch.equal(tensor, value):
                tensor.copy_(value)
            holder[name] = tensor

    return back
