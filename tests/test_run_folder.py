import json
import subprocess
import time
from datetime import datetime
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from safe_trainer import run_folder
from safe_trainer.config import ConfigError, parse
from safe_trainer.run_folder import git_state, mask_command, new_run_folder, save_start, use_run_folder


def saved(folder):
    return yaml.safe_load((folder / "config.yaml").read_text()), json.loads((folder / "environment.json").read_text())


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_a_run_folder_is_named_after_the_run_and_its_start(tmp_path):
    folder = new_run_folder(tmp_path / "runs", "digits")
    assert folder.is_dir()
    assert folder.parent == tmp_path / "runs" / "digits"
    assert abs(datetime.now() - datetime.strptime(folder.name, "%Y-%m-%d_%H-%M-%S")).total_seconds() < 60


def test_runs_that_start_in_one_second_get_folders_of_their_own(tmp_path):
    folders = [new_run_folder(tmp_path, "digits") for _ in range(5)]
    assert len(set(folders)) == 5
    assert sorted(folders) == folders or folders[0].name[:19] != folders[-1].name[:19]


@pytest.mark.parametrize("make", [lambda path: new_run_folder(path, "digits"), use_run_folder])
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, make):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        make(tmp_path / "file")
    (problem,) = caught.value.problems
    assert problem.startswith("run_dir must be a folder that can be written")
    assert str(tmp_path / "file") in problem


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "config.yaml").mkdir()  # the superuser may write anywhere, but not over a folder
    with pytest.raises(ConfigError, match="run_dir must be a folder that can be written"):
        save_start(tmp_path, {}, [])


def test_a_given_folder_may_exist(tmp_path):
    assert use_run_folder(tmp_path / "a" / "b") == use_run_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"


def test_the_saved_config_is_the_config(tmp_path):
    given = {"max_steps": 3, "on_fault": "report", "model": {"_target_": "torch.nn.Linear", "in_features": 2}}
    config = parse({**given, "loader.batch_size": 8, "clip_norm": 0.5})
    save_start(tmp_path, config, ["prog"])
    written, _ = saved(tmp_path)
    assert written["on_fault"] == "report"
    assert written["sample_rate"] == 100  # a default
    assert parse(written) == config


def test_any_mapping_can_be_saved(tmp_path):
    color = Enum("color", {"red": "red"})
    below = {"path": Path("x"), "steps": (1, 2)}
    mapping = {"c": np.float64(0.5), "b": color.red, "a": below, "rate": 0.1, "none": None, "on": True}
    save_start(tmp_path, mapping, [])
    written, _ = saved(tmp_path)
    plain = {"path": "x", "steps": [1, 2]}
    assert written == {"c": 0.5, "b": "red", "a": plain, "rate": 0.1, "none": None, "on": True}
    assert list(written) == list(mapping)
    save_start(tmp_path, OmegaConf.create({"a": 1, "b": "${a}"}), [])
    assert saved(tmp_path)[0] == {"a": 1, "b": 1}


def test_the_environment_says_what_a_result_depends_on(tmp_path, monkeypatch):
    monkeypatch.setenv("DEBUG_ANOMALY", "false")
    monkeypatch.setenv("SOME_PASSWORD", "hunter2")
    save_start(tmp_path, {}, ["python", "-m", "safe_trainer", "name=two words"])
    text = (tmp_path / "environment.json").read_text()
    environment = json.loads(text)
    assert environment["command"] == "python -m safe_trainer 'name=two words'"
    assert environment["packages"]["torch"].startswith("2.")
    assert environment["packages"].keys() >= {"torch", "torchvision", "numpy", "hydra-core", "omegaconf"}
    assert environment["cpus"] >= 1
    assert environment["environment"]["DEBUG_ANOMALY"] == "false"
    assert set(environment["environment"]) <= set(run_folder.VARIABLES)
    assert "hunter2" not in text
    assert datetime.fromisoformat(environment["time"]).tzinfo is not None


def test_a_second_start_in_the_same_folder_keeps_the_first(tmp_path):
    for word in ("one", "two", "three"):
        save_start(tmp_path, {}, [word])
    _, environment = saved(tmp_path)
    assert environment["command"] == "three"
    assert [start["command"] for start in environment["earlier"]] == ["one", "two"]
    (tmp_path / "environment.json").write_text("[]")
    save_start(tmp_path, {}, ["four"])
    assert saved(tmp_path)[1]["earlier"] == []


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("api_key=abc", "api_key=***"),
        ("+logger.wandb.api_key=abc=def", "+logger.wandb.api_key=***"),
        ("some_key=abc", "some_key=***"),
        ("token=abc", "token=***"),
        ("data.hf_token='a b'", "data.hf_token=***"),
        ("DB_PASSWORD=a,b [c]", "DB_PASSWORD=***"),
        ("--api-key=abc", "--api-key=***"),
        ("+logger.x={api_key: abc, mode: offline}", "+logger.x={api_key: ***"),
        ("data.url=https://me:abc@host/x", "data.url=https://me:***@host/x"),
        ("data.url=https://host/x?token=abc", "data.url=https://host/x?token=***"),
        ("model.pad_token=<pad>", "model.pad_token=<pad>"),
        ("model.num_tokens=512", "model.num_tokens=512"),
        ("monkey=1", "monkey=1"),
        ("optimizer.lr=0.1", "optimizer.lr=0.1"),
        ("data.root=C:/x", "data.root=C:/x"),
    ],
)
def test_secrets_on_the_command_line_are_masked(word, shown):
    assert mask_command(["prog", word, "seed=1"]) == ["prog", shown, "seed=1"]


def test_a_secret_in_a_word_of_its_own_is_masked():
    assert mask_command(["prog", "--token", "abc", "--lr", "0.1"]) == ["prog", "--token", "***", "--lr", "0.1"]


def test_secrets_in_the_config_are_masked_and_options_are_not(tmp_path):
    options = {"image_key": "jpg", "pad_token": "<pad>", "num_tokens": 8, "token": True, "password": None}
    secrets = {"api_key": "abc", "token": "abc", "any_key": "0123456789abcdef", "password": "abc"}
    save_start(tmp_path, {"data": options, "logger": {"wandb": secrets}, "logger.wandb.api_key": "abc"}, [])
    written, _ = saved(tmp_path)
    assert written["data"] == options
    assert set(written["logger"]["wandb"].values()) == {"***"}
    assert written["logger.wandb.api_key"] == "***"


def test_the_git_state_is_that_of_the_working_folder(tmp_path):
    assert git_state(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "model.py").write_text("a = 1\n")
    git(tmp_path, "add", "model.py")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "notes.txt").write_text("untracked")
    (tmp_path / "below").mkdir()
    clean = git_state(tmp_path / "below")
    assert len(clean["commit"]) == 40
    assert clean["changed"] is False
    (tmp_path / "model.py").write_text("a = 2\n")
    assert git_state(tmp_path) == {"commit": clean["commit"], "changed": True}


def test_a_machine_without_git_or_with_a_slow_one_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "GIT_SECONDS", 0.1)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    (tmp_path / "git").chmod(0o755)
    start = time.monotonic()
    assert git_state(tmp_path) is None
    assert time.monotonic() - start < 10
