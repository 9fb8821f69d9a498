"""Where a loader stands in its epoch, so that a run can go on from there to the very same batches.

Our own loaders are set to a position. torchdata's StatefulDataLoader keeps its state itself. Any other loader is a
user's: its generators and the global ones are remembered as they stood when the epoch began, and on resume the epoch
is begun again from there and the batches already trained on are read and dropped.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from safe_trainer.utils import rng

log = logging.getLogger(__name__)


class LoaderState:
    """The place of one training loader. `begin` starts an epoch's pass; `state_dict` may be asked at any batch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._start: dict[str, Any] | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._passing: Iterator[Any] | None = None

    def begin(self, epoch: int, done: int) -> Iterator[Any]:
        """The batches of `epoch` from the one after `done` on."""
        loader: Any = self.loader
        if hasattr(loader, "set_position"):
            loader.set_position(epoch, done)
            return iter(loader)
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.get("stateful") is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(resumed["stateful"])
            return iter(loader)
        if resumed is not None:
            self._restore(resumed["start"] if done else resumed["now"])
        self._start = self._capture()
        batches = iter(loader)
        if done:
            log.info("The loader cannot be set to a position: %d batches of epoch %d are read again.", done, epoch + 1)
            skipped = sum(1 for _ in itertools.islice(batches, done))
            if skipped < done:
                log.warning(
                    "The loader gave only %d of the %d batches that were trained on; has it changed?", skipped, done
                )
        return batches

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs; nothing for a loader that is set to a position."""
        loader: Any = self.loader
        if hasattr(loader, "set_position"):
            return {}
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            return {"stateful": loader.state_dict(), "start": None, "now": None}
        return {"stateful": None, "start": self._start, "now": self._capture()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the place of an earlier run; it counts from the next `begin`."""
        self._resumed = state or None

    def _capture(self) -> dict[str, Any]:
        return {"global": rng.capture(), "own": [generator.get_state() for generator in self._generators()]}

    def _restore(self, state: Mapping[str, Any]) -> None:
        rng.restore(state["global"])
        own: list[Tensor] = state["own"]
        generators = self._generators()
        if len(own) != len(generators):
            log.warning(
                "The loader has %d generators, the checkpoint knows %d; its order may differ.",
                len(generators),
                len(own),
            )
        for generator, kept in zip(generators, own, strict=False):
            generator.set_state(kept)

    def _generators(self) -> list[torch.Generator]:
        """Every torch.Generator that the loader, its samplers or its data set holds, each once, in a fixed order."""
        loader = self.loader
        sampler = getattr(loader, "sampler", None)
        batch_sampler = getattr(loader, "batch_sampler", None)
        owners = [
            loader,
            sampler,
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(loader, "dataset", None),
        ]
        found: dict[int, torch.Generator] = {}
        for owner in owners:
            for value in vars(owner).values() if hasattr(owner, "__dict__") else ():
                if isinstance(value, torch.Generator):
                    found[id(value)] = value
        return list(found.values())
