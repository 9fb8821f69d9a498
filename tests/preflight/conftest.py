"""One check on one program."""

import pytest

from safe_trainer import SafeTrainer


@pytest.fixture
def alarms(tmp_path):
    """Faults and places that these checks find, and the results of the checks."""

    def made(checks, model, loss_fn, optimizer, loader, val=None, *, budget_s=60, **options):
        config = {
            "progress": False,
            "run_dir": str(tmp_path),
            "preflight.checks": checks if isinstance(checks, list) else [checks],
            "preflight.budget_s": budget_s,
            **options.pop("config", {}),
        }
        trainer = SafeTrainer(model, loss_fn, optimizer, loader, val, config=config, **options)
        trainer.results = trainer.preflight()
        assert not [result for result in trainer.results if "the check itself failed" in result.evidence]
        found = [(finding.fault, finding.where) for finding in trainer.report.findings if finding.is_alarm]
        return found, {result.name: result for result in trainer.results}

    return made
