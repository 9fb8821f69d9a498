"""Says why an operation went non-finite, from its operands' values, and what to do about it.

Pure functions over numbers and names; nothing here touches a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from safe_trainer.utils.facts import Account, Facts, limit, masked, overflow, ranges, too_large
from safe_trainer.utils.gradient_remedies import BACKWARD


def explain(facts: Facts) -> Account:
    """Explanation and remedy for a culprit."""
    if facts.kind in OUTSIDE:
        return _outside(facts)
    if not facts.masked and any(isinstance(v, float) and not math.isfinite(v) for v in facts.arguments.values()):
        return _written(facts)
    special = BACKWARD.get(facts.forward) if facts.kind == "backward" else None
    rule = special or FORWARD.get(facts.short) or _unknown
    why, cure = rule(facts)
    if facts.kind == "backward" and special is None and facts.forward and not facts.masked:
        why = f"in the gradient that {facts.node} computes: {why}"
    if facts.turned is not None:
        why += f"; that became NaN in {facts.turned}"
        if facts.kind == "forward" and "Backward" in facts.turned:
            cure += (
                ", and if torch.where hides the value in the forward pass, guard its input: backward multiplies by 0"
            )
    return why, cure


def _softmax(facts: Facts) -> Account:
    return masked(facts) if facts.masked else overflow(facts)


def _log(facts: Facts) -> Account:
    low = facts.main.minimum if facts.main else None
    if low is not None and low < 0:
        return (
            f"its input has min {low:.6g}: the logarithm of a negative number is NaN",
            "find out why the input is negative (a probability is not); clamp it only if that is rounding",
        )
    cure = (
        "clamp it (x.clamp(min=1e-6)) or use log_softmax, logsigmoid or logsumexp in place of a log of a computed value"
    )
    return f"its input has min {low if low is not None else 0.0}: the logarithm of 0 is -inf", cure


def _log1p(facts: Facts) -> Account:
    return (
        f"{ranges(facts)}: log1p is -inf at -1 and NaN below",
        "keep its input above -1, for example clamp(min=-1 + 1e-6)",
    )


def _divide(facts: Facts) -> Account:
    above, below = facts.number("self", "input"), facts.number("other", "divisor")
    if facts.masked:
        return masked(facts)
    if below == 0 and above == 0:
        return (
            f"{ranges(facts)}: at the first bad element it is 0 / 0",
            "add a small number to the denominator, or keep such elements out before the division (a norm, a sum or a "
            "standard deviation of zeros?)",
        )
    if below == 0:
        return f"{ranges(facts)}: it divides by 0", "add a small number to the denominator, or clamp it away from 0"
    return too_large(facts), "the denominator is close to 0: add a small number to it or clamp it"


def _reciprocal(facts: Facts) -> Account:
    return f"{ranges(facts)}: it divides by 0", "add a small number to its input, or clamp it away from 0"


def _sqrt(facts: Facts) -> Account:
    cure = "clamp its input at 0 (rounding of a variance or a distance may fall below), or find out why it is negative"
    return f"{ranges(facts)}: the square root of a negative number is NaN", cure


def _rsqrt(facts: Facts) -> Account:
    low = facts.main.minimum if facts.main else None
    if low is not None and low < 0:
        return _sqrt(facts)
    return f"{ranges(facts)}: 1 / sqrt(0) is inf", "add eps inside the root: torch.rsqrt(x + eps)"


def _power(facts: Facts) -> Account:
    base, exponent = facts.number("self"), facts.number("exponent")
    if base is not None and base < 0 and facts.damage.value == "nan":
        return (
            f"{ranges(facts)}: a negative base ({base:.6g}) to a fractional power ({exponent}) is NaN",
            "raise x.abs() or x.clamp(min=eps) instead",
        )
    if base == 0:
        return f"{ranges(facts)}: 0 to a negative power ({exponent}) is inf", "clamp the base away from 0"
    return overflow(facts)


def _exponential(facts: Facts) -> Account:
    high = facts.main.maximum if facts.main else None
    edge = math.log(limit(facts.damage.dtype)) / (math.log(2) if facts.short == "exp2" else 1)
    kind = str(facts.damage.dtype).removeprefix("torch.")
    return (
        f"its input has max {'unknown' if high is None else f'{high:.6g}'}: "
        f"{facts.short} overflows {kind} above {edge:.4g}",
        "clamp the input, subtract the maximum first (as softmax and logsumexp do), or stay in the log domain",
    )


def _multiply(facts: Facts) -> Account:
    if facts.damage.value == "nan":
        return (
            masked(facts) if facts.masked else (f"{ranges(facts)}: 0 * inf is NaN", "keep infinities out of a product")
        )
    return overflow(facts)


def _cast(facts: Facts) -> Account:
    kind = str(facts.damage.dtype).removeprefix("torch.")
    return (
        f"{ranges(facts)}: casting to {kind} makes everything beyond {limit(facts.damage.dtype):.6g} infinite",
        "keep this value in float32 or bfloat16, or scale it down before the cast",
    )


def _mean(facts: Facts) -> Account:
    if any(0 in operand.shape for operand in facts.operands) or not facts.operands:
        return (
            "it is a mean over no element (0 / 0)",
            "leave out empty selections, or divide a sum by count.clamp(min=1)",
        )
    return overflow(facts)


def _deviation(facts: Facts) -> Account:
    high = facts.main.maximum if facts.main else None
    if facts.damage.value == "nan" and (high is None or high < math.sqrt(limit(facts.damage.dtype))):
        return (
            f"{facts.main.shape if facts.main else 'its input'}: the unbiased deviation of one element divides by 0",
            "use correction=0, or leave out groups of one",
        )
    return overflow(facts)


def _domain(limits: str, cure: str) -> Callable[[Facts], Account]:
    return lambda facts: (f"{ranges(facts)}: {facts.short} is finite only {limits}", cure)


def _nll(facts: Facts) -> Account:
    if facts.damage.value == "nan":
        return (
            "no target counts in the mean (ignore_index, a class of weight 0, or an empty batch): 0 / 0",
            "skip such batches, or sum the losses and divide by count.clamp(min=1)",
        )
    return (
        "the log-probability of a target class is -inf: its logit was masked or has overflowed",
        "do not mask a class that is a target, and keep logits in range",
    )


def _normalise(facts: Facts) -> Account:
    return (
        f"{ranges(facts)}: the variance is 0 or overflows",
        "give the normalisation an eps above 0 (1e-5), and look for inputs of extreme size",
    )


def _contraction(facts: Facts) -> Account:
    return masked(facts) if facts.masked else overflow(facts)


def _unset(facts: Facts) -> Account:
    return (
        "it hands out memory as it finds it, and some of it was read before it was written",
        "use torch.zeros, or fill the tensor before it is read",
    )


def _written(facts: Facts) -> Account:
    if facts.short == "tensor":
        return (
            "these values come from Python or NumPy code, into which the tracer cannot see",
            "look at the code that computes them",
        )
    if (
        facts.short == "copy"
        and facts.masked is None
        and (source := facts.operand("src")) is not None
        and not source.bad_count
    ):
        return _cast(facts)  # y.copy_(x) into a narrower type
    if (
        facts.short in ("mul", "foreach_mul")
        and facts.damage.value == "nan"
        and not any(isinstance(v, float) and math.isnan(v) for v in facts.arguments.values())
    ):
        return (
            "a zero times the infinity given here is NaN",
            "write a mask with masked_fill(mask, -inf), not as mask * -inf",
        )
    return "the program itself writes that value here", "keep it out of what reaches the loss or a gradient"


def _ctc(facts: Facts) -> Account:
    return (
        "a target is longer than its input sequence can spell, so its probability is 0",
        "pass zero_infinity=True, or check input_lengths against target_lengths",
    )


def _linear_algebra(facts: Facts) -> Account:
    return (
        f"{ranges(facts)}: the matrix is singular or badly conditioned",
        "add a small multiple of the identity to it",
    )


def _unknown(facts: Facts) -> Account:
    if facts.masked:
        return masked(facts)
    return ranges(facts), "keep its input inside the range where it and its derivative are finite"


def _outside(facts: Facts) -> Account:
    rows = f" (rows {', '.join(map(str, facts.rows))})" if facts.rows else ""
    explanation = f"and it reached the {facts.reached}{rows}"
    return explanation, OUTSIDE[facts.kind]


OUTSIDE = {
    "input": "clean the data: drop or fill such values before the step, and look at how they were made",
    "parameter": "an earlier step wrote it (a non-finite gradient or too high a learning rate): go back to a "
    "checkpoint from before, and check gradients before the optimizer's step",
    "buffer": "an earlier batch poisoned it: reset it (reset_running_stats() for BatchNorm) or go back to a checkpoint",
}

_inside = "clamp its input a little inside its domain"

FORWARD: dict[str, Callable[[Facts], Account]] = {
    **dict.fromkeys(("log", "log2", "log10"), _log),
    **dict.fromkeys(("div", "true_divide", "divide", "foreach_div", "fmod", "remainder"), _divide),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh"), _exponential),
    **dict.fromkeys(("mul", "square", "foreach_mul", "addcmul"), _multiply),
    **dict.fromkeys(("mean", "nanmean", "avg_pool2d", "mse_loss", "segment_reduce"), _mean),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "std_correction"), _deviation),
    **dict.fromkeys(("softmax", "log_softmax", "safe_softmax"), _softmax),
    **dict.fromkeys(
        ("acos", "asin", "atanh", "erfinv"), _domain("between -1 and 1", "clamp its input to [-1 + eps, 1 - eps]")
    ),
    **dict.fromkeys(("logit", "special_logit"), _domain("inside (0, 1)", "pass eps, torch.logit(x, eps=1e-6)")),
    **dict.fromkeys(("lgamma", "digamma", "polygamma"), _domain("away from 0, -1, -2, ...", "keep its input positive")),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("native_batch_norm", "native_layer_norm", "native_group_norm", "rms_norm"), _normalise),
    **dict.fromkeys(
        (
            "mm",
            "bmm",
            "addmm",
            "baddbmm",
            "matmul",
            "linear",
            "convolution",
            "add",
            "sub",
            "sum",
            "prod",
            "cumprod",
            "cumsum",
        ),
        _contraction,
    ),
    **dict.fromkeys(
        ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"), _unset
    ),
    **dict.fromkeys(
        ("fill", "copy", "index_put", "full", "full_like", "new_full", "masked_fill", "tensor", "scalar_tensor"),
        _written,
    ),
    **dict.fromkeys(("linalg_inv_ex", "linalg_solve_ex", "linalg_cholesky_ex", "linalg_lu"), _linear_algebra),
    "to_copy": _cast,
    "log1p": _log1p,
    "reciprocal": _reciprocal,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "pow": _power,
    "acosh": _domain("from 1 on", "clamp its input to at least 1"),
    "xlogy": _domain("for a positive second argument", _inside),
    "ctc_loss": _ctc,
}
"""Rules by short name of the operation."""
