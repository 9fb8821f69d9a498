"""A step that blew the fuse, saved and run once more: the same finding, nothing changed, nothing dangerous loaded."""

import copy
import math
import os
import pickle
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from programs import blobs, equal, fingerprint, mlp
from torch import nn

from safe_trainer import SafeTrainer, SafetyError
from safe_trainer.config import ConfigError
from safe_trainer.nonfinite import saved_attempts


class LogOfDropout(nn.Module):
    """Which of its elements become log(0) depends on the generators and on a buffer; one part is frozen in eval."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer, self.frozen = nn.BatchNorm1d(8), nn.Linear(8, 3), nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen = self.seen + 1
        hidden = self.frozen(self.layer(self.norm(inputs))).exp()
        keep = 0.0 if self.seen >= 3 else 1.0
        return torch.log(F.dropout(hidden, 0.3) + keep)  # the line


def data(count=5, bad=()):
    made = []
    for place in range(count):
        inputs, targets = (tensor[16 * place : 16 * (place + 1)].clone() for tensor in blobs(16 * count).tensors)
        if place in bad:
            inputs[2, 1] = math.nan
        made.append([inputs, targets])
    return made


def own_step(model, loss_fn, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def trainer_of(model, batches, folder, *, make=None, **options):
    optimizer = (make or (lambda p: torch.optim.Adam(p, lr=1e-2)))(model.parameters())
    config = {"run_dir": str(folder), "progress": False, "max_epochs": 1, **options.pop("config", {})}
    loss_fn = options.pop("loss_fn", nn.CrossEntropyLoss())
    return SafeTrainer(model, loss_fn, optimizer, batches, config=config, loggers=(), **options)


def blown(trainer):
    with pytest.raises(SafetyError):
        trainer.run()
    (finding,) = trainer.report.findings
    return finding


@pytest.mark.parametrize("step", [None, own_step], ids=["own", "users"])
def test_a_replay_finds_the_same_and_leaves_all_as_it_was(step, tmp_path):
    model = LogOfDropout()
    model.frozen.eval()
    finding = blown(trainer_of(model, data(), tmp_path / "run", train_step=step))
    assert finding.fault == "loss.log_of_zero"
    assert finding.step == 3
    (path,) = saved_attempts(tmp_path / "run")

    torch.manual_seed(99)
    fresh = LogOfDropout()  # other weights, other modes, gradients of its own
    fresh.layer.eval()
    trainer = trainer_of(fresh, data(), tmp_path / "other", train_step=step)
    own_step(fresh, nn.CrossEntropyLoss(), trainer.optimizer, data()[0])
    before = [*fingerprint(fresh, trainer.optimizer), *(p.grad.clone() for p in fresh.parameters())]
    modes = [module.training for module in fresh.modules()]
    generators = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    again = trainer.replay(path)
    assert again == finding
    assert equal(before, [*fingerprint(fresh, trainer.optimizer), *(p.grad for p in fresh.parameters())])
    assert modes == [module.training for module in fresh.modules()]
    assert torch.equal(generators[0], torch.get_rng_state())
    assert np.array_equal(generators[1], np.random.get_state()[1])
    assert generators[2] == random.getstate()
    assert trainer.replay(path) == finding  # any number of times


def test_a_replay_under_lbfgs_moves_nothing(tmp_path):
    def step(model, loss_fn, optimizer, batch):
        def closure():
            optimizer.zero_grad()
            loss = loss_fn(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    model = nn.Linear(8, 3)
    trainer = trainer_of(model, data(bad=(2,)), tmp_path, make=make, train_step=step)
    finding = blown(trainer)
    state = copy.deepcopy(trainer.optimizer.state_dict()["state"])
    before = fingerprint(model)
    assert trainer.replay(saved_attempts(tmp_path)[0]) == finding
    assert equal(before, fingerprint(model))
    after = trainer.optimizer.state_dict()["state"]
    assert state[0]["n_iter"] == after[0]["n_iter"]
    assert torch.equal(state[0]["d"], after[0]["d"])


def test_a_replay_is_no_step_of_the_users_scheduler_and_counters(tmp_path):
    counts = []

    def step(model, loss_fn, optimizer, batch):
        loss = own_step(model, loss_fn, optimizer, batch)
        counts.append(1)
        scheduler.step()
        return loss

    model = nn.Linear(8, 3)
    trainer = trainer_of(model, data(bad=(2,)), tmp_path, train_step=step)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    blown(trainer)
    rate = trainer.optimizer.param_groups[0]["lr"]
    trainer.replay(saved_attempts(tmp_path)[0])
    assert (len(counts), scheduler.last_epoch) == (3, 3)
    assert trainer.optimizer.param_groups[0]["lr"] == rate == pytest.approx(1e-2 * 0.5**3)


def test_what_the_optimizer_did_is_told_by_the_replay_too(tmp_path):
    def make(parameters):
        optimizer = torch.optim.Adam(parameters, lr=1e-2)
        for parameter in optimizer.param_groups[0]["params"]:
            bad = torch.full_like(parameter, math.nan)
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": bad, "exp_avg_sq": bad.clone()}
        return optimizer

    finding = blown(trainer_of(nn.Linear(8, 3), data(), tmp_path, make=make))
    assert "Adam's state exp_avg" in finding.evidence
    fresh = trainer_of(nn.Linear(8, 3), data(), tmp_path / "other")
    assert fresh.replay(saved_attempts(tmp_path)[0]) == finding


def test_another_model_is_refused(tmp_path):
    blown(trainer_of(nn.Linear(8, 3), data(bad=(0,)), tmp_path))
    with pytest.raises(ConfigError, match=r"does not fit: weight is float32 \(3, 8\)"):
        trainer_of(nn.Linear(8, 4), data(), tmp_path / "other").replay(saved_attempts(tmp_path)[0])


class Bomb:
    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_foreign_pickle_is_refused_and_runs_nothing(how, tmp_path):
    bomb = Bomb()
    bomb.target = str(tmp_path / "exploded")
    path = tmp_path / "step-00000001.pt"
    state = {"step": 1, "known": {}, "batch": bomb, "model": {}, "in_eval": [], "generators": {}}
    torch.save(state, path) if how == "torch" else path.write_bytes(pickle.dumps(state))
    trainer = trainer_of(nn.Linear(8, 3), data(), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"mkdir|cannot be replayed") as refused:
        trainer.replay(path)
    assert not (tmp_path / "exploded").exists()
    assert len(refused.value.problems) == 1
    assert "\n" not in refused.value.problems[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_bytes(b"nothing of ours"), "cannot be replayed"),
        (lambda path: torch.save({"model": {}}, path), "holds something else"),
        (lambda path: torch.save([1, 2], path), "holds something else"),
        (lambda path: path.mkdir(), "cannot be replayed"),
    ],
    ids=["missing", "noise", "other keys", "a list", "a folder"],
)
def test_what_is_no_saved_step_is_told(make, words, tmp_path):
    path = tmp_path / "step-00000001.pt"
    make(path)
    with pytest.raises(ConfigError, match=words):
        trainer_of(nn.Linear(8, 3), data(), tmp_path / "run").replay(path)


def test_a_cut_off_file_is_told(tmp_path):
    blown(trainer_of(nn.Linear(8, 3), data(bad=(0,)), tmp_path))
    (path,) = saved_attempts(tmp_path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ConfigError, match="cannot be replayed"):
        trainer_of(nn.Linear(8, 3), data(), tmp_path / "other").replay(path)


class Item:
    def __init__(self, x, y):
        self.x, self.y = x, y


def item_task(model, batch):
    return {"loss": F.cross_entropy(model(batch.x), batch.y)}


def test_a_batch_of_ones_own_class_is_loaded_once_it_is_trusted(tmp_path, caplog):
    batches = [Item(*batch) for batch in data(bad=(1,))]
    trainer = trainer_of(nn.Linear(8, 3), batches, tmp_path, task=item_task)
    finding = blown(trainer)
    assert finding.where == "batch.x"
    assert "saved as a pickle" in caplog.text
    (path,) = saved_attempts(tmp_path)
    with pytest.raises(ConfigError, match=r"objects of .*Item.*add_safe_globals"):
        trainer.replay(path)
    with torch.serialization.safe_globals([Item]):
        assert trainer.replay(path) == finding


def test_a_batch_that_cannot_be_saved_is_told_and_hides_nothing(tmp_path, caplog):
    batches = [Item(*batch) for batch in data(bad=(1,))]
    batches[1].extra = lambda value: value
    finding = blown(trainer_of(nn.Linear(8, 3), batches, tmp_path, task=item_task))
    assert (finding.fault, finding.where) == ("data.nonfinite", "batch.x")
    assert "could not be saved" in caplog.text
    assert saved_attempts(tmp_path) == []
    assert list((tmp_path / "nonfinite").iterdir()) == []  # no leftover either


class Unpicklable:
    def __reduce__(self):
        raise KeyError("not today")


def test_whatever_pickling_raises_hides_nothing(tmp_path, caplog):
    batches = [Item(*batch) for batch in data(bad=(1,))]
    batches[1].extra = Unpicklable()
    assert blown(trainer_of(nn.Linear(8, 3), batches, tmp_path, task=item_task)).where == "batch.x"
    assert "not today" in caplog.text


@pytest.mark.parametrize("where", ["write", "folder"])
def test_a_full_disk_hides_nothing(where, tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    trainer = trainer_of(nn.Linear(8, 3), data(bad=(1,)), tmp_path / "run", config={"checkpoint.enabled": False})
    if where == "write":
        monkeypatch.setattr("safe_trainer.atomic.DigestingFile._write_all", full)
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "nonfinite").write_text("a file where the folder should be")
    finding = blown(trainer)
    assert (finding.fault, finding.where, finding.step) == ("data.nonfinite", "batch[0]", 2)
    assert "could not be saved" in caplog.text
    assert list((tmp_path / "run").rglob("*.pt")) == list((tmp_path / "run").rglob("*.tmp")) == []


def test_a_saved_step_is_no_larger_than_what_it_needs(tmp_path):
    """The batch is a view of a large data set, as slices of one tensor are."""
    everything = torch.randn(100_000, 8)
    everything[20] = math.nan
    labels = torch.arange(100_000) % 3
    batches = [[everything[16 * i : 16 * i + 16], labels[16 * i : 16 * i + 16]] for i in range(3)]
    blown(trainer_of(nn.Linear(8, 3), batches, tmp_path))
    assert saved_attempts(tmp_path)[0].stat().st_size < 100_000


def test_numpy_in_a_batch_can_be_saved_and_loaded(tmp_path):
    batches = [{"x": inputs.numpy(), "y": targets, "id": np.int64(3)} for inputs, targets in data(bad=(1,))]

    def task(model, batch):
        return {"loss": F.cross_entropy(model(torch.as_tensor(batch["x"])), batch["y"])}

    trainer = trainer_of(mlp(), batches, tmp_path, task=task)
    finding = blown(trainer)
    assert trainer.replay(saved_attempts(tmp_path)[0]) == finding
