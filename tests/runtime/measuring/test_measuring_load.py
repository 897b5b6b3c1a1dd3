"""Loads, their clocks and replays, with an engine that only counts and with tiny ones."""

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from spd.errors import IncompatibleError, UsageError
from spd.formats.demo import demo_folder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import Engine, EngineConfig
from spd.runtime.engine.request import Event, Request
from spd.runtime.lab.load import (
    Load,
    Pass,
    Timeline,
    Workload,
    compare_texts,
    run_pass,
    take_sample,
)
from spd.runtime.lab.prompt_set import EncodedPrompt, Prompt, encode_prompts, read_prompts
from spd.runtime.lab.replay import make_requests, replay_requests
from spd.runtime.lab.rows import make_rows
from spd.runtime.lab.sweep import Settings, Sweep
from spd.runtime.round.sampling_params import SamplingParams
from tests.helpers import DampedLayers, Patch, Tiny, random_prompts
from tests.runtime.measuring.measuring_helpers import PLAIN
from tests.runtime.seeded_faults import first_is_free, kv_one_off, verify


class CountingEngine:
    """Three steps a request of `seconds` each, two tokens a step; counts concurrent requests."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.trace = None
        self.seconds = seconds
        self.left = dict[str, int]()
        self.peak = 0

    def add(self, request: Request) -> None:
        self.left[request.id] = 3
        self.peak = max(self.peak, len(self.left))

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Event]:
        time.sleep(self.seconds)
        self.left = {name: steps - 1 for name, steps in self.left.items()}
        events = [
            Event(name, (1, 2), "", None if steps else "length")
            for name, steps in self.left.items()
        ]
        self.left = {name: steps for name, steps in self.left.items() if steps}
        return events


def requests(count: int) -> list[Request]:
    return [Request(str(i), (1,), SamplingParams()) for i in range(count)]


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_a_closed_loop_keeps_so_many_and_no_more(concurrency: int) -> None:
    engine = CountingEngine()
    ended = list[int]()
    ran = run_pass(cast(Engine, engine), requests(7), concurrency=concurrency, watch=ended.append)
    assert engine.peak == min(concurrency, 7)
    assert [line.token_ids for line in ran.timelines] == [[1, 2] * 3] * 7
    assert all(line.finish_reason == "length" for line in ran.timelines)
    assert engine.trace is None and ended == sorted(ended) and ended[-1] == 7


def test_an_open_loop_admits_by_the_clock() -> None:
    """A request that is due while the engine is busy arrived when it was due: waiting counts."""
    engine = CountingEngine()
    arrivals = [0.0, 0.03, 0.06]
    ran = run_pass(cast(Engine, engine), requests(3), arrivals=arrivals)
    assert engine.peak == 1, "each ended before the next one came"
    starts = [line.arrived - ran.timelines[0].arrived for line in ran.timelines]
    assert starts == pytest.approx(arrivals, abs=1e-6)
    assert all(line.chunks[0][0] >= line.arrived for line in ran.timelines) and ran.seconds >= 0.06
    ran = run_pass(cast(Engine, CountingEngine(0.02)), requests(2), arrivals=[0.0, 0.001])
    first, second = ran.timelines
    assert second.arrived - first.arrived == pytest.approx(0.001, abs=1e-6)
    assert second.chunks[0][0] - second.arrived > 0.019


def test_arrivals_are_poisson() -> None:
    """The mean gap of 10,000 is within 4 standard errors: a chance of 6e-5 to fail."""
    arrivals, again = (Load(rate=5.0).arrivals(10_000, seed=1) for _ in range(2))
    assert arrivals and arrivals == sorted(arrivals) == again
    assert arrivals[-1] / 10_000 == pytest.approx(0.2, rel=0.04)


def test_times_follow_their_definitions() -> None:
    (request,) = requests(1)
    chunks = [(10.5, 1), (11.0, 3), (12.0, 2)]
    line = Timeline(chunks=chunks, token_ids=[1] * 6, request=request, arrived=10.0)
    ran = Pass(
        [line, Timeline(request=request, arrived=10.0)], [], 4.0
    )  # of the second nothing came
    for load, speed in ((Load(), (5, 1.5)), (Load(4), (6, 4.0)), (Load(4, 2.0), (1, 0.3))):
        work = Workload(category="code", temperature=0.0, **vars(load))
        sample = take_sample(
            measured_pass=ran, config=0, work=work, repetition=0, prompts=["code/1", "code/2"]
        )
        assert sample.speed == pytest.approx(speed) and sample.tokens_after_first == 5
        assert (sample.ttft_ms, sample.itl_ms) == ([500.0], [500.0, 1000.0])
        assert sample.tpot_ms == pytest.approx([300.0])
        assert make_rows([sample], [PLAIN])[0]["rate"] == load.rate


SETTINGS = Settings(temperatures=(0.0, 0.9), max_tokens=10, repetitions=2)


def make_sweep(
    folder: Path, settings: Settings, *, same_prompts: bool = False, **options: object
) -> Sweep:
    plain = EngineConfig(
        model=folder, threads=1, dtype="float32", ctx=128, spec="off", prefix_sharing=False
    )
    spec = replace(plain, spec="ngram", ngram_min=1, draft_max=3, adaptive=False, **options)  # type: ignore[arg-type]
    first, second = random_prompts(2, 20, 256)
    texts_by_category = {"code": first, "edit": first if same_prompts else second}
    questions = [
        EncodedPrompt(Prompt(f"{kind}/1", kind, ""), ids) for kind, ids in texts_by_category.items()
    ]
    return Sweep([plain, spec], [questions] * 2, settings)


def test_every_cell_is_measured_and_every_text_compared(tiny: Tiny) -> None:
    seen = []
    sweep = make_sweep(tiny(), SETTINGS)
    sweep.report = lambda *report: seen.append(report)
    sweep.run()
    assert len(sweep.samples) == 2 * 2 * 2 * 2  # configurations, prompts, temperatures, repetitions
    assert sweep.differences == [] and sweep.compared >= 16 * 1
    rows = make_rows(sweep.samples, sweep.plans)
    expected = itertools.product(("code", "edit", "all"), (0.0, 0.9), ("plain", "ngram"))
    assert [(r["category"], r["temperature"], r["method"]) for r in rows] == list(expected)
    assert all(row["tokens_per_second"]["median"] > 0 and row["repetitions"] == 2 for row in rows)
    spec = rows[-1]
    assert sum(spec["drafted_per_position"]) > 0
    # a round commits its accepted drafts and one token more, but for what the end cuts off
    assert (
        spec["acceptance_length"] <= 1 + sum(spec["accepted_per_position"]) / spec["rounds"] + 1e-9
    )
    assert seen[0] == ("warming up", 1, 2) and seen[-1] == ("measuring", 16, 16)
    turns = [sample.config for sample in sweep.samples]
    assert turns == [0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1], (
        "they take turns in being first"
    )


@pytest.mark.parametrize("load", [Load(), Load(3)])
def test_prompts_of_the_same_tokens_are_drawn_apart(tiny: Tiny, load: Load) -> None:
    """Each has a seed of its own, so each is compared with its own plain text."""
    sweep = make_sweep(
        tiny(), replace(SETTINGS, temperatures=(0.9,), loads=(load,)), same_prompts=True
    )
    sweep.run()
    assert sweep.differences == [] and sweep.compared


@pytest.mark.parametrize("same_prompts", [False, True])
def test_a_verifier_that_lets_drafts_through_is_seen(
    tiny: Tiny, monkeypatch: Patch, same_prompts: bool
) -> None:
    verify(first_is_free)(monkeypatch)  # in torch's form
    sweep = make_sweep(tiny(), SETTINGS, same_prompts=same_prompts, kernels="torch")
    sweep.run()
    assert sweep.differences and all(difference["config"] == 1 for difference in sweep.differences)
    first = sweep.differences[0]
    assert first["expected"] != first["found"] and first["position"] >= 1


def test_imposed_acceptance_is_labelled_and_not_compared(tiny: Tiny) -> None:
    sweep = make_sweep(tiny(), replace(SETTINGS, repetitions=1), synthetic_acceptance=2.0)
    sweep.run()
    assert sweep.differences == []
    rows = make_rows(sweep.samples, sweep.plans)
    assert {row["method"]: row["acceptance"] for row in rows} == {
        "plain": "natural",
        "ngram": "imposed",
    }


def test_prompts_and_lengths_that_are_far_too_long_are_not_encoded(
    tiny: Tiny, monkeypatch: Patch
) -> None:
    """Nor are long prompts that may be cut, or the texts that fill up a short one."""
    sizes = list[int]()
    encode = Tokenizer._encode_text

    def watched(self: Tokenizer, text: str, special: bool) -> Any:
        sizes.append(len(text))
        return encode(self, text, special)

    monkeypatch.setattr(Tokenizer, "_encode_text", watched)
    folder = tiny("qwen3")
    long = Prompt("a/1", "a", "word " * 200_000)
    short = Prompt("a/2", "a", "hi")
    for lengths, error in (([None], IncompatibleError), ([10**12], UsageError)):
        with pytest.raises(error, match="context"):
            encode_prompts(folder, [long, short], lengths, 4)
    cut, filled = encode_prompts(folder, [long, short], [40], 4)
    assert len(cut.ids) == len(filled.ids) == 40
    assert sum(sizes) < 500_000


def test_a_text_is_held_against_plain_decoding_on_as_many_ranks(tiny: Tiny) -> None:
    """Sums are made in another order on more ranks: only speculation must change nothing."""
    folder = tiny("qwen3")
    configs = [
        EngineConfig(model=folder, spec="off"),
        EngineConfig(model=folder, spec="off", tp=2),
        EngineConfig(model=folder, tp=2),
    ]
    question = EncodedPrompt(Prompt("a", "code", ""), (1, 2, 3))
    sweep = Sweep(configs, [[question]] * 3, Settings())
    request = question.request("r", 0, temperature=0.0, max_tokens=8)
    lines = [
        Timeline(token_ids=ids, request=request, arrived=0.0) for ids in ([5, 6], [5, 7], [5, 8])
    ]
    ran = {i: Pass([line], [], 1.0) for i, line in enumerate(lines)}
    sweep._compare_texts(Workload(category="code", temperature=0.0), [0], ran)
    assert [(difference["config"], difference["expected"]) for difference in sweep.differences] == [
        (2, 7)
    ]


@pytest.mark.parametrize(
    ("ids", "reason", "parted"),
    [([5, 7], "", (1, 6, 7)), ([5], "", (1, 6, "")), ([5, 6], "stop", (2, "length", "stop"))],
)
def test_texts_part_at_a_token_or_an_end(
    ids: list[int], reason: str, parted: tuple[Any, ...]
) -> None:
    """Texts of the same tokens differ in the reason of their end."""
    shared: dict[str, Any] = {"request": requests(1)[0], "arrived": 0.0}
    plain = Pass([Timeline([5, 6], finish_reason="length", **shared)], [], 1.0)
    candidate = Pass([Timeline(ids, finish_reason=reason, **shared)], [], 1.0)
    ((difference,),) = compare_texts(["q"], plain, candidate)[1:]
    assert (difference["position"], difference["expected"], difference["found"]) == parted
    assert compare_texts(["q"], plain, plain) == (2, [])


Pair = tuple[EngineConfig, EngineConfig]
IDS = random_prompts(3, 20, 256) + random_prompts(1, 75, 256, seed=1)
QUESTIONS = [EncodedPrompt(Prompt(f"q/{i}", "q", ""), ids) for i, ids in enumerate(IDS)]


@pytest.fixture(scope="module")
def pair(tiny: Tiny) -> Pair:
    """Return plain decoding, and a draft model that is often right, at fixed k."""
    target, draft = (
        tiny("qwen3", layers=n, residual_gain=DampedLayers(full_layers=2), seed=3) for n in (4, 2)
    )
    plain = EngineConfig(model=target, threads=1, dtype="float32", ctx=256, spec="off")
    return plain, replace(plain, spec="draft", draft_model=draft, draft_max=3, adaptive=False)


def demo_requests(count: int = 24, least: int = 0) -> list[tuple[str, Request]]:
    return make_requests(QUESTIONS, (0.0, 0.9), max_tokens=count, ignore_eos=True, min_tokens=least)


def test_drafting_replays_equal_plain_ones(pair: Pair) -> None:
    result = replay_requests(pair[0], replace(pair[1], lag=2, slots=3), demo_requests())
    assert result.differences == [] and result.tokens == 8 * 24 and result.speculated > 20


def test_speculation_keeps_the_demos_text_past_a_tie() -> None:
    """The two best tokens tie at position 261, where any other rounding would show."""
    prompts = [prompt for prompt in read_prompts() if prompt.name == "creative/3"]
    questions = encode_prompts(demo_folder(), prompts, [None], 215)
    plain = EngineConfig(model=demo_folder(), threads=1, dtype="bfloat16", ctx=320, spec="off")
    spec = replace(plain, spec="draft", draft_max=4, adaptive=False)
    requests = make_requests(questions, (0.0,), max_tokens=215, ignore_eos=True, min_tokens=0)
    result = replay_requests(plain, spec, requests)
    assert result.tokens == 215 and result.differences == []


@pytest.mark.covers(count=1)
@pytest.mark.parametrize(
    "plant", [verify(first_is_free), kv_one_off], ids=["first-is-free", "kv-one-off"]
)
def test_a_planted_fault_changes_tokens(pair: Pair, monkeypatch: Patch, plant: Any) -> None:
    plant(monkeypatch)  # in torch's form
    plain, drafting = (replace(config, kernels="torch") for config in pair)
    result = replay_requests(plain, drafting, demo_requests())
    assert result.differences
    first = result.differences[0]
    assert first["expected"] != first["found"]
