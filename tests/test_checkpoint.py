"""Checkpoints under attack: cut, flipped, killed, out of space, forbidden, malicious. Each test tries to lose data."""

import ctypes
import errno
import hashlib
import io
import json
import logging
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from safe_trainer import atomic
from safe_trainer.checkpoint import (
    CheckpointError,
    Checkpoints,
    infinite_tensors,
    is_better,
    is_lower_better,
    state_differences,
)
from safe_trainer.config import ConfigError, Direction
from safe_trainer.plain_state import plain_state

ROOT = Path(__file__).resolve().parent.parent


def state_of(step: int, size: int = 1000) -> dict:
    """A state whose every number tells the step, so that a mixture of two is seen."""
    return {
        "model": OrderedDict(weight=torch.full((size,), float(step)), bias=torch.arange(4.0) + step),
        "optimizers": [{"state": {0: {"momentum": torch.full((size,), step / 2)}}, "param_groups": [{"lr": 0.1}]}],
        "position": {"step": step},
    }


def save(checkpoints: Checkpoints, step: int, **metrics: float) -> Path:
    path = checkpoints.save(state_of(step), step=step, epoch=step // 10, metrics=metrics)
    assert path is not None
    return path


def is_state_of(state: dict, step: int) -> bool:
    return (
        state["position"] == {"step": step}
        and bool((state["model"]["weight"] == step).all())
        and bool((state["optimizers"][0]["state"][0]["momentum"] == step / 2).all())
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def remark(path: Path) -> None:
    """Make the marker fit whatever the file holds now, as one would who means to deceive."""
    marker = path.with_suffix(".json")
    facts = json.loads(marker.read_text())
    data = path.read_bytes()
    marker.write_text(json.dumps({**facts, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}))


@pytest.fixture
def two(tmp_path):
    """A folder with whole checkpoints of the steps 10 and 20."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    save(checkpoints, 10)
    save(checkpoints, 20)
    return checkpoints


SERVER = """
import errno, json, os, resource, signal, sys, time, traceback
from pathlib import Path
import torch
from safe_trainer import atomic, checkpoint
from safe_trainer.checkpoint import Checkpoints, CheckpointError
from safe_trainer.config import ConfigError

def state_of(step, size=1000):
    return {"model": {"weight": torch.full((size,), float(step))},
            "optimizers": [{"state": {0: {"momentum": torch.full((size,), step / 2)}}}], "position": {"step": step}}

for line in sys.stdin:
    task = json.loads(line)
    pid = os.fork()
    if pid == 0:
        output = os.open(task["output"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            exec(task["script"], {**globals(), "folder": Path(task["folder"])})
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Victims:
    """Processes of their own to be killed, starved or robbed of rights; forked from one that has imported torch."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, script: str, folder: Path) -> int:
        """The id of a process that runs `script` with the folder of checkpoints as ``folder``."""
        self.output = folder.with_name(f"{folder.name}.output")
        self.output.unlink(missing_ok=True)
        task = {"script": script, "folder": str(folder), "output": str(self.output)}
        self.server.stdin.write(json.dumps(task) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def wait(self) -> int:
        """Exit code of what was started last, -9 if it was killed."""
        return int(self.server.stdout.readline())

    def told(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def run(self, script: str, folder: Path) -> str:
        self.start(script, folder)
        assert self.wait() == 0, self.told()
        return self.told()


@pytest.fixture(scope="module")
def victims():
    victims = Victims()
    yield victims
    victims.server.communicate(timeout=60)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)


# --- what is written and read back ------------------------------------------------------------------------------------


def test_what_is_saved_comes_back(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    path = save(checkpoints, 120, **{"val/loss": 0.5})
    assert names(path.parent) == {"step-00000120.pt", "step-00000120.json"}
    state, info = checkpoints.load("last")
    assert is_state_of(state, 120)
    assert set(state) == {"model", "optimizers", "position"}
    assert (info.path, info.step, info.epoch, info.metrics) == (path, 120, 12, {"val/loss": 0.5})
    assert checkpoints.latest() == checkpoints.best() == info


def test_the_marker_tells_size_and_digest(tmp_path):
    path = save(Checkpoints(tmp_path), 5, **{"val/loss": math.nan, "val/accuracy": 0.25})
    facts = json.loads(
        path.with_suffix(".json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON")
    )
    assert facts["bytes"] == path.stat().st_size
    assert facts["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (facts["format"], facts["step"], facts["epoch"], facts["finite"]) == (1, 5, 0, True)
    (info,) = Checkpoints(tmp_path).all()
    assert math.isnan(info.metrics["val/loss"])
    assert info.metrics["val/accuracy"] == 0.25


def test_state_of_real_parts_comes_back_to_the_bit(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)).to(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()], "scheduler": scheduler.state_dict()}
    saved["rng"] = {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": np.random.get_state()}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(saved, step=1, epoch=0)
    state, _ = checkpoints.load("last")
    assert state["model"].keys() == saved["model"].keys()
    for name, tensor in saved["model"].items():
        assert torch.equal(state["model"][name], tensor)
        assert state["model"][name].stride() == tensor.stride()
    assert state["model"]._metadata == saved["model"]._metadata
    moments = saved["optimizers"][0]["state"]
    assert all(torch.equal(state["optimizers"][0]["state"][i]["exp_avg"], moments[i]["exp_avg"]) for i in moments)
    assert state["scheduler"]["milestones"] == Counter([3, 5])
    assert state["rng"]["python"] == random.getstate()
    assert np.array_equal(state["rng"]["numpy"][1].numpy(), np.random.get_state()[1])


def test_saving_moves_no_generator_and_no_weight(tmp_path):
    model = nn.Linear(3, 3)
    before = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy(), model.weight.detach().clone())
    Checkpoints(tmp_path).save({"model": model.state_dict()}, step=1, epoch=0)
    Checkpoints(tmp_path).load()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.array_equal(np.random.get_state()[1], before[2])
    assert torch.equal(model.weight, before[3])


def test_a_healthy_save_and_load_is_silent(two, caplog, recwarn):
    two.load("last")
    assert not caplog.records
    assert not recwarn.list


def test_a_step_saved_again_spoils_nothing_and_is_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    first, second = save(checkpoints, 10), save(checkpoints, 10)
    assert first != second
    assert first.exists()
    assert checkpoints.latest().path == second


def test_the_newest_is_the_last_written_not_the_highest_step(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1000)
    save(checkpoints, 10)  # gone back, or begun anew in the same folder
    assert checkpoints.load("last")[1].step == 10
    assert names(tmp_path) == {"step-00000010.pt", "step-00000010.json"}


# --- what may be saved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (Path("x"), "Path"),
        ({1, 2}, "set"),
        (nn.Linear(1, 1), "Linear"),
        (lambda: None, "function"),
        (Direction.min, "Direction"),
        (np.array(["a"]), "ndarray"),
        (np.longdouble(1), "longdouble"),
        (torch.empty(1, device="meta"), "meta"),
    ],
)
def test_what_could_not_be_loaded_is_refused_by_its_name(tmp_path, value, word):
    with pytest.raises(TypeError, match=r"parts\.1\.inner.*" + word):
        Checkpoints(tmp_path).save({"parts": [1, {"inner": value}]}, step=1, epoch=0)
    assert not names(tmp_path)


def test_keys_must_be_text_or_whole_numbers(tmp_path):
    with pytest.raises(TypeError, match="keys"):
        Checkpoints(tmp_path).save({"part": {(1, 2): 3}}, step=1, epoch=0)
    with pytest.raises(ValueError, match="'checkpoint'"):
        Checkpoints(tmp_path).save({"checkpoint": 1}, step=1, epoch=0)


def test_numpy_values_become_plain(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    values = {
        "float": np.float64(0.5),
        "whole": np.int32(3),
        "flag": np.bool_(True),
        "array": np.arange(3, dtype=np.uint32),
    }
    checkpoints.save({"part": values}, step=np.int64(1), epoch=0, metrics={"val/loss": np.float32(0.5)})
    part = checkpoints.load()[0]["part"]
    assert [type(part[name]) for name in values] == [float, int, bool, torch.Tensor]
    assert part["array"].tolist() == [0, 1, 2]


def test_a_view_does_not_take_its_whole_storage_along(tmp_path):
    large = torch.randn(1_000_000)
    path = Checkpoints(tmp_path).save({"model": {"slice": large[5:15]}}, step=1, epoch=0)
    assert path.stat().st_size < 10_000
    assert torch.equal(Checkpoints(tmp_path).load()[0]["model"]["slice"], large[5:15])


def test_tied_tensors_stay_tied_and_are_written_once(tmp_path):
    weight = nn.Parameter(torch.randn(50_000))
    path = Checkpoints(tmp_path).save({"model": {"a": weight, "b": weight.detach()}}, step=1, epoch=0)
    assert path.stat().st_size < 300_000
    model = Checkpoints(tmp_path).load()[0]["model"]
    assert model["a"].data_ptr() == model["b"].data_ptr()


def test_tied_tensors_that_must_be_copied_stay_tied():
    large = torch.randn(1000)
    for copy in (True, False):  # without it they are copied as views of a larger storage
        model = plain_state({"model": {"a": large[:10], "b": large[:10], "c": large[10:20]}}, copy=copy)["model"]
        assert model["a"].data_ptr() == model["b"].data_ptr()
        assert torch.equal(model["c"], large[10:20])
        assert model["a"].data_ptr() != large.data_ptr()


def test_a_copy_does_not_change_with_its_source():
    weight = torch.ones(3)
    for copy, expected in ((True, 1.0), (False, 5.0)):
        weight.fill_(1.0)
        kept = plain_state({"model": {"w": weight}}, copy=copy)
        weight.fill_(5.0)
        assert kept["model"]["w"][0] == expected


# --- weights that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["model", "ema"])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, caplog, part, value):
    checkpoints = Checkpoints(tmp_path)
    kept = save(checkpoints, 10)
    broken = {**state_of(20), part: {"layer": {"w": torch.tensor([1.0, value])}}}
    assert checkpoints.save(broken, step=20, epoch=2) is None
    assert checkpoints.save(broken, step=30, epoch=3) is None
    assert names(tmp_path) == {kept.name, kept.with_suffix(".json").name}
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]  # once, not at each step
    assert f"{part}.layer.w" in said.getMessage()
    assert str(kept) in said.getMessage()
    save(checkpoints, 40)
    assert checkpoints.save(broken, step=50, epoch=5) is None
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64])
def test_large_finite_weights_are_saved_and_nan_is_not_in_every_dtype(tmp_path, dtype):
    large = 200.0 if dtype == torch.float8_e4m3fn else 6e4 if dtype == torch.float16 else 1e38
    weights = torch.full((100,), large).to(dtype)
    assert weights.float().isfinite().all() if not dtype.is_complex else True
    assert Checkpoints(tmp_path).save({"model": {"w": weights}}, step=1, epoch=0)
    weights[3] = math.nan
    assert Checkpoints(tmp_path).save({"model": {"w": weights}}, step=2, epoch=0) is None


def test_a_mask_full_of_infinities_may_be_saved_but_not_with_a_nan(tmp_path):
    state = {"model": {"mask": torch.full((3, 3), -math.inf).triu(1), "w": torch.ones(2)}}
    known = infinite_tensors(state)
    assert known == {"model.mask"}
    checkpoints = Checkpoints(tmp_path, may_be_infinite=known)
    assert checkpoints.save(state, step=1, epoch=0)
    state["model"]["w"][0] = math.inf
    assert checkpoints.save(state, step=2, epoch=0) is None
    state["model"]["w"][0] = 1.0
    state["model"]["mask"][0, 0] = math.nan
    assert checkpoints.save(state, step=3, epoch=0) is None


def test_a_state_that_begins_with_nan_is_no_mask():
    assert infinite_tensors({"model": {"w": torch.tensor([math.nan, math.inf])}}) == set()


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenths", range(10))
@pytest.mark.parametrize("marker", ["kept", "fitted"])
def test_a_cut_file_falls_back_to_the_one_before(two, caplog, tenths, marker):
    newest = two.latest().path
    data = newest.read_bytes()
    newest.write_bytes(data[: len(data) * tenths // 10])
    if marker == "fitted":  # the reader itself must notice, too
        remark(newest)
    state, info = two.load("last")
    assert is_state_of(state, 10)
    assert info.step == 10
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert str(newest) in said.getMessage()
    assert ("damaged" if marker == "kept" else "cannot be read") in said.getMessage()


def test_a_cut_one_is_not_the_latest_even_before_it_is_loaded(two):
    newest = two.latest().path
    newest.write_bytes(newest.read_bytes()[:-1])
    assert two.latest().step == 10


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_anywhere_falls_back(two, caplog, seed):
    newest = two.latest().path
    data = bytearray(newest.read_bytes())
    generator = random.Random(seed)
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    newest.write_bytes(data)
    assert is_state_of(two.load("last")[0], 10)
    assert "SHA-256" in caplog.text
    with pytest.raises(ConfigError, match="damaged"):  # a path is taken or refused, never replaced
        two.load(newest)


def test_a_damaged_one_goes_at_the_next_save_and_does_not_count(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    best, newest = save(checkpoints, 10, **{"val/loss": 0.1}), save(checkpoints, 20, **{"val/loss": 0.5})
    data = bytearray(best.read_bytes())
    data[len(data) // 2] ^= 4
    best.write_bytes(data)
    assert checkpoints.load("best")[1].path == newest
    save(checkpoints, 30, **{"val/loss": 0.9})
    assert {path.name for path in tmp_path.glob("*.pt")} == {"step-00000020.pt", "step-00000030.pt"}


def test_the_step_of_a_damaged_one_can_be_saved_again(two):
    newest = two.latest().path
    newest.write_bytes(b"")
    two.load("last")
    again = save(two, 20)
    assert is_state_of(Checkpoints(two.folder).load("last")[0], 20)
    assert names(two.folder) >= {again.name}
    assert not newest.exists()


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"step": "x"}', '{"step": 1, "metrics": 3}'])
def test_without_a_readable_marker_it_is_no_checkpoint(two, caplog, content):
    newest = two.latest().path
    marker = newest.with_suffix(".json")
    marker.unlink() if content is None else marker.write_text(content)
    assert two.latest().step == 10
    assert is_state_of(two.load("last")[0], 10)
    assert str(newest) in caplog.text
    assert "marker" in caplog.text


def test_a_file_without_marker_is_loadable_by_its_path(two, tmp_path):
    for copy in (tmp_path / "mine.pt", two.folder / "kept.pt"):
        shutil.copy(two.latest().path, copy)
        state, info = two.load(str(copy))
        assert is_state_of(state, 20)
        assert (info.path, info.step, info.epoch) == (copy, 20, 2)
    save(two, 30)
    assert (two.folder / "kept.pt").exists()  # not a name of ours: never swept


def test_a_path_may_be_a_marker_or_a_run_folder(two):
    assert two.load(two.latest().path.with_suffix(".json"))[1].step == 20
    assert Checkpoints("elsewhere").load(two.folder)[1].step == 20
    assert Checkpoints("elsewhere").load(two.folder.parent)[1].step == 20


def test_nothing_to_load_is_told_with_what_is_there(tmp_path):
    with pytest.raises(ConfigError, match=r"'last'.*missing does not exist"):
        Checkpoints(tmp_path / "missing").load("last")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        Checkpoints(tmp_path).load("last")
    path = save(Checkpoints(tmp_path), 10, **{"val/accuracy": 0.5})
    with pytest.raises(ConfigError, match=r"'val/loss'.*they have val/accuracy"):
        Checkpoints(tmp_path).load("best")
    with pytest.raises(ConfigError, match=r"there is no checkpoint .*other\.pt; .* holds step-00000010\.pt"):
        Checkpoints(tmp_path).load(tmp_path / "other.pt")
    path.write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"2 bytes, \d+ were written"):
        Checkpoints(tmp_path).load("last")


def test_another_kind_of_file_is_refused_by_what_it_lacks(tmp_path):
    for content in ({"weight": torch.ones(2)}, torch.ones(2), {"checkpoint": {"format": 1}}):
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(ConfigError, match="no checkpoint of a run"):
            Checkpoints(tmp_path).load(tmp_path / "other.pt")
    torch.save({"checkpoint": {"format": 99, "step": 1, "epoch": 0, "metrics": {}}}, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match="format 99"):
        Checkpoints(tmp_path).load(tmp_path / "other.pt")


class Malicious:
    """Unpickled without care, it runs a command."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("form", ["zip", "legacy", "bare pickle", "bare pickle of protocol 2"])
def test_a_malicious_pickle_is_refused_and_does_not_run(two, tmp_path, caplog, form):
    canary, newest = tmp_path / "canary", two.latest().path
    contents = {**state_of(20), "extra": Malicious(canary)}
    if form.startswith("bare"):
        newest.write_bytes(pickle.dumps(contents["extra"], protocol=2 if form.endswith("2") else 4))
    else:
        torch.save(contents, newest, _use_new_zipfile_serialization=form == "zip")
    remark(newest)
    # torch's safe reader gives up on protocol 4 before it comes to a name.
    reason = "cannot be read as a checkpoint" if form == "bare pickle" else r"is refused: it asks for posix\.system"
    with pytest.raises(ConfigError, match=reason):
        two.load(newest)
    assert is_state_of(two.load("last")[0], 10)
    assert str(newest) in caplog.text
    assert not canary.exists()
    load = pickle.loads if form.startswith("bare") else lambda data: torch.load(io.BytesIO(data), weights_only=False)
    load(newest.read_bytes())  # the attack is a real one
    assert canary.exists()


# --- killed, at the places that matter --------------------------------------------------------------------------------

KILL_AT = """
checkpoints = Checkpoints(folder)
checkpoints.save(state_of(10), step=10, epoch=1)
place = "{place}"
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
publish, unlink, calls = checkpoint.publish, Path.unlink, []
if place == "before the rename": checkpoint.publish = die
if place == "between rename and marker": Checkpoints._write_marker = die
if place == "before the rename of the marker":
    checkpoint.publish = lambda *names: (calls.append(1), die() if len(calls) == 2 else publish(*names))
if place == "before pruning": Checkpoints.prune = die
if place == "in pruning": Path.unlink = lambda path, **_: die() if path.suffix == ".pt" else unlink(path)
checkpoints.save(state_of(20), step=20, epoch=2)
"""


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("before the rename", 10),
        ("between rename and marker", 10),
        ("before the rename of the marker", 10),
        ("before pruning", 20),
        ("in pruning", 20),
    ],
)
def test_killed_between_two_operations_the_newest_whole_one_is_used(victims, folder, caplog, place, step):
    victims.start(KILL_AT.format(place=place), folder)
    assert victims.wait() == -signal.SIGKILL, victims.told()
    assert len(names(folder)) > 2  # it did leave something
    checkpoints = Checkpoints(folder)
    assert is_state_of(checkpoints.load("last")[0], step)
    # A word on what was dropped: of the new one without its marker, or of the old one without it.
    left_out = {"between rename and marker": 20, "before the rename of the marker": 20, "in pruning": 10}.get(place)
    assert ("left out" in caplog.text) == (left_out is not None)
    assert left_out is None or f"step-000000{left_out}.pt" in caplog.text
    if step == 10:  # the run goes on and comes to the step that was lost: same names as if nobody had killed it
        save(checkpoints, 20)
        assert names(folder) == {"step-00000020.pt", "step-00000020.json"}
        assert is_state_of(checkpoints.load("last")[0], 20)
    save(checkpoints, 30)
    assert names(folder) == {"step-00000030.pt", "step-00000030.json"}


def test_killed_in_the_middle_of_writing(victims, folder):
    """SIGKILL while bytes go to the disk: seen by the temporary file that grows, so never before or after the write."""
    script = """
Checkpoints(folder).save(state_of(10), step=10, epoch=1)
write = atomic.DigestingFile._write_all
atomic.DigestingFile._write_all = lambda self, rest: (write(self, rest), time.sleep(0.05))
Checkpoints(folder).save({"model": {str(i): torch.zeros(1000) for i in range(500)}}, step=20, epoch=2)
"""
    victim = victims.start(script, folder)
    until(lambda: any(path.stat().st_size > 3000 for path in folder.glob(".step-00000020*.tmp")))
    checkpoints, being_written = Checkpoints(folder), next(folder.glob(".step-*.tmp"))
    save(checkpoints, 15)
    assert being_written.exists()  # a live process writes it: left alone
    os.kill(victim, signal.SIGKILL)
    assert victims.wait() == -signal.SIGKILL, victims.told()
    assert being_written.exists()
    assert is_state_of(checkpoints.load("last")[0], 15)
    save(checkpoints, 16)
    assert names(folder) == {"step-00000016.pt", "step-00000016.json"}


def test_a_data_file_whose_marker_is_being_written_is_left_alone(victims, folder):
    script = """
Checkpoints._write_marker = lambda *_: time.sleep(60)
Checkpoints(folder).save(state_of(10), step=10, epoch=1)
"""
    victim = victims.start(script, folder)
    until(lambda: (folder / "step-00000010.pt").exists())
    checkpoints = Checkpoints(folder)
    save(checkpoints, 20)
    assert "step-00000010.pt" in names(folder)
    os.kill(victim, signal.SIGKILL)
    victims.wait()
    checkpoints.prune()
    assert names(folder) == {"step-00000020.pt", "step-00000020.json"}


def test_killed_at_random_again_and_again(victims, folder):
    """A process that saves without a pause, killed at random: what is loaded is one whole state, the last committed."""
    script = """
checkpoints = Checkpoints(folder)
try: step = checkpoints.load("last")[1].step
except ConfigError: step = 0
while True:
    step += 1
    checkpoints.save(state_of(step, 200_000), step=step, epoch=0)
    print(step, flush=True)
"""
    generator, reached = random.Random(0), 0
    for _ in range(10):
        victim = victims.start(script, folder)
        until(lambda: any(word.isdigit() for word in victims.told().split()))  # some progress, on the slowest machine
        time.sleep(generator.uniform(0.0, 0.05))
        os.kill(victim, signal.SIGKILL)
        assert victims.wait() == -signal.SIGKILL, victims.told()
        committed = max(int(word) for word in victims.told().split() if word.isdigit())
        state, info = Checkpoints(folder).load("last")
        assert info.step in (committed, committed + 1)  # killed after the commit and before it was told
        assert info.step > reached
        assert is_state_of(state, info.step)
        reached = info.step
    save(Checkpoints(folder), reached + 1)
    assert names(folder) == {f"step-{reached + 1:08d}.pt", f"step-{reached + 1:08d}.json"}


def test_leftovers_are_removed_at_the_next_save(two):
    for name in (
        ".step-00000005.pt.1-ab.tmp",
        ".step-00000005.json.1-ab.tmp",
        "step-00000005.pt",
        "step-00000006.json",
    ):
        (two.folder / name).write_bytes(b"x")
    (two.folder / "notes.txt").write_text("mine")
    save(two, 30)
    expected = {f"step-000000{step}.{kind}" for step in (20, 30) for kind in ("pt", "json")} | {"notes.txt"}
    assert names(two.folder) == expected


def test_without_any_whole_checkpoint_nothing_is_pruned(two):
    for marker in two.folder.glob("*.json"):
        marker.unlink()
    two.prune()
    assert names(two.folder) == {"step-00000010.pt", "step-00000020.pt"}


def test_if_all_are_damaged_nothing_is_pruned(two):
    for path in two.folder.glob("*.pt"):
        path.write_bytes(b"x")
    two.prune()
    assert len(names(two.folder)) == 4


def test_on_a_file_system_without_locks_only_old_leftovers_go(two, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(atomic.fcntl, "flock", no_locks)
    fresh, old = two.folder / ".step-00000001.pt.1-a.tmp", two.folder / ".step-00000002.pt.1-a.tmp"
    for path in (fresh, old):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    save(two, 30)
    assert fresh.exists()
    assert not old.exists()


# --- no space, no permission ------------------------------------------------------------------------------------------


def assert_whole_after(folder: Path, before: set[str]) -> None:
    """The folder is as it was: same files, loadable, nothing temporary."""
    assert names(folder) == before
    assert is_state_of(Checkpoints(folder).load("last")[0], 20)


def test_a_limit_on_the_size_of_files_leaves_what_was_there(victims, two):
    """RLIMIT_FSIZE makes the very system call fail in the middle of the data, as a full disk does."""
    before = names(two.folder)
    script = """
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try: Checkpoints(folder).save(state_of(30, 100_000), step=30, epoch=3)
except CheckpointError as error: print(error.errno == errno.EFBIG, error)
"""
    output = victims.run(script, two.folder)
    assert output.startswith("True The checkpoint"), output
    assert "ulimit -f" in output
    assert "step-00000020.pt" in output
    assert_whole_after(two.folder, before)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_leaves_what_was_there(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(disk).encode(), b"tmpfs", 0, b"size=256k") != 0:
        pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        checkpoints = Checkpoints(disk / "checkpoints", keep_last=2)
        save(checkpoints, 10)
        save(checkpoints, 20)
        before = names(checkpoints.folder)
        with pytest.raises(
            CheckpointError, match=r"disk is full.*run_dir.*step-00000010.pt, step-00000020.pt"
        ) as caught:
            checkpoints.save(state_of(30, 100_000), step=30, epoch=3)
        assert caught.value.errno == errno.ENOSPC
        assert_whole_after(checkpoints.folder, before)
        leftover = checkpoints.folder / ".step-00000001.pt.1-a.tmp"  # a killed write filled the disk
        leftover.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        save(checkpoints, 40)
        assert not leftover.exists()
        # Byte by byte to the brim, so that the data fits and the marker may not.
        filler, free = disk / "filler", os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        size = checkpoints.latest().path.stat().st_size
        filler.write_bytes(bytes(free - (size // 4096 + 1) * 4096))
        before = names(checkpoints.folder)
        with pytest.raises(CheckpointError, match="disk is full"):
            save(checkpoints, 50)
        assert names(checkpoints.folder) == before
        assert is_state_of(checkpoints.load("last")[0], 40)
    finally:
        libc.umount2(str(disk).encode(), 2)


def test_no_room_for_the_marker_leaves_what_was_there(two, monkeypatch):
    before = names(two.folder)

    def full(self, path, *_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Checkpoints, "_write_marker", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        save(two, 30)
    assert_whole_after(two.folder, before)


def test_a_short_write_is_completed(two, monkeypatch):
    """The system may take fewer bytes than given; a marker or file cut that way must not be published."""
    write_all = atomic.DigestingFile._write_all

    class Stingy:
        def __init__(self, file):
            self.write = lambda data: file.write(data[:7])
            self.fileno = file.fileno

    def through_stingy(self, rest):
        file, self.file = self.file, Stingy(self.file)
        write_all(self, rest)
        self.file = file

    monkeypatch.setattr(atomic.DigestingFile, "_write_all", through_stingy)
    save(two, 30)
    assert is_state_of(two.load("last")[0], 30)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX")
def test_a_folder_without_write_permission_leaves_what_was_there(victims, two, tmp_path_factory):
    """Real permissions: root, which they do not bind, first becomes nobody."""
    before = names(two.folder)
    for parent in two.folder.parents:
        if os.geteuid() == 0 and parent.is_relative_to(tmp_path_factory.getbasetemp().parent):
            parent.chmod(0o755)
    two.folder.chmod(0o555)
    script = """
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try: Checkpoints(folder).save(state_of(30), step=30, epoch=3)
except CheckpointError as error: print(error.errno == errno.EACCES, error)
"""
    output = victims.run(script, two.folder)
    two.folder.chmod(0o755)
    assert output.startswith("True The checkpoint"), output
    assert "permissions" in output
    assert_whole_after(two.folder, before)


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_failing_system_call_leaves_what_was_there(two, monkeypatch, call):
    before = names(two.folder)

    def fails(*_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(CheckpointError, match="input/output error"):
        save(two, 30)
    monkeypatch.undo()
    assert_whole_after(two.folder, before)


def test_an_interrupt_while_writing_goes_through_and_leaves_nothing(two, monkeypatch):
    """An exception raised below torch's C++ writer must neither be lost nor end the process."""
    before = names(two.folder)

    def interrupted(self, rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.DigestingFile, "_write_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(two, 30)
    monkeypatch.undo()
    assert_whole_after(two.folder, before)


def test_old_ones_that_cannot_be_removed_do_not_end_the_run(tmp_path, monkeypatch, caplog):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 10)

    def denied(self, **_):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(Path, "unlink", denied)
    save(checkpoints, 20)
    monkeypatch.undo()
    assert "could not be removed" in caplog.text
    assert checkpoints.load("last")[1].step == 20


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_nan_is_never_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=10)
    for step, loss in enumerate([math.nan, 0.7, -math.inf, 0.3, 0.3, math.nan, math.inf]):
        save(checkpoints, step, **{"val/loss": loss})
    assert checkpoints.best().step == 3  # the first of equals
    assert checkpoints.load("best")[1].step == 3
    assert Checkpoints(tmp_path, direction="max").best().step == 1


def test_without_a_figure_there_is_no_best(two):
    assert two.best() is None


@pytest.mark.parametrize("seed", range(15))
def test_the_last_healthy_and_the_best_are_always_there(tmp_path, seed):
    """Any sequence of saves, refusals, restarts, cut files and NaN figures: the rules hold after each."""
    generator = random.Random(seed)
    keep_last, keep_best = generator.randint(1, 3), generator.randint(0, 3)
    direction = generator.choice(["min", "max"])

    def reopened() -> Checkpoints:
        return Checkpoints(tmp_path, keep_last=keep_last, keep_best=keep_best, direction=direction)

    checkpoints, written = reopened(), []  # what a rotation without limits would hold, oldest first
    for step in range(1, 16):
        if generator.random() < 0.2:
            checkpoints = reopened()
        if generator.random() < 0.2:
            broken = {"model": {"w": torch.tensor([math.nan])}}
            assert checkpoints.save(broken, step=step, epoch=0) is None
        else:
            loss = generator.choice([math.nan, *(round(generator.random(), 1) for _ in range(4))])
            checkpoints.save(
                {"model": {"w": torch.tensor([float(step)])}}, step=step, epoch=0, metrics={"val/loss": loss}
            )
            written.append((step, loss))
        there = {info.step for info in checkpoints.all()}
        healthy = [pair for pair in written if not math.isnan(pair[1])]
        ranked = sorted(healthy, key=lambda pair: pair[1] * (1 if direction == "min" else -1))
        wanted = {step for step, _ in written[-keep_last:] + ranked[:keep_best] + healthy[-1:]}
        assert there == wanted
        for kept in there:
            assert checkpoints.load(tmp_path / f"step-{kept:08d}.pt")[0]["model"]["w"].item() == kept
    assert len(names(tmp_path)) == 2 * len(there)


def test_figures_that_turn_nan_do_not_rotate_the_last_good_one_away(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    save(checkpoints, 1, **{"val/loss": 0.5})
    for step in (2, 3, 4):
        save(checkpoints, step, **{"val/loss": math.nan})
    assert [info.step for info in checkpoints.all()] == [1, 4]
    save(checkpoints, 5, **{"val/loss": 0.4})
    assert [info.step for info in checkpoints.all()] == [5]


def test_a_run_must_keep_something():
    with pytest.raises(ValueError, match="keep_last must be at least 1"):
        Checkpoints("x", keep_last=0)
    with pytest.raises(ValueError, match="min, max or auto"):
        Checkpoints("x", direction="down")


@pytest.mark.parametrize(
    "name", ["val/loss", "val/MeanSquaredError", "perplexity", "val/mse", "MAE", "rmse", "bce_loss"]
)
def test_losses_and_errors_fall(name):
    assert is_lower_better(name)
    assert not is_lower_better(name, "max")


@pytest.mark.parametrize("name", ["val/accuracy", "auroc", "f1", "r2", "bleu"])
def test_all_else_rises(name):
    assert not is_lower_better(name)
    assert is_lower_better(name, Direction.min)


@pytest.mark.parametrize(
    ("value", "than", "lower", "expected"),
    [
        (0.1, 0.2, True, True),
        (0.2, 0.1, True, False),
        (0.2, 0.1, False, True),
        (0.1, 0.1, True, False),
        (math.nan, 0.1, True, False),
        (math.nan, math.nan, True, False),
        (0.1, math.nan, True, True),
        (0.1, math.inf, True, True),
        (0.1, -math.inf, False, True),
    ],
)
def test_better(value, than, lower, expected):
    assert is_better(value, than, lower=lower) is expected


def test_better_by_more_than_the_least_improvement():
    assert not is_better(0.95, 1.0, lower=True, min_delta=0.1)
    assert is_better(0.85, 1.0, lower=True, min_delta=0.1)


# --- a model that has changed -----------------------------------------------------------------------------------------


def test_differences_name_each_tensor():
    saved = {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(1), "same": torch.ones(5)}
    model = {"a": torch.ones(4), "b": torch.ones(2, 2, dtype=torch.float64), "d": torch.ones(1), "same": torch.zeros(5)}
    assert state_differences(saved, model) == [
        "a is float32 (3,) in the checkpoint and float32 (4,) in the model",
        "b is float32 (2, 2) in the checkpoint and float64 (2, 2) in the model",
        "d is in the model but not in the checkpoint",
        "c is in the checkpoint but not in the model",
    ]
    assert state_differences(saved, saved) == []


def test_a_wrapped_model_is_recognised():
    plain = nn.Linear(2, 2).state_dict()
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in plain.items()}
    assert "_orig_mod." in state_differences(wrapped, plain)[0]
    assert "_orig_mod." not in " ".join(state_differences(plain, {}))


def test_a_checkpoint_of_forty_five_megabytes_costs_less_than_a_second(tmp_path, monkeypatch):
    """Our own part, best of three, without the wait for the disk. Usual are 0.1 s; a pass in Python would break it."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    state = {"model": {str(i): torch.randn(187_500) for i in range(60)}}
    seconds = []
    for step in range(3):
        started = time.perf_counter()
        path = Checkpoints(tmp_path).save(state, step=step, epoch=0)
        seconds.append(time.perf_counter() - started)
    assert path.stat().st_size > 45_000_000
    assert min(seconds) < 1.0
