"""Models of sequences that see the answer: the next element, in a later input. Runs the model in evaluation mode.

Only where the target is the input moved by one place. Nothing is said of masked language models or taggers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from safe_trainer.findings import Finding
from safe_trainer.preflight.data_loss import CLASSES, REGRESSION, LossCall
from safe_trainer.preflight.outcome import ProgramFailed, finding
from safe_trainer.preflight.program import Program
from safe_trainer.preflight.traced import ModuleCall, first_tensor, module_calls, trace_step

SAME = 0.95
"""Share of targets that equal the next input from which the task is to say the next one; padding and ends differ."""
SHORTEST = 4
"""Elements of a sequence below which a moved copy may be chance."""
CHANGE = 1e-4
"""Change of an output, over its largest value, from which it depends on what was changed; rounding is below 1e-5."""


@dataclass
class _Sequence:
    """An argument of the model that the targets are taken from."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | str
    values: Tensor
    time: int
    """Its dimension of time."""
    moved: bool
    """Whether the target is the next element; else it is the very same."""

    def changed(self, cut: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other elements from `cut` on."""
        ahead = self.values.narrow(self.time, cut, self.values.shape[self.time] - cut)
        other = ahead.flip(self.time) if self.values.shape[1 - self.time] < 2 else ahead.roll(1, 1 - self.time)
        values = torch.cat([self.values.narrow(self.time, 0, cut), other], self.time)
        if isinstance(self.place, int):
            return (*self.args[: self.place], values, *self.args[self.place + 1 :]), self.kwargs
        return self.args, {**self.kwargs, self.place: values}


def later_inputs(program: Program, calls: list[LossCall]) -> list[Finding]:
    """An output that changes with inputs after its place, in a model whose target is the next input."""
    call = next((call for call in calls if call.of_classes or call.name in REGRESSION), None)
    if call is None:
        return []
    with program.preserved():
        sequence = _sequence(program, call)
        if sequence is None:
            return []
        program.model.eval()
        cut = sequence.values.shape[sequence.time] // 2
        first = _outputs(program.model, sequence.args, sequence.kwargs)
        repeated = _outputs(program.model, sequence.args, sequence.kwargs)
        other = _outputs(program.model, *sequence.changed(cut))
    length = sequence.values.shape[sequence.time]
    if _changes(first[""], repeated[""], sequence, cut, length) is not False:
        return []  # random in evaluation, or without a dimension of time
    change = _changes(first[""], other[""], sequence, cut, length)
    if change and sequence.moved:
        module = next(
            (name for name in first if name and _changes(first[name], other.get(name), sequence, cut, length)), ""
        )
        return [_leak(module, cut, length, call)]
    if change is False and not sequence.moved and _has_attention(program.model) and call.name in CLASSES:
        return [_copy(call, length)]
    return []


def _sequence(program: Program, call: LossCall) -> _Sequence | None:
    """The argument of the model's first run that the target is a moved, or an exact, copy of."""
    try:
        runs = trace_step(program, program.batches()[0]).model_calls()
    except ProgramFailed:
        return None
    if not runs:
        return None
    args, kwargs = runs[0].args, runs[0].kwargs
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in given:
        if not isinstance(value, Tensor) or value.dim() not in ((2,) if call.of_classes else (3,)):
            continue
        for time in (1, 0):
            moved = _moved(value, call, time)
            if moved is not None:
                return _Sequence(args, kwargs, place, value.detach(), time, moved)
    return None


def _moved(value: Tensor, call: LossCall, time: int) -> bool | None:
    """True: the target is the next element; False: the same; None: neither."""
    length, target = value.shape[time], call.target
    if length < SHORTEST or value.shape[1 - time] < 1:
        return None
    ahead = value.narrow(time, 1, length - 1)
    if target.numel() == ahead.numel():
        return True if _equal(target.reshape(ahead.shape), ahead, call) else None
    if target.numel() != value.numel():
        return None
    target = target.reshape(value.shape)
    if _equal(target.narrow(time, 0, length - 1), ahead, call):
        return None if _equal(value.narrow(time, 0, length - 1), ahead, call) else True
    return False if time == 1 and _equal(target, value, call) else None


def _equal(target: Tensor, value: Tensor, call: LossCall) -> bool:
    counted = target != call.ignored
    if int(counted.sum()) < SHORTEST or len(value.unique()) < 2:
        return False
    near = target.to(value.device) == value if call.of_classes else (target - value).abs() <= 1e-6
    return float(near[counted].float().mean()) >= SAME


def _outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """First output of each module, in the order in which they end; gradients stay on, for PyTorch's fast path of
    Transformers runs no modules.
    """
    runs: list[ModuleCall] = []
    with module_calls(model, runs), torch.enable_grad():
        model(*args, **kwargs)
    noted: dict[str, Tensor] = {}
    for run in runs:
        tensor = first_tensor(run.output)
        if tensor is not None:
            noted.setdefault(run.name, tensor.detach())
    return noted if "" in noted else {**noted, "": torch.zeros(0)}


def _changes(first: Tensor, second: Tensor | None, sequence: _Sequence, cut: int, length: int) -> bool | None:
    """Whether the outputs before `cut` differ; None where no dimension is that of time."""
    before, after = _before(first, sequence, cut, length), None
    if second is not None and second.shape == first.shape:
        after = _before(second, sequence, cut, length)
    if before is None or after is None:
        return None
    return bool((before - after).abs().max() > CHANGE * before.abs().max().clamp_min(1e-6))


def _before(output: Tensor, sequence: _Sequence, cut: int, length: int) -> Tensor | None:
    """The part of an output that belongs to elements before `cut`."""
    batch = sequence.values.shape[1 - sequence.time]
    if not output.is_floating_point() or not output.numel():
        return None
    if output.dim() >= 2 and output.shape[0] == batch * length and length != output.shape[0]:
        output = output.reshape(*sequence.values.shape[:2], *output.shape[1:])
    places = (sequence.time, 1 - sequence.time, 2)
    time = next((place for place in places if place < output.dim() and output.shape[place] == length), None)
    return None if time is None else output.narrow(time, 0, cut).float()


def _has_attention(model: nn.Module) -> bool:
    return any("attention" in type(module).__name__.lower() or "attn" in name for name, module in model.named_modules())


def _leak(module: str, cut: int, length: int, call: LossCall) -> Finding:
    return finding(
        "data.target_leak",
        "error",
        where=module or None,
        evidence=f"the target of {call.name} is the next input, and the outputs at places 0 to {cut - 1} of {length} "
        f"change when the inputs from place {cut} on are others"
        + (f"; {module} is the first module that looks ahead" if module else ""),
        cause="no causal mask, one that is the wrong way round, or a network that reads in both directions",
        remedy="is_causal=True, or a mask with True (or -inf) above the diagonal, in every attention layer",
    )


def _copy(call: LossCall, length: int) -> Finding:
    return finding(
        "data.target_leak",
        "warning",
        where=call.field,
        evidence=f"the model attends to earlier places only, and the target of {call.name} at each of {length} "
        "places is the input at the very same place: it has only to copy",
        cause="the target was not moved by one place",
        remedy="inputs tokens[:, :-1] and targets tokens[:, 1:]",
    )
