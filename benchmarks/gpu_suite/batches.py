"""Probe: plain, speculative and adaptive decoding of several requests at once, at the 8B shape.

The three engines live side by side and take turns at spans of equally many tokens, so that clocks,
heat and contexts are the same for all; what is reported are ratios within a turn, with an interval
for their median. Where memory does not hold three, plain decoding lives beside one other at a time;
where it does not hold two, they run one after another, and the ratio has no interval. Acceptance is
imposed; a span's tokens are counted as its rounds commit on average, since the luck of a few draws
would drown what is measured.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_suite.bandwidth import measure_read
from benchmarks.gpu_suite.end_to_end import READ_GIB, config_of
from benchmarks.gpu_suite.graph_timer import free_memory
from benchmarks.gpu_suite.room import needed_bytes, plan_anyway, side_by_side, usable_bytes
from benchmarks.gpu_suite.round_times import (
    FILL,
    GREEDY,
    Recorder,
    Span,
    random_prompt,
    run_span,
    start,
)
from benchmarks.gpu_suite.shapes import EAGLE_SIZE, QWEN3_8B, Shape, round_bytes
from benchmarks.gpu_suite.speculation import (
    REFERENCE_K,
    REFERENCE_LENGTH,
    acceptance_rate,
    mean_length,
)
from benchmarks.summaries import median_interval, paired_ratio
from spd.runtime import Engine, EngineConfig
from spd.runtime.engine.draft_length import DraftLength
from spd.runtime.plan.memory import pages_per_slot

K = REFERENCE_K
POOR_LENGTH = 1.2
"""Tokens a round of a drafter that is nearly always wrong: speculation must step aside."""
CASES = (
    *((slots, REFERENCE_LENGTH, ("plain", "fixed", "auto")) for slots in (1, 16, 100, 4, 64)),
    *((slots, POOR_LENGTH, ("plain", "auto")) for slots in (1, 16)),
)
TURNS = 30
FEWEST_TURNS = 10
SECONDS_A_CASE = 9.0
SPAN_TOKENS = 20
PROMPT = 128
WARM_ROUNDS = 12
CONTEXT = 960
"""Tokens of a prompt, rounds before the first span, positions of a slot besides those of `FILL`
rounds."""


@dataclass
class Runner:
    """One engine with its requests running, and what its spans gave."""

    engine: Engine
    recorder: Recorder
    slots: int
    rate: float
    rates: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def turn(self) -> None:
        """Run one span and note its tokens a second, as its rounds commit on average."""
        span = run_span(self.engine, self.recorder, tokens=SPAN_TOKENS * self.slots)
        expected = sum(mean_length(self.rate, record.k) for record in span.records) / len(
            span.records
        )
        self.rates.append(self.slots * expected * span.rounds / span.seconds)
        self.spans.append(span)

    def describe(self) -> dict[str, Any]:
        """Return a round's wall time, tokens a second as counted and as expected, and the chosen
        k."""
        rounds, seconds = (
            sum(getattr(s, name) for s in self.spans) for name in ("rounds", "seconds")
        )
        tokens = sum(span.tokens for span in self.spans)
        chosen = Counter(record.k for span in self.spans for record in span.records)
        return {
            "round_us": 1e6 * seconds / rounds,
            "tokens_a_second": tokens / seconds,
            "expected_tokens_a_second": paired_ratio(self.rates, [1.0] * len(self.rates)).median,
            "rounds_at_k": {str(k): chosen[k] for k in sorted(chosen)},
        }


def ratio(over: Sequence[float], under: Sequence[float], together: bool = True) -> dict[str, Any]:
    """Return the ratio of two runners' tokens a second: median, interval, number of turns.

    Within a turn where they took turns; else of their medians, without an interval.
    """
    if not together:
        return {"median": median(over) / median(under), "interval_95": None, "turns": len(over)}
    ratios = paired_ratio(over, under)
    return {
        "median": ratios.median,
        "interval_95": median_interval(ratios.values),
        "turns": len(ratios.values),
    }


class ScriptedLengths(DraftLength):
    """Draft lengths in a fixed order, in place of the engine's own choice."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(max(lengths), adaptive=False)
        self.left = list(lengths)

    def choose_k(self) -> int:
        """Return the next length."""
        return self.left.pop(0)


def every_pair(values: Sequence[int]) -> list[int]:
    """Return the shortest sequence in which every value follows every value (de Bruijn, order
    2)."""
    pairs: list[int] = []
    for index, value in enumerate(values):
        pairs.append(value)
        for other in values[index + 1 :]:
            pairs += [value, other]
    return [*pairs, *values[:1]]


def capture_every_length(engine: Engine) -> None:
    """Run one round of every shape that adapting may ask for, so that none is captured while it is
    timed."""
    chosen = engine.draft_length
    lengths = every_pair(engine.plan.draft_tiers)
    engine.draft_length = ScriptedLengths(lengths)
    for _ in lengths:
        engine.step()
    engine.draft_length = chosen


