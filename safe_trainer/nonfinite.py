"""What the fuse tells and keeps: a trace turned into a finding, and the step saved so that it can be replayed.

Writes one file a trip under the run's folder; touches nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from safe_trainer.atomic import DigestingFile, publish, temporary_file
from safe_trainer.config import ConfigError
from safe_trainer.findings import Finding, Severity
from safe_trainer.plain_state import plain_state
from safe_trainer.poisoned import Poison
from safe_trainer.utils import rng
from safe_trainer.utils.tracer import Culprit, Trace

log = logging.getLogger(__name__)

FOLDER = "nonfinite"

LOGARITHMS = ("log", "log2", "log10", "log1p", "xlogy", "logit")

KEYS = frozenset({"step", "known", "batch", "model", "in_eval", "generators"})
"""What a saved step holds."""

DIVERGED = "training.diverging"
"""Told under a non-finite step whose numbers had grown before: what drives training apart explains the step then."""
GROWN = 1e12
"""Size of operands from which an infinity is the end of a growth: no network computes with such numbers on purpose, and
an exponential or a division that overflows by itself does so on far smaller ones."""

UNKNOWN = "a tensor from outside the step"
"""What the tracer calls a tensor that is neither in the batch nor the model's."""


@dataclass(frozen=True)
class Circumstances:
    """What is known of a non-finite step besides its trace."""

    step: int
    batch: str
    """In words: shapes and dtypes."""
    error: BaseException | None = None
    """What autograd's anomaly mode raised, if that is how the step was caught."""
    poisons: Mapping[str, Poison] = field(default_factory=dict)
    """Weights that were non-finite before the step, and who made them so."""
    changed: Sequence[str] = ()
    """Parts of the batch that the step changed in place."""
    moves: int = 0
    """How often the step had moved the weights before it was stopped, if that could not be undone."""
    tripped: bool = True
    """A non-finite gradient stopped it; else the loss, which is seen only after the optimizer."""


def fault_of(culprit: Culprit) -> str:
    """The catalogue's id for what a trace found."""
    if culprit.kind == "input" and culprit.name != UNKNOWN:
        return "data.nonfinite"
    if culprit.kind == "backward":
        return "gradient.nonfinite"
    name = culprit.operation.split(".")[1].rstrip("_") if "." in culprit.operation else culprit.operation
    if name in LOGARITHMS and culprit.value != "nan" and not culprit.outside:  # NaN is the log of a negative number
        return "loss.log_of_zero"
    dtypes = {culprit.dtype, *(operand.dtype for operand in culprit.operands)}
    overflowed = culprit.value in ("inf", "-inf") and torch.float16 in dtypes and not culprit.outside
    return "precision.overflow" if overflowed else "forward.nonfinite"


def finding_from_trace(trace: Trace | None, known: Circumstances) -> Finding:
    """What happened in a non-finite step, as far as the replay could tell."""
    if trace is None or trace.culprit is None:
        evidence, cause, remedy = _untraced(trace, known)
        return _finding("forward.nonfinite", known.step, f"{evidence} The batch was {known.batch}.", cause, remedy)
    culprit = trace.culprit
    cause, remedy = _account(culprit)
    poison = known.poisons.get(culprit.name or "") if culprit.kind == "parameter" else None
    if poison is not None:
        cause, remedy = poison.cause, poison.remedy
    evidence = culprit.what + (f"; {poison.evidence}" if poison else "")
    if known.moves:
        evidence += f"; {_moved(known)}"
    where = culprit.name if culprit.outside and culprit.name != UNKNOWN else culprit.module
    grown = poison is not None or _has_grown(culprit)
    return _finding(fault_of(culprit), known.step, evidence, cause, remedy, where, culprit.source, grown)


def _has_grown(culprit: Culprit) -> bool:
    """Whether an operation of the step was given huge numbers."""
    ends = [end for operand in culprit.operands for end in (operand.minimum, operand.maximum) if end is not None]
    return not culprit.outside and max(map(abs, ends), default=0.0) >= GROWN


def finding_of_weight(name: str, others: int, step: int, poison: Poison) -> Finding:
    """A weight that turned out to be non-finite when no step was there to trip over it."""
    more = f", and so do {others} more parameters" if others else ""
    evidence = f"{name} holds a NaN or an infinity after step {step}{more}; {poison.evidence}"
    return _finding("forward.nonfinite", step, evidence, poison.cause, poison.remedy, name, grown=True)


def _finding(
    fault: str,
    step: int,
    evidence: str,
    cause: str,
    remedy: str,
    where: str | None = None,
    source: str | None = None,
    grown: bool = False,
) -> Finding:
    return Finding(
        fault=fault, severity=Severity.error, stage="training", where=where, step=step, source=source,
        evidence=evidence, cause=cause, remedy=remedy,
        symptoms=(DIVERGED,) if grown else (),
    )  # fmt: skip


