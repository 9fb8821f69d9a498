"""Which samples are held out: a stratified choice that is fixed by its own seed, not by the run's. Needs NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def stratified(labels: NDArray[np.generic], held_out: float | int, seed: int = 0) -> tuple[Indices, Indices]:
    """Indices that stay, in rising order, and indices that are held out, mixed (see `mixed`).

    Each class gives its share, rounded so that the total is right; the choice depends on `labels` and `seed` alone, so
    that runs with different seeds are judged on the same samples.

    Args:
        labels: the class of each sample, one dimension.
        held_out: how many samples to hold out, or, as a float below 1, which share of them.
        seed: seeds the choice.

    Raises:
        ValueError: `held_out` would leave nothing to train on.
    """
    total = round(held_out * len(labels)) if isinstance(held_out, float) else held_out
    if not 0 <= total < len(labels):
        raise ValueError(
            f"the held-out part must be smaller than the data, and not negative (got {held_out} of {len(labels)})"
        )
    generator = np.random.Generator(np.random.PCG64(seed))
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    chosen = [
        generator.permutation(members)[:count]
        for members, count in zip(classes, _shares([len(members) for members in classes], total), strict=True)
    ]
    mask = np.zeros(len(labels), dtype=bool)
    mask[np.concatenate([np.empty(0, dtype=np.int64), *chosen])] = True
    held = np.flatnonzero(mask)
    return np.flatnonzero(~mask), held[mixed(len(held), seed)]


def mixed(count: int, seed: int = 0) -> Indices:
    """All indices below `count` in an order that `seed` fixes.

    Data to be judged on often come sorted by class: the first few batches of them (`limit_val_batches`) would hold one
    class alone.
    """
    order: Indices = np.random.Generator(np.random.PCG64(seed)).permutation(count)
    return order


def three_parts(labels: NDArray[np.generic], val_share: float, test_share: float) -> dict[str, Indices]:
    """Rows of "train", "val" and "test", each stratified; a part with no samples is left out.

    Raises:
        ValueError: the shares are negative or leave nothing to train on.
    """
    if min(val_share, test_share) < 0 or val_share + test_share >= 1:
        raise ValueError(
            "data.val_share and data.test_share must not be negative and must leave a part to train on "
            f"(got {val_share} and {test_share})"
        )
    rest, test = stratified(labels, float(test_share))
    train, val = stratified(labels[rest], round(val_share * len(labels)))
    parts = {"train": rest[train], "val": rest[val], "test": test}
    return {name: rows for name, rows in parts.items() if len(rows)}


def _shares(sizes: list[int], total: int) -> list[int]:
    """Split `total` in proportion to `sizes`; the largest remainders are rounded up."""
    exact = [size * total / sum(sizes) for size in sizes]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda position: counts[position] - exact[position])
    for position in by_remainder[: total - sum(counts)]:
        counts[position] += 1
    return counts
