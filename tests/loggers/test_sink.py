import logging
import math

import pytest

from safe_trainer.loggers import Csv, JsonLines, Sink, TensorBoard
from safe_trainer.loggers.sink import Trouble, as_row, drop_torn_line, replace_lines

SINKS = (JsonLines, Csv, TensorBoard)


@pytest.mark.parametrize("kind", SINKS)
def test_every_sink_has_the_whole_interface(kind, tmp_path):
    sink: Sink = kind(folder=tmp_path)
    sink.flush()
    sink.close()
    assert list(tmp_path.iterdir()) == []  # nothing is opened before the first row
    sink.truncate_after(3)
    sink.log(4, {"train/loss": 0.5})
    sink.text(4, "finding", "a text")
    sink.flush()
    sink.close()
    sink.close()
    assert list(tmp_path.iterdir()) != []


@pytest.mark.parametrize("kind", SINKS)
def test_a_folder_that_is_gone_costs_one_warning_and_no_more(kind, tmp_path, caplog):
    (tmp_path / "file").write_text("where the folder should be")
    sink = kind(folder=tmp_path / "file")
    for step in range(3):
        sink.log(step, {"train/loss": 0.5})
        sink.text(step, "finding", "a text")
    sink.flush()
    sink.truncate_after(1)
    sink.log(9, {"train/loss": 0.5})
    sink.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "training goes on" in caplog.text


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_full_disk_costs_one_warning_and_no_more(kind, tmp_path, caplog):
    sink = kind(folder=tmp_path)
    sink.log(0, {"train/loss": 0.5})
    sink.file.close()
    sink.file = open("/dev/full", "w", buffering=1)  # noqa: SIM115  every write to it fails: no space left on device
    for step in range(1, 4):
        sink.log(step, {"train/loss": 0.5})
    sink.close()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_trouble_lets_an_interrupt_pass():
    trouble = Trouble("a sink")
    with pytest.raises(KeyboardInterrupt), trouble.contained():
        raise KeyboardInterrupt
    assert not trouble.met


def test_a_mistake_of_the_caller_is_not_taken_for_a_dead_disk(tmp_path):
    with pytest.raises(TypeError):
        JsonLines(tmp_path).log(1, {"train/loss": object()})


def test_a_row_keeps_values_that_are_called_like_its_own_keys():
    row = as_row(7, {"step": 1.0, "time": 2.0, "text": 3, "loss": math.inf})
    assert row["step"] == 7
    assert row["time"] > 1e9
    assert (row["step_"], row["time_"], row["text_"], row["loss"]) == (1.0, 2.0, 3.0, math.inf)


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("a\n", "a\n"), ("a\nb", "a\n"), ("torn", ""), ("a\n" + "b" * 200_000, "a\n"), ("a\n\n", "a\n\n")],
)
def test_a_torn_last_line_is_dropped(tmp_path, before, after):
    path = tmp_path / "log"
    path.write_text(before)
    drop_torn_line(path)
    assert path.read_text() == after


def test_a_rewrite_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "log"
    path.write_text("old\n")

    def lines():
        yield "new\n"
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        replace_lines(path, lines())
    assert path.read_text() == "old\n"
