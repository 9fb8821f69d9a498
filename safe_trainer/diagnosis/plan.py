"""What rules over a program's facts share: what is known of the run as a whole, and the making of a finding. Data."""

from __future__ import annotations

from dataclasses import dataclass

from safe_trainer.findings import Finding, Severity


@dataclass(frozen=True)
class Plan:
    """What is known of the run as a whole."""

    planned_steps: int | None = None
    """Training steps of the whole run."""
    epoch_length: int | None = None
    """Batches of one pass over the training data."""
    finished: bool = False
    """The run is over: what has not happened yet will not happen."""


def found(
    fault: str, severity: Severity, step: int, evidence: str, cause: str, remedy: str, *,
    where: str | None = None, source: str | None = None,
) -> Finding:  # fmt: skip
    """A finding of the training stage."""
    return Finding(
        fault=fault, severity=severity, stage="training", step=step, evidence=evidence, cause=cause, remedy=remedy,
        where=where or None, source=source,
    )  # fmt: skip
