"""Does a sample's answer depend on the other samples of its batch? The others are exchanged, and it must not change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from safe_trainer.findings import Finding
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import clone, tensors
from safe_trainer.preflight.traced import ModuleCall, TracedStep, module_calls
from safe_trainer.task import first_length
from safe_trainer.utils import rng

TOLERANCE = 1e-3
"""Of a result's own size. The batch keeps its size, and so sums their order: true mixing changes answers by tenths,
rounding by millionths."""

STATISTICS = frozenset({"var", "std", "var_mean", "std_mean", "batch_norm"})
"""Calls of a normalisation by the batch written by hand: it mixes samples by design, and is told as info."""


def mixing(program: Program, batch: Any, call: ModuleCall, step: TracedStep) -> tuple[list[Finding], str]:
    """What the exchange shows, in findings and in words. The model is in evaluation mode, and deterministic."""
    size = _samples(batch, call)
    if size is None:
        return [], "samples cannot be told apart in its input"
    if any(_uses_the_batch(module) for module in program.model.modules()):
        return [], "a normalisation without running statistics uses the batch by design"
    if len(program.batches()) == 1 and _knows_the_samples(program.model, size):
        return [], "the model holds something for each sample of the only batch, as the graph of its nodes"
    kept = slice(size // 4, size - size // 4)  # exchanged on either side: an influence may run one way only
    before = _run(program, call.args, call.kwargs)
    after = _run(program, _exchanged(call.args, size, kept), _exchanged(call.kwargs, size, kept))
    if len(before) != len(after) or not _differs(before[-1], after[-1], size, kept):
        return [], "samples do not influence each other"
    pairs = zip(before, after, strict=True)
    first = next((one for one, other in pairs if _differs(one, other, size, kept)), before[-1])
    change = _change(first, next(o for b, o in zip(before, after, strict=True) if b is first), size, kept)
    where = first.name or None
    source = next((made.source for made in step.calls if made.module == first.name and made.source), None)
    own = [made for made in step.calls if made.module == first.name]
    severity = "info" if any(made.name in STATISTICS for made in own) else "error"
    return [
        finding(
            "model.batch_mixing",
            severity,
            where=where,
            source=source,
            evidence=f"exchanging the other {2 * (size // 4)} samples of a batch of {size} changes the answers to "
            f"the {size - 2 * (size // 4)} that stayed, first in {where or 'the model'} (by {change:.2g} of their "
            "size), in evaluation mode",
            cause="samples are mixed: a view or reshape where a permute was meant, a recurrent or attention layer "
            "that takes the batch for the sequence (batch_first), or a softmax, mean or norm over the batch axis",
            remedy="follow the shapes: the sample axis must stay where it is; use transpose or permute to swap axes, "
            "batch_first=True for (batch, time, features), and give the right dim",
        )
    ], "samples influence each other"


def _samples(batch: Any, call: ModuleCall) -> int | None:
    """Samples of the batch, where inputs and output have them in front; None where that cannot be told."""
    given = [tensor for tensor in tensors((call.args, call.kwargs)) if tensor.dim()]
    size = first_length(batch)
    if size is None or size < 4 or not given or any(len(tensor) != size for tensor in given):
        return None
    if any(size in tensor.shape[1:] for tensor in given):
        return None
    target = [tensor for tensor in tensors(batch) if tensor.dim()]
    if any(len(tensor) != size for tensor in target):
        return None
    outputs = [tensor for tensor in tensors(call.output) if tensor.dim()]
    return size if any(len(output) == size for output in outputs) else None


def _knows_the_samples(model: nn.Module, size: int) -> bool:
    """Whether a tensor that does not train has the samples among its axes."""
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return any(size in tensor.shape for tensor in [*held, *model.buffers()])


def _uses_the_batch(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None


def _run(program: Program, args: Any, kwargs: Any) -> list[ModuleCall]:
    calls: list[ModuleCall] = []
    with rng.isolated(), module_calls(program.model, calls):
        torch.manual_seed(0)
        program.model(*clone(args), **clone(kwargs))
    return calls


def _exchanged(value: Any, size: int, kept: slice) -> Any:
    """The same with the other samples replaced by kept ones: real values all."""
    if isinstance(value, Tensor):
        if not value.dim() or len(value) != size:
            return value
        samples = list(range(size))
        stayed = samples[kept]
        order = [n if n in stayed else stayed[(size - n) % len(stayed)] for n in samples]
        return value[torch.tensor(order, device=value.device)]
    if type(value) in (list, tuple):
        return type(value)(_exchanged(item, size, kept) for item in value)
    if type(value) is dict:
        return {key: _exchanged(item, size, kept) for key, item in value.items()}
    return value


def _differs(first: ModuleCall, second: ModuleCall, size: int, kept: slice) -> bool:
    return _change(first, second, size, kept) > TOLERANCE


def _change(first: ModuleCall, second: ModuleCall, size: int, kept: slice) -> float:
    """Largest change of a kept sample's result, in units of the results' size."""
    most = 0.0
    for one, other in zip(tensors(first.output), tensors(second.output), strict=False):
        if one.shape != other.shape or not one.is_floating_point():
            continue
        if one.dim() and len(one) == size:
            ours, theirs = one[kept].float(), other[kept].float()
            if one.dim() >= 2 and one.shape[1] == size:  # every sample against every other: the pairs that stayed
                ours, theirs = ours[:, kept], theirs[:, kept]
        elif one.dim() >= 3 and one.shape[1] == size:  # (time, batch, features)
            ours, theirs = one[:, kept].float(), other[:, kept].float()
        else:
            continue
        scale = float(ours.abs().mean()) or 1.0
        most = max(most, float((ours - theirs).abs().nan_to_num().max()) / scale)
    return most
