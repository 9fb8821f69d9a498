"""How the tests of the checks before a run ask for one check of a program."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safe_trainer import SafeTrainer


def data_check(
    folder, model, loss_fn, loader, val_loader=None, *, optimizer=None, budget_s=60, max_steps=None, **parts
):
    """The result of the data check."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-3)
    config = {
        "progress": False,
        "preflight.checks": ["data"],
        "preflight.budget_s": budget_s,
        "run_dir": str(folder),
        **({} if max_steps is None else {"max_steps": max_steps}),
    }
    (result,) = SafeTrainer(model, loss_fn, optimizer, loader, val_loader, config=config, **parts).preflight()
    return result


def alarms(result):
    """Fault and severity of each warning and error."""
    return [(finding.fault, str(finding.severity)) for finding in result.findings if finding.is_alarm]


def silent(result):
    """Passed, with nothing that a part of the check stumbled over."""
    return result.status == "pass" and alarms(result) == [] and "Error" not in result.evidence


def groups(samples=300, features=8, classes=3, seed=0, spread=1.0):
    """Points around class centres, in random order, with their classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, features, generator=torch.Generator().manual_seed(77))
    labels = torch.randint(classes, (samples,), generator=generator)
    return centres[labels] + spread * torch.randn(samples, features, generator=generator), labels


def loader_of(*tensors, batch_size=16, shuffle=True, **options):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=shuffle, **options)


def classifier(features=8, classes=3, width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))


def regressor(features=8, outputs=1, width=16):
    return classifier(features, outputs, width)


def pictures(samples=200, classes=4, size=8, seed=0):
    """A bright bar in the row of the class, with noise, values from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=generator)
    images = 0.3 * torch.rand(samples, 1, size, size, generator=generator)
    images[torch.arange(samples), 0, 2 * labels] += 0.7
    return images, labels


def convnet(classes=4, channels=1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, classes)
    )
