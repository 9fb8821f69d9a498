"""A run that was stopped and resumed in mid-epoch ends in the same bits as one that was not."""

import gc
import random

import numpy as np
import pytest
import torch
from programs import equal, fingerprint, loader_of, mlp
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, IterableDataset

from safe_trainer import SafeTrainer
from safe_trainer.config import ConfigError, LoaderConfig
from safe_trainer.data import build_loaders

STEPS = 17  # of 6 batches an epoch: two whole epochs and five batches


class Augmented(Dataset):
    """Points with noise from all three kinds of generators."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        noise = random.gauss(0, 0.1) + np.random.normal() * 0.1 + torch.randn(8) * 0.1
        return (torch.randn(8, generator=generator) + index % 3 + noise).float(), index % 3


def ours(workers):
    options = LoaderConfig(batch_size=8, num_workers=workers)
    return build_loaders({"train": Augmented()}, options, seed=3, device=torch.device("cpu")).train


LOADERS = {
    "ours": lambda: ours(0),
    "ours_two_workers": lambda: ours(2),
    "plain": lambda: loader_of(Augmented(), batch_size=8),
    "own_generator": lambda: loader_of(Augmented(), batch_size=8, seed=11),
    "plain_two_workers": lambda: loader_of(Augmented(), batch_size=8, num_workers=2),
    "list": lambda: [(torch.linspace(-2, 2, 64).view(8, 8) * (k + 1), torch.arange(8) % 3) for k in range(6)],
}


def train(folder, loader, steps, **options):
    torch.manual_seed(7)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = OneCycleLR(optimizer, 0.02, total_steps=STEPS)
    config = {
        "max_steps": steps,
        "run_dir": str(folder),
        "progress": False,
        "scheduler_interval": "step",
        "ema_decay": 0.9,
        "seed": 5,
        "log_every": 3,
        **options,
    }
    trainer = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader, scheduler=scheduler, config=config)
    report = trainer.run()
    generators = (
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.from_numpy(np.random.get_state()[1].copy()),
    )
    average = [trainer.average.updates, *trainer.average.module.state_dict().values()]
    state = [*fingerprint(model, optimizer), *average, *generators]
    return state, scheduler.state_dict(), report.history, (folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "stop"), [(name, stop) for name in LOADERS for stop in ((4,) if "workers" in name else (4, 6, 13))]
)
def test_stopped_and_resumed_equals_not_stopped(name, stop, tmp_path):
    whole = train(tmp_path / "whole", LOADERS[name](), STEPS)
    train(tmp_path / "parts", LOADERS[name](), stop)
    random.seed(1)  # a new process starts with other generators
    np.random.seed(1)
    torch.manual_seed(1)
    parts = train(tmp_path / "parts", LOADERS[name](), STEPS, resume="last")
    assert equal(whole[0], parts[0])
    assert whole[1] == parts[1]
    assert whole[2] == parts[2]


def test_rows_beyond_the_checkpoint_are_not_doubled(tmp_path):
    train(tmp_path, LOADERS["ours"](), 9)
    train(tmp_path, LOADERS["ours"](), STEPS, resume="last")
    steps = [
        line.split('"step":')[1].split(",")[0].strip() for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(steps) == len(set(steps))


def test_a_run_resumes_from_a_path_into_a_folder_of_its_own(tmp_path):
    whole = train(tmp_path / "whole", LOADERS["ours"](), STEPS)
    train(tmp_path / "first", LOADERS["ours"](), 8)
    parts = train(tmp_path / "second", LOADERS["ours"](), STEPS, resume=str(tmp_path / "first"))
    assert equal(whole[0], parts[0])


def test_resume_without_a_checkpoint_starts_anew_and_says_so(tmp_path, caplog):
    fresh = train(tmp_path / "a", LOADERS["ours"](), 5)
    other = train(tmp_path / "b", LOADERS["ours"](), 5, resume="last")
    assert equal(fresh[0], other[0])
    assert "starts anew" in caplog.text


def test_a_changed_model_is_told_tensor_by_tensor(tmp_path):
    train(tmp_path, LOADERS["ours"](), 5)
    model = mlp(width=32)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"max_steps": 9, "run_dir": str(tmp_path), "progress": False, "resume": "last", "ema_decay": 0.9}
    with pytest.raises(ConfigError, match=r"0\.weight.*\n.*") as caught:
        SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, LOADERS["ours"](), config=config).run()
    assert "scheduler" in str(caught.value)


class Fixed(Augmented):
    """Points that nothing disturbs: here the loader's own state is enough, and no batch is read again."""

    random_transforms = False

    def __init__(self):
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return torch.randn(8, generator=torch.Generator().manual_seed(index)) + index % 3, index % 3


class Stream(IterableDataset):
    """A stream that knows where it is."""

    def __init__(self):
        self.at = 0

    def __len__(self):
        return 48

    def __iter__(self):
        while self.at < 48:
            self.at += 1
            yield torch.randn(8, generator=torch.Generator().manual_seed(self.at)), self.at % 3
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def stateful(dataset, workers, seed=None):
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(7)  # its sampler draws a seed of its own when it is made
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    shuffle = None if isinstance(dataset, IterableDataset) else True
    return StatefulDataLoader(dataset, batch_size=8, shuffle=shuffle, num_workers=workers, generator=generator)


@pytest.fixture
def short_waits(monkeypatch):
    """torchdata waits for each worker as long as PyTorch's interval, 5 s, and its workers often do not end before."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()  # iterators that go only now would wait in another test, at full length


# torchdata 0.11 calls set_vital, which torch 2.14 warns of.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("kind", "workers", "seed", "stop"),
    [
        *((kind, 0, seed, stop) for kind in (Augmented, Fixed, Stream) for seed in (None, 11) for stop in (4, 6)),
        *((kind, 2, seed, 4) for kind in (Augmented, Fixed) for seed in (None, 11)),
    ],
)
def test_a_stateful_data_loader_goes_on_to_the_same_bits(kind, workers, seed, stop, tmp_path, short_waits):
    whole = train(tmp_path / "whole", stateful(kind(), workers, seed), 9)
    train(tmp_path / "parts", stateful(kind(), workers, seed), stop)
    random.seed(1)
    np.random.seed(1)
    dataset = kind()
    parts = train(tmp_path / "parts", stateful(dataset, workers, seed), 9, resume="last")
    assert equal(whole[0], parts[0])
    assert whole[1:3] == parts[1:3]
    if kind is Fixed and not workers:
        assert len(dataset.read) == (9 - stop) * 8


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_data_loader_begins_a_new_epoch_after_a_cut_one(limit, tmp_path):
    options = {"limit_train_batches": limit}
    stop = limit or 6
    whole = train(tmp_path / "whole", stateful(Augmented(), 0), 9, **options)
    train(tmp_path / "parts", stateful(Augmented(), 0), stop, **options)
    parts = train(tmp_path / "parts", stateful(Augmented(), 0), 9, resume="last", **options)
    assert equal(whole[0], parts[0])


def test_persistent_workers_that_may_draw_are_told_on_resume(tmp_path, caplog):
    def loader():
        return loader_of(Augmented(), batch_size=8, num_workers=1, persistent_workers=True)

    train(tmp_path, loader(), 8)
    assert "persistent" not in caplog.text
    train(tmp_path, loader(), 9, resume="last")
    assert "persistent_workers=False" in caplog.text
