"""Runs that are killed or stopped at awkward instants go on to the bits of one that was not.

A kill is a copy of the run's folder, made at the instant of the kill: what another process would find.
"""

import json
import shutil

import pytest
import torch
from programs import blobs, equal, fingerprint, loader_of, mlp
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

from safe_trainer import SafeTrainer
from safe_trainer.checkpoint import Checkpoints
from safe_trainer.config import ConfigError
from safe_trainer.data import OrderedLoader


class Killed(BaseException):
    """No instance of Exception, as KeyboardInterrupt is none."""


class Watched:
    """Batches whose n-th reading is where something happens."""

    def __init__(self, batches, at=None, do=None):
        self.batches, self.at, self.do, self.readings = batches, at, do, 0

    def __iter__(self):
        self.readings += 1
        for position, batch in enumerate(self.batches):
            if self.readings == self.at and position == 1:
                self.do()
            yield batch


class WithoutLength:
    """An iterable that does not tell how many batches it has."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def batches():
    return list(loader_of(blobs(), shuffle=False))


def train(folder, loader=None, val=None, *, schedule=None, ema=None, **options):
    """One run of 6 batches an epoch; what it leaves, rows of the log included."""
    torch.manual_seed(7)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = schedule(optimizer) if schedule else None
    config = {"run_dir": str(folder), "progress": False, "seed": 5, "log_every": 4, "ema_decay": ema, **options}
    loader = OrderedLoader(blobs(), batch_size=16, seed=3, shuffle=True) if loader is None else loader
    trainer = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader, val, scheduler, config=config)
    report = trainer.run()
    average = [] if ema is None else list(trainer.average.module.state_dict().values())
    state = [*fingerprint(model, optimizer), *average, optimizer.param_groups[0]["lr"]]
    return state, scheduler.state_dict() if scheduler else None, report.history, rows(folder), report.metrics


def rows(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def once(found):
    """Rows without what is said twice: a loader of unknown length cannot tell that the stop was its epoch's end."""
    return [dict(row) for row in dict.fromkeys(tuple(row.items()) for row in found)]


def same(first, second):
    """Weights, optimizer, averages; scheduler; history; rows; figures."""
    assert first[3] == second[3]
    assert equal(first[0], second[0])
    assert str(first[1]) == str(second[1])
    assert str(first[2]) == str(second[2])
    assert first[4] == second[4]


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)


@pytest.mark.parametrize("every", [3, 4, None])
@pytest.mark.parametrize("loader", ["ours", "without_length", "list"])
@pytest.mark.parametrize("length", [{"max_epochs": 4}, {"max_steps": 18}])
def test_a_kill_within_an_evaluation(every, loader, length, tmp_path):
    """The third evaluation, in the run of 18 steps the last one, is made again."""
    loaders = {"ours": lambda: None, "without_length": lambda: WithoutLength(batches()), "list": batches}
    options = {**length, "checkpoint.every_steps": every, "schedule": plateau, "ema": 0.9}
    options |= {"early_stopping.patience": 3, "early_stopping.min_delta": 0.1}

    def kill():
        shutil.copytree(tmp_path / "whole", tmp_path / "killed")

    whole = train(tmp_path / "whole", loaders[loader](), Watched(batches(), at=3, do=kill), **options)
    parts = train(tmp_path / "killed", loaders[loader](), Watched(batches()), resume="last", **options)
    same(whole, parts)


@pytest.mark.parametrize("error", [RuntimeError, Killed, KeyboardInterrupt])
@pytest.mark.parametrize("length", [{"max_epochs": 4}, {"max_steps": 18}])
def test_a_failure_within_an_evaluation_does_not_lose_the_epoch(error, length, tmp_path):
    options = {**length, "schedule": plateau}

    def fail():
        raise error("no evaluation today")

    whole = train(tmp_path / "whole", None, Watched(batches()), **options)
    with pytest.raises(error):
        train(tmp_path / "parts", None, Watched(batches(), at=3, do=fail), **options)
    assert Checkpoints(tmp_path / "parts" / "checkpoints").latest().step == 18
    same(whole, train(tmp_path / "parts", None, Watched(batches()), resume="last", **options))


def test_a_second_kill_in_the_evaluation_that_is_made_again(tmp_path):
    """The loader has not begun when the state is written; its own generator must be in it all the same."""

    def kill(name, at):
        source = tmp_path / ("whole" if at == 2 else "first")
        return Watched(batches(), at=at, do=lambda: shutil.copytree(source, tmp_path / name))

    def loader():
        return loader_of(blobs(), seed=11)

    options = {"max_epochs": 4, "checkpoint.every_steps": 3}
    whole = train(tmp_path / "whole", loader(), kill("first", at=2), **options)
    train(tmp_path / "first", loader(), kill("second", at=1), resume="last", **options)
    with pytest.raises(Killed):
        train(tmp_path / "second", Raising(loader()), Watched(batches()), resume="last", **options)
    same(whole, train(tmp_path / "second", loader(), Watched(batches()), resume="last", **options))


class Raising:
    """A loader whose process dies when it is asked for its first batch."""

    def __init__(self, loader):
        self.generator = loader.generator
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        raise Killed


