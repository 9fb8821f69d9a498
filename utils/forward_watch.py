"""Sees each call of a model: in which mode, with gradients or without, and which of its graphs live on.

One forward hook on the model, which in the steady state asks two questions and goes. It changes no tensor; to the
autograd graph of a step that is looked at it ties a token, so that the graph's end can be told.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from safe_trainer.utils.measures import floats
from safe_trainer.utils.program_record import Episode, Look, Record
from safe_trainer.utils.source_lines import Place, owner

__all__ = ["ForwardWatch", "OwnHook", "sensitive_layers"]

EPISODES = 32
"""Episodes kept: what 32 of them do not show, the next will not."""
GROUPS = 64
"""Steps whose graphs are remembered."""
_KEY = "safe_trainer_token"


class _Token:
    """Lives as long as the autograd node that it is tied to."""

    __slots__ = ("__weakref__",)


class OwnHook:
    """A forward hook. A copy or a pickle of the model does not take it along, nor what it belongs to."""

    def __init__(self, call: Callable[[nn.Module, Any, Any], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._call(module, arguments, output)

    def __deepcopy__(self, _: Any) -> Any:
        return contextlib.nullcontext().__exit__  # takes anything, does nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class ForwardWatch:
    """Fills the record with what the calls of a model show. `attach` before the run, `detach` after it."""

    def __init__(self, model: nn.Module, record: Record) -> None:
        self.entry, self.record = model, record
        self.model = getattr(model, "_orig_mod", model)  # of a compiled model, whose hook must stay outside
        self.inside = False
        """Whether a training step is open."""
        self.declared = False
        """Whether the program says that it is evaluating."""
        self.paused = False
        self.moves = 0
        """Optimizer steps since the run began, of all optimizers."""
        self.moved_inside = False
        """Whether an optimizer has moved in the open step."""
        self.look: Look | None = None
        self.first_modes: dict[str, bool] = {}
        self._handles: list[Any] = []
        self._episode: Episode | None = None
        self._last_input: int | None = None
        self._trained_on: int | None = None
        self._left: set[str] | None = None
        self._known_codes: set[CodeType] = set()
        """Functions that a training forward runs in."""
        self._evaluated = False
        self._tokens: list[tuple[int, int, bool, weakref.ref[_Token]]] = []
        self._tied = 0

    def attach(self) -> None:
        """Hook on; a model that is only a container of others is watched at those."""
        entries = [self.entry]
        while any(_is_container(entry) for entry in entries):
            entries = [
                part for entry in entries for part in (entry.children() if _is_container(entry) else [entry])
            ]  # fmt: skip
        hook = OwnHook(self.called)
        self._handles = [entry.register_forward_hook(hook) for entry in entries]

    def detach(self) -> None:
        """Hook off."""
        self.end_episode()
        while self._handles:
            self._handles.pop().remove()

    # --- what the hook does --------------------------------------------------------------------------------------

    def called(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """A call of the model has ended."""
        if torch.compiler.is_compiling() or self.paused:
            return
        if torch.is_grad_enabled() and not self.declared:
            if self.inside:
                self._trained_on = id(arguments[0]) if arguments else None
                self._episode = None  # what was computed before may be what this one learns from
            if self.look is not None and self.inside:
                self._training(module, output)
            elif not self.inside and self._tied != self.record.steps:
                self._tie(output)
        elif getattr(module, "_orig_mod", module).training:
            self._evaluation(arguments)
            if self.declared and torch.is_grad_enabled() and self._tied != self.record.steps:
                self._tie(output)
        else:
            self.record.evaluates = self._evaluated = True
            self._episode = None
            if self.declared and torch.is_grad_enabled() and self._tied != self.record.steps:
                self._tie(output)

    def _training(self, module: nn.Module, output: Any) -> None:
        look = self.look
        assert look is not None
        look.forwards += 1
        self._tie(output)
        in_eval = {name for name, part in self.model.named_modules() if not part.training}
        self._left = in_eval if self._left is None else self._left & in_eval
        if not self._known_codes:
            self._known_codes = {frame.f_code for frame in _frames()}

    def _tie(self, output: Any) -> None:
        """Tie a token to the graph of this output."""
        node = next((tensor.grad_fn for tensor in floats(output) if tensor.grad_fn is not None), None)
        if node is None:
            return
        token = _Token()
        notes: Any = node.metadata  # torch's stubs take it for a method
        notes[_KEY] = token
        self._tokens.append((self.record.steps, self.moves, self.inside, weakref.ref(token)))
        if not self.inside or self.declared:
            self._tied = self.record.steps  # one a visit is enough: evaluations are long

    # --- evaluation in training mode -------------------------------------------------------------------------------

    def _evaluation(self, arguments: tuple[Any, ...]) -> None:
        """A call in training mode that no training comes from, as far as one can tell now."""
        if len(self.record.episodes) >= EPISODES or (self.inside and not self.moved_inside and not self.declared):
            return
        given = id(arguments[0]) if arguments else None
        again = given is not None and (given == self._last_input or (self.inside and given == self._trained_on))
        episode, self._last_input = self._episode, given
        if episode is not None:
            episode.count += 1
            episode.repeated |= again
            return
        layers = sensitive_layers(self.model, active=True)
        if not layers:
            return
        function, place = _caller(self._known_codes)
        self._episode = Episode(
            step=self.record.steps, function=function, source=place, layers=layers, declared=self.declared,
            inside=self.inside, repeated=again and self.inside,
        )  # fmt: skip

    def end_episode(self) -> None:
        """What was called since is over: keep it, unless eval mode came along as well."""
        episode, self._episode = self._episode, None
        self._last_input = None
        if episode is not None:
            self.record.episodes.append(episode)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The body evaluates the model, as the program itself says."""
        self.end_episode()
        self.declared, self._evaluated = True, False
        try:
            yield
        finally:
            if self._evaluated:
                self._episode = None  # calls in both modes: it knows what it does, as in measuring BatchNorm anew
            self.end_episode()
            self.declared = False

    # --- around a step ---------------------------------------------------------------------------------------------

    def begin(self, look: Look | None) -> None:
        """A training step begins."""
        if self._episode is not None:
            self.end_episode()
        self.inside, self.moved_inside, self._trained_on = True, False, None
        if look is not None:
            self.look, self._left = look, None
            self._count(look)

    def end(self) -> None:
        """It is over."""
        if self._episode is not None:
            self.end_episode()
        if self.look is not None:
            if self._left is not None:
                self._judge_modes(self.look, self._left)
            self.look = None
        self.inside = False

    def moved(self) -> None:
        """An optimizer has moved."""
        self.moves += 1
        self.moved_inside = True
        if self.inside and not self.declared:
            self._episode = None  # a teacher's forward, or a generator's: it was part of training

    def _count(self, look: Look) -> None:
        """Count the graphs of earlier steps that are alive, of those behind which optimizers have moved twice."""
        alive: dict[int, bool] = {}
        for step, moves, _, token in self._tokens:
            if step < look.step - 1 and moves < self.moves - 1:
                alive[step] = alive.get(step, False) or token() is not None
        look.graphs, look.graphs_alive = len(alive), sum(alive.values())
        if len(alive) > GROUPS:
            newest = sorted(alive)[-GROUPS:][0]
            self._tokens = [entry for entry in self._tokens if entry[0] >= newest]

    def _judge_modes(self, look: Look, in_eval: set[str]) -> None:
        """Compare the modules that were in eval in all forwards of this step with those of the first."""
        if not self.first_modes:
            self.first_modes = {name: name not in in_eval for name, _ in self.model.named_modules()}
            if not any(self.first_modes.values()):
                self.record.started_in_eval = sensitive_layers(self.model, active=False)
        look.left = self._topmost({name for name in in_eval if self.first_modes.get(name)})

    def _topmost(self, left: set[str]) -> list[str]:
        """Of these modules the outermost that hold both weights that learn and layers to which the mode matters."""
        found: list[str] = []
        for name, module in self.model.named_modules():
            if name not in left or any(not outer or name.startswith(outer + ".") for outer in found):
                continue
            if _learns_in(module) and sensitive_layers(module, active=False):
                found.append(name)
        return found


