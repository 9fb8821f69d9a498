"""Who is called, of what, and how often; a healthy run calls nobody."""

import importlib
import json
import logging
import math

import pytest
import torch
from programs import blobs, loader_of, mlp
from torch import nn

from safe_trainer import ConfigError, Finding, SafeTrainer, SafetyError, watch
from safe_trainer.alerts import Alerts
from safe_trainer.build import build, target_problems
from safe_trainer.config import AlertsConfig, parse
from safe_trainer.loggers import JsonLines, TensorBoard
from safe_trainer.output import Output
from safe_trainer.terminal import Progress


def finding(fault="gradient.exploding", severity="warning", **options):
    return Finding(fault=fault, severity=severity, stage="training", evidence="", cause="", remedy="", **options)


def trained(model, config, calls, *, data=None, rate=0.05, loss_fn=None, steps=40, loggers=()):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = loader_of(blobs(480) if data is None else data, batch_size=32)
    settings = config(max_steps=steps, seed=1, **{"checkpoint.enabled": False})
    trainer = SafeTrainer(
        model, loss_fn or nn.CrossEntropyLoss(), optimizer, loader, config=settings, loggers=loggers, alerts=calls
    )
    return trainer


def test_named_faults_and_errors_alert_by_default_and_nothing_else():
    alerts = Alerts(AlertsConfig(), [])
    for fault in AlertsConfig().faults:
        assert alerts.is_due(finding(fault))
    assert alerts.is_due(finding("gradient.accumulating", "error"))
    assert not alerts.is_due(finding("gradient.accumulating", "warning"))
    assert not alerts.is_due(finding("model.stuck_in_eval", "info"))


def test_the_configuration_says_what_alerts():
    alerts = Alerts(parse({"alerts": {"faults": [], "severity": "warning"}}).alerts, [])
    assert alerts.is_due(finding("training.overfitting", "warning"))
    assert not alerts.is_due(finding("activation.dead", "info"))
    with pytest.raises(ConfigError, match=r"alerts\.faults must be ids of faults"):
        parse({"alerts.faults": ["activation.deadly"]})
    with pytest.raises(ConfigError, match=r"alerts\.severity must be one of info, warning, error"):
        parse({"alerts.severity": "bad"})


def test_each_finding_is_delivered_once():
    told = []
    alerts = Alerts(AlertsConfig(), [told.append])
    for step in (3, 4, 5):
        alerts.deliver(finding(step=step))
    alerts.deliver(finding(step=6, where="layer"))
    assert [(told_one.step, told_one.where) for told_one in told] == [(3, None), (6, "layer")]


def test_a_callable_that_raises_costs_one_warning_and_the_next_one_is_called(caplog):
    told = []

    def broken(_):
        raise ConnectionError("no pager")

    alerts = Alerts(AlertsConfig(), [broken, told.append])
    with caplog.at_level(logging.WARNING):
        alerts.deliver(finding())
        alerts.deliver(finding("activation.dead"))
    assert len(told) == 2
    assert len(caplog.records) == 1
    assert "broken raised ConnectionError: no pager" in caplog.text


def test_a_healthy_run_alerts_nobody(run_config, tmp_path):
    told = []
    report = trained(mlp(), run_config, [told.append], steps=120, loggers=[JsonLines(tmp_path)]).run()
    assert report.ok
    assert told == []
    assert not (tmp_path / "alerts.jsonl").exists()


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_nan_alerts_once_with_an_error_or_without(policy, run_config):
    told = []
    data = blobs(480)
    data.tensors[0][::7] = math.nan
    trainer = trained(mlp(), lambda **k: run_config(**k, **{"guard.nonfinite": policy}), [told.append], data=data)
    if policy == "stop":
        with pytest.raises(SafetyError):
            trainer.run()
    else:
        trainer.run()
    assert [told_one.fault for told_one in told] == ["data.nonfinite"]


def test_a_logarithm_of_zero_alerts_as_well(run_config):
    told = []
    trainer = trained(
        mlp(), lambda **k: run_config(**k, **{"guard.nonfinite": "skip", "guard.max_skips": 3}), [told.append],
        loss_fn=lambda output, target: (output.sum() * 0).log() + nn.functional.cross_entropy(output, target),
    )  # fmt: skip
    with pytest.raises(SafetyError):
        trainer.run()
    assert [told_one.fault for told_one in told] == ["loss.log_of_zero"]


@pytest.mark.parametrize(("units", "severity"), [(27, None), (36, "info"), (40, "warning")])
def test_a_layer_with_more_than_80_percent_dead_units_alerts_even_if_the_network_learns(units, severity, run_config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 3))
    with torch.no_grad():
        model[0].bias[:units] = -50.0
    told = []
    report = trained(model, lambda **k: run_config(**k, on_fault="report"), [told.append], steps=240).run()
    assert [told_one.fault for told_one in told] == ([] if severity is None else ["init.dead"])
    assert [f.severity for f in report.findings] == ([] if severity is None else [severity])


