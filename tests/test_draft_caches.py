"""Drafters' caches match the text after pauses, turns, matches, masks and preemptions."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from spd.runtime import Engine, Request, RoundRecord, SamplingParams
from spd.runtime.engine.request import GrammarSpec
from spd.runtime.proposers.base import ModelProposer
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.round.kv_cache import KvCache
from spd.runtime.round.limits import CATCH_UP_TOKENS
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampler import Sampler
from tests import helpers
from tests.helpers import (
    Patch,
    Tiny,
    assert_same_runs,
    collect_drafts,
    get_local_queue,
    make_next_turn,
    random_prompts,
    run_all,
    run_requests,
)
from tests.invisible_matrix import FEW_TOKENS_BIAS, PROMPTS, VOCAB
from tests.pairs import BLOCK_DRAFTERS, DRAFT_LENGTHS, LOOKUP_LENGTH, Pair, Pairs, damped_gain
from tests.prompt_lookup import match_length
from tests.runtime.block_reference import PlainBlock
from tests.runtime.eagle3_reference import PlainEagle3
from tests.runtime.test_runtime_mtp import compare_drafts
from tests.test_invisible import round_decisions, run_workload

K = 3  # Drafts of a model, at most.
SHARERS = (
    "off",
    "draft+ngram",
    "deepseek_v3/ngram",
    "three",
    "ngram",
    "draft",
    "eagle",
    "gemma2/ngram",
)
ASSISTED = "gemma4/assistant"
KEEPERS = (
    "self",
    *(
        f"{name}{suffix}"
        for name in ("draft", "one", "three", "eagle", "dflash")
        for suffix in ("", "+ngram")
    ),
)
Lengths = tuple[int, ...]
ROUNDS = 9  # Rounds without drafting; the second slot takes part in the last one only.


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


@pytest.mark.covers(count=3)
@pytest.mark.parametrize("name", [*SHARERS, "dflash", "one", "deepseek", "speculators", ASSISTED])
def test_a_prefix_hit_drafts_as_a_miss_does(pairs: Pairs, name: str) -> None:
    """Also where a prompt continues a reply: generated tokens are found as a generated span."""
    common = random_prompts(1, 150, VOCAB, seed=9)[0]
    pair = pairs.get(name)
    params = SamplingParams(temperature=0.8, max_tokens=12, seed=4, ignore_eos=True)
    prompts = [common, (*common, 1, 2, 3), common[:140], common[:129], common[:100] + (9,) * 60]
    engine, alone = (
        pair.make_engine(4, ctx=500, prefix_sharing=sharing) for sharing in (True, False)
    )
    shared, fresh = (
        [run_all(engine_, [p], [params])[0] for p in prompts] for engine_ in (engine, alone)
    )
    assert [run.metrics.cached_tokens for run in shared] == [0, 128, 128, 128, 64]
    assert all(run.metrics.cached_tokens == 0 for run in fresh)
    assert_same_runs(shared, fresh)
    assert_same_runs(shared[:1], run_all(pair.make_plain_engine(ctx=500), [common], [params]))
    assert collect_drafts(shared) == collect_drafts(fresh)
    engine = pair.make_engine(4, ctx=500)
    turn = make_next_turn(
        common, run_all(engine, [common], [replace(params, max_tokens=50)])[0].tokens, params
    )
    hit, miss = (run_requests(engine_, [turn])[0] for engine_ in (engine, alone))
    assert hit.output == miss.output and hit.drafts == miss.drafts
    assert hit.metrics.cached_tokens == 150 + 50 - 1


@pytest.mark.covers(1, count=6)
@pytest.mark.parametrize(
    "lengths", [(K,), (0,), DRAFT_LENGTHS, (LOOKUP_LENGTH,), (K, *[LOOKUP_LENGTH] * 3)], ids=str
)
@pytest.mark.parametrize("name", [*KEEPERS, ASSISTED, f"{ASSISTED}+ngram"])
def test_drafts_after_any_rounds_are_a_fresh_start_s(
    pairs: Pairs, name: str, lengths: Lengths
) -> None:
    """A next turn that reuses pages drafts as one that writes them anew: no entry is stale."""
    pair = pairs.get(name)
    prompt = random_prompts(1, 30, VOCAB, seed=5)[0]
    full_of_noise = random_prompts(1, 150, VOCAB, seed=7)
    for count in (33, 40):
        engine = pair.make_varying_engine(lengths)
        run_all(engine, full_of_noise, [greedy(4)])
        params = SamplingParams(
            max_tokens=count, ignore_eos=True, temperature=0.5, logit_bias=FEW_TOKENS_BIAS
        )
        turn = make_next_turn(prompt, run_all(engine, [prompt], [params])[0].tokens, greedy(16))
        engine.draft_length.choose_k = lambda: K  # type: ignore[method-assign]
        engine.draft_length.chained = 0
        continued = run_requests(engine, [turn])
        fresh = run_requests(pair.make_varying_engine((K,), prefix_sharing=False), [turn])
        assert continued[0].metrics.cached_tokens == len(prompt) + count - 1
        assert continued[0].output == fresh[0].output and round_decisions(
            continued
        ) == round_decisions(fresh)


def engine_of(pair: Pair, lengths: Sequence[int], lag: int, **options: Any) -> Engine:
    """Return an engine of three slots with these draft lengths.

    Slots with a grammar sit out rounds.
    """
    limit = {} if pair.speculation_options["spec"].endswith("+ngram") else {"draft_max": 3}
    return pair.make_varying_engine(lengths, **{**limit, "slots": 3, "lag": lag, **options})


def requests(regex: str) -> list[Request]:
    params = [replace(greedy(70 + 10 * i), seed=i, temperature=0.5 * (i % 2)) for i in range(3)]
    prompts = random_prompts(3, 30, VOCAB, seed=8)
    grammars = {
        "0": GrammarSpec("regex", regex),
        "1": GrammarSpec("regex", regex),
    }  # and the third has none
    return [
        Request(name, prompt, sampling, grammar=grammars.get(name))
        for name, prompt, sampling in zip("012", prompts, params, strict=True)
    ]


def entries(cache: KvCache, view: SlotView, count: int) -> torch.Tensor:
    """Return the cache entries of a slot's first positions, of all layers: [count, all numbers]."""
    kv_slots = torch.tensor(
        [view.pages[i // cache.page_size] * cache.page_size for i in range(count)]
    )
    kv_slots += torch.arange(count) % cache.page_size
    pools = [pool for layer in cache.layers for pool in layer.pools]
    return torch.cat([pool.flatten(0, 1)[kv_slots].flatten(1) for pool in pools], 1)


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize(
    ("spec", "lengths"),
    [
        ("draft", (0, 3)),
        ("draft+ngram", (LOOKUP_LENGTH, 3, 3)),
        ("draft+ngram", (LOOKUP_LENGTH, LOOKUP_LENGTH, 1, 3)),
    ],
)
def test_a_draft_model_that_is_the_target_has_its_cache(
    tiny: Tiny, monkeypatch: Patch, spec: str, lengths: Lengths, lag: int
) -> None:
    """After every round with model drafts, for every slot that took part, up to the last token but one."""
    target = tiny("qwen3", layers=2, residual_gain=damped_gain, seed=3)
    compared = [0]
    launch = LocalRoundQueue.launch

    def checked(self: LocalRoundQueue, k: int, views: Sequence[SlotView], *arguments: Any) -> Any:
        pending = launch(self, k, views, *arguments)
        next_k, chained = arguments[-2:]
        proposer = self.round.proposer
        assert isinstance(proposer, DraftModelProposer)
        has_drafted = chained or self.round.count_model_drafts(next_k)
        for slot, view in enumerate(views) if has_drafted else ():
            count = int(self.state.length[slot]) - 1
            if view.bound and self.state.occupied[slot]:
                caches = proposer.runners[0].cache, self.round.runner.cache
                draft_entries, target_entries = (entries(cache, view, count) for cache in caches)
                torch.testing.assert_close(draft_entries, target_entries, atol=1e-4, rtol=1e-4)
                compared[0] += 1
        return pending

    monkeypatch.setattr(LocalRoundQueue, "launch", checked)
    pair = Pair(target, {"spec": spec, "draft_model": target, "ngram_min": 2})
    options = {"kernels": "torch", **({"ngram_min": 1} if "+" in spec else {})}
    run_requests(engine_of(pair, lengths, lag, **options), requests("(abcdef){30,60}!"))
    assert compared[0] > 15


@pytest.mark.covers(count=2)
@pytest.mark.parametrize("name", ["three", "three+ngram", "eagle+ngram", "dflash+ngram"])
def test_a_next_turn_drafts_as_a_fresh_start_does(pairs: Pairs, name: str) -> None:
    """The heads' entries of a slot that sat out rounds are computed from the target's states, too."""
    pair = pairs.get(name)
    compared = 0
    engine = engine_of(pair, (LOOKUP_LENGTH if "+" in name else 0, 3), 1)
    batch = requests("([a-f]{2}xyz){10,60}!")
    for request, run in zip(batch, run_requests(engine, batch), strict=True):
        turn = make_next_turn(request.prompt_ids, run.tokens, greedy(30))
        engine.draft_length.choose_k = lambda: 3  # type: ignore[method-assign]
        fresh_engine = engine_of(pair, (3,), 1, prefix_sharing=False)
        (continued,), (fresh,) = (
            run_requests(engine_, [turn]) for engine_ in (engine, fresh_engine)
        )
        assert continued.metrics.cached_tokens > 90
        assert continued.drafts == fresh.drafts and continued.output == fresh.output
        compared += len(continued.rounds)
    assert compared > 20


def test_a_batch_equals_each_alone_and_pages_run_short(pairs: Pairs) -> None:
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), max_tokens=60 + 7 * i, seed=i, logit_bias=FEW_TOKENS_BIAS
        )
        for i in range(6)
    ]
    preemptions = 0
    work = list(zip(random_prompts(6, 60, VOCAB, seed=4), params, strict=True))
    for name, sizes in (("draft", (None, 6)), ("three", (5,)), ("eagle", (7,))):
        pair = pairs.get(f"{name}+ngram")
        alone = [
            run.output for run in run_workload(pair.make_plain_engine(prefix_sharing=False), work)
        ]
        for pages in sizes:
            engine = pair.make_varying_engine(slots=4, lag=2 if pages else 1, cache_pages=pages)
            together = run_workload(engine, work)
            assert [run.output for run in together] == alone
            preemptions += sum(run.metrics.preemptions for run in together)
    assert preemptions, "the test saw nothing"


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("changes", [False, True])
def test_a_model_that_is_always_right_stays_so(pairs: Pairs, changes: bool, lag: int) -> None:
    """Its cache has the text, and not its own drafts where lookup drafted."""
    prompts = random_prompts(5, 40, VOCAB, seed=8)
    params = [replace(greedy(60), temperature=0.9 * (i % 2), seed=i) for i in range(len(prompts))]
    pair = pairs.get("self+ngram")
    options: dict[str, Any] = {"slots": 3, "lag": lag, "ngram_min": 1}
    engine = pair.make_varying_engine(**options) if changes else pair.make_engine(K, **options)
    rounds = [
        record for run in run_all(engine, prompts, params) for record in run.rounds if record.draft
    ]
    wrong = [record for record in rounds if record.accepted < len(record.draft)]
    assert sum(not record.match for record in rounds) > 20
    assert len(wrong) > 20 and all(record.match for record in wrong)


