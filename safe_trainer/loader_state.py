"""Where a loader stands in its epoch, so that a run can go on from there to the very same batches.

Our own loaders are set to a position. A loader with a state of its own, such as torchdata's StatefulDataLoader, is
given it back, unless its workers draw random numbers: their generators are in no state. Any other loader is a user's:
its generators and the global ones are remembered as they stood when the epoch began, and on resume the epoch is begun
again from there and the batches already trained on are read and dropped.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from safe_trainer.data import has_random_transforms
from safe_trainer.utils import rng

log = logging.getLogger(__name__)

ORDER = ("seed", "batch_size", "count")
"""What the order of a loader that is set to a position follows from."""


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
        if resumed is not None and resumed.get("stateful") is not None and self._takes_state(done):
            return self._begin_with_state(resumed, done)
        if resumed is not None:
            self._warn_of_workers(epoch)
            self._restore(resumed["start"] if done else resumed["now"])
        self._start = self._capture()
        batches: Iterator[Any] = iter(loader)
        if done:
            self._skip(batches, epoch, done)
        return batches

    def _begin_with_state(self, resumed: Mapping[str, Any], done: int) -> Iterator[Any]:
        """Give the loader its state back. That may draw random numbers; the run that was not stopped did not."""
        loader: Any = self.loader
        loader.load_state_dict(resumed["stateful"])
        loader.state_dict()  # a StatefulDataLoader takes the state in only when it is asked for something
        self._restore(resumed["now"])
        batches: Iterator[Any] = iter(loader)
        if done:
            self._restore(resumed["now"])
            self._start = resumed["start"]
        else:
            self._start = resumed["now"]
        return batches

    def _takes_state(self, done: int) -> bool:
        """Whether the loader's own state leads to the same batches; otherwise the epoch's start does."""
        loader: Any = self.loader
        dataset = getattr(loader, "dataset", None)
        if not hasattr(loader, "load_state_dict"):
            return False
        if dataset is None or isinstance(dataset, IterableDataset) or hasattr(dataset, "state_dict"):
            return True
        in_workers = getattr(loader, "num_workers", 0) > 0
        return done > 0 and not (in_workers and has_random_transforms(dataset))

    def _skip(self, batches: Iterator[Any], epoch: int, done: int) -> None:
        """Read the batches that were trained on, and drop them."""
        log.info("The loader cannot be set to a position: %d batches of epoch %d are read again.", done, epoch + 1)
        skipped = sum(1 for _ in itertools.islice(batches, done))
        if skipped < done:
            log.warning("The loader gave only %d of the %d batches trained on; has it changed?", skipped, done)

    def _warn_of_workers(self, epoch: int) -> None:
        """Workers that outlive an epoch carry generators from one to the next, which nobody outside can save."""
        loader: Any = self.loader
        if epoch and getattr(loader, "persistent_workers", False) and has_random_transforms(loader.dataset):
            log.warning(
                "The loader has persistent workers: if its data set draws random numbers, they are others from here "
                "on. persistent_workers=False, or random_transforms = False on a data set that draws none, avoids it."
            )

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs. A loader that is set to a position needs but its seed."""
        loader: Any = self.loader
        if hasattr(loader, "set_position"):
            return {name: getattr(loader, name) for name in ORDER if hasattr(loader, name)}
        is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        stateful = loader.state_dict() if is_stateful else None
        return {"stateful": stateful, "start": self._start, "now": self._capture()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the place of an earlier run; it counts from the next `begin`."""
        loader: Any = self.loader
        if not hasattr(loader, "set_position"):
            self._resumed = state if "now" in state else None
        elif "seed" in state:
            loader.seed = state["seed"]  # also one that nobody chose: the order is to go on

    def generators(self) -> list[Tensor]:
        """States of the loader's own generators alone."""
        return [generator.get_state() for generator in self._generators()]

    def set_generators(self, states: list[Tensor]) -> None:
        """Put them back, as far as the loader has them."""
        for generator, kept in zip(self._generators(), states, strict=False):
            generator.set_state(kept)

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
