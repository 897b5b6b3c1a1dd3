"""Explanations of made traces, whose distribution is known, and of real ones, whose tokens are."""

import dataclasses
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from spd.errors import UsageError
from spd.runtime.engine.trace import RoundRecord
from spd.runtime.lab import explain
from spd.runtime.lab.explain import (
    Trace,
    TraceHeader,
    bottleneck,
    explain_traces,
    next_step,
    read_trace,
    share_interval,
    summarize,
)

GOOD = (10.0, 0.2)
WIDE = (6.0, 2.5)
NARROW = (5.0, 1.5)
CASES: dict[str, tuple[int, float, dict[str, Any], str, str]] = {
    "a useless drafter": (4, 0.0, {}, "acceptance: without drafting", "--spec off"),
    "a poor drafter": (
        4,
        0.15,
        {"verify": NARROW},
        "acceptance: without verification",
        "--spec off",
    ),
    "a slow drafter": (4, 0.6, {"draft": 6.0}, "drafting", "--spec"),
    "wide verification": (6, 0.5, {"verify": WIDE, "draft": 0.1}, "verification", "--draft-max 1"),
    "a slow host": (3, 0.5, {"host": 12.0}, "the host", "--graphs on"),
    "a good drafter": (4, 0.8, {}, "verification", "nothing: this is the best"),
    "a free drafter": (
        4,
        0.8,
        {"draft": 0.01},
        "acceptance: the rounds are as cheap",
        "--draft-max 6",
    ),
}


def make_trace(
    k: int,
    rate: float,
    *,
    verify: Any = GOOD,
    draft: float = 1.0,
    host: float = 0.1,
    rounds: int = 400,
) -> Trace:
    """Return rounds at k with a verify time of base + slope * rows, and `draft` ms a draft."""
    draws = random.Random(k)
    trace = Trace(header=TraceHeader("m", 0.0, {"verify": "coupled", "model_drafts": 31}))
    for number in range(1, rounds + 1):
        accepted = 0
        while accepted < k and draws.random() < rate:
            accepted += 1
        base, slope = verify
        times = {"draft": draft * k, "verify": base + slope * (k + 1), "rest": 0.3, "host": host}
        ms = {part: value * draws.uniform(0.95, 1.05) for part, value in times.items()}
        committed = [draws.randrange(1000) for _ in range(accepted + 1)]
        trace.rounds.append(
            RoundRecord(
                request="r",
                round=number,
                position=9,
                method="draft",
                draft=[0] * k,
                sampled=[0] * (k + 1),
                accepted=accepted,
                committed=committed,
                ms=ms,
                draft_forwards=k,
                k=k,
            )
        )
    return trace


def truth(k: int, rate: float, draft: float = 1.0) -> float:
    length = sum(rate**i for i in range(k + 1))
    return 1000 * length / (10 + 0.2 * (k + 1) + draft * k + 0.4)


@pytest.mark.parametrize("rate", [0.4, 0.7, 0.9])
@pytest.mark.parametrize("left_out", [1, 2, 3, 5, 8])
def test_a_length_left_out_is_predicted(rate: float, left_out: int) -> None:
    """Within 10 %: 400 rounds at each of the others leave about 4 % of error at the most."""
    explanation = explain_traces(
        [make_trace(k, rate) for k in (0, 1, 2, 3, 4, 5, 6, 8) if k != left_out]
    )
    assert left_out not in explanation.costs["verify"]
    assert explanation.prospects[left_out].tokens_per_second == pytest.approx(
        truth(left_out, rate), rel=0.1
    )
    best = max(range(17), key=lambda k: truth(k, rate))
    assert truth(explanation.best.k, rate) >= 0.97 * truth(best, rate)


