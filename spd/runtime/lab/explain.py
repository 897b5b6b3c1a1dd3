"""Why speculation pays or does not, from the rounds of a trace: costs, acceptance, what-if, and words.

Nothing is run: every figure follows from the trace. No torch here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spd.errors import UsageError
from spd.formats.files import LINES_LIMIT, read_input_text
from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.lab.cost_model import Acceptance, CostModel, fit_acceptances, fit_costs
from spd.runtime.plan.config import MAX_DRAFT, split_spec
from spd.runtime.plan.memory import show_size
from spd.runtime.round.cpu_load import SLIGHT

HEADER = "spd.trace/1"
PARTS = ("draft", "verify", "rest", "host")
"""Of a round's time."""


@dataclass(frozen=True)
class TraceHeader:
    """The first line of a trace file: what the rounds alone do not say."""

    model: str
    temperature: float
    plan: Mapping[str, Any]
    prompt_ids: tuple[int, ...] = ()
    schema: str = HEADER


@dataclass
class Trace:
    """Rounds in the order read, without those that follow a prompt: nothing was drafted for them."""

    rounds: list[RoundRecord] = field(default_factory=list)
    header: TraceHeader | None = None
    committed: dict[str, list[int]] = field(default_factory=dict)
    """Every committed token of each request, the first rounds' too."""

    def add(self, record: RoundRecord) -> None:
        """Take a round."""
        self.committed.setdefault(record.request, []).extend(record.committed)
        if record.round > 0:
            self.rounds.append(record)


def read_traces(paths: Iterable[Path]) -> list[Trace]:
    """One trace a file. Raises NotFoundError, and UsageError naming the line that is none."""
    return [_read(path) for path in paths]


def _round(value: Mapping[str, Any]) -> RoundRecord:
    """A round whose values are of their kinds; raises TypeError or KeyError for one that is none."""
    record = RoundRecord(**value)
    names, times = (record.request, record.method), [record.ms[part] for part in PARTS]
    whole = [*record.draft, *record.sampled, *record.committed, record.round, record.accepted]
    whole += [record.position, record.draft_forwards, record.k, record.match]
    for kind, values in ((str, names), (int, whole), ((int, float), times)):
        if not all(isinstance(value, kind) for value in values) or not (
            0 <= record.k <= MAX_DRAFT and isinstance(record.other_load, int | float)
        ):
            raise TypeError
    return record


def _read(path: Path) -> Trace:
    fix = "spd generate --trace FILE writes one"
    lines = read_input_text(path, fix, LINES_LIMIT).splitlines()
    trace = Trace()
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if value.get("schema") == HEADER:
                kinds = {"temperature": float, "plan": dict, "prompt_ids": tuple}
                trace.header = TraceHeader(**{**value, **{n: kind(value[n]) for n, kind in kinds.items()}})
            else:
                trace.add(_round(value))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            if number == len(lines) > 1 and isinstance(error, json.JSONDecodeError):
                continue  # what a run that was killed left of its last line
            raise UsageError(
                f"{path}, line {number} is no round of a trace", fix=["spd generate --trace FILE writes them"]
            ) from None
    if not trace.rounds:
        raise UsageError(f"{path} holds no rounds beyond a first one", fix=["a longer reply: -n 256"])
    return trace


SCHEMA = "spd.explain/1"
NGRAM_LENGTHS = (3, 8)
"""Shortest and longest match of the simulated lookup: those of an engine that drafts by lookup alone."""
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
            "best": vars(self.best),
            "bottleneck": bottleneck(self),
            "try": next_step(self),
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
    states = plan.get("state_bytes")
    method = own_records[0].method if own_records else "off"
    prompt_known = header is not None and bool(header.prompt_ids)
    longest = max(used, default=0)
    simulated = method == "ngram" and prompt_known  # what lookup finds follows from the text
    beyond = 0 if simulated or split_spec(method)[1] else BEYOND
    furthest = min(MAX_DRAFT, longest + beyond) if used else 0
    own = tuple(_prospect(method, costs, acceptance, each, plain.round_ms) for each in range(1, furthest + 1))
    ngram = _lookup_prospects(traces, costs, plain.round_ms) if method != "ngram" or simulated else ()
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
        prompt_known=prompt_known,
        imposed=plan.get("synthetic_acceptance") is not None,
        other_load=round(sum(record.other_load for record in records) / max(1, len(records)), 2),
        state_bytes=states if isinstance(states, int) else 0,
    )


def _without_copies(trace: Trace) -> list[RoundRecord]:
    """A trace's rounds, without those in which lookup drafted alone while text was copied."""
    most = MAX_DRAFT if trace.header is None else trace.header.plan.get("model_drafts", MAX_DRAFT)
    return [record for record in trace.rounds if record.k <= most]


def _prospect(method: str, costs: CostModel, acceptance: Acceptance, k: int, plain_ms: float) -> Prospect:
    ms, length = costs.round_ms(k), acceptance.length(k)
    return Prospect(
        method, k, length, ms, 1000 * length / ms if ms else 0.0, length * plain_ms / ms if ms else 0.0
    )


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


