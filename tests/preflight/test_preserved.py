"""Nothing is left behind: training with the preflight ends in the bits of training without it."""

import itertools

import numpy as np
import pytest
import torch
from programs import SmallCNN, blobs, equal, fingerprint, loader_of, mlp, pictures
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader, Dataset, IterableDataset

from safe_trainer import SafeTrainer
from safe_trainer.config import CHECKS
from safe_trainer.utils import rng


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(self.second(self.first(inputs).relu()))


class Counting(nn.Module):
    """A buffer that moves and a plain count, both in forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.calls, self.seen = 0, []
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        self.calls += 1
        self.seen.append(self.calls)
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return self.head(inputs - self.mean) + 1e-3 * self.calls


MODELS = {
    "mlp": mlp, "tied": Tied, "counting": Counting,
    "weight_norm": lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 3)),
    "spectral_norm": lambda: nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 3)),
    "frozen": lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 3)),
}  # fmt: skip


class Augmented(Dataset):
    """Noise from a generator of its own and from two global ones."""

    def __init__(self):
        self.data, self.generator, self.reads = blobs(), np.random.default_rng(3), 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.reads += 1
        inputs, label = self.data[index]
        noise = self.generator.normal() + np.random.rand() + float(torch.rand(()))
        return inputs + 0.1 * noise, label


class Stream(IterableDataset):
    def __iter__(self):
        return iter(blobs())


def endless():
    while True:
        for inputs, labels in loader_of(blobs(), shuffle=False):
            yield inputs + 0.1 * torch.randn(()), labels


LOADERS = {
    "plain": lambda: loader_of(blobs()), "seeded": lambda: loader_of(blobs(), seed=4),
    "augmented": lambda: loader_of(Augmented(), seed=4), "list": lambda: list(loader_of(blobs())),
    "stream": lambda: DataLoader(Stream(), batch_size=16), "iterator": endless,
    "workers": lambda: DataLoader(blobs(), batch_size=16, shuffle=True, num_workers=2, persistent_workers=True),
    "three samples": lambda: loader_of(blobs(samples=3), batch_size=3),
    "quiet iterator": lambda: itertools.cycle(list(loader_of(blobs()))),
}  # fmt: skip


def train(
    tmp_path, make, loader, *, preflight, optimizer=torch.optim.AdamW, step=None, seed=None, held_out=blobs, **options
):
    torch.manual_seed(0)
    np.random.seed(0)
    model = make()
    chosen = optimizer(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(chosen, 0.9)
    config = {
        "progress": False, "run_dir": str(tmp_path / str(preflight)), "preflight.enabled": preflight, "max_steps": 15,
        "on_fault": "report", "seed": seed, "checkpoint.enabled": False, **options,
    }  # fmt: skip
    loss, step = (nn.CrossEntropyLoss(), None) if step is None else (None, step(chosen))
    val = loader_of(held_out(seed=1))
    trainer = SafeTrainer(model, loss, chosen, loader(), val, scheduler, config=config, loggers=(),
                          train_step=step)  # fmt: skip
    report = trainer.run()
    return [*fingerprint(model, chosen), torch.tensor(report.history["loss"]), rng.capture()["torch"]], model, report


def assert_same(tmp_path, make, loader, **options):
    without, alone, _ = train(tmp_path, make, loader, preflight=False, **options)
    ours, model, report = train(tmp_path, make, loader, preflight=True, **options)
    assert vars(model).get("seen") == vars(alone).get("seen")
    assert [check.name for check in report.checks] == [
        name for name in CHECKS if name in {c.name for c in report.checks}
    ]
    assert not [check for check in report.checks if "itself failed" in check.evidence]
    assert equal(without, ours)
    return model, report


@pytest.mark.parametrize("name", MODELS)
def test_every_model_ends_in_the_same_bits(name, tmp_path):
    model, report = assert_same(tmp_path, MODELS[name], LOADERS["plain"])
    assert len(report.checks) == len(CHECKS)
    if name == "counting":
        assert model.calls == len(model.seen) == 15 + 6 * 3  # an evaluation of 6 batches ends each epoch and the run


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("seed", [None, 3])
def test_every_loader_gives_the_same_batches(name, seed, tmp_path):
    options = {"max_epochs": 1} if name == "iterator" else {}
    assert_same(tmp_path, mlp, LOADERS[name], seed=seed, **options)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_pictures_and_optimizers(optimizer, tmp_path):
    def loader():
        return loader_of(pictures())

    torch.manual_seed(0)
    without, _, _ = train(tmp_path, SmallCNN, loader, preflight=False, optimizer=optimizer, held_out=pictures)
    ours, _, _ = train(tmp_path, SmallCNN, loader, preflight=True, optimizer=optimizer, held_out=pictures)
    assert equal(without[:-2], ours[:-2])


def test_a_step_of_the_users_own_with_counts_and_a_scheduler(tmp_path):
    made = []

    def step(optimizer):
        counts = {"steps": 0}
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
        made.append(counts)

        def one(model, loss_fn, optimizer, batch):
            counts["steps"] += 1
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch[0]), batch[1]) * (1 + 0.01 * counts["steps"])
            loss.backward()
            optimizer.step()
            schedule.step()
            return loss

        return one

    assert_same(tmp_path, mlp, LOADERS["plain"], step=step)
    assert [counts["steps"] for counts in made] == [15, 15]


def test_an_interrupt_in_the_middle_puts_all_back(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    calls = itertools.count()

    def loss(output, target):
        if next(calls) == 60:
            raise KeyboardInterrupt
        return functional.cross_entropy(output, target)

    before = [*fingerprint(model, optimizer), torch.get_rng_state()]
    trainer = SafeTrainer(
        model, loss, optimizer, loader_of(blobs()), config={"progress": False, "run_dir": str(tmp_path)}
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.preflight()
    assert equal(before, [*fingerprint(model, optimizer), torch.get_rng_state()])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_lazy_model_is_skipped_with_a_reason(tmp_path):
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"progress": False, "run_dir": str(tmp_path)}
    results = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=config).preflight()
    assert {result.status for result in results} == {"skip"}
    assert all("get their shape in the first forward" in result.evidence for result in results)


def test_a_program_that_fails_is_not_called_healthy(tmp_path):
    model = nn.Linear(7, 3)  # the data have 8 features
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"progress": False, "run_dir": str(tmp_path)}
    trainer = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=config)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.run()
    assert {result.status for result in trainer.report.checks} <= {"skip", "fail", "pass"}
    assert trainer.report.checks[0].status == "skip"


def test_without_time_checks_are_skipped_and_never_passed(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"progress": False, "run_dir": str(tmp_path), "preflight.budget_s": 1e-9}
    results = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=config).preflight()
    assert {result.status for result in results} == {"skip"}
    assert {result.evidence for result in results} == {"preflight.budget_s is used up"}


def test_checks_are_chosen_by_name_and_nothing_is_found_twice(tmp_path):
    model = nn.Sequential(mlp(), nn.Softmax(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"progress": False, "run_dir": str(tmp_path), "preflight.checks": ["wiring", "summary"]}
    trainer = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=config)
    assert [result.name for result in trainer.preflight()] == ["summary", "wiring"]
    trainer.preflight()
    assert [finding.fault for finding in trainer.report.findings] == ["loss.double_softmax"]
