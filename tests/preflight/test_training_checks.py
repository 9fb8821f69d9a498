"""One batch by heart, the ramp of rates, the short run: broken programs and their mended twins."""

import pytest
import torch
from programs import blobs, loader_of, mlp
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


def names(found):
    return [name for name, _ in found[0]]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))


@pytest.mark.parametrize("make", [net, mlp])
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (nn.CrossEntropyLoss(), []),
        (lambda o, t: o.log_softmax(1).gather(1, t.unsqueeze(1)).mean(), ["loss.wrong_sign"]),
        (lambda o, t: -o.log_softmax(1).gather(1, t.unsqueeze(1)).mean(), []),
    ],
)
def test_a_loss_of_the_wrong_sign(make, loss, expected, alarms):
    model = make()
    assert (
        names(alarms("overfit", model, loss, torch.optim.SGD(model.parameters(), lr=0.1), loader_of(blobs())))
        == expected
    )


def test_a_regression_of_the_wrong_sign(alarms):
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs[:, :1] * 2 + 1)
    for sign, expected in ((-1, ["loss.wrong_sign"]), (1, [])):
        model = nn.Linear(8, 1)

        def loss(output, target, sign=sign):
            return (0.5 * output.square() - output * target if sign > 0 else output * target).mean()

        found = alarms("overfit", model, loss, torch.optim.SGD(model.parameters(), lr=0.1), loader_of(data))
        assert names(found) == expected


def test_losses_that_fall_below_zero_rightly_are_silent(alarms):
    def normal(output, target):
        spread = output[:, 1].exp()
        return (output[:, 1] + 0.5 * ((target - output[:, 0]) / spread).square()).mean()

    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, 0.01 * inputs[:, 0])
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    assert names(alarms("overfit", model, normal, torch.optim.Adam(model.parameters(), lr=1e-2), loader_of(data))) == []


def deep():
    layers = [nn.Linear(8, 16), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("make", "optimizer", "high", "sound"),
    [(net, torch.optim.SGD, 300.0, 0.1), (deep, torch.optim.SGD, 30.0, 0.3)],
)
def test_a_rate_that_is_too_high(make, optimizer, high, sound, alarms):
    for rate, expected in ((high, ["optimizer.lr_too_high"]), (sound, [])):
        model = make()
        chosen = optimizer(model.parameters(), lr=rate)
        assert names(alarms("overfit", model, nn.CrossEntropyLoss(), chosen, loader_of(blobs()))) == expected


def test_a_sum_over_the_batch_with_the_rate_of_a_mean(alarms):
    data = loader_of(blobs(samples=512), batch_size=256)
    for reduction, expected in (("sum", ["loss.reduction"]), ("mean", [])):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        assert names(alarms("overfit", model, nn.CrossEntropyLoss(reduction=reduction), optimizer, data)) == expected
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / 256, momentum=0.9)
    assert names(alarms("overfit", model, nn.CrossEntropyLoss(reduction="sum"), optimizer, data)) == []


def test_two_optimizers_are_skipped_with_a_reason(alarms):
    model = net()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2]))

    def step(model, loss_fn, optimizer, batch):
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        for each in (first, second):
            each.step()
            each.zero_grad()
        return loss

    found, results = alarms(
        "overfit", model, None, first, loader_of(blobs()), train_step=step, other_optimizers=[second]
    )
    assert results["overfit"].status == "skip"
    assert "several optimizers" in results["overfit"].evidence
    assert found == []


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_that_are_never_cleared_are_seen_before_the_run(clears, alarms):
    def step(model, loss_fn, optimizer, batch):
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        return loss

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = alarms("short_run", model, None, optimizer, loader_of(blobs()), train_step=step)
    assert names(found) == ([] if clears else ["gradient.accumulating"])
