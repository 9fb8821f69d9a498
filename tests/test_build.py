"""What cannot be found, does not bind or does not go together is said before anything is built."""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import nn

from safe_trainer import build
from safe_trainer.build import fits, locate, scheduler_intervals, target_problems
from safe_trainer.config import ConfigError, parse

LINEAR = {"_target_": "torch.nn.Linear", "in_features": 8, "out_features": 3}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}
DATA = {"_target_": "safe_trainer.recipes.digits.digits"}
CROSS_ENTROPY = {"_target_": "torch.nn.CrossEntropyLoss"}
MSE = {"_target_": "torch.nn.MSELoss"}
ACCURACY = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 3}
MEAN = {"_target_": "torchmetrics.MeanSquaredError"}
ONE_CYCLE = {"_target_": "safe_trainer.recipes.schedules.one_cycle", "max_lr": 0.1, "total_steps": 10}
PLATEAU = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}
CNN = {"_target_": "safe_trainer.recipes.models.digits_cnn", "num_classes": 3}
TASKS = "safe_trainer.recipes.tasks."


def problems(**groups):
    """What is wrong with a sound configuration that was changed by `groups`; device=cpu keeps the machine out of it."""
    base = {"model": LINEAR, "data": DATA, "loss": CROSS_ENTROPY, "optimizer": SGD, "device": "cpu"}
    return target_problems(parse(base | groups))


class Model(nn.Module):
    def __init__(self, width: int, scale: float = 1.0, kind: Literal["a", "b"] = "a", names: list[str] | None = None):
        super().__init__()


class Task:
    def __init__(self, loss_fn, weight: float = 1.0):
        pass

    def __call__(self, model, batch):
        return {}


@dataclass
class Fields:
    width: int


def takes_all(first: int, **options):
    return first


# --- locate ----------------------------------------------------------------------------------------------------------


def test_a_class_a_function_and_a_nested_name_are_found():
    assert locate("torch.nn.Linear") is nn.Linear
    assert locate("torch.nn.functional.relu") is torch.nn.functional.relu
    assert locate("torch.nn.Linear.forward") is nn.Linear.forward


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Linear", "must be a dotted name"),
        ("torch..Linear", "must be a dotted name"),
        ("torch.nn.Linaer", "torch.nn has no 'Linaer' .*did you mean Linear"),
        ("nowhere.Model", "there is no module 'nowhere'"),
        ("torch.nn.functional", "must name something that can be called .* a module"),
        ("torch.pi", "can be called .* a float"),
    ],
)
def test_a_name_that_leads_nowhere_is_told(name, words):
    with pytest.raises(LookupError, match=words):
        locate(name)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import a_module_that_is_missing", "needs the module a_module_that_is_missing"),
        ("raise RuntimeError('not today')", "raised RuntimeError: not today"),
        ("def broken(:", "raised SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(source, words, tmp_path, monkeypatch):
    name = f"broken_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LookupError, match=words):
        locate(f"{name}.Model")


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, int, True),
        (1.5, int, False),
        (True, int, False),
        (1, float, True),
        (True, float, False),
        ("1", float, False),
        (True, bool, True),
        (1, bool, False),
        ("a", str, True),
        (3, str, False),
        (None, int, False),
        (None, int | None, True),
        ("x", int | None, False),
        ([1, 2], tuple[int, int], True),
        (3, list[int], False),
        (3, int | tuple[int, int], True),
        ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"], False),
        (1.0, torch.Tensor, False),
        (1.0, float | torch.Tensor, True),
        ("anything", object, True),
        ({"_target_": "torch.nn.ReLU"}, int, True),
    ],
)
def test_a_value_fits_an_annotation_or_does_not(value, hint, expected):
    assert fits(value, hint) is expected


@pytest.mark.parametrize(
    ("target", "node", "words"),
    [
        (Model, {"width": 3}, []),
        (Model, {}, ["model.width must be given: x.Name needs it"]),
        (Model, {"width": "3"}, ["model.width must be a whole number (got '3')"]),
        (
            Model,
            {"width": 3, "widht": 4},
            ["model.widht is not an argument of x.Name (got 4); did you mean model.width?"],
        ),
        (Model, {"width": 3, "kind": "c"}, ["model.kind must be one of a, b (got 'c')"]),
        (Model, {"width": 3, "names": 1}, ["model.names must be "]),
        (Model, {"_args_": [3]}, []),
        (Model, {"_partial_": True}, []),
        (Task, {}, []),  # loss_fn is given when it is built
        (Fields, {"width": 1.5}, ["model.width must be a whole number (got 1.5)"]),
        (takes_all, {"first": 1, "whatever": 2}, []),
        (takes_all, {"whatever": 2}, ["model.first must be given"]),
        (dict, {"anything": 1}, []),  # written in C: it cannot be known
    ],
)
def test_arguments_are_held_against_the_signature(target, node, words):
    found = build._argument_problems(target, "x.Name", node, "model", None)
    assert len(found) == len(words)
    assert all(text.startswith(start) for text, start in zip(found, words, strict=True))


