import json
import math

import pytest

from safe_trainer.loggers import JsonLines


def read(folder):
    text = (folder / "metrics.jsonl").read_text()
    return [
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON")) for line in text.splitlines()
    ]


def test_a_call_is_a_row(tmp_path):
    sink = JsonLines(folder=tmp_path)
    sink.log(50, {"train/loss": 0.1, "train/lr": 1e-3})
    sink.log(100, {"val/accuracy": 1})
    sink.text(100, "finding", 'two\nlines and a "quote" \ud800')  # a lone surrogate cannot be encoded as UTF-8
    first, second, third = read(tmp_path)  # readable before the sink is closed
    sink.close()
    assert {key: value for key, value in first.items() if key != "time"} == {
        "step": 50, "train/loss": 0.1, "train/lr": 0.001,
    }  # fmt: skip
    assert second["val/accuracy"] == 1.0
    assert (third["name"], third["text"]) == ("finding", 'two\nlines and a "quote" \ud800')
    assert first["time"] <= second["time"] <= third["time"]


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    sink = JsonLines(tmp_path)
    sink.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    sink.close()
    (row,) = read(tmp_path)
    assert (row["a"], row["b"], row["c"]) == ("NaN", "Infinity", "-Infinity")


def test_a_resumed_run_neither_doubles_nor_loses_a_row(tmp_path):
    values = {step: {"train/loss": 1 / step} for step in range(1, 31)}
    killed = JsonLines(tmp_path)
    for step in range(1, 26):  # the checkpoint is of step 20: five rows will come a second time
        killed.log(step, values[step])
    killed.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 26, "train/lo')  # killed in the middle of a row
    resumed = JsonLines(tmp_path)
    resumed.truncate_after(20)
    for step in range(21, 31):
        resumed.log(step, values[step])
    resumed.close()
    assert [(row["step"], row["train/loss"]) for row in read(tmp_path)] == [
        (step, row["train/loss"]) for step, row in values.items()
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_row_does_not_stick_to_a_torn_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    sink = JsonLines(tmp_path)
    sink.log(2, {})
    sink.close()
    assert [row["step"] for row in read(tmp_path)] == [1, 2]


def test_rows_of_one_step_are_kept_together(tmp_path):
    sink = JsonLines(tmp_path)
    for name in ("train/loss", "val/loss"):
        sink.log(10, {name: 1.0})
    sink.truncate_after(10)
    assert len(read(tmp_path)) == 2
    sink.truncate_after(9)
    assert read(tmp_path) == []
