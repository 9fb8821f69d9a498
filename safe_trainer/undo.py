"""What a step may leave behind, kept from before it: buffers, generators, weights, optimizer state, its own counts.

Reads all of these and writes them back when it is told to; decides nothing. A healthy step costs one copy of the
buffers; weights are copied only where somebody asks for them.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from safe_trainer.utils import rng

LAZY_TAKES = 2
"""First takes that look for buffers anew: lazy modules, and others, make theirs in the first forward."""

LONG = 64
"""Entries of a list above which they are samples rather than parts of a batch, and are not looked at one by one."""


class Buffers:
    """Buffers of a model, and of a loss if that is a module too: one copy into storage that is kept, so that taking it
    costs no allocation.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self._takes = 0
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._objects: list[Tensor | None] = []
        self._kept: list[Tensor | None] = []

    def _find(self) -> dict[str, tuple[nn.Module, str]]:
        """Module and name of every buffer by its path, and not the tensor: a forward may put in another one."""
        return {
            f"{number}.{path}.{name}": (module, name)
            for number, root in enumerate(self._modules)
            for path, module in root.named_modules()
            for name in module._buffers
        }

    def take(self) -> None:
        """Remember the buffers of this moment."""
        if self._takes < LAZY_TAKES:
            self._takes += 1
            self._places = self._find()
        self._objects = [module._buffers.get(name) for module, name in self._places.values()]
        if any(now is not None for now in self._objects):
            self._copy(self._objects)
        else:
            self._kept = self._objects

    @torch.no_grad()
    def _copy(self, current: list[Tensor | None]) -> None:
        if len(self._kept) == len(current) and all(map(_alike, self._kept, current)):
            kept = [tensor for tensor in self._kept if tensor is not None]
            if kept:
                torch._foreach_copy_(kept, [tensor for tensor in current if tensor is not None])
        else:
            self._kept = [None if now is None or is_lazy(now) else now.clone() for now in current]

    @torch.no_grad()
    def copy_to(self, other: nn.Module) -> None:
        """Write the remembered values into a copy of the model."""
        theirs = Buffers(other)._find()
        for path, kept in zip(self._places, self._kept, strict=True):
            if path in theirs and kept is not None:
                module, name = theirs[path]
                module._buffers[name] = _written(module._buffers[name], kept)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the remembered values back, and the very tensors that held them.

        The tensors that a forward has put in their place are not written to: they may be a batch's, or views of others.
        """
        for (module, name), tensor, kept in zip(self._places.values(), self._objects, self._kept, strict=True):
            if kept is not None:
                module._buffers[name] = _written(tensor, kept)
            elif tensor is None:
                module._buffers[name] = None
            elif isinstance(module, nn.modules.batchnorm._NormBase):
                module.reset_running_stats()  # a lazy one, made within the step: as it makes them


def _alike(kept: Tensor | None, now: Tensor | None) -> bool:
    if kept is None or now is None:
        return kept is now
    return kept.shape == now.shape and kept.dtype == now.dtype and kept.device == now.device


def _written(tensor: Tensor | None, values: Tensor) -> Tensor:
    """`tensor` with these values; a new one where it cannot take them: resized, or one element seen many times."""
    if tensor is not None and _alike(tensor, values):
        try:
            return tensor.copy_(values)
        except RuntimeError:  # an expanded tensor, which nobody can have written to either
            pass
    return values.clone()


def containers(batch: Any, depth: int = 4) -> Any:
    """The batch with its dicts, lists and tuples copied and its tensors shared: a step may pop what it has used."""
    if depth and type(batch) is dict:
        return {key: containers(value, depth - 1) for key, value in batch.items()}
    if depth and type(batch) in (list, tuple):
        return type(batch)(batch if len(batch) > LONG else [containers(value, depth - 1) for value in batch])
    if depth and isinstance(batch, MutableMapping):  # Hugging Face's BatchEncoding among others
        return copy.copy(batch)
    return batch


def _tensors(batch: Any, name: str = "batch", depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch that are easy to come by; it is asked for at every step."""
    if isinstance(batch, Tensor):
        if not batch.is_inference():
            yield name, batch
    elif depth and isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _tensors(value, f"{name}[{key!r}]", depth - 1)
    elif depth and isinstance(batch, (list, tuple)) and len(batch) <= LONG:
        for position, value in enumerate(batch):
            yield from _tensors(value, f"{name}[{position}]", depth - 1)