def test_what_is_given_at_building_is_neither_asked_for_nor_suggested():
    assert build._argument_problems(torch.optim.SGD, "SGD", {"lr": 0.1}, "optimizer", "params") == []
    (sentence,) = build._argument_problems(torch.optim.SGD, "SGD", {"param": 1}, "optimizer", "params")
    assert "did you mean optimizer.params" not in sentence


def test_auto_stands_for_a_number_in_schedulers_only():
    assert build._argument_problems(takes_all, "f", {"first": "auto"}, "scheduler", None) == []
    assert build._argument_problems(takes_all, "f", {"first": "auto"}, "model", None)


def test_a_mistake_in_a_nested_target_is_told_with_its_place():
    nested = {
        "_target_": "torch.nn.Sequential",
        "_args_": [],
        "inner": {"_target_": "torch.nn.Linear", "in_features": 2},
    }
    assert any(text.startswith("model.inner.out_features must be given") for text in problems(model=nested))


# --- how often a scheduler is advanced -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps", "per_epoch", "expected"),
    [
        ({"scheduler_interval": "step"}, 30, 10, 30),
        ({"scheduler_interval": "step", "accumulate": 4}, 30, 10, 9),  # 3 groups an epoch, the last of two batches
        ({"scheduler_interval": "step", "accumulate": 4}, 25, 10, 8),  # and 2 in the half epoch
        ({"scheduler_interval": "epoch"}, 30, 10, 3),
        ({"scheduler_interval": "epoch"}, 31, 10, 4),
        ({"scheduler_interval": "epoch"}, 3, 10, 1),
    ],
)
def test_auto_counts_what_the_loop_will_do(options, steps, per_epoch, expected):
    assert scheduler_intervals(parse(options), steps, per_epoch) == expected


# --- what cannot work together ---------------------------------------------------------------------------------------


def test_a_sound_configuration_has_no_problems():
    assert problems() == []
    assert problems(metrics={"accuracy": ACCURACY}, scheduler=ONE_CYCLE, scheduler_interval="step", max_steps=10) == []


NONSENSE = {
    "plateau_each_step": ({"scheduler": PLATEAU, "scheduler_interval": "step"}, "scheduler_interval must be epoch"),
    "schedule_too_short": (
        {"scheduler": ONE_CYCLE, "scheduler_interval": "step", "max_steps": 11},
        "scheduler.total_steps must be at least the run's 11 optimizer steps",
    ),
    "schedule_too_short_in_epochs": (
        {"scheduler": ONE_CYCLE, "max_epochs": 11},
        "scheduler.total_steps must be at least max_epochs=11",
    ),
    "stopping_without_evaluation": (
        {"early_stopping.patience": 2, "limit_val_batches": 0},
        "limit_val_batches must not be 0",
    ),
    "unknown_figure": (
        {"early_stopping.patience": 2, "early_stopping.metric": "val/acuracy", "metrics": {"accuracy": ACCURACY}},
        "early_stopping.metric must be one of val/accuracy, val/loss",
    ),
    "unknown_figure_of_checkpoints": (
        {"checkpoint.metric": "val/accuracy"},
        "checkpoint.metric must be one of val/loss",
    ),
    "the_test_data_select_nothing": (
        {"checkpoint.metric": "test/loss"},
        "checkpoint.metric must be a figure of the validation data",
    ),
    "other_number_of_classes": (
        {"model": CNN, "metrics": {"accuracy": {**ACCURACY, "num_classes": 5}}},
        "metrics.accuracy.num_classes must be model.num_classes=3 (got 5)",
    ),
    "classes_counted_of_numbers": (
        {"loss": MSE, "metrics": {"accuracy": ACCURACY}},
        "metrics.accuracy must go with a loss over classes",
    ),
    "classes_counted_in_regression": (
        {"task": {"_target_": f"{TASKS}Regression"}, "metrics": {"accuracy": ACCURACY}},
        "metrics.accuracy must go with a loss over classes",
    ),
    "tokens_as_numbers": (
        {"loss": MSE, "task": {"_target_": f"{TASKS}NextToken"}},
        "loss must be one over classes",
    ),
    "closure": ({"optimizer": {"_target_": "torch.optim.LBFGS"}}, "optimizer must be one without a closure"),
    "momentum_that_is_not_there": (
        {"optimizer": {"_target_": "torch.optim.Adagrad"}, "scheduler": {**ONE_CYCLE, "cycle_momentum": True}},
        "scheduler: safe_trainer.recipes.schedules.one_cycle says: optimizer must support momentum",
    ),
    "task_without_loss": ({"loss": None, "task": {"_target_": "my_tasks.Task"}}, "loss must be given: my_tasks.Task"),
}


