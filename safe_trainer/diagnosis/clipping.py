"""Rules over the length of gradients before, at and after the optimizer's step: clipping that harms or does nothing."""

from __future__ import annotations

from collections.abc import Iterator

from safe_trainer.diagnosis.plan import Plan, found
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.program_record import Look, Record

OVERCLIPPED = 100.0
"""Shortening that counts as large: of 98 healthy runs the most clipped one shortened by 36 on average."""
TINY_UPDATE = 3e-4
"""Update over weight below which clipping is the likely brake: healthy runs 7e-4 to 1.1e-2, an overclipped one 6e-5."""
SAME_LENGTH = 0.01
"""Relative spread of lengths that were all clipped to one limit."""
LOOKS = 4
"""Looks that must agree: steps 1, 2, 10 and 11."""


def overclipped(record: Record, plan: Plan) -> Iterator[Finding]:
    """Clipping takes nearly everything away from an optimizer whose steps depend on the length of gradients."""
    if not record.optimizers or any(facts.kind != "SGD" for facts in record.optimizers):
        return
    looks = [look for look in record.looks if look.norm_arrived and look.norm_used and look.stepped == 1]
    ratios = [(look.norm_arrived or 0.0) / (look.norm_used or 1.0) for look in looks]
    large = [look for look, ratio in zip(looks, ratios, strict=True) if ratio >= OVERCLIPPED]
    if len(large) < LOOKS or len(large) < 0.95 * len(looks):
        return
    lengths = [look.norm_used or 0.0 for look in large]
    scaled_alike = max(ratios) <= min(ratios) * (1 + SAME_LENGTH)  # a loss scale of the program's own
    if scaled_alike or max(lengths) > min(lengths) * (1 + SAME_LENGTH):
        return
    momentum = min(max(facts.momentum for facts in record.optimizers), 0.99)
    updates = [_update(look, momentum) for look in large]
    if sorted(updates)[len(updates) // 2] > TINY_UPDATE:
        return
    yield found(
        "gradient.overclipped",
        Severity.warning,
        large[LOOKS - 1].step,
        f"gradients are cut to a length of {lengths[-1]:.3g}, {min(ratios):.0f} to {max(ratios):.0f} times less than "
        f"they had, in {len(large)} of {len(looks)} steps; a step moves the weights by about {updates[-1]:.1g} of "
        "their length",
        "the clipping limit is far below the usual length of the gradients, so it sets the size of every step",
        f"clip at about the usual length ({sorted(look.norm_arrived or 0.0 for look in looks)[len(looks) // 2]:.2g} "
        "here), or not at all",
    )


def _update(look: Look, momentum: float) -> float:
    return look.rate * (look.norm_used or 0.0) / (1 - momentum) / (look.weight_norm or 1.0)


def clipped_too_late(record: Record, plan: Plan) -> Iterator[Finding]:
    """Gradients are cut after the optimizer has used them, and are large when it does."""
    late = [
        look for look in record.looks if look.norm_left and look.norm_used and look.norm_left < 0.9 * look.norm_used
    ]
    lengths = [look.norm_left or 0.0 for look in late]
    if len(late) < 2 or max(lengths) > min(lengths) * (1 + SAME_LENGTH):
        return
    used = [look.norm_used or 0.0 for look in late]
    if max(used) <= min(used) * (1 + SAME_LENGTH):
        return  # scaled by a constant: not clipping
    yield found(
        "gradient.exploding",
        Severity.warning,
        late[1].step,
        f"gradients of length {min(used):.3g} to {max(used):.3g} were cut to {lengths[-1]:.3g} after the optimizer "
        f"had used them, in {len(late)} of {len(record.looks)} steps that were looked at",
        "clipping stands behind optimizer.step(), where it does nothing: nothing holds back a gradient that explodes",
        "clip between loss.backward() and optimizer.step()",
        where=max(late[:2], key=lambda look: look.norm_used or 0.0).largest,
    )  # fmt: skip
