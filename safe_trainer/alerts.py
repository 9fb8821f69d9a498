"""Who is called when a run finds something grave: loggers that can take an alert, and callables of the user's own.

Decides and delivers; touches nothing of the training. What a callable raises is logged once and does not end the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from safe_trainer.config import AlertsConfig
from safe_trainer.findings import Finding, Severity

__all__ = ["Alerts"]

log = logging.getLogger(__name__)


class Alerts:
    """Delivers each finding that alerts once, though it be found in many steps.

    Args:
        config: which findings alert.
        calls: called with the finding, in this order.
    """

    def __init__(self, config: AlertsConfig, calls: Sequence[Callable[[Finding], object]]) -> None:
        self.config, self.calls = config, list(calls)
        self._delivered: set[tuple[str, str | None, str | None]] = set()
        self._failed: set[int] = set()

    def deliver(self, finding: Finding, sinks: Iterable[Any] = ()) -> None:
        """Hand a finding that alerts to all sinks that have a method `alert`, and to the callables."""
        key = (finding.fault, finding.where, finding.source)
        if key in self._delivered or not self.is_due(finding):
            return
        self._delivered.add(key)
        told_by_sinks = [sink.alert for sink in sinks if callable(getattr(sink, "alert", None))]
        for place, call in enumerate([*told_by_sinks, *self.calls]):
            self._call(place, call, finding)

    def is_due(self, finding: Finding) -> bool:
        """Whether a finding alerts: its fault is one of those named, or its severity is enough."""
        ranks = list(Severity)
        least = Severity(self.config.severity.value)
        return finding.fault in self.config.faults or ranks.index(finding.severity) >= ranks.index(least)

    def _call(self, place: int, call: Callable[[Finding], object], finding: Finding) -> None:
        try:
            call(finding)
        except Exception as error:  # a pager that cannot be reached, say: whatever a user's callable raises
            if place not in self._failed:
                name = getattr(call, "__qualname__", None) or type(call).__name__
                log.warning(
                    "an alert of %s was lost, and training goes on: %s raised %s: %s (told once)",
                    finding.fault, name, type(error).__name__, error,
                )  # fmt: skip
            self._failed.add(place)