def test_rounds_without_drafts_report_matches(pairs: Pairs) -> None:
    """At every lag these are the lengths of the real matches at the round's first token."""
    matches_by_lag: list[list[int]] = []
    for lag in (0, 2):
        engine = pairs.get("one+ngram").make_varying_engine((0,), lag=lag)
        matches = list[int]()

        def observe(*outcome: Any, matches: list[int] = matches) -> None:
            matches.append(outcome[-1])

        engine.draft_length.observe = observe  # type: ignore[method-assign, assignment]
        prompt = PROMPTS[0]
        params = SamplingParams(max_tokens=40, temperature=0.5, seed=3, logit_bias=FEW_TOKENS_BIAS)
        (run,) = run_all(engine, [prompt], [params])
        text = [*prompt, *run.tokens]
        sizes = [match_length(text[: record.position], 8) for record in run.rounds]
        assert matches == [size if size >= 2 else 0 for size in sizes[1:]]
        matches_by_lag.append(matches)
    assert matches_by_lag[0] == matches_by_lag[1] and 3 < sum(
        size > 0 for size in matches_by_lag[0]
    ) < len(matches_by_lag[0])


def test_the_cache_is_brought_up_before_too_much_is_missing(
    pairs: Pairs, monkeypatch: Patch
) -> None:
    """However long lookup drafts alone, the missing tokens fit into the rings of states."""
    catch_ups: list[int] = []
    missing: list[int] = []
    real = ModelProposer.catch_up
    launch = LocalRoundQueue.launch

    def watched(self: ModelProposer, tokens: int, views: Sequence[SlotView]) -> Any:
        catch_ups.append(tokens)
        return real(self, tokens, views)

    def counted(self: LocalRoundQueue, *arguments: Any) -> Any:
        pending = launch(self, *arguments)
        missing.append(self.missing_tokens)
        return pending

    monkeypatch.setattr(ModelProposer, "catch_up", watched)
    monkeypatch.setattr(LocalRoundQueue, "launch", counted)
    engine = pairs.get("one+ngram").make_engine(LOOKUP_LENGTH, adaptive=True)
    lengths = itertools.cycle((LOOKUP_LENGTH,) * 9 + (0,) * 40 + (K,))  # lookup drafts alone
    engine.draft_length.choose_k = lambda: next(lengths)  # type: ignore[method-assign]
    run_all(engine, PROMPTS[:1], [greedy(120)])
    assert (
        len(catch_ups) > 6 and max(catch_ups) <= CATCH_UP_TOKENS and max(missing) <= CATCH_UP_TOKENS
    )
    assert {1 + LOOKUP_LENGTH + 1, CATCH_UP_TOKENS} <= set(catch_ups), catch_ups


