"""The table of a model's layers with their parameter counts. Reads the model; runs and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from torch import Tensor

TABLE_ROWS = 24
"""Most rows of the table: what fits a screen together with the start of the run."""


def model_summary(model: nn.Module, shapes: Mapping[str, str] | None = None) -> Table:
    """The layers of `model` with their parameter counts, as deep as fits a screen; alike neighbours share a row.

    A parameter or module that is used in several places is counted once, at the first.

    Args:
        shapes: what each module by its name puts out, in words; a column of its own where it is given.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    root = _layer("", model, set(), set())
    known = "at least " if root.lazy else ""
    table = Table(box=box.SIMPLE, pad_edge=False, show_footer=True, header_style="dim", border_style="dim")
    table.add_column("layer", "total", overflow="fold")
    table.add_column("class", overflow="fold")
    if shapes:
        table.add_column("output", overflow="fold")
    table.add_column("parameters", f"{known}{root.count:,}", justify="right", no_wrap=True)
    table.add_column("", Text(_totals(model, root)))
    for depth, layer in _fitting_rows(root):
        name = Text("  " * depth + literal(layer.name))
        count = f"{layer.count:,}" if layer.count else ""
        style = "" if layer.count else "dim"
        output = [Text(literal(shapes.get(layer.path, "")))] if shapes else []
        table.add_row(name, Text(literal(layer.kind)), *output, count, Text(layer.note(), "dim"), style=style)
    return table


def literal(text: str) -> str:
    """`text` without control characters, which could move the cursor or change the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


@dataclass
class Layer:
    """A row of the model's table: one module with all that is below it, each parameter counted once in the model."""

    name: str
    kind: str
    path: str = ""
    """Its name in the whole model, as in layer1.0.conv1."""
    count: int = 0
    trainable: int = 0
    shared: bool = False
    """Holds a parameter that was counted at an earlier layer."""
    lazy: bool = False
    """Holds a parameter whose shape is not known before the first batch."""
    below: list[Layer] = field(default_factory=list)

    def looks(self) -> tuple[object, ...]:
        """What two layers must have in common to be folded into one row."""
        return self.kind, self.count, self.trainable, self.shared, self.lazy

    def note(self) -> str:
        """What is special about it, in a word or two."""
        frozen = "" if self.trainable == self.count else "frozen" if self.trainable == 0 else "partly frozen"
        words = (frozen, "shared" if self.shared else "", "shape not known yet" if self.lazy else "")
        return ", ".join(word for word in words if word)


def _layer(name: str, module: nn.Module, params_met: set[int], modules_met: set[int], path: str = "") -> Layer:
    """The tree of layers from `module` down; parameters and modules met before are not counted again."""
    layer = Layer(name, type(module).__name__, path)
    if id(module) in modules_met:
        layer.shared = any(True for _ in module.parameters())
        return layer
    modules_met.add(id(module))
    for parameter in module.parameters(recurse=False):
        layer.shared |= id(parameter) in params_met
        layer.lazy |= is_lazy(parameter)
        if id(parameter) not in params_met and not is_lazy(parameter):
            layer.count += parameter.numel()
            layer.trainable += parameter.numel() if parameter.requires_grad else 0
        params_met.add(id(parameter))
    for child_name, child in module._modules.items():  # named_children() leaves out a module that stands there twice
        if child is not None:
            child_path = f"{path}.{child_name}" if path else child_name
            layer.below.append(_layer(child_name, child, params_met, modules_met, child_path))
    layer.count += sum(child.count for child in layer.below)
    layer.trainable += sum(child.trainable for child in layer.below)
    layer.lazy |= any(child.lazy for child in layer.below)
    return layer


def _fitting_rows(root: Layer) -> list[tuple[int, Layer]]:
    """Rows (indentation, layer) down to the deepest level at which all fit; the middle is left out if none does."""
    if not root.below:
        return [(0, Layer("(model)", root.kind, "", root.count, root.trainable, root.shared, root.lazy))]
    rows = list(_rows(root, 1))
    for deepest in range(2, 100):  # deeper nesting than any model has: ends when a level more adds nothing
        more = list(_rows(root, deepest))
        if len(more) > TABLE_ROWS or len(more) == len(rows):
            break
        rows = more
    if len(rows) <= TABLE_ROWS:
        return rows
    half = TABLE_ROWS // 2
    hidden = [layer for _, layer in rows[half : len(rows) - half + 1]]
    middle = Layer("...", f"{len(hidden):,} more")
    middle.count, middle.trainable = sum(one.count for one in hidden), sum(one.trainable for one in hidden)
    middle.lazy = any(one.lazy for one in hidden)
    return [*rows[:half], (0, middle), *rows[len(rows) - half + 1 :]]


def _rows(layer: Layer, levels: int, depth: int = 0) -> Iterator[tuple[int, Layer]]:
    """The layers below `layer`, `levels` deep; three or more alike in a row become one."""
    position = 0
    while position < len(layer.below):
        first = layer.below[position]
        alike = position + 1
        while alike < len(layer.below) and layer.below[alike].looks() == first.looks():
            alike += 1
        if alike - position >= 3:
            yield depth, _folded(layer.below[position:alike])
            position = alike
            continue
        yield depth, first
        if levels > 1:
            yield from _rows(first, levels - 1, depth + 1)
        position += 1


def _folded(layers: list[Layer]) -> Layer:
    """Several layers alike as one."""
    first, times = layers[0], len(layers)
    name, kind = f"{first.name} .. {layers[-1].name}", f"{times:,} x {first.kind}"
    return Layer(name, kind, layers[-1].path, first.count * times, first.trainable * times, first.shared, first.lazy)


def _totals(model: nn.Module, root: Layer) -> str:
    """How many of the parameters learn, and how much memory they and the buffers take."""
    tensors: dict[int, Tensor] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values() if not is_lazy(tensor))
    learn = "all trainable, " if root.trainable == root.count else f"{root.trainable:,} trainable, "
    return f"{learn if root.count else ''}{size / 2**20:,.1f} MiB"
