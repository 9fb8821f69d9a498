"""One entry a batch of loss, learning rate and gradient norm: kept on the device, copied when a log row is due."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class History:
    """Columns of figures by step. `add` never waits for the device; `flush` waits once for all that is pending."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {"step": [], "epoch": [], "loss": [], "lr": []}
        self._pending: dict[str, list[Tensor | float | None]] = {}
        self._batches = 0  # since the last gathering
        self._sums: dict[str, tuple[float, int]] = {}  # since the last flush

    def add(self, step: int, epoch: int, figures: Mapping[str, Tensor | float]) -> None:
        """Take note of one batch; tensors stay where they are."""
        self.columns["step"].append(step)
        self.columns["epoch"].append(epoch)
        for name, value in figures.items():
            pending = self._pending.setdefault(name, [])
            if len(pending) < self._batches:  # absent on some batches, as a gradient norm under accumulation is
                pending.extend([None] * (self._batches - len(pending)))
            pending.append(value)
        self._batches += 1

    def flush(self) -> dict[str, float]:
        """Copy what is pending to the host (the one wait) and give the mean of each figure since the last flush."""
        self.gather()
        sums, self._sums = self._sums, {}
        return {name: total / count for name, (total, count) in sums.items()}

    def gather(self) -> None:
        """Copy what is pending to the host.

        A figure that was absent on a batch has NaN in its column there, so that all columns stay aligned.
        """
        earlier = len(self.columns["step"]) - self._batches
        for name, pending in self._pending.items():
            values = _to_floats(pending)
            if values:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (sum(values, total), count + len(values))
            given = iter(values)
            column = self.columns.setdefault(name, [])
            column.extend([math.nan] * (earlier - len(column)))
            column.extend(math.nan if value is None else next(given) for value in pending)
            column.extend([math.nan] * (earlier + self._batches - len(column)))
            pending.clear()
        self._batches = 0

    def state_dict(self) -> dict[str, Tensor]:
        """All columns as float64 tensors; flushes first."""
        self.flush()
        return {name: torch.tensor(column, dtype=torch.float64) for name, column in self.columns.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take the columns of an earlier run."""
        self.columns = {name: column.tolist() for name, column in state.items()}
        for name in ("step", "epoch"):
            self.columns[name] = [int(value) for value in self.columns[name]]
        self._pending, self._batches, self._sums = {}, 0, {}


def _to_floats(values: Iterable[Tensor | float | None]) -> list[float]:
    """Host values of what is there, all tensors in one copy."""
    present = [value for value in values if value is not None]
    tensors = [value.detach().reshape(()) for value in present if isinstance(value, Tensor)]
    copied = iter(torch.stack(tensors).double().tolist() if tensors else [])
    return [next(copied) if isinstance(value, Tensor) else float(value) for value in present]