def config_of_kind(
    parent: Path,
    target: Shape,
    draft: Shape,
    kind: str,
    slots: int,
    length: float,
    **overrides: Any,
) -> EngineConfig:
    """Return the config of one kind ("plain", "fixed", "auto").

    Raise if a slot cannot reach its context.
    """
    options = {"slots": slots, "ctx": CONTEXT + ceil(FILL * slots * REFERENCE_LENGTH), **overrides}
    options["cache_pages"] = slots * pages_per_slot(options["ctx"])
    if kind == "plain":
        return config_of(parent, target, **options)
    return config_of(parent, target, draft, K, length, **{"adaptive": kind == "auto", **options})


def build(config: EngineConfig, kind: str, vocab: int, length: float) -> Runner:
    """Return the engine with all slots running and its graphs captured."""
    engine = Engine(config)
    prompts = [random_prompt(PROMPT, vocab, seed) for seed in range(config.slots)]
    start(engine, prompts, GREEDY, 2)
    if kind == "auto":
        capture_every_length(engine)
    for _ in range(WARM_ROUNDS):
        engine.step()
    return Runner(engine, Recorder.of(engine), config.slots, acceptance_rate(length, K))


def take_turns(
    configs: Mapping[str, EngineConfig], vocab: int, length: float, seconds: float
) -> dict[str, Runner]:
    """Build engines side by side, let them take turns, and close them; what they gave."""
    free_memory()
    runners: dict[str, Runner] = {}
    try:
        for kind, config in configs.items():
            runners[kind] = build(config, kind, vocab, length)
        began = time.perf_counter()
        for turn in range(TURNS):
            if turn >= FEWEST_TURNS and time.perf_counter() - began > seconds:
                break
            # The first in a turn changes, so that none always follows the same one.
            order = list(runners.values())
            for runner in order[turn % len(order) :] + order[: turn % len(order)]:
                runner.turn()
    finally:
        for runner in runners.values():
            runner.engine.close()
            del runner.engine  # the next ones need its memory
    return runners


PAIRS = (("auto", "plain"), ("auto", "fixed"), ("fixed", "plain"))


def compare_kinds(configs: Mapping[str, EngineConfig], vocab: int, length: float) -> dict[str, Any]:
    """Run the kinds in turns, as many at once as fit; return their descriptions and ratios."""
    free_memory()
    plans = {kind: plan_anyway(config) for kind, config in configs.items()}
    needs = {kind: needed_bytes(plan) for kind, plan in plans.items()}
    first = next(iter(configs))
    groups = side_by_side(needs, usable_bytes(configs[first], plans[first].device))
    report: dict[str, Any] = {"side_by_side": groups, "needed_bytes": needs}
    rates: dict[str, list[float]] = {}
    for group in groups:
        group_configs = {kind: configs[kind] for kind in group}
        runners = take_turns(group_configs, vocab, length, SECONDS_A_CASE / len(groups))
        report |= {kind: runner.describe() for kind, runner in runners.items()}
        rates |= {kind: runner.rates for kind, runner in runners.items()}
        for over, under in PAIRS:
            if over in runners and under in runners:
                report[f"{over}_over_{under}"] = ratio(rates[over], rates[under])
    for over, under in PAIRS:
        if over in rates and under in rates and f"{over}_over_{under}" not in report:
            report[f"{over}_over_{under}"] = ratio(rates[over], rates[under], together=False)
    return report


def run(
    target: Shape = QWEN3_8B,
    draft: Shape = EAGLE_SIZE,
    cases: Sequence[tuple[int, float, Sequence[str]]] = CASES,
    read_rate: float | None = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Run every number of slots at the reference acceptance, then a poor drafter.

    Yield after each.
    """
    rate = read_rate or float(measure_read(READ_GIB, repeats=10)["bytes_per_second"])
    results: dict[str, Any] = {}
    report = {"read_bytes_per_second": rate, "k": K, "cases": results}
    with tempfile.TemporaryDirectory() as place:
        for slots, length, kinds in cases:
            name = f"{slots} slots, length {length}"
            began = time.perf_counter()
            try:
                configs = {
                    kind: config_of_kind(
                        parent=Path(place),
                        target=target,
                        draft=draft,
                        kind=kind,
                        slots=slots,
                        length=length,
                        **options,
                    )
                    for kind in kinds
                }
                case = compare_kinds(configs, target.vocab, length)
                context = PROMPT + WARM_ROUNDS + SPAN_TOKENS * case["auto_over_plain"]["turns"] // 2
                floor_us = 1e6 * round_bytes(target, None, [context] * slots, 0) / rate
                case["plain"]["share_of_floor"] = floor_us / case["plain"]["round_us"]
                results[name] = case
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
            results[name]["seconds"] = round(time.perf_counter() - began, 1)
            yield report
