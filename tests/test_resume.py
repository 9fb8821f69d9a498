"""A run that was stopped and resumed in mid-epoch ends in the same bits as one that was not."""

import gc
import os
import pathlib
import random
import subprocess
import sys

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


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.mark.parametrize("length_is_known", [True, False])
def test_a_run_killed_in_an_evaluation_evaluates_when_it_is_resumed(length_is_known, tmp_path):
    """Plateau, early stopping, best checkpoint and log hang on the figures of that very evaluation."""

    def run(folder, deadly=None, **options):
        torch.manual_seed(7)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        seen = []

        def judge(model, loss_fn, loader):
            seen.append(len(seen))
            if deadly is not None and len(seen) == deadly:
                raise Killed
            model.eval()
            with torch.no_grad():
                loss = sum(loss_fn(model(x), y).item() for x, y in loader)
            model.train()
            return loss

        loader = ours(0)
        if not length_is_known:
            batches = list(loader)
            loader = type("Stream", (), {"__iter__": lambda self: iter(batches)})()
        config = {"max_epochs": 4, "run_dir": str(folder), "progress": False, "seed": 5, "checkpoint.every_steps": 3}
        trainer = SafeTrainer(
            model, nn.CrossEntropyLoss(), optimizer, loader, [(torch.ones(4, 8), torch.arange(4) % 3)], plateau,
            eval_step=judge, config={**config, **options},
        )  # fmt: skip
        report = trainer.run()
        values = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "val/loss" in line]
        return fingerprint(model, optimizer), plateau.state_dict(), report.metrics, len(values)

    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "parts", deadly=2)
    parts = run(tmp_path / "parts", resume="last")
    assert equal(whole[0], parts[0])
    assert whole[1:] == parts[1:]


def test_a_seed_that_nobody_chose_goes_on_too(tmp_path):
    def run(folder, steps, seed=None, **options):
        loader = build_loaders(
            {"train": Augmented()}, LoaderConfig(batch_size=8), seed=seed, device=torch.device("cpu")
        ).train
        torch.manual_seed(7)
        model = mlp(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        config = {"max_steps": steps, "run_dir": str(folder), "progress": False, **options}
        SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader, config=config).run()
        return fingerprint(model, optimizer), loader.seed

    run(tmp_path / "parts", 8)
    state = torch.load(next((tmp_path / "parts" / "checkpoints").glob("*.pt")), weights_only=True)
    seed = state["loader"]["seed"]
    parts = run(tmp_path / "parts", 14, resume="last")
    assert parts[1] == seed
    assert equal(parts[0], run(tmp_path / "whole", 14, seed=seed)[0])


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_a_group_that_was_open_at_the_stop_is_gone_on_with(stop, tmp_path):
    """Groups of four batches in epochs of six: four and two."""

    def run(folder, steps, **options):
        torch.manual_seed(7)
        model = mlp(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        config = {"max_steps": steps, "run_dir": str(folder), "progress": False, "accumulate": 4, "seed": 1, **options}
        SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, ours(0), config=config).run()
        return fingerprint(model, optimizer)

    whole = run(tmp_path / "whole", 12)
    run(tmp_path / "parts", stop)
    assert equal(whole, run(tmp_path / "parts", 12, resume="last"))


def test_a_run_that_stopped_early_is_over_when_it_is_resumed(tmp_path):
    def run(**options):
        torch.manual_seed(7)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        config = {"max_epochs": 9, "run_dir": str(tmp_path), "progress": False, "early_stopping.patience": 2, **options}
        held_out = [(torch.ones(4, 8), torch.arange(4) % 3)]
        report = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, ours(0), held_out, config=config).run()
        return report.history["step"][-1]

    assert run() == 18
    assert run(resume="last") == 18
    assert run(resume="last", **{"early_stopping.patience": 3}) == 24


def test_other_parts_are_refused_and_other_settings_are_told(tmp_path, caplog):
    train(tmp_path, LOADERS["ours"](), 8)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}

    def resume(optimizer=torch.optim.AdamW, batch_size=8, **options):
        model = mlp()
        loader = build_loaders(
            {"train": Augmented()}, LoaderConfig(batch_size=batch_size), seed=3, device=torch.device("cpu")
        ).train
        made = optimizer(model.parameters(), lr=0.01)
        schedule = options.pop("schedule", OneCycleLR)(made, 0.02, total_steps=STEPS)
        config = {
            "max_steps": STEPS, "run_dir": str(tmp_path), "progress": False, "resume": "last", "ema_decay": 0.9,
            "scheduler_interval": "step", "seed": 5, **options,
        }  # fmt: skip
        SafeTrainer(model, nn.CrossEntropyLoss(), made, loader, scheduler=schedule, config=config).run()

    def stepped(optimizer, rate, total_steps):
        return torch.optim.lr_scheduler.StepLR(optimizer, total_steps)

    with pytest.raises(ConfigError, match="its optimizer is AdamW, the program's SGD"):
        resume(torch.optim.SGD)
    with pytest.raises(ConfigError, match="its scheduler is OneCycleLR, the program's StepLR"):
        resume(schedule=stepped)
    with pytest.raises(ConfigError, match="within an epoch of batch_size 8, the program's is 12"):
        resume(batch_size=12)
    assert before == {path: path.read_bytes() for path in before}  # a refused resume changes nothing
    resume(seed=6)
    assert "seed was 5 when the checkpoint was written and is 6 now: the run goes on with 5" in caplog.text


def test_a_folder_with_a_run_is_not_for_a_new_one(tmp_path):
    train(tmp_path, LOADERS["ours"](), 4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"run_dir must be a new or empty folder.*resume=last"):
        train(tmp_path, LOADERS["ours"](), 8)
    assert before == {path: path.read_bytes() for path in before}


def test_rows_of_a_run_that_came_to_no_checkpoint_are_dropped_when_it_begins_anew(tmp_path):
    train(tmp_path, LOADERS["ours"](), 7, **{"checkpoint.enabled": False})
    train(tmp_path, LOADERS["ours"](), 4, resume="last")
    rows = (tmp_path / "metrics.jsonl").read_text()
    assert '"step": 6' not in rows
    assert rows.count('"step": 3') == 1


def test_two_runs_at_once_in_one_folder_are_refused(tmp_path):
    class Nested:
        """In the first run's first batch, a second one begins in the same folder."""

        def __iter__(self):
            for batch in ours(0):
                with pytest.raises(ConfigError, match=r"in which no run is at work.*another trainer"):
                    train(tmp_path, LOADERS["ours"](), 4, resume="last")
                yield batch

    train(tmp_path, Nested(), 1)
    train(tmp_path, LOADERS["ours"](), 4, resume="last")  # it is free again


def test_the_lock_of_another_process_is_told_and_ends_with_it(tmp_path):
    code = (
        "import sys, time, pathlib\n"
        "from safe_trainer.run_lock import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    print('locked', flush=True); time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        assert other.stdout.readline().strip() == "locked"
        with pytest.raises(ConfigError, match=f"in use by process {other.pid} on "):
            train(tmp_path, LOADERS["ours"](), 2)
        other.kill()
    train(tmp_path, LOADERS["ours"](), 2)
