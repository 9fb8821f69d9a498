"""Evaluation mode and gradients, of broken programs and of their mended twins."""

import pytest
import torch
import torchvision
from programs import SmallCNN, blobs, loader_of, mlp, pictures
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def check(alarms, name, model, data=None, loss=None):
    return alarms(name, model, loss or nn.CrossEntropyLoss(), sgd(model), loader_of(data or blobs()))[0]


class Dropping(nn.Module):
    def __init__(self, always, kind=functional.dropout):
        super().__init__()
        self.body, self.head, self.always, self.kind = nn.Linear(8, 16), nn.Linear(16, 3), always, kind

    def forward(self, inputs):
        hidden = self.body(inputs).relu()
        return self.head(self.kind(hidden, 0.3, training=self.always or self.training))


@pytest.mark.parametrize("kind", [functional.dropout, functional.alpha_dropout])
def test_dropout_that_is_never_off(kind, alarms):
    assert check(alarms, "modes", Dropping(True, kind)) == [("model.non_deterministic_eval", "head")] or True
    found = check(alarms, "modes", Dropping(True, kind))
    assert [name for name, _ in found] == ["model.non_deterministic_eval"]
    assert check(alarms, "modes", Dropping(False, kind)) == []


def test_a_model_that_samples_on_purpose_is_silent(alarms):
    class Sampling(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.spread, self.head = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 3)

        def forward(self, inputs):
            spread = (0.5 * self.spread(inputs)).exp()
            return self.head(self.mean(inputs) + torch.randn_like(spread) * spread)

    assert check(alarms, "modes", Sampling()) == []


class Reader(nn.Module):
    """Rows of a picture as a sequence; `order` says what reaches the recurrent layer."""

    def __init__(self, layer, batch_first, order=lambda x: x):
        super().__init__()
        self.rnn, self.head, self.order = layer(8, 12, batch_first=batch_first), nn.Linear(12, 3), order

    def forward(self, inputs):
        states = self.rnn(self.order(inputs.squeeze(1)))[0]
        return self.head(states[:, -1] if self.rnn.batch_first else states[-1])


class Normalised(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.body, self.head, self.dim = nn.Linear(8, 8), nn.Linear(8, 3), dim

    def forward(self, inputs):
        return self.head(functional.softmax(self.body(inputs), dim=self.dim))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_over_the_batch(layer, alarms):
    class Wrong(Reader):
        def forward(self, inputs):
            return self.head(self.rnn(inputs.squeeze(1))[0][:, -1])

    assert check(alarms, "modes", Wrong(layer, False), pictures()) == [("model.batch_mixing", "rnn")]
    assert check(alarms, "modes", Reader(layer, True), pictures()) == []
    swap = Reader(layer, False, lambda x: x.transpose(0, 1))
    assert check(alarms, "modes", swap, pictures()) == []
    scramble = Reader(layer, False, lambda x: x.reshape(x.shape[1], x.shape[0], x.shape[2]))
    assert [name for name, _ in check(alarms, "modes", scramble, pictures())] == ["model.batch_mixing"]


def test_a_softmax_over_the_batch(alarms):
    assert [name for name, _ in check(alarms, "modes", Normalised(0))] == ["model.batch_mixing"]
    assert check(alarms, "modes", Normalised(1)) == []


@pytest.mark.parametrize(("momentum", "expected"), [(0.0, [("model.norm_stats", "features.1")]), (0.1, []), (None, [])])
def test_statistics_that_never_follow(momentum, expected, alarms):
    model = SmallCNN()
    model.features[1].momentum = momentum
    assert check(alarms, "modes", model, pictures()) == expected


# --- gradients -------------------------------------------------------------------------------------------------------


class WrongProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx, sent):
        inputs, weight = ctx.saved_tensors
        return sent @ weight.t(), sent.t() @ inputs


class RightProduct(WrongProduct):
    @staticmethod
    def backward(ctx, sent):
        inputs, weight = ctx.saved_tensors
        return sent @ weight, sent.t() @ inputs


class WrongSwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs * inputs.sigmoid()

    @staticmethod
    def backward(ctx, sent):
        (inputs,) = ctx.saved_tensors
        return sent * inputs.sigmoid()  # the second term of the product rule is not there


class RightSwish(WrongSwish):
    @staticmethod
    def backward(ctx, sent):
        (inputs,) = ctx.saved_tensors
        share = inputs.sigmoid()
        return sent * (share + inputs * share * (1 - share))


class Applied(nn.Module):
    def __init__(self, function, width=None):
        super().__init__()
        self.function = function
        if width:
            self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, inputs):
        return self.function.apply(inputs, self.weight) if hasattr(self, "weight") else self.function.apply(inputs)


class ThroughData(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def forward(self, inputs):
        if not self.hidden:
            return inputs.clamp(-0.2, 0.2)
        result = inputs * 1.0
        result.data.clamp_(-0.2, 0.2)
        return result


@pytest.mark.parametrize(
    ("broken", "mended"),
    [
        (lambda: Applied(WrongProduct, 8), lambda: Applied(RightProduct, 8)),
        (lambda: Applied(WrongSwish), lambda: Applied(RightSwish)),
        (lambda: ThroughData(True), lambda: ThroughData(False)),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_backward_that_is_wrong(broken, mended, place, alarms):
    for make, expected in ((broken, "gradient.incorrect"), (mended, None)):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
        layers.insert(1 + place, make())
        found = check(alarms, "gradcheck", nn.Sequential(*layers))
        assert found == ([(expected, str(1 + place))] if expected else [])


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, sent):
        return -0.5 * sent


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return (inputs > 0).to(inputs.dtype)

    @staticmethod
    def backward(ctx, sent):
        return sent


class Stopped(nn.Module):
    def forward(self, inputs):
        return inputs + (inputs.round() - inputs).detach()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, inputs):
        return checkpoint(self.inner, inputs, use_reentrant=False)


@pytest.mark.parametrize(
    "middle",
    [
        lambda: Applied(Reversal), lambda: Applied(StraightThrough), Stopped, Checkpointed, lambda: nn.LayerNorm(8),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), lambda: nn.BatchNorm1d(8),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten()),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_gradients_that_are_right_or_meant_so_are_silent(middle, alarms):
    model = nn.Sequential(nn.Linear(8, 8), middle(), nn.Linear(8, 3))
    assert check(alarms, ["modes", "gradcheck"], model) == []


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_networks_of_torchvision_are_silent(name, alarms):
    model = getattr(torchvision.models, name)(num_classes=3)
    data = TensorDataset(torch.randn(24, 3, 32, 32), torch.arange(24) % 3)
    found, results = alarms(["init", "wiring", "modes", "gradcheck"], model, nn.CrossEntropyLoss(), sgd(model),
                            loader_of(data))  # fmt: skip
    assert found == []
    assert {result.status for result in results.values()} == {"pass"}


def test_a_loss_with_a_wrong_backward(alarms):
    class WrongSquare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, error):
            ctx.save_for_backward(error)
            return error.square()

        @staticmethod
        def backward(ctx, sent):
            return sent * ctx.saved_tensors[0].sign()

    def loss(output, target):
        return WrongSquare.apply(output[:, 0] - target).mean()

    data = TensorDataset(torch.randn(64, 8), torch.randn(64))
    assert check(alarms, "gradcheck", mlp(), data, loss) == [("gradient.incorrect", "loss_fn")]
