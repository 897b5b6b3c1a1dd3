"""Hybrids go on from checkpoints: a hit is a miss, bit for bit and draft for draft, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from spd.errors import ResourceError
from spd.kernels.native.build import obstacle
from spd.runtime import Engine, Event, Request, SamplingParams
from spd.runtime.engine import scheduler
from spd.runtime.engine.page_table import Checkpoints
from spd.runtime.plan import memory
from spd.runtime.plan import plan as plans
from spd.runtime.plan.memory import checkpoint_bytes
from spd.runtime.proposers.head import HeadProposer
from spd.runtime.round.kv_cache import KvCache, StateStore
from spd.runtime.round.model_runner import ModelRunner
from tests.helpers import Run, assert_same, make_engine, next_turn, random_prompts, run_all, run_requests
from tests.page_checks import check_pages
from tests.pairs import Pairs
from tests.runtime.test_runtime_hybrid import FORMS, NATIVE_FIRST, needs_native

LENGTHS = (2, 65, 128, 150)
"""Of prompts: checkpoints at their ends stand in and at the ends of pages, and behind chunks."""
COMPILED = "native" if obstacle() is None else "torch"
"""The quickest form that there is here."""
Spans = tuple[tuple[str, int], ...]


def engine_of(pairs: Pairs, form: str, method: str, **wishes: Any) -> Engine:
    pair = pairs.get(f"hybrid/{method}")
    return make_engine(pair.model, **{"ctx": 512, **FORMS[form], **pair.speculation, **wishes})


def sharing(pairs: Pairs, form: str, method: str, **wishes: Any) -> list[Engine]:
    """An engine that shares prefixes, and one that does not."""
    return [engine_of(pairs, form, method, prefix_sharing=each, **wishes) for each in (True, False)]


def same(found: list[Run], fresh: list[Run]) -> None:
    assert_same(found, fresh)
    assert [run.drafts for run in found] == [run.drafts for run in fresh]
    assert all(run.metrics.cached_tokens == 0 for run in fresh)


def poison(engine: Engine) -> None:
    """Leave no numbers in any slot of an idle engine: nothing of a former owner may be read."""
    proposer = engine._device.proposer
    for runner in (engine._device.runner, *getattr(proposer, "runners", ())):
        for layer, paged in zip(runner.cache.layers, runner.cache.paged, strict=True):
            for pool in () if paged else layer.pools:
                pool.fill_(float("nan"))


def hits(pairs: Pairs, form: str, method: str, temperature: float, *lengths: int, **wishes: Any) -> None:
    """Prompts again, gone on with, as a next turn and as an earlier one: hits are misses."""
    made, plain = sharing(pairs, form, method, **wishes), SamplingParams(max_tokens=9, ignore_eos=True)
    for length in lengths:
        prompt = random_prompts(1, length, 256, seed=length)[0]
        params = replace(plain, temperature=temperature, seed=length, logprobs=0)
        found, fresh = ([run_all(engine, [prompt], [params])[0]] for engine in made)
        again, longer = Request("x", prompt, params), (("prompt", length), ("prompt", 3))
        turn = next_turn(prompt, found[0].tokens, params, (7, 8))
        for request in (again, turn, again, Request("x", (*prompt, 3, 4, 5), params, longer)):
            for engine, runs in zip(made, (found, fresh), strict=True):
                poison(engine)
                runs += run_requests(engine, [request])
        same(found, fresh)
        cached = [0, length - 1, length + 8, length - 1, length - 1]
        assert [run.metrics.cached_tokens for run in found] == cached
        check_pages(made[0]._scheduler)


@pytest.mark.parametrize("method", ["ngram", "mtp", "draft", "mtp+ngram"])
@pytest.mark.parametrize("form", NATIVE_FIRST)
def test_a_hit_is_a_miss(pairs: Pairs, form: str, method: str) -> None:
    if (form, method) == ("native", "mtp"):
        hits(pairs, form, method, 0.0, *LENGTHS, lag=2, draft_max=4)
    few = LENGTHS[1:3] if form == "native" else LENGTHS[1:2]
    hits(pairs, form, method, 1.0, *few, lag=1, draft_max=3)


@pytest.mark.parametrize(
    ("form", "method", "lag"),
    [
        *(pytest.param("native", *case, marks=needs_native) for case in (("mtp", 1), ("draft", 2))),
        pytest.param("torch", "ngram", 0, marks=pytest.mark.slow),
    ],
)
def test_a_chat_writes_what_is_new_and_no_more(pairs: Pairs, form: str, method: str, lag: int) -> None:
    """Ten turns that end by an id or at a limit, in memory that does not grow."""
    engine, unshared = sharing(pairs, form, method, lag=lag, draft_max=3)
    count = 10 if form == "native" else 4
    stops = SamplingParams(max_tokens=14, ignore_eos=True, stop_token_ids=tuple(range(0, 320, 20)))
    ids, runs, held = random_prompts(1, 70, 256, seed=3)[0], list[Run](), [0]
    spans: Spans = (("prompt", 70),)
    for turn in range(count):
        request = Request(f"t{turn}", ids, replace(stops, temperature=1.0, seed=turn), spans)
        runs += run_requests(engine, [request])
        reply, more = runs[-1].tokens, random_prompts(1, 5 + turn, 256, seed=50 + turn)[0]
        held.append(len(ids) + len(reply) - 1)
        ids = (*ids, *reply, *more)
        spans = (*spans, ("generated", len(reply)), ("prompt", len(more)))
    same(runs[-1:], run_requests(unshared, [request]))
    assert {run.finish_reason for run in runs} == {"stop", "length"} or count < 10
    assert [run.metrics.cached_tokens for run in runs] == held[:-1]
    store, plan = engine._device.states, engine.plan
    assert 1 < len(store.places) <= plan.shape.checkpoints
    for place in store.places.values():
        assert sum(copy.nbytes for copy in place) == checkpoint_bytes(plan.shape)
    assert plan.need.checkpoints == plan.shape.checkpoints * checkpoint_bytes(plan.shape)
    assert plan.as_dict()["checkpoint_bytes"] == plan.need.checkpoints and plan.shares_prefixes


def test_the_least_recently_used_gives_way(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "CHECKPOINTS", 3)
    engine, params = engine_of(pairs, "torch", "off"), SamplingParams(max_tokens=1, ignore_eos=True)
    store, where = engine._device.states, set[int]()
    assert engine.plan.shape.checkpoints == 5  # two a slot; and each text keeps two, one of them of its reply
    a, b, c, d = random_prompts(4, 30, 256, seed=8)
    cached = []
    for prompt in (a, b, a, c, a, d, a, b):
        cached.append(run_all(engine, [prompt], [params])[0].metrics.cached_tokens)
        where |= {place[0].data_ptr() for place in store.places.values()}
    assert cached == [0, 0, 29, 0, 29, 0, 29, 0] and len(where) == 5, "and memory stays as it is"


def test_memory_too_small_for_checkpoints(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHARE_OF_CHECKPOINTS", 2**50)
    engine = engine_of(pairs, "torch", "off")
    assert engine.plan.shape.checkpoints == 0 and not engine.plan.shares_prefixes
    prompt, params = random_prompts(1, 70, 256), [SamplingParams(max_tokens=2)]
    assert [run_all(engine, prompt, params)[0].metrics.cached_tokens for _ in range(2)] == [0, 0]


TEXT, USERS = random_prompts(1, 300, 256, seed=6)[0], random_prompts(3, 90, 256, seed=7)
SYSTEM_AND_USER = (("prompt", 100), ("prompt", 10))
STANDS: dict[str, tuple[list[tuple[int, ...]], Spans, list[int]]] = {
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
        *((), [0, *range(129, 185, 4), 128]),
    ),
}


@pytest.mark.parametrize("name", STANDS)
def test_where_checkpoints_stand(pairs: Pairs, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "a long prompt's way":
        monkeypatch.setattr(scheduler, "INTERVAL", 128)
    prompts, spans, cached = STANDS[name]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine, fresh = sharing(pairs, "torch", "off")
    runs = [run_requests(engine, [Request("x", prompt, params, spans)])[0] for prompt in prompts]
    assert [run.metrics.cached_tokens for run in runs] == cached
    assert runs[-1].output == run_all(fresh, prompts[-1:], [params])[0].output
    assert engine.plan.shape.checkpoints < 15


def test_a_recurrent_draft_model_goes_on_where_its_target_keeps_no_states(pairs: Pairs) -> None:
    wishes = {**FORMS[COMPILED], **pairs.get("hybrid/draft").speculation, "draft_max": 3}
    made = [make_engine(pairs.get("off").model, **wishes, prefix_sharing=each) for each in (True, False)]
    system, users = random_prompts(1, 20, 256, seed=6)[0], random_prompts(3, 15, 256, seed=7)
    params = SamplingParams(temperature=1.0, max_tokens=9, seed=3, ignore_eos=True, logprobs=0)
    asked = [Request("x", (*system, *user), params, (("prompt", 20), ("prompt", 15))) for user in users]
    found, fresh = ([run_requests(engine, [one])[0] for one in asked] for engine in made)
    same(found, fresh)
    assert [run.metrics.cached_tokens for run in found] == [0, 20, 20]


@pytest.mark.parametrize(
    ("form", "method"),
    [
        *(pytest.param("native", method, marks=needs_native) for method in ("mtp", "draft")),
        pytest.param("torch", "off", marks=pytest.mark.slow),
    ],
)
def test_preempted_texts_go_on(pairs: Pairs, form: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, plain = [random_prompts(1, n, 256, seed=n)[0] for n in (100, 90, 64)], SamplingParams(logprobs=0)
    params = [replace(plain, temperature=0.8, max_tokens=70, seed=i, ignore_eos=True) for i in range(3)]
    wishes: dict[str, Any] = {"ctx": 256, "draft_max": 3 if method != "off" else None}
    alone = engine_of(pairs, form, method, prefix_sharing=False, **wishes)
    fresh = [run_all(alone, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    starts, load = list[int](), StateStore.load
    monkeypatch.setattr(StateStore, "load", lambda *given: starts.append(given[3]) or load(*given))
    engine = engine_of(pairs, form, method, slots=3, lag=2 * (method == "mtp"), cache_pages=5, **wishes)
    runs = run_all(engine, prompts, params)
    assert_same(runs, fresh)
    assert sum(run.metrics.preemptions for run in runs) == len(starts) > 0
    assert all(start > 60 for start in starts)
    check_pages(engine._scheduler)


@pytest.mark.covers(1)
@pytest.mark.parametrize("ended", ["string", "abort"])
@pytest.mark.parametrize("lag", [0, 2])
def test_what_the_host_cuts_is_written_again_at_most(pairs: Pairs, lag: int, ended: str) -> None:
    """Behind a cut nothing is kept; the prompt's own checkpoint is."""
    prompt = random_prompts(1, 70, 256, seed=5)[0]
    for method in ("mtp", "draft"):
        made = sharing(pairs, COMPILED, method, lag=lag, draft_max=4, slots=2)
        params = SamplingParams(temperature=1.0, max_tokens=60, seed=1, ignore_eos=True)
        whole = run_all(made[1], [prompt], [params])[0]
        for cut in (11, 14):
            if ended == "string":
                stop = (whole.text[cut : cut + 2],)
                run_all(made[0], [prompt], [replace(params, stop=stop)])
                reply = whole.tokens[: cut + 2]
            else:
                made[0].add(Request("gone", prompt, params))
                got = list[int]()
                while len(got) < cut:
                    got += [token for event in made[0].step() for token in event.token_ids]
                made[0].abort("gone")
                made[0].step()
                assert got == whole.tokens[: len(got)]
                reply = got
            turn = next_turn(prompt, reply, replace(params, max_tokens=9, logprobs=0), (7, 8))
            found, fresh = (run_requests(engine, [turn])[0] for engine in made)
            same([found], [fresh])
            assert found.metrics.cached_tokens >= len(prompt) - 1
            if ended == "abort" and lag == 0:
                assert found.metrics.cached_tokens == 70 + len(reply) - 1


