"""A table with two classes that comes with scikit-learn: 569 tumours, 30 measurements each. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset

from safe_trainer.recipes.splits import three_parts


def breast_cancer(val_share: float = 0.15, test_share: float = 0.15) -> dict[str, Any]:
    """Rows of 30 floats with mean 0 and standard deviation 1 over the training part, and 0 (malignant) or 1 (benign).

    Args:
        val_share: share of the rows that selects between models.
        test_share: share of the rows that is only for the last word; the split is the same in every run.
    """
    from sklearn.datasets import load_breast_cancer

    source = load_breast_cancer()
    rows, labels = torch.from_numpy(source.data).float(), torch.from_numpy(source.target).long()
    parts = three_parts(source.target, val_share, test_share)
    train = rows[torch.from_numpy(parts["train"])]
    rows = (rows - train.mean(0)) / train.std(0)
    chosen = {part: torch.from_numpy(indices) for part, indices in parts.items()}
    return {**{part: TensorDataset(rows[i], labels[i]) for part, i in chosen.items()}, "num_classes": 2}
