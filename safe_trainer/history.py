"""One entry a batch of loss, learning rate and gradient norm: kept on the device, copied when a log row is due."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class History:
    """Columns of figures by step. `add` never waits for the device; `flush` waits once for all that is pending."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {"step": [], "epoch": [], "loss": [], "lr": []}
        self._pending: list[tuple[int, int, Mapping[str, Tensor | float]]] = []
        self._sums: dict[str, tuple[float, int]] = {}  # and their number, since the last flush

    def add(self, step: int, epoch: int, figures: Mapping[str, Tensor | float]) -> None:
        """Take note of one batch; tensors stay where they are."""
        self._pending.append((step, epoch, figures))

    def flush(self, *, keep: bool = False) -> dict[str, float]:
        """Copy what is pending to the host (the one wait) and give the mean of each figure since the last flush.

        Args:
            keep: let the next means begin where these did.
        """
        self.gather()
        sums = self._sums
        self._sums = sums if keep else {}
        return {name: total / count for name, (total, count) in sums.items()}

    def gather(self) -> None:
        """Copy what is pending to the host.

        A figure that was absent on a batch has NaN in its column there, so that all columns stay aligned.
        """
        pending, self._pending = self._pending, []
        earlier = len(self.columns["step"])
        self.columns["step"] += [step for step, _, _ in pending]
        self.columns["epoch"] += [epoch for _, epoch, _ in pending]
        for name in dict.fromkeys(name for _, _, figures in pending for name in figures):
            given = [figures.get(name) for _, _, figures in pending]
            values = _to_floats(given)
            total, count = self._sums.get(name, (0.0, 0))
            for value in values:  # one by one: the sum must not depend on how often things are gathered
                total += value
            self._sums[name] = (total, count + len(values))
            present = iter(values)
            column = self.columns.setdefault(name, [])
            column += [math.nan] * (earlier - len(column))
            column += [math.nan if value is None else next(present) for value in given]
        for column in self.columns.values():
            column += [math.nan] * (len(self.columns["step"]) - len(column))

    @property
    def open_row(self) -> dict[str, list[float]]:
        """Sum and number of each figure since the last flush, which a row to come will be the mean of."""
        self.gather()
        return {name: [total, count] for name, (total, count) in self._sums.items()}

    @open_row.setter
    def open_row(self, sums: Mapping[str, Sequence[float]]) -> None:
        self._sums = {name: (total, int(count)) for name, (total, count) in sums.items()}

    def mean(self, name: str, epoch: int) -> float | None:
        """Mean of a figure over one epoch's batches, NaN and infinities left out; None if nothing is left."""
        self.gather()
        column = self.columns.get(name, [])
        values = [v for v, e in zip(column, self.columns["epoch"], strict=False) if e == epoch and math.isfinite(v)]
        return sum(values) / len(values) if values else None

    def state_dict(self) -> dict[str, Tensor]:
        """All columns as float64 tensors."""
        self.gather()
        return {name: torch.tensor(column, dtype=torch.float64) for name, column in self.columns.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take the columns of an earlier run."""
        self.columns = {name: column.tolist() for name, column in state.items()}
        for name in ("step", "epoch"):
            self.columns[name] = [int(value) for value in self.columns[name]]
        self._pending, self._sums = [], {}


def _to_floats(values: Iterable[Tensor | float | None]) -> list[float]:
    """Host values of what is there, all tensors in one copy."""
    present = [value for value in values if value is not None]
    tensors = [value.detach().reshape(()) for value in present if isinstance(value, Tensor)]
    copied = iter(torch.stack(tensors).double().tolist() if tensors else [])
    return [next(copied) if isinstance(value, Tensor) else float(value) for value in present]
