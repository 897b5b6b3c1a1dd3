"""Why speculation pays or does not, from the rounds of a trace: costs, acceptance, what-if, and words.

Nothing is run: every figure follows from the trace. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.lab.cost_model import (
    Acceptance,
    CostModel,
    fit_acceptances,
    fit_costs,
    tokens_per_second,
)
from spd.runtime.lab.explain_words import advice, paragraph
from spd.runtime.lab.trace_file import Trace
from spd.runtime.plan.config import MAX_DRAFT, split_spec

SCHEMA = "spd.explain/1"
NGRAM_LENGTHS = (3, 8)
"""Shortest and longest match of the simulated lookup, where the trace does not say."""
BEYOND = 2
"""Drafts a round that are weighed beyond the most that a trace held: of more it knows nothing."""


@dataclass(frozen=True)
class Prospect:
    """What one way of decoding would give on this machine and text."""

    method: str
    k: int
    length: float
    round_ms: float
    tokens_per_second: float
    speed_up: float


@dataclass(frozen=True)
class Explanation:
    """Everything that a trace says."""

    method: str
    k: int
    """The most common number of drafts a round; 0 where none were drafted."""
    rounds: int
    tokens_per_second: float
    costs: CostModel
    acceptance: Acceptance
    plain: Prospect
    now: Prospect
    own: tuple[Prospect, ...]
    """The trace's own drafter at every k."""
    ngram: tuple[Prospect, ...]
    sampled: bool
    rule: str
    bounded: Prospect | None
    """At most what --verify rejection would give, where tokens were sampled and noise was coupled."""
    prompt_known: bool
    imposed: bool
    """Whether acceptance was imposed and not measured."""
    other_load: float
    """CPUs that other programs kept busy, on average."""
    state_bytes: int
    """Of a request's recurrent states, which a round reads and writes once."""

    @property
    def best(self) -> Prospect:
        """The fastest prospect: plain decoding, the trace's drafter, or lookup by more than 2 %."""
        best = max((self.plain, *self.own), key=lambda prospect: prospect.tokens_per_second)
        lookup = max(self.ngram, key=lambda prospect: prospect.tokens_per_second, default=best)
        return lookup if lookup.tokens_per_second > 1.02 * best.tokens_per_second else best

    def break_even(self, k: int) -> float:
        """Tokens a round from which k drafts pay."""
        return self.costs.round_ms(k) / self.costs.round_ms(0)

    def as_dict(self) -> dict[str, Any]:
        """The object of `spd explain --json`."""
        reason, try_next = advice(self)
        return {
            "schema": SCHEMA,
            "method": self.method,
            "k": self.k,
            "rounds": self.rounds,
            "tokens_per_second": self.tokens_per_second,
            "verify_ms": {str(rows): ms for rows, ms in self.costs.verify.items()},
            "plain_measured": self.costs.plain_measured,
            "draft_ms": {str(k): ms for k, ms in self.costs.draft.items()},
            "rest_ms": self.costs.rest,
            "host_ms": self.costs.host,
            "other_load": self.other_load,
            "acceptance": "imposed" if self.imposed else "natural",
            "acceptance_length": self.now.length,
            "survival": list(self.acceptance.survival),
            "conditional_rates": list(self.acceptance.conditional),
            "break_even": {str(prospect.k): self.break_even(prospect.k) for prospect in self.own},
            "plain": vars(self.plain),
            "now": vars(self.now),
            "prospects": [vars(prospect) for prospect in (*self.own, *self.ngram)],
            "rejection_at_most": None if self.bounded is None else vars(self.bounded),
            "best": vars(self.best),
            "bottleneck": reason,
            "try": try_next,
            "words": paragraph(self),
        }


