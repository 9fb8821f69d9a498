"""How a check says what it found: plain functions that make a CheckResult. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from safe_trainer.findings import CheckResult, Finding, Severity, Status


class Skip(Exception):
    """A check cannot look at this program; the message says why. Skipped is never passed."""


class ProgramFailed(Exception):
    """The user's own code raised where a check ran it; ``__cause__`` is the error."""


def judged(evidence: str, findings: Sequence[Finding] = ()) -> CheckResult:
    """Failed with an error among the findings, warned with a warning, else passed; name and time come later."""
    severities = {finding.severity for finding in findings}
    status = Status.passed
    if Severity.error in severities:
        status = Status.failed
    elif Severity.warning in severities:
        status = Status.warned
    return CheckResult(name="", status=status, evidence=evidence, findings=tuple(findings))


def finding(fault: str, severity: str, **parts: Any) -> Finding:
    """A finding of the preflight."""
    return Finding(fault=fault, severity=Severity(severity), stage="preflight", **parts)
