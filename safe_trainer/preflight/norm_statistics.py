"""Do a normalisation's statistics for evaluation follow its data? Runs such modules alone, on what they were given."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.float64 import floats
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.reading import clone
from safe_trainer.preflight.training_runs import TrainingRun, statistics_of
from safe_trainer.utils import rng

FAR = 0.3
"""Distance of evaluation's output from training's on the same batch, of its size, that harms. A batch of four alone
makes 0.13 between its own variance and the unbiased one."""
FEW = 4
"""Values for each statistic below which the two may differ by that much and more."""
ROUNDS = 300
"""Training passes of one batch after which statistics have reached it, at any momentum from 0.02 on."""
SETTLED = 0.02
"""Share of their way that statistics still go in as many passes again, below which they have arrived."""
SLOW = 1e-3
"""Momentum below which a thousand steps are not enough."""


def statistics_findings(runs: list[TrainingRun], clock: Clock) -> Iterator[Finding]:
    """One finding for each kind of module whose statistics are not those of its data."""
    told: set[type] = set()
    for run in runs:
        if clock.left() <= 0:
            return
        if run.training and type(run.module) not in told and statistics_of(run.module):
            found = _finding(run, clock)
            if found is not None:
                told.add(type(run.module))
                yield found


def _finding(run: TrainingRun, clock: Clock) -> Finding | None:
    module, kept = run.module, {name: buffer.clone() for name, buffer in run.module.named_buffers()}
    try:
        with torch.no_grad():
            return _looked_at(run, clock)
    except (RuntimeError, TypeError, ValueError):  # it does not run alone, and nothing is known of it
        return None
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(kept[name])
        module.train(run.training)


def _looked_at(run: TrainingRun, clock: Clock) -> Finding | None:
    before, trained, again = _values(run.module), _output(run, True, 0), _output(run, True, 1)
    if trained is None or again is None or not torch.equal(trained, again) or len(trained) < FEW:
        return None  # noise: the two modes differ by design
    moved = _distance(before, _values(run.module))
    if moved == 0.0:
        far = _far(run, trained)
        return _never_updated(run, far) if far > FAR or _is_untouched(run.module) else None
    momentum = getattr(run.module, "momentum", None)
    if isinstance(run.module, nn.modules.batchnorm._NormBase):
        if isinstance(momentum, float) and 0 < momentum < SLOW and _far(run, trained) > FAR:
            return _slow(run, momentum, _far(run, trained))
        return None
    return _elsewhere(run, before, trained, clock)


def _is_untouched(module: nn.Module) -> bool:
    """Whether a normalisation of PyTorch's has the statistics that it is made with: nobody meant those to stay."""
    if not isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    mean, var = module.running_mean, module.running_var
    return mean is not None and var is not None and bool((mean == 0).all()) and bool((var == 1).all())


def _elsewhere(run: TrainingRun, before: list[Tensor], trained: Tensor, clock: Clock) -> Finding | None:
    """Hand-written statistics that have settled, and not where the batch's are."""
    _repeat(run, clock)
    first = _values(run.module)
    _repeat(run, clock)
    if clock.left() <= 0 or _distance(first, _values(run.module)) > SETTLED * _distance(before, first):
        return None
    far = _far(run, trained)
    if far <= FAR:
        return None
    return finding(
        "model.norm_stats",
        "error",
        where=run.name,
        evidence=f"after {2 * ROUNDS} training passes of one batch the statistics of {type(run.module).__name__} "
        f"{run.name} have settled, and its output for that batch in evaluation is off by {far:.0%} of its size",
        cause="evaluation normalises by something else than what training takes: a deviation kept as a variance, the "
        "mean of another axis, a sum that is never divided",
        remedy="keep exactly what training divides by, or use nn.BatchNorm",
    )


def _never_updated(run: TrainingRun, far: float) -> Finding:
    zero = getattr(run.module, "momentum", None) == 0
    return finding(
        "model.norm_stats",
        "error",
        where=run.name,
        evidence=f"{type(run.module).__name__} {run.name} keeps {', '.join(statistics_of(run.module))}, which training "
        f"never changes{' (momentum 0)' if zero else ''}; its output in evaluation is {far:.0%} of its size off from "
        "the one in training, for the same batch",
        cause="momentum is the weight of the new batch, not of the past: with 0 nothing is ever taken over"
        if zero
        else "the batch's statistics are never written to the buffers that evaluation uses",
        remedy="leave momentum at 0.1, or None for a plain average over all batches"
        if zero
        else "update the buffers in place while training, as in self.running_mean.lerp_(mean.detach(), 0.1)",
    )


def _slow(run: TrainingRun, momentum: float, far: float) -> Finding:
    return finding(
        "model.norm_stats",
        "warning",
        where=run.name,
        evidence=f"{type(run.module).__name__} {run.name} has momentum {momentum:g}, so its statistics need some "
        f"{1 / momentum:,.0f} steps to arrive; until then evaluation is off by up to {far:.0%}",
        cause="momentum is the weight of the new batch, not of the past",
        remedy="momentum=0.1, or None for a plain average over all batches",
    )


def _far(run: TrainingRun, trained: Tensor) -> float:
    evaluated = _output(run, False, 0)
    if evaluated is None or evaluated.shape != trained.shape:
        return 0.0
    far = float((evaluated - trained).norm() / trained.norm().clamp(min=1e-12))
    return far if far == far else 0.0


def _output(run: TrainingRun, training: bool, seed: int) -> Tensor | None:
    run.module.train(training)
    with rng.isolated():
        torch.manual_seed(seed)
        found = floats(run.module(*clone(run.args), **clone(run.kwargs)))
    return found[0].float() if found and found[0].dim() else None


def _repeat(run: TrainingRun, clock: Clock) -> None:
    run.module.train()
    for _ in range(ROUNDS):
        if clock.left() <= 0:
            return
        run.module(*clone(run.args), **clone(run.kwargs))


def _values(module: nn.Module) -> list[Tensor]:
    return [module.get_buffer(name).detach().clone() for name in statistics_of(module)]


def _distance(first: list[Tensor], second: list[Tensor]) -> float:
    return math.sqrt(sum(float((one - other).square().sum()) for one, other in zip(first, second, strict=True)))
