"""Monitors see what a slow twin sees, change nothing, wait once, and leave no hook behind."""

import doctest
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet18

from safe_trainer.recipes.transformer import Transformer
from safe_trainer.utils import measured_step, monitors
from safe_trainer.utils.measurements import thinned
from safe_trainer.utils.measures import SAMPLE, layout
from safe_trainer.utils.monitors import Monitors


def run(model, inputs, *, steps=1, optimizer=None, loss=None, **options):
    """Train for some steps, all measured; the monitors."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.ones(1)], 0.1)
    watching = Monitors(model, optimizer, every=1, **options)
    for step in range(1, steps + 1):
        with watching.measured(step):
            total = (loss or (lambda out: out.square().mean()))(model(inputs))
            optimizer.zero_grad()
            if total.requires_grad:
                total.backward()
            optimizer.step()
    return watching


def layers(model, inputs, **options):
    return run(model, inputs, **options).history[-1].layers


def hooks(model, *optimizers):
    found = [hook for module in model.modules() for hook in module._forward_hooks]
    return found + [h for o in optimizers for h in (*o._optimizer_step_pre_hooks, *o._optimizer_step_post_hooks)]


class Returns(nn.Module):
    """A layer that wraps its result up as told."""

    def __init__(self, wrap):
        super().__init__()
        self.weight, self.wrap = nn.Parameter(torch.eye(4)), wrap

    def forward(self, x):
        return self.wrap(x @ self.weight)


class Calls(nn.Module):
    """Runs a function of its parts."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.function(self, x)


# What is measured when


def test_the_first_steps_and_each_hundredth_are_due():
    assert [step for step in range(1, 301) if Monitors(nn.Linear(1, 1)).due(step)] == [1, 10, 30, 100, 200, 300]
    assert not any(Monitors(nn.Linear(1, 1), every=0).due(step) for step in range(1, 301))
    with pytest.raises(ValueError, match=r"every must be 0 .*got -1"):
        Monitors(nn.Linear(1, 1), every=-1)


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(monitors).failed == 0
    assert doctest.testmod(monitors).attempted > 5


def test_a_step_that_is_not_due_has_no_hooks_and_no_record():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    watching = Monitors(model, torch.optim.SGD(model.parameters(), 0.1), every=10, first=())
    with watching.measured(7):
        assert not hooks(model, *watching.optimizers)
        model(torch.ones(2, 4)).sum().backward()
    assert watching.measured(7) is watching.measured(8)
    assert watching.history == []


