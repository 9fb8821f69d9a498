"""The rule for a diverging loss: hundreds of healthy curves stay silent, real programs that blow up are seen."""

import json
import math
import random

import numpy as np
import pytest
import torch
from curves import HEALTHY
from programs import blobs, loader_of, mlp
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR
from torch.utils.data import TensorDataset

from safe_trainer import SafeTrainer
from safe_trainer.diagnosis import Diagnosis, Evidence, take_in
from safe_trainer.diagnosis.spikes import Spikes
from safe_trainer.findings import Finding, Severity


def history(losses, rates=None, norms=None):
    columns = {"step": list(range(1, len(losses) + 1)), "loss": [float(loss) for loss in losses]}
    if rates is not None:
        columns["lr"] = [float(rate) for rate in rates]
    if norms is not None:
        columns["grad_norm"] = [float(norm) for norm in norms]
    return columns


def found(columns, **options):
    rule = Spikes(**options)
    rule.feed(columns)
    return rule.finding


def noisy(level, steps, seed=0, sigma=0.2):
    return level * np.exp(sigma * np.random.default_rng(seed).normal(size=steps))


def learned(steps=150, seed=0):
    """From 2.3 down to 0.1."""
    return noisy(1, steps, seed) * (0.1 + 2.2 * np.exp(-np.arange(steps) / 20))


# --- silent on healthy curves ---


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_curves_raise_no_alarm(kind):
    """28 kinds x 6 seeds x 3 lengths."""
    for seed in range(6):
        for steps in (150, 300, 1000):
            finding = found(history(HEALTHY[kind](np.random.default_rng([seed, steps]), steps)))
            assert finding is None or not finding.is_alarm, (seed, steps, finding)


@pytest.mark.parametrize("kind", ["falling", "converged", "poisson", "flow", "batch_of_one", "plateau", "constant"])
def test_common_healthy_curves_do_not_even_raise_an_info(kind):
    for seed in range(10):
        assert found(history(HEALTHY[kind](np.random.default_rng(seed), 400))) is None


# --- broken and mended twins ---


def test_a_collapse_to_chance_is_a_warning_and_its_twin_that_recovers_is_not():
    collapsed = np.concatenate([learned(), noisy(2.4, 200, 1, 0.05)])
    finding = found(history(collapsed, norms=collapsed))
    assert (finding.fault, finding.severity, finding.stage) == ("training.diverging", Severity.warning, "training")
    assert finding.step == 270  # 120 losses after the first
    assert "since step 151" in finding.evidence
    assert "gradient norm went from" in finding.evidence
    recovered = np.concatenate([learned(), noisy(2.4, 20, 1, 0.05), noisy(0.1, 180, 2)])
    finding = found(history(recovered))
    assert finding.severity is Severity.info
    assert "came back by itself" in finding.evidence


def test_a_warning_is_withdrawn_when_the_loss_comes_back():
    columns = history(np.concatenate([learned(), noisy(2.4, 130, 1, 0.05), noisy(0.1, 200, 2)]))
    rule, severities = Spikes(), []
    for step in range(50, len(columns["loss"]) + 1, 50):
        severities += [f.severity for f in rule.feed({name: column[:step] for name, column in columns.items()})]
    assert severities == [Severity.warning, Severity.info]
    assert "it had come back to" in rule.finding.evidence


def test_a_rise_of_the_rate_explains_it_and_halves_the_time():
    losses = np.concatenate([learned(), noisy(3, 70, 1, 0.3)])
    rates = np.where(np.arange(220) < 148, 0.1, 10.0)
    finding = found(history(losses, rates))
    assert finding.severity is Severity.warning
    assert finding.step == 210
    assert "the learning rate had risen to 10; up to then it was at most 0.1" in finding.cause
    assert found(history(losses, np.full(220, 0.1))) is None
    restart = np.where(np.arange(220) < 5, 10.0, rates)  # a height that the run has known: a warm restart
    assert found(history(losses, restart)) is None


