"""Run one check of the preflight on a small program."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safe_trainer import SafeTrainer


@pytest.fixture
def preflight(tmp_path):
    """`preflight(name, model, inputs, targets, ...)`: that check's result."""

    def run(name, model, inputs, targets, loss_fn=None, loader=None, **options):
        loss_fn = nn.CrossEntropyLoss() if loss_fn is None else loss_fn
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=16) if loader is None else loader
        settings = {
            "progress": False,
            "preflight.checks": [name],
            "run_dir": str(tmp_path),
            **options.pop("config", {}),
        }
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = options.pop("optimizer", None) or torch.optim.SGD(parameters, lr=0.1)
        checks = SafeTrainer(model, loss_fn, optimizer, loader, config=settings, **options).preflight()
        assert [check.name for check in checks] == [name]
        return checks[0]

    return run


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


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
