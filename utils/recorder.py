"""Watches every operation of one step, forward and backward, and records those with a non-finite result.

A dispatch mode: it sees what runs, hands every result on untouched, draws no random number and keeps no finite tensor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from safe_trainer.utils import provenance
from safe_trainer.utils.operations import Call, read_call, tensors_in
from safe_trainer.utils.provenance import Damage, Event, Key, is_bad, overlap, plain, storage_key
from safe_trainer.utils.source_lines import Place, Stack, calls, read_stack, trace_node

UNSET = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"])
"""Operations that return memory as they find it."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that exists before the step begins."""

    kind: str
    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Where:
    """Which part of the program runs an operation."""

    kind: str
    node: str | None = None
    place: Place | None = None
    applied: Place | None = None
    module: str | None = None


@dataclass(frozen=True)
class Suspect:
    """A bad operand of an operation with a bad result."""

    name: str
    tensor: Tensor
    events: Sequence[Event] = ()
    """Who made it, where that was looked up before the operation changed it."""


def guilty(call: Call, suspects: list[Suspect], results: list[Tensor]) -> list[Suspect]:
    """Those bad operands that can be the cause of the bad results.

    In an operation that works element by element it is those that are bad where a result is. And a NaN that went in
    explains the NaN that came out, while an infinity beside it may well be legal.
    """
    found = [s for s in suspects if _reaches(call, s, results, provenance.bad_mask)]
    if any(bool(result.isnan().any()) for result in results):
        spreading = [s for s in found if bool(s.tensor.isnan().any()) and _reaches(call, s, results, torch.isnan)]
        return spreading or found
    return found


def _reaches(call: Call, suspect: Suspect, results: list[Tensor], test: Callable[[Tensor], Tensor]) -> bool:
    if not call.pointwise:
        return True
    taken = call.taken(suspect.name)

    def bad_and_taken(tensor: Tensor) -> Tensor:
        return test(tensor) & taken if taken is not None and tensor is suspect.tensor else test(tensor)

    return any(overlap(suspect.tensor, result, bad_and_taken) for result in results)


@dataclass
class Before:
    """What an in-place operation is about to change."""

    tensor: Tensor
    content: Tensor
    events: list[Event]