def _account(culprit: Culprit) -> tuple[str, str]:
    """Cause and remedy; each begins with what it says, and neither repeats the evidence."""
    if not culprit.outside:
        cause = culprit.explanation
        if cause.startswith("its input"):  # said after the evidence it is clear whose; alone it is not
            cause = f"the input of {culprit.operation}{cause.removeprefix('its input')}"
        return cause, culprit.remedy
    reached = culprit.explanation.removeprefix("and it ").split(" (rows")[0]  # reached the loss
    if culprit.name == UNKNOWN:
        return (
            f"a tensor that is no parameter, no buffer and not in the batch was so before the step, and it {reached}",
            "look at tensors that the program keeps: attributes of the model or the loss, globals, hidden states that "
            "are carried from step to step (detach does not make them finite)",
        )
    if culprit.kind == "input":
        rows = f" in rows {', '.join(map(str, culprit.rows))}" if culprit.rows else ""
        return f"the batch came like this: there are bad values{rows}, and they {reached}", culprit.remedy
    if culprit.kind == "buffer":
        return (
            f"{culprit.name} was so before this step and {reached}: an earlier batch, a loaded file or the program "
            "wrote it",
            "reset it (reset_running_stats() for BatchNorm) or go back to a checkpoint, and look at what feeds it",
        )
    return f"{culprit.name} was so before this step, and it {reached}", culprit.remedy


def _untraced(trace: Trace | None, known: Circumstances) -> tuple[str, str, str]:
    """Evidence, cause and remedy where the replay named nothing."""
    told = f" Autograd said: {_first_line(known.error)}." if known.error is not None else ""
    seen = "Loss or gradients of the step were not finite"
    look = "run again with anomaly_detection=true sample_rate=1, and look at what the step keeps between batches"
    if trace is None:
        return f"{seen}; it could not be replayed.{told}", "unknown: the step could not be run again", look
    if trace.error is not None:
        evidence = f"{seen}; its replay raised {type(trace.error).__name__}: {_first_line(trace.error)}.{told}"
        cause = "the step cannot be run twice: it uses up or changes something that it needs"
    else:
        evidence = f"{seen}, but the same step was finite when it was replayed.{told}"
        cause = (
            "the step does not repeat itself: an operation that is not deterministic, state that the step keeps "
            "outside the model, or faulty hardware"
        )
    if known.changed:
        names = ", ".join(known.changed)
        return (
            evidence,
            f"unknown: the step changes {names} in place, so that its replay did not see the same batch",
            f"do not write into the batch (x = x / 255 in place of x /= 255); then the replay will name the operation "
            f"that failed, and {names} can be looked at",
        )
    if known.moves and trace.error is None:
        return (
            evidence,
            f"unknown: {_moved(known)}, and from where they are now the step is finite",
            "return early from the step when its loss is not finite, before the optimizer moves; then a replay starts "
            "from the same weights",
        )
    return evidence, cause, look


def _moved(known: Circumstances) -> str:
    if known.tripped:
        often = "once" if known.moves == 1 else f"{known.moves} times"
        return f"the step had moved the weights {often} before it was stopped"
    return "its gradients were finite, so the optimizer had moved the weights before the loss was seen"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else "no message"


# --- the step in a file ----------------------------------------------------------------------------------------------


def save_attempt(
    folder: Path, batch: Any, model: nn.Module, generators: rng.Snapshot, known: Circumstances
) -> Path | None:
    """Keep batch, weights, buffers, modes and generators of a step, from before it, so that it can be replayed.

    Returns the file, or None if it could not be written; the log says why, and the run goes on.
    """
    path = folder / FOLDER / f"step-{known.step:08d}.pt"
    error = None if known.error is None else _first_line(known.error)
    in_words = {**asdict(replace(known, error=None)), "error": error}
    state = {
        "step": known.step,
        "known": in_words,
        "batch": batch,
        "model": model.state_dict(),
        "in_eval": [name for name, module in model.named_modules() if not module.training],
        "generators": generators.state(),
    }
    told = ""
    try:
        state = plain_state(state)  # no more of a storage than is named, NumPy's arrays as tensors
    except TypeError as refusal:
        told = str(refusal)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(path) as (temporary, file):
            digesting = DigestingFile(file)
            torch.save(state, digesting)  # type: ignore[arg-type]
            digesting.finish()
            publish(temporary, path, file)
    except Exception as failure:  # whatever pickling a user's objects raises; nor must a full disk hide the fault
        log.warning("The batch of step %d could not be saved (%s); the run's report names the fault all the same.",
                    known.step, _first_line(failure))  # fmt: skip
        return None
    if told:
        log.warning("Step %d is saved as a pickle, which is only loaded where its classes are trusted: %s",
                    known.step, told.split(", so that")[0])  # fmt: skip
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
        raise ConfigError([_why_not(path, error)]) from error
    if not isinstance(state, Mapping) or not set(state) >= KEYS:
        raise ConfigError([f"{path} must be a step saved by the fuse (it holds something else)"])
    return state


def circumstances_of(state: Mapping[str, Any]) -> Circumstances:
    """What was known of a saved step."""
    told = dict(state["known"])
    error = RuntimeError(told["error"]) if told["error"] is not None else None
    poisons = {name: Poison(**account) for name, account in told["poisons"].items()}
    return Circumstances(**{**told, "error": error, "poisons": poisons})


def _why_not(path: Path, error: Exception) -> str:
    """Why a file was not loaded: loading a pickle runs code, so its classes must be trusted by name."""
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # not even a file of torch's: then the first error says it
        names = []
    if not names:
        return f"{path} cannot be replayed: {_first_line(error)}"
    return (
        f"{path} was not loaded: it holds objects of {', '.join(names)}, and loading those runs their code. Only if "
        "they are your own: name them in torch.serialization.add_safe_globals([...]), then replay from your program"
    )
