import io
import logging
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

from safe_trainer import terminal
from safe_trainer.findings import CheckResult, Finding, Report
from safe_trainer.terminal import Progress, clock, show_start, verdict

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Clock:
    """A clock that goes on only when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def able_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # a dumb one, as in some CI systems, gets plain lines


@pytest.fixture
def tick(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(terminal, "monotonic", clock)
    return clock


def pipe():
    return Console(file=io.StringIO(), width=80, highlight=False)


def screen(width=80):
    return Console(file=io.StringIO(), width=width, force_terminal=True, highlight=False, color_system=None)


def text_of(console):
    """What was written, with a new line wherever the cursor was moved."""
    return re.sub(r"(\r|\x1b\[[0-9;?]*[a-zA-Z])+", "\n", console.file.getvalue())


def lines_of(console):
    return console.file.getvalue().splitlines()


def test_a_pipe_gets_one_line_a_row_with_pace_and_time_left(tick):
    console = pipe()
    with Progress(total_steps=400, total_epochs=4, console=console) as progress:
        tick.now += 10
        progress.advance(50, 0)
        progress.row(50, 0, {"train/loss": 0.51234, "train/lr": 0.01})
        tick.now += 10
        progress.row(100, 0, {"val/accuracy": 0.75})
    first, second = lines_of(console)
    assert first == "epoch 1/4  step  50  loss 0.5123    lr 0.01      5.0 step/s  1:10 left"
    assert second == "epoch 1/4  step 100  loss 0.5123    val/accuracy 0.75      5.0 step/s  1:00 left"


def test_a_pipe_is_not_flooded_and_the_last_row_is_not_lost(tick):
    console = pipe()
    with Progress(console=console) as progress:
        for step in range(1, 1001):  # 100 s of training, a row each 0.1 s
            tick.now += 0.1
            progress.advance(step, 0)
            progress.row(step, 0, {"train/loss": 1 / step})
    lines = lines_of(console)
    assert 10 <= len(lines) <= 12
    assert "step 1,000" in lines[-1]
    assert max(map(len, lines)) < 120


def test_each_evaluation_has_a_line_unless_they_rush(tick):
    console = pipe()
    with Progress(total_epochs=30, console=console) as progress:
        for epoch in range(10):
            tick.now += 2
            progress.row(epoch + 1, epoch, {"val/loss": 1.0})
        assert len(lines_of(console)) == 10
        for epoch in range(10, 30):
            tick.now += 0.01
            progress.row(epoch + 1, epoch, {"val/loss": 1.0})
    assert len(lines_of(console)) == 11
    assert lines_of(console)[-1].startswith("epoch 30/30")


def test_the_length_of_the_run_is_guessed_from_whole_epochs(tick):
    console = pipe()
    with Progress(total_epochs=4, console=console) as progress:
        tick.now += 10
        progress.row(100, 0, {"train/loss": 1.0})
        tick.now += 10
        progress.advance(200, 1)
        progress.row(200, 1, {"train/loss": 1.0})
    first, second = lines_of(console)
    assert "left" not in first
    assert second.endswith("10.0 step/s  1:00 left") or second.endswith("10 step/s  1:00 left")


def test_a_resumed_run_does_not_count_steps_it_did_not_do(tick):
    console = pipe()
    with Progress(total_steps=2000, first_step=1000, console=console) as progress:
        tick.now += 10
        progress.row(1010, 3, {"train/loss": 1.0})
    assert "1.0 step/s  16:30 left" in console.file.getvalue()


def test_nothing_is_printed_when_it_is_not_shown():
    for console in (pipe(), screen()):
        with Progress(shown=False, console=console) as progress:
            for step in range(100):
                progress.advance(step, 0)
            progress.row(1, 0, {"val/loss": 1.0})
            progress.note("a note")
        assert console.file.getvalue() == ""


def test_a_terminal_gets_a_live_bar_and_keeps_the_evaluations(tick):
    console = screen()
    with Progress(total_steps=200, total_epochs=2, console=console) as progress:
        for step in range(1, 201):
            tick.now += 0.05
            progress.advance(step, (step - 1) // 100)
            if step % 50 == 0:
                progress.row(step, (step - 1) // 100, {"train/loss": 1 / step, "train/lr": 0.1})
            if step % 100 == 0:
                progress.row(step, (step - 1) // 100, {"val/accuracy": 0.5})
    text = text_of(console)
    assert "━" in text
    assert "20 step/s  0:05 left" in text
    assert text.count("epoch 1/2  step 100  loss 0.01      val/accuracy 0.5") == 1
    end = text.rstrip().splitlines()[-2:]
    assert end[0].startswith("epoch 2/2  ━")
    assert end[0].endswith("200/200  20 step/s")
    assert end[1].split() == ["loss", "0.005", "lr", "0.1", "val/accuracy", "0.5"]


def test_the_last_frame_shows_the_last_step(tick):
    console = screen()
    with Progress(total_steps=100, total_epochs=2, console=console) as progress:
        for step in range(1, 101):  # within a tenth of a second: no frame in between is due
            progress.advance(step, (step - 1) // 50)
    assert text_of(console).rstrip().splitlines()[-1].startswith("epoch 2/2  ━")
    assert "100/100" in text_of(console)


@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_no_frame_is_wider_than_the_terminal(tick, width):
    console = screen(width)
    with Progress(total_steps=10**9, total_epochs=1000, console=console) as progress:
        for step in range(3):
            tick.now += 1
            progress.advance(10**8 + step, 0)
            progress.row(10**8 + step, 0, {f"train/some_long_name_{i}": 1e-10 for i in range(9)})
    assert max(map(len, text_of(console).splitlines())) <= width


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_terminal_is_given_back_whatever_happens(error):
    console, streams = screen(), (sys.stdout, sys.stderr)
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(handler)

    def train():
        with Progress(console=console) as progress:
            progress.advance(1, 0)
            assert sys.stdout is not streams[0]
            print("a print of the user's")
            logging.getLogger().warning("a line of the log")
            raise error

    try:
        with pytest.raises(error):
            train()
        assert handler.stream is streams[0]
    finally:
        logging.getLogger().removeHandler(handler)
    assert (sys.stdout, sys.stderr) == streams
    written = console.file.getvalue()
    assert written.rindex(SHOW_CURSOR) > written.rindex(HIDE_CURSOR)
    assert "a print of the user's" in text_of(console)
    assert "a line of the log" in text_of(console)


@pytest.mark.parametrize("terminal_too", [True, False])
def test_a_closed_pipe_does_not_stop_the_run(tick, caplog, terminal_too):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    streams = (sys.stdout, sys.stderr)
    with Progress(console=terminal.Screen(file=Closed(), force_terminal=terminal_too)) as progress:
        for step in range(50):
            tick.now += 1
            progress.advance(step, 0)
            progress.row(step, 0, {"val/loss": 1.0})
            progress.note("a note")
    assert (sys.stdout, sys.stderr) == streams
    assert len(caplog.records) == 1
    assert "BrokenPipeError" in caplog.text


def test_a_slow_terminal_is_drawn_to_less_often(tick):
    class Slow(io.StringIO):
        frames = 0

        def write(self, text):
            self.frames += 1
            tick.now += 0.05  # a frame takes 50 ms: at ten a second half the time would go
            return len(text)

    file = Slow()
    with Progress(total_steps=1000, console=Console(file=file, force_terminal=True)) as progress:
        started = file.frames
        training = 0.0
        for step in range(1000):
            training += 0.1
            tick.now += 0.1
            progress.advance(step, 0)
        drawing = (file.frames - started) * 0.05
    assert 0 < drawing <= 0.02 * training


def test_a_step_costs_next_to_nothing():
    with Progress(console=pipe()) as progress:
        batches = []
        for _ in range(5):
            start = time.perf_counter()
            for step in range(10_000):
                progress.advance(step, 0)
            batches.append((time.perf_counter() - start) / 10_000)
    assert min(batches) < 5e-6  # 0.15 us measured; the bound leaves room for a busy machine


def test_notes_and_names_are_taken_literally(tick):
    console = pipe()
    with Progress(console=console) as progress:
        progress.note("[bold]x[/nothing] \x1b[2J")
        progress.row(1, 0, {"val/[red]": 1.0})
    assert lines_of(console)[0] == "[bold]x[/nothing] \N{REPLACEMENT CHARACTER}[2J"
    assert "val/[red] 1" in lines_of(console)[1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (750, "12:30"), (11100, "3:05:00"), (187800, "2 d 04:10")],
)
def test_the_clock(seconds, words):
    assert clock(seconds) == words


def test_the_start_shows_facts_and_layers():
    console, path = pipe(), Path("runs") / ("long" * 40)
    show_start({"run": "digits", "folder": path}, nn.Sequential(nn.Linear(2, 2)), console)
    lines = lines_of(console)
    assert lines[-2:] == ["run     digits", f"folder  {path}"]  # unbroken, so that it can be copied
    assert any("Linear" in line for line in lines)


def finding(severity, number=0):
    return Finding(
        fault="activation.dead", severity=severity, stage="training", where=f"features.{number}", step=12,
        evidence="97 % [bold]never[/x] fire", cause="the rate", remedy="lower it", source="model.py:42",
        symptoms=("training.not_decreasing",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("severities", "sentence"),
    [
        ((), "The run finished and nothing was found wrong."),
        (("info",), "The run finished and nothing was found wrong."),
        (("warning",), "The run finished, with 1 warning."),
        (("warning", "error", "warning"), "Do not trust this run: 1 error and 2 warnings."),
    ],
)
def test_the_verdict_is_one_sentence(severities, sentence):
    console = pipe()
    verdict(Report(findings=[finding(severity) for severity in severities]), console=console)
    assert sentence in lines_of(console)
    verdict(Report(), sentence="Stopped by Ctrl-C.", console=console)
    assert "Stopped by Ctrl-C." in lines_of(console)


def test_the_verdict_shows_figures_checks_findings_and_the_folder():
    console, path = pipe(), Path("runs") / ("long" * 40)
    checks = [CheckResult(name="data", status=status) for status in ("pass", "pass", "skip")]
    report = Report(findings=[finding("error")], metrics={"val/accuracy": 0.98761}, checks=checks, path=path)
    verdict(report, console=console)
    text = console.file.getvalue()
    for part in (
        "preflight: 2 passed, 1 skipped",
        "val/accuracy  0.9876",
        "error: activation.dead in features.0, step 12, model.py:42",
        "evidence  97 % [bold]never[/x] fire",
        "remedy    lower it",
        "explains  training.not_decreasing",
        f"folder  {path}",
    ):
        assert part in text


def test_many_findings_are_cut_short_with_a_count():
    console = pipe()
    verdict(Report(findings=[finding("warning", number) for number in range(25)]), console=console)
    assert console.file.getvalue().count("warning: activation.dead") == terminal.FINDINGS_SHOWN
    assert "... and 15 more findings" in lines_of(console)


def test_standard_output_is_the_default(capsys):
    with Progress() as progress:
        progress.row(1, 0, {"val/loss": 1.0})
    verdict(Report())
    show_start({"run": "digits"})
    out, err = capsys.readouterr()
    assert all(words in out for words in ("val/loss 1", "nothing was found wrong", "run  digits"))
    assert err == ""
