"""What the loop itself costs: seconds per step of SafeTrainer, PyTorch Lightning and Ignite beside a hand-written loop.

All four train the same model from the same weights on the same batches with the same optimizer, in one process, one
after the other in each round and in another order each round; what counts is the ratio to plain within a round. The
clock is read where the data set hands out a batch, so building the trainer and its first steps are left out for all.
Run with `make bench`, or `OMP_NUM_THREADS=1 python benchmarks/loop.py` once the extra `bench` is installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class ClockedDataset(TensorDataset):
    """A TensorDataset that notes when each batch is asked for."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.asked_at: list[tuple[float, float]] = []
        """For each batch: the time on the wall, and the processor time of this process, in seconds."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        self.asked_at.append((time.perf_counter(), time.process_time()))
        return [self[index] for index in indices]  # as a DataLoader does for any data set


@dataclass(kw_only=True)
class Workload:
    """A model and its batches."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of one sample."""
    batch_size: int
    warm: int
    """Steps before the clock starts."""
    steps: int
    """Steps under the clock in a round."""
    rounds: int

    def data(self) -> ClockedDataset:
        torch.manual_seed(1)
        count = (self.warm + self.steps) * self.batch_size
        return ClockedDataset(torch.randn(count, *self.shape), torch.randint(10, (count,)))


def mlp() -> nn.Module:
    hidden = [part for _ in range(2) for part in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), *hidden, nn.Linear(128, 10))