def test_exploding_gradients_alert(run_config):
    told, calls = [], []

    def jumping(output, target):
        calls.append(1)
        return (1 if len(calls) < 60 else 1e6) * nn.functional.cross_entropy(output, target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    trained(model, lambda **k: run_config(**k, on_fault="report"), [told.append], loss_fn=jumping, steps=200).run()
    assert "gradient.exploding" in [told_one.fault for told_one in told]


def test_what_another_finding_explains_alerts_and_is_told_nowhere_else(tmp_path):
    told = []
    output = Output([JsonLines(tmp_path)], Progress(shown=False), Alerts(AlertsConfig(), [told.append]))
    output.finding(finding(), explained=True)
    assert told == [finding()]
    assert [path.name for path in tmp_path.iterdir()] == ["alerts.jsonl"]
    output.finding(finding("activation.dead"))
    output.close()
    assert "activation.dead" in (tmp_path / "metrics.jsonl").read_text()


def test_watch_calls_too():
    told = []
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.CrossEntropyLoss()
    inputs, targets = blobs(32).tensors
    config = {"guard.nonfinite": "skip"}
    with watch(model, optimizer, loss_fn, config, alerts=[told.append]) as guard:
        for factor in (1.0, math.nan, math.nan):
            batch = (inputs * factor, targets)
            with guard.step(batch):
                optimizer.zero_grad()
                loss = loss_fn(model(batch[0]), batch[1])
                loss.backward()
                guard.loss(loss)
                optimizer.step()
    assert [told_one.fault for told_one in told] == ["data.nonfinite"]
    with pytest.raises(ConfigError, match="alerts must be a list of callables"):
        watch(model, optimizer, alerts=told.append)


def test_loggers_write_alerts_down(tmp_path):
    sinks = [JsonLines(tmp_path), TensorBoard(tmp_path), object()]
    alerts = Alerts(AlertsConfig(), [])
    alerts.deliver(finding(step=7), sinks)
    alerts.deliver(finding("activation.dead", step=9, where="3"), sinks)
    first, second = map(json.loads, (tmp_path / "alerts.jsonl").read_text().splitlines())
    assert (first["step"], first["alert"]["fault"]) == (7, "gradient.exploding")
    assert Finding(**second["alert"]) == finding("activation.dead", step=9, where="3")
    sinks[0].truncate_after(8)
    assert len((tmp_path / "alerts.jsonl").read_text().splitlines()) == 1
    sinks[1].close()
    (events,) = tmp_path.glob("events.*")
    assert b"alerts" in events.read_bytes()


CALLED = []


def page(found, to):
    CALLED.append((found.fault, to))


class Pager:
    def __init__(self, to="me"):
        self.to = to

    def __call__(self, found):
        CALLED.append((found.fault, self.to))


def configured(call):
    return parse(
        {
            "model": {"_target_": "torch.nn.Linear", "in_features": 30, "out_features": 2},
            "data": {"_target_": "safe_trainer.recipes.tabular.breast_cancer"},
            "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
            "max_steps": 2,
            "progress": False,
            "alerts": {"call": call},
        }
    )


def test_the_configuration_names_functions_and_classes_to_call(tmp_path):
    call = {
        "function": {"_target_": "test_alerts.page", "to": "you"},
        "object": {"_target_": "test_alerts.Pager"},
        "dropped": None,
    }
    config = configured(call)
    assert target_problems(config) == []
    called = importlib.import_module("test_alerts").CALLED  # pytest imports this file under a name of its own
    called.clear()
    trainer = build(config, tmp_path)
    Alerts(config.alerts, trainer.alerts).deliver(finding())
    assert called == [("gradient.exploding", "you"), ("gradient.exploding", "me")]


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"_target_": "test_alerts.page"}, "alerts.call.x.to must be given"),
        ({"_target_": "test_alerts.Pager", "too": 1}, "did you mean alerts.call.x.to?"),
        ({"_target_": "test_alerts.pagee"}, "has no 'pagee'"),
        (3, "alerts.call.x must be a group with a _target_"),
    ],
)
def test_a_slip_in_a_call_is_told_before_anything_is_built(node, problem):
    (told,) = target_problems(configured({"x": node}))
    assert problem in told


def test_the_library_takes_the_callables_themselves(run_config):
    with pytest.raises(ConfigError, match=r"alerts\.call must not be in config: pass alerts=\[callable\]"):
        trained(mlp(), lambda **k: run_config(**k, **{"alerts.call": {"x": {"_target_": "a.b"}}}), [])
    with pytest.raises(ConfigError, match="alerts must hold callables"):
        trained(mlp(), run_config, [3])


@pytest.mark.preflight
@pytest.mark.parametrize("goes_on", [False, True])
def test_what_is_found_before_the_run_alerts_too(goes_on, tmp_path, run_config):
    told = []
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.constant_(model[0].bias, -100.0)
    settings = {"preflight.checks": ["init"], "on_fault": "report" if goes_on else "stop"}
    sink = JsonLines(tmp_path)
    trainer = trained(model, lambda **more: run_config(**more, **settings), [told.append], loggers=[sink], steps=5)
    if goes_on:
        trainer.run()
    else:
        with pytest.raises(SafetyError):
            trainer.run()
    assert [entry.fault for entry in told] == ["init.dead"]
    assert '"init.dead"' in (tmp_path / "alerts.jsonl").read_text()