@pytest.mark.parametrize("stop", [4, 6, 9, 12])
@pytest.mark.parametrize("loader", ["ours", "without_length"])
def test_a_stop_by_max_steps_within_a_group_of_batches(stop, loader, tmp_path):
    """The stopped run steps with the open group; the one that goes on completes it."""
    make = {"ours": lambda: None, "without_length": lambda: WithoutLength(batches())}[loader]
    options = {
        "accumulate": 5,
        "scheduler_interval": "step",
        "schedule": lambda o: OneCycleLR(o, 0.02, total_steps=9),
        "ema": 0.9,
    }
    whole = train(tmp_path / "whole", make(), batches(), max_steps=18, **options)
    first = train(tmp_path / "parts", make(), batches(), max_steps=stop, **options)
    assert not equal(first[0], whole[0])
    again = train(tmp_path / "parts", make(), batches(), max_steps=stop, resume="last", **options)
    assert equal(first[0], again[0])  # nothing to be done: the stopped run's own weights
    parts = train(tmp_path / "parts", make(), batches(), max_steps=18, resume="last", **options)
    of_the_stop = [row for row in parts[3] if row["step"] == stop and row not in whole[3]]
    assert len(of_the_stop) <= 1
    same(whole, (*parts[:3], once(row for row in parts[3] if row not in of_the_stop), parts[4]))


def test_a_stop_within_an_epoch_leaves_the_held_out_loader_and_the_log_as_they_were(tmp_path):
    def val():
        return loader_of(blobs(seed=1), seed=4)  # another order at each evaluation, from a generator of its own

    whole = train(tmp_path / "whole", None, val(), max_steps=20, limit_val_batches=2)
    train(tmp_path / "parts", None, val(), max_steps=9, limit_val_batches=2)
    parts = train(tmp_path / "parts", None, val(), max_steps=20, limit_val_batches=2, resume="last")
    same(whole, (*parts[:3], [row for row in parts[3] if row["step"] != 9], parts[4]))


def test_checkpoints_change_nothing_about_the_log(tmp_path):
    plain = train(tmp_path / "plain", max_epochs=2, log_every=5)
    often = train(tmp_path / "often", max_epochs=2, log_every=5, **{"checkpoint.every_steps": 1})
    same(plain, often)


def test_a_random_seed_of_the_loader_comes_back(tmp_path):
    def loader():
        return OrderedLoader(blobs(), batch_size=16, seed=None, shuffle=True)

    first, kept = loader(), loader()
    kept.seed = first.seed
    whole = train(tmp_path / "whole", first, max_steps=16)
    train(tmp_path / "parts", kept, max_steps=9)
    other = loader()
    parts = train(tmp_path / "parts", other, max_steps=16, resume="last")
    assert other.seed == first.seed
    assert equal(whole[0], parts[0])
    assert str(whole[2]) == str(parts[2])


def test_a_run_that_was_stopped_early_has_ended(tmp_path):
    options = {"max_epochs": 50, "early_stopping.patience": 2, "early_stopping.min_delta": 1e3}
    first = train(tmp_path, None, batches(), **options)
    again = train(tmp_path, None, batches(), resume="last", **options)
    assert first[2]["step"][-1] == again[2]["step"][-1] == 18
    assert equal(first[0], again[0])
    assert first[3] == again[3]


def test_a_run_that_was_stopped_early_goes_on_with_more_patience(tmp_path):
    options = {"max_epochs": 50, "early_stopping.min_delta": 1e3}
    whole = train(tmp_path / "whole", None, batches(), **options, **{"early_stopping.patience": 4})
    train(tmp_path / "parts", None, batches(), **options, **{"early_stopping.patience": 2})
    parts = train(tmp_path / "parts", None, batches(), resume="last", **options, **{"early_stopping.patience": 4})
    same(whole, parts)


@pytest.mark.parametrize("options", [{"log_every": 1}, {"log_every": 100}, {"checkpoint.every_steps": 5}])
def test_a_plateau_without_validation_is_found_in_the_mean_loss_of_the_epoch(options, tmp_path):
    seen = []

    class Noted(ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            seen.append(metrics)
            super().step(metrics, epoch)

    history = train(tmp_path, schedule=Noted, max_epochs=3, **options)[2]
    means = [sum(history["loss"][at : at + 6]) / 6 for at in (0, 6, 12)]
    assert seen == pytest.approx(means, rel=1e-12)


def test_a_plateau_without_validation_survives_a_kill(tmp_path):
    options = {"schedule": plateau, "max_epochs": 4}
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "parts", max_steps=8, **options)
    parts = train(tmp_path / "parts", resume="last", **options)
    assert equal(whole[0], parts[0])
    assert str(whole[1]) == str(parts[1])


def test_early_stopping_by_an_unknown_figure_does_not_lose_the_epoch(tmp_path):
    options = {"max_epochs": 2, "early_stopping.patience": 2}
    with pytest.raises(ConfigError, match="val/f1"):
        train(tmp_path / "parts", None, batches(), **options, **{"early_stopping.metric": "val/f1"})
    assert Checkpoints(tmp_path / "parts" / "checkpoints").latest().step == 6
    whole = train(tmp_path / "whole", None, batches(), **options)
    same(whole, train(tmp_path / "parts", None, batches(), resume="last", **options))


def test_schedules_by_epoch_go_on_after_a_stop_at_the_end_of_an_epoch_of_unknown_length(tmp_path):
    options = {"schedule": lambda o: ExponentialLR(o, 0.5), "early_stopping.patience": 1}
    options |= {"early_stopping.min_delta": 1e3}
    whole = train(tmp_path / "whole", WithoutLength(batches()), batches(), max_steps=24, **options)
    train(tmp_path / "parts", WithoutLength(batches()), batches(), max_steps=6, **options)
    parts = train(tmp_path / "parts", WithoutLength(batches()), batches(), max_steps=24, resume="last", **options)
    same(whole, parts)
