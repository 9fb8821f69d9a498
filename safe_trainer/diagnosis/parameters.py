"""Rules over the facts of single parameters: who holds them, what reaches them, what becomes of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from safe_trainer.diagnosis.plan import Plan, found
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.program_record import ParameterFacts, Record

LOOKS = 4
"""Looks before a parameter without a gradient is spoken of: steps 1, 2, 10 and 11. An expert may have a day off."""
LOST = 0.3
"""Share of half-precision weights with the bits of the first step after a hundred: healthy 0.01, faulty 0.5."""
FLOAT16_SMALLEST = 2.0**-25
"""Half of the smallest number in float16: what is less becomes zero."""


def not_in_an_optimizer(record: Record, plan: Plan) -> Iterator[Finding]:
    """Parameters that get gradients, and that no optimizer holds."""
    trainable = [facts for facts in record.parameters.values() if facts.trainable]
    if not record.last_move or record.steps < 2:
        return
    idle = [facts for facts in trainable if not facts.held and not facts.moved and facts.arrived >= 2]
    if not idle or any(not facts.held and facts.moved for facts in trainable):
        return  # the rest is moved by an optimizer that was not shown
    nothing = not any(facts.known for facts in record.optimizers)
    if not nothing and max(facts.arrived for facts in idle) < LOOKS:
        return
    strangers = sum(facts.strangers for facts in record.optimizers)
    names = ", ".join(facts.name for facts in idle[:3]) + (" ..." if len(idle) > 3 else "")
    held = f"; it holds {strangers} tensors that the model does not have" if strangers else ""
    yield found(
        "optimizer.params_missing",
        Severity.error if nothing else Severity.warning,
        record.looks[min(len(record.looks), 2 if nothing else LOOKS) - 1].step,
        f"{len(idle)} of {len(trainable)} trainable parameters ({names}) get gradients and do not move: no optimizer "
        f"holds them{held}",
        "the optimizer was built from other parameters: before a part of the model was replaced, from a copy, or from "
        "one part only" if strangers or nothing else "the optimizer was given a part of the model only",
        "build the optimizer from model.parameters() after the model is complete; freeze what is not to learn with "
        "requires_grad_(False)",
        where=common_module([facts.name for facts in idle]),
    )  # fmt: skip


def common_module(names: Sequence[str]) -> str | None:
    """The module that holds all of these parameters or modules; None if that is the whole model."""
    parts = [name.split(".") for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) or (names[0] if len(names) == 1 else None)


def no_gradient_at_all(record: Record, plan: Plan) -> Iterator[Finding]:
    """Optimizers move, and no parameter of the model ever has a gradient to be moved by."""
    looks = [look for look in record.looks if look.stepped]
    trainable = [facts for facts in record.parameters.values() if facts.trainable and facts.held]
    if len(looks) < LOOKS or not trainable or any(look.nonzero for look in looks):
        return
    if any(facts.moved or facts.dtype.startswith("complex") for facts in record.parameters.values()):
        return
    came = sum(look.arrived > 0 for look in looks)
    if came and all(look.present == look.arrived for look in looks):
        return  # gradients of exactly zero: what made them so is seen elsewhere
    cleared = came == len(looks)
    yield found(
        "gradient.missing",
        Severity.error,
        looks[LOOKS - 1].step,
        f"the optimizer moved in {len(looks)} steps that were looked at, and none of the {len(trainable)} trainable "
        "parameters had a gradient" + (": backward had made them, and they were cleared before the "
        "step" if cleared else ""),
        "zero_grad() stands between backward() and step()" if cleared else
        "the loss is not connected to the model: a detach, no_grad, item() or a tensor made anew cuts the graph",
        "call zero_grad() before backward() or after step()" if cleared else
        "compute the loss from the model's own output, and never set requires_grad on it",
    )  # fmt: skip


def blind_modules(record: Record, plan: Plan) -> Iterator[Finding]:
    """Parameters that an optimizer holds, whose module only ever runs with gradients switched off."""
    blind: dict[str, list[ParameterFacts]] = {}
    for facts in record.parameters.values():
        waits = facts.trainable and facts.held and facts.looks >= LOOKS and not (facts.arrived or facts.moved)
        if waits and facts.called >= LOOKS - 1 and facts.called == facts.called_blind:
            blind.setdefault(facts.name.split(".")[0], []).append(facts)
    for entries in blind.values() if record.last_move >= 10 else ():
        where = common_module([facts.name.rpartition(".")[0] or facts.name for facts in entries])
        yield found(
            "gradient.missing",
            Severity.warning,
            record.looks[min(LOOKS, len(record.looks)) - 1].step,
            f"{len(entries)} parameters ({entries[0].name} first) are trainable and in the optimizer, but in all "
            f"{entries[0].called} steps that were looked at their modules ran with gradients switched off; they never "
            "got one, and have not moved",
            f"{where or 'the model'} is called under torch.no_grad() or inference_mode()",
            "take it out of no_grad; if it is meant to be frozen, set requires_grad_(False) on its parameters",
            where=where,
        )


def swallowed_updates(record: Record, plan: Plan) -> Iterator[Finding]:
    """Weights in half precision that updates are too small to change."""
    halves = [facts for facts in record.parameters.values() if facts.unchanged is not None and facts.held]
    if not halves or record.steps < 100 or record.rate < 0.5 * record.peak_rate or not record.looks:
        return
    sizes = [_size(facts) for facts in halves]
    share = sum((facts.unchanged or 0.0) * size for facts, size in zip(halves, sizes, strict=True)) / sum(sizes)
    if share < LOST or sum(look.stepped for look in record.looks) < 0.2 * len(record.looks):
        return  # a few large steps in as many backward passes
    yield found(
        "precision.underflow",
        Severity.warning,
        max(100, record.looks[-1].step),
        f"{share:.0%} of the {halves[0].dtype} weights that get gradients have not changed by a bit in {record.steps} "
        f"steps",
        f"the weights are kept in {halves[0].dtype}: an update smaller than half of the last digit is rounded away",
        "keep the weights in float32 and compute under torch.autocast, or use an optimizer with stochastic rounding",
    )


def _size(facts: ParameterFacts) -> int:
    size = 1
    for side in facts.sides:
        size *= side
    return size


def eps_is_zero(record: Record, plan: Plan) -> Iterator[Finding]:
    """An Adam's eps that is zero in the precision of the weights."""
    names = [facts.name for facts in record.parameters.values() if facts.held and facts.dtype == "float16"]
    for facts in record.optimizers:
        small = (
            facts.eps is not None and facts.eps < FLOAT16_SMALLEST and facts.kind in ("Adam", "AdamW", "NAdam", "RAdam")
        )
        if names and small:
            yield found(
                "precision.underflow",
                Severity.error,
                max(1, record.looks[0].step if record.looks else record.steps),
                f"the weights are float16 ({names[0]} among others) and {facts.kind}'s eps is {facts.eps:g}, which is "
                "zero in float16, as is the square of a gradient below 2e-4",
                "the optimizer divides by the root of squared gradients plus eps: both are zero in float16",
                "keep the weights in float32 and compute under torch.autocast, or use eps=1e-4",
            )
