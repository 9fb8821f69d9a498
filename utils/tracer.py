"""Names the first operation of a replayed step whose non-finite result reaches the loss or a gradient.

Runs the step once more under a dispatch mode; results, generators and the anomaly setting are left as without it.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from safe_trainer.utils.facts import Facts
from safe_trainer.utils.provenance import Damage, Event, Key, Operand, flatten_batch, is_bad, plain, storage_key
from safe_trainer.utils.recorder import Leaf, Recorder
from safe_trainer.utils.remedies import explain

__all__ = ["Culprit", "Operand", "Trace", "trace"]


@dataclass(frozen=True)
class Culprit:
    """Where the first harmful NaN or infinity of a step was made, or how it came in."""

    operation: str
    """For example `aten.log`; for something that came in from outside, the operation that read it first."""
    kind: str
    """forward, backward, input, parameter or buffer."""
    node: str | None
    """Autograd node of a backward operation, `LogBackward0`."""
    operands: tuple[Operand, ...]
    value: str
    """nan, inf or -inf."""
    bad_count: int
    total: int
    first_index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str | None
    """Dotted path of the innermost module that ran it; None for the model as a whole and outside of it."""
    source: str | None
    """The user's line, `model.py:42`; of a built-in backward operation the forward line that it belongs to."""
    path: str | None
    """Full path of that file."""
    line: int | None
    code: str
    """Text of that line."""
    applied_at: str | None
    """For a custom `autograd.Function`: the line that applied it (`source` is the line inside it)."""
    name: str | None
    """Of what came in from outside: `batch[0]`, `fc.weight`."""
    rows: tuple[int, ...]
    """First few rows of a batch entry that hold a bad value."""
    explanation: str
    remedy: str

    @property
    def outside(self) -> bool:
        """Whether it came in from outside the step."""
        return self.kind in ("input", "parameter", "buffer")

    @property
    def place(self) -> str:
        """Source line and module as a phrase, empty if neither is known."""
        line = f" at {self.source}" if self.source else ""
        module = f" (module {self.module})" if self.module else ""
        applied = f", applied at {self.applied_at}" if self.applied_at else ""
        return line + module + applied

    @property
    def what(self) -> str:
        """What went bad and where, without why: `aten.log gave -inf in 3 of 640 elements at model.py:42`."""
        share = f"{self.value} in {self.bad_count} of {self.total} elements"
        if self.outside:
            return f"{self.name} already held {share} before it was used; {self.operation} read it first{self.place}"
        if self.kind == "backward":
            return f"{self.operation} in {self.node} (backward) gave {share}{self.place}"
        return f"{self.operation} gave {share}{self.place}"

    def describe(self) -> str:
        """The culprit in one paragraph: what, where, why, what to do."""
        return f"{self.what}, {self.explanation}; {self.remedy}"


@dataclass(frozen=True)
class Trace:
    """What the replay of one step showed."""

    culprit: Culprit | None
    reproduced: bool
    """Whether the loss, a gradient, a weight or a buffer went non-finite again (or the step raised after one did)."""
    loss: Tensor | None
    """The loss that the step returned, if it returned one; without its graph."""
    result: Any
    """All that the step returned."""
    bad: tuple[str, ...]
    """What was non-finite at the end: 'loss', 'gradient of fc.weight'."""
    error: Exception | None
    """What the step raised."""
    operations: int
    """Number of operations seen."""


def trace(
    step: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    batch: Any = None,
    watched: Mapping[str, Tensor] | Iterable[Tensor] = (),
) -> Trace:
    """Run `step` (forward and backward) once and name the operation that its NaN or infinity starts from.

    Args:
        step: returns the loss, or a mapping or tuple with the loss in it, or None. If it raises, the verdict is taken
            from what was seen until then, and the exception is in the result.
        model: names parameters, buffers and modules.
        batch: what the step reads, in any nesting; it is only looked at.
        watched: further tensors whose gradients must be finite, such as parameters outside the model.

    The caller restores generators, buffers and gradients before and after: a replay is a step like any other.
    """
    named = _named_tensors(model, watched)
    finite = [name for name, (_, tensor) in named.items() if (dense := plain(tensor)) is not None and not is_bad(dense)]
    modules = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    leaves = _leaves(named, batch)
    recorder = Recorder(leaves, lambda module: modules.get(id(module)), _run_step.__code__)
    result, error = _run_step(step, recorder)
    loss = find_loss(result)
    ends = _ends(recorder, result, loss, named, finite)
    if error is not None and not any(ends.values()):
        ends["the step before it raised"] = _loose_ends(recorder)
    bad = tuple(name for name, events in ends.items() if events)
    culprit = _verdict(ends)
    return Trace(
        culprit, bool(bad), loss.detach() if loss is not None else None, result, bad, error, recorder.operations
    )


