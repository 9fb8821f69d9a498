"""Dead units come back and learn; nothing else changes; clip_norm=auto holds what explodes without it."""

import copy

import numpy as np
import pytest
import torch
from programs import blobs, equal, fingerprint, loader_of
from torch import nn

from safe_trainer import SafeTrainer
from safe_trainer.diagnosis import Evidence
from safe_trainer.diagnosis.clip_norm import exploding_gradients, suggested_clip_norm
from safe_trainer.repair import revive_dead_units


def mostly_dead(conv=False):
    torch.manual_seed(0)
    if conv:
        head = [nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 20, 3), nn.BatchNorm1d(20), nn.ReLU(), nn.Flatten()]
        model = nn.Sequential(*head, nn.Linear(120, 3))
        nn.init.constant_(model[2].bias[:16], -50.0)
        return model, "1"
    model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))
    with torch.no_grad():
        model[2].bias[:36] = -50.0
    return model, "2"


def run(model, config, **options):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    settings = config(**{"max_steps": 300, "seed": 1, "on_fault": "report", "monitor.every": 20, **options})
    trainer = SafeTrainer(
        model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs(480), shuffle=True), config=settings, loggers=[]
    )
    return trainer.run(), trainer.loop.monitors.history[-1], fingerprint(model, optimizer)


@pytest.mark.parametrize("conv", [False, True])
def test_a_network_that_is_mostly_dead_comes_back_and_learns(conv, run_config):
    model, _ = mostly_dead(conv)
    _, dead, _ = run(model, run_config)
    assert dead.layers["3"].inactive_window_share >= 0.7
    model, _ = mostly_dead(conv)
    report, alive, _ = run(model, run_config, **{"repair.dead_units": True})
    assert alive.layers["3"].inactive_window_share < 0.2
    assert np.mean(report.history["loss"][-20:]) < 0.3 * np.mean(report.history["loss"][:5])


def test_a_run_with_revived_units_is_resumed_to_the_same_bits(run_config):
    whole, _, expected = run(mostly_dead()[0], run_config, **{"repair.dead_units": True})
    folder = run_config()["run_dir"]
    options = {"repair.dead_units": True, "run_dir": folder}
    run(mostly_dead()[0], run_config, max_steps=110, **options)
    parts, _, got = run(mostly_dead()[0], run_config, resume="last", **options)
    assert equal(expected, got)
    assert whole.history == parts.history


def test_only_dead_units_are_drawn_anew_and_the_generators_are_left_alone():
    model, layer = mostly_dead()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(16, 8)).sum().backward()
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state[model[2].weight])
    generator = torch.get_rng_state()
    mask = np.arange(40) < 36
    assert revive_dead_units(model, {"3": mask}, optimizer) == {layer: 36}
    assert torch.equal(generator, torch.get_rng_state())
    changed = (model[2].weight != before["2.weight"]).any(1)
    assert torch.equal(changed, torch.from_numpy(mask))
    assert torch.equal(model[2].bias[36:], before["2.bias"][36:])
    assert (model[2].bias[:36] == 0).all()
    assert (optimizer.state[model[2].weight]["exp_avg"][:36] == 0).all()
    assert torch.equal(optimizer.state[model[2].weight]["exp_avg"][36:], state["exp_avg"][36:])
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before if not name.startswith("2."))
    assert model[2].weight[:36].std().item() == pytest.approx((2 / 40) ** 0.5, rel=0.1)


def test_an_activation_without_a_layer_of_its_size_is_left_alone():
    model, _ = mostly_dead()
    before = copy.deepcopy(model.state_dict())
    assert revive_dead_units(model, {"3": np.ones(7, dtype=bool), "nowhere": np.ones(40, dtype=bool)}) == {}
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


# --- clipping by what healthy steps had -------------------------------------------------------------------------------


def deep(config, **options):
    """Twenty layers without normalisation, drawn a little too wide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), *[m for _ in range(18) for m in (nn.Linear(48, 48), nn.ReLU())],
                          nn.Linear(48, 3))  # fmt: skip
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.zeros_(module.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settings = config(**{"max_steps": 400, "seed": 1, "on_fault": "report", "log_every": 10, **options})
    trainer = SafeTrainer(
        model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs(480), shuffle=True), config=settings, loggers=[]
    )
    return trainer.run(), trainer.loop


def test_twenty_layers_explode_without_clipping_and_learn_with_auto(run_config):
    without, _ = deep(run_config)
    learnt, loop = deep(run_config, clip_norm="auto")
    assert learnt.ok
    assert [finding for finding in learnt.findings if finding.is_alarm] == []
    assert np.mean(learnt.history["loss"][-20:]) < 0.3
    assert not np.mean(without.history["loss"][-20:]) < 0.3
    assert loop.clip_norm == suggested_clip_norm(learnt.history["grad_norm"][:400])


def test_auto_clipping_is_resumed_to_the_same_bits(run_config):
    whole, _ = deep(run_config, clip_norm="auto")
    folder = run_config()["run_dir"]
    deep(run_config, clip_norm="auto", **{"run_dir": folder, "max_steps": 137})
    parts, _ = deep(run_config, clip_norm="auto", run_dir=folder, resume="last")
    assert whole.history == parts.history


def test_a_suggestion_comes_from_the_healthy_steps_alone():
    healthy = [1.0 + 0.01 * k for k in range(100)]
    assert suggested_clip_norm(healthy) == pytest.approx(3.8, rel=0.05)
    assert suggested_clip_norm([*healthy, 1e9, float("inf"), float("nan")]) == suggested_clip_norm(healthy)
    assert suggested_clip_norm(healthy[:20]) is None


def evidence(norms, losses):
    return Evidence(columns={"step": list(range(1, len(norms) + 1)), "grad_norm": norms, "loss": losses})


def test_exploding_gradients_are_told_with_the_norm_to_clip_to():
    norms, losses = [1.0] * 60, [0.5] * 60
    (finding,) = exploding_gradients(evidence([*norms, 300.0, 5e3, 2e4, 900.0, 800.0], [*losses, *[3.0] * 5]))
    assert (finding.fault, finding.step) == ("gradient.exploding", 61)
    assert "clip_norm=2" in finding.remedy
    assert exploding_gradients(evidence(norms + [300.0] + [1.0] * 20, losses + [0.5] * 21)) == []  # one, and it passes
    assert exploding_gradients(evidence(norms + [300.0] * 3 + [1.0] * 30, losses + [0.5] * 33)) == []  # no harm done
