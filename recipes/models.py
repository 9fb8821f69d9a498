"""Networks of the recipes that PyTorch and torchvision do not have ready. Needs torch, torchvision where it says so.

A function or class here is named as `_target_` in conf/model/; whatever takes keyword arguments can be one.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def resnet18_cifar(num_classes: int = 10) -> nn.Module:
    """ResNet-18 of torchvision for pictures of 32 by 32: the stem keeps the resolution.

    He et al. (2016) start ImageNet networks with a 7x7 convolution of stride 2 and a max-pool, which would leave 8 by 8
    pixels of a CIFAR picture; a 3x3 convolution of stride 1 and no pooling is what all CIFAR variants use.

    Shapes: (batch, 3, height, width) -> (batch, num_classes).
    """
    from torchvision.models import resnet18  # type: ignore[import-untyped]

    model = resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
    model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm beside a shortcut; a stride above 1 halves the picture."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, pictures: Tensor) -> Tensor:
        return torch.relu(self.shortcut(pictures) + self.body(pictures))


class DigitsCNN(nn.Module):
    """A small residual network for pictures of a few pixels, such as the 8 by 8 of the handwritten digits.

    Shapes: (batch, channels, height, width) -> (batch, num_classes).
    """

    def __init__(self, num_classes: int = 10, width: int = 32, channels: int = 1, dropout: float = 0.1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stages = nn.Sequential(ResidualBlock(width, width), ResidualBlock(width, 2 * width, stride=2))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width, num_classes)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(pictures)))  # type: ignore[no-any-return]


def digits_cnn(num_classes: int = 10, width: int = 32, channels: int = 1, dropout: float = 0.1) -> DigitsCNN:
    """The default network; `width` is the number of channels of its first stage."""
    return DigitsCNN(num_classes, width, channels, dropout)


def mlp(
    inputs: int, num_classes: int, hidden: tuple[int, ...] | list[int] = (64, 64), dropout: float = 0.0
) -> nn.Sequential:
    """A plain network for rows of a table.

    Shapes: (batch, inputs) -> (batch, num_classes).
    """
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs, *hidden)):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    last = hidden[-1] if hidden else inputs
    return nn.Sequential(*layers, nn.Linear(last, num_classes))


class LSTMClassifier(nn.Module):
    """Reads a sequence step by step and names its class from the last state.

    Shapes: (batch, steps, inputs) -> (batch, num_classes).
    """

    def __init__(
        self, inputs: int, num_classes: int, hidden: int = 64, layers: int = 1, bidirectional: bool = False
    ) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(hidden * (2 if bidirectional else 1), num_classes)

    def forward(self, sequences: Tensor) -> Tensor:
        _, (state, _) = self.lstm(sequences)
        last = state[-2:] if self.lstm.bidirectional else state[-1:]
        return self.head(last.transpose(0, 1).flatten(1))  # type: ignore[no-any-return]


class Autoencoder(nn.Module):
    """Squeezes its input through `code` numbers and rebuilds it; outputs lie between 0 and 1.

    Shapes: (batch, ...) -> the same, with `inputs` numbers a sample.
    """

    def __init__(self, inputs: int, code: int = 8, hidden: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.GELU(), nn.Linear(hidden, inputs), nn.Sigmoid())

    def forward(self, samples: Tensor) -> Tensor:
        return self.decoder(self.encoder(samples)).view_as(samples)  # type: ignore[no-any-return]
