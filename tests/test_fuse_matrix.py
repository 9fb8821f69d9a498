"""Attempts to break the fuse: ways to make a NaN, and programs around them, each run from end to end by SafeTrainer."""

import contextlib
import copy
import dataclasses
import functools
import math
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from programs import SmallCNN, blobs, equal, fingerprint, loader_of, mlp, pictures
from torch import nn
from torch.utils.checkpoint import checkpoint

from safe_trainer import SafeTrainer, SafetyError
from safe_trainer.config import parse
from tests.utils.test_tracer_matrix import CASES, SILENT

QUIET = {"progress": False, "max_epochs": 1, "checkpoint.enabled": False}
FAULTS = {
    "input": {"data.nonfinite"},
    "backward": {"gradient.nonfinite"},
    "forward": {"forward.nonfinite", "loss.log_of_zero", "precision.overflow"},
    "parameter": {"forward.nonfinite"},
    "buffer": {"forward.nonfinite"},
}
NOT_HERE = {"running_statistics_poisoned"}  # a model wholly in eval is put into training mode first


def batches(bad=(), count=6, value=math.nan):
    """Batches of 16 points; those at the places in `bad` hold a NaN."""
    made = []
    for place in range(count):
        inputs, targets = (tensor[16 * place : 16 * (place + 1)].clone() for tensor in blobs(16 * count).tensors)
        if place in bad:
            inputs[3, 2] = value
        made.append([inputs, targets])
    return made


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def run(model, data, folder, *, make=sgd, loss_fn=None, **options):
    """Train one epoch; the trainer, with its report."""
    config = copy.deepcopy(parsed(tuple(sorted({**QUIET, **options.pop("config", {})}.items()))))
    config.run_dir = str(folder)
    optimizer = make(model.parameters())
    loss_fn = loss_fn or nn.CrossEntropyLoss()
    trainer = SafeTrainer(model, loss_fn, optimizer, data, config=config, loggers=(), **options)
    with contextlib.suppress(SafetyError):
        trainer.run()
    return trainer


@functools.cache
def parsed(items):
    """Parsing takes longer than most of these runs."""
    return parse(dict(items))


@pytest.fixture(autouse=True)
def no_files_about_the_run(monkeypatch):
    """Nor are configuration and environment written out four hundred times."""
    monkeypatch.setattr("safe_trainer.trainer.save_start", lambda *_: None)


def only(trainer):
    (finding,) = trainer.report.findings
    return finding


def finite(model):
    return all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def flat(parts):
    """LBFGS keeps lists of tensors."""
    return [item for part in parts for item in (part if isinstance(part, list) else [part])]


def own_step(model, loss_fn, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


# --- every kind of NaN, through the trainer ---------------------------------------------------------------------------


def run_case(build, mended, how, folder):
    """One program of the tracer's matrix as one step of a run: by its own step, or by the loop's."""
    made = build(mended)
    before = fingerprint(made.model)

    def users(model, loss_fn, optimizer, batch):
        optimizer.zero_grad()
        loss = made.step()
        optimizer.step()
        return 0.0 if loss is None else loss

    options = {"train_step": users} if how == "users" else {"task": lambda m, b: {"loss": m(b).float().sum()}}
    trainer = run(made.model, [made.batch], folder, make=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), **options)
    return trainer, before


def runs_in_the_loop(name):
    return "scale" in dict(CASES[name].build(True).model.named_children())


BOTH = [
    pytest.param(name, how, id=f"{name}-{how}")
    for name in CASES
    for how in ("users", "own")
    if name not in NOT_HERE and (how == "users" or runs_in_the_loop(name))
]


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize(("name", "how"), BOTH)
def test_a_non_finite_step_is_named_and_never_applied(name, how, tmp_path):
    expected = CASES[name]
    trainer, before = run_case(expected.build, False, how, tmp_path)
    finding = only(trainer)
    assert equal(fingerprint(trainer.model), before)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert finding.fault in FAULTS[expected.kind]
    assert finding.source == f"test_tracer_matrix.py:{expected.line}"
    assert expected.operation in finding.evidence
    assert finding.step == 1
    assert finding.severity.value == "error"
    if expected.kind in ("forward", "backward"):
        assert finding.where == expected.module
    else:
        assert f"{finding.where} already held" in finding.evidence
    assert finding.remedy
    assert finding.cause
    assert finding.cause not in finding.evidence
    assert finding.remedy not in finding.cause
    assert (tmp_path / "nonfinite" / "step-00000001.pt").exists()


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize(("name", "how"), BOTH)
def test_the_mended_program_has_nothing_to_say(name, how, tmp_path):
    trainer, _ = run_case(CASES[name].build, True, how, tmp_path)
    assert trainer.report.findings == []
    assert not (tmp_path / "nonfinite").exists()


