"""Small training programs that several tests share: models, data, and the loop that a user would write by hand."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(samples=96, features=8, classes=3, seed=0):
    """Separable points around class centres."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, features, generator=generator)
    labels = torch.arange(samples) % classes
    return TensorDataset(centres[labels] + torch.randn(samples, features, generator=generator), labels)


def loader_of(dataset, batch_size=16, shuffle=True, seed=None, **options):
    """A DataLoader as most people write it; with a seed it has a generator of its own."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, generator=generator, **options)


def mlp(features=8, classes=3, width=16, dropout=0.1):
    return nn.Sequential(
        nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes)
    )


class SmallCNN(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Flatten()
        )
        self.head = nn.Linear(4 * 64, classes)

    def forward(self, pictures):
        return self.head(self.features(pictures))


def pictures(samples=48, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % classes
    return TensorDataset(torch.randn(samples, 1, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1), labels)


def hand_written(model, loss_fn, optimizer, loader, epochs=2, clip_norm=None, scheduler=None, interval="epoch"):
    """The loop of every PyTorch tutorial. Returns the losses."""
    losses = []
    model.train()
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            if scheduler is not None and interval == "step":
                scheduler.step()
            losses.append(loss.item())
        if scheduler is not None and interval == "epoch":
            scheduler.step()
    return losses


def fingerprint(model, *optimizers):
    """Everything that training changes, as one flat list of tensors and numbers."""
    parts = [tensor.detach().clone() for tensor in model.state_dict().values()]
    for optimizer in optimizers:
        for state in optimizer.state_dict()["state"].values():
            parts += [value.clone() if isinstance(value, torch.Tensor) else value for value in state.values()]
    return parts


def equal(first, second):
    """Bit for bit, NaN included."""
    return len(first) == len(second) and all(
        torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30)) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(first, second, strict=True)
    )
