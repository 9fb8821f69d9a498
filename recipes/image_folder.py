"""Pictures in folders, one folder a class: listing, decoding once into a cache, and anyone's own data set.

Reads the folder it is given. Only `decoded` writes: one file beside the data, or in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from safe_trainer.recipes.splits import mixed, stratified

Bytes = NDArray[np.uint8]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})

# Mean and standard deviation of ImageNet, as every pretrained torchvision network expects its input.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The pictures below a folder: `classes` are its subfolders in alphabetical order, `labels` index them."""

    folder: Path
    paths: list[Path]
    labels: NDArray[np.int64]
    classes: list[str]


def list_pictures(folder: Path) -> Listing:
    """Every picture in `folder`/<class>/, deeper folders included, in an order that depends on the names alone.

    Raises:
        FileNotFoundError: no such folder, or no pictures in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder.absolute()} must be a folder with a subfolder of pictures for each class (there is none); "
            "set data.root to where the pictures are"
        )
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise FileNotFoundError(
            f"{folder.absolute()} must hold pictures as <class>/<name>, with a suffix such as .jpg or .png (got "
            f"none; its subfolders: {', '.join(classes[:10]) or 'none'})"
        )
    return Listing(folder=folder, paths=paths, labels=np.array(labels, dtype=np.int64), classes=classes)


def decoded(listing: Listing, size: tuple[int, int]) -> Bytes:
    """All pictures as one array (samples, height, width, 3); decoded once, then read from a cache.

    60,000 pictures of 32 by 32 take 5 to 8 s to decode and 0.1 s to read. The cache is keyed by every file's name, size
    and time of change, written under a temporary name and moved into place; where nothing can be written there is none.

    Raises:
        ValueError: a picture cannot be read or is not of this (height, width).
    """
    prefix = hashlib.sha256(str(listing.folder.resolve()).encode()).hexdigest()[:12]
    caches = [place / f"{prefix}-{_fingerprint(listing, size)[:24]}.npy" for place in _cache_folders(listing.folder)]
    for cache in caches:
        with contextlib.suppress(OSError, ValueError, EOFError):  # absent or damaged: decode anew
            pictures: Bytes = np.load(cache, allow_pickle=False)
            if pictures.shape == (len(listing.paths), *size, 3) and pictures.dtype == np.uint8:
                return pictures
    pictures = _decode(listing, size)
    for cache in caches:
        with contextlib.suppress(OSError):  # read-only or full: without a cache the next run takes a few seconds more
            _save(pictures, cache)
            for old in set(cache.parent.glob(f"{prefix}-*.npy")) - {cache}:
                old.unlink()
            break
    return pictures


def _cache_folders(folder: Path) -> list[Path]:
    """Beside the pictures, where a copy of the data takes it along; else with the user's other caches."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [folder.parent / ".safe_trainer", user / "safe_trainer"]


def _fingerprint(listing: Listing, size: tuple[int, int]) -> str:
    digest = hashlib.sha256(repr(size).encode())
    for path in listing.paths:
        status = path.stat()
        digest.update(f"{path.relative_to(listing.folder)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _decode(listing: Listing, size: tuple[int, int]) -> Bytes:
    pictures = np.empty((len(listing.paths), *size, 3), dtype=np.uint8)
    for number, path in enumerate(listing.paths):  # in one thread: with pictures this small, more of them only queue up
        picture = np.asarray(open_picture(path))
        if picture.shape[:2] != size:
            raise ValueError(
                f"pictures must be {size[1]} by {size[0]} pixels (got {picture.shape[1]} by {picture.shape[0]} in "
                f"{path}); data=image_folder takes pictures of any size"
            )
        pictures[number] = picture
    return pictures


def _save(pictures: Bytes, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, pictures)
        os.chmod(name, 0o644)  # who may read the pictures may read the cache
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def open_picture(path: Path) -> Any:
    """The picture as a PIL image in RGB.

    Raises:
        ValueError: the file is not a picture that Pillow can read.
    """
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except OSError as error:
        raise ValueError(
            f"{path} must be a picture that Pillow can read (got {error}); remove or replace it"
        ) from error


class FolderPictures(Dataset[Any]):
    """Pictures of any size, read when they are needed: a float picture (3, size, size) and the number of its class."""

    def __init__(self, paths: list[Path], labels: NDArray[np.int64], size: int, augment: bool) -> None:
        self.paths = paths
        self.labels = torch.from_numpy(labels)
        self.random_transforms = augment
        self.transform = _transform(size, augment)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(open_picture(self.paths[index])), self.labels[index]


def _transform(size: int, augment: bool) -> Any:
    """What torchvision usually does: a random part of the picture for training, its middle for evaluation."""
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    if augment:
        # A quarter of the area at least: ImageNet's usual 8 % suits runs far longer than most do on data of their own.
        steps: list[Any] = [v2.RandomResizedCrop(size, scale=(0.25, 1.0), antialias=True), v2.RandomHorizontalFlip()]
    else:
        steps = [v2.Resize(round(size * 8 / 7), antialias=True), v2.CenterCrop(size)]  # 256 for 224
    return v2.Compose([v2.PILToTensor(), *steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def image_folder(root: str, size: int = 224, val_share: float = 0.1, num_classes: int | None = None) -> dict[str, Any]:
    """Anyone's own pictures: `root`/train/<class>/, and val/ and test/ of the same form where there are any.

    Without a train folder, the subfolders of `root` are the classes. Without a val folder, a share of the training
    pictures is held out, the same in every run; the test folder never selects a model.

    Args:
        root: the folder.
        size: pixels of a side that the network gets.
        val_share: share of the training pictures to hold out where there is no val folder.
        num_classes: how many classes there must be; None takes any number.

    Raises:
        FileNotFoundError: no pictures there.
        ValueError: the folders do not have the same classes, or not `num_classes` of them.
    """
    base = Path(root).expanduser()
    train = list_pictures(base / "train" if any((base / part).is_dir() for part in ("train", "val", "test")) else base)
    if num_classes is not None and len(train.classes) != num_classes:
        raise ValueError(
            f"{train.folder} must hold {num_classes} class folders, as many as model.num_classes "
            f"(got {len(train.classes)}: {', '.join(train.classes[:10])}); set model.num_classes={len(train.classes)}"
        )
    others = {part: list_pictures(base / part) for part in ("val", "test") if (base / part).is_dir()}
    for other in others.values():
        require_same_classes(train, other)
    parts: dict[str, Any] = {
        name: _rows(part, mixed(len(part.labels)), size, augment=False) for name, part in others.items()
    }
    rest, held_out = stratified(train.labels, 0 if "val" in others else float(val_share))
    if len(held_out):
        parts["val"] = _rows(train, held_out, size, augment=False)
    return {"train": _rows(train, rest, size, augment=True), **parts, "num_classes": len(train.classes)}


def require_same_classes(one: Listing, other: Listing) -> None:
    """Labels are positions in the list of classes: two parts must have the same list.

    Raises:
        ValueError: they have not.
    """
    if one.classes != other.classes:
        odd = sorted(set(one.classes) ^ set(other.classes))
        raise ValueError(
            f"{one.folder} and {other.folder} must have the same class folders (only one has: {', '.join(odd[:10])})"
        )


def _rows(listing: Listing, rows: NDArray[np.int64], size: int, augment: bool) -> FolderPictures:
    return FolderPictures([listing.paths[row] for row in rows], listing.labels[rows], size, augment)
