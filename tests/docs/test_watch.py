"""The page on watch: its examples run as they stand, one after the other."""

import re

import pytest
import torch
from installation import ROOT

PAGE = ROOT / "docs" / "watch.md"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")


def test_the_examples_run_and_are_sound(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    first, second = PYTHON.findall(PAGE.read_text(encoding="utf-8"))
    exec(compile(first, str(PAGE), "exec"), names)
    assert capsys.readouterr().out == "True []\n"
    losses = names["guard"].report.history["loss"]
    assert len(losses) == 50
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    before = [parameter.detach().clone() for parameter in names["model"].parameters()]
    exec(compile(second, str(PAGE), "exec"), names)
    assert names["guard"].report.findings == []
    assert not all(map(torch.equal, before, names["model"].parameters()))
    assert list(tmp_path.iterdir()) == [], "without a run_dir nothing is written"


def test_each_fault_of_the_table_is_one_that_the_rules_can_give():
    told = set(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    rules = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "safe_trainer" / "diagnosis").glob("*.py"))
    given = set(re.findall(r'(?:found\(\s*|FAULT = )"([a-z]+\.[a-z_]+)"', rules))
    assert told == given - {"training.diverging"}