def _run_step(step: Callable[[], Any], recorder: Recorder) -> tuple[Any, Exception | None]:
    """Run the step under the recorder, uncompiled; the stack is read as far down as this very function."""
    compiling = "torch._dynamo" in sys.modules  # importing it takes seconds, and nothing is compiled without it
    eager = torch.compiler.set_stance("force_eager") if compiling else contextlib.nullcontext()
    with warnings.catch_warnings(), eager:
        warnings.filterwarnings("ignore", message="Error detected in")  # anomaly mode's own account of an exception
        with torch.autograd.set_detect_anomaly(True, check_nan=False), recorder:
            try:
                return step(), None
            except Exception as error:
                return None, error


def find_loss(result: Any) -> Tensor | None:
    """The loss in what a step returned: itself, under the key `loss`, or the first tensor with one element."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping):
        named = result.get("loss")
        if isinstance(named, Tensor):
            return named
        result = tuple(result.values())
    elif not isinstance(result, (list, tuple)) and isinstance(getattr(result, "loss", None), Tensor):
        loss: Tensor = result.loss
        return loss
    if isinstance(result, (list, tuple)):
        scalars = [entry for entry in result if isinstance(entry, Tensor) and entry.is_floating_point()]
        return next((entry for entry in scalars if entry.numel() == 1), None)
    return None


def _named_tensors(
    model: nn.Module | None, watched: Mapping[str, Tensor] | Iterable[Tensor]
) -> dict[str, tuple[str, Tensor]]:
    """Name -> (kind, tensor) of all that lives longer than the step, parameters first."""
    named: dict[str, tuple[str, Tensor]] = {}
    if model is not None:
        named |= {name: ("parameter", tensor) for name, tensor in model.named_parameters()}
    extra = watched.items() if isinstance(watched, Mapping) else ((f"watched[{i}]", t) for i, t in enumerate(watched))
    known = {id(tensor) for _, tensor in named.values()}
    named |= {name: ("parameter", tensor) for name, tensor in extra if id(tensor) not in known}
    if model is not None:
        named |= {name: ("buffer", tensor) for name, tensor in model.named_buffers()}
    return named


def _leaves(named: Mapping[str, tuple[str, Tensor]], batch: Any) -> dict[Key, Leaf]:
    entries = [Leaf(kind, name, tensor) for name, (kind, tensor) in named.items()]
    entries += [
        Leaf("parameter", f"the gradient of {entry.name}", entry.tensor.grad)
        for entry in entries
        if entry.kind == "parameter" and entry.tensor.grad is not None
    ]
    entries += [Leaf("input", name, tensor) for name, tensor in flatten_batch(batch)]
    leaves: dict[Key, Leaf] = {}
    for entry in entries:
        dense = plain(entry.tensor)
        key = storage_key(dense) if dense is not None else None
        if key is not None:
            leaves.setdefault(key, entry)
    return leaves


def _ends(
    recorder: Recorder,
    result: Any,
    loss: Tensor | None,
    named: Mapping[str, tuple[str, Tensor]],
    finite: Iterable[str],
) -> dict[str, list[Event]]:
    """What was bad at the end and the events behind it, losses first, as the loss explains the gradients."""
    losses = [loss] if loss is not None else []
    if isinstance(result, (list, tuple)):
        losses += [entry for entry in result if isinstance(entry, Tensor) and entry.dim() == 0 and entry.requires_grad]
    ends = {"loss": [event for entry in losses for event in _behind(recorder, entry)] + recorder.roots}
    gradients = dict(recorder.gradients)
    for name, (kind, tensor) in named.items():
        if kind == "parameter":
            early = gradients.pop(id(tensor), [])
            ends[f"gradient of {name}"] = _behind(recorder, tensor.grad) or early
    if not any(kind == "parameter" for kind, _ in named.values()):  # nobody told which leaves matter
        ends["gradient of a leaf"] = [event for events in gradients.values() for event in events]
    for name in finite:
        ends[name] = _behind(recorder, named[name][1])
    return ends


def _behind(recorder: Recorder, tensor: Tensor | None) -> list[Event]:
    dense = plain(tensor)
    return recorder.behind(dense) if dense is not None and is_bad(dense) else []


def _loose_ends(recorder: Recorder) -> list[Event]:
    """The latest non-finite result that nothing used or made finite: what a step that raised most likely fell over."""
    left = [event for event in recorder.events if not event.passed_on and not event.legal]
    return recorder.failed or left[-1:]


def _verdict(ends: Mapping[str, list[Event]]) -> Culprit | None:
    """The earliest origin behind the loss; if that is finite, behind the gradients; else behind weights and buffers."""
    groups = [[name for name in ends if name == "loss"], [name for name in ends if name.startswith("gradient of")]]
    groups.append([name for name in ends if name not in groups[0] and name not in groups[1]])
    for group in groups:
        events = [event for name in group for event in ends[name]]
        if events:
            reached = next(name for name in group if ends[name])
            return _culprit(*_first_origin(events), reached)
    return None


def _first_origin(events: list[Event]) -> tuple[Event, Event | None]:
    """Walk back from bad results to the earliest event that made something bad of something good.

    Where only infinities that were written on purpose lead there, it is the operation that let them through: the
    first to mix them into fewer elements. The second value is the event that turned the first one's infinity into NaN.
    """
    seen: dict[Event, Event | None] = dict.fromkeys(events)
    waiting = list(seen)
    while waiting:
        event = waiting.pop()
        for parent in event.parents:
            if parent not in seen:
                seen[parent] = event
                waiting.append(parent)
    origins = [event for event in seen if event.origin]
    if not origins:
        through = [event for event in seen if event.reduces] or [event for event in seen if not event.parents]
        return min(through, key=lambda event: event.index), None
    first = min(origins, key=lambda event: event.index)
    writer = seen[first]
    if first.operation == "torch.tensor" and writer is not None and writer.place == first.place and writer.writes:
        first = writer  # x[0] = float("nan"): the assignment, not the number that torch makes a tensor of
    later: Event | None = first
    while later is not None and not later.has_nan:
        later = seen[later]
    return first, later if later is not first else None


def _culprit(event: Event, turned: Event | None, reached: str) -> Culprit:
    operation = event.operation
    masks = [parent for parent in event.parents if parent.legal]
    facts = Facts(
        operation=operation, kind=event.kind, node=event.node, operands=event.operands, arguments=event.arguments,
        damage=event.damage, name=event.name, rows=event.rows, reached=reached,
        masked=_label(_root(masks[0])) if masks else None, turned=_label(turned) if turned is not None else None,
    )  # fmt: skip
    explanation, remedy = explain(facts)
    damage: Damage = event.damage
    place = event.place or next((parent.place for parent in event.parents if parent.place is not None), None)
    return Culprit(
        operation=operation, kind=event.kind, node=event.node, operands=event.operands, value=damage.value,
        bad_count=damage.bad_count, total=damage.total, first_index=damage.first_index, shape=damage.shape,
        dtype=damage.dtype, module=event.module, source=str(place) if place else None,
        path=place.path if place else None, line=place.line if place else None, code=place.code if place else "",
        applied_at=str(event.applied) if event.applied else None, name=event.name, rows=event.rows,
        explanation=explanation, remedy=remedy,
    )  # fmt: skip


def _root(event: Event) -> Event:
    while event.parents:
        event = event.parents[0]
    return event


def _label(event: Event) -> str:
    inside = f" in {event.node}" if event.node else ""
    named = event.name or f"{event.operation}{inside}"
    return f"{named} at {event.place}" if event.place else named
