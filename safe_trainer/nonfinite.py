"""What the fuse tells and keeps: a trace turned into a finding, and the step saved so that it can be replayed.

Writes one file a trip under the run's folder; touches nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from safe_trainer.atomic import publish, temporary_file
from safe_trainer.config import ConfigError
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils import rng
from safe_trainer.utils.tracer import Culprit, Trace

log = logging.getLogger(__name__)

FOLDER = "nonfinite"

LOGARITHMS = ("log", "log2", "log10", "log1p", "xlogy", "logit")


def fault_of(culprit: Culprit) -> str:
    """The catalogue's id for what a trace found."""
    if culprit.kind == "input":
        return "data.nonfinite"
    if culprit.kind == "backward":
        return "gradient.nonfinite"
    name = culprit.operation.split(".")[1].rstrip("_") if "." in culprit.operation else culprit.operation
    if name in LOGARITHMS:
        return "loss.log_of_zero"
    dtypes = {culprit.dtype, *(operand.dtype for operand in culprit.operands)}
    overflowed = culprit.value in ("inf", "-inf") and torch.float16 in dtypes
    return "precision.overflow" if overflowed else "forward.nonfinite"


def finding_from_trace(trace: Trace | None, step: int, batch: str, error: BaseException | None) -> Finding:
    """What happened in a non-finite step, as far as the replay could tell."""
    if trace is not None and trace.culprit is not None:
        culprit = trace.culprit
        return Finding(
            fault=fault_of(culprit),
            severity=Severity.error,
            stage="training",
            where=culprit.name if culprit.outside else culprit.module,
            step=step,
            source=culprit.source,
            evidence=culprit.describe().removesuffix(f", {culprit.explanation}; {culprit.remedy}"),
            cause=culprit.explanation,
            remedy=culprit.remedy,
        )
    told = f" Autograd said: {str(error).splitlines()[0]}" if error is not None else ""
    if trace is not None and trace.error is not None:
        raised = f"{type(trace.error).__name__}: {str(trace.error).splitlines()[0] if str(trace.error) else ''}"
        evidence = f"loss or gradients of the step were not finite; its replay raised {raised}.{told}"
        cause = "the step cannot be run twice: it changes something that it needs"
    elif trace is None:
        evidence = f"loss or gradients of the step were not finite; it could not be replayed.{told}"
        cause = "unknown: the step cannot be run again"
    else:
        evidence = f"loss or gradients of the step were not finite, but the same step was finite when replayed.{told}"
        cause = (
            "the step does not repeat itself: an operation that is not deterministic, state that the step keeps "
            "outside the model, or faulty hardware"
        )
    return Finding(
        fault="forward.nonfinite",
        severity=Severity.error,
        stage="training",
        step=step,
        evidence=f"{evidence} The batch was {batch}.",
        cause=cause,
        remedy="run again with anomaly_detection=true sample_rate=1, and look at what the step keeps between batches",
    )


def save_attempt(folder: Path, step: int, batch: Any, model: nn.Module, generators: rng.Snapshot) -> Path | None:
    """Keep batch, weights, buffers and generators of a step, from before it, so that it can be replayed."""
    path = folder / FOLDER / f"step-{step:08d}.pt"
    state = {"step": step, "batch": batch, "model": model.state_dict(), "generators": generators.state()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(path) as (temporary, file):
            torch.save(state, file)
            publish(temporary, path, file)
    except (OSError, RuntimeError, TypeError, AttributeError) as error:  # a batch may hold anything, also a lambda
        log.warning("The batch of step %d could not be saved: %s", step, error)
        return None
    return path


def saved_attempts(folder: Path) -> list[Path]:
    """The saved steps of a run, the earliest first."""
    return sorted((folder / FOLDER).glob("step-*.pt"))


def load_attempt(path: Path) -> Mapping[str, Any]:
    """A saved step.

    Raises:
        ConfigError: it is not there, damaged, or holds objects that only unpickling could bring back.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError as error:
        raise ConfigError([f"path must hold a step that blew the fuse (got {path}, which does not exist)"]) from error
    except Exception as error:  # whatever a damaged or foreign file makes torch.load raise
        raise ConfigError([f"{path} cannot be replayed: {str(error).splitlines()[0]}"]) from error
    if not isinstance(state, Mapping) or not {"step", "batch", "model", "generators"} <= set(state):
        raise ConfigError([f"{path} must be a step saved by the fuse (it holds something else)"])
    return state
