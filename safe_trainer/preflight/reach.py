"""Which tensors the gradient reaches: none at all, or some that nobody has registered."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from safe_trainer.findings import Finding
from safe_trainer.preflight.graph import leaves
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import tensors
from safe_trainer.preflight.traced import Call, TracedStep

CUTS = ("detach", "detach_", "data", "argmax", "argmin", "round", "floor", "ceil", "sign", "item", "tolist", "numpy",
        "long", "int", "tensor", "as_tensor", "bool")  # fmt: skip
"""Calls behind which autograd does not know where a tensor came from."""


def nothing_reached(program: Program, step: TracedStep) -> Iterator[Finding]:
    """A backward pass that brings no parameter of the model a gradient."""
    trainable = [parameter for parameter in program.model.parameters() if parameter.requires_grad]
    if not trainable or any(parameter.grad is not None for parameter in trainable) or not step.model_calls():
        return
    cut = _cut(step)
    yield finding(
        "gradient.missing",
        "error",
        where=_where(cut, program),
        source=None if cut is None else cut.source,
        evidence=f"after backward none of the {len(trainable)} trainable parameters has a gradient"
        + (f"; {cut.name} makes the last tensor that hangs on the model into one that does not" if cut else ""),
        cause="the loss is not connected to the model: a detach, no_grad, item() or a tensor made anew cuts the graph",
        remedy="compute the loss from the model's own output, and never set requires_grad on it",
    )


def _cut(step: TracedStep) -> Call | None:
    """The last call that takes a tensor with a graph and gives one without."""
    for call in reversed(step.calls):
        hangs = any(tensor.requires_grad for tensor in tensors((call.args, call.kwargs)))
        if call.name in CUTS and hangs and not any(tensor.grad_fn is not None for tensor in tensors(call.output)):
            return call
    return None


def _where(cut: Call | None, program: Program) -> str | None:
    if cut is not None and cut.module:
        return cut.module
    return "loss_fn" if program.loss_fn is not None else "train_step"


def foreign_leaves(program: Program, step: TracedStep) -> Iterator[Finding]:
    """Leaves of the model's own graph that train, and that neither the model nor an optimizer knows."""
    outputs = [tensor for call in step.model_calls() for tensor in tensors(call.output)]
    known = {id(parameter) for parameter in program.model.parameters()} | {id(p) for p in program.parameters()}
    if isinstance(program.loss_fn, nn.Module):
        known |= {id(parameter) for parameter in program.loss_fn.parameters()}
    given = {id(tensor) for call in step.model_calls() for tensor in tensors((call.args, call.kwargs))}
    foreign = [leaf for leaf in leaves(*outputs) if id(leaf) not in known | given and leaf.numel() > 1]
    if not foreign:
        return
    use = next((call for call in step.calls if any(leaf is tensor for tensor in call.args for leaf in foreign)), None)
    owner = _owner(program.model, foreign)
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in foreign[:4]) + (" ..." if len(foreign) > 4 else "")
    yield finding(
        "model.unregistered_submodule",
        "error",
        where=owner or (use.module if use and use.module else None),
        source=use.source if use else None,
        evidence=f"{len(foreign)} tensors of shapes {shapes} take part in the model's forward and want gradients, but "
        "model.parameters() does not have them and no optimizer holds them",
        cause="layers in a plain list or dict, or a bare tensor in place of an nn.Parameter: PyTorch registers "
        "neither, so they are not trained, moved to the device or saved",
        remedy="hold layers in nn.ModuleList or nn.ModuleDict, tensors in nn.Parameter, and build the optimizer after "
        "it",
    )  # fmt: skip


def _owner(model: nn.Module, foreign: list[Tensor]) -> str | None:
    """The attribute that holds these tensors: module path and name."""
    wanted = {id(leaf) for leaf in foreign}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and any(id(tensor) in wanted for tensor in _held(value)):
                return f"{path}.{name}".lstrip(".")
    return None


def _held(value: object, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif depth and isinstance(value, dict):
        for entry in value.values():
            yield from _held(entry, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for entry in value:
            yield from _held(entry, depth - 1)