@pytest.mark.parametrize("fails", [None, "forward", "backward", "step"])
def test_no_hook_stays(fails):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watching = Monitors(model, optimizer, every=1)
    kept = []

    def step():
        with watching.measured(1):
            hidden = model[0](torch.ones(2, 4))
            kept.append(hidden)
            assert hooks(model, optimizer), "the test would see nothing"
            assert hidden._backward_hooks
            if fails == "forward":
                model(torch.ones(2, 5))
            loss = model[1:](hidden).sum()
            loss.register_hook(lambda g: 1 / 0) if fails == "backward" else None
            loss.backward()
            if fails == "step":
                raise KeyError
            optimizer.step()

    if fails:
        with pytest.raises((RuntimeError, ZeroDivisionError, KeyError)):
            step()
    else:
        step()
    assert not hooks(model, optimizer)
    assert not kept[0]._backward_hooks
    assert len(watching.history) == (0 if fails else 1)
    with watching.measured(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert watching.history[-1].step == 2


def test_a_measured_step_within_a_measured_step_counts_once():
    model = nn.Linear(4, 1)
    watching = Monitors(model, every=1)
    with watching.measured(1), watching.measured(1):
        model(torch.ones(2, 4)).sum().backward()
    assert [m.layers["(model)"].calls for m in watching.history] == [1]


# The figures


@pytest.mark.parametrize("channels_last", [False, True])
def test_figures_agree_with_a_slow_twin(channels_last):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5))
    inputs, seen = torch.randn(8, 3, 6, 6), {}
    if channels_last:
        model, inputs = model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    with torch.no_grad():
        model[0].weight[2] = model[0].bias[2] = 0
        model[1].weight[2] = 0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    taps = [m.register_forward_hook(lambda m, a, out: (out.retain_grad(), seen.__setitem__(m, out))[0]) for m in model]
    watching = run(model, inputs)
    [tap.remove() for tap in taps]
    measured = watching.history[0]
    assert list(measured.layers) == ["0", "1", "2", "4"]
    for name, layer in measured.layers.items():
        out, units = seen[model[int(name)]].detach(), tuple(d for d in range(out_dim(name)) if d != 1)
        grad = seen[model[int(name)]].grad
        assert (layer.calls, layer.shape, layer.units) == (1, tuple(out.shape), out.shape[1])
        assert layer.mean == pytest.approx(out.mean().item(), abs=1e-6)
        assert layer.std == pytest.approx(out.std(correction=0).item(), rel=1e-5)
        assert layer.abs_max == out.abs().max().item()
        assert layer.zero_share == pytest.approx((out == 0).float().mean().item(), abs=1e-6)
        assert layer.inactive_share == pytest.approx((out.abs().amax(units) == 0).float().mean().item())
        across = out.var(0, correction=0).mean().sqrt() / out.std(correction=0)
        assert layer.sample_spread == pytest.approx(across.item(), rel=1e-4)
        assert layer.gradient_norm == pytest.approx(grad.norm().item(), rel=1e-5)
        assert layer.gradient_abs_max == grad.abs().max().item()
        assert layer.gradient_zero_share == pytest.approx((grad == 0).float().mean().item(), abs=1e-6)
        assert layer.gradient_idle_share == pytest.approx((grad.abs().amax(units) == 0).float().mean().item())
    assert measured.layers["0"].inactive_share == pytest.approx(1 / 6)
    for name, parameter in measured.parameters.items():
        now, old = dict(model.named_parameters())[name].detach(), before[name]
        grad = dict(model.named_parameters())[name].grad
        assert parameter.size == now.numel()
        assert parameter.weight_norm == pytest.approx(old.norm().item(), rel=1e-5)
        assert parameter.gradient_norm == pytest.approx(grad.norm().item(), rel=1e-5)
        assert parameter.gradient_abs_max == grad.abs().max().item()
        assert parameter.gradient_zero_share == pytest.approx((grad == 0).float().mean().item())
        assert parameter.update_norm == pytest.approx((now - old).norm().item(), rel=1e-5)
        if old.norm() > 0:
            assert parameter.update_ratio == pytest.approx(((now - old).norm() / old.norm()).item(), rel=1e-5)


def out_dim(name):
    return 2 if name == "4" else 4


def test_extremes_and_activity_of_large_outputs_come_from_every_element():
    shape = (64, 32, 24, 24)
    sample = layout(shape, 1).sample
    assert math.prod(len(range(length)[part]) for length, part in zip(shape, sample, strict=True)) <= SAMPLE
    values = torch.zeros(shape)
    values[5, 3, 7, 7] = -9.0  # outside of the sample: a unit that lives, hardly ever
    assert values[sample].abs().max() == 0
    layer = layers(nn.Sequential(nn.BatchNorm2d(32), nn.Threshold(-1e9, 0)), values)["0"]
    assert layer.inactive_share == 31 / 32
    assert layer.abs_max > 100
    assert layers(nn.Sequential(nn.Threshold(-1e9, 0)), torch.zeros(shape))["0"].zero_share == 1.0


def test_moments_of_large_outputs_are_close():
    inputs = torch.randn(256, 64, 16, 16) * 3 + 1
    layer = layers(nn.Sequential(nn.ReLU()), inputs)["0"]
    out = inputs.relu()
    assert layer.mean == pytest.approx(out.mean().item(), rel=0.03)
    assert layer.std == pytest.approx(out.std().item(), rel=0.03)
    assert layer.zero_share == pytest.approx((out == 0).float().mean().item(), abs=0.02)


def test_large_parameters_are_read_like_small_ones():
    model = nn.Sequential(nn.Embedding(300, 50), nn.Linear(50, 1))
    layer = run(model, torch.arange(10).reshape(2, 5)).history[0].parameters["0.weight"]
    grad = model[0].weight.grad
    assert layer.gradient_norm == pytest.approx(grad.norm().item(), rel=1e-5)
    assert layer.gradient_abs_max == grad.abs().max().item()
    assert layer.gradient_zero_share == layer.gradient_idle_rows == pytest.approx(290 / 300)


