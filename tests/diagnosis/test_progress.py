"""Rules on losses that get nowhere and on answers that do not depend on the question: broken programs and twins."""

import math

import pytest
import torch
from programs import blobs, loader_of
from torch import nn
from torch.utils.data import TensorDataset

from safe_trainer import Finding, SafeTrainer
from safe_trainer.diagnosis import Evidence, Probe, Setting
from safe_trainer.diagnosis.causes import folded
from safe_trainer.diagnosis.progress import not_decreasing, oscillating, plateau


def found(report):
    return {finding.fault: finding for finding in report.findings if finding.is_alarm}


def trained(model, config, *, rate=0.05, steps=320, data=None, batch_size=32):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = loader_of(blobs(480) if data is None else data, batch_size=batch_size)
    settings = config(max_steps=steps, on_fault="report", seed=1, **{"checkpoint.enabled": False})
    return SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader, config=settings, loggers=[]).run()


class Scaled(nn.Module):
    """A temperature that lets next to nothing of the network through, beside a prior that stands."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.net = factor, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, inputs):
        return self.factor * self.net(inputs) + torch.tensor([0.0, 0.5, 1.0])


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(_, inputs):
        return inputs.clone()

    @staticmethod
    def backward(_, gradient):
        return -gradient


class Uphill(nn.Module):
    """An operation of one's own, with a sign lost in its backward."""

    def __init__(self, fixed):
        super().__init__()
        self.net, self.fixed = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), fixed

    def forward(self, inputs):
        output = self.net(inputs)
        return 2 * torch.tanh(output if self.fixed else Backward.apply(output))


class Attention(nn.Module):
    """One score a place; the softmax must run over the places."""

    def __init__(self, dimension):
        super().__init__()
        self.score, self.share, self.head = nn.Linear(2, 1), nn.Softmax(dim=dimension), nn.Linear(2, 3)

    def forward(self, inputs):
        places = inputs.unflatten(1, (4, 2))
        return self.head((self.share(self.score(places)) * places).sum(1))


class Pooled(nn.Module):
    """A mean over dimension 0 takes the samples for the places."""

    def __init__(self, fixed):
        super().__init__()
        self.fixed = fixed

    def forward(self, hidden):
        return hidden if self.fixed else hidden.mean(0, keepdim=True).expand_as(hidden)


def noisy(samples=64):
    inputs, labels = blobs(samples).tensors
    return TensorDataset(inputs / 2, torch.where(torch.rand(samples) < 0.6, torch.randint(3, (samples,)), labels))


PROGRAMS = {
    "nothing_changes": lambda fixed, run: (
        trained(Scaled(1.0 if fixed else 1e-9), run, steps=400), "training.not_decreasing", None),
    "uphill": lambda fixed, run: (trained(Uphill(fixed), run, rate=1e-3, steps=400), "training.not_decreasing", None),
    "swing": lambda fixed, run: (
        trained(nn.Linear(8, 3), run, rate=0.3 if fixed else 1.3, data=noisy(), batch_size=64),
        "training.oscillating", None),
    "softmax_of_one": lambda fixed, run: (trained(Attention(1 if fixed else 2), run), "activation.collapsed", "share"),
    "samples_averaged": lambda fixed, run: (
        trained(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Pooled(fixed), nn.Linear(16, 3)), run),
        "activation.collapsed", "2"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_broken_program_is_found_and_its_mended_twin_is_silent(name, run_config):
    torch.manual_seed(0)
    report, fault, where = PROGRAMS[name](False, run_config)
    assert fault in found(report), report.findings
    assert where is None or found(report)[fault].where == where
    torch.manual_seed(0)
    report, _, _ = PROGRAMS[name](True, run_config)
    assert found(report) == {}


def evidence(losses, probes=(), *, ended=True, **setting):
    columns = {"step": list(range(1, len(losses) + 1)), "loss": losses}
    return Evidence(columns=columns, probes=probes, ended=ended, setting=Setting(**setting))


def wave(count, level=1.0, size=0.1):
    """Noise without a trend, from a fixed sequence."""
    return [level + size * math.sin(2.4 * k * k) for k in range(count)]


def probes(change, count=8):
    return [Probe(step=20 * (k + 1), before=1.0, after=1.0 + change) for k in range(count)]


def severities(findings):
    return [finding.severity.value for finding in findings]


def test_a_loss_that_stands_is_an_alarm_only_if_steps_do_their_own_batch_no_good():
    assert severities(not_decreasing(evidence(wave(200), probes(0.0)))) == ["warning"]
    assert severities(not_decreasing(evidence(wave(200), probes(0.01)))) == ["warning"]
    assert severities(not_decreasing(evidence(wave(200), probes(-0.01)))) == ["info"]  # it may be at its floor
    assert severities(not_decreasing(evidence(wave(200), [*probes(0.01), *probes(-0.01, 1)]))) == ["info"]
    assert severities(not_decreasing(evidence(wave(200), probes(0.01, 5)))) == ["info"]  # too few to be sure
    assert severities(not_decreasing(evidence([1.0] * 200, probes(0.0)))) == ["info"]  # exactly at its floor


def test_nothing_is_said_of_a_loss_that_may_be_falling_or_of_a_run_that_goes_on():
    assert not_decreasing(evidence(wave(200), probes(0.0), ended=False)) == []
    assert not_decreasing(evidence(wave(60), probes(0.0))) == []
    assert not_decreasing(evidence([value - 0.0004 * k for k, value in enumerate(wave(200))], probes(0.0))) == []


def test_a_swing_takes_turns_harm_and_a_standing_loss():
    swing = [1.3, 1.1] * 100
    assert severities(oscillating(evidence(swing, probes(0.1, 10)))) == ["warning"]
    assert severities(oscillating(evidence(swing, epoch_length=1))) == ["warning"]
    assert oscillating(evidence(swing, probes(-0.1, 10))) == []  # two batches in turn, one harder than the other
    assert oscillating(evidence(swing, epoch_length=2)) == []
    assert oscillating(evidence(wave(200), probes(0.1, 10))) == []  # noise
    falling = [value * 0.99**k for k, value in enumerate(swing)]
    assert oscillating(evidence(falling, probes(0.1, 10))) == []
    nothing = [1.0] * 10 + [value * 1e-6 for value in swing]
    assert oscillating(evidence(nothing, epoch_length=1)) == []  # converged, and flickers there


def test_a_plateau_is_never_an_alarm():
    stood = [2.0] * 20 + wave(480, 1.4, 0.01)
    assert severities(plateau(evidence(stood))) == ["info"]
    assert plateau(evidence([2.0 * 0.99**k + 0.2 for k in range(500)])) == []  # low: most likely done
    assert plateau(evidence([2.0 - 0.001 * k for k in range(500)])) == []  # it still falls
    assert plateau(evidence(stood[:300])) == []


def test_a_known_cause_takes_the_symptoms_under_it():
    def told(fault):
        return Finding(fault=fault, severity="warning", stage="training", evidence="e", cause="c", remedy="r")

    symptoms = ("training.oscillating", "training.not_decreasing", "activation.collapsed")
    (kept,) = folded([*map(told, symptoms), told("optimizer.lr_too_high")])
    assert kept.fault == "optimizer.lr_too_high"
    assert set(symptoms) <= set(kept.symptoms)
