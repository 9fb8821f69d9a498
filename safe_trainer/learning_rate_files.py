"""What the learning-rate finder leaves in a run's folder: the curve as CSV, a plot, a script that draws it again."""

from __future__ import annotations

import csv
from pathlib import Path

from safe_trainer.preflight.learning_rate import LearningRateCurve

SCRIPT = '''"""Draws lr_finder.csv again. Needs matplotlib."""

import csv
from pathlib import Path

import matplotlib.pyplot as plt

here = Path(__file__).parent
with open(here / "lr_finder.csv", newline="") as file:
    rows = list(csv.DictReader(file))
rates = [float(row["lr"]) for row in rows]
plt.semilogx(rates, [float(row["loss"]) for row in rows], color="0.8", label="loss")
plt.semilogx(rates, [float(row["smoothed"]) for row in rows], label="smoothed")
plt.xlabel("learning rate")
plt.ylabel("loss")
plt.legend()
plt.show()
'''


def write_curve(curve: LearningRateCurve, folder: Path) -> None:
    """Write lr_finder.csv, lr_finder.png and plot_lr_finder.py into `folder`."""
    with (folder / "lr_finder.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["lr", "loss", "smoothed"])
        rows.writerows(zip(curve.rates, curve.losses, curve.smoothed, strict=True))
    (folder / "plot_lr_finder.py").write_text(SCRIPT, encoding="utf-8")
    _plot(curve, folder / "lr_finder.png")


def _plot(curve: LearningRateCurve, path: Path) -> None:
    from matplotlib.figure import Figure  # half a second; and without pyplot no display is asked for

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.semilogx(curve.rates, curve.losses, color="0.8", label="loss")
    axes.semilogx(curve.rates, curve.smoothed, label="smoothed")
    if curve.suggestion is not None:
        axes.axvline(curve.suggestion, color="C2", linestyle="--", label=f"suggestion {curve.suggestion:.2g}")
    low, high = min(curve.smoothed), max(curve.smoothed[: max(1, len(curve.smoothed) // 2)])
    axes.set_ylim(low - 0.1 * (high - low), high + 0.3 * (high - low or 1.0))  # the divergence would hide the valley
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(path, dpi=120)
