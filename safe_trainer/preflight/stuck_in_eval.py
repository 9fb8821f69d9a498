"""Is part of the model in evaluation mode while it is trained? Reads modules and the modes that they ran in."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from safe_trainer.findings import Finding
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.training_runs import TrainingRun


def stuck_findings(model: nn.Module, runs: list[TrainingRun]) -> Iterator[Finding]:
    """Dropout and normalisation that run in eval mode within a part that is in eval as a whole and is trained.

    A BatchNorm alone that was put in eval, as fine-tuning does, is meant so; and so is a part whose weights are frozen.
    """
    if not any(run.training for run in runs) and not model.training:
        return
    modules = dict(model.named_modules())
    stuck: dict[str, list[TrainingRun]] = {}
    for run in runs:
        part = _part_in_eval(run.name, modules) if not run.training else None
        if part is not None and _is_trained(modules[part]):
            stuck.setdefault(part, []).append(run)
    for part, inside in stuck.items():
        kinds = ", ".join(sorted({type(run.module).__name__ for run in inside}))
        yield finding(
            "model.stuck_in_eval",
            "warning",
            where=part,
            evidence=f"{part} is in eval mode in the training step while the rest trains: {len(inside)} of its modules "
            f"({kinds}) run as in evaluation, though its parameters are trained",
            cause="it came in eval mode, as pretrained models do, or eval() was called on it and never taken back",
            remedy=f"call model.train() before training; if {part} is to stay as it is, freeze its parameters too "
            "(requires_grad_(False))",
        )


def _part_in_eval(name: str, modules: dict[str, nn.Module]) -> str | None:
    """The outermost part around a module, larger than itself, that is in eval with all that has weights in it."""
    pieces = name.split(".")
    for length in range(1, len(pieces)):
        part = ".".join(pieces[:length])
        if not any(module.training for module in modules[part].modules()):
            return part
    return None


def _is_trained(part: nn.Module) -> bool:
    """Whether more than its normalisation is trained: weights of layers."""
    return any(
        parameter.requires_grad
        for module in part.modules()
        if not isinstance(module, nn.modules.batchnorm._NormBase)
        for parameter in module.parameters(recurse=False)
    )
