"""The choice of the draft length k for each round: fixed, or the k with the most tokens per second.

For every k of the plan, 0 included, two quantities are estimated. The first is the tokens of a
round: the probability that the first draft is accepted, weighted toward recent rounds, and the
higher probability of each further draft once those before it were accepted. The second is the
seconds of a round: the least of the latest times of verifying and drafting, separate for 1, 2 to
3, 4 to 7 requests and so on, and by the length of their contexts, for each row reads all of it.
The round runs the k with the most tokens per second.

Only a k that is run is measured. The first rounds run the largest k, then 0. While drafting pays,
0 and the neighbours of the best k are timed now and then. While it does not, a few drafts are
tried, ever more rarely. k = 0 is run once it has seemed best for a few rounds: afterwards the
drafter has to catch up. Next to a model prompt lookup may draft more than the model: alone where
text is copied, or behind the model's drafts. The choice does not change the text. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from spd.runtime.engine.round_times import MIN_SAMPLES, PROBE_INTERVAL, RoundTimes

DECAY = 0.96
"""Factor by which the weight of earlier rounds shrinks with each further round, in acceptance."""
RATE_WEIGHT = 5.0
"""Drafts that the rate counts for, against the drafts just accepted: accepted drafts come in runs."""
PRIOR_DRAFTS = 6.0
"""Drafts that the rate of all requests counts for, against a request's own drafts."""
PLAIN_SAMPLES = 4
"""Rounds at k = 0 that time it, in a row: only the later ones are as fast as many of them."""
WARM_UP_ROUNDS = 4
"""Rounds at the largest k, before any other."""
PLAIN_PATIENCE = 8
"""Rounds for which k = 0 has to seem best before it is run."""
FIRST_TIMING = 8
"""Rounds with drafts before another k is timed for the first time."""
TIMING_INTERVAL = 48
"""Rounds with drafts between two such timings."""
MAX_PROBE_INTERVAL = 256
"""Rounds without drafts between two probes, at most, after probes that did not pay.

Where drafts cost much, up to four times as many, until probes take a hundredth of the time."""
PROBE_LENGTH = 2
"""The k of a probe, at least."""
PROBE_OUTCOMES = 8
"""Outcomes of requests that a probe observes, at least."""
PROBE_MEMORY = 16.0
"""Drafts that earlier evidence counts for at a probe, at most, so that a probe can overrule it."""
PRIOR_LOOKUP_RATE = 0.85
"""The probability that is assumed at first of lookup's first draft."""
PRIOR_LOOKUP_DRAFTS = 12.0
"""Drafts that this assumption counts for."""
SHORT_CONTEXT = 2048
"""Positions below which contexts count as equally long; then up to twice as many, and so on."""
PRIOR_CHAINED_SHARE = 0.05
"""Share of a model's drafts that is assumed at first to end in text that lookup continues."""


def next_draft_probability(rate: float, accepted: int) -> float:
    """Return the probability that the next draft is accepted once a round's first `accepted` were.

    rate: that of the first draft, which counts as `RATE_WEIGHT` drafts. Each accepted draft raises
    it, for acceptance varies along a text. A rate of 0 stays 0.
    """
    return (rate * RATE_WEIGHT + accepted) / (RATE_WEIGHT + accepted) if rate else 0.0


@cache
def correlated_acceptance(tried: int) -> float:
    """Return how many of `tried` drafts are accepted on average because those before them were.

    Without these, accepted drafts over tried ones are on average the rate of
    `next_draft_probability`.
    """
    return sum(before / (RATE_WEIGHT + before) for before in range(tried))


def expected_tokens(rates: Sequence[float], caps: Sequence[int], maximum: int) -> list[float]:
    """Return the tokens that a request commits in a round, for every k from 0 to `maximum`.

    Each value is the mean over some requests. rates: the probability that the first draft of each
    is accepted. caps: how many drafts each takes at most.
    """
    probabilities = [1.0] * len(rates)
    tokens = [1.0]
    for position in range(maximum):
        probabilities = [
            probability * next_draft_probability(rate, position) if cap > position else 0.0
            for probability, rate, cap in zip(probabilities, rates, caps, strict=True)
        ]
        tokens.append(tokens[-1] + sum(probabilities) / len(probabilities))
    return tokens


@dataclass(slots=True)
class Acceptance:
    """Accepted and tried drafts of one request, or of all requests, as decaying sums.

    Both without the `correlated_acceptance` of the drafts.
    """

    accepted: float = 0.0
    tried: float = 0.0
    has_lookup_match: bool = False
    """True if prompt lookup next to a model has a match, and the drafts, if any, were all accepted."""

    def rate(self, prior: float) -> float:
        """Return the estimated probability that the first draft of a round is accepted.

        prior: that of all requests, which counts as `PRIOR_DRAFTS`.
        """
        return (self.accepted + PRIOR_DRAFTS * prior) / (self.tried + PRIOR_DRAFTS)

    def add(self, accepted: float, tried: float, decay: float = 1.0) -> None:
        """Add accepted and tried drafts to the sums, which are first multiplied by `decay`."""
        self.accepted = decay * self.accepted + accepted
        self.tried = decay * self.tried + tried