@pytest.mark.parametrize(
    ("model", "shape", "units"),
    [
        (nn.Sequential(nn.Conv1d(3, 7, 1), nn.ReLU()), (2, 3, 5), {"0": 7, "1": 7}),
        (nn.Sequential(nn.Linear(5, 7), nn.ReLU()), (2, 3, 5), {"0": 7, "1": 7}),
        (nn.Sequential(nn.Conv2d(3, 7, 1), nn.ReLU(), nn.AvgPool2d(2)), (2, 3, 4, 4), {"0": 7, "1": 7, "2": 7}),
        (nn.Sequential(nn.Linear(5, 7), nn.GELU()), (2, 3, 4, 5), {"0": 7, "1": 7}),
        (nn.Sequential(nn.GroupNorm(1, 3), nn.SiLU()), (2, 3, 9), {"0": 3, "1": 3}),
        (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0), nn.Sigmoid()), (6, 5), {"0": 1, "2": 1}),
    ],
    ids=["conv1d", "tokens", "pictures", "channels at the end", "norm", "one number a sample"],
)
def test_units_are_channels_or_features(model, shape, units):
    assert {name: layer.units for name, layer in layers(model, torch.randn(shape)).items()} == units


# Whatever modules return


@pytest.mark.parametrize(
    ("wrap", "pick"),
    [
        (lambda y: (y, y.argmax(1)), lambda out: out[0]),
        (lambda y: {"index": y.argmax(1), "deep": [{"value": y}]}, lambda out: out["deep"][0]["value"]),
        (lambda y: [None, (y, {"twice": y * 2})], lambda out: out[1][0]),
    ],
    ids=["tuple", "dict", "nested"],
)
def test_the_first_floating_tensor_of_any_output_is_measured(wrap, pick):
    inputs = torch.randn(3, 4)
    layer = layers(Returns(wrap), inputs, loss=lambda out: pick(out).sum())["(model)"]
    assert layer.abs_max == inputs.abs().max().item()
    assert layer.gradient_norm == pytest.approx(math.sqrt(12))


def test_a_gradient_that_comes_by_another_output_counts():
    lstm = Calls(lambda self, x: self.lstm(x)[1][0], lstm=nn.LSTM(4, 3, batch_first=True))
    layer = layers(lstm, torch.randn(2, 5, 4))["lstm"]
    assert layer.shape == (2, 5, 3)
    assert layer.gradient_norm > 0
    assert layer.gradient_idle_share == 0


def test_a_module_that_is_used_twice_is_one_layer():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    inputs = torch.randn(3, 4)
    found = layers(model, inputs, loss=lambda out: out.sum())
    assert {name: layer.calls for name, layer in found.items()} == {"0": 2, "1": 1}
    twin = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    state = {f"{place}.{kind}": getattr(shared, kind).detach() for place in (0, 2) for kind in ("weight", "bias")}
    twin.load_state_dict(state)
    first, second = (layers(twin, inputs, loss=lambda out: out.sum())[name] for name in ("0", "2"))
    assert set(found) == {"0", "1"}
    assert first.gradient_norm != second.gradient_norm


def test_calls_of_a_layer_are_pooled():
    part = nn.Identity()

    class Scale(nn.Module):
        def forward(self, x):
            return x * 1

    model = Calls(lambda self, x: self.part(x[:1]).sum() + self.part(x[1:]).sum(), part=Scale())
    inputs = torch.tensor([[3.0, 0.0], [1.0, -7.0], [2.0, 0.0]])
    layer = layers(model, inputs)["part"]
    assert layer.calls == 2
    assert layer.mean == pytest.approx(inputs.mean().item())
    assert layer.std == pytest.approx(inputs.std(correction=0).item())
    assert layer.abs_max == 7
    assert layer.zero_share == pytest.approx(2 / 6)
    assert layer.inactive_share == 0
    assert part is not None


