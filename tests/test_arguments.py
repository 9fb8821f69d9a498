"""Wrong arguments of SafeTrainer are told at once and before anything is made; unusual good ones are taken."""

import functools

import pytest
import torch
import torchmetrics
from programs import blobs, loader_of, mlp
from torch import nn

from safe_trainer import SafeTrainer
from safe_trainer.config import ConfigError
from safe_trainer.loggers import JsonLines

ACCURACY = torchmetrics.classification.MulticlassAccuracy(num_classes=3)


def trainer(config=None, **arguments):
    model = mlp()
    given = {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train_loader": loader_of(blobs()),
        **arguments,
    }
    return SafeTrainer(**given, config={"progress": False} if config is None else config)


def own_step(model, loss_fn, optimizer, batch):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


WRONG = {
    "model": (mlp, "model must be a torch.nn.Module"),
    "optimizer": ("adam", "optimizer must be a torch.optim.Optimizer (got 'adam')"),
    "loss_fn": (5, "loss_fn must be a callable (output, target) -> loss (got 5)"),
    "loss_class": (nn.CrossEntropyLoss, "loss_fn must be a callable"),
    "scheduler": ("cosine", "scheduler must be a learning-rate scheduler"),
    "train_step": (5, "train_step must be a callable"),
    "eval_step": (5, "eval_step must be a callable"),
    "task": (5, "task must be a callable"),
    "other_optimizers": (torch.optim.SGD(mlp().parameters(), lr=0.1), "write [optimizer]"),
    "train_loader": (5, "train_loader must be an iterable of batches (got 5)"),
    "val_loader": (5, "val_loader must be an iterable of batches (got 5)"),
    "empty_val_loader": ([], "the val loader must give at least one batch"),
    "val_iterator": (iter(loader_of(blobs())), "an iterator, which can be read once"),
    "empty_test_loader": ([], "the test loader must give at least one batch"),
    "metrics": (ACCURACY, "write {'name': metric}"),
    "metrics_function": ({"accuracy": lambda a, b: 1}, "metrics must hold torchmetrics metrics"),
    "metrics_loss": ({"loss": ACCURACY}, "must not be called loss"),
    "loggers": ([object()], "loggers must hold sinks with the methods log, text"),
    "loggers_one": (JsonLines("."), "loggers must be a list of sinks"),
}
ARGUMENT = {
    "loss_class": "loss_fn", "empty_val_loader": "val_loader", "val_iterator": "val_loader",
    "empty_test_loader": "test_loader", "metrics_function": "metrics", "metrics_loss": "metrics",
    "loggers_one": "loggers",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_sentence_before_anything_is_made(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, sentence = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        trainer(**{ARGUMENT.get(name, name): value})
    assert any(sentence in problem for problem in caught.value.problems)
    assert list(tmp_path.iterdir()) == []


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        trainer(loss_fn=5, scheduler="x", val_loader=5, loggers=[1], train_loader=None)
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize("config", ["x", 5, [1]])
def test_a_configuration_is_a_mapping(config):
    with pytest.raises(ConfigError, match="config must be a mapping"):
        trainer(config)


def test_what_needs_evaluations_is_refused_without():
    with pytest.raises(ConfigError, match=r"early_stopping.patience needs a val_loader"):
        trainer({"early_stopping.patience": 2})
    with pytest.raises(ConfigError, match="test_loader needs a loss_fn or a task"):
        trainer(loss_fn=None, train_step=own_step, test_loader=loader_of(blobs()))


class Callable:
    def __call__(self, output, target):
        return nn.functional.cross_entropy(output, target)


GOOD = {
    "partial": {"loss_fn": functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)},
    "object": {"loss_fn": Callable()},
    "bound": {"loss_fn": Callable().__call__},
    "collection": {"metrics": torchmetrics.MetricCollection([ACCURACY]), "val_loader": loader_of(blobs())},
    "getitem": {"train_loader": type("Batches", (), {"__getitem__": lambda self, k: list(loader_of(blobs()))[k]})()},
    "iterator_for_training": {"train_loader": iter(loader_of(blobs()))},
    "empty_but_not_evaluated": {"val_loader": [], "config": {"limit_val_batches": 0}},
}


@pytest.mark.parametrize("name", GOOD)
def test_unusual_good_arguments_are_taken(name, run_config):
    given = dict(GOOD[name])
    options = given.pop("config", {})
    assert trainer(run_config(max_epochs=1, max_steps=2, **options), **given).run().ok
