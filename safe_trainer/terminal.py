"""What a run shows on the terminal: its start, the model's layers, progress, the verdict. Prints; keeps no files.

A terminal gets a live bar; a pipe or a CI log gets plain lines, few of them. Whatever is printed is taken literally:
names of layers and texts of findings are never read as markup, nor may they carry control characters.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from time import monotonic
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import nn

from safe_trainer.findings import CheckResult, Finding, Report, Severity, Status
from safe_trainer.loggers.sink import Trouble
from safe_trainer.model_summary import literal, model_summary

FRAME_SECONDS = 0.1
"""Shortest time between two frames: more often than ten times a second looks no smoother."""
FRAME_SHARE = 0.01
"""Greatest share of the run's time that drawing may take: a slow terminal is drawn to less often, not waited for."""
LINE_SECONDS = 10.0
"""Shortest time between two plain lines about training: a CI log of an hour then stays below 400 lines."""
EVALUATION_LINE_SECONDS = 1.0
"""Shortest time between two lines about evaluations, for runs whose epochs last milliseconds."""
WINDOW_SAMPLES = 60
"""Speed is measured over so many half seconds: long enough to take in the pauses of an evaluation."""
FINDINGS_SHOWN = 10
"""Most findings that the verdict prints in full; all are in the report."""

COLORS = {Severity.error: "red", Severity.warning: "yellow", Severity.info: "cyan"}


class Screen(Console):
    """Standard output for rich, except that a pipe closed at its other end (``| head``) does not end the program."""

    def on_broken_pipe(self) -> None:
        """Print nothing more, wherever it comes from, and let the caller know; rich would exit here."""
        if self.file is sys.__stdout__:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        self.quiet = True
        raise BrokenPipeError("the reader of the pipe is gone")


