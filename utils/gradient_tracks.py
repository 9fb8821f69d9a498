"""Follows the gradients of a few parameters from one move of their optimizer to the next. Changes no gradient.

The state is tested, not the calls: is `p.grad` the very tensor, at the very version, that the optimizer has used? A
`zero_grad` of any kind, in any place, either takes the tensor away or raises its version.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

__all__ = ["GradientTracks"]

TRACKED = 3
"""Parameters followed in each optimizer: the first, the last and one in the middle."""
PATIENCE = 520
"""Steps that an interval may take: gradients of 512 batches may rightly add up."""


class _Track:
    """One parameter, from the moment it is followed."""

    def __init__(self, name: str, parameter: Tensor, optimizer: int, discarded: Callable[[], None]) -> None:
        self.name, self.parameter, self.optimizer, self._discarded = name, parameter, optimizer, discarded
        self.seen: tuple[weakref.ref[Tensor], int] | None = None
        """The gradient as it was when we saw it last, and its version."""
        self.used = False
        """Whether it was the optimizer that used it then."""
        self.moved_since = False
        self.dirty = False
        """Whether what the optimizer has used was added to, and is still in the gradient."""
        self.handles: list[Any] = [
            parameter.register_hook(self.before),
            parameter.register_post_accumulate_grad_hook(self.after),
        ]

    def intact(self) -> bool:
        """Whether the gradient is what it was when we saw it last."""
        gradient, seen = self.parameter.grad, self.seen
        return gradient is not None and seen is not None and seen[0]() is gradient and gradient._version == seen[1]

    def before(self, _: Tensor) -> None:
        """A backward pass is about to add to the gradient."""
        if self.seen is None:
            return
        intact = self.intact()
        if self.used:
            # waits for the device, and only on suspicion: to add to a gradient of zeros does no harm
            self.dirty, self.used = intact and not _is_empty(self.parameter.grad), False
        elif not intact:
            self.dirty = False
            if not self.moved_since and _is_empty(self.parameter.grad):
                self._discarded()

    def after(self, parameter: Tensor) -> None:
        """It has added to it."""
        self.note()
        self.moved_since = False

    def note(self) -> None:
        """Remember the gradient as it is."""
        gradient = self.parameter.grad
        self.seen = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def moved(self) -> bool:
        """The optimizer has used the gradient; whether a part of it had been used before."""
        gradient = self.parameter.grad
        again = self.dirty and gradient is not None and self.seen is not None and self.seen[0]() is gradient
        self.note()
        self.used, self.dirty = gradient is not None, False
        return again


def _is_empty(gradient: Tensor | None) -> bool:
    """Whether it was cleared. Waits for the device; asked only where nothing has used what was there before."""
    if gradient is None:
        return True
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return not bool(values.detach().any())


class GradientTracks:
    """Follows some parameters of each optimizer, for an interval after it was told to.

    Args:
        again: called with a parameter's name when its optimizer has used a gradient a second time.
        discarded: called when gradients were cleared that no optimizer has used.
        complete: called when an optimizer has moved twice.
    """

    def __init__(
        self, again: Callable[[str], None], discarded: Callable[[], None], complete: Callable[[], None]
    ) -> None:
        self._again, self._discarded, self._complete = again, discarded, complete
        self._tracks: dict[int, list[_Track]] = {}
        self._moves: dict[int, int] = {}
        self._since = 0
        self._told = False

    def arm(self, step: int, optimizers: Sequence[Optimizer], names: dict[int, str]) -> None:
        """Follow every optimizer from now on, if that is not done already."""
        if self._tracks:
            self._told = False
            return
        self._since, self._moves, self._told = step, {}, False
        for index, optimizer in enumerate(optimizers):
            held = [p for group in optimizer.param_groups for p in group["params"] if not is_lazy(p)]
            held = [p for p in held if p.requires_grad and p.is_leaf]
            chosen = {id(p): p for p in (held[:1] + held[len(held) // 2 :][:1] + held[-1:])[:TRACKED]}
            self._tracks[index] = [_Track(names.get(key, "?"), p, index, self._discard) for key, p in chosen.items()]

    def next_step(self, step: int) -> None:
        """A step begins."""
        self._told = False
        if self._tracks and step - self._since > PATIENCE:
            self.release()

    def _discard(self) -> None:
        if not self._told:
            self._told = True
            self._discarded()

    def moved(self, index: int) -> None:
        """This optimizer has moved."""
        tracks = self._tracks.get(index)
        if tracks is None:
            return
        hits = [track.name for track in tracks if track.moved()]
        for entries in self._tracks.values():
            for track in entries:
                track.moved_since = True
        self._moves[index] = self._moves.get(index, 0) + 1
        if hits:
            self._again(hits[0])
        if self._moves[index] > 1:
            self._complete()
            if not hits or self._moves[index] > 3:
                self._let_go(index)

    def _let_go(self, index: int) -> None:
        for track in self._tracks.pop(index):
            for handle in track.handles:
                handle.remove()

    def release(self) -> None:
        """Every hook off."""
        for index in list(self._tracks):
            self._let_go(index)