def simulate_lookup(prompt: Sequence[int], generated: Sequence[int], k: int) -> list[int]:
    """Accepted drafts of every round that lookup would have taken over a text, the first token given.

    The drafts follow the latest earlier occurrence of the longest suffix that has one, and go on with the
    period where less than k tokens followed it.
    """
    (shortest, longest), text = NGRAM_LENGTHS, [*prompt, *generated]
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


NOTICEABLE = 0.02
"""A prospect is worth a try when it is faster by more than this."""
LARGE_HOST = 0.15
"""The host's share of a round from which it is what to look at first."""


def bottleneck(e: Explanation) -> str:
    """What makes speculation slower than it should be, or what a round's time goes into."""
    if not e.k:
        return "nothing was drafted"
    costs, k = e.costs, e.k
    if e.now.speed_up < 1:
        plain, length = e.plain.round_ms, e.now.length
        if costs.host > LARGE_HOST * e.now.round_ms and length * plain > e.now.round_ms - costs.host:
            return "the host: without its gaps between rounds it would pay"
        if length - 1 < 0.1:
            return "acceptance: few drafts are right"
        if length * plain > e.now.round_ms - costs.draft_ms(k):
            return "drafting: with a free drafter it would pay"
        if length * plain > e.now.round_ms - (costs.verify_ms(k + 1) - costs.verify_ms(1)):
            return "verification: its extra rows cost more than they bring"
        return "acceptance: even a free drafter with these drafts would not pay"
    parts = {
        "drafting": costs.draft_ms(k),
        "the extra rows of verification": costs.verify_ms(k + 1) - costs.verify_ms(1),
        "the host": costs.host,
        "sampling and bookkeeping": costs.rest,
    }
    worst = max(parts, key=lambda part: parts[part])
    if parts[worst] < 0.1 * e.now.round_ms:
        return "acceptance: the rounds are as cheap as plain ones"
    return worst


def next_step(e: Explanation) -> str:
    """The option that promises most, by the trace."""
    best = e.best
    gain = best.tokens_per_second / max(e.now.tokens_per_second, 1e-9) - 1
    if best.k == 0:
        return "--spec off" if e.k else "--spec auto, or a draft model: --draft-model FOLDER"
    if gain > NOTICEABLE and "+" not in best.method:  # beside lookup k is a model's alone, and not asked for
        return f"--spec {best.method} --draft-max {best.k}"
    if e.costs.host > LARGE_HOST * e.now.round_ms:
        return "--graphs on, --lag 1: the device waits for the host"
    if e.method == "draft" and e.costs.draft_ms(e.k) > 0.3 * e.now.round_ms:
        return "a smaller draft model"
    if (best.method, best.k) != (e.now.method, e.now.k):
        return f"nothing: that is {gain:.1%} faster at most"
    return "nothing: this is the best that the trace knows of"


def paragraph(e: Explanation) -> str:
    """What a person wants to know, in a few sentences."""
    costs, now, best, sentences = e.costs, e.now, e.best, []
    if e.other_load > SLIGHT:
        sentences.append(f"Other programs kept {e.other_load:.1f} CPUs busy: a quiet machine is faster.")
    if not e.k:
        sentences.append(f"Nothing was drafted in {e.rounds} rounds of {e.plain.round_ms:.2f} ms.")
    else:
        if e.imposed:
            sentences.append("Acceptance was imposed: this is what such drafts would give.")
        parts = {
            "verifying": costs.verify_ms(e.k + 1),
            "drafting": costs.draft_ms(e.k),
            "the rest": costs.rest,
            "waiting for the host": costs.host,
        }
        shares = ", ".join(f"{ms / now.round_ms:.0%} {name}" for name, ms in parts.items() if ms > 0)
        plain = (
            "" if costs.plain_measured else " (plain rounds were not in the trace: carried over from others)"
        )
        sentences += [
            f"With {e.method} at k = {e.k} a round takes {now.round_ms:.2f} ms ({shares}) and brings "
            f"{now.length:.2f} tokens.",
            f"It pays from {e.break_even(e.k):.2f} tokens on, so this is {now.speed_up:.2f} × plain "
            f"decoding{plain}.",
        ]
        if e.state_bytes:
            size = show_size(e.state_bytes)
            sentences.append(f"Recurrent states, {size}, are read and written once a round whatever k is.")
        sentences.append(f"What limits it is {bottleneck(e)}.")
        if not best.k:
            sentences.append(f"Plain decoding, {best.tokens_per_second:.1f} tokens/s, is the best here.")
        elif (best.method, best.k) != (now.method, now.k):
            sentences.append(
                f"The best by this trace is {best.method} at k = {best.k}: {best.tokens_per_second:.1f} "
                f"tokens/s, {best.speed_up:.2f} × plain."
            )
    if e.ngram and e.method != "ngram":
        found = max(e.ngram, key=lambda prospect: prospect.tokens_per_second)
        least = "" if e.prompt_known else "at least "
        sentences.append(
            f"N-gram lookup on this text would give {least}{found.speed_up:.2f} × plain (k = {found.k})."
        )
    return " ".join([*sentences, f"Next: {next_step(e)}."])