class Progress:
    """Progress of training, to be used in a ``with`` statement, which leaves the terminal as it was, come what may.

    Steps are counted as steps done, over the whole run; epochs as the loop counts them, from 0, and shown from 1.
    Nothing is shown if `shown` is false. A terminal that goes away (a closed pipe) is given up with one warning.

    Args:
        total_steps: steps of the whole run; None if not known, then they are guessed from the epochs that are done.
        total_epochs: epochs of the whole run; None if it is bounded by steps alone.
        first_step: steps done before this process took over, for a run that is resumed.
        console: where to print; None takes standard output.
    """

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        total_epochs: int | None = None,
        first_step: int = 0,
        shown: bool = True,
        console: Console | None = None,
    ) -> None:
        self.total_steps, self.total_epochs = total_steps, total_epochs
        self.console = console or Screen(highlight=False)
        self.shown = shown
        self.step, self.epoch, self.epoch_start = first_step, 0, first_step
        self.last: tuple[int, int] | None = None
        self.values: dict[str, float] = {}
        self.samples: deque[tuple[float, int]] = deque(maxlen=WINDOW_SAMPLES)
        self.live: Live | None = None
        self.due = math.inf
        self.line_due = self.evaluation_due = 0.0
        self.held_back: tuple[int, int, dict[str, float]] | None = None
        self.trouble = Trouble("the progress display")
        self.undo = ExitStack()

    def __enter__(self) -> Progress:
        """Start the clock, and the live bar if there is a terminal."""
        self.samples.append((monotonic(), self.step))
        if self.shown:
            self.due = 0.0
            if self.console.is_terminal and not self.console.is_dumb_terminal:
                with self.trouble.contained():
                    self._start_live()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Print what was held back, stop the bar and give the cursor back."""
        with self.trouble.contained(), self.undo:
            if self.shown and not self.trouble.met:
                self._print_held_back()
                if self.last is not None:
                    self._move(*self.last)
        self.shown, self.due = False, math.inf

    def advance(self, step: int, epoch: int) -> None:
        """Note that `step` steps are done; called after each, it does nothing but look at the clock in most of them."""
        self.last = (step, epoch)
        if monotonic() >= self.due:
            self._tick(step, epoch)

    def row(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Show a row of the log: train/loss, train/lr and so on, or the figures of an evaluation (val/...)."""
        if not self.shown or self.trouble.met:
            return
        self.last = (step, epoch)
        self._move(step, epoch)
        self.values.update(values)
        evaluation = any(not name.startswith("train/") for name in values)
        if evaluation and "train/loss" in self.values:
            values = {"train/loss": self.values["train/loss"], **values}
        with self.trouble.contained():
            self._line(values, evaluation)

    def note(self, text: str) -> None:
        """Print a sentence that stays, above the bar if there is one."""
        if self.shown and not self.trouble.met:
            with self.trouble.contained():
                self.console.print(Text(literal(text)), soft_wrap=True)

    def _start_live(self) -> None:
        """Take the end of the screen for the bar; what others print goes above it until the end."""
        stdout, stderr = sys.stdout, sys.stderr
        self.live = Live(
            console=self.console,
            auto_refresh=False,  # no second thread: it would take the interpreter from the loop when it likes
            get_renderable=self._frame,
            redirect_stderr=sys.stderr.isatty(),  # else `2>errors.txt` would find its text on the screen
        )
        self.undo.callback(self.live.stop)
        self.live.start()
        self.undo.enter_context(_redirected_logging(stdout, stderr))

    def _tick(self, step: int, epoch: int) -> None:
        """Draw a frame, and put off the next one long enough to stay within the share of time."""
        self._move(step, epoch)
        start = monotonic()
        if self.live is not None and not self.trouble.met:
            with self.trouble.contained():
                self.live.refresh()
        spent = monotonic() - start
        self.due = math.inf if self.trouble.met else start + max(FRAME_SECONDS, spent / FRAME_SHARE)

    def _move(self, step: int, epoch: int) -> None:
        """Take in where the run is by now."""
        if epoch != self.epoch:
            self.epoch_start = step
        self.step, self.epoch = step, epoch
        now = monotonic()
        if now - self.samples[-1][0] >= 0.5 or len(self.samples) == 1:
            self.samples.append((now, step))

    def _line(self, values: Mapping[str, float], evaluation: bool) -> None:
        """Print a line about a row now, or keep it for the end if the last one was printed a moment ago."""
        if self.live is not None and not evaluation:
            return  # the bar shows it
        now = monotonic()
        if now < (self.evaluation_due if evaluation else self.line_due):
            self.held_back = (self.step, self.epoch, dict(values))
            return
        self.held_back = None
        self.line_due = now + LINE_SECONDS
        if evaluation:
            self.evaluation_due = now + EVALUATION_LINE_SECONDS
        self.console.print(self._row_text(values), soft_wrap=True)

    def _print_held_back(self) -> None:
        if self.held_back is not None:
            step, epoch, values = self.held_back
            self._move(step, epoch)
            self.console.print(self._row_text(values), soft_wrap=True)

    def _row_text(self, values: Mapping[str, float]) -> Text:
        """A row as one line: where the run is, the figures, and in a pipe how fast it goes."""
        total = self._total()
        width = len(f"{total:,}") if total else 0
        line = Text(f"{self._epoch_text()}  ")
        line.append(f"step {self.step:>{width},}", "dim")
        for name, value in values.items():
            line.append(f"  {short(name)} ", "dim").append(f"{value:<8.4g}")
        if self.live is None:
            line.append("  ".join(["", *self._pace()]))
        line.rstrip()
        return line

    def _frame(self) -> RenderableType:
        """The live bar: one line of progress, one or two of figures."""
        total, pace = self._total(), "  ".join(self._pace())
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        steps = f"{self.step:,}/{total:,}" if total else f"step {self.step:,}"
        drawn = ProgressBar(total=total, completed=self.step) if total else ""
        bar.add_row(Text(self._epoch_text(), "bold"), drawn, Text(f"{steps}  {pace}"))
        return Group(bar, *_figure_lines(self.values, self.console.width)[:2])

    def _epoch_text(self) -> str:
        """``epoch  3/20``."""
        last = self.total_epochs
        shown = self.epoch + 1 if last is None else min(self.epoch + 1, last)
        return f"epoch {shown:>{len(str(last))}}/{last}" if last else f"epoch {shown}"

    def _total(self) -> int | None:
        """Steps of the whole run, as given or as the epochs so far let guess."""
        if self.total_steps is None and self.total_epochs and self.epoch > 0:
            return round(self.epoch_start / self.epoch * self.total_epochs)
        return self.total_steps

    def _pace(self) -> list[str]:
        """Steps a second over the last half minute, and the time left at this pace."""
        (since, first), now = self.samples[0], monotonic()
        if self.step <= first or now <= since:
            return []
        rate, total = (self.step - first) / (now - since), self._total()
        speed = f"{rate:,.0f} step/s" if rate >= 10 else f"{rate:.1f} step/s" if rate >= 1 else f"{1 / rate:.1f} s/step"
        return [speed, f"{clock((total - self.step) / rate)} left"] if total and total > self.step else [speed]


