"""Why speculation pays or does not, from the rounds of a trace: costs, acceptance, what-if, and words.

Nothing is run: every figure follows from the trace. A round of k drafts takes verify(k + 1 rows) + draft(k) +
rest + host, and commits one token and as many drafts as were accepted: S_i is the share of rounds in which
at least i were. No torch here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import log
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

from spd.errors import UsageError
from spd.formats.files import LINES_LIMIT, read_input_text
from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.plan.config import MAX_DRAFT, split_spec

HEADER = "spd.trace/1"
PARTS = {
    "verify": "verification",
    "draft": "drafting",
    "rest": "sampling and bookkeeping",
    "host": "the host",
}
"""Of a round's time: what a trace calls them, and words."""


@dataclass(frozen=True)
class TraceHeader:
    """The first line of a trace file: what the rounds alone do not say."""

    model: str = ""
    temperature: float = 0.0
    plan: Mapping[str, Any] = field(default_factory=lambda: {"model_drafts": MAX_DRAFT})
    schema: str = HEADER


@dataclass
class Trace:
    """Rounds in the order read, without those that follow a prompt: nothing was drafted for them."""

    rounds: list[RoundRecord] = field(default_factory=list)
    header: TraceHeader = field(default_factory=TraceHeader)


def _round(value: Mapping[str, Any]) -> RoundRecord:
    """A round, if what is read of it is of its kinds; raises TypeError or KeyError otherwise."""
    record = RoundRecord(**value)
    counts = (record.round, record.accepted, record.k, len(record.committed))
    kinds = (
        (str, [record.method]),
        (int, counts),
        ((int, float), [record.ms[part] for part in PARTS]),
    )
    whole = all(isinstance(value, kind) for kind, values in kinds for value in values)
    if not whole or not 0 <= record.k <= MAX_DRAFT or record.ms["verify"] <= 0:
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
                plan = dict(value["plan"])
                plan["model_drafts"] = int(plan.get("model_drafts", MAX_DRAFT))
                trace.header = TraceHeader(str(value["model"]), float(value["temperature"]), plan)
            elif (record := _round(value)).round > 0:
                trace.rounds.append(record)
        except (
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
            OverflowError,
            RecursionError,
        ) as error:
            if number == len(lines) > 1 and isinstance(error, json.JSONDecodeError):
                continue  # what a run that was killed left of its last line
            raise UsageError(f"{path}, line {number} is no round of a trace", fix=[fix]) from None
    if not trace.rounds:
        raise UsageError(
            f"{path} holds no rounds beyond a first one", fix=["a longer reply: -n 256"]
        )
    return trace


ROW_COST = 0.01  # assumed extra cost of one more draft, as a share, until it has been measured
LEAST = 3  # rounds that make a cost a measured one

Costs = Mapping[str, Mapping[int, float]]
"""Milliseconds of each part of a round by its number of drafts, as measured: medians."""


def fit_costs(records: Sequence[RoundRecord]) -> Costs:
    """Medians of every part. A round drafts for the next one, whose k may be another."""
    samples: dict[str, dict[int, list[float]]] = {part: {} for part in PARTS}
    for record, after in zip(records, [*records[1:], None], strict=True):
        for part in PARTS:
            owner = after if part == "draft" else record
            if owner is not None and owner.request == record.request:
                samples[part].setdefault(owner.k, []).append(record.ms[part])
    costs = {part: _medians(found) for part, found in samples.items()}
    return {**costs, "draft": {**costs["draft"], 0: 0.0}}


def _medians(samples: Mapping[int, list[float]]) -> dict[int, float]:
    enough = {k: values for k, values in samples.items() if len(values) >= LEAST} or samples
    return {k: median(values) for k, values in sorted(enough.items())}


def round_parts(costs: Costs, k: int) -> dict[str, float]:
    """What a round of k drafts spends on what: as measured, or by lines through all that was."""
    return {PARTS[part]: _on_line(known, k) for part, known in costs.items()}


def _on_line(known: Mapping[int, float], at: int) -> float:
    nearest = min(known, key=lambda k: abs(k - at))
    slope = ROW_COST * known[nearest]
    if len(known) > 1:
        slope = max(0.0, linear_regression(list(known), list(known.values())).slope)
    return max(known[nearest] + slope * (at - nearest), known[nearest] / 2)