@pytest.mark.parametrize("left_out", [1, 3, 8])
def test_acceptance_that_falls_with_k_is_foreseen_from_what_was_held(left_out: int) -> None:
    """Easy text fills more of the rounds with few drafts; pooled rates miss at both ends."""
    rates = {k: 0.8 - 0.12 * math.log(k) for k in (1, 2, 3, 4, 6, 8)}
    traces = {k: make_trace(k, rate, rounds=800) for k, rate in rates.items()}
    explanation = explain_traces([trace for k, trace in traces.items() if k != left_out])
    expected_length_ = sum(rates[left_out] ** i for i in range(left_out + 1))
    assert explanation.prospects[left_out].length == pytest.approx(expected_length_, rel=0.08)
    together = Trace([record for trace in traces.values() for record in trace.rounds])
    assert len(explain.fit_acceptance([together.rounds])) == 1, (
        "adaptive k tells nothing of other k"
    )


def test_rounds_of_lookup_alone_say_nothing_of_a_model_beside_it() -> None:
    """They occur where text is copied, with more tokens at a time than the model drafts."""
    trace = make_trace(3, 0.5)
    lone = explain_traces([trace])
    with_lookup = [dataclasses.replace(record, method="draft+ngram") for record in trace.rounds]
    copied = [
        dataclasses.replace(record, k=8, match=6, accepted=8, draft_forwards=0)
        for record in with_lookup[::3]
    ]
    both = Trace(with_lookup + copied)
    both.header = TraceHeader("m", 0.0, {"model_drafts": 3, "draft_max": 8})
    explanation = explain_traces([both])
    assert explanation.acceptance == lone.acceptance and explanation.k == 3
    assert [prospect.k for prospect in explanation.prospects] == [0, 1, 2, 3]
    assert explanation.rounds == len(both.rounds)


def test_rounds_in_which_lookup_found_nothing_do_not_lower_the_acceptance_of_its_drafts() -> None:
    """Shares and totals are those of `--stats`: of what was drafted, and emitted before the end."""
    trace = make_trace(3, 0.9, rounds=90)
    found = [dataclasses.replace(record, method="ngram") for record in trace.rounds]
    missed = [dataclasses.replace(r, draft=[], accepted=0, committed=[7]) for r in found]
    last = dataclasses.replace(found[0], accepted=3, committed=[7])
    explanation = explain_traces([Trace([*found, *missed, last])])
    accepted = [sum(r.accepted > i for r in found) + (i < 1) for i in range(3)]
    assert explanation.acceptance == tuple(count / 91 for count in accepted)
    assert (explanation.drafts, explanation.accepted_drafts) == (3 * 91, sum(accepted))
    assert explanation.prospects[3].length < 3, (
        "a round brings fewer tokens than its drafts promise"
    )
    limit = "that only 91 of 181 rounds had drafts"
    assert bottleneck(explanation) == limit and limit in explain.summarize(explanation)


def test_a_lookup_that_found_nothing_is_said_to_have_drafted_nothing() -> None:
    rounds = [dataclasses.replace(r, draft=[]) for r in make_trace(3, 0.0, rounds=9).rounds]
    explanation = explain_traces([Trace(rounds)])
    assert explanation.acceptance == () and next_step(explanation) == "--spec off"
    words = explain.summarize(explanation)
    assert "no round had drafts" in words and "limits it is that nothing was drafted" in words


def test_a_block_takes_the_same_time_whatever_k_is() -> None:
    """One pass makes all drafts: fewer of them save no drafting, and more than the block has none."""
    traces = [make_trace(0, 0.0), make_trace(7, 0.6, draft=2.0)]
    for trace in traces:
        trace.rounds = [dataclasses.replace(record, method="block") for record in trace.rounds]
    explanation = explain_traces(traces)
    draft_ms = explanation.costs["draft"]
    assert {draft_ms[k] for k in range(1, 8)} == {draft_ms[7]} and draft_ms[0] == 0
    assert draft_ms[7] == pytest.approx(14.0, rel=0.05)
    assert [prospect.k for prospect in explanation.prospects] == [*range(8)]


