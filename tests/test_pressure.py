"""Too few pages, and long prompts: preemption and interleaved prefill change no text."""

from pathlib import Path
from typing import Any

import pytest

from spd.errors import UsageError
from spd.runtime import Engine, Event, Request, SamplingParams
from spd.runtime.engine.scheduler import BUSY_PASSES
from spd.runtime.engine.sequence import Sequence
from tests.helpers import Tiny, assert_same_runs, make_fast_engine, random_prompts, run_all, run_one
from tests.page_checks import check_pages

VOCAB = 256
CTX = 320
PAGES = 6
PROMPTS = [random_prompts(1, n, VOCAB, seed=n)[0] for n in (70, 130, 9, 200, 64, 65, 30)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.2, "logprobs": 2},
    {"stop": ("e", "7"), "min_tokens": 40},
    {"temperature": 1.0, "top_p": 0.8},
    {"logit_bias": ((5, 4.0),)},
    {"min_tokens": 50, "stop_token_ids": tuple(range(0, 256, 16))},
]
PARAMS = [SamplingParams(max_tokens=64 + 9 * i, seed=i, **kind) for i, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Path:
    return tiny("qwen3", layers=2, seed=3)


@pytest.fixture(scope="module")
def alone(target: Path) -> list[Any]:
    return run_all(make_fast_engine(target, ctx=CTX, slots=1), PROMPTS, PARAMS)


def make_small_pool_engine(target: Path, method: str, **options: Any) -> Engine:
    methods: dict[str, dict[str, Any]] = {
        "ngram": {"ngram_min": 1},
        "draft": {"draft_model": target},
        "off": {},
    }
    return make_fast_engine(
        target, ctx=CTX, spec=method, draft_max=3 * (method != "off"), **methods[method], **options
    )


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize(("method", "lag"), [("off", 1), ("ngram", 0), ("draft", 2)])
def test_preempted_texts_are_unchanged(
    target: Path, alone: list[Any], method: str, lag: int, sharing: bool
) -> None:
    engine = make_small_pool_engine(
        target, method, slots=5, lag=lag, cache_pages=PAGES, prefix_sharing=sharing
    )
    runs = run_all(engine, PROMPTS, PARAMS)
    assert_same_runs(runs, alone)
    preemptions = [run.metrics.preemptions for run in runs]
    assert sum(preemptions) >= 2 and preemptions[0] == 0, preemptions
    for run in runs:  # what was written again is not counted again
        assert run.metrics.rounds == len(run.rounds) == sum(run.metrics.acceptance_histogram)
        m = run.metrics
        ended_by_draft = run.finish_reason == "stop" and run.drafted[-1]
        assert m.completion_tokens == m.rounds + m.draft_n_accepted - ended_by_draft
    if method == "draft":  # the drafter's cache came back too: it is the target, and always right
        plain = [runs[i].metrics for i in (2, 5) if preemptions[i]]  # nothing but noise and a bias
        assert plain and all(m.draft_n_accepted == m.draft_n > 0 for m in plain)
    check_pages(engine.scheduler)
    assert engine.page_table.num_available == PAGES


@pytest.mark.parametrize("lag", [0, 2])
def test_long_prompts_do_not_stall_what_decodes(target: Path, lag: int) -> None:
    """Few prefill passes run between two rounds: every step emits a token of the other requests."""
    engine = make_small_pool_engine(target, "off", slots=3, lag=lag, kernels="torch")
    engine.add(Request("a", PROMPTS[2], SamplingParams(max_tokens=40)))
    steps: list[list[Event]] = [engine.step() for _ in range(4)]
    engine.add(Request("long", PROMPTS[3], SamplingParams(max_tokens=4)))
    engine.add(Request("next", PROMPTS[1], SamplingParams(max_tokens=4)))
    passes = []
    while engine.has_work:
        prefilling = engine.scheduler.prefilling
        before = prefilling.prefilled if prefilling else 0
        steps.append(engine.step())
        passes += (
            [prefilling.prefilled - before] if prefilling and prefilling.prefilled > before else []
        )
    emitting = [[event.request_id for event in events if event.token_ids] for events in steps]
    steps_of_a = [i for i, names in enumerate(emitting) if "a" in names]
    assert len(steps_of_a) >= 40 - lag, steps_of_a
    assert steps_of_a == list(range(steps_of_a[0], steps_of_a[-1] + 1)), "a waited for a prompt"
    first = {
        name: next(i for i, names in enumerate(emitting) if name in names)
        for name in ("long", "next")
    }
    assert first["long"] < first["next"], "first come, first served"
    assert passes and max(passes) <= engine.plan.shape.chunk


@pytest.mark.parametrize(("arriving", "limit"), [(1, 1), (2, BUSY_PASSES), (6, BUSY_PASSES)])
def test_prefill_passes_between_two_rounds_are_limited(
    target: Path, arriving: int, limit: int
) -> None:
    """One pass while at least as many sequences decode as wait; else a few."""
    engine = make_small_pool_engine(target, "off", slots=7, lag=0, kernels="torch")
    prompt = random_prompts(1, 300, 256, seed=9)[0]  # five passes and more
    engine.add(Request("a", prompt[:20], SamplingParams(max_tokens=60)))
    engine.step()
    for i in range(arriving):
        engine.add(Request(f"{i}", prompt[i:], SamplingParams(max_tokens=4, ignore_eos=True)))
    original = engine.write_prompt_part
    passes: list[int] = []

    def counted(sequence: Sequence) -> int:
        rows = original(sequence)
        passes.append(rows)
        return rows

    engine.write_prompt_part = counted  # type: ignore[method-assign]
    counts = []
    for _ in range(3):
        joining = engine.scheduler.more_could_join
        passes.clear()
        engine.step()
        counts.append((joining, len(passes)))
    assert counts[0] == (arriving > 1, limit)
    assert all(1 <= count <= (limit if joining else 1) for joining, count in counts), counts


def test_requests_choose_how_many_drafts(target: Path) -> None:
    """0 to k drafts for each, in one batch: never more than requested, and the text is the same."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    alone = run_one(target, PROMPTS[0], params, kernels="auto")
    engine = make_small_pool_engine(target, "draft", slots=5, lag=1)
    draft_counts: dict[str, list[int]] = {}
    engine.trace = lambda record: draft_counts.setdefault(record.request, []).append(
        len(record.draft)
    )
    caps = [0, 1, 2, 3, None]
    done = engine.generate([Request(f"{cap}", PROMPTS[0], params, draft_max=cap) for cap in caps])
    assert [list(completion.token_ids) for completion in done] == [alone.tokens] * 5
    assert {name: max(counts) for name, counts in draft_counts.items()} == {
        "0": 0,
        "1": 1,
        "2": 2,
        "3": 3,
        "None": 3,
    }
    assert done[0].metrics.draft_n == 0
    assert all(
        completion.metrics.draft_n_accepted == completion.metrics.draft_n for completion in done
    )


def test_a_pool_too_small_for_one_request_is_refused(target: Path) -> None:
    with pytest.raises(
        UsageError, match="4 cache pages hold 256 positions, but the context is 320"
    ):
        make_fast_engine(target, ctx=CTX, cache_pages=4)