def test_a_loss_that_stays_below_where_it_began_is_left_alone():
    assert found(history(np.concatenate([learned(), noisy(1.2, 300, 1, 0.05)]))) is None


def test_a_loss_on_its_way_back_is_left_alone():
    back = noisy(1, 250, 1) * (0.1 + 8 * np.exp(-np.arange(250) / 50))
    finding = found(history(np.concatenate([learned(), back])))
    assert finding is None or not finding.is_alarm


def test_negative_losses_can_diverge_as_well():
    rng = np.random.default_rng(0)
    start = -236 + 40 * np.exp(-np.arange(200) / 20) + rng.normal(0, 2, 200)
    assert found(history(np.concatenate([start, -236 + rng.normal(0, 2, 200)]))) is None
    finding = found(history(np.concatenate([start, 500 + rng.normal(0, 50, 200)])))
    assert finding.severity is Severity.warning


def test_first_steps_that_throw_the_loss_up_for_good():
    up = np.concatenate([[2.3, 60], noisy(250, 100, 0, 0.3)])
    finding = found(history(up))
    assert finding.severity is Severity.warning
    assert "the first loss was 2.3" in finding.evidence
    calmed = np.concatenate([[2.3, 60], noisy(250, 10), noisy(1, 100)])
    assert found(history(calmed)) is None
    lucky = np.concatenate([[0.01], np.exp(np.random.default_rng(0).normal(size=100) * 2)])  # one easy sample
    assert found(history(lucky)) is None


def test_exponential_growth():
    grown = noisy(1, 200) * 1.08 ** np.arange(200)
    assert found(history(grown)).severity is Severity.warning
    ramp = noisy(1, 400) * np.arange(1, 401)  # a weight that rises evenly
    assert found(history(ramp)) is None


def test_several_optimizers_raise_infos_only():
    collapsed = history(np.concatenate([learned(), noisy(2.4, 200, 1, 0.05)]))
    assert found(collapsed).severity is Severity.warning
    assert found(collapsed, opposed=True).severity is Severity.info


def test_single_spikes_are_one_info_that_counts_them():
    losses = np.concatenate([learned(), noisy(0.1, 250, 1)])
    assert found(history(losses)) is None
    losses[[200, 250, 300]] = [5, 9, 7]
    rule = Spikes()
    (finding,) = rule.feed(history(losses))
    assert finding.severity is Severity.info
    assert finding.step == 251
    assert "3 times" in finding.evidence
    losses[[200, 250, 300]] = 0.6  # out of range, but no worse than the network was when it knew nothing
    assert found(history(losses)) is None


# --- as it is fed ---


@pytest.mark.parametrize("kind", ["collapse", "curriculum", "slingshot", "flow", "heavy_tailed"])
def test_the_findings_do_not_depend_on_how_the_history_is_split(kind):
    rng = np.random.default_rng(3)
    losses = np.concatenate([learned(), noisy(2.4, 250, 1, 0.05)]) if kind == "collapse" else HEALTHY[kind](rng, 500)
    losses[rng.choice(len(losses), 30, replace=False)] = math.nan  # skipped steps
    columns = history(losses, np.full(len(losses), 0.1))
    whole = Diagnosis()
    whole.feed(Evidence(columns=columns))
    parts, step, draw = Diagnosis(), 0, random.Random(1)
    while step < len(losses):
        step = min(len(losses), step + draw.randint(1, 40))
        parts.feed(Evidence(columns={name: column[:step] for name, column in columns.items()}))
        kept = json.loads(json.dumps(parts.state_dict()))  # as a checkpoint would, at every call
        parts = Diagnosis()
        parts.load_state_dict(kept)
    assert parts.findings == whole.findings
    assert str(parts.state_dict()) == str(whole.state_dict())


