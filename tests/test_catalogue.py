"""The catalogue holds every fault that the code can name, and the pages made from it are current."""

import re
from pathlib import Path

import pytest

from safe_trainer import debugging
from safe_trainer.catalogue import CATALOGUE

ROOT = Path(__file__).parents[1]
GROUPS = "data|model|init|loss|gradient|activation|forward|optimizer|training|memory|precision"
ID = re.compile(rf"[\"']((?:{GROUPS})\.[a-z][a-z_]*)[\"']")


def code():
    for folder in ("safe_trainer", "utils"):
        for path in (ROOT / folder).rglob("*.py"):
            yield path, path.read_text(encoding="utf-8")


def test_every_fault_that_the_code_names_is_in_the_catalogue():
    named = {name for _, text in code() for name in ID.findall(text)}
    assert named <= set(CATALOGUE)


def test_what_is_said_to_be_live_is_named_by_the_code_and_the_other_way_round():
    elsewhere = {
        name for path, text in code() if path.name not in ("catalogue.py", "debugging.py", "causes.py")
        for name in ID.findall(text)
    }  # fmt: skip
    live = {name for name, fault in CATALOGUE.items() if fault.live}
    assert live == elsewhere


def test_the_tables_point_at_entries():
    for row in (*debugging.BUGS, *debugging.SYMPTOMS):
        assert set(row.faults) <= set(CATALOGUE), row
    names = {fork.name for fork in debugging.TREE}
    reached = {target for fork in debugging.TREE for _, target in fork.answers}
    assert names - reached == {"loss"}
    leaves = " ".join(target for target in reached if target not in names)
    assert set(re.findall(rf"(?:{GROUPS})\.[a-z_]+", leaves)) <= set(CATALOGUE)


@pytest.mark.parametrize("fault", CATALOGUE.values(), ids=list(CATALOGUE))
def test_an_entry_is_whole(fault):
    assert fault.title
    assert not fault.title.endswith(".")
    assert fault.established
    assert fault.causes
    assert fault.remedies


def test_the_pages_are_current():
    import importlib.util

    spec = importlib.util.spec_from_file_location("make_faults", ROOT / "docs" / "make_faults.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.main(["--check"]) == 0, "run: make docs"
