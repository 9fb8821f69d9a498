"""Where a run's figures and findings go: the sinks of the log, the terminal and alerts. Reads nothing from a device."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from safe_trainer.alerts import Alerts
from safe_trainer.config import AlertsConfig
from safe_trainer.findings import Finding
from safe_trainer.loggers.sink import Sink
from safe_trainer.task import describe_batch
from safe_trainer.terminal import Progress


class Output:
    """One row, one note or one finding, to all sinks and the terminal."""

    def __init__(self, sinks: Sequence[Sink], progress: Progress, alerts: Alerts | None = None) -> None:
        self.sinks, self.progress = list(sinks), progress
        self.alerts = alerts or Alerts(AlertsConfig(), [])
        self.advance = progress.advance  # called every step: no frame of its own

    def start_after(self, step: int) -> None:
        """Go on behind `step`, which an earlier run reached (0: it came to no checkpoint).

        Rows that it wrote beyond its checkpoint are dropped.
        """
        self.progress.step = self.progress.epoch_start = step
        for sink in self.sinks:
            sink.truncate_after(step)

    def row(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Log the figures of one step."""
        for sink in self.sinks:
            sink.log(step, {"epoch": float(epoch), **values})
        self.progress.row(step, epoch, dict(values))

    def finding(self, finding: Finding, *, explained: bool = False) -> None:
        """Tell a finding at once, where the user looks.

        Args:
            explained: it follows from another one, under which the report tells it: it only alerts, if it is to.
        """
        self.alerts.deliver(finding, self.sinks)
        if explained:
            return
        self.progress.note(f"{finding.severity}: {finding.headline()}")  # the verdict at the end tells all of it
        for sink in self.sinks:
            sink.text(finding.step or 0, f"finding/{finding.fault}", finding.paragraph())

    def place_of(self, error: BaseException, step: int, batch: Any, model: nn.Module) -> str:
        """Where a user's exception came from: step, batch and innermost module, as a note on its traceback."""
        names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        module = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = names.get(id(frame.f_locals.get("self")), module)
        inside = f", in module {module}" if module else ""
        return f"raised in training step {step}{inside}; the batch was {describe_batch(batch)}"

    def flush(self) -> None:
        """Let every sink write what it holds: a checkpoint must not be newer than the log."""
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        """Let every sink write what it still holds."""
        for sink in self.sinks:
            sink.close()