class Checklist:
    """The preflight's checks as they are made: on a terminal the one that runs is shown too, elsewhere a line each."""

    def __init__(self, shown: bool = True, console: Console | None = None) -> None:
        self._shown = shown
        self._console = console or Screen(highlight=False)
        self._spinner: Any = None

    def __enter__(self) -> Checklist:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def tell(self, name: str, result: CheckResult | None) -> None:
        """A check begins, or has ended with this result."""
        if not self._shown:
            return
        with Trouble("the terminal").contained():
            self._stop()
            if result is not None:
                self._console.print(_check_line(result))
            elif self._console.is_terminal:
                self._spinner = self._console.status(Text(f"preflight: {name}"))
                self._spinner.start()

    def _stop(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None


STATUS_COLORS = {Status.passed: "green", Status.warned: "yellow", Status.failed: "red", Status.skipped: "dim"}


def _check_line(result: CheckResult) -> RenderableType:
    """Status, name, seconds, what was found and the evidence of a check, wrapped beside the others."""
    alarms = "".join(f"{finding.headline()}; " for finding in result.findings if finding.is_alarm)
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=4)
    line.add_column(width=13)
    line.add_column(width=7, justify="right")
    line.add_column(overflow="fold")
    line.add_row(
        Text(result.status.value, STATUS_COLORS[result.status]),
        Text(literal(result.name)),
        Text(f"{result.seconds:.1f} s", "dim"),
        Text.assemble((literal(alarms), "bold"), literal(result.evidence)),
    )
    return line


def show_start(
    facts: Mapping[str, object],
    model: nn.Module | None = None,
    console: Console | None = None,
    shapes: Mapping[str, str] | None = None,
) -> None:
    """Print the layers of `model`, then what the run is (its name, data, device, folder ...) as one line each.

    Args:
        shapes: what each layer puts out, where that is known.
    """
    console = console or Screen(highlight=False)
    width = max((len(label) for label in facts), default=0)
    with Trouble("the terminal").contained():
        if model is not None:
            console.print(model_summary(model, shapes))
        for label, fact in facts.items():
            line = Text.assemble((f"{label:<{width}}  ", "dim"), literal(str(fact)))
            console.print(line, soft_wrap=True)  # unbroken, so that a path can be copied


def verdict(report: Report, sentence: str | None = None, console: Console | None = None) -> None:
    """Print how the run ended: one sentence, the final figures, the findings, the folder.

    Args:
        report: the run's outcome.
        sentence: how it ended, if that is not told by the findings (as when it was interrupted).
        console: where to print; None takes standard output.
    """
    with Trouble("the terminal").contained():
        _print_verdict(report, sentence or _sentence(report), console or Screen(highlight=False))


