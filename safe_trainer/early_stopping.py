"""When a run that no longer gets better ends. Counts; touches nothing."""

from __future__ import annotations

import math

from safe_trainer.checkpoint import is_better, is_lower_better
from safe_trainer.config import ConfigError, EarlyStoppingConfig


class EarlyStopping:
    """Counts evaluations without improvement."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.waited = 0

    def check(self, figures: dict[str, float]) -> None:
        """Whether an evaluation has what is watched.

        Raises:
            ConfigError: the watched metric is not among the figures.
        """
        metric = self.config.metric
        if self.config.patience is not None and metric not in figures:
            known = ", ".join(sorted(figures)) or "none: there is no validation data"
            must = "early_stopping.metric must be a figure of the evaluation"
            raise ConfigError([f"{must} (got {metric!r}; there are: {known})"])

    def wants_to_stop(self, figures: dict[str, float]) -> bool:
        """Take note of one evaluation; true when patience has run out.

        Raises:
            ConfigError: the watched metric is not among the figures.
        """
        if self.config.patience is None:
            return False
        self.check(figures)
        metric = self.config.metric
        lower, least = is_lower_better(metric, self.config.direction.value), self.config.min_delta
        value = figures[metric]
        if not math.isnan(value) and (self.best is None or is_better(value, self.best, lower=lower, min_delta=least)):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.has_run_out()

    def has_run_out(self) -> bool:
        """Whether patience has run out; a run that was stopped for it is over also when it is resumed."""
        return self.config.patience is not None and self.waited >= self.config.patience

    def reason(self) -> str:
        """Why the run ended, in words."""
        return f"no improvement of {self.config.metric} in {self.waited} evaluations"
