"""Times of rounds of about so many requests, and what is tried next because of them. Torch-free."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SAMPLES = 7
"""Latest times that count, by their median: rounds that something else held up are outvoted."""
ENOUGH = 2
"""Times of a k before they are believed; the first may have been cold."""
TIME_FIRST, TIME_EVERY = 8, 48
"""Rounds with drafts before another k than the best is timed: at first, and from then on."""
PROBE_EVERY, PROBE_SELDOM = 16, 256
"""Rounds without drafts between two probes: at first, and after probes that changed nothing."""
OTHERS_EVERY, OTHERS_GROW, OTHERS_SELDOM = 1, 8, 64
"""This many times as many requests as are together are treated alike before as many are not; likewise."""
CLEAR, CLEAR_ROUNDS = 1.2, 1.3
"""By this factor drafting has to be better for plain requests to be tried seldom; its rounds, for never."""
FADE = 0.97
"""What earlier requests weigh after one more."""

Times = dict[int, deque[float]]
"""The latest, in seconds."""


def _times() -> Times:
    return defaultdict(lambda: deque(maxlen=SAMPLES))


@dataclass
class RoundTimes:
    """Rounds of about as many requests: times by k, and when what is seldom run is run again."""

    verify: Times = field(default_factory=_times)
    draft: Times = field(default_factory=_times)
    """By the number of draft forwards."""
    gaps: deque[float] = field(default_factory=lambda: deque([0.0], SAMPLES))
    """Between rounds: the least of them is what the host takes whatever k is, and writes no prompt."""
    begun: bool = False
    """Whether the first trials were ordered."""
    trials: deque[int] = field(default_factory=deque)
    """The k of the next rounds, to be measured."""
    until_timing: int = TIME_FIRST
    """Rounds with drafts before another k than the best is timed."""
    turn: int = 0
    plain_best: int = 0
    """Rounds in a row since which plain ones seem best."""
    since_probe: int = 0
    probe_gap: int = PROBE_EVERY
    spent: dict[bool, tuple[float, float]] = field(default_factory=lambda: {True: (0, 0), False: (0, 0)})
    """Seconds and tokens of requests that were prepared for drafting, and of those that were not."""
    favoured: bool = True
    """Whether requests are prepared, but for a few."""
    alike: int = 0
    """Requests that were treated so since others were not."""
    others: int = 0
    """How many of the next ones are not."""
    others_gap: int = OTHERS_EVERY

    def costs(self, maximum: int) -> list[float]:
        """Seconds of a round at every k from 0 to `maximum`; of the first, in units of a verification."""
        always, verify, draft = self._known()
        return [always + _at(k, verify) + _at(k, draft) for k in range(maximum + 1)]

    def cost_without_model(self, k: int) -> float:
        """Seconds of a round at k whose drafts no model makes; units as of `costs`."""
        always, verify, draft = self._known()
        return always + _at(k, verify) + draft[0]

    def _known(self) -> tuple[float, dict[int, float], dict[int, float]]:
        """What every round takes, verifications by k, and drafts by forward passes."""
        always, verify = max(min(self.gaps), 1e-9), medians(self.verify) or {0: 1.0}  # a clock may say zero
        return always, verify, {0: 0.0, **medians(self.draft)}

    def try_out(self, k: int, rounds: int) -> None:
        """Let the next rounds be at k."""
        self.trials.extend([k] * rounds)

    def drafted(self, best: int, choices: Sequence[int]) -> None:
        """Drafting is the best, at one k of the choices; 0 and its neighbours are timed in turn."""
        self.since_probe, self.probe_gap = 0, PROBE_EVERY
        self.until_timing -= 1
        if self.until_timing <= 0:
            at = choices.index(best)
            others = list(dict.fromkeys((0, *choices[at + 1 : at + 2], choices[at - 1])))
            self.try_out(others[self.turn % len(others)], ENOUGH)
            self.turn, self.until_timing = self.turn + 1, TIME_EVERY

    def probe_is_due(self) -> bool:
        """Count a round without drafts. Each probe costs a round of all: they become fewer."""
        self.since_probe += 1
        if self.since_probe < self.probe_gap:
            return False
        self.since_probe, self.probe_gap = 0, min(2 * self.probe_gap, PROBE_SELDOM)
        return True

    def prepares(self, gain: float, count: int) -> bool:
        """Whether the next of `count` requests is prepared; gain: how much better rounds with drafts are.

        A round says nothing of what preparing takes, nor of slots that stay empty because some requests end
        before others. So where several are together both ways are tried and what they took is compared.
        """
        (with_drafts, drafted), (without, plain) = self.spent[True], self.spent[False]
        settled = self.probe_gap >= 4 * PROBE_EVERY  # two probes have not changed that 0 is the best
        if gain >= CLEAR_ROUNDS or (count == 1 and (gain > 1 or not settled)):
            self._favour(True)
            return True
        if count == 1:
            self._favour(False)
        elif settled and gain <= 1:  # already without what preparing takes
            self._favour(False)
            self.others_gap = max(self.others_gap, OTHERS_GROW)
        elif drafted and plain:
            self._favour(with_drafts * plain < without * drafted)
            if CLEAR * with_drafts * plain < without * drafted:
                self.others_gap = OTHERS_SELDOM
        if not self.others and self.alike >= self.others_gap * count:
            self.alike, self.others = 0, count
            self.others_gap = min(OTHERS_GROW * self.others_gap, OTHERS_SELDOM if count > 1 else OTHERS_GROW)
        if self.others:
            self.others -= 1
            return not self.favoured
        self.alike += 1
        return self.favoured

    def _favour(self, prepared: bool) -> None:
        if prepared != self.favoured:
            self.favoured, self.alike, self.others, self.others_gap = prepared, 0, 0, OTHERS_EVERY


def medians(times: Mapping[int, deque[float]]) -> dict[int, float]:
    """The median of what has been timed enough, or else of all; the lower one of two."""
    enough = {k: each for k, each in times.items() if len(each) >= ENOUGH} or times
    return {k: sorted(each)[(len(each) - 1) // 2] for k, each in enough.items()}


def _at(k: int, known: Mapping[int, float]) -> float:
    """The value at k on the line through the nearest two known; none falls, and none is below 0."""
    near = sorted(known, key=lambda other: abs(other - k))[:2]
    first, last = near[0], near[-1]
    slope = (known[first] - known[last]) / (first - last) if first != last else 0.0
    return max(known[first] + (k - first) * max(slope, 0.0), 0.0)
