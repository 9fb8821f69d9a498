"""The whole preflight on networks as people use them: nothing is found on them, and little is skipped."""

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from safe_trainer import SafeTrainer
from safe_trainer.config import CHECKS


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def photos(samples=128, size=32, classes=10):
    """Pictures whose class is the place of a bright square, with noise."""
    made = generator()
    labels = torch.randint(classes, (samples,), generator=made)
    pictures = 0.5 * torch.randn(samples, 3, size, size, generator=made)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        row, column = divmod(label, 4)
        picture[:, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] += 2
    return TensorDataset(pictures, labels)


def resnet18():
    return torchvision.models.resnet18(num_classes=10), nn.CrossEntropyLoss(), photos(), 1e-3


def mobilenet():
    return torchvision.models.mobilenet_v3_small(num_classes=10), nn.CrossEntropyLoss(), photos(), 1e-3


def vision_transformer():
    model = torchvision.models.vit_b_16(num_classes=10, image_size=32)
    model.encoder.layers = model.encoder.layers[:2]
    return model, nn.CrossEntropyLoss(), photos(), 1e-4


class Recurrent(nn.Module):
    def __init__(self, words=30, width=32):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(words, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, words):
        return self.head(self.lstm(self.embed(words))[0][:, -1])


def lstm():
    """Whether the first word is among the first half of all words; the rest is noise."""
    words = torch.randint(30, (256, 12), generator=generator())
    return Recurrent(), nn.CrossEntropyLoss(), TensorDataset(words, (words[:, 0] < 15).long()), 1e-2


class Reconstruction:
    """Mean squared error against the input itself."""

    def __call__(self, model, batch):
        return {"loss": functional.mse_loss(model(batch[0]), batch[0])}


def autoencoder():
    made = generator()
    hidden = torch.randn(256, 4, generator=made)
    data = TensorDataset(torch.tanh(hidden @ torch.randn(4, 24, generator=made)))
    encoder = [nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4)]
    decoder = [nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 24)]
    return nn.Sequential(*encoder, *decoder), Reconstruction(), data, 3e-3


class Siamese(nn.Module):
    """Two runs of one body, and the distance between what they give."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, pair):
        first, second = pair
        return functional.pairwise_distance(self.body(first), self.body(second))


class Contrastive:
    """Hadsell, Chopra and LeCun, "Dimensionality reduction by learning an invariant mapping", 2006; margin 1."""

    def __call__(self, model, batch):
        first, second, same = batch
        distance = model((first, second))
        return {"loss": (same * distance.square() + (1 - same) * (1 - distance).clamp(min=0).square()).mean()}


def siamese():
    made = generator()
    centres = 2 * torch.randn(6, 10, generator=made)
    kinds = torch.randint(6, (2, 256), generator=made)
    kinds[1, ::2] = kinds[0, ::2]
    first, second = (centres[kind] + 0.3 * torch.randn(256, 10, generator=made) for kind in kinds)
    return Siamese(), Contrastive(), TensorDataset(first, second, (kinds[0] == kinds[1]).float()), 3e-3


NETWORKS = {"resnet18": resnet18, "mobilenet_v3_small": mobilenet, "vit": vision_transformer, "lstm": lstm,
            "autoencoder": autoencoder, "siamese": siamese}  # fmt: skip
LARGE = ("resnet18", "mobilenet_v3_small", "vit")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in NETWORKS]
)
def test_a_healthy_network_passes_every_check(name, tmp_path):
    model, loss, data, rate = NETWORKS[name]()
    how = {"task": loss} if name in ("autoencoder", "siamese") else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    config = {"progress": False, "run_dir": str(tmp_path), "preflight.budget_s": 200}
    loader = DataLoader(data, batch_size=32, shuffle=True)
    trainer = SafeTrainer(model, None if how else loss, optimizer, loader, config=config, **how)
    results = trainer.preflight()
    assert trainer.report.findings == []
    assert {result.name: (result.status.value, result.evidence) for result in results if result.status != "pass"} == {}
    assert [result.name for result in results] == list(CHECKS)
