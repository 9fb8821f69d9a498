"""What the program's loss is: the loss functions of PyTorch that it calls, their targets and options. One step each.

A loss is noted before it runs, so that one which raises because of its labels is known too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from safe_trainer.preflight.data_samples import Table, leaves
from safe_trainer.preflight.outcome import ProgramFailed
from safe_trainer.preflight.program import Program

CLASSES = ("cross_entropy", "nll_loss")
BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
REGRESSION = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")

_POSITIONS = {
    "cross_entropy": {"weight": 2, "ignore_index": 4, "reduction": 6},
    "nll_loss": {"weight": 2, "ignore_index": 4, "reduction": 6},
    "binary_cross_entropy": {"weight": 2, "reduction": 5},
    "binary_cross_entropy_with_logits": {"weight": 2, "reduction": 5, "pos_weight": 6},
    "mse_loss": {"reduction": 4},
    "l1_loss": {"reduction": 4},
    "smooth_l1_loss": {"reduction": 4},
    "huber_loss": {"reduction": 2},
}
"""Where the options stand in the signatures of torch.nn.functional."""


@dataclass
class LossCall:
    """One call of a loss function of PyTorch's."""

    name: str
    prediction: Tensor
    target: Tensor
    options: dict[str, Any]
    field: str | None = None
    """The field of the batch that holds these targets."""
    fields: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """All fields of that batch."""

    @property
    def ignored(self) -> int:
        """ignore_index."""
        value = self.options.get("ignore_index")
        return -100 if value is None else int(value)

    @property
    def outputs(self) -> int:
        """How many classes the prediction is over."""
        return self.prediction.shape[1 if self.prediction.dim() > 1 else 0]

    @property
    def of_classes(self) -> bool:
        """Whether the targets are numbers of classes."""
        return self.name in CLASSES and not self.target.is_floating_point()

    @property
    def is_weighted(self) -> bool:
        """Whether the program gives classes or samples weights of its own."""
        weights = self.options.get("weight") is not None or self.options.get("pos_weight") is not None
        return weights or self.options.get("reduction") == "none"


def out_of_range(labels: Tensor, outputs: int, ignored: int) -> Tensor:
    """Which labels no output stands for and the loss does not leave out."""
    return ((labels < 0) | (labels >= outputs)) & (labels != ignored)


class _Losses(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LossCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _POSITIONS:
            call = _call(name, args, kwargs)
            if call is not None:
                self.calls.append(call)
                # a device that has met such a label does nothing any more for the rest of the process
                if call.of_classes and call.target.is_cuda and _misses(call):
                    raise IndexError("labels out of range")
        return func(*args, **kwargs)


def _misses(call: LossCall) -> bool:
    return bool(out_of_range(call.target, call.outputs, call.ignored).any())


def _call(name: str, args: Any, kwargs: dict[str, Any]) -> LossCall | None:
    prediction = args[0] if args else kwargs.get("input")
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if not isinstance(prediction, Tensor) or not isinstance(target, Tensor) or not prediction.dim():
        return None
    options = {
        key: args[position] if len(args) > position else kwargs.get(key) for key, position in _POSITIONS[name].items()
    }
    return LossCall(name, prediction.detach(), target.detach().clone(), options)


def loss_calls(program: Program, batch: Any) -> tuple[list[LossCall], str | None]:
    """The losses that one step calls, in their order, and what the program raised, if it did."""
    noted, failure = _Losses(), None
    try:
        with noted:
            program.backward(batch)
    except ProgramFailed as error:
        failure = str(error)
    fields = leaves(batch)
    for call in noted.calls:
        call.field, call.fields = _field_of(call.target, fields), fields
    return noted.calls, failure


def _field_of(target: Tensor, fields: dict[str, Tensor]) -> str | None:
    """The field with the same numbers, targets by name before inputs."""
    for name in sorted(fields, key=lambda name: not name.startswith("target")):
        value = fields[name]
        if value.numel() == target.numel() and value.numel():
            same = value.detach().reshape(-1).double() == target.reshape(-1).to(value.device).double()
            if bool(same.all()):
                return name
    return None


@dataclass
class Labels:
    """Targets that are classes, one a sample."""

    field: str
    values: Tensor
    """Of the training samples as read, whole numbers."""
    held_out: Tensor | None
    call: LossCall | None
    """The loss that they go into; None for one that is not PyTorch's."""

    def counts(self) -> dict[int, int]:
        """Samples of each class that the loss counts."""
        values, counts = torch.unique(self.kept(), return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    def kept(self) -> Tensor:
        """Without those that ignore_index takes out."""
        return (
            self.values
            if self.call is None or not self.call.of_classes
            else self.values[self.values != self.call.ignored]
        )


OWN_CLASSES = 100
"""Different whole targets up to which they are taken for classes where the loss does not tell."""


def labels_of(calls: list[LossCall], train: Table, held_out: Table) -> Labels | None:
    """The class of each sample, where the targets are that."""
    for call in calls:
        if call.field is None or not (call.of_classes or call.name in BINARY):
            continue
        values = _classes(train.whole(call.field), call.name in BINARY)
        if values is not None:
            return Labels(call.field, values, _classes(held_out.whole(call.field), call.name in BINARY), call)
    if calls:
        return None
    for name, whole in train.outcomes().items():
        values = None if whole.is_floating_point() else _classes(whole, False)
        if values is not None and len(values.unique()) <= min(OWN_CLASSES, len(values) // 4):
            return Labels(name, values, _classes(held_out.whole(name), False), None)
    return None


def _classes(values: Tensor | None, binary: bool) -> Tensor | None:
    """One whole number a sample, or None."""
    if values is None or not len(values) or values.numel() != len(values):
        return None
    flat = values.reshape(-1)
    if flat.is_floating_point() and not bool(
        ((flat == 0) | (flat == 1)).all() if binary else (flat == flat.round()).all()
    ):
        return None
    return flat.long()


def quantity_of(calls: list[LossCall], train: Table) -> tuple[str, Tensor] | None:
    """Name and values of a target that is one quantity a sample, for a regression."""
    for call in calls:
        whole = train.whole(call.field) if call.field is not None and call.name in REGRESSION else None
        if whole is not None and whole.numel() == len(whole):
            return str(call.field), whole.reshape(-1).float()
    for name, whole in train.outcomes().items() if not calls else ():
        if whole.is_floating_point() and whole.numel() == len(whole):
            return name, whole.reshape(-1).float()
    return None
