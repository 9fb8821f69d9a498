"""What the fuse costs: the loop without it, with it, and with anomaly windows, beside a hand-written loop.

The same measurement as loop.py, on an MLP, a CNN and a Transformer; anomaly mode at every step stands beside it, since
that is what people turn on today. Run with `OMP_NUM_THREADS=1 python benchmarks/guard.py`.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from loop import WORKLOADS, Loop, Row, Workload, compare, finish, plain, safe_trainer, strays, table
from torch import Tensor, nn
from torch.utils.data import DataLoader

LIMITS = {
    ("loop", "MLP"): 1.10,
    ("loop", "CNN"): 1.01,
    ("loop", "Transformer"): 1.01,
    ("guard", "MLP"): 1.20,
    ("guard", "CNN"): 1.01,
    ("guard", "Transformer"): 1.01,
    ("guard+windows", "MLP"): 1.28,
    ("guard+windows", "CNN"): 1.02,
    ("guard+windows", "Transformer"): 1.03,
}
"""What each may cost at most, plain = 1."""


class Transformer(nn.Module):
    """Four encoder layers over sequences of 32 vectors, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, sequences: Tensor) -> Tensor:
        return self.head(self.encoder(sequences).mean(1))


TRANSFORMER = Workload(
    name="Transformer", model=Transformer, shape=(32, 64), batch_size=32, warm=5, steps=30, rounds=21
)


def anomaly_mode(model: nn.Module, loss_fn: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    with torch.autograd.set_detect_anomaly(True):
        plain(model, loss_fn, optimizer, loader)


# Windows are drawn one in a hundred steps, so their cost is measured over more steps than a round has: the detector's
# warm-up is left out by the clock, and a block of the sample rate is as long as the steps under it.
LOOPS: dict[str, Loop] = {
    "plain": plain,
    "loop": partial(safe_trainer, options={"guard.enabled": False, "monitor.every": 0}),
    "guard": partial(safe_trainer, options={"monitor.every": 0}),
    "guard+windows": partial(safe_trainer, options={"monitor.every": 0, "anomaly_detection": True, "sample_rate": 100}),
    "anomaly mode always": anomaly_mode,
}


def over(rows: list[Row]) -> list[str]:
    """What costs more than it may, in sentences."""
    found = []
    for row in rows:
        limit = LIMITS.get((row.loop, row.workload))
        # a window is what happens in few steps: only the mean knows of it
        ratio = row.ratio if row.loop == "guard+windows" else row.typical_ratio
        if limit is not None and ratio > limit:
            found.append(f"{row.loop} on the {row.workload}: {ratio:.3f}, at most {limit}")
    return found


def main() -> int:
    """Measure and print the table; exit status 1 if a limit is passed or the weights differ from plain's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["MLP", "CNN", "Transformer"])
    parser.add_argument("--loops", nargs="+", default=list(LOOPS)[1:])
    parser.add_argument("--rounds", type=int, help="in place of each workload's own number")
    parser.add_argument("--steps", type=int, help="steps of a round, in place of each workload's own number")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for workload in [*WORKLOADS, TRANSFORMER]:
        if workload.name in asked.workloads:
            workload.steps = asked.steps or workload.steps
            chosen = {name: LOOPS[name] for name in ("plain", *asked.loops)}
            rows += compare(workload, chosen, asked.rounds or workload.rounds)
            print(table(rows[-len(chosen) :]), flush=True)
    return finish(rows, over(rows) + strays(rows), asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
