"""How many tokens to draft in the next round: a fixed k, or the k that promises the most tokens a second.

Two things are estimated for every k of the plan, 0 among them. Tokens of a round: how likely the first draft
is accepted, of late, and how much likelier a further one is once those before it were. Seconds of a round:
medians of the latest times of verifying and drafting, kept apart for 1, 2 to 3, 4 to 7 requests and so on.
The k with the most tokens a second is run. Only what is run is measured: the first rounds are at the largest
k; while drafting pays, 0 and the neighbours of the best k are timed now and then; while it does not, a few
drafts are tried, ever more seldom. k = 0 is run once it has seemed best for a few rounds: the drafter then
has to catch up. Where lookup beside a model finds that text is copied, it may draft alone, more than the
model. Nothing here changes the text. No torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

DECAY = 0.96  # what earlier rounds weigh after one more, in acceptance
STEADINESS = (
    5.0  # drafts that a rate counts for against those just accepted: fewer, and they come in runs
)
PRIOR = 6.0  # drafts of all requests that a request's own are weighed against
SAMPLES = (
    7  # latest times that count, by their median: rounds that something else held up are outvoted
)
ENOUGH = 2  # times of a k before they are believed; the first may have been cold
WARM_UP_ROUNDS = 4  # at the largest k, before anything else
PATIENCE = 8  # rounds in which plain ones seem better before one is run
# rounds with drafts before another k is timed: at first, from then on
TIME_FIRST = 8
TIME_EVERY = 48
# rounds without drafts between probes: at first, after vain ones
PROBE_EVERY = 16
PROBE_SELDOM = 256
# a probe's k, and how many requests' rounds it tries, at least
PROBE_LENGTH = 2
PROBE_OUTCOMES = 8
PROBE_MEMORY = (
    16.0  # drafts that earlier evidence counts for at a probe, at most: it can be overruled
)
COPIED = 0.6
PRIOR_COPIES = 4.0
"""Share of lookup's drafts that is hoped for at first, and for how many rounds."""


def chance_of_next(rate: float, accepted: int) -> float:
    """How likely a round's next draft is accepted after so many; `rate` is the first one's chance.

    Acceptance varies along a text: those before it say that this is a place where drafts are good.
    """
    return (rate * STEADINESS + accepted) / (STEADINESS + accepted) if rate else 0.0


@cache
def correlated_acceptance(tried: int) -> float:
    """How many of a round's drafts were accepted because those before them were, if so many were tried.

    Without them, accepted drafts over tried ones are on average the `rate` of `chance_of_next`.
    """
    return sum(before / (STEADINESS + before) for before in range(tried))


def expected_tokens(rates: Sequence[float], caps: Sequence[int], maximum: int) -> list[float]:
    """Tokens that a request commits in a round at every k from 0 to `maximum`: the mean over some requests.

    rates: how likely the first draft of each is accepted; caps: how many drafts each wants at most.
    """
    chances = [1.0] * len(rates)
    tokens = [1.0]
    for position in range(maximum):
        chances = [
            chance * chance_of_next(rate, position) if most > position else 0.0
            for chance, rate, most in zip(chances, rates, caps, strict=True)
        ]
        tokens.append(tokens[-1] + sum(chances) / len(chances))
    return tokens


@dataclass(slots=True)
class Acceptance:
    """Drafts of one request, or of all, that were accepted, and those that could have been: sums that fade.

    Both without those that were `correlated_acceptance` by the drafts before them.
    """

    accepted: float = 0.0
    tried: float = 0.0
    copies: bool = False
    """Whether prompt lookup beside a model has a match, whose drafts, if any, were all accepted."""

    def rate(self, prior: float) -> float:
        """The first draft's chance; `prior`, that of all requests, counts as `PRIOR` drafts."""
        return (self.accepted + PRIOR * prior) / (self.tried + PRIOR)

    def take(self, accepted: float, tried: float, share: float = 1.0) -> None:
        """Count drafts; what was counted before weighs `share` of what it did."""
        self.accepted = share * self.accepted + accepted
        self.tried = share * self.tried + tried


_latest: Callable[[], dict[int, deque[float]]] = partial(
    defaultdict, partial(deque, maxlen=SAMPLES)
)


