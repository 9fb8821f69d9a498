"""Check: what evaluation mode must mean: the same answer each time, each sample for itself, statistics that follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from safe_trainer.findings import CheckResult, Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.mixing import mixing
from safe_trainer.preflight.outcome import Skip, finding, judged
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import clone, tensors
from safe_trainer.preflight.traced import Call, ModuleCall, TracedStep, module_calls, trace, trace_step
from safe_trainer.utils import rng

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_",
            "feature_dropout")  # fmt: skip
NOISES = ("randn", "randn_like", "rand", "rand_like", "normal", "normal_", "uniform_", "bernoulli", "bernoulli_")


def check(program: Program, clock: Clock) -> CheckResult:
    """Run the model on a real batch in evaluation mode, again with other random numbers, and with other samples."""
    step = trace_step(program, program.batch())
    if not step.model_calls():
        raise Skip("the training step does not call the model as a whole")
    findings = list(_frozen_statistics(program))
    program.model.eval()
    call = step.model_calls()[0]
    with torch.no_grad():
        first, second = (_run(program, call, seed) for seed in (0, 1))
        steady = _first_difference(first, second)
        if steady is not None:
            findings += _unsteady(program, call, steady)
            return judged("evaluation is not deterministic", findings)
        found, told = mixing(program, call, step)
    return judged(f"evaluation is the same each time; {told}", [*findings, *found])


def _run(program: Program, call: ModuleCall, seed: int) -> list[ModuleCall]:
    """Every module's run within one forward pass, the random numbers those of `seed`."""
    calls: list[ModuleCall] = []
    with rng.isolated(), module_calls(program.model, calls):
        torch.manual_seed(seed)
        program.model(*clone(call.args), **clone(call.kwargs))
    return calls


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


def _unsteady(program: Program, call: ModuleCall, where: ModuleCall) -> Iterator[Finding]:
    """What draws random numbers in evaluation: dropout is a fault, noise that a model samples by is not."""
    seen = TracedStep()
    with torch.enable_grad():
        trace(lambda: program.model(*clone(call.args), **clone(call.kwargs)), program.model, seen)
    dropout = next((drawn for drawn in seen.named(*DROPOUTS) if _drops(drawn)), None)
    if dropout is not None:
        yield _non_deterministic(
            "error", dropout.module or where.name, dropout.source,
            f"{dropout.name} drops with probability {dropout.argument(1, 'p', 0.5)} in evaluation mode",
            "functional dropout drops always, unless it is told training=self.training",
            "write F.dropout(x, p, training=self.training), or use nn.Dropout, which model.eval() switches off",
        )  # fmt: skip
        return
    noise = next((drawn for drawn in seen.named(*NOISES)), None)
    harmless = noise is None or _is_scaled_by_the_model(seen, noise)
    yield _non_deterministic(
        "info" if harmless else "warning", (noise.module if noise else None) or where.name or None,
        noise.source if noise else None,
        f"the output of {where.name or 'the model'} differs between two runs on the same input in evaluation mode"
        + (f"; {noise.name} draws in it" if noise else ""),
        "noise is added in evaluation mode too",
        "add it only where self.training is true; a model that samples on purpose may also answer with the mean",
    )  # fmt: skip


def _non_deterministic(
    severity: str, where: str | None, source: str | None, evidence: str, cause: str, remedy: str
) -> Finding:
    return finding("model.non_deterministic_eval", severity, where=where or None, source=source, evidence=evidence,
                   cause=cause, remedy=remedy)  # fmt: skip


def _drops(call: Call) -> bool:
    probability = call.argument(1, "p", 0.5)
    return bool(call.argument(2, "training", True)) and isinstance(probability, float) and 0 < probability < 1


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


def _frozen_statistics(program: Program) -> Iterator[Finding]:
    """Normalisation that trains on the batch's statistics and never takes them over for evaluation."""
    frozen = [
        (name, module)
        for name, module in program.model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        and module.training
        and module.running_mean is not None
        and module.momentum == 0
    ]
    if not frozen:
        return
    name, module = frozen[0]
    more = f", and {len(frozen) - 1} more," if len(frozen) > 1 else ""
    yield finding(
        "model.norm_stats",
        "error",
        where=name,
        evidence=f"{type(module).__name__} {name}{more} has momentum 0: its running statistics never change",
        cause="momentum is the weight of the new batch, not of the past: with 0 evaluation normalises by the "
        "statistics of the start, 0 and 1, whatever the data are",
        remedy="leave momentum at 0.1, or None for a plain average over all batches",
    )
