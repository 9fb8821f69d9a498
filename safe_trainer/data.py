"""Order and randomness of samples: both follow from (seed, epoch, index) alone. Touches no global generator.

Worker count, resume point and whatever else draws random numbers change nothing about a batch. Two loaders keep to
that: ``OrderedLoader`` around a torch DataLoader, ``DeviceLoader`` for data that lives on the accelerator.
``build_loaders`` turns what a recipe's data function returned into loaders.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from safe_trainer.config import Config, ConfigError, LoaderConfig, did_you_mean
from safe_trainer.utils import rng

Collate = Callable[[list[Any]], Any]

# Evaluation keeps no activations for a backward, so a batch of it may be larger at the same memory.
EVAL_BATCH_FACTOR = 4


class Positioned:
    """Batches in an order that follows from (seed, epoch), and the place in it: what both loaders share.

    Each pass is one epoch. A pass that is broken off is not gone on with: the next one is the next epoch, from its
    start, unless `set_position` or `load_state_dict` names another place.
    """

    def __init__(
        self, count: int, batch_size: int, seed: int | None, shuffle: bool, drop_last: bool, same_every_epoch: bool
    ) -> None:
        self.count = count
        self.batch_size = batch_size
        self.seed = (
            int.from_bytes(os.urandom(7), "big") if seed is None else seed
        )  # of its own: the global one is not ours
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.same_every_epoch = same_every_epoch
        self._upcoming = self._position = (0, 0)

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self.count // self.batch_size if self.drop_last else math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self._position = self._upcoming
        self._upcoming = (epoch + 1, 0)
        drawn = 0 if self.same_every_epoch else epoch
        for done, batch in enumerate(self.load(drawn, self.batches(drawn)[first:]), first + 1):
            self._position = (epoch, done)
            yield batch
        self._position = (epoch + 1, 0)

    def load(self, epoch: int, batches: list[Tensor]) -> Iterator[Any]:
        """The batches made of the samples with these indices."""
        raise NotImplementedError

    def batches(self, epoch: int) -> list[Tensor]:
        """Indices of the samples of each batch of an epoch."""
        if self.shuffle:
            order = torch.randperm(self.count, generator=self.generator(epoch))
        else:
            order = torch.arange(self.count)
        return list(torch.split(order, self.batch_size)[: len(self)])

    def generator(self, epoch: int, stream: int = 0) -> torch.Generator:
        """A generator for choices about a whole epoch. Its key is no sample's: indices end below `count`."""
        return torch.Generator().manual_seed(rng.item_seed(self.seed, epoch, self.count + stream))

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Start the next pass at this batch of this epoch; the ones before it are not loaded.

        Raises:
            ValueError: no such position.
        """
        if epoch < 0 or not 0 <= batch <= len(self):
            raise ValueError(
                f"a position must be an epoch from 0 and a batch from 0 to {len(self)} (got {epoch} and {batch}); "
                "if it comes from a checkpoint, the data or the batch size is not the same as when it was written"
            )
        self._upcoming = self._position = (epoch, batch)

    def state_dict(self) -> dict[str, int]:
        """Where the next batch would be taken from: the epoch, the batches of it that were handed out, the seed."""
        epoch, batch = self._position
        return {"epoch": epoch, "batch": batch, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken, with its seed."""
        self.seed = state["seed"]
        self.set_position(state["epoch"], state["batch"])


