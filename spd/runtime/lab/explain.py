"""Explanations of speculation from the rounds of a trace: costs, acceptance, and other values of k.

Nothing is run: every figure follows from the trace. A round of k drafts takes verify(k + 1 rows) +
draft(k) + rest + host, and commits one token and as many drafts as were accepted: S_i is the share
of rounds in which at least i were. No torch here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import log, sqrt
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

from spd.errors import UsageError
from spd.formats.files import MAX_LINES_BYTES, read_input_text
from spd.runtime.engine.draft_length import context_class, first_position_of_class
from spd.runtime.engine.trace import RoundRecord
from spd.runtime.plan.config import MAX_DRAFT, METHODS, split_spec

TRACE_SCHEMA = "spd.trace/1"
PARTS = {
    "verify": "verification",
    "draft": "drafting",
    "rest": "sampling and bookkeeping",
    "host": "the host",
}
"""The parts of a round's time: their names in a trace, and in messages."""


@dataclass(frozen=True)
class TraceHeader:
    """The first line of a trace file: the model, temperature and plan of its rounds."""

    model: str = ""
    temperature: float = 0.0
    plan: Mapping[str, Any] = field(default_factory=lambda: {"model_drafts": MAX_DRAFT})
    schema: str = TRACE_SCHEMA


@dataclass
class Trace:
    """Rounds in the order read, without those after a prompt: nothing was drafted for them."""

    rounds: list[RoundRecord] = field(default_factory=list)
    header: TraceHeader = field(default_factory=TraceHeader)


def _read_round(value: Mapping[str, Any]) -> RoundRecord:
    """Return the record of a round's JSON object. Raises TypeError or KeyError for an invalid
    one.
    """
    record = RoundRecord(**value)
    counts = (record.round, record.accepted, record.k, len(record.committed))
    kinds = (
        (str, [record.method]),
        (int, counts),
        ((int, float), [record.ms[part] for part in PARTS]),
    )
    has_valid_types = all(isinstance(value, kind) for kind, values in kinds for value in values)
    if not has_valid_types or not 0 <= record.k <= MAX_DRAFT or record.ms["verify"] <= 0:
        raise TypeError
    return record


def read_trace(path: Path) -> Trace:
    """Read a trace file, without rounds that follow a prompt.

    Raises NotFoundError, and UsageError naming an invalid line.
    """
    fix = "spd generate --trace FILE writes one"
    lines = read_input_text(path, fix, MAX_LINES_BYTES).splitlines()
    trace = Trace()
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if value.get("schema") == TRACE_SCHEMA:
                plan = dict(value["plan"])
                plan["model_drafts"] = int(plan.get("model_drafts", MAX_DRAFT))
                trace.header = TraceHeader(str(value["model"]), float(value["temperature"]), plan)
            elif (record := _read_round(value)).round > 0:
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
                continue  # the unfinished last line of a run that was killed
            raise UsageError(f"{path}, line {number} is no round of a trace", fix=[fix]) from None
    if not trace.rounds:
        raise UsageError(
            f"{path} holds no rounds beyond a first one", fix=["a longer reply: -n 256"]
        )
    return trace


ROW_COST = 0.01
"""The assumed extra cost of one more draft, as a share, until it has been measured."""
MIN_ROUNDS = 3
"""Rounds from which a cost counts as measured."""

Costs = Mapping[str, Mapping[int, float]]
"""Median milliseconds of each part of a round, by its number of drafts."""


