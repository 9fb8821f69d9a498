"""The loop against the loop that a user would write: the same bits, and what else it promises."""

import copy
import json
import warnings

import pytest
import torch
from programs import SmallCNN, blobs, equal, fingerprint, hand_written, loader_of, mlp, pictures
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

from safe_trainer import SafeTrainer
from safe_trainer.config import ConfigError

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


def twins(make_model):
    torch.manual_seed(7)
    model = make_model()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [mlp, SmallCNN])
def test_it_equals_a_hand_written_loop_bit_for_bit(make, optimizer, clip_norm, run_config):
    data = pictures() if make is SmallCNN else blobs()
    ours, theirs = twins(make)
    ours_optimizer, theirs_optimizer = (OPTIMIZERS[optimizer](m.parameters()) for m in (ours, theirs))
    torch.manual_seed(3)
    losses = hand_written(theirs, nn.CrossEntropyLoss(), theirs_optimizer, loader_of(data), 2, clip_norm)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    trainer = SafeTrainer(
        ours,
        nn.CrossEntropyLoss(),
        ours_optimizer,
        loader_of(data),
        config=run_config(max_epochs=2, clip_norm=clip_norm),
    )
    report = trainer.run()
    assert report.ok
    assert report.findings == []
    assert report.history["loss"] == losses
    assert equal(fingerprint(ours, ours_optimizer), fingerprint(theirs, theirs_optimizer))
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedulers_advance_as_by_hand(interval, run_config):
    ours, theirs = twins(mlp)
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in (ours, theirs)]
    make = (lambda o: OneCycleLR(o, 0.1, total_steps=12)) if interval == "step" else (lambda o: ExponentialLR(o, 0.5))
    mine, other = map(make, optimizers)
    torch.manual_seed(3)
    hand_written(theirs, nn.CrossEntropyLoss(), optimizers[1], loader_of(blobs()), 2, None, other, interval)
    torch.manual_seed(3)
    trainer = SafeTrainer(
        ours,
        nn.CrossEntropyLoss(),
        optimizers[0],
        loader_of(blobs()),
        scheduler=mine,
        config=run_config(max_epochs=2, scheduler_interval=interval),
    )
    report = trainer.run()
    assert equal(fingerprint(ours, optimizers[0]), fingerprint(theirs, optimizers[1]))
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    assert len(report.history["lr"]) == 12


def test_evaluation_disturbs_nothing(run_config):
    ends = []
    for val_loader in (None, loader_of(blobs(seed=1), shuffle=True)):
        model, _ = twins(mlp)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        torch.manual_seed(3)
        trainer = SafeTrainer(
            model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), val_loader, config=run_config(max_epochs=3)
        )
        report = trainer.run()
        assert ("val/loss" in report.metrics) == (val_loader is not None)
        ends.append((fingerprint(model, optimizer), torch.get_rng_state()))
    assert equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def test_accumulation_weighs_batches_by_samples_also_in_the_last_partial_group(run_config):
    """Batches of 16, 16, 16, 16, 8 in groups of two: each update equals one over the group as one batch."""
    data = blobs(72)
    torch.manual_seed(7)
    ours = nn.Linear(8, 3)
    theirs = copy.deepcopy(ours)
    mine, other = torch.optim.SGD(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    SafeTrainer(
        ours,
        nn.CrossEntropyLoss(),
        mine,
        loader_of(data, shuffle=False),
        config=run_config(max_epochs=1, accumulate=2),
    ).run()
    hand_written(theirs, nn.CrossEntropyLoss(), other, loader_of(data, batch_size=32, shuffle=False), 1)
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight, theirs.get_parameter(name), rtol=1e-5, atol=1e-6)


def test_a_group_may_mix_batches_of_unequal_size(run_config):
    data = blobs(40)
    batches = [tuple(t[a:b] for t in data.tensors) for a, b in ((0, 24), (24, 32), (32, 40))]
    torch.manual_seed(7)
    ours = nn.Linear(8, 3)
    theirs = copy.deepcopy(ours)
    mine, other = torch.optim.SGD(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    SafeTrainer(ours, nn.CrossEntropyLoss(), mine, batches, config=run_config(max_epochs=1, accumulate=3)).run()
    hand_written(theirs, nn.CrossEntropyLoss(), other, [data.tensors], 1)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)


