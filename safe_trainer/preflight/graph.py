"""Reads autograd graphs: what a tensor was made by, and which leaves it rests on. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

ONLY_SHAPE = (
    "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "T", "Alias", "Clone", "ToCopy",
    "Slice", "Select", "Expand", "AsStrided", "SplitWithSizes", "Split", "Unbind",
)  # fmt: skip
"""Nodes that hand numbers on as they are."""


def kind(node: Any) -> str:
    """Name of a node without its ending: SoftmaxBackward0 is Softmax."""
    return type(node).__name__.partition("Backward")[0]


def maker(tensor: Tensor) -> Any:
    """The node that made the numbers of a tensor, changes of shape passed over; None for a leaf."""
    node = tensor.grad_fn
    while node is not None and kind(node).rstrip("0123456789") in ONLY_SHAPE:
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return node


def leaves(*tensors: Tensor) -> Iterator[Tensor]:
    """Every leaf that wants a gradient and that these tensors rest on, each once."""
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        waiting += [following for following, _ in node.next_functions if following is not None]
