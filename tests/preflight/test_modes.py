"""The check of evaluation mode: determinism, samples for themselves, statistics, parts left in eval."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def table(samples=64, features=8, classes=3):
    return 2 * torch.randn(samples, features) + 1, torch.arange(samples) % classes


def sequences(samples=64, length=6, features=8):
    return torch.randn(samples, length, features), torch.arange(samples) % 3


def alarms(result):
    return [(f.fault, f.severity, f.where) for f in result.findings if f.severity != "info"]


class Call(nn.Module):
    """A module of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class MonteCarloDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


def around(layer, features=8):
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), layer, nn.Linear(8, 3))


# --- determinism ------------------------------------------------------------------------------------------------------

NOISY = {
    "dropout": lambda self, x: F.dropout(x, 0.4),
    "feature dropout": lambda self, x: F.dropout1d(x.unsqueeze(0), 0.4).squeeze(0),
    "attention": lambda self, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3)[
        :, 0
    ],
    "noise": lambda self, x: x + 0.1 * torch.randn_like(x),
}
QUIET = {
    "dropout": lambda self, x: F.dropout(x, 0.4, self.training),
    "feature dropout": lambda self, x: F.dropout1d(x.unsqueeze(0), 0.4, training=self.training).squeeze(0),
    "attention": lambda self, x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], dropout_p=0.3 if self.training else 0.0
    )[:, 0],
    "noise": lambda self, x: x + 0.1 * torch.randn_like(x) if self.training else x,
}


@pytest.mark.parametrize("kind", NOISY)
def test_randomness_in_evaluation_is_an_error_at_its_module(preflight, kind):
    result = preflight("modes", around(Call(NOISY[kind])), *table())
    assert alarms(result) == [("model.non_deterministic_eval", "error", "2")]
    assert result.findings[0].source.startswith("test_modes.py:")


@pytest.mark.parametrize("kind", QUIET)
def test_randomness_in_training_alone_is_silent(preflight, kind):
    result = preflight("modes", around(Call(QUIET[kind])), *table())
    assert result.status == "pass"
    assert not result.findings