def test_max_steps_wins_over_max_epochs(run_config):
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    config = run_config(max_epochs=1, max_steps=15)
    report = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=config).run()
    assert report.history["step"] == list(range(1, 16))
    assert report.history["epoch"][-1] == 2


def test_limits_cut_epochs_and_evaluations(run_config):
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    config = run_config(max_epochs=2, limit_train_batches=3, limit_val_batches=1)
    data = loader_of(blobs())
    report = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, data, data, config=config).run()
    assert len(report.history["loss"]) == 6
    assert report.metrics["val/loss"] > 0


def test_ema_is_the_running_average_and_is_what_gets_evaluated(run_config):
    data = blobs()
    torch.manual_seed(7)
    model = nn.Linear(8, 3)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = run_config(max_steps=6, ema_decay=0.9)
    trainer = SafeTrainer(
        model, nn.CrossEntropyLoss(), optimizer, loader_of(data, shuffle=False), loader_of(data), config=config
    )
    report = trainer.run()
    twin = copy.deepcopy(average)
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.5)
    for step, (inputs, targets) in enumerate(loader_of(data, shuffle=False)):
        by_hand.zero_grad()
        nn.functional.cross_entropy(twin(inputs), targets).backward()
        by_hand.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), twin.parameters(), strict=True):
                kept.lerp_(new, 1 - min(0.9, (2 + step) / (11 + step)))
    torch.testing.assert_close(trainer.average.module.weight, average.weight)
    expected = nn.functional.cross_entropy(average(data.tensors[0]), data.tensors[1])
    assert report.metrics["val/loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns(precision, run_config):
    model = mlp(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = loader_of(blobs())
    config = run_config(max_epochs=5, precision=precision)
    report = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, data, data, config=config).run()
    assert report.ok
    assert report.metrics["val/loss"] < 0.5 * report.history["loss"][0]
    assert next(model.parameters()).dtype is torch.float32


def test_early_stopping_ends_a_run_that_gets_no_better(run_config):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = run_config(max_epochs=50, **{"early_stopping.patience": 2, "early_stopping.min_delta": 1e3})
    data = loader_of(blobs())
    report = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, data, data, config=config).run()
    assert report.history["epoch"][-1] == 2


def test_early_stopping_on_an_unknown_metric_names_the_known_ones(run_config):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = run_config(max_epochs=2, **{"early_stopping.patience": 2, "early_stopping.metric": "val/f1"})
    data = loader_of(blobs())
    with pytest.raises(ConfigError, match=r"val/f1.*there are: val/loss"):
        SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, data, data, config=config).run()


def test_reduce_on_plateau_is_given_the_loss_of_the_evaluation(run_config):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1e3, threshold_mode="abs")
    data = loader_of(blobs())
    config = run_config(max_epochs=3)
    SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, data, data, scheduler, config=config).run()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_step_of_the_users_own_is_the_whole_step(run_config):
    ours, theirs = twins(mlp)
    mine, other = (OPTIMIZERS["adamw"](m.parameters()) for m in (ours, theirs))

    def train_step(model, loss_fn, optimizer, batch):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(3)
    losses = hand_written(theirs, nn.CrossEntropyLoss(), other, loader_of(blobs()), 2)
    torch.manual_seed(3)
    trainer = SafeTrainer(
        ours,
        nn.CrossEntropyLoss(),
        mine,
        loader_of(blobs()),
        train_step=train_step,
        eval_step=lambda model, loss_fn, loader: 0.25,
        val_loader=loader_of(blobs()),
        config=run_config(max_epochs=2),
    )
    report = trainer.run()
    assert report.history["loss"] == losses
    assert report.metrics["val/loss"] == 0.25
    assert equal(fingerprint(ours, mine), fingerprint(theirs, other))


def test_a_model_in_eval_is_put_into_training_mode_and_an_info_says_so(run_config):
    model = mlp().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = run_config(max_steps=2)
    report = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=config).run()
    assert model.training
    assert [(f.fault, f.severity.value) for f in report.findings] == [("model.stuck_in_eval", "info")]


def test_a_part_in_eval_stays_there_also_after_an_evaluation(run_config):
    model = mlp()
    model[1].eval()
    running = model[1].running_mean.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = loader_of(blobs())
    report = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, data, data, config=run_config(max_epochs=2)).run()
    assert report.findings == []
    assert model.training
    assert not model[1].training
    assert torch.equal(model[1].running_mean, running)