def test_values_that_are_not_finite_are_passed_over():
    losses = [math.nan, math.inf, *learned(200)]
    losses[100:180] = [math.nan] * 80
    assert found(history(losses)) is None
    assert found({"step": [], "loss": []}) is None
    assert found(history([math.nan] * 300)) is None
    assert found(history(np.concatenate([learned(), np.full(200, 1e308)]))).severity is Severity.warning


def test_a_finding_replaces_its_earlier_self_and_is_told_if_graver():
    info = Finding(fault="a.b", severity="info", stage="training", evidence="1", cause="", remedy="")
    worse = Finding(fault="a.b", severity="warning", stage="training", evidence="2", cause="", remedy="")
    elsewhere = Finding(fault="a.b", severity="info", stage="training", evidence="", cause="", remedy="", where="x")
    findings = []
    assert [take_in(findings, f) for f in (info, info, worse, info, elsewhere)] == [True, False, True, False, True]
    assert findings == [info, elsewhere]


# --- real programs ---


def program(rate, steps, config, *, scheduler=None, seed=0, data=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    trainer = SafeTrainer(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        loader_of(data or blobs(480), seed=seed),
        scheduler=scheduler(optimizer) if scheduler else None,
        config=config(max_steps=steps, scheduler_interval="step", **{"checkpoint.enabled": False}),
        loggers=[],
    )
    return trainer.run()


def alarms(report):
    return [finding.fault for finding in report.findings if finding.is_alarm]


@pytest.mark.parametrize("seed", range(3))
def test_a_rate_that_jumps_is_seen_and_its_twin_is_silent(seed, run_config):
    jump = program(0.05, 260, run_config, scheduler=lambda o: LambdaLR(o, lambda k: 1e4 if k > 100 else 1), seed=seed)
    (finding,) = (entry for entry in jump.findings if entry.is_alarm)
    if finding.fault == "training.diverging":  # else a probe has caught the very step, and this is its symptom
        assert "the learning rate had risen to 500" in finding.cause
    assert "training.diverging" in (finding.fault, *finding.symptoms)
    calm = program(0.05, 260, run_config, seed=seed)
    assert calm.findings == []


@pytest.mark.parametrize("seed", range(3))
def test_a_rate_too_high_from_the_start_is_seen(seed, run_config):
    hard = blobs(480)
    hard = TensorDataset(torch.randn(480, 8), hard.tensors[1])  # nothing to learn, so that no luck helps
    (finding,) = (entry for entry in program(30.0, 130, run_config, seed=seed, data=hard).findings if entry.is_alarm)
    assert finding.fault == "optimizer.lr_too_high"
    assert "training.diverging" in finding.symptoms
    assert alarms(program(0.05, 130, run_config, seed=seed, data=hard)) == []


@pytest.mark.parametrize("seed", range(3))
def test_warm_restarts_are_silent(seed, run_config):
    report = program(0.5, 300, run_config, scheduler=lambda o: CosineAnnealingWarmRestarts(o, 60), seed=seed)
    assert alarms(report) == []


@pytest.mark.parametrize("stop", [180, 215])
def test_a_resumed_run_comes_to_the_same_findings(stop, tmp_path):
    def train(folder, steps, **options):
        torch.manual_seed(0)
        model = mlp(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        jump = LambdaLR(optimizer, lambda k: 1e5 if k > 100 else 1)
        config = {"max_steps": steps, "run_dir": str(folder), "progress": False, "scheduler_interval": "step"}
        return SafeTrainer(
            model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), scheduler=jump,
            config={**config, "seed": 1, **options}, loggers=[],
        ).run()  # fmt: skip

    whole = train(tmp_path / "whole", 260)
    (finding,) = (entry for entry in whole.findings if entry.is_alarm)
    assert "training.diverging" in (finding.fault, *finding.symptoms)
    train(tmp_path / "parts", stop)
    assert train(tmp_path / "parts", 260, resume="last").findings == whole.findings