@pytest.mark.parametrize(("method", "advised"), [("draft", True), ("draft+ngram", False)])
def test_no_length_is_advised_beside_lookup(method: str, advised: bool) -> None:
    """It would bound what lookup drafts alone."""
    traces = [make_trace(1, 0.95, rounds=900), make_trace(3, 0.95), make_trace(0, 0.0)]
    for trace in traces:
        trace.rounds = [dataclasses.replace(record, method=method) for record in trace.rounds]
    explanation = explain_traces(traces)
    assert (explanation.k, explanation.method) == (1, method) and explanation.best.k > 1
    assert ("--draft-max" in explanation.as_dict()["try"]) is advised


@pytest.mark.parametrize("name", CASES)
def test_the_bottleneck_and_the_next_step_are_named(name: str) -> None:
    k, rate, costs, limit, step = CASES[name]
    plain = make_trace(0, 0.0, **costs)
    explanation = explain_traces([make_trace(k, rate, **costs), plain])
    assert (explanation.now.speed_up < 1) == (name in list(CASES)[:4]), explanation.now
    assert bottleneck(explanation).startswith(limit), bottleneck(explanation)
    assert step in next_step(explanation), next_step(explanation)
    assert bottleneck(explanation) in explain.summarize(explanation)
    if not limit.startswith("acceptance"):
        shares = {
            word: int(n)
            for n, word in re.findall(r"(\d+)% ([a-z ]+)[,)]", explanation.as_dict()["words"])
        }
        assert bottleneck(explanation) == max(shares, key=lambda word: shares[word])


def test_cuda_graphs_are_not_advised_on_a_cpu() -> None:
    """They are refused there."""
    trace = make_trace(3, 0.5, host=12.0)
    trace.header = dataclasses.replace(trace.header, plan={"model_drafts": 3, "device": "cpu"})
    plain = make_trace(0, 0.0, host=12.0)
    explanation = explain_traces([trace, plain])
    assert bottleneck(explanation) == "the host"
    assert "no other program" in next_step(explanation)


def test_rounds_of_fewer_drafts_never_take_longer() -> None:
    """Some rounds of one draft were slow, as on a busy machine: plain ones are not slower still."""
    trace = make_trace(3, 0.6)
    slow = make_trace(1, 0.6, verify=(30.0, 0.2), rounds=9)
    explanation = explain_traces([Trace([*trace.rounds, *slow.rounds], trace.header)])
    times = [prospect.round_ms for prospect in explanation.prospects]
    assert times == sorted(times) and times[0] <= explanation.now.round_ms
    assert not bottleneck(explanation).startswith("acceptance")


def test_the_run_is_told_by_its_clock_and_prospects_on_the_same_scale() -> None:
    """Every tenth round takes ten times as long: medians miss it, tokens a second do not."""
    trace = make_trace(3, 0.6)
    for record in trace.rounds[::10]:
        record.ms.update({part: 10 * value for part, value in record.ms.items()})
    explanation = explain_traces([trace])
    seconds = sum(sum(record.ms.values()) for record in trace.rounds) / 1000
    measured = sum(len(record.committed) for record in trace.rounds) / seconds
    assert (
        explanation.now.tokens_per_second
        == explanation.tokens_per_second
        == pytest.approx(measured)
    )
    assert explanation.prospects[3].tokens_per_second == pytest.approx(measured, rel=0.03)
    assert explanation.now.speed_up == pytest.approx(explanation.prospects[3].speed_up, rel=0.03)
    assert sum(explanation.parts.values()) == pytest.approx(explanation.now.round_ms)


