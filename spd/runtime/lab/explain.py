"""Why speculation pays or does not, from the rounds of a trace: costs, acceptance, what-if, and words.

Nothing is run: every figure follows from the trace. A round of k drafts takes verify(k + 1 rows) + draft(k) +
rest + host, and commits one token and as many drafts as were accepted: S_i is the share of rounds in which
at least i were. No torch here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from spd.errors import UsageError
from spd.formats.files import LINES_LIMIT, read_input_text
from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.plan.config import MAX_DRAFT, show_size, split_spec
from spd.runtime.round.cpu_load import SLIGHT

HEADER = "spd.trace/1"
PARTS = ("draft", "verify", "rest", "host")  # of a round's time


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


def read_trace(path: Path) -> Trace:
    """Read a file. Raises NotFoundError, and UsageError naming the line that is none."""
    fix = "spd generate --trace FILE writes one"
    lines = read_input_text(path, fix, LINES_LIMIT).splitlines()
    trace = Trace()
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if value.get("schema") == HEADER:
                kinds = {"temperature": float, "plan": dict, "prompt_ids": tuple}
                trace.header = TraceHeader(**{**value, **{n: kind(value[n]) for n, kind in kinds.items()}})
            elif (record := _round(value)).round > 0:
                trace.rounds.append(record)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            if number == len(lines) > 1 and isinstance(error, json.JSONDecodeError):
                continue  # what a run that was killed left of its last line
            raise UsageError(f"{path}, line {number} is no round of a trace", fix=[fix]) from None
    if not trace.rounds:
        raise UsageError(f"{path} holds no rounds beyond a first one", fix=["a longer reply: -n 256"])
    return trace


ROW_COST = 0.01  # assumed extra cost of verifying one more row, as a share, until it has been measured
LEAST = 3  # rounds that make a cost a measured one


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of the parts of a round, by the number of drafts where they depend on it."""

    verify: Mapping[int, float]  # measured medians by rows: of one where there were plain rounds
    draft: Mapping[int, float]  # of drafting k tokens
    rest: float
    host: float

    def parts(self, k: int) -> dict[str, float]:
        """What a round spends on what."""
        drafting = _on_line({0: 0.0, **self.draft}, k) if self.draft else 0.0
        found = {"verification": _on_line(self.verify, k + 1), "drafting": drafting}
        return {**found, "sampling and bookkeeping": self.rest, "the host": self.host}

    def round_ms(self, k: int) -> float:
        """A whole round."""
        return sum(self.parts(k).values())


def fit_costs(records: Sequence[RoundRecord]) -> CostModel:
    """Medians of every part. A round drafts for the next one, whose k may be another."""
    verify: dict[int, list[float]] = {}
    draft: dict[int, list[float]] = {}
    for record, after in zip(records, [*records[1:], None], strict=True):
        verify.setdefault(record.k + 1, []).append(record.ms["verify"])
        if after is not None and after.request == record.request and after.k:
            draft.setdefault(after.k, []).append(record.ms["draft"])
    rest, host = (median(record.ms[part] for record in records) for part in ("rest", "host"))
    return CostModel(_medians(verify), _medians(draft), rest, host)


def _medians(samples: Mapping[int, list[float]]) -> dict[int, float]:
    enough = {key: values for key, values in samples.items() if len(values) >= LEAST} or samples
    return {key: median(values) for key, values in sorted(enough.items())}


def _on_line(known: Mapping[int, float], at: int) -> float:
    """As measured, or by the line through all that was, which never falls."""
    if at in known:
        return known[at]
    if len(known) == 1:
        ((measured, ms),) = known.items()
        return ms * (1 + ROW_COST * at) / (1 + ROW_COST * measured)
    nearest = min(known, key=lambda key: abs(key - at))
    slope = max(0.0, linear_regression(list(known), list(known.values())).slope)
    return max(known[nearest] + slope * (at - nearest), known[nearest] / 2)