@pytest.mark.parametrize(
    "wrap", [lambda y: y.argmax(1), lambda y: torch.complex(y, y), lambda y: y[:0], lambda y: "text", lambda y: None]
)
def test_what_has_no_statistics_is_left_out(wrap):
    model = Returns(wrap)
    watching = Monitors(model, every=1)
    with watching.measured(1):
        model(torch.randn(3, 4))
    assert watching.history[0].layers == {}
    assert watching.history[0].parameters["weight"].weight_norm == 2.0


def test_complex_parameters_are_left_out():
    model = nn.Linear(4, 4)
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    assert set(run(model, torch.randn(2, 4)).history[0].parameters) == {"weight", "bias"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_statistics_are_taken_in_float32(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Hardtanh(-6e4, 6e4)).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4) * 300)
        model[0].bias.zero_()
    measured = run(model, torch.full((3, 4), 10.0, dtype=dtype), loss=lambda out: out.sum()).history[0]
    layer = measured.layers["0"]
    assert layer.root_mean_square == pytest.approx(3000, rel=1e-2)  # its square is beyond float16
    assert layer.gradient_norm == pytest.approx(math.sqrt(12))
    assert measured.parameters["0.weight"].weight_norm == pytest.approx(600, rel=1e-2)
    assert math.isfinite(measured.parameters["0.weight"].update_norm)


def test_autocast():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.autocast("cpu", torch.bfloat16):
        layer = layers(model, torch.randn(8, 4), loss=lambda out: out.float().sum())["0"]
    assert layer.std > 0
    assert layer.gradient_abs_max == 1


def test_modules_without_gradient_are_seen_all_the_same():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).requires_grad_(False)
    model[2].requires_grad_(True)
    measured = run(model, torch.randn(8, 4)).history[0]
    assert not measured.layers["0"].needs_gradient
    assert measured.layers["0"].gradient_norm is None
    assert measured.layers["2"].gradient_norm > 0
    assert set(measured.parameters) == {"2.weight", "2.bias"}


def test_lazy_modules_and_sparse_gradients():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.LazyLinear(2))
    watching = Monitors(model, every=1)
    for step in (1, 2):
        with watching.measured(step):
            model(torch.tensor([1, 2])).sum().backward()
    first, second = watching.history
    assert set(first.parameters) == {"0.weight"}
    assert set(second.parameters) == {"0.weight", "1.weight", "1.bias"}
    assert second.parameters["0.weight"].gradient_norm is None
    assert second.layers["1"].gradient_norm > 0


def test_a_module_that_ends_with_its_own_activation_function():
    model = nn.Sequential(Calls(lambda self, x: torch.relu(x + self.part(x)), part=nn.Linear(4, 4)), nn.Linear(4, 1))
    found = layers(model, torch.randn(16, 4))
    assert [(name, layer.kind) for name, layer in found.items()] == [
        ("0.part", "Linear"),
        ("0", "relu()"),
        ("1", "Linear"),
    ]
    assert found["0"].zero_share > 0
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    found = layers(Calls(lambda self, x: self.inner(x), inner=inner), torch.randn(16, 4))
    assert list(found) == ["inner.0", "inner.1"]  # handed through, so not counted once more


def test_attention_that_does_not_call_its_parts():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = layers(model, torch.randn(2, 5, 8))
    assert found["self_attn"].kind == "MultiheadAttention"
    assert found["self_attn"].units == 8
    assert "self_attn.out_proj" not in found
    assert "self_attn" not in layers(model, torch.randn(2, 5, 8), layers="Nothing")


def test_what_works_in_place_is_measured_before_and_after():
    def found(inplace):
        torch.manual_seed(0)
        return layers(nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace), nn.Linear(6, 1)), torch.ones(3, 4))

    assert found(True) == found(False)
    assert found(True)["0"].zero_share == 0 < found(True)["1"].zero_share
    assert found(True)["0"].gradient_zero_share > 0 == found(True)["1"].gradient_zero_share


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_that_a_checkpoint_runs_again_counts_once(reentrant):
    part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = Calls(lambda self, x: checkpoint(self.part, x, use_reentrant=reentrant), part=part)
    plain = Calls(lambda self, x: self.part(x), part=part)
    inputs = torch.randn(6, 4, requires_grad=True)
    expected = layers(plain, inputs, optimizer=torch.optim.SGD(part.parameters(), 0.0))
    found = layers(model, inputs, optimizer=torch.optim.SGD(part.parameters(), 0.0))
    assert found == expected
    assert found["part.0"].calls == 1
    assert found["part.0"].gradient_norm > 0


