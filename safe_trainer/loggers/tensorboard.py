"""Rows of the log as TensorBoard events in the run's folder. Touches event files there, and nothing else.

TensorBoard is imported with the first row: a run without it does not pay for the import (0.2 s).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safe_trainer.findings import Finding
from safe_trainer.loggers.sink import Trouble

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Scalars and texts that ``tensorboard --logdir runs`` shows, tagged by the very names of the values.

    Args:
        folder: the run's folder; the event files lie right in it, so that TensorBoard names the run after it.
        flush_secs: seconds until a row can be seen; TensorBoard's own default of 120 is long to wait for a first curve.
    """

    def __init__(self, folder: Path, flush_secs: int = 10) -> None:
        self.folder = Path(folder)
        self.flush_secs = flush_secs
        self.trouble = Trouble(f"TensorBoard's log in {self.folder}")
        self.purge_step: int | None = None
        self.opened: SummaryWriter | None = None

    @property
    def writer(self) -> SummaryWriter:
        """The writer behind it, opened when first asked for; for what a row cannot hold (pictures, histograms)."""
        if self.opened is None:
            from torch.utils.tensorboard import SummaryWriter

            self.folder.mkdir(parents=True, exist_ok=True)
            self.opened = SummaryWriter(str(self.folder), purge_step=self.purge_step, flush_secs=self.flush_secs)
        return self.opened

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each value."""
        if self.trouble.met:
            return
        numbers = {name: float(value) for name, value in values.items()}
        with self.trouble.contained():
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

            # One event for the whole row: add_scalar would write one a value, at about 150 us each.
            row = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()])
            self.writer._get_file_writer().add_summary(row, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Show `text` under the tab Text, literally: indented, since TensorBoard would read it as Markdown."""
        if not self.trouble.met:
            with self.trouble.contained():
                self.writer.add_text(name, textwrap.indent(text, "    ", lambda line: True), step)

    def alert(self, finding: Finding) -> None:
        """Show a finding that alerts under the tab Text, as ``alerts``."""
        self.text(finding.step or 0, "alerts", finding.paragraph())

    def flush(self) -> None:
        """Wait until the rows are in the file: TensorBoard writes them from a thread, which dies with the process."""
        if self.opened is not None and not self.trouble.met:
            with self.trouble.contained():
                self.opened.flush()

    def truncate_after(self, step: int) -> None:
        """Make TensorBoard hide what was logged after `step`; the events themselves stay in their files."""
        self.close()
        self.purge_step = step + 1

    def close(self) -> None:
        """Write what is left and stop the thread behind; a later row opens a new event file."""
        writer, self.opened = self.opened, None
        if writer is not None:
            with self.trouble.contained():
                writer.close()
