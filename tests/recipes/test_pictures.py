import pytest
import torch
from torchvision.transforms.v2 import functional as vision

from safe_trainer.data import DeviceLoader, OrderedLoader
from safe_trainer.recipes.pictures import Augmentation, Pictures, draw_choices, subset

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def pictures(augmentation=None, count=6):
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8)
    return Pictures(images, torch.arange(count), mean=MEAN, std=STD, augmentation=augmentation)


def as_torchvision_does(image, choices, augmentation):
    """The same choices, carried out one picture at a time by torchvision."""
    top, left, flip, row, column = choices.tolist()
    image = vision.pad(image, [augmentation.padding] * 4)
    image = vision.crop(image, top, left, 8, 8)
    image = vision.horizontal_flip(image) if flip else image
    image = vision.normalize(vision.to_dtype(image, torch.float32, scale=True), MEAN, STD)
    if augmentation.cutout:
        start = [max(0, place - augmentation.cutout // 2) for place in (row, column)]
        end = [place - augmentation.cutout // 2 + augmentation.cutout for place in (row, column)]
        image[:, start[0] : end[0], start[1] : end[1]] = 0
    return image


def test_plain_pictures_are_normalised():
    data = pictures()
    picture, label = data[2]
    expected = vision.normalize(vision.to_dtype(data.images[2], torch.float32, scale=True), MEAN, STD)
    assert torch.allclose(picture, expected, atol=1e-6)
    assert label == 2
    assert all(torch.equal(one[0], data[i][0]) for i, one in enumerate(data.__getitems__(list(range(6)))))
    assert not data.random_transforms


@pytest.mark.parametrize(
    "augmentation", [Augmentation(), Augmentation(padding=2, cutout=3), Augmentation(padding=0, flip=False, cutout=4)]
)
def test_batches_on_a_device_equal_torchvisions_pictures(augmentation):
    data = pictures(augmentation, count=40)
    device = data.on_device("cpu")
    choices = device.draw(torch.Generator().manual_seed(0))
    order = torch.randperm(40)
    batch, labels = device.batch(order, choices)
    expected = [as_torchvision_does(data.images[i], choices[i], augmentation) for i in order]
    assert torch.allclose(batch, torch.stack(expected), atol=1e-6)
    assert torch.equal(labels, order)


def test_one_picture_at_a_time_equals_torchvisions_picture():
    augmentation = Augmentation(cutout=3)
    data = pictures(augmentation)
    assert data.random_transforms
    for index in range(6):
        torch.manual_seed(index)
        picture, _ = data[index]
        torch.manual_seed(index)
        choices = draw_choices(1, torch.Size((8, 8)), augmentation, None)[0]
        assert torch.allclose(picture, as_torchvision_does(data.images[index], choices, augmentation), atol=1e-6)


def test_choices_cover_their_range_evenly():
    choices = draw_choices(9000, torch.Size((6, 8)), Augmentation(padding=4), torch.Generator().manual_seed(0))
    for column, count in enumerate((9, 9, 2, 6, 8)):
        frequencies = choices[:, column].bincount() / 9000
        assert len(frequencies) == count
        assert torch.allclose(frequencies, torch.full((count,), 1 / count), atol=0.02)
    assert draw_choices(50, torch.Size((6, 8)), Augmentation(flip=False), None)[:, 2].sum() == 0


def test_a_sample_on_a_device_depends_on_seed_epoch_and_index_alone():
    data = pictures(Augmentation(), count=20).on_device("cpu")

    def by_label(loader):
        return {int(i): x for pictures, labels in loader for x, i in zip(pictures, labels, strict=True)}

    def loader(**options):
        return DeviceLoader(data, **{"batch_size": 6, "seed": 1, "shuffle": True, "device": "cpu", **options})

    running = loader()
    first, second = by_label(running), by_label(running)
    in_order = by_label(loader(shuffle=False, batch_size=7))
    assert all(torch.equal(first[i], in_order[i]) for i in range(20))
    assert not all(torch.equal(first[i], second[i]) for i in range(20))


def test_evaluation_is_the_same_on_a_device_and_off_it():
    data = pictures(count=10)
    options = {"batch_size": 4, "seed": 0, "shuffle": False}
    on, off = DeviceLoader(data.on_device("cpu"), device="cpu", **options), OrderedLoader(data, **options)
    for one, other in zip(on, off, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_a_subset_has_an_augmentation_of_its_own():
    data = pictures(Augmentation())
    part = subset(data, torch.tensor([4, 1]), None)
    assert part.labels.tolist() == [4, 1]
    assert not part.random_transforms
    assert torch.equal(part.mean, data.mean)
