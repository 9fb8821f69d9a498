"""Rules on layers, rates and curves: each broken program is found, its mended twin is silent. Real runs, small ones."""

import math

import pytest
import torch
from programs import blobs, loader_of
from torch import nn
from torch.utils.data import TensorDataset

from safe_trainer import Finding, SafeTrainer
from safe_trainer.diagnosis import Evidence
from safe_trainer.diagnosis.causes import EXPLAINS, folded
from safe_trainer.diagnosis.evidence import Probe
from safe_trainer.diagnosis.overfitting import overfitting
from safe_trainer.diagnosis.rates import rate_too_high


def alarms(report):
    return [(finding.fault, finding.where) for finding in report.findings if finding.is_alarm]


def trained(model, config, *, rate=0.05, steps=240, optimizer=torch.optim.SGD, data=None, batch_size=32, **options):
    made = optimizer(model.parameters(), lr=rate, **options)
    loader = loader_of(blobs(480) if data is None else data, batch_size=batch_size, shuffle=True)
    settings = config(max_steps=steps, on_fault="report", seed=1, **{"checkpoint.enabled": False})
    return SafeTrainer(model, nn.CrossEntropyLoss(), made, loader, config=settings, loggers=[]).run()


def stack(depth, width, function, last=3):
    layers = [nn.Linear(8, width), function()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), function()]
    return nn.Sequential(*layers, nn.Linear(width, last))


def kept_dead(model, place, bias=-50.0):
    nn.init.constant_(model[place].bias, bias)
    return model


class Residual(nn.Module):
    """Blocks whose branches add to the stream, as they are drawn or beginning at nothing."""

    def __init__(self, blocks, fixed):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(blocks)
        )
        for block in self.blocks:
            for layer in (block[0], block[2]):
                nn.init.kaiming_normal_(layer.weight)
            if fixed:
                nn.init.zeros_(block[2].weight)

    def forward(self, stream):
        stream = self.first(stream)
        for block in self.blocks:
            stream = stream + block(stream)
        return self.last(stream)


PROGRAMS = {
    "init.dead_mlp": lambda fixed, run: (
        trained(kept_dead(stack(2, 40, nn.ReLU), 2, 0.0 if fixed else -50.0), run), "init.dead", "3"),
    "init.dead_cnn": lambda fixed, run: (
        trained(
            kept_dead(nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 12, 3), nn.ReLU(), nn.Flatten(),
                                    nn.Linear(72, 3)), 1, 0.0 if fixed else -50.0),
            run, optimizer=torch.optim.Adam, rate=1e-3), "init.dead", "2"),
    "saturated_tanh": lambda fixed, run: (
        trained(wide(stack(3, 48, nn.Tanh), 1.0 if fixed else 12.0), run), "activation.saturated", "1"),
    "saturated_sigmoid": lambda fixed, run: (
        trained(wide(stack(2, 64, nn.Sigmoid), 1.0 if fixed else 60.0), run, optimizer=torch.optim.Adam, rate=1e-3),
        "activation.saturated", "1"),
    "vanishing_sigmoid": lambda fixed, run: (
        trained(stack(10, 24, nn.ReLU if fixed else nn.Sigmoid), run, rate=0.1), "gradient.vanishing", "0"),
    "vanishing_adam": lambda fixed, run: (
        trained(stack(16, 16, nn.GELU if fixed else nn.Sigmoid), run, optimizer=torch.optim.Adam, rate=1e-3),
        "gradient.vanishing", "0"),
    "growing_residual": lambda fixed, run: (
        trained(Residual(40, fixed), run, rate=1e-3, steps=120), "activation.exploding", None),
    "rate_too_high": lambda fixed, run: (
        trained(stack(1, 32, nn.Tanh), run, rate=0.1 if fixed else 60.0, data=noise()), "optimizer.lr_too_high", None),
    "rate_too_low": lambda fixed, run: (
        trained(stack(1, 32, nn.ReLU), run, rate=0.1 if fixed else 1e-7), "optimizer.lr_too_low", None),
    "rate_too_low_adam": lambda fixed, run: (
        trained(stack(2, 32, nn.GELU), run, rate=1e-3 if fixed else 1e-9, optimizer=torch.optim.Adam),
        "optimizer.lr_too_low", None),
    "decay": lambda fixed, run: (
        trained(stack(2, 32, nn.ReLU), run, rate=0.05, weight_decay=1e-4 if fixed else 1.0),
        "optimizer.weight_decay", None),
}  # fmt: skip


def wide(model, factor):
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(factor)
    return model