def test_a_copy_that_broke_off_is_never_found(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's, or the one of the whole text; a request ends once."""
    prompt, params = random_prompts(1, 80, 256), SamplingParams(max_tokens=3, ignore_eos=True)
    save = StateStore.save
    for most, told in ((0, ["error"]), (79, [None, None, "error"])):
        engine, events = engine_of(pairs, "torch", "off"), list[Event]()

        def broken(self: StateStore, *given: int, most: int = most) -> None:
            if given[2] > most:
                raise MemoryError("no memory")
            save(self, *given)

        engine.add(Request("x", prompt[0], params))
        with monkeypatch.context() as patch:
            patch.setattr(StateStore, "save", broken)
            with pytest.raises(ResourceError):
                while engine.has_work:
                    events += engine.step()
        while engine.has_work:
            events += engine.step()
        assert [event.finish_reason for event in events] == told
        check_pages(engine._scheduler)
        runs = [run_all(engine, prompt, [params])[0] for _ in range(2)]
        assert [run.metrics.cached_tokens for run in runs] == [0, 79] and runs[0].output == runs[1].output


def without(patch: pytest.MonkeyPatch, dropped: Callable[[torch.Tensor], bool]) -> None:
    """Some of what a checkpoint holds is not in it."""
    parts = KvCache.parts
    patch.setattr(KvCache, "parts", lambda *given: (p for p in parts(*given) if not dropped(p)))


def one_token_off(self: Checkpoints, text: Any, end: int, keep: Any = Checkpoints.keep) -> Any:
    """Kept under the position before: a token is applied twice."""
    return keep(self, text, end - 1 if end % 64 > 1 else end)


def never_settled(runner: ModelRunner, slot: int, end: int) -> None:
    """The rows that a last round accepted are not in the state that is kept."""
    runner.cache.applied[slot].fill_(end)


FAULTS = {
    "a former owner's states": lambda patch: patch.setattr(StateStore, "load", lambda *given: None),
    "never settled": lambda patch: patch.setattr(ModelRunner, "settle", never_settled),
    "no states": lambda patch: without(patch, lambda part: part.dim() == 3 and part.shape[0] == 6),
    "no inputs of convolutions": lambda patch: without(patch, lambda part: part.dim() == 1),
    "no captured states": lambda patch: patch.setattr(HeadProposer, "page_parts", lambda *given: []),
    "one token off": lambda patch: patch.setattr(Checkpoints, "keep", one_token_off),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(pairs: Pairs, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError)):
        hits(pairs, COMPILED, "mtp", 1.0, *LENGTHS[::2], draft_max=3, lag=1)