@dataclass
class RoundTimes:
    """Rounds of about as many requests: the latest times in seconds, and when another k is tried."""

    verify: dict[int, deque[float]] = field(default_factory=_latest)  # by k
    draft: dict[int, deque[float]] = field(
        default_factory=_latest
    )  # by the number of draft forwards
    gaps: deque[float] = field(default_factory=lambda: deque([0.0], SAMPLES))
    """Between rounds: the least of them is what the host takes whatever k is, and writes no prompt."""
    begun: bool = False  # whether the first trials were ordered
    trials: deque[int] = field(default_factory=deque)  # the k of the next rounds, to be measured
    plain_best: int = 0  # rounds in a row since which plain ones seem best
    drafting: int = 0  # rounds in which drafts seemed best
    until_probe: int = PROBE_EVERY  # rounds without drafts before some are tried
    probe_gap: int = PROBE_EVERY

    def costs(self, ks: Iterable[int], *, model: bool = True) -> dict[int, float]:
        """Seconds of a round at each k, whose drafts a model makes or none; at first in verifications."""
        always = max(min(self.gaps), 1e-9)  # a clock may say zero
        verify = medians(self.verify) or {0: 1.0}
        draft = {0: 0.0, **medians(self.draft)}
        return {k: always + _at(k, verify) + _at(k if model else 0, draft) for k in ks}


