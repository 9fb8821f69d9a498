"""The tables of `Monitors.report`: loss, activations, gradients, updates. Reads measurements and prints; needs rich.

The words in the tables describe; they are no alarms. Whether a magnitude does harm cannot be seen from the magnitude.
Each threshold is a constant with its reason here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from safe_trainer.utils.measurements import LayerStatistics, Measurement, ParameterStatistics
from safe_trainer.utils.statistics import trend

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["activation_class", "gradient_class", "loss_health", "print_report", "update_class"]

DEAD_SHARE = 0.8
"""Units that put out nothing but zeros over the window. Zeros alone say nothing: half of a healthy ReLU's outputs are
zeros, and sparse healthy networks have over 70 %; of *units* a healthy layer loses few."""
SATURATED_SHARE = 0.5
"""Outputs with a derivative below 1e-3. Half is where SageMaker Debugger and TheDeepChecker draw the line, both with a
weaker notion of flat."""
COLLAPSED_SPREAD = 1e-3
"""Samples that differ by a thousandth of the layer's spread look alike to all that follows."""
EXPLODING_GROWTH = 100.0
"""Against the median of the layer's own earlier measurements. Healthy training moves a layer's scale by factors of a
few; an absolute bound would flag pixels from 0 to 255 and the massive activations of healthy Transformers."""
EXPLODING_DEPTH = 1000.0
"""Against the first layer. A residual stream without normalisation grows with the square root of the depth or so."""
EARLIER_NEEDED = 3
"""Measurements of a layer before its own past is a yardstick."""
FLOW = 1000.0
"""Ratio of a layer's gradient to that of the last layer, either way: three decades is the customary mark for gradients
that vanish, and AutoTrainer's (1e-3). Norms are compared, not means: a pooling layer spreads a gradient over more
elements, each smaller."""
UPDATES = (1e-6, 1e-1)
"""Update over weight of a matrix, two decades and more on either side of the customary 1e-3 (CS231n); on the small side
float32 starts to lose what is added. Biases and scales may start at zero, where any step is large."""
LEAST_LOSSES = 20
"""Fewer tell no trend: noise from batch to batch hides it."""
RECENT_LOSSES = 200
"""The trend is that of the latest ones; falling long ago is no news."""
SURE = 0.99
"""Probability, with autocorrelation allowed for, from which a trend is called one."""
WIDE = 100
"""Columns of the terminal from which all columns of the tables fit."""
STYLES = {
    "healthy": "green", "falling": "green", "dead": "red", "not finite": "bold red", "exploding": "red",
    "zero": "yellow", "saturated": "yellow", "collapsed": "yellow", "vanishing": "yellow", "rising": "yellow",
    "large": "yellow", "tiny": "yellow", "none came": "yellow",
}  # fmt: skip
ZEROING = {"ReLU", "ReLU6", "Hardswish", "Threshold", "RReLU", "GELU", "SiLU", "Hardshrink", "Softshrink", "relu()"}


def loss_health(losses: Sequence[float]) -> tuple[str, str]:
    """A word for the curve of the losses, and the figures behind it."""
    bad = sum(not math.isfinite(loss) for loss in losses)
    if bad:
        return "not finite", f"{bad} of the last {len(losses)} losses are NaN or infinite"
    if len(losses) < LEAST_LOSSES:
        return "too few", f"{len(losses)} losses were noted; a trend takes {LEAST_LOSSES}"
    recent = losses[-RECENT_LOSSES:]
    quarter = len(recent) // 4
    begin, end = recent[:quarter], recent[-quarter:]
    figures = f"from {_number(median(begin))} to {_number(median(end))} over the last {len(recent)} noted"
    rising = trend(recent).probability_rising
    # A steep curve is far from a straight line and makes its slope unsure, but then the quarters do not even overlap:
    # by chance five losses all lie below five others in 1 of 252 cases.
    if max(end) < min(begin) or rising < 1 - SURE:
        return "falling", figures
    return ("rising", figures) if min(end) > max(begin) or rising > SURE else ("level", f"{figures}, within its noise")