def mean_parts(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Return the mean milliseconds of each part of these rounds, which add up to their time on the clock."""
    return {word: fmean(record.ms[part] for record in records) for part, word in PARTS.items()}


def mean_over_typical(records: Sequence[RoundRecord], costs: Costs) -> float:
    """Return what rounds took over what rounds of their k typically take: above 1 by every hiccup."""
    typical = {k: sum(round_parts(costs, k).values()) for k in {record.k for record in records}}
    spent = sum(record.ms[part] for record in records for part in PARTS)
    return spent / sum(typical[record.k] for record in records)


def fit_acceptance(traces: Sequence[Sequence[RoundRecord]]) -> dict[int, tuple[float, ...]]:
    """Shares of rounds that accepted at least 1, 2, … drafts, of those that could have, by their trace's k.

    They differ: with few drafts a round, more of the rounds lie in text that is easy to draft. Traces whose k
    changed tell nothing of a k by itself: all count as one of the largest.
    """
    rounds: dict[int, list[RoundRecord]] = {}
    largest = max((record.k for trace in traces for record in trace), default=0)
    for trace in filter(None, traces):
        fixed = len({record.k for record in trace}) == 1
        rounds.setdefault(trace[0].k if fixed else largest, []).extend(trace)
    return {k: _survival(records) for k, records in rounds.items()}


def expected_length(survival: Mapping[int, Sequence[float]], k: int) -> float:
    """Tokens a round at k on average, by lines through the shares of every k that traces held.

    Positions beyond those seen go on as all after the first did.
    """
    shares: list[float] = []
    for position in range(min(k, max(map(len, survival.values()), default=0))):
        known = {
            log(each): found[position] for each, found in survival.items() if len(found) > position
        }
        share = fmean(known.values())
        if len(known) > 1:
            line = linear_regression(list(known), list(known.values()))
            share = line.intercept + line.slope * log(k)
        shares.append(min(max(0.0, share), shares[-1] if shares else 1.0))
    # the last alone may be of a handful of rounds
    before = sum(shares[:-1])
    after = sum(shares[1:])
    rate = after / before if before else sum(shares)
    while len(shares) < k:
        shares.append((shares[-1] if shares else 1.0) * rate)
    return 1.0 + sum(shares)


def _survival(records: Sequence[RoundRecord]) -> tuple[float, ...]:
    """Shares of accepted drafts by position, over rounds that had room for so many."""
    shares: list[float] = []
    while len(room := [record for record in records if record.k > len(shares)]) >= LEAST:
        shares.append(sum(record.accepted > len(shares) for record in room) / len(room))
    return tuple(shares)


SCHEMA = "spd.explain/1"
BEYOND = (
    2  # drafts a round that are weighed beyond the most that a trace held: of more it knows nothing
)
NOTICEABLE = 0.02  # a prospect is worth a try when it is faster by more than this


@dataclass(frozen=True)
class Estimate:
    """What so many drafts a round would give on this machine and text."""

    k: int
    length: float  # tokens a round
    round_ms: float
    tokens_per_second: float
    speed_up: float


@dataclass(frozen=True)
class Explanation:
    """Everything that a trace says."""

    method: str
    k: int  # the most common number of drafts a round; 0 where none were drafted
    rounds: int
    tokens_per_second: float  # as measured, the quantity of `generate --stats`
    parts: Mapping[str, float]  # what a round of the run spent on what, in ms: means
    costs: Costs
    survival: tuple[float, ...]
    prospects: tuple[
        Estimate, ...
    ]  # of k = 0, 1, 2, …: of plain decoding, and of the trace's drafter
    plain: Estimate
    now: Estimate  # the run itself: means of all its rounds, whatever their k
    best: Estimate

    def as_dict(self) -> dict[str, Any]:
        """The object of `spd explain --json`."""
        words = {"bottleneck": bottleneck(self), "try": next_step(self), "words": summarize(self)}
        return {"schema": SCHEMA, **asdict(self), **words}


def explain_traces(traces: Sequence[Trace]) -> Explanation:
    """Weigh the rounds of traces of one model: costs come from all, acceptance from those that drafted."""
    records = [record for trace in traces for record in trace.rounds]
    drafting = [trace for trace in traces if any(record.k for record in trace.rounds)]
    own_records = [record for trace in drafting for record in trace.rounds] or records
    asked = [_model_drafts(trace) for trace in drafting]
    costs = fit_costs(records)
    survival = fit_acceptance(asked)
    used = Counter(record.k for rounds in asked for record in rounds)
    method = own_records[0].method if drafting else "off"
    furthest = min(MAX_DRAFT, max(used) + (0 if split_spec(method)[1] else BEYOND)) if used else 0
    # Medians say which k costs what; scaled to the clock, they are told in the run's own tokens a second.
    scale = mean_over_typical(records, costs)
    plain_ms = scale * sum(round_parts(costs, 0).values())

    def prospect(k: int, length: float, ms: float) -> Estimate:
        return Estimate(k, length, ms, 1000 * length / ms, length * plain_ms / ms)

    prospects = tuple(
        prospect(k, expected_length(survival, k), scale * sum(round_parts(costs, k).values()))
        for k in range(furthest + 1)
    )
    k = used.most_common(1)[0][0] if used else 0
    parts = mean_parts(own_records)
    length = fmean(len(record.committed) for record in own_records)
    now = prospect(k, length, sum(parts.values()))
    return Explanation(
        method=method,
        k=k,
        rounds=len(records),
        tokens_per_second=now.tokens_per_second,
        parts=parts,
        costs=costs,
        survival=_survival([record for rounds in asked for record in rounds]),
        prospects=prospects,
        plain=prospects[0],
        now=now,
        best=max(prospects, key=lambda prospect: prospect.tokens_per_second),
    )


def _model_drafts(trace: Trace) -> list[RoundRecord]:
    """A trace's rounds with drafts, without those in which lookup drafted alone while text was copied."""
    most = trace.header.plan["model_drafts"]
    return [record for record in trace.rounds if 0 < record.k <= most]


def bottleneck(e: Explanation) -> str:
    """Return the part that a round spends most on; acceptance where that alone decides."""
    if not e.k:
        return "that nothing was drafted"
    now = e.now
    added = dict(e.parts)
    plain = round_parts(e.costs, 0)
    added["verification"] -= plain["verification"] * e.plain.round_ms / sum(plain.values())
    dearest = max(added, key=lambda part: added[part])
    if now.round_ms < 1.1 * e.plain.round_ms:
        return "acceptance: the rounds are as cheap as plain ones"
    if now.speed_up < 1 and now.length * e.plain.round_ms <= now.round_ms - added[dearest]:
        return f"acceptance: without {dearest} it would not pay either"
    return max(e.parts, key=lambda part: e.parts[part])


def next_step(e: Explanation) -> str:
    """The option that promises most, by the trace."""
    now = e.prospects[e.k]
    best = e.best
    if best.k == 0:
        return "--spec off" if e.k else "--spec auto, or a draft model: --draft-model FOLDER"
    if (
        best.tokens_per_second <= (1 + NOTICEABLE) * now.tokens_per_second
        or split_spec(e.method)[1]
    ):
        if bottleneck(e) == "the host":
            return "--graphs on, --lag 1"
        return "nothing: this is the best that the trace knows of"  # beside lookup k is a model's alone
    return f"--spec {e.method} --draft-max {best.k}"


def summarize(e: Explanation) -> str:
    """What a person wants to know, in a few sentences."""
    now = e.now
    best = e.best
    sentences = [f"Nothing was drafted in {e.rounds} rounds of {e.plain.round_ms:.2f} ms."]
    if e.k:
        shares = ", ".join(
            f"{ms / now.round_ms:.0%} {name}" for name, ms in e.parts.items() if ms > 0
        )
        plain = "" if 0 in e.costs["verify"] else " (estimated: the trace holds no plain rounds)"
        sentences = [
            f"With {e.method}, mostly at k = {e.k}, a round takes {now.round_ms:.2f} ms ({shares}) and "
            f"brings {now.length:.2f} tokens.",
            f"It pays from {now.round_ms / e.plain.round_ms:.2f} tokens on, so this is {now.speed_up:.2f} × "
            f"plain decoding{plain}.",
            f"What limits it is {bottleneck(e)}.",
        ]
    if best.k != e.k:
        way = f"{e.method} at k = {best.k}" if best.k else "plain decoding"
        speeds = f"{best.tokens_per_second:.1f} tokens/s, {best.speed_up:.2f} × plain"
        sentences.append(f"The best by this trace is {way}: {speeds}.")
    return " ".join([*sentences, f"Next: {next_step(e)}."])
