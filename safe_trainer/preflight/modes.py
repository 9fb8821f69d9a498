"""Check: what evaluation mode must mean: the same answer each time, each sample for itself, statistics that follow."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from safe_trainer.findings import CheckResult, Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.mixing import mixing
from safe_trainer.preflight.norm_statistics import statistics_findings
from safe_trainer.preflight.outcome import Skip, finding, judged
from safe_trainer.preflight.program import SAMPLES, Program
from safe_trainer.preflight.reading import clone, tensors
from safe_trainer.preflight.stuck_in_eval import stuck_findings
from safe_trainer.preflight.traced import Call, ModuleCall, TracedStep, module_calls, trace, trace_step
from safe_trainer.preflight.training_runs import training_runs
from safe_trainer.task import first_length
from safe_trainer.utils import rng

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_",
            "feature_dropout")  # fmt: skip
NOISES = ("randn", "randn_like", "rand", "rand_like", "normal", "normal_", "uniform_", "bernoulli", "bernoulli_")
CHOICES = frozenset({"randint", "randint_like", "randperm", "multinomial", "argsort", "sort", "topk", "rsample"})
"""Calls of models that sample on purpose: diffusion steps, masked autoencoders."""


def check(program: Program, clock: Clock) -> CheckResult:
    """Run the model on a real batch in evaluation mode, again with other random numbers, and with other samples."""
    batch = program.batch(_count(program))
    runs = training_runs(program, batch)
    findings = [*stuck_findings(program.model, runs), *statistics_findings(runs, clock.part(0.5))]
    step = trace_step(program, batch)
    if not step.model_calls():
        told = "the training step does not call the model as a whole: its answers in evaluation were not looked at"
        if findings:
            return judged(told, findings)
        raise Skip(told)
    program.model.eval()
    call = step.model_calls()[0]
    with torch.no_grad():
        first, second = (_run(program, call, seed) for seed in (0, 1))
        steady = _first_difference(first, second)
        if steady is not None and _first_difference(first, _run(program, call, 0)) is not None:
            return judged("evaluation depends on more than input and random numbers: the model keeps a state", findings)
        if steady is not None:
            findings += _unsteady(program, call, steady, _kept_columns(first[-1].output, second[-1].output))
            return judged("evaluation is not deterministic", findings)
        found, told = mixing(program, batch, call, step)
    return judged(f"evaluation is the same each time; {told}", [*findings, *found])


def _count(program: Program) -> int:
    """How many samples to take: where PyTorch itself put them in front, a number that is no other length there."""
    batch = program.batches()[0]
    others = {size for tensor in tensors(batch) for size in tensor.shape[1:]}
    most = min(SAMPLES, first_length(batch) or SAMPLES)
    if getattr(program.train_loader, "collate_fn", None) is not default_collate or most not in others:
        return SAMPLES
    return next((count for count in range(most, 3, -1) if count not in others), SAMPLES)


def _run(program: Program, call: ModuleCall, seed: int) -> list[ModuleCall]:
    """Every module's run within one forward pass, the random numbers those of `seed`."""
    calls: list[ModuleCall] = []
    with rng.isolated(), module_calls(program.model, calls):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        program.model(*clone(call.args), **clone(call.kwargs))
    return calls


def _kept_columns(first: Any, second: Any) -> bool:
    """Whether part of the output is the same with other random numbers, as the mean of a variational model is."""
    for one, other in zip(tensors(first), tensors(second), strict=False):
        if one.shape != other.shape or torch.equal(one, other):
            return True
        if one.dim() >= 2 and len(one) >= 8 and bool((one == other).flatten(1).all(0).any()):
            return True
    return False


def _first_difference(first: list[ModuleCall], second: list[ModuleCall]) -> ModuleCall | None:
    """The first module, in the order in which they end, whose output is another; None if the model's is the same."""
    if len(first) != len(second) or _same(first[-1].output, second[-1].output):
        return None
    pairs = zip(first, second, strict=True)
    return next((one for one, other in pairs if not _same(one.output, other.output)), None)


def _same(first: Any, second: Any) -> bool:
    pairs = zip(tensors(first), tensors(second), strict=False)
    return all(torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)
               for one, other in pairs if one.shape == other.shape)  # fmt: skip