def activation_class(layer: LayerStatistics, first: LayerStatistics, earlier: Sequence[float] = ()) -> str:
    """A word for a layer's outputs.

    Args:
        first: the first layer that was run, the yardstick for growth through the network.
        earlier: root mean squares of the same layer at earlier measured steps.
    """
    if not layer.finite:
        return "not finite"
    if layer.abs_max == 0 and layer.kind not in ZEROING:
        return "zero"  # a branch that starts at zero on purpose looks like this as well, until its weights move
    if layer.inactive_window_share >= DEAD_SHARE and layer.kind in ZEROING:
        return "dead"
    scale = layer.root_mean_square
    grown = len(earlier) >= EARLIER_NEEDED and scale > EXPLODING_GROWTH * median(earlier) > 0
    if grown or scale > EXPLODING_DEPTH * first.root_mean_square > 0:
        return "exploding"
    if layer.saturated_share is not None and layer.saturated_share >= SATURATED_SHARE:
        return "saturated"
    alike = layer.sample_spread is not None and layer.sample_spread < COLLAPSED_SPREAD
    constant = layer.std == 0 and layer.shape[:1] > (1,)
    if (alike or constant) and not layer.kind.startswith("Embedding"):  # which sees indices, not samples
        return "collapsed"
    return "healthy"


def gradient_class(layer: LayerStatistics, last: float | None, reached: float) -> str:
    """A word for the gradient that arrives at a layer's output.

    Args:
        last: norm at the last layer that has one.
        reached: largest norm at this layer and those before it. What arrives at an earlier layer has not vanished on
            the way: a branch beside a residual stream may be given little, and in a healthy Transformer is.
    """
    if layer.gradient_norm is None:
        return "none came" if layer.needs_gradient else "frozen"
    if not math.isfinite(layer.gradient_norm):
        return "not finite"
    if layer.gradient_abs_max == 0:
        return "zero"
    if not last or not math.isfinite(last):
        return "healthy"
    if layer.gradient_norm > FLOW * last:
        return "exploding"
    return "vanishing" if reached * FLOW < last else "healthy"


def update_class(parameter: ParameterStatistics) -> str:
    """A word for how far a parameter moved."""
    ratio = parameter.update_ratio
    if ratio is None:
        return "-"
    if not math.isfinite(ratio):
        return "not finite"
    if ratio == 0:
        return "zero"
    if len(parameter.shape) < 2:
        return "-"
    return "tiny" if ratio < UPDATES[0] else "large" if ratio > UPDATES[1] else "healthy"


def print_report(history: Sequence[Measurement], losses: Sequence[float], console: Console | None = None) -> None:
    """Print losses, and the tables of the latest measurement."""
    from rich.console import Console

    console = console or Console()
    console.print(_heading(history))
    if losses:
        console.print(_loss_lines(losses))
    if not history:
        return
    latest = history[-1]
    if latest.layers:
        console.print(_activations(history, console.width))
        console.print(_gradients(latest, console.width, blocks=(console.encoding or "").lower().startswith("utf")))
    if latest.parameters:
        console.print(_updates(latest, console.width))
    for note in latest.notes:
        console.print(f"Note: {note}.", style="yellow", markup=False, highlight=False)


def _heading(history: Sequence[Measurement]) -> Text:
    from rich.text import Text

    if not history:
        return Text("Monitors: no step has been measured yet.", style="bold")
    latest = history[-1]
    count = latest.window_steps
    window = "this step alone" if count == 1 else f"the last {count} measured steps"
    return Text.assemble(
        (f"Monitors, step {latest.step}", "bold"), f"; {len(history)} measured so far; idle units are those of {window}"
    )


def _loss_lines(losses: Sequence[float]) -> Text:
    from rich.text import Text

    word, figures = loss_health(losses)
    latest = "  ".join(_number(loss) for loss in losses[-5:])
    return Text.assemble("\nLoss: ", (word, STYLES.get(word, "")), f" ({figures})\nlatest: {latest}")