# Units, saturation, collapse


def test_inactive_units_over_the_window():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
    watching = Monitors(model, every=1)
    for step, inputs in enumerate([[1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]], 1):
        with watching.measured(step):
            model(torch.tensor([inputs])).sum().backward()
        if step == 2:
            assert watching.inactive_units()["1"].tolist() == [False, True]
    assert [m.layers["1"].inactive_share for m in watching.history] == [0.5, 1.0, 0.5]
    assert [m.layers["1"].inactive_window_share for m in watching.history] == [0.5, 0.5, 0.0]
    assert [m.window_steps for m in watching.history] == [1, 2, 3]
    assert [m.step for m in watching.read()] == [1, 2, 3]
    assert watching.read() == []
    assert watching.inactive_units() == {}
    with watching.measured(4):
        model(torch.tensor([[-1.0, -1.0]])).sum().backward()
    assert watching.read()[0].layers["1"].inactive_window_share == 1.0


@pytest.mark.parametrize(
    ("activation", "inputs", "share"),
    [
        (nn.Sigmoid(), [0.0, 8.0, -8.0, 5.0], 0.5),
        (nn.Tanh(), [0.0, 6.0, -6.0, 2.0], 0.5),
        (nn.Softsign(), [0.0, 40.0, -40.0, 20.0], 0.5),
        (nn.Hardtanh(-2, 2), [2.5, 1.9, -2.5, -1.9], 0.5),
        (nn.ReLU6(), [-5.0, 0.0, 3.0, 7.0], 0.25),
        (nn.Hardsigmoid(), [-4.0, 0.0, 2.0, 4.0], 0.5),
        (nn.Softmax(1), [0.0, 9.0, 0.0, 0.0], 1.0),
        (nn.Softmax(-1), [0.0, 3.0, 0.0, 0.0], 0.0),
        (Calls(lambda self, x: torch.sigmoid(x)), [0.0, 8.0, -8.0, 5.0], 0.5),
        (Calls(lambda self, x: torch.tanh(x)), [0.0, 6.0, -6.0, 2.0], 0.5),
        (Calls(lambda self, x: F.softmax(x, -1)), [0.0, 9.0, 0.0, 0.0], 1.0),
        (Calls(lambda self, x: F.relu6(x)), [-5.0, 0.0, 3.0, 7.0], 0.25),
        (nn.ReLU(), [-5.0, 0.0, 3.0, 7.0], None),
        (Calls(lambda self, x: x.clamp(0, 1)), [0.0, 1.0, 1.0, 0.0], None),  # by the range alone nothing is certain
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_saturated_share(activation, inputs, share):
    inputs = torch.tensor([inputs, inputs], requires_grad=True)
    found = layers(activation, inputs, loss=lambda out: out.sum())["(model)"].saturated_share
    assert found is None if share is None else found == pytest.approx(share)


def test_samples_that_all_look_alike():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight.mul_(1e-6)
    measured = run(model, torch.randn(16, 4), steps=1).history[0]
    assert measured.layers["0"].sample_spread > 0.3
    assert measured.layers["1"].sample_spread < 1e-4
    assert layers(nn.Linear(4, 8), torch.randn(1, 4))["(model)"].sample_spread is None


# Gradients and updates


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_cleared_at_the_end(to_none):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    told, alone = Monitors(model, optimizer, every=1), Monitors(model, every=1)
    with told.measured(1), alone.measured(1):
        model(torch.ones(3, 4)).sum().backward()
        norm = model.weight.grad.norm().item()
        optimizer.step()
        optimizer.zero_grad(to_none)
    assert told.history[0].parameters["weight"].gradient_norm == pytest.approx(norm)
    assert told.history[0].notes == ()
    assert alone.history[0].parameters["weight"].gradient_norm == (None if to_none else 0.0)
    assert ("give the monitors the optimizer" in "".join(alone.history[0].notes)) is to_none
    assert alone.history[0].parameters["weight"].update_norm == pytest.approx(0.1 * norm)


def test_clipped_gradients_are_seen_as_the_optimizer_sees_them():
    model = nn.Linear(4, 2)
    clip = lambda out: (out.sum() * 100, None)[0]  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watching = Monitors(model, optimizer, every=1)
    with watching.measured(1):
        clip(model(torch.ones(3, 4))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    norms = [p.gradient_norm for p in watching.history[0].parameters.values()]
    assert math.hypot(*norms) == pytest.approx(1.0, rel=1e-4)


def test_a_step_without_an_update_has_no_ratio():
    model = nn.Linear(4, 2)
    watching = Monitors(model, torch.optim.SGD(model.parameters(), 0.1), every=1)
    with watching.measured(1):
        model(torch.ones(3, 4)).sum().backward()
    parameter = watching.history[0].parameters["weight"]
    assert parameter.gradient_norm > 0
    assert parameter.update_ratio is None
    assert "accumulating" in watching.history[0].notes[0]


def test_an_optimizer_with_a_closure():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
    watching = Monitors(model, optimizer, every=1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    with watching.measured(1):
        optimizer.step(closure)
    parameter = watching.history[0].parameters["weight"]
    assert parameter.gradient_norm == pytest.approx(model.weight.grad.norm().item())
    assert parameter.update_ratio > 0


def test_scaled_losses_are_scaled_back():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.ones(3, 4)
    plain = Monitors(model, every=1)
    with plain.measured(1):
        model(inputs).sum().backward()
    for scale in (64.0, torch.tensor(64.0)):
        scaled = Monitors(model, every=1)
        with scaled.measured(1, loss_scale=scale):
            (model(inputs).sum() * scale).backward()
        for name in ("0", "1"):
            expected = plain.history[0].layers[name]
            assert scaled.history[0].layers[name].gradient_norm == pytest.approx(expected.gradient_norm)
            assert scaled.history[0].layers[name].gradient_abs_max == pytest.approx(expected.gradient_abs_max)


def test_a_fused_optimizer_under_a_scaler_unscales_by_itself():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    watching = Monitors(model, optimizer, every=1)
    with watching.measured(1):
        (model(torch.ones(3, 4)).sum() * 8).backward()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        optimizer.step()
    assert watching.history[0].parameters["weight"].gradient_abs_max == pytest.approx(3.0)


def test_several_optimizers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pair = [torch.optim.SGD(part.parameters(), 0.1) for part in model]
    watching = Monitors(model, pair, every=1)
    with watching.measured(1):
        model(torch.ones(3, 4)).sum().backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.gradient_norm is not None for p in watching.history[0].parameters.values())


# What must not happen


def cnn():
    part = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.MaxPool2d(2)]
    return nn.Sequential(*part, nn.Flatten(), nn.Dropout(0.3), nn.Linear(72, 5)), torch.randn(4, 3, 8, 8)


def transformer():
    return Transformer(11, 8, 16, 2, 2, dropout=0.1), torch.randint(11, (4, 8))


def lstm():
    return Calls(
        lambda self, x: self.head(self.lstm(x)[0]), lstm=nn.LSTM(4, 6, 2, dropout=0.2), head=nn.Linear(6, 3)
    ), (torch.randn(5, 4, 4))


def resnet():
    return resnet18(num_classes=3), torch.randn(2, 3, 32, 32)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("build", [cnn, transformer, lstm, resnet])
def test_training_is_bit_equal_with_and_without(build, kind):
    ends = []
    for every in (0, 1):
        torch.manual_seed(3)
        model, inputs = build()
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), 1e-2, **options)
        watching = Monitors(model, optimizer, every=every)
        for step in range(1, 4):
            with watching.measured(step):
                optimizer.zero_grad()
                out = model(inputs)
                loss = F.cross_entropy(out.flatten(0, -2), torch.zeros(out[..., 0].numel(), dtype=torch.long))
                loss.backward()
                optimizer.step()
            watching.note_loss(loss)
        moments = [s for state in optimizer.state.values() for s in state.values() if isinstance(s, torch.Tensor)]
        ends.append([*model.state_dict().values(), *moments, torch.get_rng_state(), loss.detach()])
        assert len(watching.history) == 3 * every
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    layer = watching.history[-1].layers
    assert all(layer[name].gradient_norm is not None for name in layer)


