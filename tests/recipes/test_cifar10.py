import hashlib
import pickle
import socket
import urllib.error

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from safe_trainer.recipes.cifar10 import cifar10

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture
def folders(tmp_path):
    """CIFAR-10 in small: picture folders with 6 and 2 pictures a class."""
    noise = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 2)):
        for name in CLASSES:
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number:04}.png")
    return tmp_path


@pytest.fixture
def batches(tmp_path, monkeypatch):
    """CIFAR-10 in small: torchvision's files, with its checksums set to theirs."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    noise = np.random.default_rng(1)

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def part(count):
        return {"data": noise.integers(0, 256, (count, 3072), dtype=np.uint8), "labels": [i % 10 for i in range(count)]}

    monkeypatch.setattr(CIFAR10, "train_list", [write(f"data_batch_{i}", part(20)) for i in (1, 2)])
    monkeypatch.setattr(CIFAR10, "test_list", [write("test_batch", part(10))])
    name, checksum = write("batches.meta", {"label_names": CLASSES})
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": checksum})
    return tmp_path


@pytest.fixture
def no_network(monkeypatch):
    asked = []

    def refuse(*arguments, **options):
        asked.append(socket.getdefaulttimeout())
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    return asked


def test_picture_folders(folders):
    data = cifar10(str(folders), val_count=20)
    assert {part: len(data[part]) for part in ("train", "val", "test")} == {"train": 40, "val": 20, "test": 20}
    assert data["val"].labels.bincount().tolist() == [2] * 10
    assert data["num_classes"] == 10
    assert data["train"].random_transforms
    assert not data["val"].random_transforms
    assert not data["test"].random_transforms
    original = torch.tensor(np.asarray(Image.open(folders / "test" / "cat" / "0001.png"))).permute(2, 0, 1)
    (found,) = (data["test"].images == original).flatten(1).all(1).nonzero()
    assert data["test"].labels[found] == CLASSES.index("cat")
    assert len(data["test"].labels[:8].unique()) > 4  # not sorted by class


def test_the_held_out_pictures_are_not_trained_on(folders):
    data = cifar10(str(folders), val_count=20)
    train, val = ({image.numpy().tobytes() for image in data[part].images} for part in ("train", "val"))
    assert len(train) == 40
    assert not train & val
    assert torch.equal(cifar10(str(folders), val_count=20)["val"].images, data["val"].images)


def test_all_pictures_can_be_trained_on(folders):
    data = cifar10(str(folders), val_count=0)
    assert len(data["train"]) == 60
    assert data["val"] is None


@pytest.mark.parametrize("deeper", ["", "cifar-10-batches-py"])
def test_torchvisions_files(batches, no_network, deeper):
    data = cifar10(str(batches / deeper), val_count=10)
    assert {part: len(data[part]) for part in ("train", "val", "test")} == {"train": 30, "val": 10, "test": 10}
    assert data["test"].images.shape == (10, 3, 32, 32)
    assert data["test"].images.is_contiguous()
    assert sorted(data["test"].labels.tolist()) == list(range(10))
    assert no_network == []


def test_without_data_and_network_one_paragraph_says_what_to_do(tmp_path, no_network):
    with pytest.raises(FileNotFoundError) as raised:
        cifar10(str(tmp_path / "empty"))
    text = str(raised.value)
    assert "\n" not in text
    for part in (str(tmp_path / "empty"), "no route to host", "https://", "cifar-10-batches-py", "train/<class>/*"):
        assert part in text
    assert no_network[0] == 20
    assert socket.getdefaulttimeout() is None


def test_without_leave_nothing_is_downloaded(tmp_path, no_network):
    with pytest.raises(FileNotFoundError, match=r"data\.download is false"):
        cifar10(str(tmp_path), download=False)
    assert no_network == []


def test_folders_that_are_not_cifar10_are_refused(folders):
    (folders / "train" / "zebra").mkdir()
    with pytest.raises(ValueError, match="same class folders"):
        cifar10(str(folders))
    (folders / "test" / "zebra").mkdir()
    with pytest.raises(ValueError, match=r"ten class folders .* \(got 11\)"):
        cifar10(str(folders))


def test_a_missing_test_folder_is_said(folders):
    (folders / "test").rename(folders / "held_back")
    with pytest.raises(FileNotFoundError, match="no folder test"):
        cifar10(str(folders))


def test_more_held_out_than_there_is_is_refused(folders):
    with pytest.raises(ValueError, match=r"must be smaller than the data, and not negative \(got 5000 of 60\)"):
        cifar10(str(folders))