def explain(traces: Sequence[Trace]) -> Explanation:
    """Weigh the rounds of one or more traces of one model; costs come from all, acceptance from those
    that drafted."""
    records = [record for trace in traces for record in trace.rounds]
    costs = fit_costs(records)
    drafting = [trace for trace in traces if any(record.k for record in trace.rounds)]
    own_records = [record for trace in drafting for record in trace.rounds]
    asked = [_without_copies(trace) for trace in drafting]
    acceptance = fit_acceptances(asked)
    used = Counter(record.k for rounds in asked for record in rounds if record.k)
    k = used.most_common(1)[0][0] if used else 0
    plain = _prospect("plain", costs, acceptance, 0, costs.round_ms(0))
    header = next((trace.header for trace in [*drafting, *traces] if trace.header is not None), None)
    plan = header.plan if header is not None else {}
    sampled = header is not None and header.temperature > 0
    rule, states = str(plan.get("verify", "coupled")), plan.get("state_bytes")
    method = own_records[0].method if own_records else "off"
    prompt_known = header is not None and bool(header.prompt_ids)
    longest = max(used, default=0)
    simulated = method == "ngram" and prompt_known  # what lookup finds follows from the text
    beyond = 0 if simulated or split_spec(method)[1] else BEYOND
    furthest = min(MAX_DRAFT, longest + beyond) if used else 0
    own = tuple(_prospect(method, costs, acceptance, each, plain.round_ms) for each in range(1, furthest + 1))
    ngram = _lookup_prospects(traces, costs, plain.round_ms) if method != "ngram" or simulated else ()
    bounded = None
    if k and sampled and rule == "coupled":
        bounded = _prospect(f"{method} rejection", costs, acceptance.bounded(k), k, plain.round_ms)
    return Explanation(
        method=method,
        k=k,
        rounds=len(records),
        tokens_per_second=_measured(own_records or records),
        costs=costs,
        acceptance=acceptance,
        plain=plain,
        now=own[k - 1] if k else plain,
        own=own,
        ngram=tuple(each for each in ngram if each.k > longest or method != "ngram"),
        sampled=sampled,
        rule=rule,
        bounded=bounded,
        prompt_known=prompt_known,
        imposed=plan.get("synthetic_acceptance") is not None,
        other_load=round(sum(record.other_load for record in records) / max(1, len(records)), 2),
        state_bytes=states if isinstance(states, int) else 0,
    )


def _without_copies(trace: Trace) -> list[RoundRecord]:
    """A trace's rounds without those for which lookup beside a model drafted alone, while text was copied."""
    most = MAX_DRAFT if trace.header is None else trace.header.plan.get("model_drafts", MAX_DRAFT)
    return [record for record in trace.rounds if record.k <= most]


def _prospect(method: str, costs: CostModel, acceptance: Acceptance, k: int, plain_ms: float) -> Prospect:
    ms, length = costs.round_ms(k), acceptance.length(k)
    speed = tokens_per_second(costs, acceptance, k)
    return Prospect(method, k, length, ms, speed, length * plain_ms / ms if ms else 0.0)


def _measured(records: Sequence[RoundRecord]) -> float:
    """Committed tokens over the time of their rounds."""
    ms = sum(sum(record.ms.values()) for record in records)
    return 1000 * sum(len(record.committed) for record in records) / ms if ms else 0.0


def _lookup_prospects(traces: Sequence[Trace], costs: CostModel, plain_ms: float) -> tuple[Prospect, ...]:
    """What n-gram lookup would have given on the same text, by simulating it."""
    free = CostModel(costs.verify, {}, costs.rest, costs.host)
    found = []
    for k in (1, 2, 3, 4, 6, 8, 12, 16):
        accepted = [
            each
            for trace in traces
            for tokens in trace.committed.values()
            for each in simulate_lookup(trace.header.prompt_ids if trace.header else (), tokens, k)
        ]
        if accepted:
            survival = tuple(sum(each > i for each in accepted) / len(accepted) for i in range(k))
            found.append(_prospect("ngram", free, Acceptance(survival, len(accepted)), k, plain_ms))
    return tuple(found)


def simulate_lookup(
    prompt: Sequence[int],
    generated: Sequence[int],
    k: int,
    shortest: int = NGRAM_LENGTHS[0],
    longest: int = NGRAM_LENGTHS[1],
) -> list[int]:
    """Accepted drafts of every round that lookup would have taken over a text, the first token given.

    The drafts follow the latest earlier occurrence of the longest suffix that has one, and go on with the
    period where less than k tokens followed it.
    """
    text = [*prompt, *generated]
    seen: dict[tuple[int, ...], int] = {}
    indexed, at, accepted = 0, len(prompt) + 1, []
    while at < len(text):
        for end in range(indexed, at - 1):  # everything that ends before the last token
            for size in range(shortest, longest + 1):
                if size <= end + 1:
                    seen[tuple(text[end + 1 - size : end + 1])] = end + 1
        indexed = max(indexed, at - 1)
        start = next(
            (
                seen[suffix]
                for size in range(min(longest, at), shortest - 1, -1)
                if (suffix := tuple(text[at - size : at])) in seen
            ),
            at,
        )
        draft = [text[start + i % (at - start)] for i in range(k)] if start < at else []
        right = 0
        while right < len(draft) and at + right < len(text) and draft[right] == text[at + right]:
            right += 1
        accepted.append(right)
        at += right + 1
    return accepted