class NoReading(TorchDispatchMode):
    """Raises where a value is read from a tensor."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.name()
        if name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::_unique2"):
            raise AssertionError(f"{name} waits for the device")
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("build", [cnn, transformer, lstm])
def test_the_host_waits_once_in_a_measured_step(build, monkeypatch):
    model, inputs = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    watching = Monitors(model, optimizer, every=1)
    copies = []
    fetch = measured_step.to_host
    monkeypatch.setattr(measured_step, "to_host", lambda numbers: copies.append(numbers) or fetch(numbers))
    for step in (1, 2):
        with NoReading(), watching.measured(step):
            model(inputs).square().mean().backward()
            optimizer.step()
        watching.note_loss(torch.zeros(()))
    assert len(copies) == 2
    assert copies[0].data_ptr() == copies[1].data_ptr()  # one buffer, made once
    assert len(watching.history) == 2


def test_a_value_that_is_read_in_a_hook_is_noticed():
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda module, arguments, output: output.mean().item() and None)
    with pytest.raises(AssertionError, match="waits for the device"), NoReading(), Monitors(model, every=1).measured(1):
        model(torch.ones(3, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_is_waited_for_in_one_place_only(monkeypatch):
    model, inputs = cnn()
    model, inputs = model.cuda(), inputs.cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watching = Monitors(model, optimizer, every=1)
    fetch = measured_step.to_host

    def alone(numbers):
        torch.cuda.set_sync_debug_mode("default")
        return fetch(numbers)

    monkeypatch.setattr(measured_step, "to_host", alone)
    for step in (1, 2):
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            with watching.measured(step):
                model(inputs).square().mean().backward()
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(watching.history) == 2


def test_no_activation_is_kept():
    import weakref

    kept = []
    model = nn.Sequential(nn.Linear(4, 4), Calls(lambda self, x: kept.append(weakref.ref(x)) or x * 2))
    watching = run(model, torch.ones(2, 4))
    assert kept[0]() is None
    assert watching.history


def test_compiled_models_are_told_about():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    watching = Monitors(compiled, torch.optim.SGD(model.parameters(), 0.1), every=1)
    for step in (1, 2):
        with watching.measured(step):
            compiled(torch.randn(3, 4)).sum().backward()
            watching.optimizers[0].step()
    assert watching.history[1].layers == {}
    assert watching.history[1].parameters["0.weight"].update_ratio > 0
    assert "2 of 2 modules run compiled" in watching.history[1].notes[0]
    with watching.measured(3, eager=True):
        model(torch.randn(3, 4)).sum().backward()
        watching.optimizers[0].step()
    assert list(watching.history[2].layers) == ["0", "1"]
    assert watching.history[2].notes == ()
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    part[0].compile(backend="eager")
    notes = run(part, torch.randn(3, 4)).history[0]
    assert list(notes.layers) == ["1"]
    assert "1 of 2 modules" in notes.notes[0]


def test_a_model_that_is_not_called_is_told_about():
    watching = Monitors(nn.Linear(4, 2), every=1)
    with watching.measured(1):
        pass
    assert any("no module of the model was called" in note for note in watching.history[0].notes)


# History and state


def test_history_is_bounded_and_spans_the_run():
    short = thinned(list(range(10)), 20)
    assert short == list(range(10))
    kept = []
    for step in range(1000):
        kept = thinned([*kept, step], 16)
    assert len(kept) <= 16
    assert kept[0] == 0
    assert kept[-6:] == list(range(994, 1000))


def test_state_goes_through_a_checkpoint():
    model, inputs = cnn()
    watching = run(model, inputs, steps=3)
    watching.read()
    watching.note_loss(torch.tensor(1.5))
    with watching.measured(4):
        model(inputs).sum().backward()
    file = io.BytesIO()
    torch.save(watching.state_dict(), file)
    file.seek(0)
    other = Monitors(model, watching.optimizers, every=1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.history == watching.history
    assert other.losses() == [1.5]
    units, expected = other.inactive_units(), watching.inactive_units()
    assert {name: mask.tolist() for name, mask in units.items()} == {n: mask.tolist() for n, mask in expected.items()}
    assert other.read() == watching.read() != []
