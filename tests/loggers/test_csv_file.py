import csv
import math

from safe_trainer.loggers import Csv


def read(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps_and(folder, name):
    return [(int(row["step"]), row[name]) for row in read(folder)]


def test_a_call_is_a_row(tmp_path):
    sink = Csv(folder=tmp_path)
    sink.log(1, {"train/loss": 0.1, "train/lr": 1e-3})
    sink.log(2, {"train/lr": 2e-3, "train/loss": math.inf})
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,time,train/loss,train/lr"
    assert steps_and(tmp_path, "train/loss") == [(1, "0.1"), (2, "inf")]  # readable before the sink is closed
    assert steps_and(tmp_path, "train/lr") == [(1, "0.001"), (2, "0.002")]
    sink.close()


def test_columns_grow_and_old_rows_have_empty_cells(tmp_path):
    sink = Csv(tmp_path)
    sink.log(1, {"train/loss": 0.5})
    sink.log(2, {'odd, "name"': 3.0})
    sink.log(3, {"train/loss": 0.25})
    sink.close()
    assert steps_and(tmp_path, "train/loss") == [(1, "0.5"), (2, ""), (3, "0.25")]
    assert steps_and(tmp_path, 'odd, "name"') == [(1, ""), (2, "3.0"), (3, "")]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_resumed_run_neither_doubles_nor_loses_a_row(tmp_path):
    killed = Csv(tmp_path)
    for step in range(1, 8):
        killed.log(step, {"train/loss": step / 2})
    killed.close()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("5,17")  # torn: it would read as a row of step 5
    resumed = Csv(tmp_path)
    resumed.truncate_after(5)
    resumed.log(6, {"train/loss": 3.0})
    resumed.log(7, {"train/loss": 3.5, "val/loss": 1.0})
    resumed.close()
    assert steps_and(tmp_path, "train/loss") == [(step, str(step / 2)) for step in range(1, 8)]


def test_a_reopened_table_keeps_the_order_of_its_columns(tmp_path):
    first = Csv(tmp_path)
    first.log(1, {"b": 1.0, "a": 2.0})
    first.close()
    second = Csv(tmp_path)
    second.log(2, {"a": 4.0, "b": 3.0})
    second.close()
    assert steps_and(tmp_path, "a") == [(1, "2.0"), (2, "4.0")]
    assert steps_and(tmp_path, "b") == [(1, "1.0"), (2, "3.0")]


def test_texts_are_left_out(tmp_path):
    sink = Csv(tmp_path)
    sink.text(1, "finding", "words")
    sink.close()
    assert list(tmp_path.iterdir()) == []