def _print_verdict(report: Report, sentence: str, console: Console) -> None:
    worst = report.findings[0].severity if report.findings else Severity.info
    color = COLORS[worst] if worst is not Severity.info else "green"
    console.print(Rule(style=color, characters="-" if console.options.ascii_only else "─"))
    console.print(Text(literal(sentence), f"bold {color}"))
    if report.checks:
        console.print(Text(f"preflight: {_check_counts(report.checks)}"))
    if report.metrics:
        console.print("", _metrics_table(report.metrics), sep="\n")
    for finding in report.findings[:FINDINGS_SHOWN]:
        console.print("", _finding_block(finding), sep="\n")
    if len(report.findings) > FINDINGS_SHOWN:
        console.print(Text(f"\n... and {len(report.findings) - FINDINGS_SHOWN} more findings"))
    console.print(Text.assemble(("\nfolder  ", "dim"), literal(str(report.path))), soft_wrap=True)


def show_figures(figures: Mapping[str, float], title: str, console: Console | None = None) -> None:
    """Print the figures of an evaluation under a title."""
    console = console or Console(highlight=False)
    console.print(Text(literal(title), "bold"), "", _metrics_table(figures), sep="\n")


def short(name: str) -> str:
    """A figure's name on the screen, where training is a matter of course: loss, lr, val/accuracy."""
    return literal(name.removeprefix("train/"))


def clock(seconds: float) -> str:
    """A time as people read it: 0:07, 12:30, 3:05:00, 2 d 04:10."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _figure_lines(values: Mapping[str, float], width: int) -> list[Text]:
    """Names and values in lines of at most `width`, never broken between a name and its value."""
    lines = [Text(no_wrap=True, overflow="ellipsis")]
    for name, value in values.items():
        pair = Text.assemble((f"{short(name)} ", "dim"), f"{value:<8.4g}  ")
        if lines[-1] and lines[-1].cell_len + len(pair.plain.rstrip()) > width:
            lines.append(Text(no_wrap=True, overflow="ellipsis"))
        lines[-1].append(pair)
    for line in lines:
        line.rstrip()
    return lines


@contextmanager
def _redirected_logging(stdout: TextIO, stderr: TextIO) -> Iterator[None]:
    """Let log handlers that hold these streams write to today's instead: above the bar, not across it."""
    moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in (stdout, stderr):
            moved.append((handler, handler.stream))
            handler.setStream(sys.stdout if handler.stream is stdout else sys.stderr)
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


def _sentence(report: Report) -> str:
    """The verdict in one sentence."""
    errors = sum(finding.severity is Severity.error for finding in report.findings)
    warnings = sum(finding.severity is Severity.warning for finding in report.findings)
    if errors:
        also = f" and {_counted(warnings, 'warning')}" if warnings else ""
        return f"Do not trust this run: {_counted(errors, 'error')}{also}."
    if warnings:
        return f"The run finished, with {_counted(warnings, 'warning')}."
    return "The run finished and nothing was found wrong."


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _check_counts(checks: list[CheckResult]) -> str:
    """``7 passed, 1 skipped``."""
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    return ", ".join(f"{count} {status.name}" for status, count in counts.items() if count)


def _metrics_table(metrics: Mapping[str, float]) -> Table:
    """Final figures, one a row."""
    table = Table.grid(padding=(0, 2))
    for name, value in metrics.items():
        table.add_row(Text(short(name), "dim"), Text(f"{value:.4g}", "bold"))
    return table


def _finding_block(finding: Finding) -> RenderableType:
    """The paragraph of a finding, in colour and wrapped beside its labels."""
    color = COLORS[finding.severity]
    headline = Text.assemble((f"{finding.severity}: ", f"bold {color}"), (literal(finding.headline()), "bold"))
    parts = Table.grid(padding=(0, 2, 0, 0))
    for label, text in finding.details():
        parts.add_row(Text(label, "dim"), Text(literal(text)))
    return Group(headline, Padding(parts, (0, 0, 0, 2), expand=False))
