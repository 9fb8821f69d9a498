"""The loss leaves its own past and does not come back: `training.diverging`. Histories in, findings out.

Jumps do not separate: in 98 healthy runs one step's loss reached 8.5 times the median of the last ten (95th percentile;
36 times with batches of two), while diverging runs showed 2 to 9 times. So a jump is at most an info. What alarms is a
loss that stays above what the run's own past allows, stands no lower than where training began (the network is now
worse than an untrained one) and shows no sign of falling again. Warm restarts, a curriculum, unshuffled data or a
fading-in term of the loss fail at least one of the three. Divergences that end at a level below the first losses, or
that are still coming down, are missed: a false alarm weighs more than a miss.

Three ways in, one finding out:
- *left its past*: spikes in 2 of 3 consecutive steps open an episode, which is judged when it is 60 steps old (if the
  learning rate had just risen to a new height) or 120, 180 and 240 (also without such a cause, if it rose at once);
- *never had one*: the first steps already throw the loss up tenfold, and it stays there;
- *grows exponentially*: a hundred times the first losses, and twenty times within the last 64 steps.
If the loss comes back after all, the warning becomes an info. It is statistics, so it is never an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from safe_trainer.findings import Finding, Severity
from safe_trainer.utils.statistics import SpikeTest, location_and_spread, trend

FIRST = 10
"""Losses whose median is where training began; a few, as it soon falls, but not one, as one batch is noise."""
BLOCK = 64
"""Finite losses between two looks back, and the stretch looked at: long enough for a trend under autocorrelation."""
JUDGED_AT = (60, 120, 180, 240)
"""Ages of an episode at which it is judged; the first only if the learning rate explains it. At the last one it ends:
by then the level is the run's new normal."""
STAYS = 0.8
"""Least share of the episode's later half above the bound: persistent, yet a lucky batch may lie below."""
FALLING = 0.75
"""Probability of a falling trend from which on a loss is said to be on its way back. Low: doubt is silence."""
SURELY_FALLING = 0.95
"""The same where a jump of the learning rate explains the rise: with a cause in hand there is less to doubt."""
RISING = 0.9
"""Probability of a rising trend from which on a loss has not come to a new level but grows by degrees."""
BACK = 0.6
"""Share of the last ten losses within the bound that ends an episode: the majority, with one to spare."""
NOTICEABLE = 0.05
"""A rise below this share of all progress so far is none: a loss near 0 flickers by orders of magnitude."""
FAR = 8.5
"""Least ratio of the new level to the old where no learning rate explains it: single steps of healthy runs reach it."""
AT_ONCE = 0.7
"""Share of the rise that the first 20 steps of an episode must show; see `is_new_level`."""
RATE_ROSE = 2.0
"""Factor by which a learning rate outgrows all before it to count as a jump; a warm-up's steps are smaller, and a warm
restart returns to a rate that the run has known."""
RATE_WITHIN = 20
"""Steps before the first spike in which such a jump explains it."""
THROWN_UP, GROWN, GROWING = 10.0, 100.0, 20.0
"""Ratio to the first loss or losses, see above. Healthy runs: at most 6 (a GAN's generator, a fading-in term)."""
PLAIN = ("seen", "count", "flags", "last_spike", "highest_rate", "rates_seen", "passing", "largest", "largest_step",
         "warned", "back_below")  # fmt: skip
"""Attributes that go into a checkpoint as they are."""
SURE = 0.99999
"""Probability of a rising trend to call it exponential growth: dlib's last degree."""


@dataclass
class Episode:
    """A stretch that began with spikes and has not ended."""

    onset: int
    """Index of its first spike in the history."""
    usual: float
    """Median of the clean losses before."""
    limit: float
    """The bound that they set; to come back takes a quarter of the way from there, lest it flicker about the bound."""
    reason: str | None = None
    """Words on a jump of the learning rate that explains it."""
    losses: list[float] = field(default_factory=list)

    @property
    def back(self) -> float:
        """Losses up to here are back within the run's own past."""
        return self.usual + (self.limit - self.usual) / 4