def _unsteady(program: Program, call: ModuleCall, where: ModuleCall, keeps_part: bool) -> Iterator[Finding]:
    """What draws random numbers in evaluation: dropout is a fault, noise that a model samples by is not."""
    seen = TracedStep()
    with torch.enable_grad():
        trace(lambda: program.model(*clone(call.args), **clone(call.kwargs)), program.model, seen)
    dropout = next((drawn for drawn in seen.calls if _drops(drawn)), None)
    if dropout is not None:
        name = dropout.module or where.name
        yield _non_deterministic(
            _dropout_severity(program, dropout), name, dropout.source,
            f"{dropout.name} drops with probability {_probability(dropout)} in evaluation mode",
            "dropout as a function drops always, unless it is told otherwise",
            "write F.dropout(x, p, training=self.training), or dropout_p=p if self.training else 0.0 for attention; "
            "nn.Dropout is switched off by model.eval()",
        )  # fmt: skip
        return
    noise = next((drawn for drawn in seen.named(*NOISES)), None)
    harmless = noise is None or keeps_part or _samples_on_purpose(program, call, seen)
    harmless = harmless or (noise is not None and _is_scaled_by_the_model(seen, noise))
    yield _non_deterministic(
        "info" if harmless else "error", (noise.module if noise else None) or where.name or None,
        noise.source if noise else None,
        f"the output of {where.name or 'the model'} differs between two runs on the same input in evaluation mode"
        + (f"; {noise.name} draws in it" if noise else ""),
        "noise is added in evaluation mode too",
        "add it only where self.training is true; a model that samples on purpose may also answer with the mean",
    )  # fmt: skip


def _samples_on_purpose(program: Program, call: ModuleCall, seen: TracedStep) -> bool:
    """Whether this is a model of a distribution: it makes choices, gives several outputs, or its input back."""
    if not program.has_forward or any(made.name in CHOICES for made in seen.calls):
        return True
    given = [t for t in tensors((call.args, call.kwargs)) if t.is_floating_point()]
    wanted = list(tensors(program.batch()))[-1:]
    return not isinstance(call.output, torch.Tensor) or call.output.dim() == 0 or not given or any(
        one.shape == other.shape for one in given for other in wanted)  # fmt: skip


def _dropout_severity(program: Program, call: Call) -> str:
    """An error, but for what is meant so or may be: Monte-Carlo dropout says it in its names or by training=True."""
    module = dict(program.model.named_modules()).get(call.module or "")
    names = f"{type(module).__name__} {type(program.model).__name__}"
    said = call.place is not None and "training=True" in call.place.code.replace(" ", "")
    if said or re.search(r"(?i:monte|bayes|always|uncertain)|MC|Mc[A-Z]", names):
        return "info"
    return "warning" if isinstance(module, nn.modules.dropout._DropoutNd) else "error"


def _probability(call: Call) -> Any:
    return call.argument(4, "dropout_p", 0.0) if call.name not in DROPOUTS else call.argument(1, "p", 0.5)


def _non_deterministic(
    severity: str, where: str | None, source: str | None, evidence: str, cause: str, remedy: str
) -> Finding:
    return finding("model.non_deterministic_eval", severity, where=where or None, source=source, evidence=evidence,
                   cause=cause, remedy=remedy)  # fmt: skip


def _drops(call: Call) -> bool:
    if call.name not in (*DROPOUTS, "scaled_dot_product_attention"):
        return False
    probability = _probability(call)
    told = call.name not in DROPOUTS or bool(call.argument(2, "training", True))
    return told and isinstance(probability, float) and 0 < probability < 1


def _is_scaled_by_the_model(seen: TracedStep, noise: Call) -> bool:
    """Whether the noise is multiplied by something learned, as a variational model's is, or turned into a choice."""
    for call in seen.calls:
        given = list(tensors((call.args, call.kwargs)))
        if any(tensor is noise.output for tensor in given):
            others = [tensor for tensor in given if tensor is not noise.output]
            if call.name in ("log", "log_", "__lt__", "lt", "gt", "__gt__") or (
                call.name in ("mul", "__mul__", "__rmul__") and any(tensor.requires_grad for tensor in others)
            ):
                return True
    return False