class OrderedLoader(Positioned):
    """A torch DataLoader whose order and augmentation any `num_workers` and any resume point leave as they are.

    Generators of torch, NumPy and Python are seeded anew before each sample with random transforms, and in the main
    process set back afterwards. A data set says with an attribute `random_transforms` whether it has any; without it,
    all but tensors are taken to have some.

    Args:
        dataset: map-style: it has `__getitem__` and `__len__`.
        batch_size: samples in a batch.
        seed: which order and augmentation; None takes one that no other run has.
        shuffle: a new order each epoch; else the data set's own.
        num_workers: processes that load; they live as long as the loader.
        drop_last: leave out a last batch that is smaller than the others.
        device: where the batches will go; pages are pinned if that speeds the copy up.
        collate_fn: samples -> batch; it may draw random numbers too.
        pin_memory: overrides what `device` suggests.
        same_every_epoch: draw each epoch as if it were the first, as evaluation wants it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        seed: int | None,
        shuffle: bool,
        num_workers: int = 0,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        collate_fn: Collate | None = None,
        pin_memory: bool | None = None,
        same_every_epoch: bool = False,
    ) -> None:
        super().__init__(len(dataset), batch_size, seed, shuffle, drop_last, same_every_epoch)  # type: ignore[arg-type]
        self.dataset = dataset
        self.num_workers = num_workers
        self._keys = _Keys()
        on_cuda = device is not None and torch.device(device).type == "cuda"
        self._loader: DataLoader[Any] = DataLoader(
            _Seeded(dataset, collate_fn),
            batch_sampler=self._keys,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=on_cuda if pin_memory is None else pin_memory,
            persistent_workers=num_workers > 0,
            generator=torch.Generator().manual_seed(self.seed),  # else each pass draws from the global generator
        )

    def load(self, epoch: int, batches: list[Tensor]) -> Iterator[Any]:
        self._keys.now = [(self.seed, epoch, batch.tolist()) for batch in batches]
        return iter(self._loader)


class _Keys:
    """The batch sampler: what to load in the pass that starts next."""

    def __init__(self) -> None:
        self.now: list[tuple[int, int, list[int]]] = []

    def __iter__(self) -> Iterator[list[Any]]:
        return iter([list(key) for key in self.now])

    def __len__(self) -> int:
        return len(self.now)


class _Seeded(Dataset[Any]):
    """Loads whole batches; each sample is drawn under generators seeded for it."""

    def __init__(self, dataset: Any, collate_fn: Collate | None) -> None:
        self.dataset = dataset
        self.collate = collate_fn
        self.random = has_random_transforms(dataset)

    def __getitems__(self, key: list[Any]) -> Any:
        seed, epoch, indices = key
        if not self.random and self.collate is None:
            return read_batch(self.dataset, indices)
        in_main_process = get_worker_info() is None
        with rng.isolated() if in_main_process else contextlib.nullcontext():
            samples = [self._sample(seed, epoch, index) for index in indices]
            if self.collate is None:
                return default_collate(samples)
            rng.seed_item(seed, epoch, len(self.dataset) + indices[0])  # not the key of any sample
            return self.collate(samples)

    def _sample(self, seed: int, epoch: int, index: int) -> Any:
        if self.random:
            rng.seed_item(seed, epoch, index)
        return self.dataset[index]


def _as_it_is(batch: Any) -> Any:
    """Stands where a DataLoader collates: the batch is made already, while the generators are seeded."""
    return batch


def read_batch(dataset: Any, indices: list[int]) -> Any:
    """The batch that `default_collate` makes of these samples, in one indexing operation where the data allow it."""
    if type(dataset) is TensorDataset:
        return [tensor[indices] for tensor in dataset.tensors]
    if callable(getattr(dataset, "__getitems__", None)):
        return default_collate(dataset.__getitems__(indices))
    return default_collate([dataset[index] for index in indices])


def has_random_transforms(dataset: Any) -> bool:
    """What the data set says of itself; tensors have none, what is unknown may have some."""
    if hasattr(dataset, "random_transforms"):
        return bool(dataset.random_transforms)
    if isinstance(dataset, Subset):
        return has_random_transforms(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(map(has_random_transforms, dataset.datasets))
    return type(dataset) is not TensorDataset


class DeviceData(Protocol):
    """Samples that live on a device; a data set offers them by a method `on_device(device)`."""

    def __len__(self) -> int: ...

    def draw(self, generator: torch.Generator) -> Any:
        """The random choices for every sample of one epoch, drawn from a generator on the CPU."""

    def batch(self, indices: Tensor, choices: Any) -> Any:
        """The batch of these samples under these choices, all on the device."""


class DeviceLoader(Positioned):
    """Batches cut out of samples on the device; the choices for sample i are row i of a table drawn once an epoch."""

    def __init__(
        self,
        data: DeviceData,
        *,
        batch_size: int,
        seed: int | None,
        shuffle: bool,
        device: torch.device | str,
        drop_last: bool = False,
        same_every_epoch: bool = False,
    ) -> None:
        super().__init__(len(data), batch_size, seed, shuffle, drop_last, same_every_epoch)
        self.data = data
        self.device = torch.device(device)

    def load(self, epoch: int, batches: list[Tensor]) -> Iterator[Any]:
        choices = self.data.draw(self.generator(epoch, stream=1))
        for indices in batches:
            yield self.data.batch(indices.to(self.device, non_blocking=True), choices)


@dataclass(frozen=True)
class Loaders:
    """Batches of each part of the data; only `train` must be there."""

    train: Any
    val: Any = None
    test: Any = None
    num_classes: int | None = None


PARTS = ("train", "val", "test")
KEYS = (*PARTS, "num_classes", "collate_fn")


def build_loaders(source: Any, loader_config: LoaderConfig, *, seed: int | None, device: torch.device | str) -> Loaders:
    """Loaders for what a data function returned: a mapping or an object with train, perhaps val, test and num_classes.

    Data sets become loaders (on an accelerator, those that offer `on_device` are moved there as a whole); loaders,
    lists of batches and other iterables are taken as they are. An optional `collate_fn` goes to the loaders made here.

    Raises:
        ConfigError: there is no training data, a part is empty or is not data; all mistakes at once.
    """
    given = _given(source)
    problems = [
        f"data gives {key!r}, which is not one of {', '.join(KEYS)}{did_you_mean(str(key), list(KEYS))}"
        for key in given
        if key not in KEYS
    ]
    if given.get("train") is None:
        problems.append(f"data must give 'train', the training data (got {sorted(map(str, given)) or 'nothing'})")
    classes = given.get("num_classes")
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int) or classes < 1):
        problems.append(f"data's num_classes must be a whole number from 1 (got {classes!r})")
    problems += [sentence for part in PARTS for sentence in _wrong(part, given.get(part), loader_config)]
    if problems:
        raise ConfigError(problems)
    made = {part: _loader(part, given, loader_config, seed, torch.device(device)) for part in PARTS}
    return Loaders(**made, num_classes=classes)


def _given(source: Any) -> dict[Any, Any]:
    """What was returned, as a mapping; of an object only the attributes that mean something here."""
    if isinstance(source, Mapping):
        return dict(source)
    return {key: getattr(source, key) for key in KEYS if hasattr(source, key)}


def length_of(loader: Any) -> int | None:
    """Batches of a loader, where it tells: a DataLoader over an IterableDataset has a ``__len__`` that raises."""
    try:
        return len(loader)
    except TypeError:
        return None


def batches_in_epoch(config: Config, loader: Any) -> int | None:
    """Training batches of one epoch, where the loader tells."""
    length = length_of(loader)
    known = [count for count in (length, config.limit_train_batches) if count is not None]
    return min(known) if length is not None else None


def no_training_batches(epoch: int) -> str:
    """What to say about a training loader without batches."""
    if epoch == 0:
        return "the training loader must give at least one batch (got none); look at its data, batch_size and drop_last"
    return (
        f"the training loader gave no batch in epoch {epoch + 1}: an iterator can be read only once; "
        "pass a DataLoader, or any object whose __iter__ starts anew"
    )


def is_dataset(value: Any) -> bool:
    """Whether samples, not batches, come out of `value`: it has an index and a length, and is no plain list."""
    indexed = callable(getattr(value, "__getitem__", None)) and callable(getattr(value, "__len__", None))
    return indexed and not isinstance(value, (list, tuple, Mapping, str, bytes, Tensor))


def _wrong(part: str, value: Any, config: LoaderConfig) -> list[str]:
    """What is wrong with one part of the data, in sentences."""
    if value is None:
        return []
    where, what = f"data's {part!r}", type(value).__name__
    if isinstance(value, IterableDataset):
        return [
            f"{where} must be a map-style data set or a loader (got {what}, an IterableDataset); put it in a DataLoader"
        ]
    if isinstance(value, (Mapping, str, bytes, Tensor)):
        return [f"{where} must be a data set or an iterable of batches (got {what}); tensors go into a TensorDataset"]
    if not is_dataset(value):
        if not hasattr(value, "__iter__"):
            return [f"{where} must be a data set (with __getitem__ and __len__) or an iterable of batches (got {what})"]
        return [f"{where} holds no batches (got an empty {what})"] if length_of(value) == 0 else []
    if len(value) == 0:
        return [f"{where} holds no samples (got an empty {what}): look at the path and the options of the data group"]
    if part == "train" and config.drop_last and len(value) < config.batch_size:
        return [
            f"loader.batch_size must be at most the {len(value)} training samples when loader.drop_last is true, "
            f"else no batch is left (got {config.batch_size})"
        ]
    return []


def _loader(part: str, given: dict[Any, Any], config: LoaderConfig, seed: int | None, device: torch.device) -> Any:
    """The loader of one part; what is a loader already is taken as it is."""
    data = given.get(part)
    if data is None or not is_dataset(data):
        return data
    training = part == "train"
    size = config.batch_size if training else config.eval_batch_size or EVAL_BATCH_FACTOR * config.batch_size
    options: dict[str, Any] = {
        "batch_size": size,
        "seed": seed,
        "shuffle": training,
        "drop_last": training and config.drop_last,
        "device": device,
        "same_every_epoch": not training,
    }
    if device.type != "cpu" and hasattr(data, "on_device") and given.get("collate_fn") is None:
        return DeviceLoader(data.on_device(device), **options)
    return OrderedLoader(data, **options, num_workers=config.num_workers, collate_fn=given.get("collate_fn"))
