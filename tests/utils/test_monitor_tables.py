"""The words for a layer are right on broken networks and their healthy twins, and the tables fit the terminal."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from safe_trainer.utils.monitor_tables import activation_class, gradient_class, loss_health, update_class
from safe_trainer.utils.monitors import Monitors


def measured(model, inputs):
    """Statistics of the layers after one forward and backward pass."""
    watching = Monitors(model, every=1)
    with watching.measured(1):
        model(inputs).square().mean().backward()
    return watching.history[0].layers


def trained(model, inputs, labels, *, steps=40, rate=0.05):
    optimizer = torch.optim.SGD(model.parameters(), rate)
    watching = Monitors(model, optimizer, every=10)
    for step in range(1, steps + 1):
        with watching.measured(step):
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        watching.note_loss(loss)
    return watching


def words(watching):
    latest = list(watching.history[-1].layers.values())
    last = [layer.gradient_norm for layer in latest if layer.gradient_norm][-1]
    reached = [max((entry.gradient_norm or 0) for entry in latest[: place + 1]) for place in range(len(latest))]
    return (
        [activation_class(layer, latest[0]) for layer in latest],
        [gradient_class(layer, last, most) for layer, most in zip(latest, reached, strict=True)],
    )


@pytest.fixture
def batch():
    inputs = torch.randn(64, 10)
    return inputs, (inputs[:, 0] > 0).long()


def test_a_healthy_network_is_called_healthy(batch):
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    watching = trained(model, *batch, rate=0.5)
    assert watching.history[-1].layers["1"].zero_share > 0.4  # half of a ReLU's outputs are zeros, and that is healthy
    assert words(watching) == (["healthy"] * 5, ["healthy"] * 5)
    assert loss_health(watching.losses())[0] == "falling"


def test_a_sparse_layer_is_not_dead(batch):
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    with torch.no_grad():
        model[0].bias.sub_(1.0)
    watching = trained(model, *batch, rate=0.01, steps=10)
    assert watching.history[-1].layers["1"].zero_share > 0.85
    assert words(watching)[0][1] == "healthy"


def test_dead_units_are_called_dead(batch):
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    with torch.no_grad():
        model[0].bias.sub_(100.0)
    watching = trained(model, *batch)
    assert words(watching)[0][1] == "dead"
    assert watching.history[-1].parameters["0.weight"].gradient_idle_rows == 1.0
    assert update_class(watching.history[-1].parameters["0.weight"]) == "zero"


def test_vanishing_and_saturated(batch):
    parts = [part for _ in range(8) for part in (nn.Linear(10, 10), nn.Sigmoid())]
    model = nn.Sequential(*parts, nn.Linear(10, 2))
    with torch.no_grad():
        model[4].weight.mul_(100)
    activations, gradients = words(trained(model, *batch, steps=10))
    assert activations[5] == "saturated"
    assert gradients[0] == "vanishing"
    assert gradients[-1] == "healthy"


def test_a_quiet_branch_beside_a_residual_stream_has_not_vanished():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return x + 1e-5 * self.out(self.into(x))

    model = nn.Sequential(nn.Linear(10, 8), Branch(), nn.Linear(8, 2))
    watching = trained(model, torch.randn(16, 10), torch.zeros(16, dtype=torch.long), steps=10)
    branch, last = watching.history[-1].layers["1.into"], watching.history[-1].layers["2"]
    assert branch.gradient_norm < 1e-3 * last.gradient_norm
    assert words(watching)[1] == ["healthy"] * 4


def test_samples_that_look_alike_are_called_collapsed():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight.mul_(1e-6)
    found = measured(model, torch.randn(16, 4))
    assert [activation_class(layer, found["0"]) for layer in found.values()] == ["healthy", "collapsed"]
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)
    found = measured(model, torch.randn(16, 4))
    assert activation_class(found["1"], found["0"]) == "zero"  # legal: a branch that starts at zero


def test_exploding_depth_and_growth():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    with torch.no_grad():
        for part in model:
            part.weight.mul_(10)
    found = measured(model, torch.randn(4, 16))
    assert activation_class(found["7"], found["0"]) == "exploding"
    assert activation_class(found["1"], found["0"]) == "healthy"
    scale = found["1"].root_mean_square
    assert activation_class(found["1"], found["0"], [scale / 200] * 3) == "exploding"
    assert activation_class(found["1"], found["0"], [scale / 200] * 2) == "healthy"  # too short a past


def test_non_finite_values_are_seen_wherever_they_are():
    class Poison(nn.Module):
        def forward(self, x):
            out = x * 1
            out[-1, -1] = math.nan
            return out

    model = nn.Sequential(nn.Linear(64, 4096), Poison())
    found = measured(model, torch.randn(64, 64))
    assert not found["1"].finite
    assert activation_class(found["1"], found["0"]) == "not finite"
    assert gradient_class(found["1"], 1.0, 1.0) == "not finite"


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ([1.0] * 19, "too few"),
        ([1.0] * 30 + [math.nan], "not finite"),
        ([2 * 0.95**step for step in range(60)], "falling"),
        ([0.1 * step for step in range(60)], "rising"),
        ([1 + 0.3 * math.sin(7.3 * step) for step in range(60)], "level"),  # swinging is no fault by itself
        ([-1 - 0.01 * step for step in range(60)], "falling"),
    ],
)
def test_loss_health(losses, word):
    assert loss_health(losses)[0] == word


def shown(watching, width, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    watching.report(Console(file=file, width=width, force_terminal=False))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_and_says_what_it_means(width, batch):
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    model.a_layer_with_a_name_that_hardly_fits = nn.Linear(2, 2)
    text = shown(trained(model, *batch), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" in text if width == 80 else "…" not in text
    words = " ".join(text.split())
    for part in ("Monitors, step 40", "Loss: ", "Activations", "Gradients", "Parameters", "healthy", "Zeros as such"):
        assert part in words
    assert ("ReLU " in text) is (width == 120)
    assert "dead" not in text.replace("is dead", "")


def test_the_report_of_nothing_and_of_names_that_look_like_markup():
    assert "no step has been measured" in shown(Monitors(nn.Linear(1, 1)), 80)
    model = nn.ModuleDict({"[red]": nn.Linear(4, 2)})
    watching = Monitors(model, every=1)
    with watching.measured(1):
        model["[red]"](torch.ones(2, 4)).sum().backward()
    assert "[red]" in shown(watching, 80)
