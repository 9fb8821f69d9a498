"""Rules over a run's histories: columns of figures in, findings out. No hooks, no devices, no model.

A rule has ``feed(columns) -> list[Finding]``, which looks at the entries that came since the last call and gives what
is new or has changed; ``findings``, all so far; and ``state_dict``/``load_state_dict`` of plain types. What it finds
must depend on the entries alone, never on how they were split over calls: a run that was interrupted and resumed then
comes to the same findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safe_trainer.diagnosis.spikes import Spikes
from safe_trainer.findings import Finding, Severity


class Diagnosis:
    """All rules over one run, each with what it has seen so far.

    Args:
        opposed: several optimizers work on losses of their own, as in a GAN: a loss that rises then proves nothing.
    """

    def __init__(self, *, opposed: bool = False) -> None:
        self.rules = {"spikes": Spikes(opposed=opposed)}

    def feed(self, columns: Mapping[str, list[float]]) -> list[Finding]:
        """New and changed findings since the last call; `columns` is the whole history, one entry a batch."""
        return [finding for rule in self.rules.values() for finding in rule.feed(columns)]

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, each as it now stands."""
        return [finding for rule in self.rules.values() for finding in rule.findings]

    def state_dict(self) -> dict[str, Any]:
        """State of each rule by its name."""
        return {name: rule.state_dict() for name, rule in self.rules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where an earlier run stood."""
        for name, rule in self.rules.items():
            rule.load_state_dict(state[name])


def take_in(findings: list[Finding], finding: Finding) -> bool:
    """Put `finding` into the list in place of an earlier one of the same fault and place.

    Returns:
        Whether it is worth telling at once: it is new, or graver than what it replaces.
    """
    ranks = list(Severity)
    for index, earlier in enumerate(findings):
        if (earlier.fault, earlier.where) == (finding.fault, finding.where):
            findings[index] = finding
            return ranks.index(finding.severity) > ranks.index(earlier.severity)
    findings.append(finding)
    return True
