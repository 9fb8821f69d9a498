import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from safe_trainer.config import ConfigError, LoaderConfig
from safe_trainer.data import DeviceLoader, Loaders, OrderedLoader, build_loaders, has_random_transforms
from safe_trainer.utils import rng

# More workers than cores are what is tested here; that they are slow is not.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Noisy(Dataset):
    """Draws from all three generators for each sample."""

    def __init__(self, count=23):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.tensor([random.random(), np.random.rand(), np.random.randn()], dtype=torch.float64)
        return torch.cat([torch.rand(2).double() + index, noise]), index


class Claims(Noisy):
    """As above, but it says that it draws nothing, so nobody seeds for it."""

    random_transforms = False


class Counting(Dataset):
    """Remembers what was asked of it."""

    random_transforms = False

    def __init__(self, count=20):
        self.count, self.asked = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.asked.append(index)
        return torch.tensor(index)


def noisy_collate(samples):
    return torch.stack([sample[0] for sample in samples]) + torch.rand(()) + random.random() + np.random.rand()


def loader(dataset=None, **options):
    options = {"batch_size": 5, "seed": 7, "shuffle": True, **options}
    return OrderedLoader(dataset or Noisy(), **options)


def epochs(loader, count=2):
    return [list(loader) for _ in range(count)]


def indices(epoch):
    return [batch[1].tolist() for batch in epoch]


def flat(epoch):
    return torch.cat([batch[1] for batch in epoch]).tolist()


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


# --- order and randomness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collate_fn", [None, noisy_collate])
@pytest.mark.parametrize("workers", [2, 4])
def test_any_number_of_workers_gives_the_same_bits(workers, collate_fn):
    plain = epochs(loader(collate_fn=collate_fn))
    assert same(epochs(loader(collate_fn=collate_fn, num_workers=workers)), plain)


def test_a_collate_function_is_seeded_even_where_samples_draw_nothing():
    quiet = TensorDataset(torch.zeros(23))
    plain = epochs(loader(quiet, collate_fn=noisy_collate))
    assert same(epochs(loader(quiet, collate_fn=noisy_collate, num_workers=2)), plain)
    assert not same(plain[0], plain[1])


def test_without_seeding_workers_would_differ():
    assert not same(epochs(loader(Claims())), epochs(loader(Claims(), num_workers=2)))


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own():
    first, second = epochs(loader())
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(23))
    assert indices(first) != indices(second)
    assert [len(batch) for batch in indices(first)] == [5, 5, 5, 5, 3]


def test_without_shuffling_the_order_is_the_data_sets():
    first, second = epochs(loader(shuffle=False))
    assert flat(first) == flat(second) == list(range(23))
    assert not same(first, second)  # the noise is another each epoch


def test_same_every_epoch_draws_the_first_again():
    first, second = epochs(loader(same_every_epoch=True))
    assert same(first, second)


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    def by_index(epoch):
        return {int(i): row for rows, numbers in epoch for row, i in zip(rows, numbers, strict=True)}

    shuffled, other_batches = by_index(list(loader())), by_index(list(loader(batch_size=3, shuffle=False)))
    assert all(torch.equal(shuffled[i], other_batches[i]) for i in range(23))
    other_seed = by_index(list(loader(seed=8)))
    assert not any(torch.equal(shuffled[i], other_seed[i]) for i in range(23))


def test_what_else_is_drawn_in_between_changes_nothing():
    plain = list(loader())
    disturbed = []
    for batch in loader():
        disturbed.append(batch)
        torch.rand(3), np.random.rand(3), random.random()
    assert same(disturbed, plain)


@pytest.mark.parametrize("options", [{}, {"collate_fn": noisy_collate}, {"num_workers": 2}, {"shuffle": False}])
def test_the_callers_generators_are_never_touched(options):
    rng.seed_everything(3)
    made = loader(**options)
    before = rng.capture()
    for _ in made:
        pass
    next(iter(made))
    after = rng.capture()
    assert after["python"]["words"].equal(before["python"]["words"])
    assert after["numpy"]["state"]["key"]["words"].equal(before["numpy"]["state"]["key"]["words"])
    assert after["numpy"]["state"]["pos"] == before["numpy"]["state"]["pos"]
    assert after["torch"].equal(before["torch"])


