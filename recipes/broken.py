"""Parts of networks that are broken on purpose, for conf/recipe/broken/: to learn from, never to build on.

Data of scikit-learn only; nothing is downloaded. docs/broken.md tells each recipe's story.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from safe_trainer.recipes.splits import three_parts

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


def network(
    inputs: int = 64,
    num_classes: int = 10,
    width: int = 64,
    depth: int = 2,
    activation: str = "relu",
    bias: float | None = None,
) -> nn.Sequential:
    """Hidden layers of one width, each before the same activation, as PyTorch draws them.

    Args:
        bias: what the biases of the hidden layers start from; None leaves them as they are.

    Shapes: (batch, inputs) -> (batch, num_classes).

    Raises:
        ValueError: there is no such activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)} (got {activation!r})")
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs, *[width] * depth)):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation]()]
        if bias is not None:
            nn.init.constant_(layers[-2].get_parameter("bias"), bias)
    return nn.Sequential(*layers, nn.Linear(width if depth else inputs, num_classes))


def pixels(standardised: bool = True, val_share: float = 0.15, test_share: float = 0.15) -> dict[str, Any]:
    """Handwritten digits as rows of 64 pixels, and their digit.

    Args:
        standardised: mean 0 and standard deviation 1 over the training part; false leaves the pixels of 0 to 255 that a
            picture file holds.
        val_share: share of the samples that selects between models.
        test_share: share of the samples that is only for the last word.
    """
    from sklearn.datasets import load_digits

    source = load_digits()
    parts = three_parts(source.target, val_share, test_share)
    rows, labels = torch.from_numpy(source.data).float() * (255 / 16), torch.from_numpy(source.target).long()
    if standardised:
        train = rows[torch.from_numpy(parts["train"])]
        rows = (rows - train.mean()) / train.std()
    chosen = {part: torch.from_numpy(members) for part, members in parts.items()}
    return {**{part: TensorDataset(rows[where], labels[where]) for part, where in chosen.items()}, "num_classes": 10}


class ForgetfulSGD(torch.optim.SGD):
    """SGD whose `zero_grad` clears nothing.

    It stands for a wrapper around an optimizer (one that averages, logs, or splits parameters) whose author passed on
    `step` and `state_dict` and forgot `zero_grad`, and for a loop without the call: the gradients of all steps add up.
    """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing; this is the mistake."""


def patients(val_share: float = 0.15, test_share: float = 0.15) -> dict[str, Any]:
    """Ten figures of 442 patients, and how their diabetes went on: a row of targets, all standardised."""
    from sklearn.datasets import load_diabetes

    source = load_diabetes()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(source.target), generator=generator)
    rows = torch.from_numpy(source.data).float()[order] * len(source.target) ** 0.5
    targets = torch.from_numpy(source.target).float()[order]
    targets = (targets - targets.mean()) / targets.std()
    ends = [round(len(order) * share) for share in (1 - val_share - test_share, 1 - test_share)]
    parts = {"train": slice(ends[0]), "val": slice(*ends), "test": slice(ends[1], None)}
    return {part: TensorDataset(rows[where], targets[where]) for part, where in parts.items()}


class SquaredDifference(nn.Module):
    """Mean squared error as it is written by hand, shapes unchecked.

    Args:
        squeeze: take the last dimension off the prediction first, which is the cure.
    """

    def __init__(self, squeeze: bool = False) -> None:
        super().__init__()
        self.squeeze = squeeze

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean of squares; of (N, 1) and (N,) that is a mean over N times N pairs."""
        return ((prediction.squeeze(-1) if self.squeeze else prediction) - target).square().mean()
