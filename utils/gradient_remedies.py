"""Says why a gradient went non-finite, by the forward operation that it belongs to, and what to do about it.

Pure functions over numbers and names; nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from safe_trainer.utils.facts import Account, Facts, overflow, ranges, too_large


def _gradient_of_root(facts: Facts) -> Account:
    return (
        f"the gradient of {facts.forward} at 0 is infinite, and 0 * inf is NaN ({ranges(facts)})",
        "add eps inside the root, torch.sqrt(x + eps), or use torch.linalg.vector_norm for a norm",
    )


def _gradient_of_log(facts: Facts) -> Account:
    return (
        f"the gradient of a logarithm is 1 / x and its input is 0 ({ranges(facts)}); clamping the result "
        "afterwards does not help backward",
        "clamp the input of the logarithm, or use log_softmax, logsigmoid or xlogy",
    )


def _gradient_of_division(facts: Facts) -> Account:
    return (
        f"the gradient of a quotient divides by the denominator, which is 0 or close to it ({ranges(facts)})",
        "add a small number to the denominator; where torch.where hides the quotient, guard the denominator instead",
    )


def _gradient_of_power(facts: Facts) -> Account:
    if facts.damage.dtype is torch.float16:
        return (
            f"the gradient of a power overflows half precision ({too_large(facts)})",
            "compute the power in float32 or bfloat16, or scale its base down; adding a small number does nothing",
        )
    return (
        "the gradient of a power is exponent * x ** (exponent - 1), which is infinite at 0 for an exponent below 1 "
        f"({ranges(facts)})",
        "keep the base away from 0, x.clamp(min=eps), or use an exponent of at least 1",
    )


def _gradient_at_edge(facts: Facts) -> Account:
    return (
        f"the gradient of {facts.forward} is infinite at the edge of its domain ({ranges(facts)})",
        "clamp its input a little inside the domain, for example x.clamp(-1 + 1e-6, 1 - 1e-6)",
    )


def _gradient_of_scaling(facts: Facts) -> Account:
    if facts.damage.value == "nan" and not facts.masked:
        return (
            f"the gradient of a product multiplies 0 by an infinity ({ranges(facts)})",
            "keep both factors finite",
        )
    return overflow(facts)


def _gradient_of_spectrum(facts: Facts) -> Account:
    return (
        f"{facts.forward} has no gradient where eigenvalues or singular values coincide ({ranges(facts)})",
        "add a small random diagonal, or use only the values and not the vectors",
    )


BACKWARD: dict[str, Callable[[Facts], Account]] = {
    **dict.fromkeys(("sqrt", "rsqrt", "norm", "linalg_vector_norm", "cdist"), _gradient_of_root),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "xlogy"), _gradient_of_log),
    **dict.fromkeys(("div", "reciprocal"), _gradient_of_division),
    **dict.fromkeys(("acos", "asin", "atanh", "acosh", "erfinv", "logit"), _gradient_at_edge),
    **dict.fromkeys(("linalg_eigh", "linalg_svd", "linalg_qr", "linalg_eig"), _gradient_of_spectrum),
    "pow": _gradient_of_power,
    "mul": _gradient_of_scaling,
}
"""Rules by the forward operation whose gradient went bad."""