@dataclass
class DraftLength:
    """Chooses k, the drafts of a slot in the next round, from what it observes.


    A round in which the proposer had nothing to propose counts as a failure. All slots of one round
    weigh as much as all slots of another.
    """

    maximum: int  # the largest k of a model's drafts, or of lookup alone
    adaptive: bool  # False: k is `maximum`, or less where no request takes so many drafts
    tiers: tuple[int, ...] = ()
    """The values of k to choose from; empty: all from 0 to `maximum`."""
    lookup_k: int = 0
    """The k of rounds in which prompt lookup may draft more than the model, above `maximum`.

    0: never.
    """
    drafts_at_once: bool = False
    """True if one draft forward makes all drafts of a round."""
    chained: int = 0
    """Drafts of a model that lookup continues in the round that was chosen last.

    0: one of them drafts.
    """
    lookup: Acceptance = field(
        default_factory=lambda: Acceptance(
            PRIOR_LOOKUP_RATE * PRIOR_LOOKUP_DRAFTS, PRIOR_LOOKUP_DRAFTS
        )
    )
    """The acceptance of lookup's drafts next to a model."""
    chained_share: float = PRIOR_CHAINED_SHARE
    """Share of the model's drafts that were all accepted and that lookup did or could continue."""
    overall: Acceptance = field(default_factory=lambda: Acceptance(7.0, 10.0))
    """The acceptance of all requests as if of one; decays from round to round."""
    requests: Sequence[tuple[Acceptance, int]] = ()
    """The requests of the next rounds: the acceptance of each, and how many drafts it takes at most."""
    times: RoundTimes = field(default_factory=RoundTimes)
    """Times of rounds with about as many requests as take part now."""
    context_class: int = 0
    """The `context_class` of the positions of the requests' contexts."""
    is_constrained: bool = False
    """True if one of the requests has a grammar."""
    times_by_load: dict[tuple[int, bool, int], RoundTimes] = field(default_factory=dict)
    """The times by the bit length of the number of requests, by whether one of them has a grammar, and by
    the class of their contexts."""

    def __post_init__(self) -> None:
        self.tiers = self.tiers or tuple(range(self.maximum + 1))
        self.times.drafts_at_once = self.drafts_at_once

    def set_requests(
        self, requests: Sequence[tuple[Acceptance, int]], *, is_constrained: bool = False
    ) -> None:
        """Set the requests that take part from now on, and how many drafts each takes at most.

        is_constrained: True if one of them has a grammar.
        """
        self.requests = requests
        self.is_constrained = is_constrained
        self._select_times()

    def set_positions(self, positions: int) -> None:
        """Set the mean positions of the requests' contexts."""
        if context_class(positions) != self.context_class:
            self.context_class = context_class(positions)
            self._select_times()

    def _select_times(self) -> None:
        """Set `times` to those of rounds with such requests; schedule trials if there are none.


        Where there are none, those of as many requests with other contexts serve until such rounds
        are measured, plain ones at once: verification and drafting grow differently with a context.
        """
        load = len(self.requests).bit_length()
        key = (load, self.is_constrained, self.context_class)
        if key not in self.times_by_load:
            similar_keys = [other for other in self.times_by_load if other[:2] == key[:2]]
            nearest = min(similar_keys, key=lambda other: abs(other[2] - key[2]), default=None)
            times = RoundTimes(
                is_constrained=self.is_constrained, drafts_at_once=self.drafts_at_once
            )
            if nearest is not None and self.times_by_load[nearest].verify:
                times.similar = self.times_by_load[nearest]
                times.has_started = True
                times.trials.extend([0] * MIN_SAMPLES)
            self.times_by_load[key] = times
        self.times = self.times_by_load[key]

    def choose_k(self) -> int:
        """Return k for the next round, no higher than the caps need, and set `chained`."""
        cap = max((cap for _, cap in self.requests), default=self.maximum)
        maximum = min((k for k in self.tiers if k >= cap), default=self.maximum)
        times = self.times
        self.chained = 0
        if not self.adaptive or maximum == 0:
            return maximum
        if not times.has_started:
            is_first_load = not any(load.verify for load in self.times_by_load.values())
            times.has_started = True
            times.trials.extend(
                [self.maximum] * WARM_UP_ROUNDS if is_first_load else [self._probe_k] * MIN_SAMPLES
            )
            if times.is_constrained:  # no forward waits for a mask where lookup drafts alone
                times.trials.extend([self.lookup_k] * (1 + MIN_SAMPLES if self.lookup_k else 0))
            if times.is_constrained or is_first_load:
                times.trials.extend([0] * PLAIN_SAMPLES)
        if not times.trials:
            speeds = self._tokens_per_second(maximum)
            best = max(speeds, key=speeds.__getitem__)
            times.plain_best = 0 if best else times.plain_best + 1
            if not best and times.plain_best <= PLAIN_PATIENCE:
                best = max(list(speeds)[1:], key=speeds.__getitem__)
            self._schedule_trials(best, list(speeds))
            if not times.trials:
                return self._choose_lookup(speeds[best]) or best if self.lookup_k else best
        k = times.trials.popleft()
        return k if k == self.lookup_k and cap > self.maximum else min(k, maximum)

    def longest_k(self, k: int) -> int:
        """Return the most drafts that one request's may become by tokens that are sure, for k.

        The round is verified at as many, which has to pay with all of them accepted.
        """
        largest = max(self.maximum, self.lookup_k)
        if not self.adaptive or k >= largest:
            return k
        added_tokens = (largest - k) / max(len(self.requests), 1)
        cost = self.times.costs([k])[k]
        longer_cost = self.times.costs([k], largest)[k]
        return largest if added_tokens * cost > (longer_cost - cost) * (1 + k) else k

    def round_up(self, drafts: int) -> int:
        """Return the least k that rounds may have and that is no less than a number of drafts."""
        larger = [k for k in (*self.tiers, self.lookup_k) if k >= drafts]
        return min(larger, default=drafts)

    def _tokens_per_second(self, maximum: int) -> dict[int, float]:
        """Return the expected tokens per second of a round at each k up to `maximum`."""
        rates = [acceptance.rate(self.rate) for acceptance, _ in self.requests] or [self.rate]
        caps = [cap for _, cap in self.requests] or [maximum]
        tokens = expected_tokens(rates, caps, maximum)
        costs = self.times.costs(k for k in self.tiers if k <= maximum)
        return {k: tokens[k] / cost for k, cost in costs.items()}

    def _schedule_trials(self, best: int, choices: list[int]) -> None:
        """Schedule rounds at another k than the best where due: 0 and neighbours in turn, or a probe."""
        times = self.times
        if best:
            times.until_probe = times.probe_gap = PROBE_INTERVAL
            times.drafting += 1
            timings, due_in = divmod(times.drafting - FIRST_TIMING, TIMING_INTERVAL)
            if timings >= 0 and not due_in:
                index = choices.index(best)
                larger = choices[index + 1 : index + 2]
                other_ks = list(dict.fromkeys((0, *larger, choices[index - 1])))
                other_k = other_ks[timings % len(other_ks)]
                times.trials.extend([other_k] * (MIN_SAMPLES if other_k else PLAIN_SAMPLES))
            return
        times.until_probe -= 1
        if times.until_probe <= 0:  # each probe costs a round of all: they become fewer
            longest = round(100 * PROBE_OUTCOMES * (self.break_even(self._probe_k) - 1))
            longest = min(max(longest, MAX_PROBE_INTERVAL), 4 * MAX_PROBE_INTERVAL)
            times.until_probe = times.probe_gap = min(2 * times.probe_gap, longest)
            self.overall.add(0.0, 0.0, PROBE_MEMORY / max(self.overall.tried, PROBE_MEMORY))
            drafting_requests = sum(cap > 0 for _, cap in self.requests) or 1
            times.trials.extend([self._probe_k] * -(-PROBE_OUTCOMES // drafting_requests))

    def _choose_lookup(self, speed: float) -> int:
        """Return `lookup_k` where lookup, alone or behind a model, exceeds `speed`; else 0.

        Sets `chained`. speed: tokens per second. A request with a match is assumed to be in copied
        text, where lookup drafts alone; of others the model's drafts are continued.
        """
        requests = [(acceptance, cap) for acceptance, cap in self.requests if cap > self.maximum]
        if not requests:
            return 0
        rates = [acceptance.rate(self.rate) for acceptance, _ in requests]
        model_tokens = expected_tokens(rates, [cap for _, cap in requests], self.maximum)
        lookup_rate = self.lookup.accepted / self.lookup.tried
        lookup_tokens = expected_tokens([lookup_rate], [self.lookup_k], self.lookup_k)
        chosen = 0
        matching = sum(acceptance.has_lookup_match for acceptance, _ in requests) / len(requests)
        for model_k, cost in self.times.costs(self.tiers, self.lookup_k).items():
            if not model_k and not matching:
                continue
            gain = lookup_tokens[self.lookup_k - model_k] - 1.0 if model_k else 0.0
            tokens = model_tokens[model_k] + self.chained_share * gain
            tokens += matching * (lookup_tokens[self.lookup_k] - tokens)
            if tokens / cost > speed:
                speed = tokens / cost
                chosen = self.lookup_k
                self.chained = model_k
        return chosen

    def break_even(self, k: int) -> float:
        """Return the tokens that a round of k drafts has to commit to be worth its time."""
        costs = self.times.costs([0, k])
        return costs[k] / costs[0]

    @property
    def rate(self) -> float:
        """The first draft's probability over all requests; see `next_draft_probability`."""
        return self.overall.accepted / self.overall.tried if self.overall.tried else 0.0

    @property
    def _probe_k(self) -> int:
        """Return the k of a probe: the least tier from `PROBE_LENGTH` on, or the largest."""
        return next((k for k in self.tiers if k >= PROBE_LENGTH), self.tiers[-1])

    def likely_pairs(self, alone: bool) -> set[tuple[int, int]]:
        """Return the pairs of k and next k that will almost certainly occur: of the largest and 0.

        alone: True for one request alone, for which the second largest and `lookup_k` count too.
        """
        if not self.adaptive:
            return {(0, self.maximum), (self.maximum, self.maximum)}
        likely = {0, *self.tiers[-2 if alone else -1 :], *([self.lookup_k] if alone else ())}
        return {(k, next_k) for k in likely for next_k in likely}

    def observe_cost(
        self, k: int, verify_seconds: float, draft_seconds: float, forwards: int, gap: float = 0.0
    ) -> None:
        """Record the times of a round at k; called before the outcomes of its slots.

        draft_seconds: the time after verification, with drafts in `forwards` passes. gap: seconds
        between this round and the one before.
        """
        if 0 < k <= self.maximum:
            self.overall.add(0.0, 0.0, DECAY)
        self.times.gaps[k if self.times.is_constrained else 0].append(gap)
        self.times.draft[forwards].append(draft_seconds)
        self.times.verify[k].append(verify_seconds)

    def observe(
        self,
        k: int,
        drafted: int,
        accepted: int,
        acceptance: Acceptance | None = None,
        match: int = 0,
    ) -> None:
        """Record one slot's outcome of a round verified at k.

        drafted: the drafts that the slot had, of the k that there was room for. acceptance: that of
        the slot's request. match: tokens of prompt lookup's match, at k = 0 too; 0 where there was
        none; below 0 how many of the drafts a model made before those of lookup, if any.
        """
        if self.lookup_k and acceptance is not None:
            self._observe_lookup(k, drafted, accepted, acceptance, match)
            if match > 0 or (k > self.maximum and not drafted):
                return
            if match < 0:
                drafted = min(drafted, -match)
                accepted = min(accepted, -match)
            k = min(k, self.maximum)
        if not 0 < k <= self.maximum:
            return
        tried, accepted_alone = uncorrelated_drafts(drafted, accepted)
        self.overall.add(accepted_alone, tried)
        if acceptance is not None:
            acceptance.add(accepted_alone, tried, DECAY)

    def _observe_lookup(
        self, k: int, drafted: int, accepted: int, acceptance: Acceptance, match: int
    ) -> None:
        """Record what lookup drafted next to a model, or could have; as `observe`."""
        by_model = max(-match, 0)
        if match and drafted > by_model and accepted >= by_model:
            tried, accepted_alone = uncorrelated_drafts(drafted - by_model, accepted - by_model)
            self.lookup.add(accepted_alone, tried, DECAY)
        elif acceptance.has_lookup_match and k > self.maximum and not match:
            self.lookup.add(0.0, 1.0, DECAY)
        if match <= 0 and drafted:
            is_continued = match < 0 and accepted >= by_model
            self.chained_share += (1.0 - DECAY) * (is_continued - self.chained_share)
        acceptance.has_lookup_match = match != 0 and accepted == drafted


def uncorrelated_drafts(drafted: int, accepted: int) -> tuple[float, float]:
    """Return the tried and accepted drafts of a slot, less their `correlated_acceptance`.


    A slot without drafts counts as one that was tried.
    """
    tried = accepted + (accepted < drafted or not drafted)
    correlated = correlated_acceptance(tried)
    return tried - correlated, accepted - correlated


def context_class(positions: int) -> int:
    """Return 0 for contexts below `SHORT_CONTEXT`, 1 up to twice that, 2 up to four times, …"""
    return (positions // SHORT_CONTEXT).bit_length()


def first_position_of_class(number: int) -> int:
    """Return the least number of positions of a context of class `number`; see `context_class`."""
    return SHORT_CONTEXT << number - 1 if number else 0
