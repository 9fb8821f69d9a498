"""The benchmark compares like with like: equal weights are seen, unequal ones too, and set-up stays off the clock."""

import importlib.util
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_the_loop", ROOT / "benchmarks" / "loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up while it is made
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(bench: ModuleType) -> object:
    return bench.Workload(name="small", model=bench.mlp, shape=(64,), batch_size=4, warm=3, steps=5, rounds=2)


def test_safe_trainer_ends_with_the_weights_of_the_hand_written_loop(bench: ModuleType, small: object) -> None:
    loops = {"plain": bench.plain, "safe_trainer": partial(bench.safe_trainer, options={})}
    rows = bench.compare(small, loops, rounds=2)
    assert [row.loop for row in rows] == ["plain", "safe_trainer"]
    assert all(row.same_weights and row.milliseconds > 0 for row in rows)
    assert rows[0].ratio == 1.0
    assert "| small | safe_trainer |" in bench.table(rows)


def test_a_loop_that_trains_otherwise_is_seen(bench: ModuleType, small: object) -> None:
    def lazy(model: nn.Module, loss_fn: nn.Module, optimizer: object, loader: DataLoader) -> None:
        for inputs, _ in loader:
            model(inputs)

    rows = bench.compare(small, {"plain": bench.plain, "lazy": lazy}, rounds=1)
    assert [row.same_weights for row in rows] == [True, False]
    assert bench.table(rows).splitlines()[-1].endswith("| NO |")


def test_setting_up_is_not_on_the_clock(bench: ModuleType, small: object) -> None:
    def slow_start(model: nn.Module, loss_fn: nn.Module, optimizer: object, loader: DataLoader) -> None:
        time.sleep(0.5)
        bench.plain(model, loss_fn, optimizer, loader)
        time.sleep(0.5)

    seconds, processor_seconds, _, _ = bench.measure(small, small.data(), slow_start)
    assert 0 < seconds < 0.1  # were a pause counted, a step would take 0.1 s at least
    assert 0 < processor_seconds < 0.1


def test_a_loop_that_takes_other_batches_is_an_error(bench: ModuleType, small: object) -> None:
    with pytest.raises(RuntimeError, match="took 0 batches instead of 8"):
        bench.measure(small, small.data(), lambda *_: None)
