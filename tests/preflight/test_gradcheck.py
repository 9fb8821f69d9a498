"""The gradient check: hand-written backward passes and hidden writes, broken and mended; healthy styles stay silent."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from safe_trainer.preflight import own_functions
from safe_trainer.preflight.float64 import Frozen, HiddenWrite, double_copy


def table(samples=64, features=8, classes=3):
    return torch.randn(samples, features), torch.arange(samples) % classes


def pictures(samples=32, side=32):
    return torch.randn(samples, 3, side, side), torch.arange(samples) % 3


def function_of(forward, backward, name="Own"):
    """An autograd.Function that saves its inputs."""

    def saving(ctx, *args):
        ctx.save_for_backward(*args)
        return forward(*args)

    def back(ctx, grad):
        return backward(grad, *ctx.saved_tensors)

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(saving), "backward": staticmethod(back)})


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.apply_function = function.apply

    def forward(self, x):
        return self.apply_function(x)


class OwnLinear(nn.Module):
    def __init__(self, width, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.function = function

    def forward(self, x):
        return self.function.apply(x, self.weight)


def linear(product):
    return function_of(lambda x, w: x @ w.t(), lambda g, x, w: (product(g, w), g.t() @ x), "OwnMatmul")


def passed(result):
    return result.status == "pass" and not result.findings and "relative error" in result.evidence


def around(layer):
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), layer, nn.Sigmoid(), nn.Linear(8, 3))


class CutInPlace(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "data":
            x.data.clamp_(min=0)
        elif self.kind == "detach":
            x.detach().mul_(x.detach() > 0)
        elif self.kind == "no_grad":
            with torch.no_grad():
                x.clamp_(min=0)
        elif self.kind == "set":
            x.data = x.data.clamp(min=0)
        else:
            x = x.clamp(min=0)
        return x


softplus_like = function_of(lambda x: x / (1 + x.abs()), lambda g, x: 1 / (1 + x.abs()) ** 2, "SoftSign")
softplus_right = function_of(lambda x: x / (1 + x.abs()), lambda g, x: g / (1 + x.abs()) ** 2, "SoftSign")
layer_norm = function_of(
    lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5),
    lambda g, x: g / (x.std(1, keepdim=True) + 1e-5),
    "OwnLayerNorm",
)
square_half = function_of(lambda x: x * x, lambda g, x: g * x, "Square")
square = function_of(lambda x: x * x, lambda g, x: 2 * g * x, "Square")
open_relu = function_of(lambda x: x.clamp(min=0), lambda g, x: g, "OwnReLU")
own_relu = function_of(lambda x: x.clamp(min=0), lambda g, x: g * (x > 0), "OwnReLU")

BROKEN = {
    "transposed": OwnLinear(8, linear(lambda g, w: g @ w.t())),
    "incoming gradient forgotten": Apply(softplus_like),
    "terms left out": Apply(layer_norm),
    "a factor": Apply(square_half),
    "a rectifier that lets all through": Apply(open_relu),
    "clamp through data": CutInPlace("data"),
    "product through detach": CutInPlace("detach"),
    "clamp under no_grad": CutInPlace("no_grad"),
    "data replaced": CutInPlace("set"),
}
MENDED = {
    "transposed": OwnLinear(8, linear(lambda g, w: g @ w)),
    "incoming gradient": Apply(softplus_right),
    "factor": Apply(square),
    "rectifier": Apply(own_relu),
    "clamp": CutInPlace("openly"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_wrong_gradient_is_an_error_with_its_module_and_line(preflight, kind):
    result = preflight("gradcheck", around(BROKEN[kind]), *table())
    assert [(f.fault, f.severity, f.where) for f in result.findings] == [("gradient.incorrect", "error", "2")]
    assert result.findings[0].source.startswith("test_gradcheck.py:")


@pytest.mark.parametrize("kind", MENDED)
def test_the_mended_twin_passes(preflight, kind):
    result = preflight("gradcheck", around(MENDED[kind]), *table())
    assert result.status == "pass"
    assert not result.findings
    assert "relative error" in result.evidence


@pytest.mark.parametrize(
    ("name", "is_meant"),
    [("SoftSign", False), ("Sigmoid2", False), ("QuantileLoss", False), ("SystemStep", False), ("Signal", False),
     ("SignSTE", True), ("GradientReversalFunction", True), ("GradScale", True), ("ScaleGradient", True), ("GRL", True),
     ("ClampSteFunction", True), ("BinarizeF", True), ("SpikeFunction", True), ("FakeQuantize", True)],
)  # fmt: skip
def test_names_of_gradients_that_are_meant_so(name, is_meant):
    assert bool(own_functions._MEANT.search(name)) == is_meant


def test_parameters_before_the_wrong_function_are_named(preflight):
    result = preflight("gradcheck", around(BROKEN["transposed"]), *table())
    assert "the gradients of 0.weight, 0.bias" in result.findings[0].evidence
    assert "4.weight" not in result.findings[0].evidence


@pytest.mark.parametrize(("backward", "faults"), [(lambda g, x: g, 1), (lambda g, x: 2 * g * x, 0)])
def test_a_wrong_function_in_the_loss(preflight, backward, faults):
    own = function_of(lambda x: x * x, backward, "OwnSquare")

    def loss_fn(output, target):
        return own.apply(output[:, 0] - target.float()).mean()

    result = preflight("gradcheck", nn.Linear(8, 3), *table(), loss_fn=loss_fn)
    assert len(result.findings) == faults
    assert all(f.where == "loss_fn" for f in result.findings)


@pytest.mark.parametrize(("slope", "faults"), [(1.0, 1), (2.0, 0)])
def test_an_operator_of_torch_library(preflight, slope, faults):
    name = f"safe_trainer_tests::double_{int(slope)}"
    twice = torch.library.custom_op(name, lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    twice.register_autograd(lambda ctx, grad: grad * slope)

    class Operator(nn.Module):
        def forward(self, x):
            return twice(x)

    result = preflight("gradcheck", around(Operator()), *table())
    assert [f.where for f in result.findings] == ["2"] * faults


def test_a_step_of_the_users_own_is_checked_through_the_model(preflight):
    def train_step(model, loss_fn, optimizer, batch):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    broken = preflight("gradcheck", around(BROKEN["a factor"]), *table(), train_step=train_step)
    healthy = preflight("gradcheck", around(MENDED["factor"]), *table(), train_step=train_step)
    assert [f.where for f in broken.findings] == ["2"]
    assert healthy.status == "pass"


def test_the_program_is_left_as_it_was(preflight):
    model = around(BROKEN["transposed"])
    before = copy.deepcopy(model.state_dict())
    preflight("gradcheck", model, *table())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model[2].function.__dict__["forward"].__name__ == "saving"
    assert torch.get_default_dtype() is torch.float32


# --- on purpose ----------------------------------------------------------------------------------------------------


class StopGradient(nn.Module):
    def forward(self, x):
        return x * x.detach() + x.abs().max().item()


class StraightThrough(nn.Module):
    def forward(self, x):
        return x + (x.round() - x).detach()


class OldStraightThrough(nn.Module):
    def forward(self, x):
        return x + (torch.sign(x) - x).data


class BinaryThroughData(nn.Module):
    def forward(self, x):
        x.data = torch.sign(x.data)
        return x


class Scaled(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().mean() + 1
        return x / scale


class Hooked(nn.Module):
    def forward(self, x):
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda grad: -grad)
        return y


class Gumbel(nn.Module):
    def forward(self, x):
        return F.gumbel_softmax(x, hard=True)


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 8))

    def forward(self, x):
        nearest = self.codes[torch.cdist(x, self.codes).argmin(1)]
        if self.training:
            self.codes.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + (nearest - x).detach()


reversal = function_of(lambda x: x.view_as(x), lambda g, x: -g, "Flip")
surrogate = function_of(lambda x: (x > 0).to(x.dtype), lambda g, x: g / (1 + 10 * x.abs()) ** 2, "Fire")
step_scale = function_of(lambda x: torch.round(4 * x) / 4, lambda g, x: g, "Grid")
clamped = function_of(lambda x: x.clamp(-0.5, 0.5), lambda g, x: g, "Cut")

MEANT = {
    "stop gradient": StopGradient(),
    "straight-through": StraightThrough(),
    "straight-through by data": OldStraightThrough(),
    "binary by data": BinaryThroughData(),
    "scale under no_grad": Scaled(),
    "hook": Hooked(),
    "gumbel": Gumbel(),
    "codebook": Codebook(),
    "reversal": Apply(reversal),
    "surrogate": Apply(surrogate),
    "rounding": Apply(step_scale),
    "clamp that lets all through": Apply(clamped),
}


@pytest.mark.parametrize("kind", MEANT)
def test_what_is_meant_so_is_no_alarm(preflight, kind):
    result = preflight("gradcheck", around(MEANT[kind]), *table())
    assert result.status == "pass", result
    assert all(f.severity == "info" for f in result.findings)


# --- healthy ----------------------------------------------------------------------------------------------------


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.GroupNorm(2, 8), nn.LeakyReLU(inplace=True),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(8, 4, 2), nn.InstanceNorm2d(4, affine=True), nn.GELU(), nn.Dropout2d(0.3),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3)


def mobilenet():
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(num_classes=3, width_mult=0.25)


def vision_transformer():
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=3, dropout=0.1)


@pytest.mark.parametrize("build", [convolutions, resnet, mobilenet, vision_transformer])
def test_healthy_picture_models_are_silent(preflight, build):
    result = preflight("gradcheck", build(), *pictures(), config={"preflight.budget_s": 60})
    assert passed(result), result


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0, max_norm=1.0)
        self.cell = kind(8, 12, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(24, 3)

    def forward(self, words):
        state = torch.zeros(4, len(words), 12)
        start = (state, state) if isinstance(self.cell, nn.LSTM) else state
        outputs, _ = self.cell(self.words(words), start)
        return self.head(outputs[:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)
        self.places = torch.randn(6, 16)

    def forward(self, words):
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        encoded = self.layers(self.words(words) + self.places, mask=mask, src_key_padding_mask=words == 0)
        return self.head(encoded[:, 0].float())


@pytest.mark.parametrize("build", [lambda: Recurrent(nn.LSTM), lambda: Recurrent(nn.GRU), Attention])
def test_healthy_sequence_models_are_silent(preflight, build):
    words = torch.randint(1, 20, (64, 6))
    words[::3, 4:] = 0
    result = preflight("gradcheck", build(), words, torch.arange(64) % 3)
    assert passed(result), result


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 3), reentrant
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x):
        return self.second(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.first(x).relu()
        return self.second(hidden.to(torch.float32)) + torch.zeros(3, dtype=torch.float32)


class Cached(nn.Module):
    """Keeps what it computed, which cannot be copied as it is."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(8, 3), None

    def forward(self, x):
        self.last = self.layer(x)
        return self.last


