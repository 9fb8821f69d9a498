"""Data that will not teach, and their mended twins."""

import math

import numpy as np
import pytest
import torch
from programs import blobs, loader_of, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def found(alarms, data, val=None, *, model=None, loss=None, loader=None, optimizer=None):
    model = model or mlp()
    loaders = loader or loader_of(data, batch_size=32), None if val is None else loader_of(val, batch_size=32)
    alarm, _ = alarms("data", model, loss or nn.CrossEntropyLoss(), optimizer or adam(model), *loaders)
    return [name for name, _ in alarm]


def changed(data, index, change):
    tensors = [tensor.clone() for tensor in data.tensors]
    tensors[index] = change(tensors[index])
    return TensorDataset(*tensors)


def at(rows, value):
    def change(tensor):
        tensor[rows] = value
        return tensor

    return change


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [(5, 2), (90, 0), slice(40, 43)])
def test_values_that_are_not_finite(value, rows, alarms):
    assert found(alarms, changed(blobs(), 0, at(rows, value))) == ["data.nonfinite"]
    assert found(alarms, blobs()) == []


def test_inputs_that_are_all_the_same(alarms):
    for change in (
        torch.zeros_like,
        lambda t: t[:1].expand_as(t).clone(),
        lambda t: (t * 0.01).to(torch.uint8).float(),
    ):
        assert found(alarms, changed(blobs(), 0, change)) == ["data.constant_input"]


def test_targets_of_a_regression_cast_to_whole_numbers(alarms):
    data = TensorDataset(torch.randn(96, 8), torch.rand(96, 1) * 0.9)

    def squared(output, target):
        return (output - target.float()).square().mean()

    model = nn.Linear(8, 1)
    assert found(alarms, changed(data, 1, torch.Tensor.long), model=model, loss=squared) == ["loss.wrong_target_dtype"]
    assert found(alarms, data, model=model, loss=squared) == []


@pytest.mark.parametrize("rare", [2, 4])
def test_a_class_that_is_hardly_there(rare, alarms):
    data = blobs(samples=600, classes=2)
    keep = torch.cat([(data.tensors[1] == 0).nonzero().flatten(), (data.tensors[1] == 1).nonzero().flatten()[:rare]])
    data = TensorDataset(*(tensor[keep] for tensor in data.tensors))
    model = mlp(classes=2)
    assert found(alarms, data, model=model) == ["data.imbalance"]
    weights = torch.where(data.tensors[1] == 1, 300.0 / rare, 1.0)
    sampled = DataLoader(data, batch_size=32, sampler=WeightedRandomSampler(weights, len(data)))
    assert found(alarms, data, model=model, loader=sampled) == []
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 40.0]))
    assert found(alarms, data, model=model, loss=weighted) == []


def test_a_class_that_the_loss_ignores(alarms):
    for ignored, expected in ((1, ["data.label_masked"]), (-100, [])):
        assert found(alarms, blobs(), loss=nn.CrossEntropyLoss(ignore_index=ignored)) == expected


def test_validation_samples_that_were_trained_on(alarms):
    data = blobs(samples=400)
    apart, inside = blobs(samples=100, seed=9), TensorDataset(*(tensor[50:150] for tensor in data.tensors))
    assert found(alarms, data, inside) == ["data.split_overlap"]
    assert found(alarms, data, apart) == []


def test_inputs_of_few_possible_values_may_repeat(alarms):
    def coarse(seed):
        inputs = torch.randint(0, 2, (400, 4), generator=torch.Generator().manual_seed(seed)).float()
        return TensorDataset(inputs, inputs[:, :2].sum(1).long() % 2)

    assert found(alarms, coarse(0), coarse(1), model=mlp(features=4, classes=2)) == []


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_classes_in_order(classes, alarms):
    data = blobs(samples=320, classes=classes)
    order = data.tensors[1].argsort(stable=True)
    data = TensorDataset(*(tensor[order] for tensor in data.tensors))
    model = mlp(classes=classes)
    assert found(alarms, data, model=model, loader=DataLoader(data, batch_size=16)) == ["data.not_shuffled"]
    assert found(alarms, data, model=model, loader=DataLoader(data, batch_size=16, shuffle=True)) == []
    mixed = blobs(samples=320, classes=classes)
    assert found(alarms, mixed, model=model, loader=DataLoader(mixed, batch_size=16)) == []


