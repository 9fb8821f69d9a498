"""Which module's output is not finite, where a step cannot be run again. Runs the model once; leaves no trace."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from safe_trainer.undo import Attempt, Buffers
from safe_trainer.utils import rng
from safe_trainer.utils.measures import floats


def what_modules_show(model: nn.Module, attempt: Attempt) -> tuple[str, str | None]:
    """A sentence on where the model's forward of the step's batch goes bad, and the module's name if it does.

    The model is called as ``model(input)`` with the first entry of the batch, from the generators that the step began
    with; it may be that the step called it otherwise.
    """
    bad = [name for name, tensor in _named(attempt.batch) if not _is_finite(tensor)]
    if bad:
        return f"the batch itself is not finite ({', '.join(bad[:3])})", None
    found: list[str] = []

    def look(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if not found and any(not _is_finite(tensor) for tensor in floats(output)):
            found.append(name)

    handles = [
        module.register_forward_hook(partial(look, name or type(model).__name__))
        for name, module in model.named_modules()
    ]
    after, buffers = rng.capture(), Buffers(model)
    buffers.take()
    try:
        attempt.generators.restore()
        with torch.no_grad():
            model(_input_of(attempt.batch))
    except Exception as error:  # the step called it otherwise: then there is just less to tell
        return f"the model cannot be called with the batch's first entry ({type(error).__name__})", None
    finally:
        for handle in handles:
            handle.remove()
        buffers.restore()
        rng.restore(after)
    if found:
        return f"{found[0]} is the first module whose output is not finite for this batch", found[0]
    return "all modules' outputs are finite for this batch: the loss or the backward pass made it", None


def _input_of(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return next(iter(batch.values()))
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


def _named(batch: Any) -> list[tuple[str, Tensor]]:
    if isinstance(batch, Mapping):
        return [(f"batch[{key!r}]", tensor) for key, value in batch.items() for tensor in floats(value)]
    if isinstance(batch, tuple | list):
        return [(f"batch[{place}]", tensor) for place, value in enumerate(batch) for tensor in floats(value)]
    return [("batch", tensor) for tensor in floats(batch)]


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