@dataclass
class DraftLength:
    """Chooses k for the next round; `observe_cost` and `observe` feed it.

    A round in which the proposer had nothing to propose counts as a failure. All slots of a round weigh as
    much as all of another.
    """

    maximum: int
    adaptive: bool
    tiers: tuple[
        int, ...
    ] = ()  # the values of k to choose from; empty means all from 0 to `maximum`
    copying: int = 0
    """Above `maximum`: k of rounds for which prompt lookup drafts alone, where it has a match. 0: never."""
    copied: tuple[float, float] = field(init=False)
    """Of such rounds a request's accepted drafts, and how many rounds; they fade."""
    overall: Acceptance = field(default_factory=lambda: Acceptance(7.0, 10.0))
    """As of one request, of all; fades from round to round."""
    present: Sequence[tuple[Acceptance, int]] = ()
    """The requests of the next rounds: each one's acceptance, and how many drafts it wants at most."""
    times: RoundTimes = field(default_factory=RoundTimes)
    """Of rounds of about as many requests as take part now."""
    by_load: dict[int, RoundTimes] = field(default_factory=dict)
    """The times of any number of requests, by its bit length."""

    def __post_init__(self) -> None:
        self.tiers = self.tiers or tuple(range(self.maximum + 1))
        self.copied = PRIOR_COPIES * COPIED * self.copying, PRIOR_COPIES

    def attend(self, present: Sequence[tuple[Acceptance, int]]) -> None:
        """Say which requests take part from now on, and how many drafts each wants at most."""
        self.present = present
        self.times = self.by_load.setdefault(len(present).bit_length(), RoundTimes())

    def choose(self) -> int:
        """k for the next round: `copying`, or 0 to `maximum` and no more than any request wants."""
        wanted = max((most for _, most in self.present), default=self.maximum)
        maximum = min((k for k in self.tiers if k >= wanted), default=self.maximum)
        times = self.times
        if not self.adaptive or maximum == 0:
            return maximum or (self._copying_k(1.0 / times.costs([0])[0]) if self.copying else 0)
        if not times.begun:
            first = not any(load.verify for load in self.by_load.values())
            times.begun = True
            times.trials.extend(
                [self.maximum] * WARM_UP_ROUNDS if first else [self._probe_k] * ENOUGH
            )
        if not times.trials:
            speeds = self._tokens_a_second(maximum)
            best = max(speeds, key=speeds.__getitem__)
            times.plain_best = 0 if best else times.plain_best + 1
            if not best and times.plain_best <= PATIENCE:
                best = max(list(speeds)[1:], key=speeds.__getitem__)
            self._order_trials(best, list(speeds))
            if not times.trials:
                return self._copying_k(speeds[best]) or best
        return min(times.trials.popleft(), maximum)

    def _tokens_a_second(self, maximum: int) -> dict[int, float]:
        """What a round brings, by the values of k up to `maximum`."""
        rates = [one.rate(self.rate) for one, _ in self.present] or [self.rate]
        tokens = expected_tokens(rates, [most for _, most in self.present] or [maximum], maximum)
        costs = self.times.costs(k for k in self.tiers if k <= maximum)
        return {k: tokens[k] / cost for k, cost in costs.items()}

    def _order_trials(self, best: int, choices: list[int]) -> None:
        """Have another k than the best run next where that is due: 0 and neighbours in turn, or a probe."""
        times = self.times
        if best:
            times.until_probe = times.probe_gap = PROBE_EVERY
            times.drafting += 1
            timings, due_in = divmod(times.drafting - TIME_FIRST, TIME_EVERY)
            if timings >= 0 and not due_in:
                at = choices.index(best)
                others = list(dict.fromkeys((0, *choices[at + 1 : at + 2], choices[at - 1])))
                times.trials.extend([others[timings % len(others)]] * ENOUGH)
            return
        times.until_probe -= 1
        if times.until_probe <= 0:  # each probe costs a round of all: they become fewer
            times.until_probe = times.probe_gap = min(2 * times.probe_gap, PROBE_SELDOM)
            self.overall.take(0.0, 0.0, PROBE_MEMORY / max(self.overall.tried, PROBE_MEMORY))
            able = sum(most > 0 for _, most in self.present) or 1
            times.trials.extend([self._probe_k] * -(-PROBE_OUTCOMES // able))

    def _copying_k(self, speed: float) -> int:
        """k of a round of lookup alone, where that brings more than `speed` tokens a second; else 0."""
        copying = sum(one.copies and most > self.maximum for one, most in self.present)
        if not self.copying or not copying:
            return 0
        accepted, rounds = self.copied
        tokens = 1.0 + copying * accepted / rounds / len(self.present)
        cost = self.times.costs([self.copying], model=False)[self.copying]
        return self.copying if tokens / cost > speed else 0

    @property
    def rate(self) -> float:
        """How likely a round's first draft is accepted, over all requests; see `chance_of_next`."""
        return self.overall.accepted / self.overall.tried if self.overall.tried else 0.0

    @property
    def _probe_k(self) -> int:
        return next((k for k in self.tiers if k >= PROBE_LENGTH), self.tiers[-1])

    def likely_pairs(self, alone: bool) -> set[tuple[int, int]]:
        """Pairs of k and the next k that are nearly sure to come: of the largest and 0; alone the second."""
        if not self.adaptive:
            return {(0, self.maximum), (self.maximum, self.maximum)}
        near = {0, *self.tiers[-2 if alone else -1 :], *([self.copying] if alone else ())}
        return {(k, next_k) for k in near for next_k in near}

    def observe_cost(
        self, k: int, verify_seconds: float, draft_seconds: float, forwards: int, gap: float = 0.0
    ) -> None:
        """What a round at k took: its verification; what came after it, drafts in `forwards` passes too.

        `gap` seconds lay between it and the round before. Comes before its slots' outcomes.
        """
        if 0 < k <= self.maximum:
            self.overall.take(0.0, 0.0, DECAY)
        self.times.gaps.append(gap)
        self.times.verify[k].append(verify_seconds)
        self.times.draft[forwards].append(draft_seconds)

    def observe(
        self, k: int, drafted: int, accepted: int, own: Acceptance | None = None, match: int = 0
    ) -> None:
        """One slot's outcome of a round verified at k with `drafted` real drafts; `own` is its request's.

        match: tokens of the one that prompt lookup took the drafts from, where it did.
        """
        if self.copying and own is not None:
            if (
                own.copies and k > self.maximum and (drafted or not match)
            ):  # else it sat out those drafts
                before, rounds = self.copied
                self.copied = DECAY * before + accepted, DECAY * rounds + 1
            own.copies = match > 0 and accepted == drafted
        if not 0 < k <= self.maximum:
            return
        could = accepted + (accepted < drafted or not drafted)
        told = correlated_acceptance(could)
        self.overall.take(accepted - told, could - told)
        if own is not None:
            own.take(accepted - told, could - told, DECAY)


def medians(times: Mapping[int, deque[float]]) -> dict[int, float]:
    """The median of what has been timed enough, or else of all; the lower one of two."""
    enough = {k: each for k, each in times.items() if len(each) >= ENOUGH} or times
    return {k: sorted(each)[(len(each) - 1) // 2] for k, each in enough.items()}


def _at(k: int, known: Mapping[int, float]) -> float:
    """The value at k on the line through the nearest two known; none falls, and none is below 0."""
    near = sorted(known, key=lambda other: abs(other - k))[:2]
    first = near[0]
    last = near[-1]
    slope = (known[first] - known[last]) / (first - last) if first != last else 0.0
    return max(known[first] + (k - first) * max(slope, 0.0), 0.0)
