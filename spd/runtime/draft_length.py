"""How many tokens to draft next: fixed, or the k that measured acceptance and cost favour. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from spd.runtime.round_times import ENOUGH, FADE, RoundTimes

DECAY = 0.96
"""What earlier rounds weigh after one more, in acceptance."""
WARM_UP_ROUNDS = 4
"""At the largest k, before anything else."""
PATIENCE = 8
"""Rounds in which plain ones seem better before one is run: from them the drafter has to catch up."""
PROBE_LENGTH = 2
PROBE_OUTCOMES = 8
"""Drafts that a probe is to try, at least."""
PROBE_MEMORY = 16.0
"""The drafts that earlier evidence counts for at a probe, at most, so that its outcome can overrule it."""
STEADINESS = 5.0
"""The drafts that a rate counts for against those just accepted: the fewer, the more they come in runs."""
PRIOR = 6.0
"""Drafts of other requests that a request's own evidence is weighed against."""
LOST, FOUND, FOLLOWED = 0, 1, 2
"""Whether lookup has no match in a text, has one, or its drafts were all accepted: text is being copied."""
COPIED, PRIOR_COPIES = {FOUND: 0.4, FOLLOWED: 0.75}, 4.0
"""Share of lookup's drafts that is hoped for at first, and for how many rounds."""


def chance_of_next(rate: float, accepted: int) -> float:
    """How likely a round's next draft is accepted after so many; `rate` is the first one's chance.

    Acceptance varies along a text: those before it say that this is a place where drafts are good.
    """
    return (rate * STEADINESS + accepted) / (STEADINESS + accepted) if rate else 0.0


@cache
def foretold(tried: int) -> float:
    """How many of a round's drafts were accepted because those before them were, if so many were tried.

    Less them, accepted drafts over tried ones are on average the `rate` of `chance_of_next`.
    """
    return sum(before / (STEADINESS + before) for before in range(tried))


@dataclass(slots=True)
class Acceptance:
    """One request's drafts that were accepted, and those that could have been: sums that fade.

    Both without those that were foretold by the drafts before them.
    """

    accepted: float = 0.0
    tried: float = 0.0
    trail: int = LOST
    """What prompt lookup beside a model has of it; see `LOST`."""

    def rate(self, prior: float) -> float:
        """The first draft's chance; `prior`, that of all requests, counts as `PRIOR` drafts."""
        return (self.accepted + PRIOR * prior) / (self.tried + PRIOR)