def noise():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(480, 8, generator=generator), torch.randint(3, (480,), generator=generator))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_broken_program_is_found_and_its_mended_twin_is_silent(name, run_config):
    torch.manual_seed(0)
    report, fault, where = PROGRAMS[name](False, run_config)
    found = dict(alarms(report))
    assert fault in found, alarms(report)
    assert where is None or found[fault] == where
    torch.manual_seed(0)
    report, _, _ = PROGRAMS[name](True, run_config)
    assert alarms(report) == []


def test_a_resumed_run_comes_to_the_same_findings(tmp_path):
    def run(folder, steps, **options):
        torch.manual_seed(0)
        model = kept_dead(stack(2, 40, nn.ReLU), 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        config = {"run_dir": str(folder), "progress": False, "max_steps": steps, "seed": 1, **options}
        return SafeTrainer(
            model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs(480)), config=config, loggers=[]
        ).run()  # fmt: skip

    whole = run(tmp_path / "whole", 260)
    assert alarms(whole)
    run(tmp_path / "parts", 115)
    assert run(tmp_path / "parts", 260, resume="last").findings == whole.findings


def curves(validation, training):
    columns = {"step": list(range(1, len(training) + 1)), "loss": training}
    per = len(training) // len(validation)
    rows = [{"step": (k + 1) * per, "val/loss": value} for k, value in enumerate(validation)]
    return Evidence(columns=columns, evaluations=rows)


def test_overfitting_takes_both_curves():
    falling = [2 * math.exp(-k / 40) for k in range(320)]
    turned = [1.5, 0.9, 0.8, 0.85, 1.0, 1.2, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3]
    (finding,) = overfitting(curves(turned, falling))
    assert finding.fault == "training.overfitting"
    assert "best at step 60" in finding.evidence
    assert overfitting(curves(turned, [1.0] * 320)) == []  # the training loss stands still: not learnt by heart
    assert overfitting(curves([1.5, 0.9, 0.8] + [0.9, 1.0] * 6 + [0.85], falling)) == []  # a small gap, and noise
    assert overfitting(curves(turned[:6], falling)) == []  # too early to say


def test_the_losses_of_an_untrained_network_are_no_measure_of_overfitting():
    """The first epoch is the best one: its losses are those of a network that knew nothing yet, and fall within it."""
    turned = [0.5, 0.6, 0.7, 0.75, 0.8, 0.8, 0.85, 0.85, 0.9, 0.9, 0.9, 0.95, 0.95, 1.0, 1.0, 1.0]
    known_by_then = [1.4] * 20 + [0.3] * 150 + [0.2] * 150
    assert overfitting(curves(turned, known_by_then)) == []
    learnt_later = [1.4] * 20 + [0.5] * 150 + [0.1] * 150
    assert [found.fault for found in overfitting(curves(turned, learnt_later))] == ["training.overfitting"]


def test_a_rate_is_not_blamed_for_first_steps_that_it_recovers_from():
    worse = [Probe(step=1, before=2.3, after=56.0), Probe(step=10, before=12.0, after=3.0)]
    lost = Evidence(columns={"loss": [2.3] * 5 + [300.0] * 145, "step": list(range(150))}, probes=worse)
    assert [finding.fault for finding in rate_too_high(lost)] == ["optimizer.lr_too_high"]
    recovered = Evidence(columns={"loss": [2.3] + [50.0] * 30 + [0.2] * 119, "step": list(range(150))}, probes=worse)
    assert rate_too_high(recovered) == []
    young = Evidence(columns={"loss": [2.3] + [50.0] * 30, "step": list(range(31))}, probes=worse)
    assert rate_too_high(young) == []


def finding(fault, severity="warning", step=1):
    return Finding(fault=fault, severity=severity, stage="training", evidence="e", cause="c", remedy="r", step=step)


def test_symptoms_go_under_their_cause_with_the_worst_severity():
    cause, symptom, other = (
        finding("optimizer.lr_too_high"),
        finding("activation.dead", "error"),
        finding("data.imbalance"),
    )
    (kept, left) = folded([symptom, cause, other])
    assert (kept.fault, kept.symptoms, kept.severity.value) == ("optimizer.lr_too_high", ("activation.dead",), "error")
    assert left is other
    assert folded([kept, left]) == [kept, left]


def test_an_info_explains_nothing_and_the_fuse_speaks_for_itself():
    info, dead = finding("optimizer.lr_too_high", "info"), finding("activation.dead")
    assert folded([info, dead]) == [info, dead]
    assert not any("nonfinite" in fault for faults in EXPLAINS.values() for fault in faults)
    assert all(cause not in explained for cause, explained in EXPLAINS.items() if cause != "optimizer.lr_too_high")
