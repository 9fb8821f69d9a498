"""Healthy training programs, small ones: each gives a run that nobody should be told anything about. Touches nothing.

A builder takes a seed and gives a `Program`. `GRID` has every architecture with every optimizer, `SETTINGS` what a run
can be set to; the files beside this one have the oddities that make other tools cry wolf.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from programs import loader_of
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Subset, TensorDataset


@dataclass(kw_only=True)
class Program:
    """What SafeTrainer takes, and what is known of the loss."""

    model: nn.Module
    loader: Any
    optimizer: Any
    loss_fn: Any = None
    scheduler: Any = None
    val_loader: Any = None
    train_step: Callable[..., Any] | None = None
    eval_step: Callable[..., Any] | None = None
    others: Sequence[Any] = ()
    steps: int = 100
    options: dict[str, Any] = field(default_factory=dict)
    flat: str | None = None
    """Why its loss need not come down; None if it must."""


# --- data ------------------------------------------------------------------------------------------------------------


def draw(seed):
    return torch.Generator().manual_seed(1000 + seed)


def points(seed, samples=320, features=8, classes=4, apart=1.5, noise=0.0):
    """Points about class centres; a share of the labels drawn anew."""
    made = draw(seed)
    centres = apart * torch.randn(classes, features, generator=made)
    labels = torch.randint(classes, (samples,), generator=made)
    inputs = centres[labels] + torch.randn(samples, features, generator=made)
    wrong = torch.rand(samples, generator=made) < noise
    return TensorDataset(inputs, torch.where(wrong, torch.randint(classes, (samples,), generator=made), labels))


def pictures(seed, samples=160, classes=4, size=8):
    made = draw(seed)
    patterns = torch.randn(classes, 1, size, size, generator=made)
    labels = torch.randint(classes, (samples,), generator=made)
    return TensorDataset(patterns[labels] + 0.7 * torch.randn(samples, 1, size, size, generator=made), labels)


def curve(seed, samples=320, features=6, scale=1.0, centre=0.0, noise=0.1):
    """A smooth function to be fitted."""
    made = draw(seed)
    inputs = torch.randn(samples, features, generator=made)
    direction = torch.randn(features, 1, generator=made)
    values = torch.sin(inputs @ direction / 2) + 0.3 * inputs[:, :1] + noise * torch.randn(samples, 1, generator=made)
    return TensorDataset(inputs, centre + scale * values)


def words(seed, samples=200, length=8, vocabulary=20, classes=3):
    """Sequences whose class decides which words are frequent."""
    made = draw(seed)
    labels = torch.randint(classes, (samples,), generator=made)
    shares = torch.softmax(2 * torch.randn(classes, vocabulary, generator=made), 1)
    return TensorDataset(torch.multinomial(shares[labels], length, replacement=True, generator=made), labels)


def batches(data, size=16, **options):
    return loader_of(data, batch_size=size, **{"shuffle": True, **options})


# --- programs of one line ---------------------------------------------------------------------------------------------


def adam(model, rate=5e-3, **options):
    return torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=rate, **options)


def classifier(seed, model, data=None, rate=5e-3, size=16, loss=None, **more):
    return Program(
        model=model, loss_fn=loss or nn.CrossEntropyLoss(), optimizer=adam(model, rate),
        loader=batches(points(seed) if data is None else data, size), **more,
    )  # fmt: skip


def regression(seed, model=None, rate=5e-3, loss=None, data=None, **more):
    model = model or mlp(6, 32, 1)
    loader = batches(curve(seed) if data is None else data)
    return Program(model=model, loss_fn=loss or nn.MSELoss(), optimizer=adam(model, rate), loader=loader, **more)


# --- architectures ---------------------------------------------------------------------------------------------------


def mlp(*sizes, function=nn.ReLU, norm=None, dropout=0.0):
    layers = []
    for before, after in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(before, after), *([norm(after)] if norm else []), function()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class Recurrent(nn.Module):
    def __init__(self, kind, vocabulary=20, width=16, classes=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.core = kind(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.head(self.core(self.embedding(tokens))[0].mean(1))


class Transformer(nn.Module):
    def __init__(self, vocabulary=20, width=16, classes=3, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(8, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens) + self.places).mean(1))


class ZeroResidual(nn.Module):
    """Branches that add nothing at first: the gradient of all but their last layers is zero in the first step."""

    def __init__(self, features, classes, blocks=4, width=16):
        super().__init__()
        self.first, self.last = nn.Linear(features, width), nn.Linear(width, classes)
        self.blocks = nn.ModuleList(mlp(width, width, width) for _ in range(blocks))
        for block in self.blocks:
            nn.init.zeros_(block[-1].weight)
            nn.init.zeros_(block[-1].bias)

    def forward(self, stream):
        stream = self.first(stream)
        for block in self.blocks:
            stream = stream + block(stream)
        return self.last(stream)


def cnn(norm=nn.BatchNorm2d, classes=4):
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), norm(6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, classes),
    )  # fmt: skip


ARCHITECTURES = {
    "linear": (points, lambda: nn.Linear(8, 4)),
    "mlp": (points, lambda: mlp(8, 32, 4)),
    "deep_relu": (points, lambda: mlp(8, 24, 24, 24, 24, 4)),
    "tanh": (points, lambda: mlp(8, 16, 16, 4, function=nn.Tanh)),
    "sigmoid": (points, lambda: mlp(8, 32, 4, function=nn.Sigmoid)),
    "gelu_layer_norm": (points, lambda: mlp(8, 16, 16, 4, function=nn.GELU, norm=nn.LayerNorm)),
    "bias_before_batch_norm": (points, lambda: mlp(8, 16, 16, 4, norm=nn.BatchNorm1d)),
    "dropout": (points, lambda: mlp(8, 64, 64, 4, dropout=0.5)),
    "zero_residual": (points, lambda: ZeroResidual(8, 4)),
    "cnn": (pictures, cnn),
    "cnn_group_norm": (pictures, lambda: cnn(lambda channels: nn.GroupNorm(2, channels))),
    "lstm": (words, lambda: Recurrent(nn.LSTM)),
    "gru": (words, lambda: Recurrent(nn.GRU)),
    "transformer": (words, Transformer),
}

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=5e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=5e-3, weight_decay=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=2e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=5e-2),
}


def in_grid(architecture, optimizer):
    data, model = ARCHITECTURES[architecture]

    def build(seed):
        network = model()
        slow = 200 if architecture in ("sigmoid", "lstm", "gru", "transformer", "deep_relu") else 100
        made = OPTIMIZERS[optimizer](network.parameters())
        return Program(
            model=network, loss_fn=nn.CrossEntropyLoss(), optimizer=made, loader=batches(data(seed)), steps=slow
        )

    return build


GRID = {f"{model}-{optimizer}": in_grid(model, optimizer) for model in ARCHITECTURES for optimizer in OPTIMIZERS}


# --- what a run can be set to ----------------------------------------------------------------------------------------


def scheduled(make, interval, rate=0.05, **more):
    def build(seed):
        network = mlp(8, 24, 4)
        optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)
        data = points(seed, samples=400)
        return Program(
            model=network, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer,
            loader=batches(Subset(data, range(320))), val_loader=batches(Subset(data, range(320, 400)), shuffle=False),
            scheduler=make(optimizer), steps=160,
            options={"scheduler_interval": interval}, **more,
        )  # fmt: skip

    return build


def configured(options, rate=0.1, size=16, steps=120, model=lambda: mlp(8, 24, 4)):
    def build(seed):
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.5)
        return Program(
            model=network, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, loader=batches(points(seed), size),
            steps=steps, options=options,
        )  # fmt: skip

    return build


def warm_up(step):
    return min(1.0, step / 20)


SETTINGS = {
    "one_cycle": scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=160), "step"),
    "cosine_by_step": scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 160), "step"),
    "cosine_by_epoch": scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 8), "epoch"),
    "warm_restarts": scheduled(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 40), "step", rate=0.1),
    "warm_restarts_by_epoch": scheduled(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2), "epoch"),
    "steps_by_epoch": scheduled(lambda o: lr_scheduler.StepLR(o, 3, 0.1), "epoch"),
    "steps_by_step": scheduled(lambda o: lr_scheduler.MultiStepLR(o, [80, 120], 0.1), "step"),
    "plateau": scheduled(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1), "epoch"),
    "exponential": scheduled(lambda o: lr_scheduler.ExponentialLR(o, 0.8), "epoch"),
    "warm_up_from_zero": scheduled(lambda o: lr_scheduler.LambdaLR(o, warm_up), "step"),
    "cyclic": scheduled(lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 20, cycle_momentum=False), "step"),
    "accumulate_4": configured({"accumulate": 4}, rate=0.2, size=8, steps=160),
    "accumulate_ragged": configured({"accumulate": 3}, rate=0.2, size=8, steps=160),
    "clip_1": configured({"clip_norm": 1.0}),
    "clip_quarter": configured({"clip_norm": 0.25}, rate=0.3),
    "clip_tenth": configured({"clip_norm": 0.1}, rate=0.5, steps=200),
    "clip_value": configured({"clip_value": 0.1}, rate=0.3),
    "clip_auto": configured({"clip_norm": "auto"}),
    "bf16": configured({"precision": "bf16"}),
    "bf16_batch_norm": configured({"precision": "bf16"}, model=lambda: mlp(8, 24, 4, norm=nn.BatchNorm1d)),
    "averaged": configured({"ema_decay": 0.95}),
    "batch_of_one": configured({}, rate=0.02, size=1, steps=200),
    "batch_of_two": configured({}, rate=0.03, size=2, steps=200),
    "batch_of_two_batch_norm": configured({}, rate=0.01, size=2, steps=200,
                                          model=lambda: mlp(8, 24, 4, norm=nn.BatchNorm1d)),
    "whole_set": configured({}, rate=0.2, size=320, steps=80),
    "anomaly_windows": configured({"anomaly_detection": True, "sample_rate": 50}),
    "measured_often": configured({"monitor.every": 3}),
}  # fmt: skip
