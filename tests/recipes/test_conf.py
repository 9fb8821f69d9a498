"""Every YAML below conf/: it says how it is used, that command composes, and every recipe trains two steps."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import safe_trainer.conf
from safe_trainer.__main__ import checked
from safe_trainer.build import build
from safe_trainer.command_line import composed, conf_folders, options, readable_overrides

CONF = Path(safe_trainer.conf.__path__[0])
GROUPS = ("model", "data", "loss", "task", "optimizer", "scheduler", "metrics", "logger", "recipe")
FILES = sorted(path for group in GROUPS for path in (CONF / group).rglob("*.yaml"))
RECIPES = options("recipe", [CONF])
OPTIMIZER_IS_THE_FAULT = ("broken/lr_too_high", "broken/missing_zero_grad")


def configured(*overrides):
    folders = conf_folders(None)
    return checked(composed(readable_overrides(list(overrides), folders), None))


def command(path):
    """The overrides of the command that the file's first comment gives."""
    first = next(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("# @package"))
    return re.split(r"\s{3,}", first.removeprefix("# python -m safe_trainer").strip())[0].split()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_file_opens_with_its_command_and_the_command_is_right(path):
    words = command(path)
    assert words
    assert path.stem in " ".join(words) or path.parent.name in " ".join(words) or any("recipe" in w for w in words)
    configured(*(word.replace("DIR", "pictures") for word in words))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_two_steps(recipe, tmp_path, cifar10_in_small):
    small = [*cifar10_in_small, "loader.batch_size=4"] if "cifar" in recipe else []
    quiet = ["progress=false", "limit_val_batches=1", "max_steps=2", f"run_dir={tmp_path / 'run'}"]
    config = configured(f"+recipe={recipe}", *small, *quiet)
    report = build(config, tmp_path / "run").run()
    assert report.ok
    assert report.findings == []
    assert len(report.history["loss"]) == 2
    assert all(np.isfinite(report.history["loss"]))
    assert np.isfinite(report.metrics["val/loss"])
    assert np.isfinite(report.metrics["test/loss"])


def test_there_are_the_recipes_that_the_docs_name():
    healthy = ["autoencoder", "char_transformer", "digits", "resnet18_cifar", "sequence_lstm", "tabular"]
    faults = ["dead_relu", "lr_too_high", "missing_zero_grad", "silent_broadcast", "vanishing_sigmoid"]
    assert sorted(RECIPES) == sorted(healthy + [f"broken/{name}" for name in ["healthy", *faults]])


def test_the_bare_command_is_the_recipe_digits():
    bare, named = configured(), configured("+recipe=digits")
    bare.run_dir = named.run_dir = None
    assert bare == named


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in OPTIMIZER_IS_THE_FAULT])
@pytest.mark.parametrize(("optimizer", "scheduler"), [("sgd", "cosine"), ("adamw", "step"), ("adam", "none")])
def test_optimizer_and_scheduler_swap_in_every_recipe(recipe, optimizer, scheduler):
    config = configured(f"+recipe={recipe}", f"optimizer={optimizer}", f"scheduler={scheduler}")
    assert config.scheduler_interval.value == {"cosine": "step", "step": "epoch", "none": "epoch"}[scheduler]
    assert (config.scheduler is None) == (scheduler == "none")


def test_the_number_of_classes_is_said_once():
    config = configured("+recipe=resnet18_cifar", "model.num_classes=100")
    assert config.metrics["accuracy"]["num_classes"] == 100


def test_cifar_spares_norms_and_biases_weight_decay(tmp_path, cifar10_in_small):
    config = configured("+recipe=resnet18_cifar", *cifar10_in_small, "loader.batch_size=4", "progress=false")
    trainer = build(config, tmp_path)
    decayed, spared = trainer.optimizer.param_groups
    assert decayed["weight_decay"] == 5e-4
    assert spared["weight_decay"] == 0
    assert all(parameter.dim() > 1 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in spared["params"])
    assert trainer.loss_fn.label_smoothing == 0.1
    picture, _ = next(iter(trainer.train_loader))
    assert picture.shape == (4, 3, 32, 32)
    assert picture.dtype == torch.float32