def _is_flat(batch: Any) -> bool:
    """Whether the batch is a list or tuple of plain tensors."""
    if type(batch) not in (list, tuple) or len(batch) > LONG or set(map(type, batch)) != {Tensor}:
        return False
    return not any(map(Tensor.is_inference, batch))


@dataclass
class Attempt:
    """One try at a step: its batch, and where the generators and buffers stood before it."""

    buffers: Buffers
    generators: rng.Snapshot = field(default_factory=rng.Snapshot)
    step: int = 0
    batch: Any = None
    versions: list[int] = field(default_factory=list)
    """Of the batch's tensors, in the order of `_tensors`."""

    def begin(self, step: int, batch: Any) -> None:
        """Remember where step `step` begins; the tensors of the batch are kept, not copied."""
        self.step = step
        if _is_flat(batch):  # nearly always: a step finds all code cold, and the general way takes four times as long
            self.batch, self.versions = type(batch)(batch), [tensor._version for tensor in batch]
        else:
            self.batch, self.versions = containers(batch), [tensor._version for _, tensor in _tensors(batch)]
        self.generators.take()
        self.buffers.take()

    def let_go(self) -> None:
        """The step was finite: nobody will ask for its batch, and the next one may have the memory."""
        self.batch, self.versions = None, []

    def changed(self) -> list[str]:
        """What the step has changed of its batch in place."""
        now = zip(_tensors(self.batch), self.versions, strict=True)
        return [name for (name, tensor), version in now if tensor._version != version]


class Weights:
    """Weights and optimizer state in memory, to go back to. Costs one copy of both."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], others: Sequence[Any] = ()) -> None:
        self._parts: list[Any] = [model, *optimizers, *(other for other in others if other is not None)]
        self._state: list[Callable[[], None]] | None = None
        self._candidate: list[Callable[[], None]] | None = None

    def take(self) -> None:
        """A new state to go back to, once `confirm` has been called: the next step may show that it was bad."""
        self._candidate = [way_back(part) for part in self._parts]

    def confirm(self) -> None:
        """The step after `take` was finite, so what was taken is good."""
        if self._candidate is not None:
            self._state, self._candidate = self._candidate, None

    def restore(self) -> bool:
        """Go back; false if there is nothing to go back to yet. Any number of times."""
        if self._state is None:
            return False
        for back in self._state:
            back()
        self._candidate = None
        return True


def way_back(part: Any) -> Callable[[], None]:
    """What puts a module, an optimizer or anything with a state dict back to how it is now."""
    if isinstance(part, nn.Module):
        return _module_back(part)
    if isinstance(part, Optimizer):
        return _optimizer_back(part)
    state = copy.deepcopy(part.state_dict())
    return lambda: part.load_state_dict(copy.deepcopy(state))


def _module_back(module: nn.Module) -> Callable[[], None]:
    """Without its state dict, whose shapes would have to fit: a buffer may have been resized since."""
    weights = [(p, p.detach().clone()) for p in module.parameters() if not is_lazy(p)]
    extra = [
        (part, copy.deepcopy(part.get_extra_state()))
        for part in module.modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ]
    buffers = Buffers(module)
    buffers.take()

    @torch.no_grad()
    def back() -> None:
        for parameter, value in weights:
            parameter.copy_(value)
        buffers.restore()
        for part, state in extra:
            part.set_extra_state(copy.deepcopy(state))

    return back


def _optimizer_back(optimizer: Optimizer) -> Callable[[], None]:
    """Without its state dict: loading one casts the state to the weights' dtype, and so may lose bits."""
    options = _options_back(optimizer)
    states = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}

    def back() -> None:
        options()
        optimizer.state.clear()
        # a copy: the optimizer goes on to change what it is given
        optimizer.state.update({parameter: copy.deepcopy(state) for parameter, state in states.items()})

    return back


def _options_back(optimizer: Optimizer) -> Callable[[], None]:
    """Learning rates and all else that a group holds besides its parameters."""
    groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

    def back() -> None:
        for group, kept in zip(optimizer.param_groups, groups, strict=False):
            group.update(copy.deepcopy(kept))

    return back