@pytest.mark.parametrize("how", ["users", "own"])
@pytest.mark.parametrize("name", SILENT)
def test_legal_infinities_are_no_faults(name, how, tmp_path):
    trainer, _ = run_case(SILENT[name], False, how, tmp_path)
    assert trainer.report.findings == []
    assert trainer.loop.guard.applied == 1


def test_the_matrix_is_as_large_as_promised():
    assert len(BOTH) > 100
    assert sum(runs_in_the_loop(name) for name in CASES) >= 30


# --- what optimizers and programs do to weights -----------------------------------------------------------------------


def poisoned_adam(parameters):
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for parameter in optimizer.param_groups[0]["params"]:
        zeros = torch.zeros_like(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": zeros * math.nan, "exp_avg_sq": zeros}
    return optimizer


POISONS = {
    "state": (poisoned_adam, "Adam's state exp_avg of it holds a NaN", "Adam's own state"),
    "lr": (lambda p: torch.optim.SGD(p, lr=math.inf), "SGD has lr=inf", "lr is inf"),
    "decay": (lambda p: torch.optim.SGD(p, lr=1e3, weight_decay=1e37), "weight_decay=1e+37", "weight decay blows"),
    "step": (lambda p: torch.optim.SGD(p, lr=3e38), "SGD holds it (lr=3e+38", "the learning rate is too high"),
}


@pytest.mark.parametrize("count", [3, 1], ids=["next step trips", "no next step"])
@pytest.mark.parametrize("poison", POISONS)
def test_a_weight_made_non_finite_by_the_optimizer_is_told_from_the_optimizer(poison, count, tmp_path):
    make, seen, why = POISONS[poison]
    trainer = run(nn.Linear(8, 3, bias=False), batches(count=count, value=0.0), tmp_path, make=make)
    finding = only(trainer)
    assert finding.fault == "forward.nonfinite"
    assert not trainer.report.ok
    if finding.where is not None:  # a huge finite weight overflows the next forward instead
        assert finding.where == "weight"
        assert seen in finding.evidence
        assert why in finding.cause


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_dropping_batches_does_not_mend_a_weight_so_the_run_ends(policy, tmp_path):
    trainer = run(nn.Linear(8, 3), batches(), tmp_path, make=poisoned_adam, config={"guard.nonfinite": policy})
    assert not trainer.report.ok
    assert len(trainer.report.history["loss"]) == 2


def test_a_rollback_mends_a_weight(tmp_path):
    """The optimizer's state goes bad after step 3; the snapshot from before brings the run back."""
    model = nn.Linear(8, 3)

    def sabotage(optimizer, args, kwargs):
        calls.append(1)
        if len(calls) == 3:
            for state in optimizer.state.values():
                state["exp_avg"].fill_(math.nan)

    def make(parameters):
        optimizer = torch.optim.Adam(parameters, lr=1e-2)
        optimizer.register_step_pre_hook(sabotage)
        return optimizer

    calls = []
    trainer = run(model, batches(count=8), tmp_path, make=make,
                  config={"guard.nonfinite": "rollback", "guard.snapshot_every": 1})  # fmt: skip
    assert trainer.report.ok
    assert finite(model)
    assert trainer.loop.guard.rollbacks == 1


def test_a_weight_that_came_in_bad_is_told_apart(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    finding = only(run(model, batches(), tmp_path))
    assert (finding.where, finding.step) == ("1.weight", 1)
    assert "came into the run like this" in finding.cause


def test_a_weight_written_by_the_program_is_told_apart(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)

    def step(model, loss_fn, optimizer, batch):
        loss = own_step(model, loss_fn, optimizer, batch)
        if torch.equal(batch[0], data[1][0]):
            model[0].bias.data[1] = math.inf
        return loss

    data = batches()
    trainer = run(model, data, tmp_path, make=lambda _: sgd(model[1].parameters()), train_step=step)
    finding = only(trainer)
    assert (finding.where, finding.step) == ("0.bias", 3)
    assert "the program itself wrote it" in finding.cause


def test_a_buffer_that_came_in_bad_is_named(tmp_path):
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].eval()
    model[0].running_var[2] = math.nan
    trainer = run(model, batches(), tmp_path, config={"guard.nonfinite": "skip"})
    finding = only(trainer)
    assert (finding.where, finding.fault) == ("0.running_var", "forward.nonfinite")
    assert "reset_running_stats" in finding.remedy
    assert not trainer.report.ok
    assert not model[0].training


# --- where the gate could be passed by --------------------------------------------------------------------------------


def closure_step(model, loss_fn, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return optimizer.step(closure)


@pytest.mark.parametrize("word", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize(
    "make", [sgd, lambda p: torch.optim.Adam(p, lr=1e-2), lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)],
    ids=["sgd", "adam", "lbfgs"],
)  # fmt: skip
def test_a_closure_is_no_way_round_the_gate(make, word, tmp_path):
    def step(model, loss_fn, optimizer, batch):
        if word:
            whole, optimizer.step = optimizer.step, lambda closure: whole(closure=closure)
        try:
            return closure_step(model, loss_fn, optimizer, batch)
        finally:
            optimizer.__dict__.pop("step", None)

    ends = []
    for bad in ((2,), ()):
        torch.manual_seed(0)
        model, data = nn.Linear(8, 3), batches(bad)
        data = data if bad else data[:2] + data[3:]
        trainer = run(model, data, tmp_path / str(bad), make=make, train_step=step,
                      config={"guard.nonfinite": "skip"})  # fmt: skip
        ends.append(flat(fingerprint(model, trainer.optimizer)))
        assert [f.fault for f in trainer.report.findings] == ["data.nonfinite"] * len(bad)
    assert equal(*ends)


@pytest.mark.parametrize("make", [sgd, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
                                  lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)],
                         ids=["sgd", "fused sgd", "fused adamw"])  # fmt: skip
def test_a_users_own_scaler_may_overflow_in_silence(make, tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)

    def step(model, loss_fn, optimizer, batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    model = mlp(dropout=0.0)
    trainer = run(model, batches(count=40), tmp_path, make=make, train_step=step,
                  config={"anomaly_detection": True, "sample_rate": 1})  # fmt: skip
    assert scaler.get_scale() < 2.0**40
    assert trainer.report.findings == []
    assert finite(model)
    # and a NaN in the data is none of the scaler's overflows
    trainer = run(model, batches((1,)), tmp_path / "bad", make=make, train_step=step)
    assert only(trainer).fault == "data.nonfinite"
    assert finite(model)


@pytest.mark.parametrize(("step", "guarded"), [("own", True), ("own", False), ("users", True)])
def test_a_fused_sgd_makes_no_momentum_of_an_overflow(step, guarded, tmp_path):
    """It would make it of memory as it finds it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    momenta = []

    def users(model, loss_fn, optimizer, batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    optimizer.register_step_post_hook(lambda o, *_: momenta.append(len(o.state)))
    config = {**QUIET, "run_dir": str(tmp_path), "guard.enabled": guarded}
    config |= {"precision": "fp16"} if step == "own" else {}
    trainer = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, batches(count=40), config=config, loggers=(),
                          train_step=users if step == "users" else None)  # fmt: skip
    if step == "own":
        trainer.precision.scaler = scaler
    assert trainer.run().findings == []
    assert momenta[0] == 0
    assert momenta[-1] == 2


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fp16_goes_on_after_a_batch_that_was_dropped(accumulate, tmp_path):
    model = mlp(dropout=0.0)
    trainer = run(model, batches((1, 3), count=12), tmp_path,
                  config={"precision": "fp16", "guard.nonfinite": "skip", "accumulate": accumulate})  # fmt: skip
    assert only(trainer).fault == "data.nonfinite"
    assert len(trainer.report.history["loss"]) == 12
    assert finite(model)
    assert trainer.loop.position.updates > 0


class RootWhereMarked(nn.Module):
    """Its gradient is not finite for batches whose first number is 0."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs):
        out = self.layer(inputs)
        return out + (out * inputs[0, 0]).abs().sqrt()  # the line that is named


def marked(bad, count=6):
    data = batches(count=count)
    for place in bad:
        data[place][0][0, 0] = 0.0
    return data


def test_gradients_that_the_users_step_gathers_are_blamed_on_their_own_batch(tmp_path):
    """The gradient of batch 3 is bad, the optimizer moves in step 4: batch 4 is innocent."""
    count = []

    def step(model, loss_fn, optimizer, batch):
        count.append(1)
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        if len(count) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    model = RootWhereMarked()
    trainer = run(model, marked([2]), tmp_path, train_step=step, config={"on_fault": "report"})
    finding = only(trainer)
    assert (finding.fault, finding.step) == ("gradient.nonfinite", 3)
    assert "waited until the optimizer's step in step 4" in finding.evidence
    assert finite(model)
    assert len(count) == 6  # the replays do not count


@pytest.mark.parametrize("bad", [[0], [1], [2], [3], [2, 3]], ids=str)
def test_a_window_and_a_trip_anywhere_in_a_group(bad, tmp_path):
    """Groups of three, a window at every step, and anomaly mode's own error in the middle of a group."""
    ends = []
    for windows in (False, True):
        torch.manual_seed(0)
        model = RootWhereMarked()
        config = {"accumulate": 3, "guard.nonfinite": "skip", "anomaly_detection": windows, "sample_rate": 1}
        trainer = run(model, marked(bad, count=9), tmp_path / str(windows), config=config)
        assert only(trainer).fault == "gradient.nonfinite"
        assert only(trainer).source.startswith("test_fuse_matrix.py:")
        ends.append(fingerprint(model))
        assert finite(model)
    assert equal(*ends)


def test_a_late_flag_and_a_window_that_raises_right_after_it(tmp_path, monkeypatch):
    """Steps 3 to 7 are bad: some trip in their own window, some when the next step has begun, in a window or not."""
    ends = []
    for late in (False, True):
        monkeypatch.setattr("safe_trainer.loop.reads_late", lambda *_, late=late: late)
        torch.manual_seed(0)
        model = nn.Sequential(RootWhereMarked(), nn.BatchNorm1d(3), nn.Dropout(0.2))
        trainer = run(model, marked([2, 3, 4, 5, 6], count=12), tmp_path / str(late),
                      make=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
                      config={"guard.nonfinite": "skip", "anomaly_detection": True, "sample_rate": 2})  # fmt: skip
        assert trainer.loop.guard.skipped == [3, 4, 5, 6, 7]
        assert only(trainer).source.startswith("test_fuse_matrix.py:")
        ends.append([*fingerprint(model, trainer.optimizer), torch.get_rng_state()])
    assert equal(*ends)


def test_an_optimizer_that_moves_several_times_a_step_says_that_it_had_moved(tmp_path):
    def step(model, loss_fn, optimizer, batch):
        own_step(model, loss_fn, optimizer, [batch[0].nan_to_num(), batch[1]])
        return own_step(model, loss_fn, optimizer, batch)

    finding = only(run(nn.Linear(8, 3), batches((1,)), tmp_path, train_step=step))
    assert finding.where is None or finding.fault in ("data.nonfinite", "forward.nonfinite")
    assert "had moved the weights once before" in finding.evidence


def test_a_loss_seen_after_the_step_is_told_as_such(tmp_path):
    def step(model, loss_fn, optimizer, batch):
        loss = own_step(model, loss_fn, optimizer, batch)
        return loss + (math.inf if torch.equal(batch[0], data[2][0]) else 0.0)

    data = batches()
    finding = only(run(nn.Linear(8, 3), data, tmp_path, train_step=step))
    assert finding.step == 3
    assert "had moved the weights before the loss was seen" in finding.evidence + finding.cause


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_of_ours_stays_in_torch_or_in_the_optimizer(raises, tmp_path):
    """To hear of a loss before the optimizer moves, the guard stands in for `torch.autograd.backward` during a run."""

    def step(model, loss_fn, optimizer, batch):
        heard.append(torch.autograd.backward is not true)
        if raises:
            raise LookupError("a user's mistake")
        return own_step(model, loss_fn, optimizer, batch)

    true, heard = torch.autograd.backward, []
    model = nn.Linear(8, 3)
    optimizer = sgd(model.parameters())
    with contextlib.suppress(LookupError):
        run(model, batches(), tmp_path, make=lambda _: optimizer, train_step=step)
    assert all(heard)
    assert torch.autograd.backward is true
    assert len(optimizer._optimizer_step_pre_hooks) == 0


def test_in_the_loops_own_step_the_loss_is_seen_before(tmp_path):
    model = nn.Linear(8, 3)
    before = fingerprint(model)

    def task(model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss + (batch[0].detach() * 0).sum().log()}  # the line

    finding = only(run(model, batches(), tmp_path, task=task))
    assert finding.fault == "loss.log_of_zero"
    assert equal(before, fingerprint(model))


def test_a_parameter_that_only_the_optimizer_knows(tmp_path):
    outside = nn.Parameter(torch.ones(2))

    def step(model, loss_fn, optimizer, batch):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1]) + (outside - 1).abs().sqrt().sum()  # here
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(8, 3)
    make = lambda p: torch.optim.SGD([{"params": list(p)}, {"params": [outside]}], lr=0.1)  # noqa: E731
    finding = only(run(model, batches(), tmp_path, make=make, train_step=step))
    assert finding.fault == "gradient.nonfinite"
    assert outside.tolist() == [1, 1]
    outside.data[0] = math.nan
    finding = only(run(model, batches(), tmp_path / "nan", make=make, train_step=step))
    assert finding.where == "optimizer.param_groups[1]['params'][0]"


