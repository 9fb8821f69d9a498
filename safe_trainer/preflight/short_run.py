"""Check: some dozens of steps as training makes them, under the rules that watch training.

The program's own steps over its own batches, with the monitors and the facts of a run around them; what the rules say
is a finding of the preflight.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from safe_trainer.data import batches_in_epoch
from safe_trainer.diagnosis import Diagnosis, Evidence, Setting, largest_decay
from safe_trainer.findings import CheckResult, Finding, Severity
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import ProgramFailed, judged
from safe_trainer.preflight.program import Program
from safe_trainer.utils.monitors import Monitors
from safe_trainer.utils.program_facts import ProgramFacts
from safe_trainer.utils.statistics import location_and_spread

STEPS = 40
"""Steps: the monitors measure at 1, 10 and 30, and the rules on the program want 30."""


def check(program: Program, clock: Clock) -> CheckResult:
    """Train for STEPS steps, fewer if the time is short."""
    facts = ProgramFacts(program.model, program.optimizers, [program.scheduler], every=10)
    monitors = Monitors(program.model, program.optimizers, every=10)
    columns: dict[str, list[float]] = {"step": [], "loss": [], "lr": []}
    with facts:
        for step, batch in zip(range(1, STEPS + 1), itertools.cycle(program.batches()), strict=False):
            with monitors.measured(step), facts.looking(step):
                loss = program.step(batch)
            if not math.isfinite(loss):
                break
            for name, value in (("step", step), ("loss", loss), ("lr", float(program.optimizer.param_groups[0]["lr"]))):
                columns[name].append(value)
            if clock.left() <= 0:
                break
    return _judged(program, columns, facts, monitors)


def _judged(program: Program, columns: dict[str, list[float]], facts: ProgramFacts, monitors: Monitors) -> CheckResult:
    evidence = Evidence(
        setting=Setting(
            planned_steps=program.config.max_steps,
            epoch_length=batches_in_epoch(program.config, program.train_loader),
            weight_decay=largest_decay(program.optimizers),
            scaled=program.precision.scaler is not None,
        ),
        columns=columns,
        measurements=monitors.history,
        program=facts.record,
    )
    diagnosis = Diagnosis(opposed=len(program.optimizers) > 1)
    diagnosis.feed(evidence)
    findings = [_of_the_preflight(found) for found in diagnosis.findings if found.severity is not Severity.info]
    losses = columns["loss"]
    if not losses:
        raise ProgramFailed("the loss of the first step is not finite")
    first, last = location_and_spread(losses[:5])[0], location_and_spread(losses[-5:])[0]
    return judged(f"{len(losses)} steps: loss {first:.4g} to {last:.4g}", findings)


def _of_the_preflight(found: Finding) -> Finding:
    return replace(found, stage="preflight", step=None, evidence=f"in {STEPS} steps before the run: {found.evidence}")