@pytest.fixture
def my_tasks(tmp_path, monkeypatch):
    """A module of a user's, with tasks of which nothing is known."""
    source = "class Task:\n    def __init__(self, loss_fn): pass\n    def __call__(self, model, batch): return {}\n"
    (tmp_path / "my_tasks.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_with_its_reason(case, my_tasks):
    options, words = NONSENSE[case]
    (sentence,) = problems(**options)
    assert sentence.startswith(words)


SENSE = {
    "plateau_each_epoch": {"scheduler": PLATEAU},
    "schedule_of_the_right_length": {"scheduler": ONE_CYCLE, "scheduler_interval": "step", "max_steps": 10},
    "schedule_with_groups": {"scheduler": ONE_CYCLE, "scheduler_interval": "step", "max_steps": 40, "accumulate": 4},
    "schedule_that_may_end_early": {
        "scheduler": ONE_CYCLE,
        "scheduler_interval": "step",
        "max_steps": 99,
        "early_stopping.patience": 3,
    },
    "schedule_without_end": {
        "scheduler": {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 10},
        "scheduler_interval": "step",
        "max_steps": 99,
    },
    "no_evaluation_without_patience": {"limit_val_batches": 0},
    "figure_of_a_metric": {"checkpoint.metric": "val/accuracy", "metrics": {"accuracy": ACCURACY}},
    "figure_of_a_task_of_ours": {
        "checkpoint.metric": "val/bits_per_token",
        "task": {"_target_": f"{TASKS}NextToken"},
    },
    "figure_of_a_task_of_theirs": {"checkpoint.metric": "val/class_loss", "task": {"_target_": "my_tasks.Task"}},
    "figure_of_a_metric_that_gives_several": {
        "checkpoint.metric": "val/classes_0",
        "metrics": {
            "classes": {"_target_": "torchmetrics.wrappers.ClasswiseWrapper", "metric": {**ACCURACY, "average": None}}
        },
    },
    "figure_that_is_not_looked_at": {"checkpoint.metric": "val/nothing", "checkpoint.keep_best": 0},
    "classes_of_an_unknown_model": {
        "model": {"_target_": "torch.nn.Linear", "in_features": 8, "out_features": 4},
        "metrics": {"accuracy": {**ACCURACY, "num_classes": 5}},
    },
    "classes_under_a_task_of_theirs": {
        "model": CNN,
        "task": {"_target_": "my_tasks.Task"},
        "metrics": {"accuracy": {**ACCURACY, "num_classes": 5}},
    },
    "numbers_measured_as_numbers": {"loss": MSE, "metrics": {"mean": MEAN}},
    "classes_of_a_task_of_theirs": {
        "loss": MSE,
        "task": {"_target_": "my_tasks.Task"},
        "metrics": {"accuracy": ACCURACY},
    },
    "probabilities_as_targets": {"metrics": {"mean": MEAN}},
    "a_task_with_a_loss_of_its_own": {"loss": None, "task": {"_target_": f"{TASKS}Classification"}},
}


@pytest.mark.parametrize("case", SENSE)
def test_what_could_work_is_not_refused(case, my_tasks):
    assert problems(**SENSE[case]) == []


@pytest.mark.parametrize(("classes", "refused"), [(5, True), (10, False), (12, False)])
def test_a_model_with_fewer_classes_than_the_data_is_refused(classes, refused, tmp_path):
    groups = {"model": {**CNN, "num_classes": classes}, "data": DATA, "loss": CROSS_ENTROPY, "optimizer": SGD}
    config = parse({**groups, "device": "cpu"})
    assert target_problems(config) == []
    if refused:
        with pytest.raises(
            ConfigError, match=r"model\.num_classes must be at least the 10 classes of the data \(got 5\)"
        ):
            build.build(config, tmp_path)
    else:
        build.build(config, tmp_path)


def test_all_that_is_wrong_is_told_at_once(my_tasks):
    found = problems(
        optimizer={**SGD, "lrr": 1},
        scheduler=PLATEAU,
        scheduler_interval="step",
        loss=MSE,
        metrics={"accuracy": ACCURACY},
        **{"checkpoint.metric": "val/none"},
    )
    assert len(found) == 4
