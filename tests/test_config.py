"""The schema: every mistake at once, each with its key, what was got, what must hold and what was meant."""

import math

import pytest
from omegaconf import OmegaConf

from safe_trainer.config import Config, ConfigError, Interval, Nonfinite, OnFault, Precision, option_names, parse


def problems_of(values):
    with pytest.raises(ConfigError) as caught:
        parse(values)
    return caught.value.problems


@pytest.mark.preflight
def test_defaults_are_those_of_the_contract():
    config = parse({})
    assert (config.anomaly_detection, config.sample_rate) == (False, 100)
    assert (config.guard.enabled, config.guard.nonfinite) == (True, Nonfinite.stop)
    assert (config.monitor.every, config.preflight.enabled, config.preflight.budget_s) == (100, True, 60.0)
    assert (config.seed, config.on_fault, config.scheduler_interval) == (None, OnFault.stop, Interval.epoch)


def test_nested_and_dotted_keys_mean_the_same():
    dotted = parse({"guard.nonfinite": "skip", "guard.max_skips": 3, "max_steps": 7})
    nested = parse({"guard": {"nonfinite": "skip", "max_skips": 3}, "max_steps": 7})
    mixed = parse({"guard": {"nonfinite": "skip"}, "guard.max_skips": 3, "max_steps": 7})
    node = parse(OmegaConf.create({"guard": {"nonfinite": "skip", "max_skips": 3}, "max_steps": 7}))
    assert dotted == nested == mixed == node


def test_all_mistakes_are_told_at_once():
    found = problems_of(
        {
            "foo": 1,
            "max_epochs": "abc",
            "monitor.everi": 5,
            "guard.nonfinite": "halt",
            "sample_rate": 0,
            "anomaly.lr_jump": math.nan,
            "preflight": 3,
            "clip_norm": -1,
        }
    )
    assert len(found) == 8
    text = "\n".join(found)
    assert "foo is not an option (got 1)" in text
    assert "max_epochs must be a whole number, or null (got 'abc')" in text
    assert "did you mean monitor.every" in text
    assert "guard.nonfinite must be one of stop, skip, rollback (got 'halt')" in text
    assert "sample_rate must be at least 1 (got 0)" in text
    assert "anomaly.lr_jump must be greater than 1 (got nan)" in text
    assert "preflight must be a section" in text
    assert "clip_norm must be greater than 0, auto, or null (got -1.0)" in text


def test_a_key_without_its_section_is_found_again():
    (problem,) = problems_of({"budget_s": 10})
    assert "did you mean preflight.budget_s?" in problem


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip by norm or by value"),
        ({"ema_decay": 1.0}, "ema_decay must be between 0 and 1"),
        ({"seed": -1}, "seed must be from 0"),
        ({"name": "../elsewhere"}, "name must be a folder name"),
        ({"max_steps": True}, "max_steps must be a whole number"),
        ({"max_steps": 2.5}, "max_steps must be a whole number"),
        ({"precision": "fp8"}, "precision must be one of auto, fp32, bf16, fp16"),
        ({"preflight.checks": "data"}, "preflight.checks must be a list"),
        ({"loader.batch_size": 0}, "loader.batch_size must be at least 1"),
        ({"model": "resnet"}, "model must be a group"),
        ({1: 2}, "must be a string"),
    ],
)
def test_a_value_that_cannot_be_is_refused(values, words):
    assert words in "\n".join(problems_of(values))


def test_words_become_members_and_whole_numbers_become_floats():
    config = parse({"precision": "bf16", "clip_norm": 1, "scheduler_interval": "step"})
    assert (config.precision, config.clip_norm, config.scheduler_interval) == (Precision.bf16, 1.0, Interval.step)


@pytest.mark.parametrize(("setting", "expected"), [("true", (True, 1)), ("", (False, 100)), ("false", (False, 100))])
def test_the_environment_turns_anomaly_mode_on_at_every_step(monkeypatch, setting, expected):
    monkeypatch.setenv("DEBUG_ANOMALY", setting)
    config = parse({})
    assert (config.anomaly_detection, config.sample_rate) == expected


def test_a_wrong_word_in_the_environment_is_a_mistake_too(monkeypatch):
    monkeypatch.setenv("DEBUG_ANOMALY", "maybe")
    assert "DEBUG_ANOMALY in the environment must be true or false (got 'maybe')" in problems_of({})


def test_option_names_are_complete_and_dotted():
    names = list(option_names())
    assert {"max_steps", "guard.nonfinite", "preflight", "preflight.checks"} <= set(names)
    assert len(names) == len(set(names))
    assert Config() == parse(None)