def test_a_seed_of_none_is_a_seed_of_its_own_and_touches_no_generator():
    before = torch.get_rng_state()
    one, other = loader(seed=None), loader(seed=None)
    assert one.seed != other.seed
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generators_are_set_back_when_a_sample_raises():
    class Broken(Noisy):
        def __getitem__(self, index):
            torch.rand(1)
            raise KeyError("no such picture")

    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="no such picture"):
        next(iter(loader(Broken())))
    assert torch.equal(torch.get_rng_state(), before)


# --- position --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_starts_at_any_batch_of_any_epoch(workers):
    whole = epochs(loader(), 3)
    resumed = loader(num_workers=workers)
    resumed.set_position(1, 3)
    assert same(list(resumed), whole[1][3:])
    assert same(list(resumed), whole[2])


def test_batches_before_the_position_are_not_loaded():
    data = Counting()
    skipping = loader(data, shuffle=False)
    skipping.set_position(0, 3)
    list(skipping)
    assert data.asked == [15, 16, 17, 18, 19]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 4, 5])
def test_the_state_names_the_next_batch(done, workers):
    whole = epochs(loader(), 2)
    running = loader(num_workers=workers)
    passing = iter(running)
    for _ in range(done):
        next(passing)
    resumed = loader(seed=99)
    resumed.load_state_dict(running.state_dict())
    assert same(list(resumed), whole[0][done:])
    assert same(list(resumed), whole[1])


def test_a_whole_pass_ends_at_the_next_epoch():
    running = loader()
    list(running)
    assert running.state_dict() == {"epoch": 1, "batch": 0, "seed": 7}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_was_broken_off_is_followed_by_the_next_epoch(workers):
    whole = epochs(loader(), 2)
    running = loader(num_workers=workers)
    for batch in running:
        assert same(batch, whole[0][0])
        break
    assert same(list(running), whole[1])


@pytest.mark.parametrize("position", [(-1, 0), (0, -1), (0, 6)])
def test_a_position_that_is_not_there_is_refused(position):
    with pytest.raises(ValueError, match=r"a position must be an epoch from 0 and a batch from 0 to 5"):
        loader().set_position(*position)


@pytest.mark.parametrize(("drop_last", "count"), [(False, 5), (True, 4)])
def test_the_length_is_the_number_of_batches_of_a_whole_epoch(drop_last, count):
    made = loader(drop_last=drop_last)
    made.set_position(0, 2)
    assert len(made) == count
    assert len(list(made)) == count - 2
    assert len(list(made)) == count


# --- data sets -------------------------------------------------------------------------------------------------------


def test_tensors_are_indexed_at_once_with_the_batches_of_a_plain_loader():
    data = TensorDataset(torch.randn(23, 4), torch.arange(23))
    ours = list(loader(data, shuffle=False))
    plain = list(DataLoader(data, batch_size=5))
    assert same(ours, plain)
    assert type(ours[0]) is type(plain[0])


def test_a_subset_gives_the_batches_of_a_plain_loader():
    data = Subset(TensorDataset(torch.randn(23, 4), torch.arange(23)), list(range(3, 20)))
    assert same(list(loader(data, shuffle=False)), list(DataLoader(data, batch_size=5)))


def test_who_has_random_transforms():
    tensors = TensorDataset(torch.zeros(3))
    assert not has_random_transforms(tensors)
    assert has_random_transforms(Noisy())
    assert not has_random_transforms(Claims())
    assert not has_random_transforms(Subset(tensors, [0]))
    assert has_random_transforms(Subset(Noisy(), [0]))
    assert has_random_transforms(ConcatDataset([tensors, Noisy()]))
    assert not has_random_transforms(ConcatDataset([tensors, Claims()]))


# --- on a device -----------------------------------------------------------------------------------------------------