def test_drafts_of_a_match_are_certain(pairs: Pairs, monkeypatch: Patch) -> None:
    """Their distribution is certain, and that of the other drafts is the model's."""
    counts = {True: 0, False: 0}
    draft = ModelProposer.draft
    store_certain_distributions = Sampler.store_certain_distributions
    before = torch.empty(0)

    def watched(self: ModelProposer, k: int, *arguments: Any) -> None:
        nonlocal before
        assert self.sampler.draft_distributions is not None
        before = self.sampler.draft_distributions.clone()
        draft(self, k, *arguments)

    def checked(self: Sampler, k: int) -> None:
        store_certain_distributions(self, k)
        distributions = self.draft_distributions
        state = self.state
        assert distributions is not None
        for slot in range(state.slots):
            if not state.active[slot]:
                assert torch.equal(distributions[slot], before[slot])
                continue
            distribution = distributions[slot, :k]
            drafts = state.draft[slot, :k]
            is_match = bool(state.match[slot])
            counts[is_match] += 1
            assert distribution.sum(-1) == pytest.approx([1.0] * k, abs=1e-4)
            assert (distribution.gather(-1, drafts[:, None]) == 1).all() == is_match

    monkeypatch.setattr(ModelProposer, "draft", watched)
    monkeypatch.setattr(Sampler, "store_certain_distributions", checked)
    prompts = random_prompts(4, 24, VOCAB, seed=2)
    drawn = SamplingParams(temperature=1.1, logit_bias=FEW_TOKENS_BIAS)
    params = [replace(drawn, max_tokens=12 + 9 * i, seed=i) for i in range(4)]
    run_all(
        pairs.get("draft+ngram").make_engine(K, slots=3, verify="rejection", adaptive=None),
        prompts,
        params,
    )
    assert min(counts.values()) > 3, counts