def normed():
    modern, classic = nn.utils.parametrizations, nn.utils.spectral_norm
    return nn.Sequential(
        modern.weight_norm(nn.Linear(8, 8)), nn.ReLU(), modern.spectral_norm(nn.Linear(8, 8)), nn.Tanh(),
        classic(nn.Linear(8, 8)), modern.orthogonal(nn.Linear(8, 8)), nn.LayerNorm(8), nn.Linear(8, 3),
    )  # fmt: skip


PLAIN = {
    "norms": normed,
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "autocast": Autocast,
    "cached": Cached,
    "zeros at the start": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).apply(zero),
}


def zero(module):
    if isinstance(module, nn.Linear) and module.out_features == 3:
        nn.init.zeros_(module.weight)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


@pytest.mark.parametrize("kind", PLAIN)
def test_healthy_styles_are_silent(preflight, kind):
    model = PLAIN[kind]()
    inputs, targets = table()
    inputs[::2] = 0.0
    if kind == "cached":
        model(inputs)
    result = preflight("gradcheck", model, inputs, targets)
    assert passed(result), result


def autoencoder_loss(output, target):
    return F.mse_loss(output, target) + F.l1_loss(output, target)


def test_losses_are_silent(preflight):
    inputs, targets = table()
    autoencoder = nn.Sequential(nn.Linear(8, 2), nn.ReLU(inplace=True), nn.Linear(2, 8))
    assert preflight("gradcheck", autoencoder, inputs, inputs, loss_fn=autoencoder_loss).status == "pass"
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)
    result = preflight("gradcheck", nn.Linear(8, 3), inputs, targets, loss_fn=weighted)
    assert result.status == "pass"
    assert "the loss" in result.evidence