class OnDevice(TensorDataset):
    """Offers itself on a device; the choice for a sample is one random number."""

    def on_device(self, device):
        self.device = torch.device(device)
        return self

    def draw(self, generator):
        return torch.rand(len(self), generator=generator)

    def batch(self, indices, choices):
        return [self.tensors[0][indices], choices[indices]]


def device_loader(**options):
    data = OnDevice(torch.arange(23))
    return DeviceLoader(data, **{"batch_size": 5, "seed": 7, "shuffle": True, "device": "cpu", **options})


def test_on_a_device_the_order_is_the_same_and_choices_follow_the_sample():
    first, second = epochs(device_loader())
    assert [batch[0].tolist() for batch in first] == indices(list(loader()))

    def table(epoch):
        return torch.cat([batch[1] for batch in epoch])[torch.cat([batch[0] for batch in epoch]).argsort()]

    assert torch.equal(table(first), table(list(device_loader(shuffle=False, batch_size=4))))
    assert not torch.equal(table(first), table(second))


def test_on_a_device_a_position_resumes():
    whole = epochs(device_loader(), 2)
    resumed = device_loader()
    resumed.load_state_dict({"epoch": 1, "batch": 2, "seed": 7})
    assert same(list(resumed), whole[1][2:])


# --- build_loaders ---------------------------------------------------------------------------------------------------


def build(source, device="cpu", **config):
    return build_loaders(source, LoaderConfig(**config), seed=0, device=device)


def tensors(count=10):
    return TensorDataset(torch.arange(count))


def test_data_sets_become_loaders():
    made = build({"train": tensors(), "val": tensors(), "num_classes": 3}, batch_size=2)
    assert isinstance(made, Loaders)
    assert (made.train.batch_size, made.train.shuffle, made.val.batch_size, made.val.shuffle) == (2, True, 8, False)
    assert made.test is None
    assert made.num_classes == 3


def test_attributes_serve_as_well_as_keys():
    class Source:
        train = tensors()
        val = None
        anything_else = 3

    assert len(build(Source()).train) == 1


@pytest.mark.parametrize("ready", [DataLoader(tensors()), [torch.zeros(2), torch.ones(2)], iter([torch.zeros(2)])])
def test_what_is_a_loader_already_is_taken_as_it_is(ready):
    assert build({"train": ready}).train is ready


def test_a_collate_function_goes_to_the_loaders():
    made = build({"train": tensors(), "collate_fn": len}, batch_size=4)
    assert list(made.train) == [4, 4, 2]


def test_data_that_can_live_on_an_accelerator_does():
    source = {"train": OnDevice(torch.arange(9)), "val": OnDevice(torch.arange(4))}
    assert isinstance(build(source, device="meta").train, DeviceLoader)
    assert isinstance(build(source).train, OrderedLoader)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({}, "data must give 'train'"),
        (None, "data must give 'train'"),
        ({"train": tensors(), "valid": tensors()}, "'valid', which is not one of .*did you mean val"),
        ({"train": tensors(0)}, "data's 'train' holds no samples"),
        ({"train": tensors(), "val": tensors(0)}, "data's 'val' holds no samples"),
        ({"train": []}, "data's 'train' holds no batches"),
        ({"train": 3}, "data's 'train' must be a data set"),
        ({"train": "train"}, "data's 'train' must be a data set"),
        ({"train": torch.zeros(3)}, "tensors go into a TensorDataset"),
        ({"train": {"x": 1}}, "data's 'train' must be a data set"),
        ({"train": tensors(), "num_classes": "ten"}, "num_classes must be a whole number"),
        (
            {"train": type("Stream", (IterableDataset,), {"__iter__": lambda self: iter([])})()},
            "got Stream, an IterableDataset",
        ),
    ],
)
def test_what_is_wrong_with_the_data_is_said(source, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(source)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as raised:
        build({"train": tensors(0), "valid": 1, "num_classes": 0})
    assert len(raised.value.problems) == 3


def test_a_batch_larger_than_the_data_needs_its_last_batch():
    assert len(build({"train": tensors(5)}, batch_size=64).train) == 1
    with pytest.raises(ConfigError, match="at most the 5 training samples"):
        build({"train": tensors(5)}, batch_size=64, drop_last=True)
