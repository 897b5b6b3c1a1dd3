"""Snapshots of hybrids: a hit equals a miss, bit for bit and draft for draft, at every position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from spd.errors import ResourceError
from spd.kernels.native.build import unavailable_reason
from spd.runtime import Engine, Event, Request, SamplingParams
from spd.runtime.engine import scheduler
from spd.runtime.plan import memory_fit
from spd.runtime.plan import plan as plans
from spd.runtime.plan.memory import snapshot_nbytes
from spd.runtime.round.snapshot_store import SnapshotStore
from tests.helpers import (
    Run,
    assert_same_runs,
    get_local_queue,
    make_engine,
    make_next_turn,
    random_prompts,
    run_all,
    run_requests,
)
from tests.page_checks import check_pages
from tests.pairs import Pairs
from tests.runtime.test_runtime_hybrid import FORMS, NATIVE_FIRST, needs_native

LENGTHS = (2, 65, 128, 150)
"""Lengths of prompts, whose ends are within pages, at the ends of pages, and after chunks."""
FASTEST_FORM = "native" if unavailable_reason() is None else "torch"
"""The fastest kernels here."""
Spans = tuple[tuple[str, int], ...]


def make_pair_engine(pairs: Pairs, form: str, method: str, **options: Any) -> Engine:
    pair = pairs.get(f"hybrid/{method}")
    return make_engine(
        pair.model, **{"ctx": 512, **FORMS[form], **pair.speculation_options, **options}
    )


def make_sharing_pair(pairs: Pairs, form: str, method: str, **options: Any) -> list[Engine]:
    """Return an engine that shares prefixes, and one that does not."""
    return [
        make_pair_engine(pairs, form, method, prefix_sharing=shares, **options)
        for shares in (True, False)
    ]


def assert_equal_to_misses(runs: list[Run], fresh_runs: list[Run]) -> None:
    """Assert that runs with prefix hits equal runs without, drafts included."""
    assert_same_runs(runs, fresh_runs)
    assert [run.drafts for run in runs] == [run.drafts for run in fresh_runs]
    assert all(run.metrics.cached_tokens == 0 for run in fresh_runs)


def poison(engine: Engine) -> None:
    """Fill the states of an idle engine with NaN: no value of a former request may be read."""
    proposer = get_local_queue(engine).proposer
    for runner in (engine.round_queue.runner, *getattr(proposer, "runners", ())):
        for layer, paged in zip(runner.cache.layers, runner.cache.paged, strict=True):
            for pool in () if paged else layer.pools:
                pool.fill_(float("nan"))


def check_hits(
    pairs: Pairs,
    form: str,
    method: str,
    temperature: float,
    lengths: Sequence[int],
    **options: Any,
) -> None:
    """Assert that hits equal misses for a prompt again, continued, and as a part of next turns."""
    engines = make_sharing_pair(pairs, form, method, **options)
    plain = SamplingParams(max_tokens=9, ignore_eos=True)
    for length in lengths:
        prompt = random_prompts(1, length, 256, seed=length)[0]
        params = replace(plain, temperature=temperature, seed=length, logprobs=0)
        shared_runs, fresh_runs = ([run_all(engine, [prompt], [params])[0]] for engine in engines)
        repeated = Request("x", prompt, params)
        longer = (("prompt", length), ("prompt", 3))
        next_turn = make_next_turn(prompt, shared_runs[0].tokens, params, (7, 8))
        for request in (
            repeated,
            next_turn,
            repeated,
            Request("x", (*prompt, 3, 4, 5), params, longer),
        ):
            for engine, runs in zip(engines, (shared_runs, fresh_runs), strict=True):
                poison(engine)
                runs += run_requests(engine, [request])
        assert_equal_to_misses(shared_runs, fresh_runs)
        cached = [0, length - 1, length + 8, length - 1, length - 1]
        assert [run.metrics.cached_tokens for run in shared_runs] == cached
        check_pages(engines[0].scheduler)


@pytest.mark.covers(1, count=2)
@pytest.mark.parametrize("method", ["ngram", "mtp", "draft", "mtp+ngram"])
@pytest.mark.parametrize("form", NATIVE_FIRST)
def test_a_prefix_hit_equals_a_miss(pairs: Pairs, form: str, method: str) -> None:
    if (form, method) == ("native", "mtp"):
        check_hits(
            pairs=pairs,
            form=form,
            method=method,
            temperature=0.0,
            lengths=LENGTHS,
            lag=2,
            draft_max=4,
        )
    lengths = LENGTHS[:3] if form == "native" else LENGTHS[1:2]
    check_hits(
        pairs=pairs, form=form, method=method, temperature=1.0, lengths=lengths, lag=1, draft_max=3
    )


@pytest.mark.parametrize(
    ("form", "method", "lag"),
    [
        pytest.param("native", "mtp", 1, marks=needs_native),
        pytest.param("native", "draft", 2, marks=needs_native),
        pytest.param("torch", "ngram", 0, marks=pytest.mark.slow),
    ],
)
def test_a_chat_prefills_only_new_tokens(pairs: Pairs, form: str, method: str, lag: int) -> None:
    """Ten turns, which end at a stop id or at a limit, take constant memory."""
    engine, unshared = make_sharing_pair(pairs, form, method, lag=lag, draft_max=3)
    count = 10 if form == "native" else 4
    stops = SamplingParams(max_tokens=14, ignore_eos=True, stop_token_ids=tuple(range(0, 320, 20)))
    ids = random_prompts(1, 70, 256, seed=3)[0]
    runs = list[Run]()
    expected_cached = [0]
    spans: Spans = (("prompt", 70),)
    for turn in range(count):
        request = Request(f"t{turn}", ids, replace(stops, temperature=1.0, seed=turn), spans)
        runs += run_requests(engine, [request])
        reply = runs[-1].tokens
        user_message = random_prompts(1, 5 + turn, 256, seed=50 + turn)[0]
        expected_cached.append(len(ids) + len(reply) - 1)
        ids = (*ids, *reply, *user_message)
        spans = (*spans, ("generated", len(reply)), ("prompt", len(user_message)))
    assert_equal_to_misses(runs[-1:], run_requests(unshared, [request]))
    assert {run.finish_reason for run in runs} == {"stop", "length"} or count < 10
    assert [run.metrics.cached_tokens for run in runs] == expected_cached[:-1]
    store = get_local_queue(engine).snapshots
    plan = engine.plan
    assert 1 < len(store.places) <= plan.shape.num_snapshots
    for place in store.places.values():
        assert sum(copy.nbytes for copy in place) == snapshot_nbytes(plan.shape)
    assert plan.need.checkpoints == plan.shape.num_snapshots * snapshot_nbytes(plan.shape)
    assert plan.as_dict()["checkpoint_bytes"] == plan.need.checkpoints and plan.shares_prefixes


def test_the_least_recently_used_snapshot_is_evicted(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "EXTRA_SNAPSHOTS", 3)
    engine = make_pair_engine(pairs, "torch", "off")
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    store = get_local_queue(engine).snapshots
    where = set[int]()
    assert (
        engine.plan.shape.num_snapshots == 5
    )  # two a slot; and each text keeps two, one of them of its reply
    a, b, c, d = random_prompts(4, 30, 256, seed=8)
    cached = []
    for prompt in (a, b, a, c, a, d, a, b):
        cached.append(run_all(engine, [prompt], [params])[0].metrics.cached_tokens)
        where |= {place[0].data_ptr() for place in store.places.values()}
    assert cached == [0, 0, 29, 0, 29, 0, 29, 0] and len(where) == 5, "and memory stays as it is"


def test_without_memory_for_snapshots_no_prefix_is_shared(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_fit, "SNAPSHOT_MEMORY_DIVISOR", 2**50)
    engine = make_pair_engine(pairs, "torch", "off")
    assert engine.plan.shape.num_snapshots == 0 and not engine.plan.shares_prefixes
    prompt = random_prompts(1, 70, 256)
    params = [SamplingParams(max_tokens=2)]
    assert [run_all(engine, prompt, params)[0].metrics.cached_tokens for _ in range(2)] == [0, 0]


TEXT = random_prompts(1, 300, 256, seed=6)[0]
USERS = random_prompts(3, 90, 256, seed=7)
SYSTEM_AND_USER = (("prompt", 100), ("prompt", 10))
SNAPSHOT_CASES: dict[str, tuple[list[tuple[int, ...]], Spans, list[int]]] = {
    # Prompts one after another, the spans of each, and how many of its tokens are found.
    "a span's end": ([(*TEXT[:100], *user[:10]) for user in USERS], SYSTEM_AND_USER, [0, 100, 100]),
    # The second finds pages and no state; the third goes on where these pages end.
    "pages that none followed": ([(*TEXT[:140], *user) for user in USERS], (), [0, 0, 128]),
    # As a conversation over HTTP does: its reply is a part of the next prompt.
    "the last whole chunk": ([TEXT[:end] for end in (140, 210, 300)], (), [0, 128, 192]),
    "a long prompt's way": ([TEXT, (*TEXT[:200], 1, 2, 3)], (), [0, 128]),
    # More than there are checkpoints end in one chunk; the next chunk's has only its beginning.
    "what a longer one goes on from": (
        [TEXT[:end] for end in (*range(130, 190, 4), 200)],
        (),
        [0, *range(129, 185, 4), 128],
    ),
}


@pytest.mark.covers(count=3)
@pytest.mark.parametrize("name", SNAPSHOT_CASES)
def test_snapshots_are_taken_where_texts_part(
    pairs: Pairs, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "a long prompt's way":
        monkeypatch.setattr(scheduler, "SNAPSHOT_INTERVAL", 128)
    prompts, spans, cached = SNAPSHOT_CASES[name]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine, fresh = make_sharing_pair(pairs, "torch", "off")
    runs = [run_requests(engine, [Request("x", prompt, params, spans)])[0] for prompt in prompts]
    assert [run.metrics.cached_tokens for run in runs] == cached
    assert runs[-1].output == run_all(fresh, prompts[-1:], [params])[0].output
    assert engine.plan.shape.num_snapshots < 15


def test_a_recurrent_draft_model_continues_where_its_target_has_no_states(pairs: Pairs) -> None:
    options = {
        **FORMS[FASTEST_FORM],
        **pairs.get("hybrid/draft").speculation_options,
        "draft_max": 3,
    }
    engines = [
        make_engine(pairs.get("off").model, **options, prefix_sharing=shares)
        for shares in (True, False)
    ]
    system = random_prompts(1, 20, 256, seed=6)[0]
    users = random_prompts(3, 15, 256, seed=7)
    params = SamplingParams(temperature=1.0, max_tokens=9, seed=3, ignore_eos=True, logprobs=0)
    requests = [
        Request("x", (*system, *user), params, (("prompt", 20), ("prompt", 15))) for user in users
    ]
    shared_runs, fresh_runs = (
        [run_requests(engine, [request])[0] for request in requests] for engine in engines
    )
    assert_equal_to_misses(shared_runs, fresh_runs)
    assert [run.metrics.cached_tokens for run in shared_runs] == [0, 20, 20]


@pytest.mark.parametrize(
    ("form", "method"),
    [
        *(pytest.param("native", method, marks=needs_native) for method in ("mtp", "draft")),
        pytest.param("torch", "off", marks=pytest.mark.slow),
    ],
)
def test_preempted_texts_continue_from_snapshots(
    pairs: Pairs, form: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompts(1, n, 256, seed=n)[0] for n in (100, 90, 64)]
    plain = SamplingParams(logprobs=0)
    params = [
        replace(plain, temperature=0.8, max_tokens=70, seed=i, ignore_eos=True) for i in range(3)
    ]
    options: dict[str, Any] = {"ctx": 256, "draft_max": 3 if method != "off" else None}
    alone = make_pair_engine(pairs, form, method, prefix_sharing=False, **options)
    fresh = [run_all(alone, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    starts = list[int]()
    load = SnapshotStore.load

    def record_start(self: SnapshotStore, place: int, slot: int, end: int, page: int) -> None:
        starts.append(end)
        load(self, place, slot, end, page)

    monkeypatch.setattr(SnapshotStore, "load", record_start)
    engine = make_pair_engine(
        pairs, form, method, slots=3, lag=2 * (method == "mtp"), cache_pages=5, **options
    )
    runs = run_all(engine, prompts, params)
    assert_same_runs(runs, fresh)
    assert sum(run.metrics.preemptions for run in runs) == len(starts) > 0
    assert all(start > 60 for start in starts)
    check_pages(engine.scheduler)


@pytest.mark.covers(1)
@pytest.mark.parametrize("ended", ["string", "abort"])
@pytest.mark.parametrize("lag", [0, 2])
def test_tokens_that_the_host_cuts_are_not_cached(pairs: Pairs, lag: int, ended: str) -> None:
    """After a cut no tokens are cached; the prompt's snapshot is."""
    prompt = random_prompts(1, 70, 256, seed=5)[0]
    for method in ("mtp", "draft"):
        engines = make_sharing_pair(pairs, FASTEST_FORM, method, lag=lag, draft_max=4, slots=2)
        params = SamplingParams(temperature=1.0, max_tokens=60, seed=1, ignore_eos=True)
        full_run = run_all(engines[1], [prompt], [params])[0]
        for cut in (11, 14):
            if ended == "string":
                stop = (full_run.text[cut : cut + 2],)
                run_all(engines[0], [prompt], [replace(params, stop=stop)])
                reply = full_run.tokens[: cut + 2]
            else:
                engines[0].add(Request("gone", prompt, params))
                received = list[int]()
                while len(received) < cut:
                    received += [token for event in engines[0].step() for token in event.token_ids]
                engines[0].abort("gone")
                engines[0].step()
                assert received == full_run.tokens[: len(received)]
                reply = received
            turn = make_next_turn(prompt, reply, replace(params, max_tokens=9, logprobs=0), (7, 8))
            run, fresh_run = (run_requests(engine, [turn])[0] for engine in engines)
            assert_equal_to_misses([run], [fresh_run])
            assert run.metrics.cached_tokens >= len(prompt) - 1
            if ended == "abort" and lag == 0:
                assert run.metrics.cached_tokens == 70 + len(reply) - 1


def test_a_copy_that_broke_off_is_never_found(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's copy, or the one of the full text; a request ends once."""
    prompt = random_prompts(1, 80, 256)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    save = SnapshotStore.save
    for limit, expected_reasons in ((0, ["error"]), (79, [None, None, "error"])):
        engine = make_pair_engine(pairs, "torch", "off")
        events = list[Event]()

        def broken(
            self: SnapshotStore, place: int, slot: int, end: int, page: int, limit: int = limit
        ) -> None:
            if end > limit:
                raise MemoryError("no memory")
            save(self, place, slot, end, page)

        engine.add(Request("x", prompt[0], params))
        with monkeypatch.context() as patch:
            patch.setattr(SnapshotStore, "save", broken)
            with pytest.raises(ResourceError):
                while engine.has_work:
                    events += engine.step()
        while engine.has_work:
            events += engine.step()
        assert [event.finish_reason for event in events] == expected_reasons
        check_pages(engine.scheduler)
        runs = [run_all(engine, prompt, [params])[0] for _ in range(2)]
        assert [run.metrics.cached_tokens for run in runs] == [0, 79] and runs[0].output == runs[
            1
        ].output