# --- batches and models of every kind ---------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Item:
    x: Any
    y: Any


class Thing:
    def __init__(self, x, y):
        self.x, self.y = x, y


SHAPES = {
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"]), "batch['x']"),
    "namedtuple": (Pair, lambda b: (b.x, b.y), "batch[0]"),
    "dataclass": (Item, lambda b: (b.x, b.y), "batch.x"),
    "object": (Thing, lambda b: (b.x, b.y), "batch.x"),
    "numpy": (lambda x, y: (x.numpy(), y), lambda b: (torch.from_numpy(b[0]), b[1]), "batch[0]"),
    "nested": (lambda x, y: [{"x": [x]}, y], lambda b: (b[0]["x"][0], b[1]), "batch[0]['x'][0]"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_of_any_shape_is_named(shape, tmp_path):
    pack, unpack, name = SHAPES[shape]

    def task(model, batch):
        x, y = unpack(batch)
        return {"loss": F.cross_entropy(model(x), y)}

    finding = only(run(nn.Linear(8, 3), [pack(*b) for b in batches((1,))], tmp_path, task=task))
    assert (finding.fault, finding.where, finding.step) == ("data.nonfinite", name, 2)
    assert "rows 3" in finding.cause


def test_a_step_that_uses_up_its_batch_is_replayed_all_the_same(tmp_path):
    def step(model, loss_fn, optimizer, batch):
        return own_step(model, loss_fn, optimizer, [batch.pop("x"), batch.pop("y")])

    data = [dict(zip("xy", batch, strict=True)) for batch in batches((1,))]
    assert only(run(nn.Linear(8, 3), data, tmp_path, train_step=step)).where == "batch['x']"


def test_a_step_that_writes_into_its_batch_is_told_that_it_does(tmp_path):
    def step(model, loss_fn, optimizer, batch):
        x, y = batch
        loss = own_step(model, loss_fn, optimizer, [x.log().abs().clamp(min=0) if x.min() == 0 else x, y])
        x.add_(5.0)
        return loss

    data = [[x.abs() + 1, y] for x, y in batches()]
    data[1][0][2, 2] = 0.0
    finding = only(run(nn.Linear(8, 3), data, tmp_path, train_step=step))
    assert "changes batch[0] in place" in finding.cause


def test_an_iterable_data_set(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for x, y in batches((2,)):
                yield from zip(x, y, strict=True)

    loader = torch.utils.data.DataLoader(Stream(), batch_size=16)
    finding = only(run(nn.Linear(8, 3), loader, tmp_path))
    assert (finding.fault, finding.step) == ("data.nonfinite", 3)


class KeepsItsInput(nn.Module):
    """A buffer that forward replaces by the batch itself: putting it back must not write into the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("last", torch.zeros(16, 8))

    def forward(self, inputs):
        self.last = inputs
        return self.layer(inputs)


class KeepsAView(KeepsItsInput):
    """A buffer of another shape, of which one element is seen many times."""

    def forward(self, inputs):
        self.last = inputs.mean(0).expand(5, 8)
        return self.layer(inputs)


class Grows(KeepsItsInput):
    """A buffer that grows in place, and one that is made in the first forward."""

    def forward(self, inputs):
        self.last.resize_(self.last.shape[0] + 1, 8).zero_()
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.zeros(3))
        out = self.layer(inputs)
        self.made += out.detach().mean(0)
        return out


class Removes(KeepsItsInput):
    def forward(self, inputs):
        self.last = None if self.last is not None else torch.ones(2)
        return self.layer(inputs)


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "undo"])
@pytest.mark.parametrize("make", [KeepsItsInput, KeepsAView, Grows, Removes])
def test_buffers_that_a_forward_replaces_come_back(make, several, tmp_path):
    data = batches((3,))
    untouched = copy.deepcopy(data)
    ends = []
    for drop in (False, True):
        torch.manual_seed(0)
        model = make()
        extra = nn.Parameter(torch.zeros(1))
        given = {"other_optimizers": [sgd([extra])], "train_step": own_step} if several else {}
        chosen = data[:3] + data[4:] if drop else data
        trainer = run(model, chosen, tmp_path / str(drop), config={"guard.nonfinite": "skip"}, **given)
        assert [f.where for f in trainer.report.findings] == ([] if drop else ["batch[0]"])
        ends.append(fingerprint(model))
    assert equal(*ends)
    assert all(equal(one, other) for one, other in zip(data, untouched, strict=True))


def test_a_loss_with_buffers_is_guarded_too(tmp_path):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))

        def forward(self, output, target):
            self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
            return F.cross_entropy(output - self.centre, target)

    loss_fn = Centred()
    trainer = run(nn.Linear(8, 3), batches((1,)), tmp_path, loss_fn=loss_fn, config={"guard.nonfinite": "skip"})
    assert trainer.report.ok
    assert torch.isfinite(loss_fn.centre).all()


@pytest.mark.parametrize("bad", [(0,), (2,)], ids=str)
def test_lazy_modules(bad, tmp_path):
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    trainer = run(model, batches(bad), tmp_path, config={"guard.nonfinite": "skip"})
    assert trainer.report.ok
    assert only(trainer).where == "batch[0]"
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_parametrizations(norm, tmp_path):
    ends = []
    for drop in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(norm(nn.Linear(8, 6)), nn.ReLU(), norm(nn.Linear(6, 3)))
        data = batches((3,))
        trainer = run(model, data[:3] + data[4:] if drop else data, tmp_path / str(drop),
                      config={"guard.nonfinite": "skip"})  # fmt: skip
        assert trainer.report.ok
        ends.append(fingerprint(model))
    assert equal(*ends)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpoints_and_autocast(reentrant, precision, tmp_path):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 3)

        def inner(self, hidden):
            return torch.log(F.dropout(hidden, 0.1).relu() * self.scale)  # the line

        def forward(self, inputs):
            self.scale = 0.0 if inputs.isnan().any() else 1.0
            hidden = self.first(inputs.nan_to_num())
            return self.second(checkpoint(self.inner, hidden.abs() + 1, use_reentrant=reentrant).clamp(min=-1e4))

    torch.manual_seed(0)
    model = Checkpointed()
    trainer = run(model, batches((2,)), tmp_path, config={"precision": precision})
    finding = only(trainer)
    assert finding.source is not None
    assert "test_fuse_matrix.py" in finding.source
    assert finite(model)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_compiled_model_is_replayed_uncompiled(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 3), nn.BatchNorm1d(3)

        def forward(self, inputs):
            return self.norm(self.layer(inputs)) + torch.log(inputs[:, :3].abs() + 0.1)  # the line

    ends = []
    for drop in (False, True):
        torch.manual_seed(0)
        model, data = Net(), batches((2,), value=-math.inf)
        data[3][0][0, 0] = math.nan
        chosen = data[:2] + data[4:] if drop else data
        config = {"compile": True, "guard.nonfinite": "skip", "anomaly_detection": True, "sample_rate": 2}
        trainer = run(model, chosen, tmp_path / str(drop), config=config)
        assert [f.fault for f in trainer.report.findings] == ([] if drop else ["data.nonfinite"])
        ends.append(fingerprint(model))
    assert equal(*ends)


def test_a_thousand_modules(tmp_path):
    model = nn.Sequential(*(nn.Identity() if i % 4 else nn.Linear(8, 8) for i in range(1000)), nn.Linear(8, 3))
    finding = only(run(model, batches((1,), count=2), tmp_path))
    assert (finding.where, finding.step) == ("batch[0]", 2)


def test_sparse_and_complex_and_double_gradients_are_judged(tmp_path):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 3, sparse=True)
            self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.wide = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, tokens):
            return self.wide((self.table(tokens) * self.turn).abs().double())

    data = [[torch.arange(5) + i, torch.arange(5) % 3] for i in range(4)]
    model = Mixed()
    assert run(model, data, tmp_path / "healthy").report.findings == []
    with torch.no_grad():
        model.table.weight[7] = 0.0
        model.turn[0] = 0.0

    def step(model, loss_fn, optimizer, batch):
        return own_step(lambda x: (model(x) * 0 + model.table(x).square().sum(1, keepdim=True).sqrt()), loss_fn,
                        optimizer, batch)  # fmt: skip

    finding = only(run(model, data, tmp_path / "bad", train_step=step))
    assert finding.fault == "gradient.nonfinite"
    assert finite(model)


# --- replays that go wrong --------------------------------------------------------------------------------------------


def test_a_nan_that_does_not_come_again_is_told_plainly(tmp_path):
    """Here the state is where no replay can reach it: in a generator."""
    numbers = iter([1.0, math.nan, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])

    def step(model, loss_fn, optimizer, batch):
        return own_step(model, lambda *a: loss_fn(*a) * next(numbers), optimizer, batch)

    model = nn.Linear(8, 3)
    trainer = run(model, batches(), tmp_path, train_step=step, config={"on_fault": "report"})
    finding = only(trainer)
    assert "the same step was finite when it was replayed" in finding.evidence
    assert "does not repeat itself" in finding.cause
    assert "(16, 8) float32" in finding.evidence
    assert finite(model)


def test_a_model_that_raises_in_the_replay_hides_nothing(tmp_path):
    calls = []

    class Moody(nn.Linear):
        def forward(self, inputs):
            numbers.pop()
            return super().forward(inputs)

    numbers = list(range(2))

    def task(model, batch):
        calls.append(1)
        return {"loss": F.cross_entropy(model(batch[0]), batch[1]) * (math.nan if len(calls) == 2 else 1.0)}

    finding = only(run(Moody(8, 3), batches(), tmp_path, task=task))
    assert "its replay raised IndexError: pop from empty list" in finding.evidence
    assert "cannot be run twice" in finding.cause


def test_a_tracer_that_fails_hides_nothing(tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr("safe_trainer.utils.tracer.trace", broken)
    model = nn.Linear(8, 3)
    before = fingerprint(model)
    finding = only(run(model, batches((0,)), tmp_path))
    assert "could not be replayed" in finding.evidence
    assert equal(before, fingerprint(model))
    assert "please report this" in caplog.text


def test_a_replay_is_not_counted_by_what_a_users_step_keeps(tmp_path):
    """A scheduler, an average, a list of losses and a counter in the step: as after one call each, not two."""

    class Step:
        def __init__(self):
            self.calls, self.losses = 0, []

        def __call__(self, model, loss_fn, optimizer, batch):
            self.calls += 1
            loss = own_step(model, loss_fn, optimizer, batch)
            self.losses.append(loss.item())
            self.scheduler.step()
            self.average.update_parameters(model)
            return loss

    torch.manual_seed(0)
    model, step = nn.Linear(8, 3), Step()
    step.average = torch.optim.swa_utils.AveragedModel(model)

    def make(parameters):
        optimizer = sgd(parameters)
        step.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    trainer = run(model, batches((1, 4)), tmp_path, make=make, train_step=step, config={"guard.nonfinite": "skip"})
    assert trainer.report.ok
    assert step.calls == len(step.losses) == step.scheduler.last_epoch == int(step.average.n_averaged) == 6
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**6)


def test_report_replays_three_and_ends_after_fifty_in_a_row(tmp_path):
    trainer = run(nn.Linear(8, 3), batches(range(60), count=60), tmp_path, config={"on_fault": "report"})
    assert len(trainer.report.history["loss"]) == 50
    assert len(list((tmp_path / "nonfinite").iterdir())) == 3
    assert "50 steps in all, the first 3 replayed" in only(trainer).evidence
    assert trainer.loop.stopped == "50 non-finite steps in a row"


def test_the_optimizers_of_a_rollback_keep_bits_that_a_state_dict_would_lose(tmp_path):
    """State in float32 beside weights in bfloat16: loading a state dict casts it."""

    class Wide(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("kept", p.float().clone())
                    kept.sub_(p.grad.float(), alpha=self.param_groups[0]["lr"])
                    p.copy_(kept)

    ends = []
    for drop in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 3).bfloat16()
        data = [[x.bfloat16(), y] for x, y in batches((3,))]
        extra = sgd([nn.Parameter(torch.zeros(1))])
        trainer = run(model, data[:3] + data[4:] if drop else data, tmp_path / str(drop), make=Wide,
                      train_step=own_step, other_optimizers=[extra], config={"guard.nonfinite": "skip"})  # fmt: skip
        ends.append(fingerprint(model, trainer.optimizer))
    assert equal(*ends)


# --- a healthy run is not touched -------------------------------------------------------------------------------------


class TinyTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 3)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.embed(tokens), mask=mask, is_causal=True).mean(1))


class TinyLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(12, 8), nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


def sequences():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(48) % 3
    return torch.utils.data.TensorDataset(torch.randint(12, (48, 6), generator=generator), labels)


class Noisy(nn.Module):
    """Draws from all three generators in every forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        factor = 1 + 0.01 * (random.random() + float(np.random.rand()) + float(torch.rand(())))
        return self.model(inputs) * factor


MODELS = {"cnn": (SmallCNN, pictures), "transformer": (TinyTransformer, sequences), "lstm": (TinyLSTM, sequences)}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}
WAYS = [
    {"guard.enabled": False},
    {},
    {"anomaly_detection": True, "sample_rate": 1},
    {"anomaly_detection": True, "sample_rate": 7},
    {"anomaly_detection": True, "sample_rate": 100, "anomaly.warmup_steps": 3},
    {"guard.nonfinite": "rollback", "guard.snapshot_every": 5},
    {"guard.enabled": False, "anomaly_detection": True, "sample_rate": 3},
]
QUICK = [("cnn", "sgd", 12), ("transformer", "adamw_fused", 12), ("lstm", "sgd_fused", 12)]
LONG = [pytest.param(name, optimizer, 50, marks=pytest.mark.slow) for name in MODELS for optimizer in OPTIMIZERS]


@pytest.mark.parametrize("step", [None, own_step], ids=["own", "users"])
@pytest.mark.parametrize(("name", "optimizer", "steps"), [*QUICK, *LONG])
def test_guard_and_windows_leave_no_trace_in_a_healthy_run(name, optimizer, steps, step, tmp_path):
    ends = []
    make, data = MODELS[name]
    for number, options in enumerate(WAYS):
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        model = Noisy(make())
        config = {"max_steps": steps, **options}
        trainer = run(model, loader_of(data()), tmp_path / str(number), make=OPTIMIZERS[optimizer],
                      config=config, train_step=step)  # fmt: skip
        assert trainer.report.findings == []
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        ends.append([*fingerprint(model, trainer.optimizer), *drawn])
    assert len(trainer.report.history["loss"]) == steps
    assert all(equal(ends[0], end) for end in ends[1:])