def _is_container(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward and any(True for _ in module.children())


def _learns_in(module: nn.Module) -> bool:
    """Whether it is as a whole in eval, and holds weights of something besides normalisation."""
    owners = [part for part in module.modules() if any(True for _ in part.parameters(recurse=False))]
    others = [part for part in owners if not isinstance(part, (_NormBase, nn.GroupNorm, nn.LayerNorm))]
    return bool(others) and not any(part.training for part in owners)


def sensitive_layers(module: nn.Module, *, active: bool) -> list[str]:
    """Names, one of a kind, of the layers whose output depends on the mode.

    Args:
        active: only those that are in training mode now.
    """
    found: dict[str, str] = {}
    for name, part in module.named_modules():
        if active and not part.training:
            continue
        if isinstance(part, nn.modules.dropout._DropoutNd):
            differs = part.p > 0
        elif isinstance(part, _NormBase):  # without running statistics it does the same in both modes
            differs = part.track_running_stats and part.running_mean is not None
        else:
            differs = isinstance(part, (nn.RNNBase, nn.MultiheadAttention)) and part.dropout > 0
        if differs:
            found.setdefault(type(part).__name__, name or "(model)")
    return [f"{name} ({kind})" for kind, name in found.items()]


def _frames() -> Iterator[FrameType]:
    """The stack of the caller, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _caller(known: set[CodeType]) -> tuple[str, str | None]:
    """The user's function that had the model called from outside of any module, and the line.

    Args:
        known: functions that training runs in as well: a shared one that computes the loss says little.
    """
    found: list[FrameType] = []
    within = True
    for frame in _frames():
        if frame.f_code.co_name == "_call_impl" and isinstance(frame.f_locals.get("self"), nn.Module):
            found, within = [], False  # all so far ran within a module
        elif not within and owner(frame.f_code.co_filename) == "user":
            found.append(frame)
    if not found:
        return "?", None
    chosen = next((frame for frame in found if _whole(frame).f_code not in known), found[0])
    return _whole(chosen).f_code.co_name, str(Place(chosen.f_code.co_filename, chosen.f_lineno, ""))


def _whole(frame: FrameType) -> FrameType:
    """The function, where the frame is a comprehension or a lambda in it."""
    while frame.f_code.co_name.startswith("<") and frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return frame
