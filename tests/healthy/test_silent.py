"""Healthy runs say nothing: hundreds of them, each through the trainer as a user would run it."""

import statistics

import pytest
import torch
from healthy import odd_courses, odd_losses, odd_models, odd_steps
from healthy.programs import GRID, SETTINGS

from safe_trainer import SafeTrainer

KINDS = {**odd_models.KINDS, **odd_losses.KINDS, **odd_courses.KINDS, **odd_steps.KINDS}
SEEDS = {"grid": 2, "settings": 3, "kinds": 3}
BUILDERS = {**GRID, **SETTINGS, **KINDS}
LEAST_FALL = 0.02
"""Share of its first level by which a loss must have come down to call the run healthy."""

EVERY = [
    *((name, seed) for name in GRID for seed in range(SEEDS["grid"])),
    *((name, seed) for name in SETTINGS for seed in range(SEEDS["settings"])),
    *((name, seed) for name in KINDS for seed in range(SEEDS["kinds"])),
]
QUICK = {
    *((name, 0) for name in list(GRID)[::8]),
    *((name, 0) for name in list(SETTINGS)[::2]),
    *((name, 0) for name in list(KINDS)[::2]),
}
"""Those that run in every test run; the others are slow by their number."""


def alarms(program, folder, seed):
    """The run's report, and what it raised."""
    torch.manual_seed(seed)
    trainer = SafeTrainer(
        program.model, program.loss_fn, program.optimizer, program.loader, program.val_loader, program.scheduler,
        train_step=program.train_step, eval_step=program.eval_step, other_optimizers=program.others, loggers=(),
        config={
            "run_dir": str(folder), "progress": False, "on_fault": "report", "preflight.enabled": False,
            "checkpoint.enabled": False, "monitor.every": 20, "log_every": 10, "max_steps": program.steps,
            **program.options,
        },
    )  # fmt: skip
    report = trainer.run()
    return report, [(finding.fault, finding.where, finding.evidence) for finding in report.findings if finding.is_alarm]


def fall(losses):
    """By how much the loss came down, as a share of the level it began at."""
    first, last = statistics.median(losses[:10]), statistics.median(losses[-20:])
    return (first - last) / abs(first)


@pytest.mark.parametrize(
    ("name", "seed"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=f"{case[0]}-{case[1]}") for case in EVERY],
)
def test_silent(name, seed, tmp_path):
    torch.manual_seed(100 + seed)
    program = BUILDERS[name](seed)
    report, raised = alarms(program, tmp_path / "run", seed)
    assert raised == []
    losses = report.history["loss"]
    assert len(losses) == program.steps
    assert program.flat or fall(losses) > LEAST_FALL, "the run is not healthy"


def test_there_are_hundreds():
    assert len(EVERY) >= 300
    assert 50 <= len(QUICK) <= 70