@dataclass
class DraftLength:
    """Chooses k for the next round; `observe` feeds it. Never changes the text, only the speed.

    `rate` is the measured chance of a round's first draft, of which all that could have been accepted tell;
    a round in which the proposer had nothing to propose counts as a failure. All slots of a round weigh as
    much as all of another. Times in seconds.
    """

    maximum: int
    adaptive: bool
    tiers: tuple[int, ...] = ()
    """The values of k to choose from; empty means all from 0 to `maximum`."""
    copying: int = 0
    """Above `maximum`: k of rounds for which prompt lookup drafts alone, where it has a match. 0: never."""
    copied: dict[int, tuple[float, float]] = field(init=False)
    """Of such rounds, by what lookup had: a request's accepted drafts, and how many rounds; they fade."""
    asked: Sequence[tuple[Acceptance, int]] = ()
    """As `present`, with how many drafts each wants where no model needs to know its text."""
    accepted: float = 7.0
    tried: float = 10.0
    """As of one request, of all: sums that fade from round to round."""
    present: Sequence[tuple[Acceptance, int]] = ()
    """Who takes part in the next rounds: each one's acceptance, and how many drafts it wants at most."""
    wanted: int = field(init=False)
    """The most drafts that anybody present wants."""
    times: RoundTimes = field(default_factory=RoundTimes)
    """Of rounds of about as many requests as take part now."""
    by_load: dict[int, RoundTimes] = field(default_factory=dict)
    """The times of any number of requests, by its bit length."""

    def __post_init__(self) -> None:
        self.wanted = self.maximum
        hopes = {trail: share * self.copying for trail, share in COPIED.items()}
        self.copied = {trail: (PRIOR_COPIES * hope, PRIOR_COPIES) for trail, hope in hopes.items()}

    @property
    def rate(self) -> float:
        """How likely a round's first draft is accepted; see `chance_of_next`."""
        return self.accepted / self.tried if self.tried else 0.0

    def attend(
        self, present: Sequence[tuple[Acceptance, int]], asked: Sequence[tuple[Acceptance, int]] = ()
    ) -> None:
        """Say who takes part from now on; costs are kept apart for 1, 2 to 3, 4 to 7 requests and so on."""
        self.present, self.asked = present, asked or present
        self.wanted = max((most for _, most in present), default=self.maximum)
        self.times = self.by_load.setdefault(len(present).bit_length(), RoundTimes())

    def expected(self, maximum: int, rates: Sequence[float] = ()) -> list[float]:
        """Tokens that a request commits in a round at every k from 0 to `maximum`: on average over those
        present, or over some who accept these shares.
        """
        caps, tokens = [most for _, most in self.present], [1.0]
        if rates or not caps:
            rates = rates or [self.rate]
            caps = [maximum] * len(rates)
        else:
            prior = self.rate
            rates = [one.rate(prior) for one, _ in self.present]
        chances = [1.0] * len(rates)
        for position in range(maximum):
            chances = [
                chance * chance_of_next(rate, position) if most > position else 0.0
                for chance, rate, most in zip(chances, rates, caps, strict=True)
            ]
            tokens.append(tokens[-1] + sum(chances) / len(chances))
        return tokens

    def choose(self) -> int:
        """k for the next round, 0 to `maximum`, and no more than anybody present wants."""
        choices = self.tiers or tuple(range(self.maximum + 1))
        maximum = min((k for k in choices if k >= self.wanted), default=self.maximum)
        times = self.times
        if not self.adaptive or maximum == 0:
            times.since_probe += 1  # so that who is prepared is drafted for soon
            return maximum or (self._copying_k(1.0 / times.costs(0)[0]) if self.copying else 0)
        if not times.begun:
            times.begun, first = True, not any(load.verify for load in self.by_load.values())
            times.try_out(self.maximum if first else _probe(choices), WARM_UP_ROUNDS if first else ENOUGH)
        if not times.trials:
            choices = tuple(k for k in choices if k <= maximum)
            worth = _worth(choices, self.expected(maximum), times)
            best = max(choices, key=lambda k: worth[k])
            times.plain_best = 0 if best else times.plain_best + 1
            if not best and times.plain_best <= PATIENCE:
                best = max(choices[1:], key=lambda k: worth[k])
            if best:
                times.drafted(best, choices)
            elif times.probe_is_due():
                self._fade(PROBE_MEMORY / max(self.tried, PROBE_MEMORY))
                able = sum(most > 0 for _, most in self.present) or 1
                times.try_out(_probe(choices), -(-PROBE_OUTCOMES // able))
            if not times.trials:
                return self._copying_k(worth[best]) or best
        return min(times.trials.popleft(), maximum)

    def _copying_k(self, worth: float) -> int:
        """k of a round of lookup alone, where that is worth more than the best other one; else 0."""
        trails = [one.trail for one, most in self.asked if one.trail and most > self.maximum]
        if not self.copying or not trails:
            return 0
        hopes = {trail: accepted / rounds for trail, (accepted, rounds) in self.copied.items()}
        tokens = 1.0 + sum(hopes[trail] for trail in trails) / len(self.asked)
        return self.copying if tokens / self.times.cost_without_model(self.copying) > worth else 0

    def usual_pairs(self, alone: bool) -> set[tuple[int, int]]:
        """Pairs of k and the next k that are nearly sure to come: of the largest and 0; alone the second."""
        if not self.adaptive:
            return {(0, self.maximum), (self.maximum, self.maximum)}
        near = {0, *(self.tiers or range(self.maximum + 1))[-2 if alone else -1 :]}
        near |= {self.copying} if alone and self.copying else set()
        return {(k, next_k) for k in near for next_k in near}

    def prepares(self, together: int) -> bool:
        """Whether a request is worth preparing for drafting that is admitted when so many are together."""
        times = self.by_load.get(together.bit_length())
        if not self.adaptive or self.maximum == 0 or times is None or not times.verify:
            return True
        choices = self.tiers or tuple(range(self.maximum + 1))
        worth = _worth(choices, self.expected(self.maximum, [self.rate]), times)
        return times.prepares(max(worth[k] for k in choices if k) / worth[0], together)

    def observe_request(self, prepared: bool, together: int, seconds: float, tokens: int) -> None:
        """What a request took of the engine's time and brought; see `prepares`."""
        spent = self.by_load.setdefault(together.bit_length(), RoundTimes()).spent
        earlier, before = spent[prepared]
        spent[prepared] = FADE * earlier + seconds, FADE * before + tokens

    def _fade(self, share: float) -> None:
        self.accepted *= share
        self.tried *= share

    def observe(
        self, k: int, drafted: int, accepted: int, own: Acceptance | None = None, match: int = 0
    ) -> None:
        """One slot's outcome of a round verified at k with `drafted` real drafts; `own` is its request's.

        match: tokens of the one that prompt lookup took the drafts from, where it did.
        """
        if self.copying and own is not None:
            if own.trail and k > self.maximum and (drafted or not match):  # else it sat out those drafts
                before, rounds = self.copied[own.trail]
                self.copied[own.trail] = DECAY * before + accepted, DECAY * rounds + 1
            own.trail = LOST if not match or accepted < drafted else FOLLOWED if drafted else FOUND
        if not 0 < k <= self.maximum:
            return
        could = accepted + (accepted < drafted or not drafted)
        told = foretold(could)
        self.accepted += accepted - told
        self.tried += could - told
        if own is not None:
            own.accepted = DECAY * own.accepted + accepted - told
            own.tried = DECAY * own.tried + could - told

    def observe_cost(
        self, k: int, verify_seconds: float, draft_seconds: float, forwards: int, gap: float = 0.0
    ) -> None:
        """What a round at k took: its verification; what came after it, drafts in `forwards` passes too.

        `gap` seconds lay between it and the round before. Comes before its slots' outcomes.
        """
        if 0 < k <= self.maximum:
            self._fade(DECAY)
        self.times.gaps.append(gap)
        self.times.verify[k].append(verify_seconds)
        self.times.draft[forwards].append(draft_seconds)


def _probe(choices: Sequence[int]) -> int:
    """The least of the choices that is no shorter than a probe, or the largest."""
    return next((k for k in choices if k >= PROBE_LENGTH), choices[-1])


def _worth(choices: Sequence[int], expected: Sequence[float], times: RoundTimes) -> dict[int, float]:
    """Tokens a second by k; expected: those of a round."""
    costs = times.costs(choices[-1])
    return {k: expected[k] / costs[k] for k in choices}
