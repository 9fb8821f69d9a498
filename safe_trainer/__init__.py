"""Training that does not let a network fail in silence. This file holds the public names, nothing else."""

from pathlib import Path

__version__ = "0.1.0"

if not (Path(__file__).parent / "utils").is_dir():  # a checkout: utils/, conf/, recipes/ sit beside this folder
    __path__.append(str(Path(__file__).parent.parent))

from safe_trainer.config import Config, ConfigError
from safe_trainer.explain import explain
from safe_trainer.findings import CheckResult, Finding, Report, SafetyError, Severity, Status
from safe_trainer.repair import revive_dead_units
from safe_trainer.trainer import SafeTrainer
from safe_trainer.watch import watch

__all__ = [
    "CheckResult",
    "Config",
    "ConfigError",
    "Finding",
    "Report",
    "SafeTrainer",
    "SafetyError",
    "Severity",
    "Status",
    "explain",
    "revive_dead_units",
    "watch",
]
