import os

import numpy as np
import pytest
import torch
from PIL import Image

from safe_trainer.recipes import image_folder as module
from safe_trainer.recipes.image_folder import decoded, image_folder, list_pictures


def paint(folder, classes=("cat", "dog"), count=4, size=(32, 32), suffix=".png"):
    """A folder of noisy pictures, `count` a class."""
    noise = np.random.default_rng(len(str(folder)))
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:04}{suffix}")
    return folder


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache_home"))
    return tmp_path / "cache_home"


def test_pictures_are_listed_by_name(tmp_path):
    paint(tmp_path / "train", ("b", "a"))
    (tmp_path / "train" / "a" / "notes.txt").write_text("not a picture")
    (tmp_path / "train" / ".hidden").mkdir()
    listing = list_pictures(tmp_path / "train")
    assert listing.classes == ["a", "b"]
    assert [path.name for path in listing.paths] == [f"{i:04}.png" for i in range(4)] * 2
    assert listing.labels.tolist() == [0] * 4 + [1] * 4


def test_pictures_are_decoded_once(tmp_path, monkeypatch):
    listing = list_pictures(paint(tmp_path / "train"))
    first = decoded(listing, (32, 32))
    assert np.array_equal(first[5], np.asarray(Image.open(listing.paths[5])))
    monkeypatch.setattr(module, "_decode", None)  # a second time would be an error
    assert np.array_equal(decoded(listing, (32, 32)), first)
    assert len(list((tmp_path / ".safe_trainer").iterdir())) == 1


def test_a_changed_picture_makes_the_cache_anew(tmp_path):
    folder = paint(tmp_path / "train")
    decoded(list_pictures(folder), (32, 32))
    changed = folder / "cat" / "0001.png"
    Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8)).save(changed)
    os.utime(changed, ns=(1, 1))
    assert decoded(list_pictures(folder), (32, 32))[1].sum() == 0
    assert len(list((tmp_path / ".safe_trainer").iterdir())) == 1


def test_a_damaged_cache_is_made_anew(tmp_path):
    listing = list_pictures(paint(tmp_path / "train"))
    first = decoded(listing, (32, 32))
    (cache,) = (tmp_path / ".safe_trainer").iterdir()
    cache.write_bytes(cache.read_bytes()[:1000])
    assert np.array_equal(decoded(listing, (32, 32)), first)


def test_where_nothing_can_be_written_beside_the_data_the_users_cache_serves(tmp_path, cache_home):
    listing = list_pictures(paint(tmp_path / "train"))
    (tmp_path / ".safe_trainer").write_text("a file where the folder would be")
    first = decoded(listing, (32, 32))
    assert len(list((cache_home / "safe_trainer").iterdir())) == 1
    (cache_home / "safe_trainer").rename(cache_home / "moved")
    (cache_home / "safe_trainer").write_text("nor here")
    assert np.array_equal(decoded(listing, (32, 32)), first)


def test_pictures_of_another_size_are_refused_with_their_path(tmp_path):
    paint(tmp_path / "train", size=(20, 32))
    with pytest.raises(ValueError, match=r"32 by 32 pixels \(got 20 by 32 in .*cat.0000\.png\)"):
        decoded(list_pictures(tmp_path / "train"), (32, 32))


def test_a_file_that_is_no_picture_is_named(tmp_path):
    paint(tmp_path / "train")
    (tmp_path / "train" / "dog" / "0002.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"0002\.png must be a picture"):
        decoded(list_pictures(tmp_path / "train"), (32, 32))


def test_pictures_of_ones_own(tmp_path):
    paint(tmp_path / "train", size=(40, 30), suffix=".jpg", count=10)
    paint(tmp_path / "test", size=(50, 60))
    data = image_folder(str(tmp_path), size=16, val_share=0.2)
    assert {part: len(data[part]) for part in ("train", "val", "test")} == {"train": 16, "val": 4, "test": 8}
    assert data["num_classes"] == 2
    assert sorted(data["val"].labels.tolist()) == [0, 0, 1, 1]
    for part in ("train", "val", "test"):
        picture, label = data[part][0]
        assert picture.shape == (3, 16, 16)
        assert picture.dtype == torch.float32
        assert label == ["cat", "dog"].index(data[part].paths[0].parent.name)
    assert data["train"].random_transforms
    assert not torch.equal(data["train"][0][0], data["train"][0][0])
    assert not data["val"].random_transforms
    assert torch.equal(data["val"][0][0], data["val"][0][0])
    assert not set(data["train"].paths) & set(data["val"].paths)


def test_a_folder_val_is_taken_as_it_is(tmp_path):
    paint(tmp_path / "train")
    paint(tmp_path / "val", count=2)
    data = image_folder(str(tmp_path), size=16)
    assert (len(data["train"]), len(data["val"])) == (8, 4)
    assert "test" not in data


def test_classes_may_stand_in_the_root_itself(tmp_path):
    data = image_folder(str(paint(tmp_path / "animals", count=5)), size=16, val_share=0.0)
    assert len(data["train"]) == 10
    assert "val" not in data


def test_gray_pictures_become_rgb(tmp_path):
    (tmp_path / "one").mkdir()
    Image.fromarray(np.full((20, 20), 9, dtype=np.uint8)).save(tmp_path / "one" / "gray.png")
    assert image_folder(str(tmp_path), size=16, val_share=0.0)["train"][0][0].shape == (3, 16, 16)


def test_what_is_wrong_with_the_folders_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere must be a folder .* set data\.root"):
        image_folder(str(tmp_path / "nowhere"))
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"must hold pictures .* its subfolders: cat"):
        image_folder(str(tmp_path / "empty"))
    paint(tmp_path / "pets" / "train")
    with pytest.raises(ValueError, match=r"must hold 3 class folders.*model\.num_classes=2"):
        image_folder(str(tmp_path / "pets"), num_classes=3)
    paint(tmp_path / "pets" / "val", ("cat", "cow"))
    with pytest.raises(ValueError, match=r"must have the same class folders \(only one has: cow, dog\)"):
        image_folder(str(tmp_path / "pets"))
    paint(tmp_path / "only_val" / "val")
    with pytest.raises(FileNotFoundError, match=r"train must be a folder"):
        image_folder(str(tmp_path / "only_val"))
