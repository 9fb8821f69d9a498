"""Tests on curves of figures: a spike, a trend, a share, a sign. Pure functions of numbers; touches nothing.

They are robust on purpose: losses are noisy, autocorrelated and heavy-tailed, and in 98 healthy runs that we measured
one step's loss reached 8.5 times the median of the last ten (95th percentile; 36 times with batches of two). So spread
is a median absolute deviation, trends allow for autocorrelation, and a spike counts against the curve's own past only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["SpikeTest", "Trend", "binomial_tail", "location_and_spread", "proportion_test", "sign_test", "trend"]

MAD_TO_SIGMA = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation, 1 / 0.6745."""


def location_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and median absolute deviation on the scale of a standard deviation: half of the values may be wild.

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    middle = _median(ordered)
    return middle, MAD_TO_SIGMA * _median(sorted(abs(value - middle) for value in ordered))


class SpikeTest:
    """Says of each value whether it stands far above the clean values before it. Spikes stay out of the window.

    The scale is logarithmic, since noise of a loss or a gradient norm is a factor rather than a term: values are
    measured as ``log(value - base)``. For positive windows the base is 0. Where values are negative or cross zero
    (a flow, a Poisson likelihood) the base lies as far below the smallest value as that lies below the median, which
    leaves room below and the curve's own spread as its unit; heavy tails make it wider, hence the test stricter.

    Clean values are taken in stretches. The latest full one gives median and base, and the median of the spreads within
    the last few gives the scale: a loss that falls from 2 to 0.1 has little noise, yet is far from its long median.

    A value is a spike if it exceeds the median by more than `sigmas` robust deviations on that scale, and is more
    than `factor` times as far above the base as the median is, and more than `least_rise` above the median (so that a
    loss that has converged to nearly nothing may flicker by orders of magnitude). Six deviations over 128 values is
    what OLMo-core's stability monitor uses; doubling is the bound of LLM Foundry's loss-spike callback; neither alone
    is quiet enough, and a mean in place of the median fails for losses near or below zero.

    A value costs a comparison, plus two sorts of a stretch when that is full; so the bound depends on the values alone,
    not on how they are handed over.

    Args:
        stretch: clean values that set a new bound; a MAD of fewer than some dozens is a poor scale.
        stretches: how many of them give the scale.
        sigmas: robust standard deviations above the median.
        factor: least ratio of spike to median, both measured from the base.
    """

    def __init__(self, stretch: int = 32, stretches: int = 4, sigmas: float = 6.0, factor: float = 2.0) -> None:
        if stretch < 4 or stretches < 1:
            raise ValueError(f"stretch must be at least 4 and stretches at least 1 (got {stretch}, {stretches})")
        self.stretch, self.sigmas, self.factor = stretch, sigmas, factor
        self.least_rise = 0.0
        """In the values' own unit; may be set at any time."""
        self.limit = math.inf
        """A value above it is a spike. Infinite in the first stretch."""
        self.middle = math.nan
        """Median of the latest full stretch."""
        self._values: list[float] = []
        self._spreads: deque[float] = deque(maxlen=stretches)
        self._signed = False  # whether a value was ever zero or negative

    def add(self, value: float) -> bool:
        """Whether this finite value is a spike; if not, it is a clean one."""
        if value > self.limit:
            return True
        self._values.append(value)
        if len(self._values) == self.stretch:
            self._update_limit()
        return False

    def restart(self, values: Iterable[float]) -> None:
        """Forget what was, and take these for clean: the curve has come to another level and stays there."""
        self._spreads.clear()
        self._values, self.limit = [], math.inf
        for value in values:
            self._values.append(value)
            if len(self._values) == self.stretch:
                self._update_limit()

    def state_dict(self) -> dict[str, Any]:
        """All that `add` goes by, of plain types."""
        return {
            "values": list(self._values),
            "spreads": list(self._spreads),
            "signed": self._signed,
            "middle": self.middle,
            "limit": self.limit,
            "least_rise": self.least_rise,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another test stood."""
        self._values, self._signed = list(state["values"]), state["signed"]
        self._spreads.clear()
        self._spreads.extend(state["spreads"])
        self.middle, self.limit, self.least_rise = state["middle"], state["limit"], state["least_rise"]

    def _update_limit(self) -> None:
        values = sorted(self._values)
        self._values.clear()
        self.middle, lowest = _median(values), values[0]
        self._signed = self._signed or lowest <= 0
        base = lowest - (self.middle - lowest) if self._signed else 0.0
        if -math.inf < base < lowest:
            self._spreads.append(location_and_spread([math.log(value - base) for value in values])[1])
            spread = _median(sorted(self._spreads))
            ratio = max(self.factor, math.exp(min(self.sigmas * spread, 100.0)))  # e^100 is never reached
            self.limit = max(base + ratio * (self.middle - base), self.middle + self.least_rise)
        else:  # most values are one and the same, at or below zero: there is no scale to measure by
            self.limit = math.inf


@dataclass(frozen=True, kw_only=True)
class Trend:
    """A straight line through equally spaced values, and how sure its direction is."""

    slope: float
    """Change per value."""
    standard_error: float
    """Of the slope, with autocorrelation allowed for."""
    effective_size: float
    """How many independent values tell as much; at most their number."""
    probability_rising: float
    """That the true slope is above 0; 1 minus it is that of falling."""


def trend(values: Sequence[float]) -> Trend:
    """Least-squares slope and the probability that it is above 0, as in dlib's ``running_gradient``.

    dlib takes the residuals for independent. Those of a loss curve are not (momentum, epochs), which makes it far too
    sure, so their first autocorrelation r shrinks the number of values to ``n (1 - r) / (1 + r)``; r itself is
    corrected for its bias beside a fitted line, about ``(2 + 4 r) / n`` (beside a mean it is ``(1 + 3 r) / n``,
    Kendall 1954), and a negative r is taken for 0. The tail is Student's t, by Abramowitz and Stegun 26.7.8.

    Raises:
        ValueError: there are fewer than 3 values.
    """
    count = len(values)
    if count < 3:
        raise ValueError(f"a trend takes at least 3 values (got {count})")
    places = np.arange(count) - (count - 1) / 2
    heights = np.asarray(values, dtype=np.float64)
    unit = float(np.abs(heights).max()) or 1.0  # squares of what blew up would overflow
    heights = heights / unit
    heights -= heights.mean()
    square = float(places @ places)
    slope = float(places @ heights) / square
    residuals = heights - slope * places
    power = float(residuals @ residuals)
    if power <= count * 1e-28:  # an exact line, but for rounding
        rising = 0.5 if abs(slope) * count < 1e-14 else float(slope > 0)
        return Trend(slope=slope * unit, standard_error=0.0, effective_size=float(count), probability_rising=rising)
    repeated = float(residuals[1:] @ residuals[:-1]) / power
    repeated = min(max(repeated + (2 + 4 * repeated) / count, 0.0), 0.99)
    effective = max(count * (1 - repeated) / (1 + repeated), 3.0)
    error = math.sqrt(power / (effective - 2) / square)  # of white residuals, but with the effective number of them
    return Trend(
        slope=slope * unit,
        standard_error=error * unit,
        effective_size=effective,
        probability_rising=_student_below(slope / error, effective - 2),
    )


def proportion_test(successes: int, trials: int, expected: float) -> float:
    """Exact probability of at least so many successes if each trial had the chance `expected` (one-sided).

    Raises:
        ValueError: the counts or the chance are impossible.
    """
    if not 0 <= successes <= trials or not 0 <= expected <= 1:
        raise ValueError(
            f"successes must lie in [0, trials] and expected in [0, 1] (got {successes} of {trials}, {expected})"
        )
    return binomial_tail(successes, trials, expected)


def sign_test(differences: Iterable[float]) -> float:
    """Exact probability of at least so many positive differences if either sign were as likely; zeros say nothing."""
    signs = [difference > 0 for difference in differences if difference != 0]
    return binomial_tail(sum(signs), len(signs), 0.5)


def binomial_tail(least: int, trials: int, chance: float) -> float:
    """Probability of at least `least` successes in independent trials."""
    if least <= 0:
        return 1.0
    if chance in (0.0, 1.0):
        return chance
    log_yes, log_no, whole = math.log(chance), math.log1p(-chance), math.lgamma(trials + 1)
    terms = (
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log_yes + (trials - k) * log_no)
        for k in range(least, trials + 1)
    )
    return min(1.0, math.fsum(terms))


def _median(ordered: Sequence[float]) -> float:
    """Of values in order."""
    if not ordered:
        raise ValueError("a median takes at least one value (got none)")
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else ordered[half - 1] / 2 + ordered[half] / 2


def _student_below(t: float, freedom: float) -> float:
    """Probability that Student's t is below `t`, by a normal one: Abramowitz and Stegun 26.7.8."""
    normal = t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom))
    return 0.5 * math.erfc(-normal / math.sqrt(2))
