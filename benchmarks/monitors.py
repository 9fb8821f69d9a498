"""What monitors and rules cost: a run of 1,000 steps with everything at its defaults, and one measured step.

The same measurement as loop.py, on an MLP, a CNN, a Transformer and a ResNet-18. Beside the measured step stands what
people write by hand: forward hooks that call `.item()` for each layer. Run with
`OMP_NUM_THREADS=1 python benchmarks/monitors.py`: half an hour; `--workloads MLP CNN` takes a few minutes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torchvision
from guard import TRANSFORMER
from loop import WORKLOADS, Loop, Row, Workload, compare, finish, plain, safe_trainer, strays, table
from torch import nn
from torch.utils.data import DataLoader

LIMITS = {
    ("defaults", "MLP"): 1.25,
    ("defaults", "CNN"): 1.02,
    ("defaults", "Transformer"): 1.02,
    ("defaults", "ResNet-18"): 1.02,
    ("measured", "CNN"): 1.6,
    ("measured", "Transformer"): 1.5,
    ("measured", "ResNet-18"): 1.4,
}
"""What each may cost at most, plain = 1."""


def resnet18() -> nn.Module:
    return torchvision.models.resnet18(num_classes=10)


RESNET = Workload(name="ResNet-18", model=resnet18, shape=(3, 64, 64), batch_size=16, warm=1, steps=20, rounds=9)
ALL = [*WORKLOADS, TRANSFORMER, RESNET]

# Steps 1, 10, 30 and every 100th are measured: a run of 1,000 has 13 of them, and the clock starts with the first step.
LONG = {
    "MLP": {"steps": 1000, "rounds": 15},
    "CNN": {"steps": 1000, "rounds": 5},
    "Transformer": {"steps": 1000, "rounds": 5},
    "ResNet-18": {"steps": 1000, "rounds": 3},
}


def hooks_with_item(model: nn.Module, loss_fn: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    """What many write: mean, deviation, largest value and share of zeros of every layer, each fetched at once."""
    seen: list[tuple[float, ...]] = []

    def note(_: nn.Module, __: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if isinstance(output, torch.Tensor):
            output = output.detach()
            largest, zeros = output.abs().max().item(), (output == 0).float().mean().item()
            seen.append((output.mean().item(), output.std().item(), largest, zeros))

    handles = [part.register_forward_hook(note) for part in model.modules() if not list(part.children())]
    plain(model, loss_fn, optimizer, loader)
    for handle in handles:
        handle.remove()


def over(rows: list[Row]) -> list[str]:
    """What costs more than it may, in sentences."""
    found = []
    for row in rows:
        limit = LIMITS.get((row.loop, row.workload))
        # few steps of a run are measured, so only the mean knows of them; where all are, the median is steadier
        ratio = row.ratio if row.loop == "defaults" else row.typical_ratio
        if limit is not None and ratio > limit:
            found.append(f"{row.loop} on the {row.workload}: {ratio:.3f}, at most {limit}")
    return found


def main() -> int:
    """Measure and print the tables; exit status 1 if a limit is passed or the weights differ from plain's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=[workload.name for workload in ALL])
    parser.add_argument("--parts", nargs="+", default=["defaults", "measured"], choices=["defaults", "measured"])
    parser.add_argument("--rounds", type=int, help="in place of each workload's own number")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loops: dict[str, dict[str, Loop]] = {
        "defaults": {"plain": plain, "defaults": partial(safe_trainer, options={})},
        "measured": {
            "plain": plain,
            "measured": partial(safe_trainer, options={"monitor.every": 1}),
            ".item() hooks": hooks_with_item,
        },
    }
    rows: list[Row] = []
    for workload in ALL:
        if workload.name not in asked.workloads:
            continue
        for part in asked.parts:
            sized = replace(workload, warm=1, **LONG[workload.name]) if part == "defaults" else workload
            rows += compare(sized, loops[part], asked.rounds or sized.rounds)
            print(table(rows[-len(loops[part]) :]), flush=True)
    return finish(rows, over(rows) + strays(rows), asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