def _table(title: str, caption: str, names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """A table with a word as the last cell of each row; names are cut in the middle if the terminal is narrow."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left",
        caption_justify="left", title_style="bold", caption_style="dim", pad_edge=False,
    )  # fmt: skip
    for name in names:
        text = name in ("layer", "kind", "parameter", "class", "")
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    rest = sum(max(len(name), *(len(row[place]) for row in rows)) + 2 for place, name in enumerate(names) if place)
    for row in rows:
        cells = [Text(cell) for cell in (_shortened(row[0], max(width - rest - 1, 12)), *row[1:-1])]
        table.add_row(*cells, Text(row[-1], style=STYLES.get(row[-1], "dim")))
    return table


def _shortened(name: str, room: int) -> str:
    """The name, or its begin and its end, in at most `room` characters."""
    if len(name) <= room:
        return name
    front = room // 2
    return f"{name[:front]}…{name[front - room + 1 :]}"


def _activations(history: Sequence[Measurement], width: int) -> Table:
    wide = width >= WIDE
    latest = history[-1]
    caption = (
        f"idle: units that were zero for every sample; from {DEAD_SHARE:.0%} a layer of ReLUs or the like is dead. "
        f"flat: outputs with a derivative below 1e-3; from {SATURATED_SHARE:.0%} saturated. spread: how much of the "
        f"variation is between samples; below {COLLAPSED_SPREAD:g} collapsed. exploding: {EXPLODING_GROWTH:g} times "
        f"its own past or {EXPLODING_DEPTH:g} times the first layer. Zeros as such are normal."
    )
    names = [
        "layer",
        *(["kind"] if wide else []),
        "mean",
        "std",
        "abs max",
        "zeros",
        "idle",
        "flat",
        "spread",
        "class",
    ]
    rows: list[list[str]] = []
    first = next(iter(latest.layers.values()))
    for name, layer in latest.layers.items():
        past = [m.layers[name].root_mean_square for m in history[:-1] if name in m.layers and m.layers[name].finite]
        spread = "-" if layer.sample_spread is None else f"{layer.sample_spread:.2g}"
        cells = [name, *([layer.kind] if wide else []), *map(_number, (layer.mean, layer.std, layer.abs_max))]
        cells += [*map(_share, (layer.zero_share, layer.inactive_window_share, layer.saturated_share)), spread]
        rows.append([*cells, activation_class(layer, first, past)])
    return _table("\nActivations", caption, names, rows, width)


def _gradients(latest: Measurement, width: int, *, blocks: bool) -> Table:
    wide = width >= WIDE
    reached = [layer for layer in latest.layers.values() if layer.gradient_norm]
    last = reached[-1].gradient_norm if reached else None
    caption = (
        "Of the loss with respect to the layer's output, first layer first. "
        + ("idle: units whose every gradient is exactly zero. " if wide else "")
        + "flow: norm over that of the last layer, a "
        f"decade to two marks; {FLOW:g} times is exploding; vanishing is 1/{FLOW:g}, "
        "unless more arrives at an earlier layer."
    )
    names = ["layer", *(["kind"] if wide else []), "norm", "abs max", "zeros", "idle", "flow", "", "class"]
    names = [name for name in names if wide or name != "idle"]
    rows, most = [], 0.0
    for name, layer in latest.layers.items():
        flow = None if layer.gradient_norm is None or not last else layer.gradient_norm / last
        cells = [name, *([layer.kind] if wide else []), *map(_number, (layer.gradient_norm, layer.gradient_abs_max))]
        cells += [_share(layer.gradient_zero_share), *([_share(layer.gradient_idle_share)] if wide else [])]
        cells += [_number(flow), _bar(flow, "█" if blocks else "#")]
        if layer.gradient_norm is not None and math.isfinite(layer.gradient_norm):
            most = max(most, layer.gradient_norm)
        rows.append([*cells, gradient_class(layer, last, most)])
    return _table("\nGradients", caption, names, rows, width)


def _bar(flow: float | None, mark: str) -> str:
    """Two marks a decade above a millionth, so equal flow is twelve."""
    if not flow or not math.isfinite(flow):
        return ""
    return mark * min(max(round(2 * (math.log10(flow) + 6)), 0), 18)


def _updates(latest: Measurement, width: int) -> Table:
    wide = width >= WIDE
    caption = (
        "update / weight: how far the step moved a parameter, 1e-3 being customary; matrices are tiny below "
        f"{UPDATES[0]:g} and large above {UPDATES[1]:g}. What starts at zero has no ratio yet, and a bias in front of "
        "BatchNorm rightly stays where it is."
    )
    names = ["parameter", "size", "weight", "gradient", "abs max", "zeros", "idle rows", "update/weight", "class"]
    names = [name for name in names if wide or name not in ("size", "abs max")]
    rows = []
    for name, parameter in latest.parameters.items():
        cells = [name, *([f"{parameter.size:,}"] if wide else []), _number(parameter.weight_norm)]
        cells += [_number(parameter.gradient_norm), *([_number(parameter.gradient_abs_max)] if wide else [])]
        cells += [*map(_share, (parameter.gradient_zero_share, parameter.gradient_idle_rows))]
        rows.append([*cells, _number(parameter.update_ratio), update_class(parameter)])
    return _table("\nParameters", caption, names, rows, width)


def _number(value: float | None) -> str:
    """Three digits, in at most nine characters."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def _share(value: float | None) -> str:
    """Per cent; neither none nor all is only said of none and all."""
    if value is None:
        return "-"
    if value in (0.0, 1.0):
        return f"{value:.0%}"
    return f"{min(max(value, 0.001), 0.999):.1%}" if value < 0.01 or value > 0.99 else f"{value:.0%}"
