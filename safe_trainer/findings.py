"""What a run has to say for itself: findings, results of checks and the report that holds both. Data only.

Knows nothing of models, hooks or files: it may be imported by any part, and imports none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

STAGES = ("preflight", "training")


class Severity(StrEnum):
    """How certain and how harmful a fault is; members equal their own words, as in ``severity == "error"``."""

    info = "info"
    """Worth knowing, never an alarm."""
    warning = "warning"
    """Probably harmful; the run goes on."""
    error = "error"
    """The result is wrong or the run is useless."""


class Status(StrEnum):
    """How a check ended; members equal their own words, as in ``status == "pass"``."""

    passed = "pass"
    warned = "warn"
    failed = "fail"
    skipped = "skip"
    """Not looked at; the evidence says why."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault: what was seen, where, why it is so and what to do. Words are turned into ``Severity``."""

    fault: str
    """Id of the fault in the catalogue, as in activation.dead."""
    severity: Severity
    """info, warning or error."""
    stage: str
    """preflight or training."""
    evidence: str
    """What was measured, with numbers and names."""
    cause: str
    """Why it is so."""
    remedy: str
    """What to do about it."""
    where: str | None = None
    """Module, parameter, tensor or function; None if it is the whole program."""
    step: int | None = None
    """Training step at which it was established; None before the first."""
    source: str | None = None
    """The user's line, as in model.py:42."""
    symptoms: tuple[str, ...] = ()
    """Ids of the faults that this one explains; they are reported under it, not beside it."""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"a finding's stage must be one of {', '.join(STAGES)} (got {self.stage!r})")
        object.__setattr__(self, "severity", Severity(self.severity))  # the only way into a frozen dataclass
        object.__setattr__(self, "symptoms", tuple(self.symptoms))

    def state_dict(self) -> dict[str, Any]:
        """All of it in plain types; ``Finding(**state)`` is the way back."""
        state: dict[str, Any] = _plain(self)
        return state

    @property
    def is_alarm(self) -> bool:
        """Whether it warns of anything: an info never does."""
        return self.severity is not Severity.info

    def headline(self) -> str:
        """Which fault and where, in one line: ``activation.dead in features.3, step 120, model.py:42``."""
        place = f" in {self.where}" if self.where else ""
        moment = "" if self.step is None else f", step {self.step:,}"
        return f"{self.fault}{place}{moment}{f', {self.source}' if self.source else ''}"

    def details(self) -> list[tuple[str, str]]:
        """Label and text of each part that has something to say, in reading order."""
        parts = [("evidence", self.evidence), ("cause", self.cause), ("remedy", self.remedy)]
        parts.append(("explains", ", ".join(self.symptoms)))
        return [(label, text) for label, text in parts if text]

    def paragraph(self) -> str:
        """Everything as plain text: the headline, then one indented line for each part."""
        lines = [f"{self.severity}: {self.headline()}"]
        return "\n".join(lines + [f"  {label + ':':<10}{text}" for label, text in self.details()])


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """How one check of the preflight ended, and the findings it made."""

    name: str
    """Id of the check, as in gradcheck."""
    status: Status
    """pass, warn, fail or skip."""
    evidence: str = ""
    """What was measured, with numbers and names; for a skipped check, why."""
    seconds: float = 0.0
    """How long it took."""
    findings: tuple[Finding, ...] = ()
    """What it found."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", Status(self.status))
        object.__setattr__(self, "findings", tuple(self.findings))


@dataclass(kw_only=True)
class Report:
    """The outcome of a run. Findings stand most severe first, then in the order of their steps; `add` keeps that."""

    findings: list[Finding] = field(default_factory=list)
    """What was found."""
    checks: list[CheckResult] = field(default_factory=list)
    """How the preflight's checks ended."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Final values by name, as in val/accuracy."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Curves by name (step, loss, lr, grad_norm ...): one entry a batch."""
    path: Path = field(default_factory=Path)
    """The run's folder."""

    def __post_init__(self) -> None:
        self.findings = sorted(self.findings, key=_gravity)

    def add(self, *findings: Finding) -> None:
        """Take in further findings, each at its place."""
        self.findings = sorted([*self.findings, *findings], key=_gravity)

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(finding.severity is not Severity.error for finding in self.findings)

    def to_json(self, indent: int | None = None) -> str:
        """The whole report as strict JSON; a number that is not finite is written as in `json_number`."""
        return json.dumps({"ok": self.ok, **_plain(self)}, indent=indent, allow_nan=False)


class SafetyError(RuntimeError):
    """A fault stopped the run. ``.report`` holds all findings; the message is about the errors among them."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)  # as its only argument, so that the error can be pickled between processes
        self.report = report

    def __str__(self) -> str:
        errors = [finding for finding in self.report.findings if finding.severity is Severity.error]
        count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
        return "\n".join([f"stopped by {count}", *(finding.paragraph() for finding in errors)])


def json_number(value: float) -> float | str:
    """`value`, or its name where strict JSON has none: "NaN", "Infinity", "-Infinity".

    These very words are what Protocol Buffers write too, and what Python's ``float(word)`` and JavaScript's
    ``Number(word)`` read back.
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _gravity(finding: Finding) -> tuple[int, int]:
    """Sorts errors before warnings before infos, and what came before the first step (None) before all steps."""
    return -list(Severity).index(finding.severity), -1 if finding.step is None else finding.step


def _plain(value: Any) -> Any:
    """`value` made of dicts, lists, words and numbers that strict JSON can hold."""
    if isinstance(value, Finding | CheckResult | Report):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return json_number(value) if isinstance(value, float) else value
