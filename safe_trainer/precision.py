"""Arithmetic of a step: autocast and loss scaling. Touches gradients and the optimizer's step, nothing else."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.optim import Optimizer

from safe_trainer.config import ConfigError
from safe_trainer.config import Precision as Choice
from safe_trainer.findings import Finding, Severity

SCALE_FLOOR = 1.0
"""A loss scale below this means that true gradients, not scaled ones, overflow half precision."""

_AUTOCAST = {Choice.bf16: torch.bfloat16, Choice.fp16: torch.float16}


def resolve(choice: Choice, device: torch.device) -> Choice:
    """What `auto` means on this device: bf16 on an accelerator that computes in it, else fp32."""
    if choice is Choice.auto:
        return Choice.bf16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else Choice.fp32
    if choice is Choice.bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            [f"precision=bf16 needs a device that computes in bfloat16 (got {device}); take fp16 or fp32"]
        )
    return choice


class Precision:
    """The chosen arithmetic on one device; fp32 adds nothing to a step."""

    def __init__(self, choice: Choice, device: torch.device) -> None:
        self.choice = resolve(choice, device)
        self.device = device
        self.nothing = contextlib.nullcontext()
        self.scaler = torch.amp.GradScaler(device.type) if self.choice is Choice.fp16 else None

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context of forward and loss."""
        dtype = _AUTOCAST.get(self.choice)
        return self.nothing if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def backward(self, loss: Tensor) -> None:
        """Backward of the loss, scaled under fp16 so that small gradients survive."""
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring gradients back to their true size, before anything looks at them."""
        if self.scaler:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer; false if the scaler left the step out because the scaled gradients overflowed."""
        if not self.scaler:
            optimizer.step()
            return True
        self.scaler.step(optimizer)
        before = self.scaler.get_scale()  # the scaler has waited for the device in its step already
        self.scaler.update()
        return self.scaler.get_scale() >= before


def scale_floor_finding(scale: float, step: int) -> Finding:
    """The loss scale has fallen so far that true gradients overflow: half precision cannot hold this model."""
    return Finding(
        fault="precision.overflow",
        severity=Severity.error,
        stage="training",
        step=step,
        evidence=f"the loss scale fell to {scale:g}: true gradients overflow float16",
        cause="gradients or activations are too large for float16, or one of them is not finite in any precision",
        remedy="train with precision=bf16 or fp32 to see which it is; lower the learning rate; look for a NaN",
    )
