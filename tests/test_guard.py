"""The fuse: a non-finite step leaves no trace, the run does what the policy says, and the report names the place."""

import copy
import math

import pytest
import torch
from programs import SmallCNN, blobs, equal, fingerprint, hand_written, loader_of, mlp, pictures
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from safe_trainer import SafeTrainer, SafetyError
from safe_trainer.guard import Buffers, Guard, needs_closure, reachable_scalers
from safe_trainer.loop import Loop

OPTIMIZERS = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd_momentum_fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def batches(bad=(), count=6):
    """Batches of 16 points; those at the places in `bad` hold a NaN."""
    data = blobs(16 * count)
    made = []
    for place in range(count):
        inputs, targets = (tensor[16 * place : 16 * (place + 1)].clone() for tensor in data.tensors)
        made.append([inputs, targets])
    poisoned = [[inputs.clone(), targets] for inputs, targets in made]
    for place in bad:
        poisoned[place][0][3, 2] = math.nan
    return made, poisoned


def steady():
    """BatchNorm, but nothing random: a dropped batch must be as if it had never been."""
    torch.manual_seed(7)
    return mlp(dropout=0.0)


def own_step(model, loss_fn, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def train(data, config, make_optimizer=OPTIMIZERS["sgd_momentum"], **options):
    model = options.pop("model", None) or steady()
    optimizer = make_optimizer(model.parameters())
    scheduler = ExponentialLR(optimizer, 0.9)
    trainer = SafeTrainer(
        model,
        options.pop("loss_fn", nn.CrossEntropyLoss()),
        optimizer,
        data,
        scheduler=scheduler,
        config={"max_epochs": 1, "scheduler_interval": "step", "ema_decay": 0.9, **config},
        **options,
    )
    try:
        report = trainer.run()
    except SafetyError as error:
        report = error.report
    state = fingerprint(model, optimizer) + list(trainer.average.module.state_dict().values())
    return state, scheduler.state_dict(), report


@pytest.mark.parametrize("step", [None, own_step], ids=["own", "users"])
@pytest.mark.parametrize("bad", [(2,), (0,), (0, 1, 4), (5,)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_is_as_if_it_had_never_been(optimizer, bad, step, run_config, tmp_path):
    made, poisoned = batches(bad)
    clean = [batch for place, batch in enumerate(made) if place not in bad]
    config = run_config(**{"guard.nonfinite": "skip"})
    state, schedule, report = train(poisoned, config, OPTIMIZERS[optimizer], train_step=step)
    expected = train(clean, {**config, "run_dir": str(tmp_path / "clean")}, OPTIMIZERS[optimizer], train_step=step)
    assert equal(state, expected[0])
    assert schedule == expected[1]
    assert report.ok
    assert expected[2].findings == []
    (finding,) = report.findings
    assert (finding.fault, finding.severity.value, finding.where) == ("data.nonfinite", "warning", "batch[0]")
    assert finding.step == bad[0] + 1


@pytest.mark.parametrize("bad", [(2,), (0,), (0, 1, 4), (4, 5)], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd_momentum_fused", "adamw_fused"])
def test_a_flag_that_is_read_a_step_late_leaves_no_trace_either(optimizer, bad, run_config, tmp_path, monkeypatch):
    """On a GPU the device leaves the step out; a fused optimizer does the same on a CPU when it is told to."""
    monkeypatch.setattr("safe_trainer.loop.reads_late", lambda *_: True)
    made, poisoned = batches(bad)
    clean = [batch for place, batch in enumerate(made) if place not in bad]
    config = run_config(**{"guard.nonfinite": "skip"})
    state, schedule, report = train(poisoned, config, OPTIMIZERS[optimizer])
    expected = train(clean, {**config, "run_dir": str(tmp_path / "clean")}, OPTIMIZERS[optimizer])
    assert equal(state, expected[0])
    assert schedule == expected[1]
    assert [finding.fault for finding in report.findings] == ["data.nonfinite"]


def test_late_flags_and_dropout_end_in_the_same_bits(run_config, tmp_path, monkeypatch):
    ends = []
    for late in (False, True):
        monkeypatch.setattr("safe_trainer.loop.reads_late", lambda *_, late=late: late)
        torch.manual_seed(7)
        model = mlp(dropout=0.3)
        torch.manual_seed(1)
        config = run_config(run_dir=str(tmp_path / str(late)), **{"guard.nonfinite": "skip"})
        state, _, _ = train(batches((1, 2))[1], config, OPTIMIZERS["adamw_fused"], model=model)
        ends.append([*state, torch.get_rng_state()])
    assert equal(*ends)


@pytest.mark.parametrize("step", [None, own_step], ids=["own", "users"])
def test_stop_ends_the_run_before_the_weights_are_hit(step, run_config):
    model = steady()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    made, poisoned = batches((3,))
    twin = copy.deepcopy(model)
    hand_written(twin, nn.CrossEntropyLoss(), OPTIMIZERS["adam"](twin.parameters()), made[:3], epochs=1)
    trainer = SafeTrainer(
        model, nn.CrossEntropyLoss(), optimizer, poisoned, train_step=step, config=run_config(max_epochs=1)
    )
    with pytest.raises(SafetyError) as caught:
        trainer.run()
    assert equal(fingerprint(model), fingerprint(twin))
    (finding,) = caught.value.report.findings
    assert (finding.fault, finding.severity.value, finding.step) == ("data.nonfinite", "error", 4)
    assert len(caught.value.report.history["loss"]) == 4
    assert "batch[0]" in str(caught.value)


def test_report_never_applies_the_step_and_goes_on(run_config, tmp_path):
    made, poisoned = batches((1, 2, 3, 4))
    clean = [made[0], made[5]]
    state, _, report = train(poisoned, run_config(on_fault="report"))
    expected, _, _ = train(clean, run_config(run_dir=str(tmp_path / "clean")))
    assert equal(state, expected)
    assert not report.ok
    (finding,) = report.findings
    assert "4 steps in all" in finding.evidence
    assert len(list((tmp_path / "run" / "nonfinite").glob("*.pt"))) == 3  # the first three are replayed and kept


def test_too_many_in_a_row_end_the_run_with_its_report(run_config):
    _, poisoned = batches(range(6))
    _, _, report = train(poisoned, run_config(on_fault="report", **{"guard.max_skips": 4}))
    assert len(report.history["loss"]) == 4
    assert not report.ok
    _, _, report = train(poisoned, run_config(**{"guard.nonfinite": "skip", "guard.max_skips": 4}))
    assert [finding.severity.value for finding in report.findings] == ["error"]


class LogOfRelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        nn.init.constant_(self.layer.bias, -100.0)

    def forward(self, inputs):
        return torch.log(torch.relu(self.layer(inputs)))  # the line that the report names


class RootInBackward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, inputs):
        return self.layer(inputs).abs().sqrt()


@pytest.mark.parametrize("step", [None, own_step], ids=["own", "users"])
@pytest.mark.parametrize(
    ("model", "fault", "words"),
    [
        (LogOfRelu, "loss.log_of_zero", "aten.log gave -inf in 48 of 48 elements at test_guard.py:"),
        (RootInBackward, "gradient.nonfinite", "(backward) gave"),
    ],
)
def test_the_first_operation_and_its_line_are_named(model, fault, words, step, run_config):
    made, _ = batches()
    torch.manual_seed(0)
    _, _, report = train(made, run_config(), model=model(), train_step=step)
    (finding,) = report.findings
    assert finding.fault == fault
    assert words in finding.evidence
    assert finding.source.startswith("test_guard.py:")
    assert finding.remedy


def test_rollback_goes_back_lowers_the_rate_and_goes_on(run_config):
    made, poisoned = batches((3,), count=8)
    config = run_config(**{"guard.nonfinite": "rollback", "guard.snapshot_every": 2, "guard.rollback_lr_factor": 0.1})
    model = steady()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    report = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, poisoned, config={**config, "max_epochs": 1}).run()
    assert report.ok
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    # by hand: step 3 confirms what was kept after step 2; step 4 blows; go back to it, then 5 to 8 at the lower rate
    twin = steady()
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    hand_written(twin, nn.CrossEntropyLoss(), by_hand, made[:2], epochs=1)
    by_hand.param_groups[0]["lr"] = 0.005
    hand_written(twin, nn.CrossEntropyLoss(), by_hand, made[4:], epochs=1)
    assert equal(fingerprint(model, optimizer), fingerprint(twin, by_hand))


def test_rollbacks_are_bounded(run_config):
    _, poisoned = batches((2, 3, 4, 5), count=8)
    config = {"guard.nonfinite": "rollback", "guard.snapshot_every": 1, "guard.max_rollbacks": 2}
    _, _, report = train(poisoned, run_config(**config))
    assert not report.ok
    assert len(report.history["loss"]) == 5


def test_accumulation_drops_the_group_of_the_bad_batch(run_config, tmp_path):
    """Groups of two; the second batch is bad: the group starts again with the third."""
    made, poisoned = batches((1,), count=6)
    config = {"guard.nonfinite": "skip", "accumulate": 2}
    state, _, report = train(poisoned, run_config(**config))
    model = steady()
    expected, _, _ = train(made[2:], run_config(run_dir=str(tmp_path / "clean"), accumulate=2), model=model)
    weights = [t for t in state if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
    assert report.ok
    assert all(torch.isfinite(t).all() for t in weights)
    assert len(state) == len(expected)
    # the weights saw the groups (3, 4) and (5, 6) only; BatchNorm's statistics have seen the good first batch too
    learned = dict(steady().named_parameters())
    start = len(learned)
    for got, wanted in zip(state[:2], expected[:2], strict=True):
        torch.testing.assert_close(got, wanted)
    assert start


def test_an_overflow_of_half_precision_under_a_scaler_is_normal_also_in_a_window(run_config):
    model = mlp(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = run_config(max_epochs=2, precision="fp16", anomaly_detection=True, sample_rate=1)
    trainer = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=config)
    trainer.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = trainer.precision.scaler.get_scale()
    report = trainer.run()
    assert trainer.precision.scaler.get_scale() < before
    assert report.findings == []
    assert trainer.loop.position.updates < len(report.history["loss"])


def test_a_scale_that_falls_to_its_floor_is_a_fault(run_config):
    class Huge(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.inf

    model = nn.Sequential(nn.Linear(8, 3))
    model[0].register_forward_hook(lambda module, args, output: Huge.apply(output))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = run_config(max_epochs=20, precision="fp16")
    with pytest.raises(SafetyError) as caught:
        SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), config=config).run()
    (finding,) = caught.value.report.findings
    assert finding.fault == "precision.overflow"


def test_anomaly_modes_own_error_is_a_trip_like_any_other(run_config):
    made, _ = batches()
    config = run_config(anomaly_detection=True, sample_rate=1, on_fault="report")
    _, _, report = train(made, config, model=RootInBackward())
    (finding,) = report.findings
    assert finding.fault == "gradient.nonfinite"
    assert not torch.is_anomaly_enabled()


def test_several_optimizers_leave_no_half_step(run_config):
    """The first has moved before the second trips: both are put back."""
    model = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})
    first = torch.optim.Adam(model["a"].parameters(), lr=0.1)
    second = torch.optim.Adam(model["b"].parameters(), lr=0.1)
    bad = {2}
    calls = []

    def step(model, loss_fn, optimizer, batch):
        calls.append(1)
        for part, opt in (("a", first), ("b", second)):
            opt.zero_grad()
            loss = loss_fn(model[part](batch[0]), batch[1])
            if part == "b" and (len(calls) - 1 in bad or len(calls) - 2 in bad):  # the replay is a call too
                loss = loss * math.nan
            loss.backward()
            opt.step()
        return loss

    made, _ = batches()
    trainer = SafeTrainer(
        model,
        nn.CrossEntropyLoss(),
        first,
        made[:3],
        train_step=step,
        other_optimizers=[second],
        config=run_config(max_epochs=1, on_fault="report"),
    )
    before = []
    passed = trainer_snapshots(before, model, first, second)
    trainer.run()
    assert equal(passed[1], fingerprint(model, first, second))