def test_a_seed_makes_two_runs_equal_and_none_touches_no_generator(run_config, tmp_path):
    ends = []
    for attempt in range(2):
        model, _ = twins(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(attempt)
        config = run_config(max_epochs=2, seed=5, run_dir=str(tmp_path / str(attempt)))
        SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=config).run()
        ends.append(fingerprint(model, optimizer))
    assert equal(*ends)


def test_an_exception_of_the_user_says_step_module_and_batch(run_config):
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, inputs):
            self.calls += 1
            if self.calls == 3:
                raise KeyError("the user's own")
            return inputs

    model = nn.Sequential(nn.Linear(8, 3), Breaks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=run_config(max_epochs=1))
    with pytest.raises(KeyError) as caught:
        trainer.run()
    (note,) = caught.value.__notes__
    assert note == "raised in training step 3, in module 1; the batch was list of 2: ((16, 8) float32, (16,) int64)"


@pytest.mark.parametrize(
    ("loader", "words"),
    [([], "at least one batch"), (iter([(torch.zeros(2, 8), torch.zeros(2, dtype=torch.long))]), "read only once")],
)
def test_a_loader_that_runs_dry_is_explained(loader, words, run_config):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=words):
        SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader, config=run_config(max_epochs=2)).run()


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"one element \(got a tensor of shape \(16,\)\)"),
        (lambda output, target: 3.0, r"one element \(got float\)"),
    ],
)
def test_a_loss_that_is_not_one_number_is_explained(loss_fn, words, run_config):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=words):
        SafeTrainer(model, loss_fn, optimizer, loader_of(blobs()), config=run_config(max_epochs=1)).run()


def test_the_log_has_a_row_each_log_every_steps_and_each_evaluation(run_config, tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = loader_of(blobs())
    config = run_config(max_epochs=2, log_every=4)
    report = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, data, data, config=config).run()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 6, 8, 12, 12]
    assert rows[0]["train/loss"] == pytest.approx(sum(report.history["loss"][:4]) / 4)
    assert "val/loss" in rows[1]
    assert (tmp_path / "run" / "config.yaml").exists()
    assert (tmp_path / "run" / "environment.json").exists()
    assert list((tmp_path / "run" / "checkpoints").glob("*.pt"))


def test_no_hook_stays_behind(run_config):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=run_config(max_epochs=1)).run()
    assert not optimizer._optimizer_step_pre_hooks
    assert all(not m._forward_hooks and not m._forward_pre_hooks and not m._backward_hooks for m in model.modules())


def test_what_does_not_fit_together_is_told_at_once(run_config):
    model = mlp()
    with pytest.raises(ConfigError) as caught:
        SafeTrainer(
            model,
            None,
            torch.optim.LBFGS(model.parameters()),
            3,
            other_optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
            config={"optimizer": {"_target_": "torch.optim.SGD"}},
        )
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    for words in ("closure", "loss_fn must be given", "train_loader", "other_optimizers", "optimizer must not be in"):
        assert words in text


def test_a_task_without_a_prediction_is_told_what_the_metrics_need(run_config):
    from torchmetrics.classification import MulticlassAccuracy

    def task(model, batch):
        return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1])}

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = loader_of(blobs())
    metrics = {"accuracy": MulticlassAccuracy(3)}
    trainer = SafeTrainer(
        model, None, optimizer, data, data, task=task, metrics=metrics, config=run_config(max_epochs=1)
    )
    with pytest.raises(TypeError, match="prediction and target when there are metrics"):
        trainer.run()


def test_a_plateau_without_validation_looks_at_the_mean_of_the_epoch(run_config):
    """Not at whatever was read from the device last: rows and checkpoints must not steer the rate."""
    ends = []
    for log_every in (1, 7, 1000):
        torch.manual_seed(0)
        model = mlp(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        config = run_config(max_epochs=6, log_every=log_every)
        trainer = SafeTrainer(
            model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), scheduler=plateau, config=config
        )
        report = trainer.run()
        losses = torch.tensor(report.history["loss"]).view(6, -1).mean(1)
        assert plateau.best == pytest.approx(min(losses).item(), rel=0.25)
        ends.append((plateau.state_dict(), [group["lr"] for group in optimizer.param_groups]))
    assert ends[0] == ends[1] == ends[2]
    assert ends[0][1][0] < 0.01