@dataclass(frozen=True)
class Acceptance:
    """Shares of rounds that accepted at least 1, 2, … drafts, of those that could have.

    `held` has such shares for each k that whole traces held. They differ: with few drafts a round, more of
    the rounds lie in text that is easy to draft.
    """

    survival: tuple[float, ...]
    held: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def length(self, k: int) -> float:
        """Tokens a round at k on average, by the line through the shares of every k held.

        Positions beyond those seen go on as all after the first did.
        """
        shares: list[float] = []
        for position, share in enumerate(self.survival[:k]):
            known = {log(each): found for each, found in self.held.items() if len(found) > position}
            if len(known) > 1:
                line = linear_regression(list(known), [found[position] for found in known.values()])
                share = line.intercept + line.slope * log(k)
            shares.append(min(max(0.0, share), shares[-1] if shares else 1.0))
        before, after = sum(shares[:-1]), sum(shares[1:])  # the last alone may be of a handful of rounds
        rate = after / before if before else sum(shares)
        while len(shares) < k:
            shares.append((shares[-1] if shares else 1.0) * rate)
        return 1.0 + sum(shares)


def fit_acceptance(traces: Iterable[Sequence[RoundRecord]]) -> Acceptance:
    """Shares of all rounds, and for each k that whole traces held by itself."""
    everything: list[RoundRecord] = []
    held: dict[int, list[RoundRecord]] = {}
    for trace in traces:
        drafting = [record for record in trace if record.k]
        everything += drafting
        if len({record.k for record in drafting}) == 1:
            held.setdefault(drafting[0].k, []).extend(drafting)
    return Acceptance(_survival(everything), {k: _survival(records) for k, records in held.items()})


def _survival(records: Sequence[RoundRecord]) -> tuple[float, ...]:
    """Shares of accepted drafts by position, over rounds that had room for so many."""
    shares: list[float] = []
    while len(room := [record for record in records if record.k > len(shares)]) >= LEAST:
        shares.append(sum(record.accepted > len(shares) for record in room) / len(room))
    return tuple(shares)


SCHEMA = "spd.explain/1"
BEYOND = 2  # drafts a round that are weighed beyond the most that a trace held: of more it knows nothing
NOTICEABLE = 0.02  # a prospect is worth a try when it is faster by more than this


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
    k: int  # the most common number of drafts a round; 0 where none were drafted
    rounds: int
    tokens_per_second: float
    costs: CostModel
    acceptance: Acceptance
    plain: Prospect
    now: Prospect
    own: tuple[Prospect, ...]  # the trace's drafter at every k
    imposed: bool  # whether acceptance was imposed and not measured
    other_load: float  # CPUs that other programs kept busy, on average
    state_bytes: int  # of a request's recurrent states, which a round reads and writes once

    @property
    def best(self) -> Prospect:
        """The fastest prospect."""
        return max((self.plain, *self.own), key=lambda prospect: prospect.tokens_per_second)

    def as_dict(self) -> dict[str, Any]:
        """The object of `spd explain --json`."""
        costs, plain = self.costs, ("method", "k", "rounds", "tokens_per_second", "other_load")
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in plain},
            "verify_ms": {str(rows): ms for rows, ms in costs.verify.items()},
            "plain_measured": 1 in costs.verify,
            "draft_ms": {str(k): ms for k, ms in costs.draft.items()},
            "rest_ms": costs.rest,
            "host_ms": costs.host,
            "acceptance": "imposed" if self.imposed else "natural",
            "acceptance_length": self.now.length,
            "survival": list(self.acceptance.survival),
            "break_even": {str(each.k): each.round_ms / self.plain.round_ms for each in self.own},
            **{name: vars(getattr(self, name)) for name in ("plain", "now", "best")},
            "prospects": [vars(prospect) for prospect in self.own],
            "bottleneck": bottleneck(self),
            "try": next_step(self),
            "words": paragraph(self),
        }


def explain_traces(traces: Sequence[Trace]) -> Explanation:
    """Weigh the rounds of traces of one model: costs come from all, acceptance from those that drafted."""
    records = [record for trace in traces for record in trace.rounds]
    costs = fit_costs(records)
    drafting = [trace for trace in traces if any(record.k for record in trace.rounds)]
    own_records = [record for trace in drafting for record in trace.rounds]
    asked = [_without_copies(trace) for trace in drafting]
    acceptance = fit_acceptance(asked)
    used = Counter(record.k for rounds in asked for record in rounds if record.k)
    k = used.most_common(1)[0][0] if used else 0
    header = next((trace.header for trace in [*drafting, *traces] if trace.header is not None), None)
    plan = header.plan if header is not None else {}
    states = plan.get("state_bytes")
    method = own_records[0].method if own_records else "off"
    furthest = min(MAX_DRAFT, max(used) + (0 if split_spec(method)[1] else BEYOND)) if used else 0
    plain_ms = costs.round_ms(0)

    def prospect(method: str, k: int) -> Prospect:
        ms, length = costs.round_ms(k), acceptance.length(k)
        speeds = (1000 * length / ms, length * plain_ms / ms) if ms else (0.0, 0.0)
        return Prospect(method, k, length, ms, *speeds)

    plain, own = prospect("plain", 0), tuple(prospect(method, each) for each in range(1, furthest + 1))
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
        imposed=plan.get("synthetic_acceptance") is not None,
        other_load=round(sum(record.other_load for record in records) / max(1, len(records)), 2),
        state_bytes=states if isinstance(states, int) else 0,
    )