class Spikes:
    """Watches the loss of one run.

    Args:
        opposed: several optimizers work on losses of their own: nothing is more than an info then.
    """

    def __init__(self, *, opposed: bool = False) -> None:
        self.opposed = opposed
        self.test = SpikeTest()
        self.seen, self.count = 0, 0  # entries of the history, and finite losses among them
        self.first: list[float] = []
        self.flags, self.last_spike = 0, 0  # of the last three losses, as bits; index of the last spike
        self.episode: Episode | None = None
        self.highest_rate, self.rates_seen = 0.0, 0  # the highest so far, but for the latest steps
        self.passing, self.largest, self.largest_step = 0, -math.inf, 0  # spikes that passed by themselves
        self.finding: Finding | None = None
        self.warned = False
        self.back_below = -math.inf
        """A warning is withdrawn once the loss is down here again."""
        self._changed = False

    def feed(self, columns: Mapping[str, Sequence[float]]) -> list[Finding]:
        """Look at the entries since the last call.

        Args:
            columns: "step" and "loss", and "lr" and "grad_norm" if there are any; aligned, NaN where absent. Losses
                that are not finite are the fuse's matter and are passed over.

        Returns:
            The finding, if it is new or has changed.
        """
        losses = columns.get("loss", ())
        self._changed = False
        for index in range(self.seen, len(losses)):
            loss = losses[index]
            if math.isfinite(loss):
                self._take(index, loss, columns)
        self.seen = len(losses)
        return self.findings if self._changed else []

    @property
    def findings(self) -> list[Finding]:
        """What there is to say so far: one finding at most."""
        return [] if self.finding is None else [self.finding]

    def state_dict(self) -> dict[str, Any]:
        """Everything, of plain types."""
        finding = self.finding and self.finding.state_dict()
        return {
            **{name: getattr(self, name) for name in PLAIN},
            "first": list(self.first),
            "test": self.test.state_dict(),
            "episode": self.episode and asdict(self.episode),
            "finding": finding,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where an earlier run stood."""
        kept = dict(state)
        self.test.load_state_dict(kept.pop("test"))
        episode, finding = kept.pop("episode"), kept.pop("finding")
        self.episode = episode and Episode(**{**episode, "losses": list(episode["losses"])})
        self.finding = finding and Finding(**finding)
        self.first = list(kept.pop("first"))
        for name, value in kept.items():
            setattr(self, name, value)

    # --- one loss ----------------------------------------------------------------------------------------------------

    def _take(self, index: int, loss: float, columns: Mapping[str, Sequence[float]]) -> None:
        self.count += 1
        if self.count <= FIRST:
            self.first.append(loss)
        if self.count % BLOCK == 0:
            self._look_back(index, columns)
        if self.episode is not None:
            self._go_on(self.episode, index, loss, columns)
            return
        spike = self.test.add(loss)
        if not spike and not self.flags:
            return
        self.flags = (self.flags << 1 | spike) & 0b111
        if spike:
            onset = index if self.flags == 1 else self.last_spike
            reason = self._rate_jump(columns.get("lr", ()), onset)
            self.last_spike = index
            if self.flags != 1 or reason:
                losses = filter(math.isfinite, columns["loss"][onset : index + 1])
                self.episode = Episode(onset, self.test.middle, self.test.limit, reason, list(losses))
                self.flags = 0
        elif self.flags == 0b100:
            self._let_pass(self.last_spike, columns["loss"][self.last_spike], columns)
            self.flags = 0

    def _go_on(self, episode: Episode, index: int, loss: float, columns: Mapping[str, Sequence[float]]) -> None:
        """One more loss of an open episode: it may end, or be judged."""
        losses = episode.losses
        losses.append(loss)
        within = sum(value <= episode.back for value in losses[-10:])
        if len(losses) >= 10 and within > 10 * BACK:
            self.episode = None
            top = max(range(len(losses)), key=losses.__getitem__)
            self._let_pass(min(episode.onset + top, index), losses[top], columns)
        elif len(losses) in JUDGED_AT:
            level = len(losses) > JUDGED_AT[0] and is_new_level(losses, episode.usual)
            doubt = SURELY_FALLING if episode.reason else FALLING
            if (episode.reason or level) and is_harm(losses, episode.back, self._began_at(), doubt):
                self._warn(index, columns, told_of_episode(episode, self._began_at(), columns), episode.reason)
                self.back_below = episode.back
            if len(losses) == JUDGED_AT[-1]:
                self.test.restart(losses[len(losses) // 2 :])
                self.episode = None

    def _look_back(self, index: int, columns: Mapping[str, Sequence[float]]) -> None:
        """What takes a stretch of losses: the ways in without a clean past, and the way out."""
        recent = [value for value in columns["loss"][max(0, index + 1 - 2 * BLOCK) : index + 1] if math.isfinite(value)]
        recent, began = recent[-BLOCK:], self._began_at()
        middle = sorted(recent)[len(recent) // 2]
        self._note_rates(columns.get("lr", ()), index - 2 * RATE_WITHIN)
        self.test.least_rise = NOTICEABLE * max(0.0, began - middle)
        if len(recent) < BLOCK:  # most of the steps were not finite
            return
        if self.warned:
            if middle <= self.back_below:
                self._withdraw(index, middle, columns)
        elif self.count == BLOCK and was_thrown_up(recent):
            text = f"the first loss was {recent[0]:.4g}; within ten steps it was thrown up to more than ten times that"
            self._warn(index, columns, f"{text}, and it stays there (median {middle:.4g})", None)
            self.back_below = 2 * recent[0]
        elif began > 0 and middle > GROWN * began and grows_exponentially(recent):
            text = f"the loss began at {began:.4g} and has grown to {recent[-1]:.4g}, from {recent[0]:.4g} in the last"
            self._warn(index, columns, f"{text} {len(recent)} steps", None)
            self.back_below = 2 * began

    def _note_rates(self, rates: Sequence[float], end: int) -> None:
        """Keep the highest learning rate before index `end`, so that no jump need look through the whole run."""
        if end > self.rates_seen:
            finite = filter(math.isfinite, rates[self.rates_seen : end])
            self.highest_rate, self.rates_seen = max([self.highest_rate, *finite]), end

    def _rate_jump(self, rates: Sequence[float], onset: int) -> str | None:
        """Words on a learning rate that shortly before `onset` rose far above all that the run had known, if it did."""
        begin = max(0, onset - RATE_WITHIN)
        before = max([self.highest_rate, *filter(math.isfinite, rates[self.rates_seen : begin])])
        lately = max(filter(math.isfinite, rates[begin : onset + 1]), default=0.0)
        if before <= 0 or lately < RATE_ROSE * before:
            return None
        return f"the learning rate had risen to {lately:.4g}; up to then it was at most {before:.4g}"

    def _began_at(self) -> float:
        """Median of the first losses."""
        return location_and_spread(self.first)[0]

    # --- what is said of it ------------------------------------------------------------------------------------------

    def _warn(self, index: int, columns: Mapping[str, Sequence[float]], evidence: str, reason: str | None) -> None:
        if self.warned:
            return
        self.warned = True
        remedy = (
            "lower the learning rate or warm it up longer, clip the gradient norm, go back to a checkpoint before it"
        )
        cause = f"{reason}, and the steps have become" if reason else "most often the steps are or have become"
        self.finding = Finding(
            fault="training.diverging",
            severity=Severity.info if self.opposed else Severity.warning,
            stage="training",
            step=int(columns["step"][index]),
            evidence=evidence,
            cause=f"{cause} too large for the curvature of the loss; a change in the data would do it, too",
            remedy=remedy,
        )
        self._changed = True

    def _withdraw(self, index: int, middle: float, columns: Mapping[str, Sequence[float]]) -> None:
        assert self.finding is not None
        self.warned = False
        evidence = f"{self.finding.evidence}; by step {int(columns['step'][index])} it had come back to {middle:.4g}"
        self.finding = Finding(**{**vars(self.finding), "severity": Severity.info, "evidence": evidence})
        self._changed = True

    def _let_pass(self, index: int, loss: float, columns: Mapping[str, Sequence[float]]) -> None:
        """A spike has passed: an info, if for that moment the network was worse than an untrained one."""
        if loss < self._began_at():
            return
        self.passing += 1
        if loss > self.largest:
            self.largest, self.largest_step = loss, int(columns["step"][index])
        if self.back_below > -math.inf:  # graver things have been said
            return
        times = "once" if self.passing == 1 else f"{self.passing} times"
        self.finding = Finding(
            fault="training.diverging",
            severity=Severity.info,
            stage="training",
            step=self.largest_step,
            evidence=f"the loss left its usual range {times} and came back by itself; the highest was "
            f"{self.largest:.4g} in step {self.largest_step}, more than the {self._began_at():.4g} it began with",
            cause="an unusual batch, or a learning rate at the edge of what the loss allows",
            remedy="nothing while it is rare; else look at the batch, clip the gradient norm, lower the learning rate",
        )
        self._changed = True


def is_harm(losses: Sequence[float], back: float, began: float, doubt: float = FALLING) -> bool:
    """Whether an episode stays above its bound and above where training began, and is not on its way back."""
    later = losses[len(losses) // 2 :]
    above = sum(value > back for value in later) / len(later)
    if above < STAYS or location_and_spread(later)[0] < began:
        return False
    return not is_falling(later, doubt)


def is_falling(losses: Sequence[float], doubt: float = FALLING) -> bool:
    """Whether these losses may be on their way down."""
    return 1 - trend(compressed(losses)).probability_rising >= doubt


def compressed(losses: Sequence[float]) -> list[float]:
    """Losses of any sign on a scale that is logarithmic far from their median, so that no single one bends a line."""
    middle, spread = location_and_spread(losses)
    unit = spread or abs(middle) or 1.0
    return [math.asinh(max(-1e100, min(1e100, (loss - middle) / unit))) for loss in losses]  # no infinity comes in


def is_new_level(losses: Sequence[float], usual: float) -> bool:
    """Whether an episode came near its later level within its first 20 steps and stays there, as after a collapse.

    What rises by degrees has other reasons: a GAN's players meeting their match, sequences that get longer. What falls
    soon after is being learned, as the next stage of a curriculum is, even if another stage follows on its heels.
    """
    later = losses[len(losses) // 2 :]
    middle = location_and_spread(later)[0]
    if usual > 0 and middle < FAR * usual:
        return False
    at_once = location_and_spread(losses[5:20])[0] - usual >= AT_ONCE * (middle - usual)
    came_down = is_falling(losses[10 : len(losses) // 2])
    return at_once and not came_down and trend(compressed(later)).probability_rising < RISING


def was_thrown_up(losses: Sequence[float]) -> bool:
    """Whether a run's first losses leave the very first one far below, at once and for good.

    The first loss is a single batch, so it must lie six deviations (log scale) below the later ones, with their spread
    for its noise: heavy-tailed losses of tiny batches have spreads of a factor of 3 and more, and pass.
    """
    if min(losses) <= 0:
        return False
    logs = [math.log(loss) for loss in losses]
    later = logs[len(logs) // 2 :]
    middle, spread = location_and_spread(later)
    rise = max(math.log(THROWN_UP), 6 * spread)
    early = sorted(logs[1:11])
    if middle - logs[0] < rise or early[len(early) // 2] - logs[0] < math.log(THROWN_UP):
        return False
    return min(later) - logs[0] > math.log(THROWN_UP) / 2 and 1 - trend(later).probability_rising < FALLING


def grows_exponentially(losses: Sequence[float]) -> bool:
    """Whether the logarithm rises by ln 20 over these losses, along a significant trend."""
    if min(losses) <= 0:
        return False
    line = trend([math.log(loss) for loss in losses])
    return line.slope * len(losses) > math.log(GROWING) and line.probability_rising > SURE


def told_of_episode(episode: Episode, began: float, columns: Mapping[str, Sequence[float]]) -> str:
    """What was measured, in words."""
    later = episode.losses[len(episode.losses) // 2 :]
    text = (
        f"since step {int(columns['step'][episode.onset])} the loss has left its own past (median {episode.usual:.4g}, "
        f"bound {episode.limit:.4g}): for {len(episode.losses)} steps it has not come back, its median is now "
        f"{location_and_spread(later)[0]:.4g}, no better than the {began:.4g} it began with, and it does not fall"
    )
    norms = columns.get("grad_norm", ())
    before = [norm for norm in norms[max(0, episode.onset - 128) : episode.onset] if math.isfinite(norm)]
    since = [norm for norm in norms[episode.onset :] if math.isfinite(norm)]
    if before and since:
        text += (
            f"; the gradient norm went from {location_and_spread(before)[0]:.3g} to {location_and_spread(since)[0]:.3g}"
        )
    return text
