"""CIFAR-10 from torchvision's files or from picture folders; validation pictures are held out of the training part.

Reads `root`; downloads there if nothing is found and `download` is true; a cache of decoded folders: see image_folder.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from safe_trainer.recipes.image_folder import decoded, list_pictures, require_same_classes
from safe_trainer.recipes.pictures import Augmentation, Pictures, subset
from safe_trainer.recipes.splits import mixed, stratified

# Over the pixels of the 50,000 training pictures, on a scale from 0 to 1.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"

# A host that has not answered by then will not: without a bound a filtered network hangs for minutes.
TIMEOUT_S = 20.0


def cifar10(
    root: str, val_count: int = 5000, padding: int = 4, flip: bool = True, cutout: int = 0, download: bool = True
) -> dict[str, Any]:
    """60,000 pictures of 32 by 32 pixels in ten classes: normalised floats (3, 32, 32) and the number of the class.

    Args:
        root: a folder that holds `cifar-10-batches-py`, or picture folders `train/<class>/*` and `test/<class>/*`.
        val_count: training pictures held out to select between models, the same number of each class, the same
            pictures in every run. The test pictures select nothing.
        padding: pixels by which a training picture may be shifted.
        flip: mirror training pictures at random.
        cutout: side of a square that is blanked at random, in pixels; 0 blanks none.
        download: fetch the data through torchvision if `root` has none.

    Raises:
        FileNotFoundError: no data there and none to be had; the text says where to get it and where to put it.
    """
    train, test = _load(Path(root).expanduser(), download)
    rest, held_out = stratified(train.labels.numpy(), val_count)
    augmentation = Augmentation(padding=padding, flip=flip, cutout=cutout)
    return {
        "train": subset(train, torch.from_numpy(rest), augmentation),
        "val": subset(train, torch.from_numpy(held_out), None) if len(held_out) else None,
        "test": subset(test, torch.from_numpy(mixed(len(test))), None),
        "num_classes": 10,
    }


def _load(root: Path, download: bool) -> tuple[Pictures, Pictures]:
    if root.name == FOLDER and not (root / "train").is_dir():  # a step too deep is an easy mistake with one meaning
        root = root.parent
    if (root / "train").is_dir() and not (root / FOLDER).is_dir():
        return _from_folders(root)
    return _from_torchvision(root, download)


def _from_folders(root: Path) -> tuple[Pictures, Pictures]:
    if not (root / "test").is_dir():
        raise FileNotFoundError(f"{root} must hold test/<class>/* beside train/<class>/* (there is no folder test)")
    train, test = list_pictures(root / "train"), list_pictures(root / "test")
    require_same_classes(train, test)
    if len(train.classes) != 10:
        raise ValueError(
            f"{train.folder} must hold the ten class folders of CIFAR-10 (got {len(train.classes)}); "
            "data=image_folder takes pictures of your own"
        )
    return _pictures(decoded(train, (32, 32)), train.labels), _pictures(decoded(test, (32, 32)), test.labels)


def _from_torchvision(root: Path, download: bool) -> tuple[Pictures, Pictures]:
    from torchvision.datasets import CIFAR10  # type: ignore[import-untyped]

    try:
        with _bounded_waiting():
            sets = [CIFAR10(str(root), train=train, download=download) for train in (True, False)]
    except (OSError, RuntimeError) as error:  # no network; no data and no leave to download; a damaged file
        raise FileNotFoundError(_where_to_get_it(root, download, error)) from error
    train, test = (_pictures(part.data, np.array(part.targets, dtype=np.int64)) for part in sets)
    return train, test


def _pictures(images: np.ndarray[Any, np.dtype[np.uint8]], labels: np.ndarray[Any, np.dtype[np.int64]]) -> Pictures:
    channels_first: Tensor = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return Pictures(channels_first, torch.from_numpy(labels), mean=MEAN, std=STD)


@contextmanager
def _bounded_waiting() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _where_to_get_it(root: Path, download: bool, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    tried = f"could not be downloaded ({reason})" if download else f"data.download is false ({reason})"
    return (
        f"CIFAR-10 was not found in {root.resolve()} and {tried}. Fetch {ARCHIVE} (163 MB) on a machine that reaches "
        f"it, unpack it with tar -xzf, and set data.root to the folder that then holds {FOLDER}; or set data.root to a "
        "folder of pictures with train/<class>/* and test/<class>/*, 32 by 32 pixels each. To try the program without "
        "any data, run the recipe digits: it needs no download."
    )
