"""Check: the model's size, the shapes it makes, and the memory that a step takes. Finds no faults; it may only skip."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from safe_trainer.findings import CheckResult
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.outcome import judged
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.reading import tensors
from safe_trainer.preflight.traced import trace_step
from safe_trainer.task import describe_batch, first_length

ADAM_STATES = 2
"""Tensors of a weight's size that the optimizers of nearly all recipes keep for each weight."""


def check(program: Program, clock: Clock) -> CheckResult:
    """One forward and backward pass of a small batch; its evidence is the summary in one line."""
    parameters = list(program.model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    whole = program.batches()[0]
    small = program.batch()
    step = trace_step(program, small)
    outputs = [tensor for call in step.modules if not list(call.module.children()) for tensor in tensors(call.output)]
    scale = (first_length(whole) or 1) / (first_length(small) or 1)
    memory = _bytes(parameters) + (1 + ADAM_STATES) * _bytes(trainable) + int(scale * _bytes(outputs))
    shapes = sorted({str(tuple(tensor.shape)) for call in step.model_calls() for tensor in tensors(call.output)})
    frozen = sum(map(Tensor.numel, parameters)) - sum(map(Tensor.numel, trainable))
    parts = [
        f"{sum(map(Tensor.numel, parameters)):,} parameters{f', {frozen:,} of them frozen' if frozen else ''}",
        f"batch {describe_batch(whole)}",
        f"output {', '.join(shapes) or 'no tensor'} for {first_length(small) or 1} samples"
        if step.model_calls()
        else "",
        f"about {memory / 1e6:,.1f} MB for a step",
    ]
    return judged("; ".join(part for part in parts if part))


def output_shapes(program: Program) -> dict[str, str]:
    """The shapes that each module puts out in one step, by its name.

    Raises:
        Skip: there is no batch, or nothing of it can be run.
        ProgramFailed: the program raises.
    """
    return {
        call.name: ", ".join(str(tuple(tensor.shape)) for tensor in tensors(call.output))
        for call in trace_step(program, program.batch()).modules
    }


def _bytes(values: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in values)