def test_ctc_whose_gradient_takes_normalised_inputs_is_silent(preflight):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 5)

        def forward(self, x):
            return self.layer(x.unsqueeze(1).expand(-1, 6, -1)).log_softmax(-1).transpose(0, 1)

    def loss_fn(output, target):
        count = target.shape[0]
        return F.ctc_loss(output, target, torch.full((count,), 6), torch.full((count,), 2))

    result = preflight("gradcheck", Reader(), torch.randn(64, 8), torch.randint(1, 5, (64, 2)), loss_fn=loss_fn)
    assert result.status == "pass"
    assert not result.findings


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)

    def forward(self, x):
        return self.body(x)


def test_a_task_with_two_runs_of_the_model(preflight):
    def task(model, batch):
        first, second = model(batch[0]), model(batch[0].flip(0))
        return {"loss": F.cosine_embedding_loss(first, second, 2.0 * (batch[1] > 0) - 1)}

    result = preflight("gradcheck", Siamese(), *table(), task=task)
    assert result.status == "pass"
    assert "relative error" in result.evidence


def test_what_cannot_be_checked_is_skipped_with_its_reason(preflight):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).abs()

    class ThroughNumpy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x):
            if x.dtype is not torch.float32:
                raise TypeError("float32 only")
            return self.layer(x)

    assert "complex" in preflight("gradcheck", Complex(), *table()).evidence
    result = preflight("gradcheck", ThroughNumpy(), *table())
    assert result.status == "skip"
    assert "float32 only" in result.evidence


def test_a_copy_shares_nothing_and_a_hidden_write_knows_its_line():
    model = around(CutInPlace("data"))
    copied = double_copy(model)
    assert all(p.dtype is torch.float64 for p in copied.parameters())
    mode = Frozen(copied)
    mode.begin(first=True)
    with mode:
        copied(torch.randn(4, 8, dtype=torch.float64))
    (write,) = mode.harmful()
    assert isinstance(write, HiddenWrite)
    assert (write.name, write.module) == ("clamp_", "2")