class Recorder(TorchDispatchMode):
    """Records the non-finite results of the operations that run while it is entered."""

    supports_higher_order_operators = True

    def __init__(
        self, leaves: Mapping[Key, Leaf], name_of: Callable[[nn.Module], str | None], bottom: CodeType
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.operations = 0
        self.producers = provenance.Producers()
        self.roots: list[Event] = []
        """What backward was called on, where that was non-finite."""
        self.gradients: dict[int, list[Event]] = {}
        """Events behind a non-finite gradient, by id of the leaf that it was accumulated into."""
        self.failed: list[Event] = []
        """Events behind the arguments of an operation that raised."""
        self._leaves = leaves
        self._name_of = name_of
        self._bottom = bottom
        self._thread = threading.get_ident()
        self._makers: dict[int, tuple[str | None, Place | None]] = {}
        self._numbers: list[tuple[float, Event]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation and look at its result."""
        if any(getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a wrapper subclass: it runs first, and the operations it is made of come here
        keywords = dict(kwargs or {})
        self.operations += 1
        node = torch._C._current_autograd_node()
        stack = self._note_maker(node)
        call = read_call(func, args, keywords)
        before = self._before(call, node, stack)
        try:
            result = func(*args, **keywords)
        except Exception:
            self.failed = [
                event for _, tensor in self._bad_inputs(call) for event in self._behind(tensor, call, node, stack)
            ]
            raise
        self._after(call, before, result, node, stack)
        return result

    def _note_maker(self, node: Any) -> Stack | None:
        """In a forward, note which module and line make the autograd node with the current sequence number.

        Autograd numbers a node right before it runs the operation that the node is for.
        """
        if node is not None and not isinstance(node, BackwardCFunction):
            return None
        stack = self._read_stack(node)
        if torch.is_grad_enabled() or node is None:
            self._makers.setdefault(torch._C._autograd._get_sequence_nr() - 1, (stack.module, stack.place))
        return stack

    def _read_stack(self, node: Any) -> Stack:
        """The running stack; a checkpoint's second forward belongs to the module that ran the first one."""
        stack = read_stack(self._name_of, self._bottom)
        if stack.recomputed and stack.module is None and node is not None:
            return replace(stack, module=self._maker(*trace_node(node, self._bottom))[0])
        return stack

    def _where(self, node: Any, stack: Stack | None) -> Where:
        stack = stack or self._read_stack(node)
        elsewhere = stack.place is None and threading.get_ident() != self._thread  # a GPU's backward has its own thread
        if node is None and not stack.in_engine and not elsewhere:
            return Where("forward", None, stack.place, stack.applied, stack.module)
        if stack.recomputed and stack.place is not None:
            return Where("forward", None, stack.place, stack.applied, stack.module)
        if node is None:  # the engine adds up the gradients of a tensor with several uses
            return Where("backward", "gradient accumulation", stack.place or stack.caller, None, stack.module)
        first, made = trace_node(node, self._bottom)
        module, place = self._maker(first, made)
        if stack.place is not None:
            return Where("backward", node.name(), stack.place, made or place, module)
        return Where("backward", node.name(), made or place or stack.caller, None, module)

    def _maker(self, node: Any, made: Place | None) -> tuple[str | None, Place | None]:
        """Module and line that made a node; an in-place operation on a view numbers its node one later."""
        number = node._sequence_nr()
        for candidate in (number, number - 1):
            module, place = self._makers.get(candidate, (None, None))
            if place is not None and (made is None or place == made or isinstance(node, BackwardCFunction)):
                return module, place
        return None, None

    def _bad_inputs(self, call: Call) -> list[tuple[str, Tensor]]:
        found = [(name, dense) for name, tensor in call.inputs if (dense := plain(tensor)) is not None]
        return [(name, tensor) for name, tensor in found if is_bad(tensor)]

    def _before(self, call: Call, node: Any, stack: Stack | None) -> list[tuple[str, Before]]:
        """Copy what is about to be changed in place, and look up who made its bad elements.

        Lists are not copied: the fused steps of optimizers change all weights in one call.
        """
        found = []
        for name, tensor in call.written:
            dense = plain(tensor)
            if dense is not None:
                events = self._behind(dense, call, node, stack) if is_bad(dense) else []
                found.append((name, Before(dense, dense if "[" in name else dense.clone(), events)))
        return found

    def _behind(self, tensor: Tensor, call: Call, node: Any, stack: Stack | None) -> list[Event]:
        """The events that made a bad tensor; if there is none it came in from outside, and that is an event too."""
        return self.producers.of(tensor) or [self._entered(tensor, self._where(node, stack), call.name)]

    def behind(self, tensor: Tensor) -> list[Event]:
        """The events that made a tensor which is bad now that the step is over."""
        return self.producers.of(tensor) or [self._entered(tensor, Where("forward"), "nothing on record")]

    def _entered(self, tensor: Tensor, where: Where, reader: str) -> Event:
        key = storage_key(tensor)
        leaf = self._leaves.get(key) if key is not None else None
        whole = plain(leaf.tensor) if leaf is not None else None
        content = tensor if whole is None or not is_bad(whole) else whole
        event = self._record(reader, where, provenance.measure(content))
        event.kind = leaf.kind if leaf is not None else "input"
        event.name = leaf.name if leaf is not None else "a tensor from outside the step"
        event.operands = (provenance.survey(event.name, content),)
        event.legal = event.kind in ("input", "buffer") and provenance.is_mask(content)
        if content.dim() > 1 and event.kind == "input":
            rows = provenance.bad_mask(content).flatten(1).any(dim=1).nonzero().flatten()
            event.rows = tuple(int(row) for row in rows[:8])
        self.producers.add(content, event)
        return event

    def _record(self, operation: str, where: Where, damage: Damage) -> Event:
        event = Event(
            index=len(self.events), operation=operation, kind=where.kind, damage=damage,
            node=where.node, place=where.place, applied=where.applied, module=where.module,
        )  # fmt: skip
        self.events.append(event)
        return event

    def _after(self, call: Call, before: list[tuple[str, Before]], result: Any, node: Any, stack: Stack | None) -> None:
        changed = [entry.tensor for _, entry in before] + [t for t in map(plain, call.targets) if t is not None]
        for tensor in changed:
            self.producers.forget_healed(tensor)
        read = {storage_key(tensor) for _, tensor in call.inputs}
        mutated = {storage_key(tensor) for tensor in changed}
        results = [dense for _, value in tensors_in("", result) if (dense := plain(value)) is not None]
        made = changed + [t for t in results if storage_key(t) not in read and storage_key(t) not in mutated]
        bad = [tensor for tensor in made if is_bad(tensor)]
        if bad:
            self._blame(call, before, bad, node, stack)
        elif made:
            self._mark_passed_on(call)
        self._watch_ends(call, results, result, node, stack)

    def _blame(
        self, call: Call, before: list[tuple[str, Before]], bad: list[Tensor], node: Any, stack: Stack | None
    ) -> None:
        """Record an operation with bad results, and link it to those that made its bad operands."""
        suspects = [Suspect(name, tensor) for name, tensor in self._bad_inputs(call)]
        suspects += [Suspect(name, entry.content, entry.events) for name, entry in before if entry.events]
        suspects = guilty(call, suspects, bad)
        parents = [e for s in suspects for e in s.events or self._behind(s.tensor, call, node, stack)]
        parents += self._behind_numbers(call)
        event = self._record(call.name, self._where(node, stack), provenance.glance(bad[0]))
        event.parents = list(dict.fromkeys(parents))
        for parent in event.parents:
            parent.passed_on = True
        numbers = provenance.non_finite_numbers(call.others.values())
        on_purpose = all(parent.legal for parent in event.parents) if event.parents else set(numbers) == {-math.inf}
        event.legal = on_purpose and not event.has_nan
        if call.name == "aten.empty" or call.name.rpartition(".")[2] in UNSET:
            event.parents, event.legal = [], False
        event.reduces = any(suspect.tensor.numel() > bad[0].numel() for suspect in suspects)
        event.writes = call.name.rpartition(".")[2] in ("copy_", "fill_", "index_put_", "masked_fill_")
        if event.origin or event.legal or event.writes:
            event.damage = provenance.measure(bad[0])
            self._survey(event, call, before)
        for tensor in bad:
            self.producers.add(tensor, event)

    def _survey(self, event: Event, call: Call, before: list[tuple[str, Before]]) -> None:
        contents = [*((name, entry.content) for name, entry in before), *call.inputs]
        order = list(dict.fromkeys(["self", *(name for name, _ in contents)]))
        contents.sort(key=lambda pair: order.index(pair[0]))
        event.operands = tuple(provenance.survey(name, tensor, event.damage) for name, tensor in contents)
        event.arguments = {key: value for key, value in call.others.items() if value is not None}

    def _behind_numbers(self, call: Call) -> list[Event]:
        """Events whose result the program read as a Python number and now hands to this operation."""
        wanted = provenance.non_finite_numbers(call.others.values())
        same = [event for known, event in self._numbers for number in wanted if _same(known, number)]
        return same[-1:]

    def _mark_passed_on(self, call: Call) -> None:
        for _, tensor in call.inputs:
            dense = plain(tensor)
            if dense is not None and dense in self.producers and is_bad(dense):
                for event in self.producers.of(dense):
                    event.passed_on = True

    def _watch_ends(self, call: Call, results: list[Tensor], result: Any, node: Any, stack: Stack | None) -> None:
        """Note bad values where they leave the graph: what backward starts from, leaves' gradients, Python numbers."""
        short = call.name.rpartition(".")[2]
        if short == "lift_fresh" and results and is_bad(results[0]) and not self._known(results[0]):
            self._constant(results[0], node, stack)
        elif short == "_local_scalar_dense" and isinstance(result, float) and not math.isfinite(result):
            self._numbers += [
                (result, event) for _, t in self._bad_inputs(call) for event in self._behind(t, call, node, stack)
            ]
        elif short == "ones_like" and calls("_make_grads"):
            self.roots += [event for _, t in self._bad_inputs(call) for event in self._behind(t, call, node, stack)]
        elif node is not None and node.name().endswith("AccumulateGrad") and results and is_bad(results[0]):
            self.gradients[id(node.variable)] = self._behind(results[0], call, node, stack)

    def _known(self, tensor: Tensor) -> bool:
        return tensor in self.producers or storage_key(tensor) in self._leaves

    def _constant(self, tensor: Tensor, node: Any, stack: Stack | None) -> None:
        """A tensor made of Python or NumPy values: the program's own numbers, or one that it had read from a tensor."""
        event = self._record("torch.tensor", self._where(node, stack), provenance.measure(tensor))
        if tensor.numel() == 1 and not tensor.is_complex():
            event.parents = [made for known, made in self._numbers if _same(known, float(tensor))][-1:]
        event.legal = not event.parents and provenance.is_mask(tensor)
        event.operands = (provenance.survey("values", tensor),)
        self.producers.add(tensor, event)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