def fit_costs(records: Sequence[RoundRecord], *, drafts_at_once: bool = False) -> Costs:
    """Return the medians of every part. A round drafts for the next one, whose k may be another.

    drafts_at_once: all numbers of drafts take the same time.
    """
    samples: dict[str, dict[int, list[float]]] = {part: {} for part in PARTS}
    for record, after in zip(records, [*records[1:], None], strict=True):
        for part in PARTS:
            owner = after if part == "draft" else record
            if owner is not None and owner.request == record.request:
                samples[part].setdefault(owner.k, []).append(record.ms[part])
    costs = {part: _median_of_each(by_k) for part, by_k in samples.items()}
    draft = {**costs["draft"], 0: 0.0}
    times = [time for k, by_k in samples["draft"].items() if k for time in by_k]
    if drafts_at_once and times:
        draft |= dict.fromkeys(range(1, max(draft) + 1), median(times))
    return {**costs, "draft": draft}


def _median_of_each(samples: Mapping[int, list[float]]) -> dict[int, float]:
    """Return the median at each k with at least `MIN_ROUNDS` samples; at all k where none has."""
    enough = {k: values for k, values in samples.items() if len(values) >= MIN_ROUNDS} or samples
    return {k: median(values) for k, values in sorted(enough.items())}


def round_parts(costs: Costs, k: int) -> dict[str, float]:
    """Return the milliseconds of each part of a round of k drafts, measured or interpolated."""
    return {PARTS[part]: _interpolate(by_k, k) for part, by_k in costs.items()}


def _interpolate(by_k: Mapping[int, float], k: int) -> float:
    """Return the time at k, which is never above a time that was measured with more drafts."""
    nearest = min(by_k, key=lambda measured_k: abs(measured_k - k))
    slope = ROW_COST * by_k[nearest]
    if len(by_k) > 1:
        slope = max(0.0, linear_regression(list(by_k), list(by_k.values())).slope)
    time = max(by_k[nearest] + slope * (k - nearest), by_k[nearest] / 2)
    return min([time, *(measured for measured_k, measured in by_k.items() if measured_k >= k)])


def verification_by_length(records: Sequence[RoundRecord], k: int) -> dict[int, float]:
    """Return the median milliseconds of verifying k drafts, by the first position of a class of
    context lengths.

    Classes with fewer than `MIN_ROUNDS` such rounds are left out.
    """
    samples: dict[int, list[float]] = {}
    for record in records:
        if record.k == k:
            samples.setdefault(context_class(record.position), []).append(record.ms["verify"])
    return {
        first_position_of_class(number): median(times)
        for number, times in sorted(samples.items())
        if len(times) >= MIN_ROUNDS
    }


