"""The recipes page: its files and commands, copied into an empty folder, do what the page says."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from installation import ROOT, run

PAGE = ROOT / "docs" / "recipes.md"
FILE = re.compile(r"^`((?:wine|conf)/[\w/]+\.\w+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")


def files() -> dict[str, str]:
    return dict(FILE.findall(PAGE.read_text(encoding="utf-8")))


def commands() -> list[str]:
    return [line for block in SHELL.findall(PAGE.read_text(encoding="utf-8")) for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with the page's files."""
    for name, text in files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def follow(python: Path | str, lines: list[str], folder: Path, *extra: str, **environment: str) -> list[str]:
    """Run the lines in order; what each printed."""
    printed = []
    for line in lines:
        interpreter, *words = shlex.split(line)
        assert interpreter == "python"
        done = run([str(python), *words, *extra], cwd=folder, **environment)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        printed.append(done.stdout)
    return printed


def test_the_page_has_the_files_and_commands_that_are_tested() -> None:
    assert list(files()) == [
        "wine/model.py",
        "wine/data.py",
        "wine/task.py",
        "conf/recipe/wine.yaml",
        "conf/scheduler/linear.yaml",
        "conf/recipe/wine_wide.yaml",
    ]
    assert len(commands()) == 12
    assert all(text.startswith("# @package _global_\n") for name, text in files().items() if name.startswith("conf/"))


def test_the_worked_example_trains_two_steps_and_a_slip_is_told(folder: Path) -> None:
    first = next(line for line in commands() if line.endswith("+recipe=wine"))
    follow(sys.executable, [first], folder, "max_steps=2", "run_dir=here", PYTHONPATH=str(ROOT))
    last = rows(folder / "here" / "metrics.jsonl")[-1]
    assert {"train/class_loss", "train/rebuilding", "val/class_loss", "val/accuracy"} <= set(last)
    done = run([sys.executable, *shlex.split(first)[1:], "model.widht=3"], cwd=folder, PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert "did you mean model.width?" in done.stderr


def whole_page(python: Path, folder: Path) -> None:
    """Every command of the page, in order, and what the page says about them."""
    printed = dict(zip(commands(), follow(python, commands(), folder), strict=True))
    listed = printed["python -m safe_trainer --config-dir conf mode=recipes"]
    for name in ("digits", "wine", "wine_wide"):
        assert f"+recipe={name}\n" in listed or f"+recipe={name} " in listed
    (figures,) = (row for row in rows(next((folder / "runs" / "wine").glob("*/metrics.jsonl")))[-1:])
    assert figures["val/accuracy"] >= 0.9
    steps = [row["step"] for row in rows(folder / "mine" / "metrics.jsonl")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 60
    assert len(list((folder / "runs" / "wine").glob("sweep_*/*/metrics.jsonl"))) == 2


@pytest.mark.slow
def test_a_stranger_with_the_wheel_can_follow_the_page(installed: Path, folder: Path) -> None:
    whole_page(installed, folder)