def write(path: Path, trace: Trace) -> Path:
    lines = [dataclasses.asdict(trace.header)] if trace.header else []
    lines += [dataclasses.asdict(record) for record in trace.rounds]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_file_is_read_back(tmp_path: Path) -> None:
    trace = make_trace(3, 0.5, rounds=20)
    path = write(tmp_path / "trace", trace)
    assert read_trace(path) == trace
    path.write_text(path.read_text() + '{"request": "r", "rou')  # a run that was killed
    assert read_trace(path).rounds == trace.rounds
    path.write_text("no round\n" + path.read_text())
    with pytest.raises(UsageError, match="line 1 is no round"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (2, {"ms": {}}),
        (2, {"ms": {"draft": 1.0, "verify": None, "rest": 0.0, "host": 0.0}}),
        (2, {"ms": {"draft": 0.0, "verify": 0.0, "rest": 0.0, "host": 0.0}}),
        (2, {"accepted": "2"}),
        (2, {"k": 99}),
        (21, {"ms": {}}),
        (1, {"plan": None}),
        (1, {"plan": {"model_drafts": "all"}}),
    ],
)
def test_a_damaged_line_of_a_trace_is_named(
    tmp_path: Path, line: int, change: dict[str, Any]
) -> None:
    path = write(tmp_path / "trace", make_trace(3, 0.5, rounds=20))
    lines = path.read_text().splitlines()
    assert len(lines) == 21
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | change)
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=rf"trace, line {line} is no round of a trace"):
        read_trace(path)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (15, 20), (1, 1), (1, 4000)])
def test_the_interval_of_a_share_ends_where_it_would_be_unlikely(successes, trials) -> None:
    """Each end is a probability from which the share lies 1.96 standard deviations away."""
    interval = share_interval(successes, trials)
    for end in interval:
        distance = abs(successes / trials - end)
        assert distance == pytest.approx(1.96 * math.sqrt(end * (1 - end) / trials), abs=1e-9)
    assert interval[0] < interval[1]


def test_each_share_has_its_interval() -> None:
    explanation = explain_traces([make_trace(3, 0.6, rounds=90)])
    pairs = list(zip(explanation.acceptance, explanation.acceptance_intervals, strict=True))
    assert len(pairs) == 3 and all(low < share < high for share, (low, high) in pairs)
    longer = explain_traces([make_trace(3, 0.6, rounds=900)]).acceptance_intervals
    widths = [high - low for low, high in (*explanation.acceptance_intervals, *longer)]
    assert all(wide > 2 * narrow for wide, narrow in zip(widths[:3], widths[3:], strict=True))


def test_rounded_activations_are_named_where_every_trace_could_have_had_them() -> None:
    """The trace's plan says whether they could."""
    can = make_trace(3, 0.7)
    can.header = TraceHeader("m", 0.0, {**can.header.plan, "can_round_activations": True})
    assert "--activations int8" in summarize(explain_traces([can]))
    assert "--activations int8" not in summarize(explain_traces([make_trace(3, 0.7)]))
    assert "--activations int8" not in summarize(explain_traces([can, make_trace(2, 0.7)]))


def test_verification_is_told_by_context_length() -> None:
    """Lengths of one or two rounds are left out, and one length alone is not told."""
    trace = make_trace(3, 0.7, rounds=40)
    positions = [9] * 20 + [5000] * 19 + [100_000]
    trace.rounds = [
        dataclasses.replace(
            record, position=position, ms={**record.ms, "verify": 4.0 if position < 10 else 9.0}
        )
        for record, position in zip(trace.rounds, positions, strict=True)
    ]
    explanation = explain_traces([trace, make_trace(0, 0.0)])
    assert explanation.verification_by_length == {0: 4.0, 4096: 9.0}
    words = "takes 4.00 ms from 0 positions on, 9.00 ms from 4,096 positions on"
    assert words in summarize(explanation)
    assert "positions on" not in summarize(explain_traces([make_trace(3, 0.7)]))
    assert "--kv int8" not in summarize(explanation), "nothing says what the cache is kept in"
    for kv, is_named in (("bfloat16", True), ("int8", False)):
        trace.header = TraceHeader("m", 0.0, {**trace.header.plan, "kv": kv})
        assert ("--kv int8" in summarize(explain_traces([trace]))) is is_named