# --- what a step of the user's own keeps for itself ------------------------------------------------------------------


def reachable(step: Callable[..., Any]) -> Iterator[tuple[MutableMapping[str, Any], str]]:
    """Where the objects are that a user's step works with: (namespace, name) of its closure, globals and own object."""
    function = inspect.unwrap(step)
    owner = function if not inspect.isroutine(function) else getattr(function, "__self__", None)
    if hasattr(owner, "__dict__") and not inspect.ismodule(owner):
        yield from ((vars(owner), name) for name in list(vars(owner)))
    code = type(function).__call__ if owner is function else getattr(function, "__func__", function)
    try:
        found = inspect.getclosurevars(code)
    except TypeError:  # a callable without Python code
        return
    cells = _Cells(code)
    yield from ((cells, name) for name in found.nonlocals)
    yield from ((code.__globals__, name) for name in found.globals)


def reachable_scalers(step: Callable[..., Any]) -> Iterator[torch.amp.GradScaler]:
    """The GradScalers that a user's own step can reach: in its closure, its globals or the object it belongs to."""
    things = (namespace[name] for namespace, name in reachable(step))
    yield from (thing for thing in things if isinstance(thing, torch.amp.GradScaler))


class _Cells(dict[str, Any]):
    """A function's closure as a namespace that can be written to."""

    def __init__(self, function: Any) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        super().__init__({name: cell.cell_contents for name, cell in self._cells.items() if not _is_empty(cell)})

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


LARGEST = 2**20
"""Elements of a tensor up to which a step's own is kept: running figures are small, data sets are not."""

_NUMBERS = (bool, int, float, str, type(None))
_OF_A_MODULE = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, hooks."""


def step_back(step: Callable[..., Any], model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Callable[[], None]]:
    """What puts the things that a user's step keeps for itself back to how they are now.

    Schedulers, scalers, averages and whatever else has a state dict; plain numbers and texts; lists, dicts and sets by
    what they hold; the learning rates and other options of the optimizers, which a scheduler changes. So a replay does
    not count as one more step. The model and the state of the optimizers are put back by other means.
    """
    passed = {id(thing) for thing in (*model.modules(), *optimizers)}
    ways = [_options_back(optimizer) for optimizer in optimizers]
    for namespace, name in reachable(step):
        value = namespace[name]
        if id(value) in passed or isinstance(value, type):
            continue
        if type(value) in _NUMBERS:
            ways.append(_assignment(namespace, name, value))
        elif type(value) in (list, dict, set):
            ways.append(_contents(value))
        elif type(value) is Tensor and value.is_leaf and not value.is_inference() and value.numel() <= LARGEST:
            ways.append(_values(value))
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            ways.append(way_back(value))
    return ways


def attributes_back(model: nn.Module) -> list[Callable[[], None]]:
    """What puts the plain numbers, texts, lists, dicts and sets that modules keep as attributes back to how they are.

    So a forward pass more does not count: some modules count their calls. Buffers are put back by other means.
    """
    ways: list[Callable[[], None]] = []
    for module in model.modules():
        own = vars(module)
        for name, value in own.items():
            if name.startswith("_") and name in _OF_A_MODULE:
                continue
            if type(value) in _NUMBERS:
                ways.append(_assignment(own, name, value))
            elif type(value) in (list, dict, set):
                ways.append(_contents(value))
    return ways


def _assignment(namespace: MutableMapping[str, Any], name: str, value: Any) -> Callable[[], None]:
    return lambda: namespace.__setitem__(name, value)


def _values(tensor: Tensor) -> Callable[[], None]:
    """A tensor that is added to in place, such as a running mean."""
    kept, version = tensor.detach().clone(), tensor._version

    @torch.no_grad()
    def back() -> None:
        if tensor._version != version and tensor.shape == kept.shape:
            tensor.copy_(kept)

    return back


def _contents(value: Any) -> Callable[[], None]:
    kept = value.copy()

    def back() -> None:
        if len(value) == len(kept) and all(map(operator.is_, _items(value), _items(kept))):
            return
        value.clear()
        value.extend(kept) if isinstance(value, list) else value.update(kept)

    return back


def _items(value: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else iter(value)