def assert_the_reference_s(
    headed: Pair, prompts: list[tuple[int, ...]], runs: list[helpers.Run]
) -> None:
    assert headed.reference is not None
    limit = 4 + 12 // len(runs)
    num_wrong, num_compared, _ = compare_drafts(
        headed.reference(), list(zip(prompts, runs, strict=True)), limit
    )
    assert num_compared > 10 and num_wrong == 0


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.covers(count=1)
@pytest.mark.parametrize(
    "name", ["three", "dflash", *slow("eagle", "one", "speculators", ASSISTED)]
)
def test_drafts_after_rounds_without_any_are_right(pairs: Pairs, name: str) -> None:
    """With pauses shorter and longer than a catch-up, between rounds of every length."""
    headed = pairs.get(name)
    prompts = PROMPTS[1:5]
    params = [greedy(60)] * 4
    plain = run_all(headed.make_plain_engine(), prompts, params)
    for slots, lag in ((1, 0), (3, 2)):
        engine = headed.make_engine(4, adaptive=True, slots=slots, lag=lag)
        source = random.Random(slots)
        pauses = [
            [0] * n + [source.choice((1, 2, 3, 4)) for _ in range(2)]
            for n in (1, 3, 18, 5, 35, 2) * 9
        ]
        ks = iter([k for pause in pauses for k in pause])
        engine.draft_length.choose_k = lambda ks=ks: next(ks)  # type: ignore[method-assign, misc]
        runs = run_all(engine, prompts, params)
        assert_the_reference_s(headed, prompts, runs)
        assert_same_runs(runs, plain)


