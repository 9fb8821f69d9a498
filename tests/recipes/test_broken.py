"""The networks to learn from: each ends with the finding that its page tells of, first; the healthy one is silent."""

import pytest

from safe_trainer import SafetyError
from safe_trainer.__main__ import checked
from safe_trainer.build import build
from safe_trainer.command_line import composed, conf_folders, readable_overrides

ENDS = {
    "lr_too_high": "optimizer.lr_too_high",
    "dead_relu": "init.dead",
    "missing_zero_grad": "gradient.accumulating",
    "vanishing_sigmoid": "gradient.vanishing",
    "silent_broadcast": "loss.broadcast",
}


def ended(recipe, folder, *overrides):
    words = [f"+recipe=broken/{recipe}", "progress=false", f"run_dir={folder}", "seed=0", *overrides]
    folders = conf_folders(None)
    trainer = build(checked(composed(readable_overrides(words, folders), None)), folder)
    try:
        return trainer.run()
    except SafetyError as error:
        return error.report


@pytest.mark.preflight
def test_the_healthy_one_is_silent_and_learns(tmp_path):
    report = ended("healthy", tmp_path)
    assert report.findings == []
    assert {check.status.value for check in report.checks} == {"pass"}
    assert report.metrics["test/accuracy"] > 0.95


@pytest.mark.preflight
@pytest.mark.parametrize("recipe", ENDS)
def test_each_ends_with_its_finding_first(recipe, tmp_path):
    fault = ENDS[recipe]
    report = ended(recipe, tmp_path)
    alarms = [finding for finding in report.findings if finding.is_alarm]
    assert alarms[0].fault == fault
    assert [finding.fault for finding in alarms] == [fault]


@pytest.mark.parametrize("recipe", ["lr_too_high", "dead_relu", "vanishing_sigmoid"])
def test_training_finds_it_too_where_nothing_was_checked_before(recipe, tmp_path):
    report = ended(recipe, tmp_path)  # the preflight is off in tests that are not marked so
    assert report.checks == []
    assert [finding.fault for finding in report.findings if finding.is_alarm][:1] == [ENDS[recipe]]
