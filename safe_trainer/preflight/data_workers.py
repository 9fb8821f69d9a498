"""Workers of a DataLoader that draw the same random numbers. Starts two of them for a few batches, and ends them."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.data_samples import Table, leaves
from safe_trainer.preflight.outcome import Skip, finding
from safe_trainer.preflight.program import Program

WORKERS = 2
"""Enough to see whether two are alike."""
REPEATS = 4
"""How often each worker reads the same sample in a batch: twice tells whether it is random, four times by how much."""
LONGEST_S = 20.0
"""Seconds that workers may take to start and read."""


def worker_seed(program: Program, table: Table, clock: Clock) -> list[Finding]:
    """Random samples that two workers, or two epochs, have in common."""
    loader = program.train_loader
    if not isinstance(loader, DataLoader) or loader.num_workers < 1 or type(loader) is not DataLoader:
        return []
    if isinstance(loader.dataset, IterableDataset):
        return _same_stream(loader, clock)
    if loader.batch_sampler is None or not table.indices:
        return []
    alone = _copy(loader, clock)
    vars(alone)["batch_sampler"] = [[table.indices[0]] * REPEATS for _ in range(2 * WORKERS)]
    with _quiet(alone):
        first, second = _epoch(alone), _epoch(alone)
    if len(first) < 2 * WORKERS or not _is_random(first[0]):
        return []
    if loader.num_workers > 1 and _same(first[0], first[1]) and _same(first[2], first[3]):
        return [_found(_text(first[0], "two workers that read one sample four times each draw", second[0]))]
    if _same(first[0], second[0]) and _same(first[1], second[1]):
        return [_found(_text(first[0], "a worker draws, in its next epoch again,", None), severity="warning")]
    return []


def _text(batch: dict[str, Tensor], how: str, later: dict[str, Tensor] | None) -> str:
    name, values = next((name, values) for name, values in batch.items() if _rows_differ(values))
    shown = ", ".join(f"{float(number):.3g}" for number in values.double().reshape(len(values), -1)[0, :3])
    again = "" if later is None or not _same(batch, later) else ", and the next epoch repeats them"
    return f"{how} the very same random values: {name} is {shown} and so on in both{again}"


def _same_stream(loader: DataLoader[Any], clock: Clock) -> list[Finding]:
    """A stream that each worker gives from its beginning."""
    if loader.num_workers < 2:
        return []
    alone = _copy(loader, clock)
    with _quiet(alone):
        batches = _epoch(alone, 2 * WORKERS)
    if len(batches) < 2 * WORKERS or not (_same(batches[0], batches[1]) and _same(batches[2], batches[3])):
        return []
    if _same(batches[0], batches[2]) or not any(map(_rows_differ, batches[0].values())):
        return []  # a stream of one sample says nothing
    evidence = "each worker gives the stream from its beginning: batches 0 and 1, and 2 and 3, are the very same"
    remedy = "let each worker take its share: torch.utils.data.get_worker_info() in __iter__"
    return [_found(evidence, "the iterable data set is copied into each worker whole", remedy, "warning")]


def _copy(loader: DataLoader[Any], clock: Clock) -> DataLoader[Any]:
    """The same loader with two workers of its own."""
    alone = copy.copy(loader)
    workers = min(WORKERS, loader.num_workers)
    timeout = max(1.0, min(LONGEST_S, clock.left()))
    vars(alone).update(num_workers=workers, timeout=timeout, _iterator=None, pin_memory=False)
    return alone


@contextlib.contextmanager
def _quiet(alone: DataLoader[Any]) -> Iterator[None]:
    """Without warnings of forking, and with no worker left behind. What fails in there is no reason to stop."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise Skip(f"workers could not be tried: {type(error).__name__}: {error}") from error
    finally:
        running = vars(alone).get("_iterator")
        if running is not None:
            running._shutdown_workers()
            vars(alone)["_iterator"] = None


def _epoch(alone: DataLoader[Any], count: int | None = None) -> list[dict[str, Tensor]]:
    batches: list[dict[str, Tensor]] = []
    passing = iter(alone)
    for batch in passing:
        batches.append(leaves(batch))
        if len(batches) == count:
            break
    if not alone.persistent_workers:
        passing._shutdown_workers()  # type: ignore[attr-defined]
    return batches


def _is_random(batch: dict[str, Tensor]) -> bool:
    """Whether one sample, read several times, varies."""
    return any(map(_rows_differ, batch.values()))


def _rows_differ(values: Tensor) -> bool:
    return bool(values.dim()) and len(values) > 1 and bool((values[1:] != values[:1]).any())


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _found(evidence: str, cause: str = "", remedy: str = "", severity: str = "error") -> Finding:
    return finding(
        "data.worker_seed",
        severity,
        where="train_loader",
        evidence=evidence,
        cause=cause or "a generator of NumPy's or of the data set's own is copied into every worker as it stands",
        remedy=remedy or "seed it in worker_init_fn from torch.initial_seed() % 2**32, or draw from torch",
    )