def _without_copies(trace: Trace) -> list[RoundRecord]:
    """A trace's rounds, without those in which lookup drafted alone while text was copied."""
    most = MAX_DRAFT if trace.header is None else trace.header.plan.get("model_drafts", MAX_DRAFT)
    return [record for record in trace.rounds if record.k <= most]


def _measured(records: Sequence[RoundRecord]) -> float:
    """Committed tokens over the time of their rounds."""
    ms = sum(sum(record.ms.values()) for record in records)
    return 1000 * sum(len(record.committed) for record in records) / ms if ms else 0.0


def bottleneck(e: Explanation) -> str:
    """What a round spends most on beside verifying one row; acceptance where that alone decides."""
    if not e.k:
        return "that nothing was drafted"
    now, spent = e.now, e.costs.parts(e.k)
    spent["verification"] -= e.costs.parts(0)["verification"]
    worst = max(spent, key=lambda part: spent[part])
    if spent[worst] < 0.1 * now.round_ms:
        return "acceptance: the rounds are as cheap as plain ones"
    if now.speed_up < 1 and now.length * e.plain.round_ms <= now.round_ms - spent[worst]:
        return f"acceptance: without {worst} it would not pay either"
    return worst


def next_step(e: Explanation) -> str:
    """The option that promises most, by the trace."""
    now, best = e.now, e.best
    if best.k == 0:
        return "--spec off" if e.k else "--spec auto, or a draft model: --draft-model FOLDER"
    if best.tokens_per_second <= (1 + NOTICEABLE) * now.tokens_per_second or split_spec(e.method)[1]:
        if bottleneck(e) == "the host":
            return "--graphs on, --lag 1"
        return "nothing: this is the best that the trace knows of"  # beside lookup k is a model's alone
    return f"--spec {best.method} --draft-max {best.k}"


def paragraph(e: Explanation) -> str:
    """What a person wants to know, in a few sentences."""
    now, best, sentences = e.now, e.best, []
    if e.other_load > SLIGHT:
        sentences.append(f"Other programs kept {e.other_load:.1f} CPUs busy: a quiet machine is faster.")
    if e.imposed:
        sentences.append("Acceptance was imposed: this is what such drafts would give.")
    if not e.k:
        sentences.append(f"Nothing was drafted in {e.rounds} rounds of {e.plain.round_ms:.2f} ms.")
    else:
        parts = e.costs.parts(e.k)
        shares = ", ".join(f"{ms / now.round_ms:.0%} {name}" for name, ms in parts.items() if ms > 0)
        plain = "" if 1 in e.costs.verify else " (estimated: the trace holds no plain rounds)"
        sentences += [
            f"With {e.method} at k = {e.k} a round takes {now.round_ms:.2f} ms ({shares}) and brings "
            f"{now.length:.2f} tokens.",
            f"It pays from {now.round_ms / e.plain.round_ms:.2f} tokens on, so this is {now.speed_up:.2f} × "
            f"plain decoding{plain}.",
            f"What limits it is {bottleneck(e)}.",
        ]
    if e.state_bytes:
        size = show_size(e.state_bytes)
        sentences.append(f"Recurrent states, {size}, are read and written once a round whatever k is.")
    if best is not now:
        way = f"{best.method} at k = {best.k}" if best.k else "plain decoding"
        speeds = f"{best.tokens_per_second:.1f} tokens/s, {best.speed_up:.2f} × plain"
        sentences.append(f"The best by this trace is {way}: {speeds}.")
    return " ".join([*sentences, f"Next: {next_step(e)}."])
