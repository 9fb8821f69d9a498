"""What the library's losses are fed: each is defined for logits, probabilities, log-probabilities or distances.

The numbers themselves are looked at, and the node of the graph that made them; a loss inside PyTorch's own modules is
seen like one called by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.graph import kind, maker
from safe_trainer.preflight.outcome import finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.traced import Call, TracedStep

SUM_ERROR = 1e-3
"""How far a sum of probabilities may lie off 1: half precision keeps three digits."""


def loss_inputs(program: Program, step: TracedStep) -> Iterator[Finding]:
    """The first loss of the step that is fed what it is not defined for."""
    for call in step.calls:
        look = LOSSES.get(call.name)
        told = look(call) if look is not None and call.module is None else None
        if told is None:
            continue
        fault, evidence, cause, remedy = told
        made = None if fault == "data.label_range" else _made_by(step, call.argument(0, "input"))
        yield finding(
            fault,
            "error",
            where=(made.module if made is not None and made.module else None) or _place(program),
            source=(made if made is not None and made.source else call).source,
            evidence=evidence,
            cause=cause,
            remedy=remedy,
        )
        return


def _place(program: Program) -> str:
    return "train_step" if program.train_step is not None else "loss_fn"


Told = tuple[str, str, str, str]

TWICE = (
    "softmax or sigmoid is applied twice: once before the loss, and once in it. The loss cannot fall below that of "
    "nearly equal outputs, and gradients are weak"
)


def _cross_entropy(call: Call) -> Told | None:
    values = call.argument(0, "input")
    if not isinstance(values, Tensor) or values.dim() < 2 or values.shape[1] < 2:
        return None
    if kind(maker(values)) == "Relu":
        return _rectified(values.detach())
    if not _are_probabilities(values, 1):
        return None
    floor = float(torch.log1p((values.shape[1] - 1) * torch.exp(torch.tensor(-1.0))))
    return (
        "loss.double_softmax",
        f"cross_entropy is fed {tuple(values.shape)} outputs that are probabilities: none below 0, each row's sum is "
        f"1; its loss can then not fall below {floor:.3g}",
        TWICE,
        "take the softmax out of the model and give cross_entropy the raw outputs; apply softmax where probabilities "
        "are shown",
    )


def _rectified(values: Tensor) -> Told | None:
    """Classes whose rectified scores are zero for the whole batch: no gradient reaches them."""
    silent = (values.transpose(0, 1).flatten(1) <= 0).all(dim=1)
    if len(values) < LEAST_SAMPLES or not bool(silent.any()) or bool(silent.all()):
        return None
    classes = ", ".join(str(int(number)) for number in silent.nonzero().flatten()[:5])
    return (
        "activation.dead",
        f"cross_entropy is fed the result of a ReLU, in which the scores of {int(silent.sum())} of {len(silent)} "
        f"classes ({classes}) are 0 for all {len(values)} samples",
        "a ReLU behind the last layer cuts off negative scores; a class that starts below 0 everywhere gets no "
        "gradient and can never be learned",
        "take the ReLU behind the last layer out: cross_entropy wants raw scores of either sign",
    )


LEAST_SAMPLES = 16
"""Samples in which a class must be silent before that is more than chance: half of them are, 1 in 65,000 for all."""


def _with_logits(call: Call) -> Told | None:
    values = call.argument(0, "input")
    if not isinstance(values, Tensor) or kind(maker(values)) not in ("Sigmoid", "Softmax"):
        return None
    name = kind(maker(values)).lower()
    return (
        "loss.double_softmax",
        f"{call.name} is fed the result of {name}: values from {float(values.detach().min()):.3g} to "
        f"{float(values.detach().max()):.3g}",
        TWICE,
        f"take the {name} out of the model, or use binary_cross_entropy on its result",
    )


def _nll(call: Call) -> Told | None:
    values = call.argument(0, "input")
    if not isinstance(values, Tensor) or values.dim() < 2 or values.shape[1] < 2:
        return None
    if _are_probabilities(values, 1):
        got = "probabilities"
    elif float(values.detach().max()) > SUM_ERROR:
        got = f"values up to {float(values.detach().max()):.3g}"
    else:
        return None
    return (
        "loss.input_domain",
        f"nll_loss is fed {got} where it wants log-probabilities, which are at most 0",
        "nll_loss takes the output of log_softmax; with anything else it has no lower bound, or the wrong slope",
        "use cross_entropy on the raw outputs, or apply log_softmax before nll_loss",
    )


def _kl_div(call: Call) -> Told | None:
    values, target = call.argument(0, "input"), call.argument(1, "target")
    if not isinstance(values, Tensor) or not isinstance(target, Tensor) or values.dim() < 1:
        return None
    logs = bool(call.argument(5, "log_target", False))
    if _are_probabilities(values, -1) or float(values.detach().max()) > SUM_ERROR:
        got = f"an input with values up to {float(values.detach().max()):.3g}, where it wants log-probabilities"
    elif not logs and float(target.detach().min()) < -SUM_ERROR:
        got = f"a target with values down to {float(target.detach().min()):.3g}, where it wants probabilities"
    elif logs and float(target.detach().max()) > SUM_ERROR:
        got = f"a target with values up to {float(target.detach().max()):.3g} under log_target=True"
    else:
        return None
    return (
        "loss.input_domain",
        f"kl_div is fed {got}",
        "kl_div(input, target) takes log-probabilities as input and probabilities as target (log-probabilities with "
        "log_target=True); with others its value is no divergence and may fall below 0",
        "use kl_div(log_softmax(outputs, -1), softmax(target_outputs, -1), reduction='batchmean')",
    )


def _signs(position: int, name: str) -> Callable[[Call], Told | None]:
    """Losses whose labels are -1 and 1."""

    def look(call: Call) -> Told | None:
        target = call.argument(position, name)
        if not isinstance(target, Tensor) or target.numel() == 0:
            return None
        values = target.detach().unique()
        if bool((values.abs() == 1).all()) or len(values) > 2:
            return None
        got = ", ".join(f"{float(value):g}" for value in values)
        return (
            "loss.input_domain",
            f"{call.name} is fed labels {got}, where it wants -1 and 1",
            f"with a label of 0 {call.name} does nothing for that sample, or the wrong thing",
            "turn labels of 0 and 1 into 2 * label - 1",
        )

    return look


def _hinge_embedding(call: Call) -> Told | None:
    values = call.argument(0, "input")
    if isinstance(values, Tensor) and values.numel() and float(values.detach().min()) < -SUM_ERROR:
        return (
            "loss.input_domain",
            f"hinge_embedding_loss is fed values down to {float(values.detach().min()):.3g}, where it wants distances",
            "it expects a distance, at least 0; with raw outputs it has no lower bound: negative outputs lower it for "
            "ever",
            "feed it a distance between two embeddings, or use soft_margin_loss, or hinge as clamp(1 - label * "
            "output, 0)",
        )
    return _signs(1, "target")(call)


def _poisson(call: Call) -> Told | None:
    target = call.argument(1, "target")
    if isinstance(target, Tensor) and target.numel() and float(target.detach().min()) < 0:
        return (
            "loss.input_domain",
            f"poisson_nll_loss is fed targets down to {float(target.detach().min()):.3g}, where it wants counts",
            "a count cannot be negative; standardised targets do not fit this loss",
            "give it the raw counts, or use mse_loss for standardised targets",
        )
    return None


def _binary(call: Call) -> Told | None:
    target = call.argument(1, "target")
    if isinstance(target, Tensor) and target.numel():
        least, most = float(target.detach().min()), float(target.detach().max())
        if least < 0 or most > 1:
            labels = least >= 0 and bool((target.detach() == target.detach().round()).all())
            return (
                "data.label_range" if labels else "loss.input_domain",
                f"{call.name} is fed targets from {least:.3g} to {most:.3g}, where it wants 0 to 1",
                "with targets outside 0..1 the loss has no lower bound",
                "turn the targets into 0 and 1 (divide masks of 0 and 255 by 255; turn -1 and 1 into (target + 1) / 2)",
            )
    return _with_logits(call) if call.name.endswith("logits") else None


LOSSES: dict[str, Callable[[Call], Told | None]] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy_with_logits": _binary,
    "nll_loss": _nll,
    "kl_div": _kl_div,
    "hinge_embedding_loss": _hinge_embedding,
    "soft_margin_loss": _signs(1, "target"),
    "margin_ranking_loss": _signs(2, "target"),
    "cosine_embedding_loss": _signs(2, "target"),
    "poisson_nll_loss": _poisson,
}
"""Each loss by the name of its function; the modules of torch.nn call these."""


def _are_probabilities(values: Tensor, dim: int) -> bool:
    """Whether all values are at least 0 and each row sums to 1."""
    plain = values.detach().float()
    if plain.numel() == 0 or plain.shape[dim] < 2 or float(plain.min()) < 0:
        return False
    return bool(((plain.sum(dim) - 1).abs() < SUM_ERROR).all())


def _made_by(step: TracedStep, values: Any) -> Call | None:
    """The call whose result the loss was fed, shapes passed over."""
    node = maker(values) if isinstance(values, Tensor) else None
    if node is None:
        return None
    return next((call for call in reversed(step.calls) if getattr(call.output, "grad_fn", None) is node), None)