@pytest.mark.covers(count=3)
@pytest.mark.parametrize("name", ["one", "three", "eagle", "dflash", "speculators", ASSISTED])
def test_pages_given_away_in_a_pause_are_whole(pairs: Pairs, name: str) -> None:
    """A text that ends before the head has caught up leaves pages that a later prompt can draft from."""
    engine = pairs.get(name).make_engine(3, ctx=400, adaptive=True)
    engine.draft_length.choose_k = lambda: 0  # type: ignore[method-assign]
    first = run_all(engine, [PROMPTS[0]], [greedy(70)])[0]
    engine.draft_length.choose_k = lambda: 3  # type: ignore[method-assign]
    turn = make_next_turn(PROMPTS[0], first.tokens, greedy(70), message=())
    run = run_requests(engine, [turn])[0]
    assert run.metrics.cached_tokens == len(turn.prompt_ids) - 1
    assert_the_reference_s(pairs.get(name), [turn.prompt_ids], [run])


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("name", ["three", "dflash", *slow("eagle", ASSISTED)])
def test_interrupted_texts_draft_as_before(pairs: Pairs, name: str) -> None:
    prompts = [random_prompts(1, n, VOCAB, seed=n)[0] for n in (70, 130, 9, 200, 64, 30)]
    params = [greedy(50 + 9 * i) for i in range(6)]
    runs = run_all(
        pairs.get(name).make_engine(4, ctx=320, slots=5, lag=1, cache_pages=6), prompts, params
    )
    assert_same_runs(runs, run_all(pairs.get(name).make_plain_engine(ctx=320), prompts, params))
    assert sum(run.metrics.preemptions for run in runs) > 1
    assert_the_reference_s(pairs.get(name), prompts, runs)


@pytest.mark.covers(count=5)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["three", "eagle", *BLOCK_DRAFTERS])
def test_distributions_of_drafts_are_stored(pairs: Pairs, name: str, rule: str) -> None:
    """Each draft has a distribution over the target's ids, with 0 for ids that a head does not have."""
    pair = pairs.get(name)
    num_drafts = 0
    assert pair.reference is not None
    engine = pair.make_engine(3, verify=rule)
    plain: Any = pair.reference()
    queue = get_local_queue(engine)
    state = queue.state
    distributions = queue.sampler.draft_distributions
    head_ids = set(
        plain.draft_ids.tolist() if isinstance(plain, PlainEagle3 | PlainBlock) else range(320)
    )
    assert distributions is not None

    def look(record: RoundRecord) -> None:
        nonlocal num_drafts
        for draft, distribution in zip(
            state.draft[0, : state.num_drafts[0]].tolist(), distributions[0], strict=False
        ):
            assert distribution.sum() == pytest.approx(1, abs=1e-5) and distribution[draft] > 0
            possible = set(distribution.nonzero().flatten().tolist())
            few = plain.block["selector_top_k"] if name == "dflash2" else None
            assert possible <= head_ids and len(possible) > (few or len(head_ids)) // 2
            assert few is None or len(possible) <= few
            num_drafts += 1

    engine.trace = look
    list(engine.stream([Request("r", PROMPTS[1], replace(greedy(24), temperature=1.0, seed=2))]))
    metrics = engine.metrics("r")
    is_random = name in BLOCK_DRAFTERS
    assert num_drafts > 20 and metrics.draft_n_accepted < metrics.draft_n
    assert metrics.draft_n_accepted or is_random


@pytest.mark.parametrize(
    ("length", "passes"), [(65, 1), (70, 2)], ids=["a chunk", "a chunk and a tail"]
)
def test_catching_up_leaves_a_new_slots_prompt_alone(tiny: Tiny, length: int, passes: int) -> None:
    """Prefilled pages may be shared, and were written by another program."""
    model = tiny("qwen3", layers=2, seed=3)
    engine = helpers.make_engine(model, spec="draft", draft_model=model, draft_max=2, slots=2)
    engine.draft_length.choose_k = lambda: 0  # type: ignore[method-assign]
    old, new = (random_prompts(1, n, 256, seed=n)[0] for n in (20, length))
    for name, prompt, steps in (("old", old, ROUNDS - passes), ("new", new, passes)):
        engine.add(Request(name, prompt, greedy(40)))
        for _ in range(steps):
            engine.step()
    queue = get_local_queue(engine)
    proposer = queue.proposer
    sequence = engine.scheduler.slots[1]
    assert isinstance(proposer, DraftModelProposer) and sequence is not None
    assert queue.missing_tokens == ROUNDS and sequence.length == length + 1
    views = [SlotView(s.length, s.pages) for s in engine.scheduler.running()]
    for slot, first in ((0, len(old) - 1), (1, length - 1)):
        pages = list(views[slot].pages)
        pools = [pool for layer in proposer.runners[0].cache.layers for pool in layer.pools]
        for pool in pools:
            pool[pages] = 7.0
        proposer.catch_up(ROUNDS, views)
        for pool in pools:
            written = (pool[pages].flatten(0, 1) != 7.0).flatten(1).any(dim=1).nonzero().flatten()
            assert written.tolist() == list(range(first, views[slot].bound))
    engine.close()
