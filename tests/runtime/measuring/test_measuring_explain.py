"""Explanations of made traces, whose law is known, and of real ones, whose tokens are."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spd.errors import UsageError
from spd.runtime import SamplingParams
from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.lab.cost_model import Acceptance, fit_acceptance
from spd.runtime.lab.explain import (
    Explanation,
    Trace,
    TraceHeader,
    bottleneck,
    explain,
    next_step,
    paragraph,
    read_traces,
    simulate_lookup,
)
from tests.helpers import make_engine, random_prompts, run_all
from tests.prompt_lookup import search
from tests.runtime.measuring.test_measuring_replay import damped


def make_trace(
    k: int,
    rate: float,
    *,
    verify: tuple[float, float] = (10.0, 0.2),
    draft: float = 1.0,
    host: float = 0.1,
    rounds: int = 400,
    temperature: float = 0.0,
) -> Trace:
    """Rounds at k of a model whose verify takes base + slope * rows, and each draft `draft` ms."""
    draws = random.Random(k)
    trace = Trace(header=TraceHeader("m", temperature, {"verify": "coupled"}))
    for number in range(rounds + 1):
        accepted = 0
        while accepted < k and draws.random() < rate:
            accepted += 1
        base, slope = verify
        times = {"draft": draft * k, "verify": base + slope * (k + 1), "rest": 0.3, "host": host}
        ms = {part: value * draws.uniform(0.95, 1.05) for part, value in times.items()}
        committed = [draws.randrange(1000) for _ in range(accepted + 1)]
        trace.add(RoundRecord("r", number, 9, "draft", [0] * k, [0] * (k + 1), accepted, committed, ms, k, k))
    return trace


def truth(k: int, rate: float, draft: float = 1.0) -> float:
    """Tokens a second of the law behind `make_trace`."""
    length = sum(rate**i for i in range(k + 1))
    return 1000 * length / (10 + 0.2 * (k + 1) + draft * k + 0.4)


@pytest.mark.parametrize("rate", [0.4, 0.7, 0.9])
@pytest.mark.parametrize("left_out", [1, 2, 3, 5, 8])
def test_a_length_left_out_is_predicted(rate: float, left_out: int) -> None:
    """Within 10 %: 400 rounds at each of the others leave about 4 % of error at the most."""
    found = explain([make_trace(k, rate) for k in (0, 1, 2, 3, 4, 5, 6, 8) if k != left_out])
    assert left_out + 1 not in found.costs.verify
    predicted = 1000 * found.acceptance.length(left_out) / found.costs.round_ms(left_out)
    assert predicted == pytest.approx(truth(left_out, rate), rel=0.1)
    best = max(range(17), key=lambda k: truth(k, rate))
    assert truth(found.best.k, rate) >= 0.97 * truth(best, rate)


@pytest.mark.parametrize("left_out", [1, 3, 8])
def test_acceptance_that_falls_with_k_is_foreseen_from_what_was_held(left_out: int) -> None:
    """Easy text fills more of the rounds with few drafts. Pooled rates are further off at both ends."""
    rates = {k: 0.8 - 0.12 * math.log(k) for k in (1, 2, 3, 4, 6, 8)}
    traces = {k: make_trace(k, rate, rounds=800) for k, rate in rates.items()}
    found = explain([trace for k, trace in traces.items() if k != left_out])
    law = sum(rates[left_out] ** i for i in range(left_out + 1))
    assert found.acceptance.length(left_out) == pytest.approx(law, rel=0.08)
    together = Trace([record for trace in traces.values() for record in trace.rounds])
    assert explain([together]).acceptance.held == {}, "k that follows acceptance tells nothing of other k"


def test_only_a_little_more_than_what_was_held_is_weighed() -> None:
    found = explain([make_trace(0, 0.0), make_trace(3, 0.8)])
    assert [prospect.k for prospect in found.own] == [1, 2, 3, 4, 5] and found.best.k <= 5
    few = Acceptance((0.2, 0.1, 0.1), 60)  # all six rounds that got so far accepted the third, too
    assert few.length(5) < 1 + 0.4 + 0.1 * (0.75 + 0.75**2)


def test_lookup_beyond_what_ran_is_simulated(pair: tuple[Path, Path]) -> None:
    """The text is the same for every k, so a simulation of k = 4 says what a run of k = 4 does."""
    prompt = random_prompts(1, 20, 256)[0]
    params = [SamplingParams(max_tokens=80, ignore_eos=True)]
    traces, lengths = {}, {}
    for k in (2, 4):
        (run,) = run_all(make_engine(pair[0], spec="ngram", draft_max=k), [prompt], params)
        traces[k] = Trace(header=TraceHeader("m", 0.0, {}, tuple(prompt)))
        for record in run.rounds:
            traces[k].add(record)
        lengths[k] = fit_acceptance(traces[k].rounds).length(k)
    found = explain([traces[2]])
    assert [prospect.k for prospect in found.own] == [1, 2]
    beyond = {prospect.k: prospect.length for prospect in found.ngram}
    assert min(beyond) == 3 and beyond[4] == pytest.approx(lengths[4], rel=0.05)
    assert "N-gram lookup on this text" not in paragraph(found)


def test_rounds_of_lookup_alone_say_nothing_of_a_model_beside_it() -> None:
    """They come where text is copied, and more tokens at a time than the model drafts."""
    trace = make_trace(3, 0.5)
    lone = explain([trace])
    copies = [
        dataclasses.replace(record, method="draft+ngram", k=8, match=6, accepted=8, draft_forwards=0)
        for record in trace.rounds[::3]
    ]
    both = Trace([dataclasses.replace(r, method="draft+ngram") for r in trace.rounds] + copies)
    both.header = TraceHeader("m", 0.0, {"model_drafts": 3, "draft_max": 8})
    found = explain([both])
    assert found.acceptance.survival == lone.acceptance.survival and found.k == 3
    assert [prospect.k for prospect in found.own] == [1, 2, 3]
    assert found.rounds == len(both.rounds)


@pytest.mark.parametrize(("method", "advised"), [("draft", True), ("draft+ngram", False)])
def test_no_length_is_advised_beside_lookup(method: str, advised: bool) -> None:
    """It would bound what lookup drafts alone."""
    traces = [make_trace(1, 0.95, rounds=900), make_trace(3, 0.95), make_trace(0, 0.0)]
    for trace in traces:
        trace.rounds = [dataclasses.replace(record, method=method) for record in trace.rounds]
    found = explain(traces)
    assert (found.k, found.best.method) == (1, method) and found.best.k > 1
    assert ("--draft-max" in found.as_dict()["try"]) is advised


def test_what_a_plan_adds_to_the_words() -> None:
    """Acceptance that was imposed, and states that each round moves."""
    trace = make_trace(3, 0.8)
    said = {False: paragraph(explain([trace]))}
    trace.header = TraceHeader("m", 0.0, {"synthetic_acceptance": 2.5, "state_bytes": 48 << 20})
    assert explain([trace]).as_dict()["acceptance"] == "imposed"
    said[True] = paragraph(explain([trace]))
    for words in ("Acceptance was imposed", "Recurrent states, 48.00 MiB, are read and written once a round"):
        assert [words in text for text in said.values()] == [False, True]


def test_plain_decoding_is_carried_over_where_no_plain_round_was_seen() -> None:
    found = explain([make_trace(2, 0.7), make_trace(4, 0.7)])
    assert not found.costs.plain_measured and "not in the trace" in paragraph(found)
    assert found.plain.round_ms == pytest.approx(10.6, rel=0.1)
    assert found.break_even(4) == pytest.approx((11.0 + 4 + 0.4) / 10.6, rel=0.1)


CASES = {
    "a useless drafter": (make_trace(4, 0.0), "acceptance: few drafts are right", "--spec off"),
    "a poor drafter": (
        make_trace(4, 0.15, verify=(5.0, 1.5)),
        "acceptance: even a free drafter",
        "--spec off",
    ),
    "a slow drafter": (make_trace(4, 0.6, draft=6.0), "drafting: with a free drafter it would pay", "--spec"),
    "wide verification": (
        make_trace(6, 0.5, verify=(6.0, 2.5), draft=0.1),
        "verification: its extra rows",
        "--draft-max 1",
    ),
    "a slow host": (make_trace(2, 0.5, host=12.0), "the host", "--graphs on"),
    "a good drafter": (make_trace(4, 0.8), "drafting", "nothing: that is"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_limits_it_and_what_to_try(name: str) -> None:
    trace, limit, step = CASES[name]
    found = explain([trace, make_trace(0, 0.0, verify=_verify(trace))])
    slower = name in ("a useless drafter", "a poor drafter", "a slow drafter", "wide verification")
    assert (found.now.speed_up < 1) == slower, found.now
    assert bottleneck(found).startswith(limit), bottleneck(found)
    assert step in next_step(found) or name == "a slow host"
    assert bottleneck(found) in paragraph(found)


def _verify(trace: Trace) -> tuple[float, float]:
    """The law of a made trace's verification, from its own figures."""
    for wanted in ((10.0, 0.2), (5.0, 1.5), (6.0, 2.5)):
        record = trace.rounds[0]
        if record.ms["verify"] == pytest.approx(wanted[0] + wanted[1] * (record.k + 1), rel=0.06):
            return wanted
    raise AssertionError("no such law")


