"""Healthy programs with odd losses: of any sign and scale, with targets that broadcast or lie. Touches nothing."""

import math

import torch
from healthy.programs import Program, adam, batches, classifier, curve, draw, mlp, points, regression
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


def large_targets(seed):
    return regression(seed, rate=0.3, data=curve(seed, scale=1e4, noise=0.05), steps=200)


def far_targets(seed):
    return regression(seed, rate=5e-2, data=curve(seed, centre=20.0), steps=150)


def tiny_targets(seed):
    return regression(seed, data=curve(seed, scale=1e-4), loss=lambda o, y: functional.mse_loss(1e-4 * o, y))


def huber(seed):
    return regression(seed, loss=nn.HuberLoss())


def absolute(seed):
    return regression(seed, loss=nn.L1Loss())


def summed(seed):
    return regression(seed, rate=2e-3, loss=nn.MSELoss(reduction="sum"))


def broadcast_target(seed):
    """Ten heads learn one target: their spread is an estimate of doubt."""
    return regression(seed, mlp(6, 32, 10), loss=lambda output, target: (output - target).square().mean())


def poisson(seed):
    """Counts of about fifty: the loss is below zero from the first steps on."""
    data = curve(seed)
    counts = torch.poisson(torch.exp(2 + data.tensors[1]), generator=draw(seed))
    return regression(seed, rate=1e-2, loss=nn.PoissonNLLLoss(), data=TensorDataset(data.tensors[0], counts))


class Flow(nn.Module):
    """Shift and scale of a density, coupled; gives the negative log likelihood of each sample."""

    def __init__(self, features=4):
        super().__init__()
        self.half = features // 2
        self.nets = nn.ModuleList(mlp(self.half, 16, features, function=nn.Tanh) for _ in range(3))

    def forward(self, values):
        log_scale = 0
        for net in self.nets:
            first, second = values[:, : self.half], values[:, self.half :]
            scale, shift = net(first).chunk(2, 1)
            second = second * scale.tanh().exp() + shift
            values, log_scale = torch.cat([second, first], 1), log_scale + scale.tanh().sum(1)
        return 0.5 * values.square().sum(1) - log_scale


def flow(seed):
    made = draw(seed)
    data = 0.05 * torch.randn(320, 4, generator=made) + torch.randn(320, 1, generator=made).sign() * 0.3
    model = Flow()
    return Program(
        model=model, loss_fn=lambda output, _: output.mean(), optimizer=adam(model, 1e-2),
        loader=batches(TensorDataset(data, data)), steps=150,
    )  # fmt: skip


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(8, 32, 8)

    def forward(self, inputs):
        return functional.normalize(self.net(inputs), dim=1)


def contrastive(seed):
    """Two noisy views of a batch; each must find its partner."""

    def loss(model, views):
        first, second = model(views[0]), model(views[1])
        return functional.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))

    def step(model, _, optimizer, batch):
        noisy = [batch[0] + 0.2 * torch.randn_like(batch[0]) for _ in range(2)]
        value = loss(model, noisy)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return value

    model = Pairs()
    return Program(model=model, optimizer=adam(model), loader=batches(points(seed), 32), train_step=step)


def negative_similarity(seed):
    """Cosine similarity with a stopped gradient on one side, as siamese networks without negatives have it."""

    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.predictor = mlp(8, 32, 16, norm=nn.BatchNorm1d), mlp(16, 8, 16, norm=nn.BatchNorm1d)

        def forward(self, inputs):
            first, second = self.encoder(inputs), self.encoder(inputs + 0.2 * torch.randn_like(inputs))
            return -functional.cosine_similarity(self.predictor(first), second.detach()).mean()

    model = Siamese()
    return Program(
        model=model, loss_fn=lambda output, _: output, optimizer=adam(model), loader=batches(points(seed), 32)
    )


def triplet(seed):
    data = points(seed)
    inputs, labels = data.tensors
    order = torch.argsort(labels, stable=True)
    inputs = inputs[order]
    triples = TensorDataset(torch.stack([inputs, inputs.roll(1, 0), inputs.roll(100, 0)], 1), labels[order])
    model = mlp(8, 32, 8)
    loss = nn.TripletMarginLoss()
    return Program(
        model=model, loss_fn=lambda output, _: loss(*output.unbind(1)), optimizer=adam(model), loader=batches(triples)
    )


class Autoencoder(nn.Module):
    def __init__(self, variational=False):
        super().__init__()
        self.variational = variational
        self.encoder, self.decoder = mlp(8, 24, 6 if variational else 3), mlp(3, 24, 8)

    def forward(self, inputs):
        code = self.encoder(inputs)
        if not self.variational:
            return self.decoder(code)
        mean, log_variance = code.chunk(2, 1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return self.decoder(code), divergence


def autoencoder(seed):
    inputs = points(seed).tensors[0]
    return regression(seed, Autoencoder(), data=TensorDataset(inputs, inputs), steps=150)


def variational(seed):
    inputs = points(seed).tensors[0]

    def loss(output, target):
        return functional.mse_loss(output[0], target, reduction="sum") / len(target) + output[1]

    return regression(seed, Autoencoder(True), loss=loss, data=TensorDataset(inputs, inputs), steps=150)


def weighted_loss(seed):
    return classifier(seed, mlp(8, 32, 4), loss=nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0, 20.0])))


def label_smoothing(seed):
    return classifier(seed, mlp(8, 32, 4), loss=nn.CrossEntropyLoss(label_smoothing=0.2))


def label_noise(seed):
    return classifier(seed, mlp(8, 16, 4), points(seed, noise=0.5), steps=150)


def imbalanced(seed):
    data = points(seed, samples=600, classes=2)
    inputs, labels = data.tensors
    kept = torch.cat([torch.where(labels == 0)[0], torch.where(labels == 1)[0][:20]])
    return classifier(seed, mlp(8, 32, 2), TensorDataset(inputs[kept], labels[kept]))


def binary(seed):
    inputs, labels = points(seed, classes=2).tensors
    data = TensorDataset(inputs, labels.float()[:, None])
    return classifier(seed, mlp(8, 32, 1), data, loss=nn.BCEWithLogitsLoss())


def sigmoid_and_bce(seed):
    inputs, labels = points(seed, classes=2).tensors
    model = nn.Sequential(*mlp(8, 32, 1), nn.Sigmoid())
    return classifier(seed, model, TensorDataset(inputs, labels.float()[:, None]), loss=nn.BCELoss())


def log_softmax_and_nll(seed):
    return classifier(seed, nn.Sequential(*mlp(8, 32, 4), nn.LogSoftmax(1)), loss=nn.NLLLoss())


def masked_outputs(seed):
    """Entries that must not be chosen are -inf, as in attention."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(8, 32, 6)

        def forward(self, inputs):
            return self.net(inputs).masked_fill(torch.arange(6) > 3, -math.inf)

    return classifier(seed, Masked())


def heavy_dropout(seed):
    return classifier(seed, mlp(8, 128, 128, 4, dropout=0.8), steps=200)


KINDS = {
    builder.__name__: builder
    for builder in (
        large_targets,
        far_targets,
        tiny_targets,
        huber,
        absolute,
        summed,
        broadcast_target,
        poisson,
        flow,
        contrastive,
        negative_similarity,
        triplet,
        autoencoder,
        variational,
        weighted_loss,
        label_smoothing,
        label_noise,
        imbalanced,
        binary,
        sigmoid_and_bce,
        log_softmax_and_nll,
        masked_outputs,
        heavy_dropout,
    )
}