def trainer_snapshots(kept, model, *optimizers):
    """Fingerprints after each call of the last optimizer's step."""
    optimizers[-1].register_step_post_hook(lambda *_: kept.append(fingerprint(model, *optimizers)))
    return kept


def test_lbfgs_in_a_step_of_the_users_own_is_undone_too(run_config):
    model = nn.Linear(8, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def step(model, loss_fn, optimizer, batch):
        def closure():
            optimizer.zero_grad()
            loss = loss_fn(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    _, poisoned = batches((2,), count=3)
    trainer = SafeTrainer(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        poisoned,
        train_step=step,
        config=run_config(max_epochs=1, on_fault="report"),
    )
    report = trainer.run()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert [finding.fault for finding in report.findings] == ["data.nonfinite"]


def test_a_norm_that_overflows_with_finite_gradients_is_no_trip():
    model = nn.Linear(2, 1)
    guard = Guard(SafeTrainerConfig().guard, model, [torch.optim.SGD(model.parameters(), lr=1.0)])
    gradients = [torch.full((2, 2), 1e30)]
    norm = torch.nn.utils.get_total_norm(gradients)
    assert math.isinf(norm)
    assert guard.holds(torch.tensor(1.0), norm, gradients)
    assert not guard.holds(torch.tensor(1.0), norm, [torch.tensor([math.inf])])
    assert not guard.holds(torch.tensor(math.inf), torch.tensor(1.0), gradients)


def SafeTrainerConfig():
    from safe_trainer.config import Config

    return Config()


def test_buffers_come_back_also_when_a_forward_replaces_them():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

    model = Counter()
    buffers = Buffers(model)
    buffers.take()
    model.seen = model.seen + 5
    buffers.restore()
    assert model.seen.tolist() == [0, 0, 0]
    model.seen += 1
    buffers.restore()
    assert model.seen.tolist() == [0, 0, 0]


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw_fused", "adam"])
@pytest.mark.parametrize("make", [SmallCNN, mlp])
def test_guard_and_windows_touch_nothing_on_a_healthy_run(make, optimizer, run_config, tmp_path):
    data = pictures() if make is SmallCNN else blobs()
    ends = []
    for number, options in enumerate(
        (
            {"guard.enabled": False},
            {},
            {"anomaly_detection": True, "sample_rate": 1},
            {"anomaly_detection": True, "sample_rate": 5},
            {"guard.nonfinite": "rollback", "guard.snapshot_every": 2},
        )
    ):
        torch.manual_seed(7)
        model = make()
        chosen = OPTIMIZERS[optimizer](model.parameters())
        torch.manual_seed(3)
        config = run_config(max_steps=50, run_dir=str(tmp_path / str(number)), **options)
        report = SafeTrainer(model, nn.CrossEntropyLoss(), chosen, loader_of(data), config=config).run()
        assert report.findings == []
        ends.append([*fingerprint(model, chosen), torch.get_rng_state()])
    assert all(equal(ends[0], end) for end in ends[1:])


def test_what_a_users_step_can_reach_is_searched_for_scalers():
    scaler = torch.amp.GradScaler("cpu")

    def with_scaler(model, loss_fn, optimizer, batch):
        return scaler.scale(loss_fn(model(batch[0]), batch[1]))

    class Step:
        def __init__(self):
            self.scaler = scaler

        def __call__(self, model, loss_fn, optimizer, batch):
            return self.scaler

    assert list(reachable_scalers(with_scaler)) == [scaler]
    assert list(reachable_scalers(Step())) == [scaler]
    assert list(reachable_scalers(Step().__call__)) == [scaler]
    assert list(reachable_scalers(own_step)) == []


def test_which_optimizers_evaluate_the_model_themselves():
    parameters = list(nn.Linear(2, 2).parameters())
    assert needs_closure(torch.optim.LBFGS(parameters))
    assert not any(needs_closure(make(parameters)) for make in OPTIMIZERS.values())
    assert issubclass(Loop, object)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_never_waits_for_the_device_in_the_steady_state(run_config):
    """From the first step on behind the fuse, with a fused optimizer; rows and checkpoints are left out."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = [torch.randn(16, 8, device="cuda"), torch.randint(3, (16,), device="cuda")]
    waits = []

    class Batches:
        def __iter__(self):
            for number in range(20):
                torch.cuda.set_sync_debug_mode("error" if 3 <= number < 18 else "default")
                waits.append(number)
                yield batch

    config = run_config(max_steps=20, log_every=1000, **{"monitor.every": 0, "checkpoint.enabled": False})
    try:
        SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, Batches(), config=config, loggers=[]).run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 20
