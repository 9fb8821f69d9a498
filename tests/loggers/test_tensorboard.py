import math
import subprocess
import sys
import threading
import time
import warnings

import pytest

from safe_trainer.loggers import TensorBoard

with warnings.catch_warnings():  # of the reader alone, which is only used here
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def curve(folder, tag):
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    sink = TensorBoard(folder=tmp_path)
    for step in (50, 100):
        sink.log(step, {"train/loss": 1 / step, "train/lr": 0.25})
    sink.log(100, {"val/accuracy": 0.75, "val/loss": math.inf})
    sink.close()
    assert read(tmp_path).Tags()["scalars"] == ["train/loss", "train/lr", "val/accuracy", "val/loss"]
    assert curve(tmp_path, "train/loss") == [(50, pytest.approx(1 / 50)), (100, pytest.approx(1 / 100))]
    assert curve(tmp_path, "train/lr") == [(50, 0.25), (100, 0.25)]
    assert curve(tmp_path, "val/accuracy") == [(100, 0.75)]
    assert curve(tmp_path, "val/loss") == [(100, math.inf)]


def test_a_text_is_shown_literally(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.text(7, "finding", "__init__ of *conv*\nsecond line")
    sink.close()
    (event,) = read(tmp_path).Tensors("finding/text_summary")
    assert event.step == 7
    assert event.tensor_proto.string_val[0].decode() == "    __init__ of *conv*\n    second line"


def test_a_resumed_run_shows_each_step_once(tmp_path):
    killed = TensorBoard(tmp_path)
    for step in range(1, 8):
        killed.log(step, {"train/loss": -1.0})
    killed.close()
    time.sleep(1.1)  # as a new process would: event files are read in the order of their names, which hold the second
    resumed = TensorBoard(tmp_path)
    resumed.truncate_after(5)
    for step in range(6, 10):
        resumed.log(step, {"train/loss": 1.0})
    resumed.close()
    assert curve(tmp_path, "train/loss") == [(step, -1.0 if step <= 5 else 1.0) for step in range(1, 10)]


def test_what_was_flushed_survives_a_kill(tmp_path):
    program = (
        "import os, signal; from safe_trainer.loggers import TensorBoard; from pathlib import Path\n"
        f"sink = TensorBoard(Path({str(tmp_path)!r}), flush_secs=1000)\n"
        "for step in range(100): sink.log(step, {'train/loss': 1.0})\n"
        "sink.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -9
    assert [step for step, _ in curve(tmp_path, "train/loss")] == list(range(100))


def test_a_disk_that_fails_later_costs_one_warning_and_no_more(tmp_path, caplog, monkeypatch):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def write(self, data):
        raise OSError("no space left on device")

    monkeypatch.setattr(threading, "excepthook", lambda failure: None)  # the writer's own thread dies with a traceback
    sink = TensorBoard(tmp_path)
    sink.log(0, {"train/loss": 1.0})
    sink.flush()
    monkeypatch.setattr(RecordWriter, "write", write)
    for step in range(1, 50):
        sink.log(step, {"train/loss": 1.0})
        sink.flush()
    sink.close()
    for thread in threading.enumerate():
        if type(thread).__name__ == "_AsyncWriterThread":
            thread.join(timeout=10)
    assert len(caplog.records) == 1
    assert "no space left" in caplog.text


def test_importing_the_sinks_does_not_import_tensorboard():
    program = "import sys, safe_trainer.loggers as l; l.TensorBoard(folder='.'); sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
