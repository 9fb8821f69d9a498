"""Healthy programs with odd models: parts that rest, are shared, cut off or silent. Touches nothing."""

import torch
from healthy.programs import Program, Recurrent, adam, batches, classifier, cnn, draw, mlp, pictures, words
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset


def sparse_relu(seed):
    model = mlp(8, 128, 128, 4)
    nn.init.constant_(model[2].bias, -0.3)
    return classifier(seed, model)


def half_of_the_units_dead(seed):
    model = mlp(8, 64, 4)
    with torch.no_grad():
        model[0].bias[:32] = -50.0
    return classifier(seed, model)


def frozen_backbone(seed):
    model = mlp(8, 64, 32, 4)
    model[0].requires_grad_(False)
    return classifier(seed, model)


def frozen_batch_norm(seed):
    model = cnn()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    return classifier(seed, model, pictures(seed))


class Tied(nn.Module):
    def __init__(self, vocabulary=20, width=16):
        super().__init__()
        self.embedding, self.core = nn.Embedding(vocabulary, width), nn.GRU(width, width, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(self.core(self.embedding(tokens[:, :-1]))[0]).transpose(1, 2)


def tied_weights(seed):
    made = draw(seed)
    start = torch.randint(20, (160, 1), generator=made)
    tokens = (start + 3 * torch.arange(9)) % 20
    model = Tied()
    return Program(
        model=model, loss_fn=lambda output, tokens: functional.cross_entropy(output, tokens[:, 1:]),
        optimizer=adam(model), loader=batches(TensorDataset(tokens, tokens)),
    )  # fmt: skip


def unused_rows(seed):
    return classifier(seed, Recurrent(nn.GRU, vocabulary=500), words(seed), 1e-2)


class UnusedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.later = mlp(8, 32, 16), nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, inputs):
        return self.head(torch.relu(self.body(inputs)))


def unused_head(seed):
    return classifier(seed, UnusedHead())


class Adapted(nn.Module):
    """A frozen layer and a product of two thin matrices, one of which begins at zero."""

    def __init__(self, inner, rank=2):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, inputs):
        return self.inner(inputs) + inputs @ self.down.T @ self.up.T


def low_rank_factors(seed):
    model = nn.Sequential(Adapted(nn.Linear(8, 32)), nn.ReLU(), Adapted(nn.Linear(32, 4)))
    return classifier(seed, model, rate=1e-2, steps=150)


def weight_norm(seed):
    model = mlp(8, 32, 32, 4)
    for place in (0, 2):
        parametrizations.weight_norm(model[place])
    return classifier(seed, model)


def spectral_norm(seed):
    model = mlp(8, 32, 32, 4)
    parametrizations.spectral_norm(model[2])
    return classifier(seed, model)


class Experts(nn.Module):
    """Each sample goes to one of several; some have nothing to do for many steps."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(mlp(8, 16, 4) for _ in range(6))

    def forward(self, inputs):
        choice = (inputs[:, 0].abs() * 2).long().clamp(max=5)
        output = inputs.new_zeros(len(inputs), 4)
        for place, expert in enumerate(self.experts):
            chosen = choice == place
            if chosen.any():
                output[chosen] = expert(inputs[chosen])
        return output


def experts(seed):
    return classifier(seed, Experts(), rate=1e-2)


class Deep(nn.Module):
    """Every stage has a head of its own."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([mlp(8, 24, 24), mlp(24, 24, 24), mlp(24, 24, 24)])
        self.heads = nn.ModuleList(nn.Linear(24, 4) for _ in range(3))

    def forward(self, stream):
        outputs = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            stream = torch.relu(stage(stream))
            outputs.append(head(stream))
        return outputs


def deep_supervision(seed):
    return classifier(seed, Deep(), loss=lambda outputs, y: sum(functional.cross_entropy(o, y) for o in outputs))


KINDS = {
    builder.__name__: builder
    for builder in (
        sparse_relu,
        half_of_the_units_dead,
        frozen_backbone,
        frozen_batch_norm,
        tied_weights,
        unused_rows,
        unused_head,
        low_rank_factors,
        weight_norm,
        spectral_norm,
        experts,
        deep_supervision,
    )
}
