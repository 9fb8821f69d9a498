import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from safe_trainer.findings import CheckResult, Finding, Report, SafetyError, Severity, Status, json_number


def finding(severity="error", step=None, fault="activation.dead", **rest):
    words = {"evidence": "97 % of 64 units never fire", "cause": "the learning rate", "remedy": "lower it"}
    return Finding(fault=fault, severity=severity, stage="training", step=step, **{**words, **rest})


def test_a_finding_has_the_fields_of_the_public_contract():
    names = [entry.name for entry in fields(Finding)]
    contract = "fault severity stage where step evidence cause remedy source symptoms"
    assert sorted(names) == sorted(contract.split())
    assert (finding().where, finding().step, finding().source, finding().symptoms) == (None, None, None, ())


def test_severities_are_words():
    one = finding("warning")
    assert one.severity is Severity.warning
    assert one.severity == "warning"
    assert getattr(one.severity, "value", one.severity) == "warning"
    assert f"{one.severity}" == "warning"
    with pytest.raises(ValueError, match="fatal"):
        finding("fatal")


def test_statuses_are_words():
    assert [CheckResult(name="data", status=word).status for word in ("pass", "warn", "fail", "skip")] == list(Status)
    assert CheckResult(name="data", status="pass").status == "pass"


def test_only_an_info_is_no_alarm():
    assert [finding(word).is_alarm for word in ("info", "warning", "error")] == [False, True, True]


def test_a_stage_is_one_of_two():
    with pytest.raises(ValueError, match=r"preflight, training \(got 'later'\)"):
        Finding(fault="x", severity="info", stage="later", evidence="", cause="", remedy="")


def test_a_finding_does_not_change():
    with pytest.raises(FrozenInstanceError):
        finding().step = 3
    assert len({finding(), finding()}) == 1


def test_the_paragraph_says_everything_there_is():
    full = finding(where="features.3", step=1200, source="model.py:42", symptoms=["training.not_decreasing"])
    assert full.paragraph().splitlines() == [
        "error: activation.dead in features.3, step 1,200, model.py:42",
        "  evidence: 97 % of 64 units never fire",
        "  cause:    the learning rate",
        "  remedy:   lower it",
        "  explains: training.not_decreasing",
    ]
    assert finding(cause="", remedy="").paragraph().count("\n") == 1


def test_findings_stand_most_severe_first_then_by_step():
    report = Report(findings=[finding("info", 1), finding("error", 9), finding("warning", 2), finding("error")])
    report.add(finding("error", 5), finding("warning", 1))
    order = [(str(one.severity), one.step) for one in report.findings]
    assert order == [("error", None), ("error", 5), ("error", 9), ("warning", 1), ("warning", 2), ("info", 1)]


def test_a_report_is_ok_without_errors():
    report = Report(findings=[finding("warning"), finding("info")])
    assert report.ok
    report.add(finding("error"))
    assert not report.ok


def test_reports_do_not_share_their_lists():
    Report().history["loss"] = [1.0]
    assert Report().history == {}


def test_a_report_is_strict_json():
    check = CheckResult(name="init", status="fail", seconds=0.5, findings=(finding(),))
    report = Report(
        findings=[finding(step=3)], checks=[check], metrics={"val/loss": math.nan}, path=Path("runs") / "a",
        history={"loss": [1.5, math.inf, -math.inf]},
    )  # fmt: skip
    read = json.loads(report.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert read["ok"] is False
    assert read["findings"][0]["severity"] == "error"
    assert read["findings"][0]["step"] == 3
    assert read["checks"][0]["status"] == "fail"
    assert read["checks"][0]["findings"][0]["fault"] == "activation.dead"
    assert read["metrics"] == {"val/loss": "NaN"}
    assert read["history"] == {"loss": [1.5, "Infinity", "-Infinity"]}
    assert read["path"] == str(Path("runs") / "a")


@pytest.mark.parametrize("value", [0.0, -1.5, math.inf, -math.inf])
def test_python_reads_a_json_number_back(value):
    assert float(json_number(value)) == value
    assert math.isnan(float(json_number(math.nan)))


def test_a_safety_error_tells_its_errors_and_holds_its_report():
    error = SafetyError(Report(findings=[finding(), finding("warning", fault="batch.small")]))
    assert not error.report.ok
    assert str(error).startswith("stopped by 1 error\nerror: activation.dead")
    assert "batch.small" not in str(error)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(twin) == str(error)
        assert twin.report == error.report
