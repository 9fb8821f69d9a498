"""Every recipe, interrupted at three steps drawn at random and resumed, against the same recipe not interrupted."""

import contextlib
import gc
import random

import pytest
import torch

from safe_trainer import __main__ as cli
from safe_trainer.build import build
from safe_trainer.checkpoint import Checkpoints

RECIPES = [name for name in cli.options("recipe", cli.conf_folders(None)) if not name.startswith("broken/")]
BATCHES, EPOCHS = 4, 3

SLOW = pytest.mark.slow  # a ResNet-18 of full size


class Interrupted(BaseException):
    """Leaves training from between two steps, as a signal would."""


def start(recipe, folder, data, stop=None, workers=0, resume=None):
    """Train `recipe` cut to a few batches; leave it behind step `stop`."""
    options = [f"+recipe={recipe}", f"limit_train_batches={BATCHES}", f"max_epochs={EPOCHS}", "limit_val_batches=1"]
    options += ["progress=false", f"checkpoint.every_steps={stop or 99}", "ema_decay=0.99"]
    options += [f"loader.num_workers={workers}"]
    options += ["device=cpu", "loader.batch_size=4", "log_every=3", "logger={}"] + (["resume=last"] if resume else [])
    options += data if recipe.endswith("cifar") else []
    config = cli.checked(cli.composed(cli.readable_overrides(options, cli.conf_folders(None)), None))
    config.run_dir = str(folder)
    trainer = build(config, folder)
    if stop is not None:
        leave_behind(trainer, stop)
    with contextlib.suppress(Interrupted):
        trainer.fit()
    state, _ = Checkpoints(folder / "checkpoints").load("last")
    return state


def leave_behind(trainer, stop):
    make = trainer._loop

    def loop_that_is_left(output):
        loop = make(output)
        train_on = loop.train_on

        def train_then_leave(batch):
            if loop.position.step > stop:
                raise Interrupted
            train_on(batch)

        loop.train_on = train_then_leave
        return loop

    trainer._loop = loop_that_is_left


OF_THE_PROCESS = {"graphs", "graphs_alive"}
"""Graphs that are in memory: a new process cannot have those of the one before it."""


def differences(first, second, where="state"):
    """Names of everything in which two states differ, bit for bit."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = sorted((set(first) | set(second)) - OF_THE_PROCESS, key=str)
        return [d for key in keys for d in differences(first.get(key), second.get(key), f"{where}.{key}")]
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        return [
            d for i, (a, b) in enumerate(zip(first, second, strict=True)) for d in differences(a, b, f"{where}[{i}]")
        ]
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same = first.shape == second.shape and torch.equal(first.nan_to_num(nan=1e30), second.nan_to_num(nan=1e30))
        return [] if same else [where]
    return [] if first == second or repr(first) == repr(second) == "nan" else [f"{where}: {first!r}, {second!r}"]


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=SLOW if "cifar" in name else ()) for name in RECIPES])
def test_interrupted_three_times_it_ends_in_the_same_bits(recipe, tmp_path, cifar10_in_small):
    whole = start(recipe, tmp_path / "whole", cifar10_in_small)
    stops = sorted(random.Random(recipe).sample(range(1, BATCHES * EPOCHS), 3))
    for stop in stops:
        start(recipe, tmp_path / "parts", cifar10_in_small, stop, resume=True)
    parts = start(recipe, tmp_path / "parts", cifar10_in_small, resume=True)
    assert whole["position"]["step"] == BATCHES * EPOCHS
    assert differences(whole, parts) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_workers_gives_the_same_bits(recipe, tmp_path, cifar10_in_small, monkeypatch):
    # How long torch waits for a worker to end; with workers that stay, it waits in full for each of them.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    ends = [start(recipe, tmp_path / str(count), cifar10_in_small, workers=count) for count in (0, 2, 4)]
    gc.collect()  # the workers end now, not when the tests are over and torch waits for long again
    assert differences(ends[0], ends[1]) == []
    assert differences(ends[0], ends[2]) == []


def test_a_difference_is_seen():
    first = {"a": [torch.zeros(2), 1], "b": {"c": torch.ones(1)}}
    assert differences(first, {"a": [torch.zeros(2), 2], "b": {"c": torch.zeros(1)}}) == [
        "state.a[1]: 1, 2",
        "state.b.c",
    ]
    assert differences(first, first) == []