def mean_parts(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Return the mean milliseconds of each part; they add up to the rounds' time on the clock."""
    return {word: fmean(record.ms[part] for record in records) for part, word in PARTS.items()}


def mean_over_typical(records: Sequence[RoundRecord], costs: Costs) -> float:
    """Return the time of rounds over the typical time of rounds of their k: above 1 by hiccups."""
    typical = {k: sum(round_parts(costs, k).values()) for k in {record.k for record in records}}
    spent = sum(record.ms[part] for record in records for part in PARTS)
    return spent / sum(typical[record.k] for record in records)


def fit_acceptance(traces: Sequence[Sequence[RoundRecord]]) -> dict[int, tuple[float, ...]]:
    """Return the shares of rounds that accepted at least 1, 2, … drafts, by their trace's k.

    Only rounds that had room for so many count. The shares differ by k: with few drafts a round,
    more of the rounds lie in text that is easy to draft. Traces whose k changed say nothing of a
    single k: all count as one of the largest.
    """
    rounds: dict[int, list[RoundRecord]] = {}
    largest = max((record.k for trace in traces for record in trace), default=0)
    for trace in filter(None, traces):
        fixed = len({record.k for record in trace}) == 1
        rounds.setdefault(trace[0].k if fixed else largest, []).extend(trace)
    return {k: _acceptance_shares(records) for k, records in rounds.items()}


def expected_length(survival: Mapping[int, Sequence[float]], k: int) -> float:
    """Return the mean tokens of a round at k, from lines through the shares of every traced k.

    Positions beyond those continue at the mean ratio of successive shares.
    """
    shares: list[float] = []
    for position in range(min(k, max(map(len, survival.values()), default=0))):
        points = {
            log(trace_k): trace_shares[position]
            for trace_k, trace_shares in survival.items()
            if len(trace_shares) > position
        }
        share = fmean(points.values())
        if len(points) > 1:
            line = linear_regression(list(points), list(points.values()))
            share = line.intercept + line.slope * log(k)
        shares.append(min(max(0.0, share), shares[-1] if shares else 1.0))
    # Sums of all positions: the last share alone may be of a handful of rounds.
    before = sum(shares[:-1])
    after = sum(shares[1:])
    rate = after / before if before else sum(shares)
    while len(shares) < k:
        shares.append((shares[-1] if shares else 1.0) * rate)
    return 1.0 + sum(shares)


def _acceptance_shares(records: Sequence[RoundRecord]) -> tuple[float, ...]:
    """Return the shares of rounds that accepted 1, 2, … drafts, of those with room for so many."""
    shares: list[float] = []
    while len(room := [record for record in records if record.k > len(shares)]) >= MIN_ROUNDS:
        shares.append(sum(record.accepted > len(shares) for record in room) / len(room))
    return tuple(shares)


def _emitted_drafts(record: RoundRecord) -> int:
    """Return the accepted drafts of a round that were emitted: none behind the end of the text."""
    return min(record.accepted, len(record.committed))


def _draft_counts(records: Sequence[RoundRecord]) -> list[tuple[int, int]]:
    """Return accepted and all drafts by position, as `--stats` counts them.

    A round in which lookup found no match has none, whatever it had room for.
    """
    counts: list[tuple[int, int]] = []
    while len(drafted := [r for r in records if len(r.draft) > len(counts)]) >= MIN_ROUNDS:
        accepted = sum(_emitted_drafts(record) > len(counts) for record in drafted)
        counts.append((accepted, len(drafted)))
    return counts


NORMAL_QUANTILE = 1.96
"""The deviations from its mean within which a normal variable lies in 95 % of cases."""


def share_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a probability, from the successes of at least one trial.

    Trials count as independent. Source: Wilson 1927, the score interval.
    """
    share = successes / trials
    z = NORMAL_QUANTILE / sqrt(trials)
    middle = (share + z**2 / 2) / (1 + z**2)
    half = z * sqrt(share * (1 - share) + z**2 / 4) / (1 + z**2)
    return max(0.0, middle - half), min(1.0, middle + half)


SCHEMA = "spd.explain/1"
EXTRA_DRAFTS = 2
"""Estimates go so many drafts a round beyond the most of a trace, which says nothing of more."""
MIN_GAIN = 0.02
"""An estimate is worth a try when it is faster by more than this share."""


@dataclass(frozen=True)
class Estimate:
    """The expected speed of k drafts a round, on this machine and text."""

    k: int
    length: float  # tokens a round
    round_ms: float
    tokens_per_second: float
    speed_up: float


@dataclass(frozen=True)
class Explanation:
    """The costs, acceptance, estimates and best k of a trace."""

    method: str
    device: str  # of the first trace; "" if its header names none
    k: int  # the most common number of drafts a round; 0 where none were drafted
    rounds: int
    tokens_per_second: float  # as measured, the quantity of `generate --stats`
    parts: Mapping[str, float]  # mean milliseconds of each part of the run's rounds
    costs: Costs
    verification_by_length: Mapping[int, float]
    """The milliseconds of verifying k drafts, by the positions from which contexts are so long."""
    drafting_rounds: int
    """Rounds that had room for drafts, without those of lookup alone beside a model."""
    drafted_rounds: int
    """Those of them that had at least one draft."""
    drafts: int  # in all rounds, as are those that were accepted
    accepted_drafts: int
    acceptance: tuple[float, ...]
    """The share of accepted drafts at each position, of those drafted there."""
    acceptance_intervals: tuple[tuple[float, float], ...]
    """The 95 % interval of each share, as if rounds were independent."""
    prospects: tuple[Estimate, ...]
    """Estimates of k = 0, 1, 2, …: of plain decoding, and of the trace's drafter."""
    plain: Estimate
    now: Estimate  # the run itself: means of all its rounds, whatever their k
    best: Estimate
    can_round_activations: bool
    """True if `--activations int8` is possible, which may make products cheaper."""
    can_round_cache: bool
    """True if the cache is not in eight bits, where `--kv int8` would halve what long contexts read."""

    def as_dict(self) -> dict[str, Any]:
        """Return the object of `spd explain --json`."""
        words = {"bottleneck": bottleneck(self), "try": next_step(self), "words": summarize(self)}
        return {"schema": SCHEMA, **asdict(self), **words}


def explain_traces(traces: Sequence[Trace]) -> Explanation:
    """Explain traces of one model: costs from all rounds, acceptance from those that drafted."""
    plans = [trace.header.plan for trace in traces]
    records = [record for trace in traces for record in trace.rounds]
    drafting = [trace for trace in traces if any(record.k for record in trace.rounds)]
    drafting_records = [record for trace in drafting for record in trace.rounds] or records
    drafting_rounds = [_model_draft_rounds(trace) for trace in drafting]
    method = drafting_records[0].method if drafting else "off"
    model_method, is_lookup_too = split_spec(method)
    at_once = METHODS.get(model_method, METHODS["off"]).drafts_at_once
    costs = fit_costs(records, drafts_at_once=at_once)
    survival = fit_acceptance(drafting_rounds)
    counts = Counter(record.k for rounds in drafting_rounds for record in rounds)
    extra = 0 if is_lookup_too or at_once else EXTRA_DRAFTS
    max_k = min(MAX_DRAFT, max(counts) + extra) if counts else 0
    # Medians give the cost of each k; scaled to the clock, they compare with the run's tokens a second.
    scale = mean_over_typical(records, costs)
    plain_ms = scale * sum(round_parts(costs, 0).values())

    def estimate(k: int, length: float, round_ms: float) -> Estimate:
        return Estimate(
            k=k,
            length=length,
            round_ms=round_ms,
            tokens_per_second=1000 * length / round_ms,
            speed_up=length * plain_ms / round_ms,
        )

    estimates = tuple(
        estimate(k, expected_length(survival, k), scale * sum(round_parts(costs, k).values()))
        for k in range(max_k + 1)
    )
    k = counts.most_common(1)[0][0] if counts else 0
    parts = mean_parts(drafting_records)
    length = fmean(len(record.committed) for record in drafting_records)
    now = estimate(k, length, sum(parts.values()))
    with_room = [record for rounds in drafting_rounds for record in rounds]
    draft_counts = _draft_counts(with_room)
    return Explanation(
        method=method,
        device=str(plans[0].get("device", "")),
        k=k,
        rounds=len(records),
        tokens_per_second=now.tokens_per_second,
        parts=parts,
        costs=costs,
        verification_by_length=verification_by_length(records, k),
        drafting_rounds=len(with_room),
        drafted_rounds=sum(bool(record.draft) for record in with_room),
        drafts=sum(len(record.draft) for record in drafting_records),
        accepted_drafts=sum(_emitted_drafts(record) for record in drafting_records),
        acceptance=tuple(accepted / drafted for accepted, drafted in draft_counts),
        acceptance_intervals=tuple(share_interval(*counts) for counts in draft_counts),
        prospects=estimates,
        plain=estimates[0],
        now=now,
        best=max(estimates, key=lambda estimate: estimate.tokens_per_second),
        can_round_activations=all(plan.get("can_round_activations", False) for plan in plans),
        can_round_cache=all(plan.get("kv", "int8") != "int8" for plan in plans),
    )


def _model_draft_rounds(trace: Trace) -> list[RoundRecord]:
    """Return a trace's rounds with drafts, without those of lookup alone on copied text."""
    limit = trace.header.plan["model_drafts"]
    return [record for record in trace.rounds if 0 < record.k <= limit]


def bottleneck(e: Explanation) -> str:
    """Return the part that a round spends most on; acceptance where that alone decides."""
    if not e.drafted_rounds:
        return "that nothing was drafted"
    if e.drafted_rounds / e.drafting_rounds < e.accepted_drafts / e.drafts:
        return f"that only {e.drafted_rounds} of {e.drafting_rounds} rounds had drafts"
    now = e.now
    added = dict(e.parts)
    plain = round_parts(e.costs, 0)
    added["verification"] -= plain["verification"] * e.plain.round_ms / sum(plain.values())
    costliest = max(added, key=lambda part: added[part])
    if now.round_ms < 1.1 * e.plain.round_ms:
        return "acceptance: the rounds are as cheap as plain ones"
    if now.speed_up < 1 and now.length * e.plain.round_ms <= now.round_ms - added[costliest]:
        return f"acceptance: without {costliest} it would not pay either"
    return max(e.parts, key=lambda part: e.parts[part])


def next_step(e: Explanation) -> str:
    """Return the option that promises most, by the trace."""
    now = e.prospects[e.k]
    best = e.best
    if best.k == 0:
        return "--spec off" if e.k else "--spec auto, or a draft model: --draft-model FOLDER"
    if best.tokens_per_second <= (1 + MIN_GAIN) * now.tokens_per_second or split_spec(e.method)[1]:
        if bottleneck(e) == "the host":
            if e.device == "cpu":  # without CUDA graphs, and the host is the device
                return "the same run while no other program keeps the processor busy"
            return "--graphs on, --lag 1"
        # With lookup alongside, --draft-max would not be the model's k alone.
        return "nothing: this is the best that the trace knows of"
    return f"--spec {e.method} --draft-max {best.k}"


def summarize(e: Explanation) -> str:
    """Return an explanation as a few sentences."""
    now = e.now
    best = e.best
    sentences = [f"Nothing was drafted in {e.rounds} rounds of {e.plain.round_ms:.2f} ms."]
    if e.k:
        shares = ", ".join(
            f"{ms / now.round_ms:.0%} {name}" for name, ms in e.parts.items() if ms > 0
        )
        plain = "" if 0 in e.costs["verify"] else " (estimated: the trace holds no plain rounds)"
        accepted = f"{e.accepted_drafts} of {e.drafts} drafts were accepted"
        sentences = [
            f"With {e.method}, mostly at k = {e.k}, a round after the prompt's takes "
            f"{now.round_ms:.2f} ms ({shares}) and brings {now.length:.2f} tokens; "
            f"{accepted if e.drafts else 'no round had drafts'}.",
            f"It pays from {now.round_ms / e.plain.round_ms:.2f} tokens on, so this is {now.speed_up:.2f} × "
            f"plain decoding{plain}.",
            f"What limits it is {bottleneck(e)}.",
        ]
    if best.k != e.k:
        way = f"{e.method} at k = {best.k}" if best.k else "plain decoding"
        speeds = f"{best.tokens_per_second:.1f} tokens/s, {best.speed_up:.2f} × plain"
        sentences.append(f"The best by this trace is {way}: {speeds}.")
    if len(e.verification_by_length) > 1:
        times = ", ".join(
            f"{ms:.2f} ms from {position:,} positions on"
            for position, ms in e.verification_by_length.items()
        )
        sentences.append(f"Verification at k = {e.k} takes {times}.")
        if e.can_round_cache:
            sentences.append("--kv int8 halves what it reads of a context, and changes the text.")
    if e.can_round_activations:
        sentences.append(
            "--activations int8 may make verification cheaper, and changes the text: "
            "spd doctor measures products with it."
        )
    return " ".join([*sentences, f"Next: {next_step(e)}."])
