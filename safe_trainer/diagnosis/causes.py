"""Cause and symptom: what explains what. A finding that another one explains is told under it, not beside it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from safe_trainer.findings import Finding, Severity

__all__ = ["EXPLAINS", "explained", "folded"]

_UNSTABLE = frozenset({"training.diverging", "training.oscillating", "optimizer.lr_too_high", "activation.dead",
                       "gradient.exploding", "activation.exploding", "activation.collapsed"})  # fmt: skip
_STANDS = frozenset({"training.not_decreasing", "training.plateau"})
_IDLE = _STANDS | {"optimizer.lr_too_low", "gradient.vanishing"}

EXPLAINS: dict[str, frozenset[str]] = {
    # sums of old gradients are steps that are too large
    "gradient.accumulating": _UNSTABLE | _STANDS,
    # so are gradients of a sum over the batch, and inputs far from the scale that weights are drawn for
    "loss.reduction": _UNSTABLE | _STANDS | {"init.loss_off"},
    "data.unnormalized": _UNSTABLE | _STANDS | {"init.loss_off", "activation.saturated", "init.dead"},
    "data.mutated_inplace": _UNSTABLE | _STANDS | {"data.unnormalized"},
    # steps that are too large throw units out and the loss up
    "optimizer.lr_too_high": _UNSTABLE | _STANDS,
    # a signal that grows with depth grows on the way back as well
    "activation.exploding": _STANDS
    | {"gradient.exploding", "init.loss_off", "init.scale", "training.diverging", "training.oscillating"},
    "init.scale": _STANDS
    | {"activation.exploding", "activation.saturated", "gradient.exploding", "gradient.vanishing", "init.loss_off"},
    # units that are dead or flat let nothing through
    "init.dead": _IDLE | {"activation.dead", "activation.collapsed"},
    "activation.dead": _IDLE | {"activation.collapsed"},
    "activation.saturated": _IDLE | {"activation.collapsed"},
    # nothing moves what no optimizer holds, what gets no gradient, and what no step uses
    "optimizer.params_missing": _IDLE | {"gradient.missing"},
    "optimizer.step_missing": _IDLE | {"gradient.missing", "gradient.accumulating"},
    "gradient.missing": _IDLE,
    "optimizer.scheduler_misuse": _IDLE,
    "gradient.overclipped": _IDLE,
    "precision.underflow": _IDLE,
    "precision.overflow": _IDLE | {"data.unnormalized"},
    "optimizer.weight_decay": _IDLE | {"activation.collapsed"},
    "optimizer.lr_too_low": _STANDS,
    # a gradient that is not the slope leads anywhere; so does the slope of a wrong loss
    "gradient.incorrect": _UNSTABLE | _IDLE,
    "loss.wrong_sign": _UNSTABLE | _IDLE,
    "loss.broadcast": _IDLE,
    "loss.double_softmax": _IDLE,
    "model.unregistered_submodule": _IDLE | {"optimizer.params_missing"},
    # a step into a steep place throws the loss up
    "gradient.exploding": _STANDS | {"training.diverging", "training.oscillating"},
    "gradient.vanishing": _STANDS | {"optimizer.lr_too_low", "activation.collapsed"},
    "training.diverging": _STANDS | {"training.oscillating"},
    "training.oscillating": _STANDS,
    # what tells samples apart is lost: whatever learns behind it, or in front of it, does not
    "activation.collapsed": _IDLE,
    # figures of an evaluation that is wrong say nothing about the network
    "model.eval_missing": frozenset({"training.overfitting"}),
    "model.norm_stats": frozenset({"training.overfitting"}),
    "model.batch_mixing": frozenset({"training.overfitting"}) | _IDLE,
    "model.stuck_in_eval": _IDLE | {"activation.dead"},
    "model.too_small": _STANDS,
    "data.label_range": frozenset({"training.diverging", "loss.wrong_sign", "init.loss_off"}),
    "data.not_shuffled": frozenset({"training.oscillating", "training.plateau"}),
    "data.worker_seed": frozenset({"training.overfitting"}),
    "data.label_misaligned": frozenset({"training.overfitting"}) | _IDLE,
    "data.constant_input": _IDLE | {"activation.dead", "activation.collapsed"},
}
"""For each cause, the faults that follow from it. What the fuse has caught stands for itself: its line is a place to
mend, whatever the cause; unless its numbers had grown huge before."""

_DRIVES_APART = frozenset({
    "activation.exploding", "data.mutated_inplace", "data.unnormalized", "gradient.accumulating", "gradient.exploding",
    "gradient.incorrect", "init.scale", "loss.reduction", "loss.wrong_sign", "optimizer.lr_too_high",
    "precision.underflow",
})  # fmt: skip
"""What makes numbers grow until they are no longer finite."""
_NONFINITE = ("forward.nonfinite", "gradient.nonfinite")
_AT_THE_START = {
    name: frozenset({"optimizer.lr_too_high", "init.loss_off", "training.diverging"})
    for name in ("activation.exploding", "gradient.exploding", "init.scale", "data.unnormalized")
}
"""Before the first step no rate has done anything yet: what is too large then makes any rate too high."""


def _follows(finding: Finding, cause: Finding) -> bool:
    """Whether the one is explained by the other."""
    if finding is cause:
        return False
    if finding.fault in _NONFINITE and "training.diverging" in finding.symptoms and cause.fault in _DRIVES_APART:
        return True
    if cause.stage == "preflight" and finding.fault in _AT_THE_START.get(cause.fault, ()):
        return True
    if finding.stage == "preflight" and cause.fault in _AT_THE_START.get(finding.fault, ()):
        return False
    return finding.fault in EXPLAINS.get(cause.fault, frozenset())


def explained(findings: Iterable[Finding]) -> frozenset[str]:
    """Faults that follow from what has been found: nobody need be told of them by themselves."""
    told = [finding for finding in findings if finding.severity is not Severity.info]
    return frozenset(name for cause in told for name in EXPLAINS.get(cause.fault, frozenset()) - {cause.fault})


def folded(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without those that others explain, in their order; these are named in the others' `symptoms`.

    A cause takes over the worst severity of what it explains. An info explains nothing: it is no alarm. Of two that
    explain each other the earlier one is the cause. Folding what is folded changes nothing.
    """
    kept = list(findings)
    for cause in list(kept):
        if cause.severity is Severity.info or cause not in kept:
            continue
        explained = [finding for finding in kept if _follows(finding, cause)]
        if not explained:
            continue
        place = kept.index(cause)
        worst = max([cause, *explained], key=lambda finding: list(Severity).index(finding.severity)).severity
        names = dict.fromkeys([*cause.symptoms, *(n for f in explained for n in (f.fault, *f.symptoms))])
        kept[place] = replace(cause, severity=worst, symptoms=tuple(n for n in names if n != cause.fault))
        kept = [finding for finding in kept if not any(finding is other for other in explained)]
    return kept
