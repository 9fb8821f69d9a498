"""Causes, and what is told under them."""

import pytest

from safe_trainer import Finding
from safe_trainer.diagnosis.causes import folded


def told(fault, *, severity="warning", stage="training", **parts):
    return Finding(fault=fault, severity=severity, stage=stage, evidence="e", cause="c", remedy="r", **parts)


def faults(findings):
    return [finding.fault for finding in findings]


@pytest.mark.parametrize(
    "cause", ["optimizer.lr_too_high", "data.unnormalized", "loss.wrong_sign", "gradient.exploding"]
)
@pytest.mark.parametrize("order", [1, -1])
def test_a_step_whose_numbers_had_grown_is_told_under_what_drove_them_apart(cause, order):
    grown = told("forward.nonfinite", severity="error", symptoms=("training.diverging",))
    (kept,) = folded([grown, told(cause)][::order])
    assert kept.fault == cause
    assert kept.severity == "error"  # the run is no better for it
    assert "forward.nonfinite" in kept.symptoms


@pytest.mark.parametrize("symptom", ["training.diverging", "activation.dead", "training.oscillating"])
def test_what_only_goes_along_with_it_does_not_take_it_over(symptom):
    grown = told("forward.nonfinite", severity="error", symptoms=("training.diverging",))
    assert "forward.nonfinite" in faults(folded([grown, told(symptom)]))


@pytest.mark.parametrize("cause", ["optimizer.lr_too_high", "data.unnormalized"])
def test_an_operation_that_failed_on_ordinary_numbers_stands_for_itself(cause):
    found = folded([told("forward.nonfinite", severity="error"), told(cause)])
    assert faults(found) == ["forward.nonfinite", cause]


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_too_large_before_the_first_step_makes_any_rate_too_high(order):
    early = told("activation.exploding", stage="preflight")
    rate = told("optimizer.lr_too_high", stage="preflight")
    assert faults(folded([early, rate][::order])) == ["activation.exploding"]
    late = told("activation.exploding", step=40)
    assert faults(folded([late, rate][::order])) == ["optimizer.lr_too_high"]


def test_folding_what_is_folded_changes_nothing():
    found = folded([told("optimizer.lr_too_high"), told("training.diverging"), told("data.imbalance")])
    assert folded(found) == found
    assert faults(found) == ["optimizer.lr_too_high", "data.imbalance"]
