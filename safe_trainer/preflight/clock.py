"""How long a check may take. Reads the clock, nothing else."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds from now on that somebody has; checks look at it between two steps and cut themselves down."""

    seconds: float
    began: float = field(default_factory=time.perf_counter)

    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    def left(self) -> float:
        """Seconds that are left; 0 when they are used up."""
        return max(0.0, self.seconds - self.spent())

    def part(self, share: float) -> Clock:
        """A clock for one check: at most `share` of what is left."""
        return Clock(self.left() * share)
