"""Rules over a run's histories: evidence in, findings out. No hooks, no devices, no model.

A rule is a pure function ``rule(evidence) -> list[Finding]`` of the whole history so far, one of `RULES`. It is asked
whenever a row of the log is due; what it no longer says is withdrawn (an error of an exact rule never is). So what is
found depends on the entries alone, and a run that was interrupted and resumed comes to the same findings. `Spikes`
alone keeps a state of its own, for it looks at each loss once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from safe_trainer.diagnosis import program
from safe_trainer.diagnosis.clip_norm import exploding_gradients
from safe_trainer.diagnosis.collapsed import collapsed
from safe_trainer.diagnosis.dead import dead_units
from safe_trainer.diagnosis.depth import growing_outputs, vanishing_gradients
from safe_trainer.diagnosis.evidence import Evidence, Probe, Setting, largest_decay
from safe_trainer.diagnosis.overfitting import overfitting
from safe_trainer.diagnosis.progress import not_decreasing, oscillating, plateau
from safe_trainer.diagnosis.rates import rate_too_high, rate_too_low, weights_decay_away
from safe_trainer.diagnosis.saturated import saturated_from_the_start
from safe_trainer.diagnosis.spikes import Spikes
from safe_trainer.findings import Finding, Severity

__all__ = ["RULES", "Diagnosis", "Evidence", "Probe", "Setting", "largest_decay", "take_in"]

SCALER_SETTLES = 256
"""Steps after which a loss scale has settled: it begins at 65536 and is halved at each overflow, so 16 in a row bring
it to 1, and the scale's own rule speaks then."""

Rule = Callable[[Evidence], list[Finding]]


def program_rules(evidence: Evidence) -> list[Finding]:
    """What the state of the program proves."""
    if evidence.program is None:
        return []
    setting = evidence.setting
    found = program.rules(
        evidence.program,
        planned_steps=setting.planned_steps,
        epoch_length=setting.epoch_length,
        finished=evidence.ended,
    )
    if setting.scaled and evidence.program.steps < SCALER_SETTLES:
        found = [finding for finding in found if finding.fault != "optimizer.step_missing"]
    return found


RULES: tuple[Rule, ...] = (
    program_rules,
    growing_outputs,
    dead_units,
    saturated_from_the_start,
    vanishing_gradients,
    exploding_gradients,
    rate_too_high,
    rate_too_low,
    weights_decay_away,
    overfitting,
    collapsed,
    oscillating,
    not_decreasing,
    plateau,
)
"""In the order in which they are asked: causes first, then what is mostly a symptom."""


class Diagnosis:
    """All rules over one run, with what they have said so far.

    Args:
        opposed: several optimizers work on losses of their own, as in a GAN: a loss that rises then proves nothing.
    """

    def __init__(self, *, opposed: bool = False) -> None:
        self.spikes = Spikes(opposed=opposed)
        self._said: dict[tuple[str, str | None], Finding] = {}

    def feed(self, evidence: Evidence) -> list[Finding]:
        """New and changed findings since the last call, withdrawn ones among them: they have become an info."""
        changed = self.spikes.feed(evidence.columns)
        now = {(finding.fault, finding.where): finding for rule in RULES for finding in rule(evidence)}
        step = int(evidence.columns["step"][-1]) if evidence.columns.get("step") else 0
        for key, finding in now.items():
            if self._said.get(key) != finding:
                changed.append(finding)
        for key, earlier in self._said.items():
            if key not in now and earlier.severity is Severity.warning:
                now[key] = replace(
                    earlier, severity=Severity.info, evidence=f"{earlier.evidence} (no longer so at step {step:,})"
                )
                changed.append(now[key])
        self._said.update(now)
        return changed

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, each as it now stands."""
        return [*self.spikes.findings, *self._said.values()]

    def state_dict(self) -> dict[str, Any]:
        """Of plain types."""
        return {"spikes": self.spikes.state_dict(), "said": [finding.state_dict() for finding in self._said.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where an earlier run stood."""
        self.spikes.load_state_dict(state["spikes"])
        findings = [Finding(**kept) for kept in state["said"]]
        self._said = {(finding.fault, finding.where): finding for finding in findings}


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
