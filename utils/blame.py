"""Which module turned a finite gradient into a non-finite one, and a trial run of a changed module.

Works by hooks on nodes of autograd's graph, attached in a module's forward and gone with ``detach``; never by full
backward hooks, which break in-place operations, nor by aliases of inputs, which would change the order in which
gradients are added up. Each judged node waits for a GPU, so this is for chosen steps only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from safe_trainer.utils import rng
from safe_trainer.utils.source_lines import choose, parse_traceback


class AnomalyError(RuntimeError):
    """A gradient, a loss or an output is not finite, and the message says where it became so."""


class _Call:
    """One forward of one module, and what its backward has shown so far."""

    def __init__(self, name: str, inputs: Mapping[object, str]) -> None:
        self.name = name
        self.inputs = inputs
        self.before = torch._C._autograd._get_sequence_nr()  # nodes that the forward makes are numbered from here
        self.judged = True
        self.origin = ""

    def meet(self, gradient: Tensor) -> None:
        """The gradient coming in at one of the outputs: after a bad one, what goes out is not this module's fault."""
        if not _finite(gradient):
            self.judged = False


class Blame:
    """Watches submodules of a model while attached: ``names`` is which, None for all.

    A module is to blame if what comes in at its outputs was finite and what goes out, to its inputs or parameters, is
    not. What other modules send to the same input or to a shared parameter is not counted.

    Args:
        raises: raise AnomalyError in backward as soon as a module is to blame; else only remember it.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None = None, *, raises: bool = True) -> None:
        self.verdict = ""
        """Who was found guilty first in backward, as a sentence; empty as long as nobody was."""
        self.origin = ""
        """Where in backward a finite gradient first became non-finite, whether or not it left its module."""
        self.forward_verdict = ""
        """The first module whose inputs were finite and whose output was not (which may be on purpose: a mask)."""
        modules = dict(model.named_modules())
        self._model = model
        self._modules = modules if names is None else {name: modules[name] for name in names}
        self._raises = raises
        self._calls: dict[str, _Call] = {}
        self._parameters: dict[int, str] = {}
        self._removals: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Start watching: the forwards from here on."""
        self.verdict = self.origin = self.forward_verdict = ""
        self._parameters = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for name, module in self._modules.items():
            before = module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
            after = module.register_forward_hook(self._leaving(name), with_kwargs=True)
            self._removals += [before.remove, after.remove]

    def detach(self) -> None:
        """Leave no hook behind, neither on modules nor on a graph that lives on."""
        while self._removals:
            self._removals.pop()()
        self._calls.clear()

    def _entering(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            inputs: dict[object, str] = {}
            for where, tensor in (*_named_tensors(args), *_named_tensors(kwargs)):
                if tensor.requires_grad:
                    inputs.setdefault(tensor.grad_fn if tensor.grad_fn is not None else id(tensor), f"input {where}")
            self._calls[name] = _Call(name, inputs)

        return enter

    def _leaving(self, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = self._calls.pop(name, None)
            if call is None:  # a module that calls itself: only the inner call is judged
                return
            outputs = [tensor for _, tensor in _named_tensors(output)]
            if not self._raises and not self.forward_verdict and not all(map(_finite, outputs)):
                inputs = (tensor for _, tensor in _named_tensors((args, kwargs)))
                if all(map(_finite, inputs)):
                    self.forward_verdict = f"{_module(name)} is the first with finite inputs and a non-finite output"
            if torch.is_grad_enabled():
                self._watch(call, [tensor for tensor in outputs if tensor.requires_grad])

        return leave

    def _watch(self, call: _Call, outputs: list[Tensor]) -> None:
        """Hook the outputs and every node between them and whatever the forward found already there."""
        for tensor in outputs:
            self._removals.append(tensor.register_hook(call.meet).remove)
        pending = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        seen: set[Node] = set()
        while pending:
            node = pending.pop()
            if node in seen or not _made_since(node, call.before):
                continue
            seen.add(node)
            ways_out = {}
            for place, (following, _) in enumerate(node.next_functions):
                if following is None:
                    continue
                if _made_since(following, call.before):
                    pending.append(following)
                else:
                    ways_out[place] = self._describe(following, call)
            self._removals.append(node.register_hook(self._judging(node, call, ways_out)).remove)

    def _judging(self, node: Node, call: _Call, ways_out: dict[int, str]) -> Callable[[Any, Any], None]:
        name, line = node.name(), forward_line(node)

        def judge(going: tuple[Tensor | None, ...], coming: tuple[Tensor | None, ...]) -> None:
            bad = [place for place, gradient in enumerate(going) if gradient is not None and not _finite(gradient)]
            if not bad or not call.judged:
                return
            if not call.origin and all(gradient is None or _finite(gradient) for gradient in coming):
                call.origin = f"it became so in {name}" + (f", whose forward is at {line}" if line else "")
                self.origin = self.origin or f"a gradient went bad in {_module(call.name)}: {call.origin}"
            for place in bad:
                if place in ways_out:
                    self._convict(call, ways_out[place], going[place])

        return judge

    def _convict(self, call: _Call, receiver: str, gradient: Tensor | None) -> None:
        assert gradient is not None
        verdict = (
            f"{_module(call.name)} got a finite gradient and gives a non-finite one to its {receiver}: "
            f"{_damage(gradient)}" + (f"; {call.origin}" if call.origin else "")
        )
        self.verdict = self.verdict or verdict
        if self._raises:
            raise AnomalyError(verdict)

    def _describe(self, following: Node, call: _Call) -> str:
        variable = getattr(following, "variable", None)  # a leaf's node has it
        if variable is None:
            return call.inputs.get(following, "surroundings (a tensor that is no argument)")
        return call.inputs.get(id(variable)) or f"parameter {self._parameters.get(id(variable), 'of unknown name')}"


def forward_line(node: Any) -> str:
    """The user's "file.py:line" that made a node, if anomaly mode was on then; never a line inside torch."""
    return str(choose(reversed(parse_traceback(node.metadata.get("traceback_", ())))) or "")


def validate_module(model: nn.Module, batches: Any, loss_fn: Callable[[Any, Any], Tensor] | None = None) -> int:
    """Run forward and backward of a changed model over some batches; gives how many, or raises AnomalyError.

    It must run backward: anomaly mode checks what backward computes and nothing else, so a loop under ``no_grad``, as
    it is often told, passes whatever the model does. Beyond the mode's NaN, infinities count here, in loss and
    gradients. Afterwards weights, gradients, buffers, train or eval mode, generators and the anomaly setting are as
    before; this takes once more the memory of weights and buffers. A model that is in eval as a whole is tried in
    training mode.

    Args:
        model: the module; it must not hold state outside its parameters and buffers.
        batches: a loader or a list; a single tensor, tuple or mapping is taken as one batch. A batch that is a tuple or
            list of two or more is (input, target, ...); a mapping is given to the model as keywords.
        loss_fn: called as loss_fn(output, target), gives one number. None takes the output's own `loss` if it has
            one, else a fixed random combination of all outputs.

    AnomalyError has the batch's index (from 0) and, as its cause, the error of anomaly mode if there was one.
    ValueError if there is no batch, or nothing to train in the loss.
    """
    count = 0
    blame = Blame(model, raises=False)
    with _untouched(model, batches), torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error detected in")  # the mode's own traceback: the error has its line
        if not any(module.training for module in model.modules()):
            model.train()
        for index, batch in enumerate([batches] if isinstance(batches, Tensor | tuple | Mapping) else batches):
            blame.attach()
            try:
                _try_batch(model, batch, loss_fn, blame)
            except (RuntimeError, FloatingPointError) as error:
                raise AnomalyError(f"batch {index}: {error}{_guess(blame, error)}") from error
            finally:
                blame.detach()
            count += 1
    if count == 0:
        raise ValueError("validate_module needs at least one batch (got none)")
    return count


def _try_batch(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None, blame: Blame) -> None:
    parameter = next(model.parameters(), None)
    batch = _copied(batch, parameter.device if parameter is not None else torch.device("cpu"))
    model.zero_grad(set_to_none=True)
    several = isinstance(batch, tuple | list) and len(batch) > 1
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(batch[0] if isinstance(batch, tuple | list) else batch)
    loss = _combined(output) if loss_fn is None else loss_fn(output, batch[1] if several else batch)
    if not loss.requires_grad:
        raise ValueError("the loss depends on nothing that requires a gradient: there is no backward to check")
    if not _finite(loss):
        raise AnomalyError(f"the loss is {loss.sum().item()}")
    loss.backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None and not _finite(weight.grad):
            raise AnomalyError(blame.verdict or f"the gradient of {name} is not finite: {_damage(weight.grad)}")


def _guess(blame: Blame, error: BaseException) -> str:
    """The module, where the error itself does not name it."""
    known = blame.verdict or blame.origin or blame.forward_verdict
    return f" ({known})" if known and known not in str(error) else ""


def _combined(output: Any) -> Tensor:
    """One number in which every element of every output has a weight of its own; no generator is touched."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(())
    for _, tensor in _named_tensors(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=generator).to(tensor.device)
            total = total.to(tensor.device) + (tensor.float() * weights).sum()
    return total


@contextmanager
def _untouched(model: nn.Module, batches: Any) -> Iterator[None]:
    """Everything that a forward and a backward can change in a model, and all generators, are afterwards as before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    weights = [(weight, weight.grad, weight.requires_grad) for weight in model.parameters()]
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    loader_states = [(generator, generator.get_state()) for generator in _generators(batches)]
    try:
        with rng.isolated():
            yield
    finally:
        for generator, state in loader_states:
            generator.set_state(state)
        for module, training in modes:
            module.training = training
        for module, own in buffers:
            module._buffers.update(own)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for weight, gradient, required in weights:
            weight.grad = gradient
            weight.requires_grad_(required)


def _generators(batches: Any) -> list[torch.Generator]:
    """Generators of a loader's own, which ``isolated`` does not know."""
    owners = (batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _copied(tree: Any, device: torch.device) -> Any:
    """A batch on the model's device, in memory of its own: a forward may write into its input."""
    if isinstance(tree, Tensor):
        return tree.detach().to(device, copy=True).requires_grad_(tree.requires_grad)
    if isinstance(tree, Mapping):
        return {key: _copied(value, device) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_copied(value, device) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_copied(value, device) for value in tree)
    return tree


def _named_tensors(tree: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested tuples, lists and mappings, with its place: `0`, `1.mask`."""
    if isinstance(tree, Tensor):
        yield where, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _named_tensors(value, f"{where}.{key}".lstrip("."))
    elif isinstance(tree, tuple | list):
        for place, value in enumerate(tree):
            yield from _named_tensors(value, f"{where}.{place}".lstrip("."))


def _made_since(node: Node, number: int) -> bool:
    """Whether a node is younger than a number of autograd's count; a leaf's node is always outside."""
    return not hasattr(node, "variable") and node._sequence_nr() >= number


def _finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout != torch.strided:
        return bool(torch.isfinite(tensor.coalesce().values()).all()) if tensor.is_sparse else True
    return bool(torch.isfinite(tensor).all())


def _module(name: str) -> str:
    return f"module {name}" if name else "the model itself"


def _damage(gradient: Tensor) -> str:
    """How many elements went bad, and the first."""
    values = gradient.to_dense() if gradient.is_sparse else gradient
    bad = ~torch.isfinite(values)
    first = tuple(torch.nonzero(bad)[0].tolist())
    return f"{int(bad.sum())} of {bad.numel()} elements are NaN or infinite, the first at {first}"
