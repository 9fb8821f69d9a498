"""What is known of a culprit, and the wording that forward and backward remedies share.

Pure functions over numbers and names; nothing here touches a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from safe_trainer.utils.provenance import Damage, Operand

Account = tuple[str, str]
"""Explanation and remedy, each a clause without a full stop."""


@dataclass(frozen=True)
class Facts:
    """What is known of the culprit."""

    operation: str
    kind: str
    node: str | None
    operands: tuple[Operand, ...]
    arguments: Mapping[str, Any]
    damage: Damage
    name: str | None = None
    rows: tuple[int, ...] = ()
    reached: str = "loss"
    masked: str | None = None
    """The operation that wrote minus infinity on purpose, where that is what was turned into NaN."""
    turned: str | None = None
    """The operation that turned the culprit's infinity into NaN."""

    @property
    def short(self) -> str:
        """`log` for `aten.log_`."""
        return self.operation.rpartition(".")[2].strip("_")

    @property
    def forward(self) -> str:
        """`log` for `LogBackward0`: the forward operation that a backward one belongs to."""
        name = re.sub(r"Backward\d*$", "", (self.node or "").rpartition("::")[2])
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()

    def operand(self, *names: str) -> Operand | None:
        """The first operand of one of these names."""
        return next((operand for name in names for operand in self.operands if operand.name == name), None)

    @property
    def main(self) -> Operand | None:
        """The operand that the operation is mostly about."""
        return self.operand("self", "input", "values") or (self.operands[0] if self.operands else None)

    def number(self, *names: str) -> float | None:
        """The value of an operand where the result first went bad, or of a plain number argument."""
        operand = self.operand(*names)
        if operand is not None:
            return operand.value
        given = next((self.arguments[name] for name in names if name in self.arguments), None)
        return float(given) if isinstance(given, (int, float)) else None


def ranges(facts: Facts) -> str:
    """Range of the operands in words; half of the causes can be read off it."""
    spoken = [
        f"{named(operand, facts.short)} has min {operand.minimum:.6g} and max {operand.maximum:.6g}"
        if operand.minimum is not None and operand.maximum is not None
        else f"{named(operand, facts.short)} has no finite element"
        for operand in facts.operands
        if operand.dtype is not torch.bool and (operand.minimum is not None or operand.bad_count)
    ]
    return ", ".join(spoken[:4]) or "its operands are empty"


def named(operand: Operand, operation: str) -> str:
    """An operand in words."""
    if operand.name == "self" and operation in ("addmm", "baddbmm", "addmv"):
        return "the bias"
    return {"self": "its input", "other": "the other operand", "input": "its input"}.get(operand.name, operand.name)


def limit(dtype: torch.dtype) -> float:
    """Largest finite number of a type."""
    return torch.finfo(dtype).max


def too_large(facts: Facts) -> str:
    """That the result does not fit its type."""
    kind = str(facts.damage.dtype).removeprefix("torch.")
    return f"{ranges(facts)}: the result is beyond the largest {kind} ({limit(facts.damage.dtype):.3g})"


def overflow(facts: Facts) -> Account:
    """The account of a result that does not fit its type."""
    if facts.damage.value == "nan" and facts.masked:
        return masked(facts)
    if facts.damage.dtype is torch.float16:
        return (
            too_large(facts),
            "run this part in float32 or bfloat16 (torch.autocast(..., enabled=False)), or scale its input down",
        )
    return (
        too_large(facts),
        "normalise or clamp its input, and look for weights that have grown (learning rate too high?)",
    )


def masked(facts: Facts) -> Account:
    """The account of a mask that an operation turned into NaN."""
    if "softmax" in facts.short:
        return (
            f"a whole row was masked with -inf by {facts.masked}, and softmax over nothing but -inf is 0/0",
            "keep one position of every row unmasked, or mask with a large finite number and zero those rows",
        )
    return (
        f"it met the -inf written by {facts.masked}: inf - inf and 0 * inf are NaN",
        "apply the mask after this operation, or mask with a large finite number such as torch.finfo(dtype).min",
    )
