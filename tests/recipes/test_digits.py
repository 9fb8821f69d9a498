import pytest
import torch

from safe_trainer.recipes.digits import digit_pictures, digit_rows, digits


@pytest.mark.parametrize(("make", "shape"), [(digits, (1, 8, 8)), (digit_rows, (8, 8))])
def test_labelled_digits(make, shape):
    data = make()
    assert {part: len(data[part]) for part in ("train", "val", "test")} == {"train": 1257, "val": 270, "test": 270}
    assert data["num_classes"] == 10
    pictures, labels = data["train"].tensors
    assert pictures.shape[1:] == shape
    assert pictures.dtype == torch.float32
    assert pictures.mean().item() == pytest.approx(0, abs=1e-5)
    assert pictures.std().item() == pytest.approx(1, abs=1e-5)
    assert labels.bincount().min() > 115


def test_parts_share_no_picture_and_are_the_same_every_time():
    one, other = digits(), digits()
    torch.rand(5)
    assert all(torch.equal(one[part].tensors[0], other[part].tensors[0]) for part in ("train", "val", "test"))
    seen = [{picture.numpy().tobytes() for picture in one[part].tensors[0]} for part in ("train", "val", "test")]
    assert len(seen[0] | seen[1] | seen[2]) == sum(map(len, seen))


def test_digits_without_labels():
    data = digit_pictures()
    (pictures,) = data["train"].tensors
    assert pictures.shape == (1257, 1, 8, 8)
    assert (pictures.min(), pictures.max()) == (0, 1)
    assert "num_classes" not in data


def test_parts_can_be_left_out():
    assert sorted(digit_pictures(val_share=0.2, test_share=0.0)) == ["train", "val"]
