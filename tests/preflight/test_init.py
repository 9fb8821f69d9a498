"""Untrained models that cannot learn, and their mended twins."""

import pytest
import torch
from programs import blobs, loader_of, mlp, pictures
from torch import nn
from torch.utils.data import TensorDataset


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def changed(model, change):
    with torch.no_grad():
        change(model)
    return model


def picture_net():
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))


def table_net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def all_alike(value):
    def change(model):
        for parameter in model.parameters():
            parameter.fill_(value if parameter.dim() > 1 else 0.0)

    return change


@pytest.mark.parametrize("value", [0.0, 0.1])
@pytest.mark.parametrize(("make", "data"), [(picture_net, pictures), (table_net, blobs)])
def test_units_that_stay_alike(make, data, value, alarms):
    model = changed(make(), all_alike(value))
    found, _ = alarms("init", model, nn.CrossEntropyLoss(), sgd(model), loader_of(data()))
    assert ("init.zero_symmetric", "0") in found
    model = make()
    assert alarms("init", model, nn.CrossEntropyLoss(), sgd(model), loader_of(data()))[0] == []


def test_branches_that_start_at_zero_on_purpose_are_silent(alarms):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 8)
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.down.bias)

        def forward(self, inputs):
            return inputs + self.down(self.up(inputs).relu())

    model = nn.Sequential(Block(), Block(), nn.Linear(8, 3))
    nn.init.zeros_(model[2].weight)
    assert alarms("init", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))[0] == []


@pytest.mark.parametrize(("factor", "expected"), [(1, []), (200, [("init.loss_off", "2")])])
def test_a_last_layer_that_is_sure_of_itself(factor, expected, alarms):
    model = changed(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), lambda m: m[2].weight.mul_(factor))
    assert alarms("init", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))[0] == expected


@pytest.mark.parametrize(("bias", "expected"), [(0.0, []), (-30.0, [("init.dead", "0")])])
@pytest.mark.parametrize("make", [lambda: mlp(dropout=0.0), lambda: nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))])  # fmt: skip
def test_units_that_answer_nothing(make, bias, expected, alarms):
    model = make()
    if len(model) == 5:
        model[1] = nn.Identity()  # behind a normalisation the bias would not matter
    changed(model, lambda m: m[0].bias.fill_(bias))
    data = blobs() if isinstance(model[0], nn.Linear) else pictures()
    assert alarms("init", model, nn.CrossEntropyLoss(), sgd(model), loader_of(data))[0] == expected


@pytest.mark.parametrize(("spread", "expected"), [(0.3, []), (20.0, ["activation.saturated"])])
def test_a_tanh_at_its_limits(spread, expected, alarms):
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    changed(model, lambda m: m[0].weight.normal_(0, spread))
    found, _ = alarms("init", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))
    assert [name for name, _ in found] == expected


@pytest.mark.parametrize(("activation", "expected"), [(nn.ReLU, []), (nn.Sigmoid, ["gradient.vanishing"])])
def test_a_gradient_that_gets_lost(activation, expected, alarms):
    layers = [nn.Linear(8, 16), activation()]
    for _ in range(11):
        layers += [nn.Linear(16, 16), activation()]
    model = nn.Sequential(*layers, nn.Linear(16, 3))
    if activation is nn.ReLU:
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
    found, _ = alarms("init", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))
    assert [name for name, _ in found] == expected


class Logarithm(nn.Module):
    def __init__(self, least):
        super().__init__()
        self.least = least

    def forward(self, inputs):
        return inputs.relu().clamp(min=self.least).log()


class Root(nn.Module):
    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def forward(self, inputs):
        return ((inputs - inputs[:, :1]).square() + self.offset).sqrt()


@pytest.mark.parametrize(
    ("broken", "mended", "fault"),
    [(Logarithm(0.0), Logarithm(1e-3), "loss.log_of_zero"), (Root(0.0), Root(1e-3), "gradient.nonfinite")],
)
def test_what_is_not_finite_is_traced(broken, mended, fault, alarms):
    for middle in (broken, mended):
        model = nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 3))
        found, _ = alarms("init", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))
        assert found == ([(fault, "1")] if middle is broken else [])


def test_half_precision_that_overflows_out_of_sight(alarms):
    class Energy(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.dtype = dtype

        def forward(self, inputs):
            energy = (inputs * 300).to(self.dtype).square().sum(1, keepdim=True)
            return inputs / (1 + energy.float())

    for dtype, expected in ((torch.float16, ["precision.overflow"]), (torch.float32, [])):
        model = nn.Sequential(nn.Linear(8, 8), Energy(dtype), nn.Linear(8, 3))
        found, _ = alarms("init", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))
        assert [name for name, _ in found] == expected


def test_an_error_of_pytorch_that_stands_for_a_fault(alarms):
    data = blobs()
    wrong = TensorDataset(data.tensors[0], data.tensors[1] + 1)  # counted from 1
    model = mlp()
    found, results = alarms("init", model, nn.CrossEntropyLoss(), sgd(model), loader_of(wrong))
    assert [name for name, _ in found] == ["data.label_range"]
    assert results["init"].status == "fail"
