"""Rules over training and evaluation mode: which of them the model was in when it was called. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from safe_trainer.diagnosis.plan import Plan, found
from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.program_record import Episode, Record

REMEDY = "call model.eval() before evaluating, and model.train() after it"


def training_in_eval_mode(record: Record, plan: Plan) -> Iterator[Finding]:
    """The model, or a part of it, learns in evaluation mode, and began in training mode.

    Single normalisation layers in eval are no fault: many freeze them on purpose. Nor is an adversary's forward in eval
    beside a training forward in the same step, nor a part whose weights are frozen.
    """
    looks = [look for look in record.looks if look.forwards and look.arrived]
    told: set[str] = set()
    for first, second in pairwise(looks):
        for name in set(first.left) & set(second.left):
            if name in told or not (first.stepped or second.stepped) or not _learns(record, name):
                continue
            told.add(name)
            yield found(
                "model.stuck_in_eval",
                Severity.warning if name else Severity.error,
                second.step,
                f"{name or 'the model'} was in training mode in step {record.looks[0].step}, and is in eval in the "
                f"forwards of steps {first.step} and {second.step}, whose gradients an optimizer uses",
                "eval() was called for an evaluation, and train() not after it",
                "call model.train() after every evaluation, or at the start of every step",
                where=name,
            )


def _learns(record: Record, name: str) -> bool:
    prefix = f"{name}." if name else ""
    under = [facts for key, facts in record.parameters.items() if key.startswith(prefix)]
    return any(facts.trainable and facts.held and facts.arrived for facts in under)


def started_in_eval(record: Record, plan: Plan) -> Iterator[Finding]:
    """The whole model was in eval from the start: pretrained models come so, and some are trained so on purpose."""
    if record.started_in_eval and len(record.looks) > 1:
        yield found(
            "model.stuck_in_eval",
            Severity.info,
            record.looks[0].step,
            f"every module was in eval mode in the first training step; {', '.join(record.started_in_eval)} behave "
            "differently in training mode",
            "pretrained models come in eval mode, and model.eval() stays in force until model.train()",
            "call model.train() before training, unless this is meant",
        )


def evaluation_in_training_mode(record: Record, plan: Plan) -> Iterator[Finding]:
    """The model is evaluated in training mode, and has layers to which that matters.

    Legal, and passed over: one input put in again and again (Monte Carlo dropout), a forward in eval in the same
    evaluation (BatchNorm measured anew), a teacher's or a generator's forward before the optimizer moves, the batch
    just trained on.
    Where nobody said that it is an evaluation, single calls (as for a generator's samples) or several optimizers prove
    nothing.
    """
    episodes = [episode for episode in record.episodes if not episode.repeated]
    declared = [episode for episode in episodes if episode.declared]
    if not declared and not _looks_like_evaluation(record, episodes):
        return
    episode = (declared or episodes)[0]
    normalises = any("Norm" in layer for layer in episode.layers)
    times = len(declared or episodes)
    yield found(
        "model.eval_missing",
        Severity.error if declared and normalises else Severity.warning,
        episode.step,
        f"{_name(episode)} called the model {episode.count} times in training mode"
        + (f", and did so in {times} evaluations" if times > 1 else "")
        + f"; {', '.join(episode.layers)} behave differently there",
        "model.eval() is missing: "
        + (
            "normalisation uses each batch's own figures and takes them into its running statistics, "
            if normalises
            else ""
        )
        + ("dropout removes units, " if not normalises or len(episode.layers) > 1 else "")
        + "so what is reported is not the model's quality",
        REMEDY,
        where=None if episode.function in ("?", "<module>") else episode.function,
        source=episode.source,
    )


def _name(episode: Episode) -> str:
    return "the program" if episode.function in ("?", "<module>") else episode.function


def _looks_like_evaluation(record: Record, episodes: Sequence[Episode]) -> bool:
    """Many inputs between training steps, now and then, in a program that never calls the model in eval."""
    if record.evaluates or len(record.optimizers) != 1 or not record.last_move:
        return False
    several = [episode for episode in episodes if episode.count >= 2]
    return len(several) == 1 or (len(several) > 1 and _seldom(several))


def _seldom(episodes: Sequence[Episode]) -> bool:
    """Not before every training step, as somebody does who gathers experience to learn from."""
    return episodes[-1].step - episodes[0].step >= 2 * (len(episodes) - 1)