class Variational(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.mean, self.log_var, self.decoder = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(3, 8)
        self.parts = parts

    def forward(self, x):
        mean, log_var = self.mean(x), self.log_var(x)
        picture = self.decoder(mean + torch.randn_like(mean) * torch.exp(0.5 * log_var))
        return torch.cat([picture, mean, log_var], 1) if self.parts else picture


@pytest.mark.parametrize("parts", [True, False])
def test_a_model_that_samples_on_purpose_is_told_as_info(preflight, parts):
    inputs, _ = table()
    result = preflight("modes", Variational(parts), inputs, inputs, loss_fn=lambda out, x: F.mse_loss(out[:, :8], x))
    assert not alarms(result)
    assert [f.fault for f in result.findings] == ["model.non_deterministic_eval"]


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(9, 8)

    def forward(self, x):
        time = torch.randint(1, 10, (len(x), 1)) / 10
        noise = torch.randn_like(x)
        return self.body(torch.cat([x + time * noise, time], 1)) - noise


def test_diffusion_and_monte_carlo_dropout_are_no_alarm(preflight):
    inputs, targets = table()
    assert not alarms(preflight("modes", Denoiser(), inputs, targets, loss_fn=lambda out, y: out.square().mean()))
    assert not alarms(preflight("modes", around(MonteCarloDropout()), inputs, targets))


# --- samples for themselves -------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.lstm = nn.LSTM(8, 12, batch_first=batch_first)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Swapped(nn.Module):
    def __init__(self, rightly):
        super().__init__()
        self.gru, self.head, self.rightly = nn.GRU(8, 12), nn.Linear(12, 3), rightly

    def forward(self, x):
        batch, time, width = x.shape
        x = x.transpose(0, 1) if self.rightly else x.reshape(time, batch, width)
        return self.head(self.gru(x)[0][-1])


class Attending(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Pooled(nn.Module):
    def __init__(self, axis):
        super().__init__()
        self.weigh = Call(lambda self, x: (torch.softmax(x.sum(2, keepdim=True), dim=axis) * x).sum(1))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.weigh(x))


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


MIXED = {
    "batch_first": (lambda right: Recurrent(right), "lstm"),
    "reshape for transpose": (lambda right: Swapped(right), "gru"),
    "attention": (lambda right: Attending(right), "attention"),
    "softmax": (lambda right: Pooled(1 if right else 0), "weigh"),
    "encoder": (lambda right: Encoder(right), "layers"),
}


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_samples_are_an_error_where_it_begins(preflight, kind):
    build, where = MIXED[kind]
    result = preflight("modes", build(False), *sequences())
    ((fault, severity, place),) = alarms(result)
    assert (fault, severity) == ("model.batch_mixing", "error")
    assert place.split(".")[0] == where
    assert preflight("modes", build(True), *sequences()).status == "pass"


class TimeFirst(nn.Module):
    """Takes (time, batch, features), as its loader gives them."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][-1])


@pytest.mark.parametrize("length", [6, 16])
def test_time_first_batches_are_silent(preflight, length):
    def collate(samples):
        return torch.stack([x for x, _ in samples], 1), torch.stack([y for _, y in samples])

    loader = DataLoader(TensorDataset(*sequences(64, length)), batch_size=16, collate_fn=collate)
    assert not alarms(preflight("modes", TimeFirst(), None, None, loader=loader))


class Similarities(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return self.first(x) @ self.second(x).T


class GraphNet(nn.Module):
    def __init__(self, nodes):
        super().__init__()
        self.register_buffer("graph", (torch.rand(nodes, nodes) > 0.5).float() / nodes)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.graph @ x)


class BatchNormByHand(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-5)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3),
    )  # fmt: skip


def test_what_mixes_by_design_is_no_alarm(preflight):
    inputs, targets = table()
    contrast = preflight("modes", Similarities(), inputs, targets,
                         loss_fn=lambda out, y: F.cross_entropy(out, torch.arange(len(out))))  # fmt: skip
    graph = preflight("modes", GraphNet(30), None, None, loader=[(inputs[:30], targets[:30])])
    by_hand = preflight("modes", around(BatchNormByHand()), inputs, targets)
    without = preflight("modes", around(nn.BatchNorm1d(8, track_running_stats=False)), inputs, targets)
    for result in (contrast, graph, by_hand, without):
        assert not alarms(result), result


# --- statistics -------------------------------------------------------------------------------------------------------


class OwnNorm(nn.Module):
    """Batch normalisation by hand; its statistics are kept rightly, never, or as a deviation in place of a variance."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        if not self.training:
            return (x - self.mean) / (self.var + 1e-5).sqrt()
        mean, var = x.mean(0), x.var(0, unbiased=False)
        if self.kind != "never":
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.var.lerp_(var if self.kind == "right" else (10 * var).sqrt(), 0.1)
        return (x - mean) / (var + 1e-5).sqrt()


def pretrained(momentum):
    norm = nn.BatchNorm1d(8, momentum=momentum)
    norm.running_mean.fill_(0.5)
    return norm


STATISTICS = {
    "momentum 0": (lambda: nn.BatchNorm1d(8, momentum=0.0), "error"),
    "by hand, never": (lambda: OwnNorm("never"), "error"),
    "by hand, deviation": (lambda: OwnNorm("deviation"), "error"),
    "momentum of a millionth": (lambda: nn.BatchNorm1d(8, momentum=1e-6), "warning"),
}


@pytest.mark.parametrize("kind", STATISTICS)
def test_statistics_that_are_not_those_of_the_data(preflight, kind):
    build, severity = STATISTICS[kind]
    result = preflight("modes", around(build()), 3 * table()[0], table()[1])
    assert alarms(result) == [("model.norm_stats", severity, "2")]


HEALTHY_NORMS = {
    "usual": lambda: nn.BatchNorm1d(8),
    "small momentum": lambda: nn.BatchNorm1d(8, momentum=0.01),
    "average": lambda: nn.BatchNorm1d(8, momentum=None),
    "by hand": lambda: OwnNorm("right"),
    "frozen": lambda: nn.BatchNorm1d(8, momentum=0.0).eval(),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "layer": lambda: nn.LayerNorm(8),
}


@pytest.mark.parametrize("kind", HEALTHY_NORMS)
def test_healthy_normalisations_are_silent(preflight, kind):
    result = preflight("modes", around(HEALTHY_NORMS[kind]()), 3 * table()[0], table()[1])
    assert result.status == "pass", result
    assert not result.findings


def test_healthy_pictures_are_silent_and_left_as_they_were(preflight):
    model = convolutions()
    before = copy.deepcopy(model.state_dict())
    result = preflight("modes", model, torch.randn(64, 1, 8, 8), torch.arange(64) % 3)
    assert result.status == "pass"
    assert not result.findings
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


# --- parts in eval ----------------------------------------------------------------------------------------------------


def tuned(kind):
    backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(8, 3)})
    network = nn.Sequential(model["backbone"], model["head"])
    if kind in ("stuck", "frozen"):
        backbone.eval()
    if kind == "frozen":
        backbone.requires_grad_(False)
    if kind == "only norms":
        backbone[1].eval()
    if kind == "all":
        network.eval()
    return network


@pytest.mark.parametrize(("kind", "found"), [("stuck", 1), ("frozen", 0), ("only norms", 0), ("all", 0), ("none", 0)])
def test_a_part_that_trains_in_eval_mode(preflight, kind, found):
    result = preflight("modes", tuned(kind), *table())
    assert alarms(result) == [("model.stuck_in_eval", "warning", "0")] * found


def test_a_step_that_switches_to_training_itself_is_silent(preflight):
    def train_step(model, loss_fn, optimizer, batch):
        model.train()
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    assert not alarms(preflight("modes", tuned("stuck"), *table(), train_step=train_step))