def test_figures_are_those_of_their_own_step(run_config):
    """A weight that a task reports, and a rate that is a tensor, have moved on when they are read."""
    model = nn.Linear(8, 3)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    weights = []

    def task(model, batch):
        weights.append(model.bias[0].item())
        return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1]), "weight": model.bias[0]}

    config = run_config(max_steps=3, log_every=100, scheduler_interval="step")
    trainer = SafeTrainer(model, None, optimizer, loader_of(blobs()), scheduler=scheduler, config=config, task=task)
    trainer.loop_history = trainer.run().history
    assert trainer.loop_history["lr"] == pytest.approx([0.1, 0.05, 0.025])
    assert trainer.loop_history["weight"] == pytest.approx(weights[: len(set(weights))][:3])


@pytest.mark.parametrize("name", ["step", "epoch", "lr", "grad_norm"])
def test_a_figure_must_not_take_a_name_of_the_loops_own(name, run_config):
    model = nn.Linear(8, 3)

    def task(model, batch):
        return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1]), name: torch.tensor(1.0)}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"must not be called epoch, grad_norm, lr, step.*got {name}"):
        SafeTrainer(model, None, optimizer, loader_of(blobs()), config=run_config(max_steps=3), task=task).run()


@pytest.mark.parametrize("max_steps", [1, 12])
def test_a_run_shorter_than_its_group_of_batches_steps_once_and_is_healthy(max_steps, run_config):
    model = mlp()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = run_config(max_steps=max_steps, accumulate=16)
    report = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=config).run()
    assert report.ok
    assert not report.findings
    assert not equal(before, list(model.parameters()))


@pytest.mark.parametrize("count", [-1, 0.5, float("nan"), "many"])
def test_a_count_that_cannot_be_one_is_told(count, run_config):
    model = nn.Linear(8, 3)

    def task(model, batch):
        return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1]), "count": count}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"count.*must be whole and not negative"):
        SafeTrainer(
            model, None, optimizer, loader_of(blobs()), config=run_config(max_steps=4, accumulate=2), task=task
        ).run()


def test_without_evaluation_the_test_data_are_left_alone_too(run_config):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SafeTrainer(
        model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), loader_of(blobs()), test_loader=loader_of(blobs()),
        config=run_config(max_steps=2, limit_val_batches=0),
    )  # fmt: skip
    assert trainer.run().metrics == {}


def test_an_evaluation_that_fails_says_where_and_loses_nothing(run_config, tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held_out = [(torch.ones(4, 8), torch.arange(4) % 3), (torch.ones(4, 8), torch.full((4,), 7))]
    config = run_config(max_epochs=1)
    with pytest.raises(IndexError) as caught:
        SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), held_out, config=config).run()
    assert any("in batch 2 of the val data, tuple of 2" in note for note in caught.value.__notes__)
    trainer = SafeTrainer(
        model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), held_out[:1], config={**config, "resume": "last"}
    )
    report = trainer.run()
    assert len(report.history["step"]) == len(loader_of(blobs()))  # the epoch was not trained again
    assert "val/loss" in report.metrics


def test_a_metric_of_several_numbers_is_told(run_config):
    from torchmetrics.classification import MulticlassRecall

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"metric 'recall' must give one number.*average=macro"):
        SafeTrainer(
            model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), loader_of(blobs()),
            config=run_config(max_steps=2), metrics={"recall": MulticlassRecall(num_classes=3, average=None)},
        ).run()  # fmt: skip


def odd_models():
    def old_weight_norm():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 3))

    def lazy():
        return nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(3))

    def with_indices():
        model = mlp()
        model.register_parameter("order", nn.Parameter(torch.arange(3), requires_grad=False))
        return model

    return {"old_weight_norm": old_weight_norm, "lazy": lazy, "with_indices": with_indices}


@pytest.mark.parametrize("kind", odd_models())
def test_an_average_of_odd_models(kind, run_config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that lazy modules are new
        model = odd_models()[kind]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = SafeTrainer(
            model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), loader_of(blobs()),
            config=run_config(max_epochs=2, ema_decay=0.9),
        )  # fmt: skip
        report = trainer.run()
    assert report.ok
    ours, theirs = trainer.average.module.state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    assert not all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(ours["order"], theirs["order"]) if kind == "with_indices" else True