def test_a_trace_of_plain_decoding() -> None:
    found = explain([make_trace(0, 0.0)])
    assert (found.k, found.own, found.now) == (0, (), found.plain)
    assert paragraph(found).startswith("Nothing was drafted in 400 rounds")


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path]) -> tuple[Path, Path]:
    target, draft = (tiny("qwen3", layers=n, residual_gain=damped, seed=3) for n in (4, 2))
    return target, draft


def test_lookup_is_the_plain_search() -> None:
    draws = random.Random(3)
    text = [draws.randrange(3) for _ in range(120)]
    prompt, generated = text[:30], text[30:]
    accepted, at = [], 31
    while at < len(text):
        draft: Sequence[int] = search(text[:at], 5, 3, 8)
        right = 0
        while right < len(draft) and at + right < len(text) and draft[right] == text[at + right]:
            right += 1
        accepted.append(right)
        at += right + 1
    assert simulate_lookup(prompt, generated, 5) == accepted and sum(accepted) > 10


def write(path: Path, trace: Trace) -> Path:
    lines = [dataclasses.asdict(trace.header)] if trace.header else []
    lines += [dataclasses.asdict(record) for record in trace.rounds]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_file_is_read_back(tmp_path: Path) -> None:
    trace = make_trace(3, 0.5, rounds=20)
    path = write(tmp_path / "trace", trace)
    (again,) = read_traces([path])
    assert again == trace or (again.rounds == trace.rounds and again.header == trace.header)
    path.write_text(path.read_text() + '{"request": "r", "rou')  # a run that was killed
    assert read_traces([path])[0].rounds == trace.rounds
    path.write_text("no round\n" + path.read_text())
    with pytest.raises(UsageError, match="line 1 is no round"):
        read_traces([path])


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (2, {"ms": {}}),
        (2, {"ms": {"draft": 1.0, "verify": None, "rest": 0.0, "host": 0.0}}),
        (2, {"accepted": "2"}),
        (2, {"k": 99}),
        (21, {"ms": {}}),
        (1, {"plan": None}),
    ],
)
def test_a_damaged_line_of_a_trace_is_named(tmp_path: Path, line: int, change: dict[str, Any]) -> None:
    path = write(tmp_path / "trace", make_trace(3, 0.5, rounds=20, temperature=0.5))
    lines = path.read_text().splitlines()
    assert len(lines) == 21
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | change)
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=rf"trace, line {line} is no round of a trace"):
        read_traces([path])


@pytest.mark.parametrize("text", ["{}", '{"schema": "spd.bench/1", "rows": []}', "[1]", '{"requ', "3"])
def test_one_line_that_is_no_trace_is_not_taken_for_a_cut_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(UsageError, match="other, line 1 is no round of a trace"):
        read_traces([path])
    path.write_text(f"{write(path, make_trace(3, 0.5, rounds=20)).read_text()}{{}}")
    with pytest.raises(UsageError, match=r"line \d+ is no round of a trace"):
        read_traces([path])


def test_an_explanation_is_plain_json() -> None:
    found: Explanation = explain([make_trace(4, 0.7, temperature=0.5)])
    shown = json.loads(json.dumps(found.as_dict()))
    assert shown["schema"] == "spd.explain/1" and shown["best"]["k"] == found.best.k
    assert shown["words"] == paragraph(found)
