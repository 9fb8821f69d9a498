"""Fixtures for all tests: one thread, generators put back, no folder made where the tests were started."""

import itertools
import os
import random

import numpy as np
import pytest
import torch
from installation import built, installed  # noqa: F401  (fixtures)

from safe_trainer.config import PreflightConfig

os.environ.pop("DEBUG_ANOMALY", None)
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_start():
    """Every test begins with the same generators and leaves no anomaly mode behind."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    assert not torch.is_anomaly_enabled(), "a test left autograd's anomaly mode on"


@pytest.fixture(autouse=True)
def no_preflight(request, monkeypatch):
    """Tests of training train: what the preflight would find first is tested in tests/preflight and where a test is
    marked so."""
    if "preflight" not in request.node.path.parts and request.node.get_closest_marker("preflight") is None:
        monkeypatch.setitem(PreflightConfig.__init__.__kwdefaults__, "enabled", False)


@pytest.fixture
def run_config(tmp_path):
    """Options of a quiet run; each time it is called, in another folder."""
    numbers = itertools.count()

    def options(**overrides):
        return {"run_dir": str(tmp_path / f"run{next(numbers) or ''}"), "progress": False, **overrides}

    return options