@pytest.mark.parametrize("how", ["apart", "slipped"])
def test_labels_that_belong_to_others(how, alarms):
    data, val = blobs(samples=400), blobs(samples=100, seed=7)
    labels = torch.randint(0, 3, (400,), generator=torch.Generator().manual_seed(5))
    centres = 2 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    inputs = centres[labels] + torch.randn(400, 8)
    right = TensorDataset(inputs, labels)
    wrong = labels[torch.randperm(400)] if how == "apart" else labels.roll(1)
    assert found(alarms, TensorDataset(inputs, wrong), val) == ["data.label_misaligned"]
    assert found(alarms, right, val) == []
    assert found(alarms, data, val) == []


def test_a_relation_that_simple_models_do_not_see_is_no_alarm(alarms):
    inputs = torch.randint(0, 2, (400, 12)).float()
    parity = TensorDataset(inputs + 0.01 * torch.randn(400, 12), inputs.sum(1).long() % 2)
    assert found(alarms, parity, model=mlp(features=12, classes=2)) == []


def test_the_label_in_a_column(alarms):
    data = blobs()
    leaked = changed(data, 0, lambda t: torch.cat([t[:, :7], 3.0 * data.tensors[1].unsqueeze(1) - 1], 1))
    assert found(alarms, leaked) == ["data.target_leak"]


class Reader(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.embed, self.causal = nn.Embedding(20, 16), causal
        self.attend, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 20)

    def forward(self, tokens):
        states = self.embed(tokens)
        mask = torch.ones(states.shape[1], states.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        return self.head(self.attend(states, states, states, attn_mask=mask)[0]).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
def test_the_next_token_that_is_seen(causal, alarms):
    tokens = torch.randint(0, 20, (64, 13))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    assert found(alarms, data, model=Reader(causal)) == ([] if causal else ["data.target_leak"])


class Kept(Dataset):
    """Pictures in memory, normalised when they are read."""

    def __init__(self, in_place, array):
        generator = torch.Generator().manual_seed(0)
        self.data = 5 + 2 * torch.randn(64, 8, generator=generator)
        self.data = self.data.numpy() if array else self.data
        self.in_place = in_place

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        sample = self.data[index]
        if self.in_place:
            sample -= 5
            sample /= 2
        else:
            sample = (sample - 5) / 2
        return torch.as_tensor(sample), index % 3


@pytest.mark.parametrize("array", [True, False])
def test_a_data_set_that_is_changed_by_reading(array, alarms):
    wrong = Kept(True, array)
    before = torch.as_tensor(wrong.data).clone()
    assert found(alarms, wrong) == ["data.mutated_inplace"]
    assert torch.equal(torch.as_tensor(wrong.data), before)
    assert found(alarms, Kept(False, array)) == []


class MadeUp(Dataset):
    def __init__(self, own):
        self.generator = np.random.default_rng(0) if own else None

    def __len__(self):
        return 64

    def __getitem__(self, index):
        values = torch.from_numpy(self.generator.normal(size=8)).float() if self.generator else torch.randn(8)
        return values, int(values[0] > 0)


@pytest.mark.parametrize("own", [True, False])
def test_workers_that_repeat_each_other(own, alarms):
    data = MadeUp(own)
    loader = DataLoader(data, batch_size=8, num_workers=2)
    assert found(alarms, data, model=mlp(classes=2), loader=loader) == (["data.worker_seed"] if own else [])


@pytest.mark.parametrize("which", ["inputs", "targets"])
def test_a_scale_that_keeps_it_from_learning(which, alarms):
    torch.manual_seed(1)
    inputs = torch.randn(256, 8)
    targets = inputs[:, :1] - 0.5 * inputs[:, 1:2]
    big = (
        TensorDataset(inputs * 3000 + 900, targets)
        if which == "inputs"
        else TensorDataset(inputs, targets * 900 + 4000)
    )

    def program():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        return {"model": model, "loss": nn.MSELoss(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.05)}

    assert found(alarms, big, **program()) == ["data.unnormalized"]
    assert found(alarms, TensorDataset(inputs, targets), **program()) == []
    normalised = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    if which == "inputs":
        optimizer = torch.optim.SGD(normalised.parameters(), lr=0.05)
        assert found(alarms, big, model=normalised, loss=nn.MSELoss(), optimizer=optimizer) == []