def cnn() -> nn.Module:
    def block(width_in: int, width: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(width_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*block(3, 16, 1), *block(16, 32, 2), *block(32, 64, 2), *head)


WORKLOADS = [
    Workload(name="MLP", model=mlp, shape=(64,), batch_size=32, warm=100, steps=400, rounds=25),
    Workload(name="CNN", model=cnn, shape=(3, 32, 32), batch_size=64, warm=5, steps=30, rounds=21),
]

Loop = Callable[[nn.Module, nn.Module, torch.optim.Optimizer, DataLoader], None]  # model, loss, optimizer, batches


def plain(model: nn.Module, loss_fn: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()


def safe_trainer(
    model: nn.Module,
    loss_fn: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    *,
    options: dict,
    logging: bool = False,
) -> None:
    """Guard and monitors at their defaults. Peers write no checkpoint and no log: neither is the loop's own cost."""
    from safe_trainer import SafeTrainer

    with tempfile.TemporaryDirectory() as folder:
        quiet = {"progress": False, "checkpoint.enabled": False, "report.enabled": False, "run_dir": folder}
        config = {"max_steps": len(loader), **quiet, **options}
        SafeTrainer(model, loss_fn, optimizer, loader, config=config, loggers=None if logging else ()).fit()


def lightning(model: nn.Module, loss_fn: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            inputs, targets = batch
            return loss_fn(self.model(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_model_summary=False, **silent).fit(Module(), loader)


def ignite(model: nn.Module, loss_fn: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    from ignite.engine import create_supervised_trainer

    create_supervised_trainer(model, optimizer, loss_fn).run(loader, max_epochs=1)


def measure(workload: Workload, data: ClockedDataset, loop: Loop) -> tuple[float, float, float, dict[str, Tensor]]:
    """Of a step in one training: mean seconds, mean processor seconds, median seconds; and the weights it ends with."""
    torch.manual_seed(0)
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data.asked_at.clear()
    gc.collect()
    loop(model, nn.CrossEntropyLoss(), optimizer, DataLoader(data, batch_size=workload.batch_size))
    if len(data.asked_at) != workload.warm + workload.steps:
        raise RuntimeError(f"a loop took {len(data.asked_at)} batches instead of {workload.warm + workload.steps}")
    (started, started_cpu), (ended, ended_cpu) = data.asked_at[workload.warm - 1], data.asked_at[-1]
    clock = [wall for wall, _ in data.asked_at[workload.warm - 1 :]]
    typical = statistics.median(after - before for before, after in pairwise(clock))
    return (ended - started) / workload.steps, (ended_cpu - started_cpu) / workload.steps, typical, model.state_dict()


@dataclass(kw_only=True)
class Row:
    """One line of the table: a loop on a workload."""

    workload: str
    loop: str
    milliseconds: float
    """Per step, median over the rounds."""
    ratio: float
    """To plain in the same round, median."""
    low: float
    """First quartile of the ratios."""
    high: float
    """Third quartile of the ratios."""
    typical_ratio: float
    """The same for the median step of a round: what other programs on the machine do to single steps leaves it alone,
    and so does what happens in few steps only, as an anomaly window or a row of the log."""
    cpu_ratio: float
    """The same for processor time, median: other programs on the machine disturb it less."""
    same_weights: bool
    """Whether all weights and buffers at the end equal those of plain, bit for bit, in every round."""


def compare(workload: Workload, loops: dict[str, Loop], rounds: int) -> list[Row]:
    """All loops on one workload, interleaved."""
    data, names = workload.data(), list(loops)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    typical: dict[str, list[float]] = {name: [] for name in names}
    same = dict.fromkeys(names, True)
    for turn in range(rounds):
        weights = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wall, cpu, middle, weights[name] = measure(workload, data, loops[name])
            typical[name].append(middle)
            seconds[name].append(wall)
            processor[name].append(cpu)
        for name in names:
            same[name] &= all(torch.equal(weights["plain"][key], weights[name][key]) for key in weights["plain"])
    rows = []
    for name in names:
        ratios = to_plain(seconds, name)
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        rows.append(
            Row(
                workload=workload.name,
                loop=name,
                milliseconds=1000 * statistics.median(seconds[name]),
                ratio=middle,
                low=low,
                high=high,
                typical_ratio=statistics.median(to_plain(typical, name)),
                cpu_ratio=statistics.median(to_plain(processor, name)),
                same_weights=same[name],
            )
        )
    return rows


def to_plain(seconds: dict[str, list[float]], name: str) -> list[float]:
    return [own / base for own, base in zip(seconds[name], seconds["plain"], strict=True)]


def table(rows: list[Row]) -> str:
    measured = ("to plain", "quartiles", "typical step", "processor time")
    titles = ("workload", "loop", "ms a step", *measured, "same weights")
    lines = [titles, tuple("---" for _ in titles)]
    for row in rows:
        spread, same = f"{row.low:.3f} to {row.high:.3f}", "yes" if row.same_weights else "NO"
        robust = f"{row.typical_ratio:.3f}", f"{row.cpu_ratio:.3f}"
        figures = f"{row.milliseconds:.3f}", f"{row.ratio:.3f}", spread, *robust
        lines.append((row.workload, row.loop, *figures, same))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def strays(rows: list[Row]) -> list[str]:
    """Loops that ended with other weights than plain, in sentences."""
    return [f"{row.loop} on the {row.workload}: other weights than plain" for row in rows if not row.same_weights]


def finish(rows: list[Row], problems: list[str], path: Path | None) -> int:
    """Print the environment and what is wrong, write the figures to `path`; the exit status."""
    print(json.dumps(environment()))
    if path is not None:
        report = {"environment": environment(), "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


def environment() -> dict[str, str | int]:
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    names = ("torch", "safe-trainer", "lightning", "pytorch-ignite")
    machine = {"python": platform.python_version(), "machine": platform.machine(), "threads": torch.get_num_threads()}
    return {**machine, **{name: installed(name) for name in names}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--loops", nargs="+", default=["safe_trainer", "safe_trainer+log", "lightning", "ignite"], help="beside plain"
    )
    parser.add_argument("--workloads", nargs="+", default=[workload.name for workload in WORKLOADS])
    parser.add_argument("--rounds", type=int, help="in place of each workload's own number")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="options for SafeTrainer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args()


def main() -> int:
    """Measure, print the table; exit status 1 if SafeTrainer's weights are not those of the hand-written loop."""
    asked = arguments()
    torch.set_num_threads(1)  # more threads add noise, and the loop's own cost has nothing to do with them
    warnings.filterwarnings("ignore")  # peers remark on few workers and missing validation data,
    logging.disable(logging.WARNING)  # and on the machine
    options = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in asked.set)}
    known = {
        "safe_trainer": partial(safe_trainer, options=options),
        "safe_trainer+log": partial(safe_trainer, options=options, logging=True),
        "lightning": lightning,
        "ignite": ignite,
    }
    loops: dict[str, Loop] = {"plain": plain, **{name: known[name] for name in asked.loops}}
    rows: list[Row] = []
    for workload in WORKLOADS:
        if workload.name in asked.workloads:
            rows += compare(workload, loops, asked.rounds or workload.rounds)
    print(table(rows))
    return finish(rows, strays([row for row in rows if row.loop.startswith("safe_trainer")]), asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
