"""scikit-learn's 1,797 handwritten digits, 8 by 8 pixels: they come with the package, nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from safe_trainer.recipes.splits import three_parts


def digits(val_share: float = 0.15, test_share: float = 0.15) -> dict[str, Any]:
    """Pictures of shape (1, 8, 8) with mean 0 and standard deviation 1 over the training part, and their digit.

    Args:
        val_share: share of the samples that selects between models.
        test_share: share of the samples that is only for the last word; the split is the same in every run.
    """
    return _labelled((1, 8, 8), val_share, test_share)


def digit_rows(val_share: float = 0.15, test_share: float = 0.15) -> dict[str, Any]:
    """Each digit as a sequence of its 8 rows from top to bottom: shape (8, 8), and its digit."""
    return _labelled((8, 8), val_share, test_share)


def digit_pictures(val_share: float = 0.15, test_share: float = 0.15) -> dict[str, Any]:
    """Pictures of shape (1, 8, 8) between 0 and 1, without labels: a batch is a list of one tensor."""
    pictures, _, parts = _load(val_share, test_share)
    return {part: TensorDataset(pictures[rows].unsqueeze(1) / 16) for part, rows in parts.items()}


def _labelled(shape: tuple[int, ...], val_share: float, test_share: float) -> dict[str, Any]:
    pictures, labels, parts = _load(val_share, test_share)
    train = pictures[parts["train"]]
    shaped = ((pictures - train.mean()) / train.std()).view(-1, *shape)
    sets: dict[str, Any] = {part: TensorDataset(shaped[rows], labels[rows]) for part, rows in parts.items()}
    return {**sets, "num_classes": 10}


def _load(val_share: float, test_share: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Pictures (1797, 8, 8) from 0 to 16, labels, and the rows of each part that has any."""
    from sklearn.datasets import load_digits

    source = load_digits()
    parts = three_parts(source.target, val_share, test_share)
    rows = {part: torch.from_numpy(chosen) for part, chosen in parts.items()}
    return torch.from_numpy(source.images).float(), torch.from_numpy(source.target).long(), rows
