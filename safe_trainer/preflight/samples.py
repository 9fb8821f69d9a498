"""The samples that the data check looks at: inputs and targets of some batches, as they come and put together."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import ProgramFailed
from safe_trainer.preflight.reading import clone, in_this_process, is_read_once, tensors

MOST = 20_000
"""Samples that are read at most: enough for any of the looks."""


@dataclass
class Samples:
    """Batches of one loader, in the order in which it gives them."""

    batches: list[Any]
    complete: bool
    """Whether that is all that the loader has."""

    @cached_property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Input and target of each batch, where a batch is two tensors with the samples in front; else none."""
        found = []
        for batch in self.batches:
            if not isinstance(batch, (list, tuple)) or len(batch) != 2:
                return []
            first, second = batch
            if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not first.dim() or not second.dim():
                return []
            if len(first) != len(second) or first.layout is not torch.strided:
                return []
            found.append((first.detach().cpu(), second.detach().cpu()))
        alike = {(x.shape[1:], y.shape[1:]) for x, y in found}
        return found if len(alike) == 1 else []

    @cached_property
    def inputs(self) -> Tensor | None:
        """All inputs, samples in front."""
        return torch.cat([x for x, _ in self.pairs]) if self.pairs else None

    @cached_property
    def targets(self) -> Tensor | None:
        """All targets, samples in front."""
        return torch.cat([y for _, y in self.pairs]) if self.pairs else None

    @cached_property
    def classes(self) -> Tensor | None:
        """One class for each sample, where the targets are that; whole numbers, few different ones."""
        targets = self.targets
        if targets is None or targets.numel() != len(targets):
            return None
        flat = targets.flatten()
        if flat.is_floating_point():
            if not bool(((flat == 0) | (flat == 1)).all()):
                return None
            flat = flat.long()
        return flat if 2 <= len(flat.unique()) <= max(2, len(flat) // 5) else None


def read_samples(loader: Any, clock: Clock, most: int = MOST) -> Samples:
    """Read a loader's first epoch as far as the time allows; nothing of an iterator.

    Raises:
        ProgramFailed: reading it raises.
    """
    if loader is None or is_read_once(loader):
        return Samples([], False)
    batches: list[Any] = []
    count = 0
    iterator = iter(in_this_process(loader))
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return Samples(batches, True)
        except Exception as error:
            raise ProgramFailed(f"the loader raised {type(error).__name__}: {error}") from error
        batches.append(clone(batch))
        count += next((len(t) for t in itertools.islice(tensors(batch), 1) if t.dim()), 1)
        if count >= most or clock.left() < clock.seconds / 2:
            return Samples(batches, False)
