"""Small labelled pictures kept as uint8, on the CPU or as a whole on an accelerator, with random crops and flips.

Both ways share one piece of arithmetic, `Pictures.augmented`; only who draws the random choices differs: per sample
from torch's global generator on the CPU (a loader seeds it for each sample), per epoch from a given generator on a
device. Draws nothing unless `augment` is true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

CHOICES = ("top", "left", "flip", "cutout row", "cutout column")


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes to a training picture that keep its class."""

    padding: int = 4
    """Pixels of black put around a picture before a window of the old size is cut out at random (He et al. 2016)."""
    flip: bool = True
    """Mirror left and right, every second time."""
    cutout: int = 0
    """Side of a square that is blanked at a random place, in pixels (DeVries and Taylor 2017); 0 blanks none."""


class Pictures(Dataset[Any]):
    """Pictures and their classes; a sample is a normalised float picture (channels, height, width) and a number.

    Args:
        images: uint8, (samples, channels, height, width).
        labels: int64, (samples,).
        mean: of each channel, on a scale from 0 to 1.
        std: of each channel, on the same scale.
        augmentation: random changes; None leaves the pictures as they are.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        mean: tuple[float, ...] | Tensor,
        std: tuple[float, ...] | Tensor,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.images = images
        self.labels = labels
        self.mean = torch.as_tensor(mean).view(-1, 1, 1)
        self.std = torch.as_tensor(std).view(-1, 1, 1)
        self.augmentation = augmentation

    @property
    def random_transforms(self) -> bool:
        """Whether a sample depends on random choices: tells a loader to seed the generators for each."""
        return self.augmentation is not None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture = self.images[index : index + 1]
        if self.augmentation is None:
            return self.normalised(picture)[0], self.labels[index]
        choices = draw_choices(1, picture.shape[-2:], self.augmentation, generator=None)
        padded = pad(picture, [self.augmentation.padding] * 4)
        return self.augmented(padded, torch.zeros(1, dtype=torch.long), choices)[0], self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Several samples at once; a loader asks for them where nothing is random."""
        if self.augmentation is not None:
            return [self[index] for index in indices]
        return list(zip(self.normalised(self.images[indices]), self.labels[indices], strict=True))

    def normalised(self, pictures: Tensor) -> Tensor:
        """uint8 pictures as floats with mean 0 and standard deviation 1, by and large."""
        return (pictures.float() / 255 - self.mean) / self.std

    def augmented(self, padded: Tensor, indices: Tensor, choices: Tensor) -> Tensor:
        """Windows of the pictures `indices` of `padded`, changed as the rows of `choices` say, and normalised.

        Args:
            padded: uint8, (samples, channels, height + 2 padding, width + 2 padding).
            indices: which samples, (batch,).
            choices: as from `draw_choices`, (batch, 5).
        """
        assert self.augmentation is not None
        top, left, flip, row, column = choices.unbind(1)
        height, width = self.images.shape[-2:]
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: only the windows taken are copied
        pictures = windows[indices, :, top, left]
        pictures = torch.where(flip.bool().view(-1, 1, 1, 1), pictures.flip(-1), pictures)
        result = self.normalised(pictures)
        if self.augmentation.cutout:
            blank = _near(row, height, self.augmentation.cutout)[:, None, :, None]
            blank = blank & _near(column, width, self.augmentation.cutout)[:, None, None, :]
            result = result.masked_fill(blank, 0.0)  # the mean colour, after normalisation
        return result

    def on_device(self, device: torch.device | str) -> DevicePictures:
        """The same pictures, stored on `device` as a whole and changed there in batches."""
        return DevicePictures(self, device)


class DevicePictures:
    """Pictures that live on a device as uint8: an epoch of CIFAR-10 needs no more of the host than its random table."""

    def __init__(self, pictures: Pictures, device: torch.device | str) -> None:
        self.source = Pictures(
            pictures.images.to(device),
            pictures.labels.to(device),
            mean=pictures.mean.to(device),
            std=pictures.std.to(device),
            augmentation=pictures.augmentation,
        )
        if pictures.augmentation is not None:
            self.padded = pad(self.source.images, [pictures.augmentation.padding] * 4)

    def __len__(self) -> int:
        return len(self.source)

    def draw(self, generator: torch.Generator) -> Tensor | None:
        """The choices of one epoch, a row a sample, moved to the device in one copy; None where nothing is random."""
        if self.source.augmentation is None:
            return None
        size = self.source.images.shape[-2:]
        choices = draw_choices(len(self), size, self.source.augmentation, generator)
        return choices.to(self.source.images.device)

    def batch(self, indices: Tensor, choices: Tensor | None) -> list[Tensor]:
        """Pictures and labels of these samples."""
        if choices is None:
            pictures = self.source.normalised(self.source.images[indices])
        else:
            pictures = self.source.augmented(self.padded, indices, choices[indices])
        return [pictures, self.source.labels[indices]]


def draw_choices(count: int, size: torch.Size, augmentation: Augmentation, generator: torch.Generator | None) -> Tensor:
    """Random choices for `count` pictures of this (height, width): int64, (count, 5), columns as in `CHOICES`."""
    offsets = 2 * augmentation.padding + 1
    bounds = (offsets, offsets, 2 if augmentation.flip else 1, size[0], size[1])
    return torch.stack([torch.randint(bound, (count,), generator=generator) for bound in bounds], dim=1)


def subset(pictures: Pictures, rows: Tensor, augmentation: Augmentation | None) -> Pictures:
    """Some of the pictures, under an augmentation of their own."""
    return Pictures(
        pictures.images[rows],
        pictures.labels[rows],
        mean=pictures.mean,
        std=pictures.std,
        augmentation=augmentation,
    )


def _near(centres: Tensor, length: int, side: int) -> Tensor:
    """Which of `length` pixels lie in a square of this side around each centre; it may reach over the edge."""
    places = torch.arange(length, device=centres.device)
    start = centres.unsqueeze(1) - side // 2
    return (places >= start) & (places < start + side)
