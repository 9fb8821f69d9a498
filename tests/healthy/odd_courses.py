"""Healthy programs whose course is odd: long done, begun at the end, slow, fast, in a saw. Touches nothing."""

import torch
from healthy.programs import Program, adam, batches, classifier, curve, draw, mlp, points, regression
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


def converged(seed):
    """Long past the end: the loss has come to nothing and flickers there."""
    data = points(seed, apart=4.0)
    return classifier(seed, mlp(8, 64, 4), data, rate=1e-2, size=32, steps=250)


def interpolated(seed):
    return regression(seed, mlp(6, 128, 1), data=curve(seed, samples=16), rate=1e-2, steps=300)


def trained_before(seed):
    """The optimum of a noisy problem, and on from there."""
    data = curve(seed, noise=1.0, samples=640)
    inputs, targets = data.tensors
    model = nn.Linear(6, 1)
    solution = torch.linalg.lstsq(torch.cat([inputs, torch.ones(len(inputs), 1)], 1), targets).solution
    with torch.no_grad():
        model.weight.copy_(solution[:6].T)
        model.bias.copy_(solution[6])
    return regression(seed, model, rate=1e-3, data=data, flat="it begins at the optimum")


def finetuned(seed):
    model = mlp(8, 32, 4)
    data = points(seed)
    optimizer = adam(model, 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
        optimizer.step()
    others = TensorDataset(data.tensors[0] + 0.3, data.tensors[1])
    return classifier(seed, model.eval(), others, rate=1e-4, flat="it was trained before, on nearly the same data")


def no_signal(seed):
    """Labels that nothing depends on: the loss is at its floor, ln 4, when it begins."""
    made = draw(seed)
    data = TensorDataset(torch.randn(4000, 8, generator=made), torch.randint(4, (4000,), generator=made))
    model = nn.Linear(8, 4)
    nn.init.zeros_(model.weight)
    return classifier(seed, model, data, rate=1e-3, flat="there is nothing to learn", size=32)


def small_rate(seed):
    return classifier(seed, mlp(8, 64, 4), rate=5e-4, steps=200)


def large_rate(seed):
    model = mlp(8, 32, 32, 4, norm=nn.BatchNorm1d)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Program(
        model=model, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, loader=batches(points(seed), 32), steps=150
    )


def unshuffled_classes(seed):
    """Class after class, as a user may want it with continual learning: the loss saws."""
    inputs, labels = points(seed).tensors
    order = torch.argsort(labels)
    loader = batches(TensorDataset(inputs[order], labels[order]), 16, shuffle=False)
    model = mlp(8, 32, 4)
    return Program(
        model=model, loss_fn=nn.CrossEntropyLoss(), optimizer=adam(model, 1e-3), loader=loader, steps=200,
        flat="at each change of class the loss leaps, as it must",
    )  # fmt: skip


def held_out_noise(seed):
    """The validation loss wanders, and the network learns some of its samples by heart."""
    data = points(seed, noise=0.1)
    held = batches(points(seed, samples=40, noise=0.1), 8, shuffle=False)
    return classifier(seed, mlp(8, 32, 4), data, val_loader=held, steps=200)


KINDS = {
    builder.__name__: builder
    for builder in (
        converged,
        interpolated,
        trained_before,
        finetuned,
        no_signal,
        small_rate,
        large_rate,
        unshuffled_classes,
        held_out_noise,
    )
}
