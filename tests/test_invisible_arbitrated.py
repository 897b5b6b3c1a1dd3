"""Lookup beside a model changes no text, and the model drafts as well after what it did not draft itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spd.runtime import SamplingParams
from spd.runtime.proposers.arbitrated import ArbitratedProposer
from spd.runtime.round.round_queue import RoundQueue
from tests.helpers import Run, next_turn, random_prompts, run_all, run_one, run_requests
from tests.pairs import COPYING, LENGTHS, Pairs
from tests.prompt_lookup import match_length
from tests.test_invisible import PROMPTS, VOCAB, outputs

K = 3
"""What a model drafts at most."""
FEW = tuple((token, 40.0) for token in (3, 50, 99, 120))
"""A bias under which text is of a few tokens, so that it is full of matches, right ones and wrong ones."""


def work_of(count: int, temperatures: tuple[float, ...] = (0.0, 0.5, 1.3)) -> list[Any]:
    """Prompts, and parameters whose text repeats itself and goes on."""
    return [
        (prompt, SamplingParams(temperature=t, max_tokens=count, seed=9 + i, logit_bias=FEW, ignore_eos=True))
        for i, prompt in enumerate(PROMPTS[1:6:2])
        for t in temperatures
    ]


def told(runs: list[Run]) -> list[list[tuple[list[int], int, int]]]:
    """(drafts, match, accepted) of every round."""
    return [[(r.draft, r.match, r.accepted) for r in run.rounds] for run in runs]


def who_drafted(runs: list[Run]) -> tuple[int, int]:
    """Rounds of which a model's drafts were accepted, and a match's."""
    rounds = [record for run in runs for record in run.rounds if record.accepted]
    return sum(not r.match for r in rounds), sum(r.match > 0 for r in rounds)


@pytest.mark.parametrize(
    ("name", "k"),
    [("draft", 3), ("one", 1), ("one", 4), ("three", 3), ("eagle", 1), ("eagle", 2), ("eagle", 4)],
)
def test_tokens_do_not_depend_on_temperature_lag_or_k(pairs: Pairs, name: str, k: int) -> None:
    """Nor on who drafted how much; at one k the same drafts come at every lag."""
    pair, work = pairs.get(f"{name}+ngram"), work_of(24)
    plain = outputs(pair.plain(), work)
    reference: list[Run] = []
    for lag in (0, 1, 2):
        runs = outputs(pair.engine(k, lag=lag), work)
        assert [run.output for run in runs] == [run.output for run in plain]
        reference = reference or runs
        assert told(runs) == told(reference)
        assert [run.output for run in outputs(pair.changing(lag=lag), work)] == [run.output for run in plain]
    assert min(who_drafted(reference)) > 5


def test_a_batch_equals_each_alone_and_pages_run_short(pairs: Pairs) -> None:
    work = [
        (
            prompt,
            SamplingParams(temperature=0.8 * (i % 2), max_tokens=60 + 7 * i, seed=i, logit_bias=FEW),
        )
        for i, prompt in enumerate(random_prompts(6, 60, VOCAB, seed=4))
    ]
    gave_way = 0
    for name in ("draft", "three", "eagle"):
        pair = pairs.get(f"{name}+ngram")
        alone = [run_one(pair.model, prompt, params).output for prompt, params in work]
        for pages in (None, 5, 6, 7):
            engine = pair.changing(slots=4, lag=2 if pages else 1, cache_pages=pages)
            assert [run.output for run in outputs(engine, work)] == alone
            gave_way += engine._scheduler.preemptions
    assert gave_way, "the test saw nothing"


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("changes", [False, True])
def test_a_model_that_is_always_right_stays_so(pairs: Pairs, changes: bool, lag: int) -> None:
    """Its cache holds the text, and not what it would have drafted itself where lookup did.

    Several together, so that slots differ in who drafted and how much was accepted.
    """
    prompts = random_prompts(5, 40, VOCAB, seed=8)
    params = [
        SamplingParams(temperature=(0.0, 0.9)[i % 2], max_tokens=60, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    pair, wishes = pairs.get("self+ngram"), {"slots": 3, "lag": lag, "ngram_min": 1}
    engine = pair.changing(**wishes) if changes else pair.engine(K, **wishes)
    rounds = [record for run in run_all(engine, prompts, params) for record in run.rounds if record.draft]
    wrong = [record for record in rounds if record.accepted < len(record.draft)]
    assert sum(not record.match for record in rounds) > 20
    assert len(wrong) > 20 and all(record.match for record in wrong)


@pytest.mark.parametrize("name", ["draft", "one", "three", "eagle"])
def test_drafts_after_any_rounds_are_those_of_a_fresh_start(pairs: Pairs, name: str) -> None:
    """A next turn that finds the pages drafts as one that writes them anew: nothing in them is stale."""
    pair, prompt = pairs.get(f"{name}+ngram"), random_prompts(1, 30, VOCAB, seed=5)[0]
    for lengths in (LENGTHS, (COPYING,), (K, COPYING, COPYING, COPYING)):
        for count in (33, 40):
            engine = pair.changing(lengths)
            params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.5, logit_bias=FEW)
            reply = run_all(engine, [prompt], [params])[0].tokens
            turn = next_turn(prompt, reply, SamplingParams(max_tokens=30, ignore_eos=True))
            engine._draft_length.choose = lambda: K  # type: ignore[method-assign]
            found = run_requests(engine, [turn])
            fresh = run_requests(pair.changing((K,), prefix_sharing=False), [turn])
            assert found[0].metrics.cached_tokens == len(prompt) + count - 1
            assert told(found) == told(fresh)


def test_rounds_without_drafts_tell_of_matches(pairs: Pairs) -> None:
    """At every lag the same ones, which are the lengths of the real matches at the round's first token."""
    told_of: list[list[int]] = []
    for lag in (0, 2):
        engine = pairs.get("one+ngram").changing((0,), lag=lag)
        outcomes: list[tuple[Any, ...]] = []
        note = outcomes.append
        engine._draft_length.observe = lambda *outcome, note=note: note(outcome)  # type: ignore[method-assign]
        prompt, params = PROMPTS[0], SamplingParams(max_tokens=40, temperature=0.5, seed=3, logit_bias=FEW)
        (run,) = run_all(engine, [prompt], [params])
        text, seen = [*prompt, *run.tokens], [outcome[-1] for outcome in outcomes]
        sizes = [match_length(text[: record.position], 8) for record in run.rounds]
        assert seen == [size if size >= 2 else 0 for size in sizes[1:]]
        told_of.append(seen)
    assert told_of[0] == told_of[1] and 3 < sum(size > 0 for size in told_of[0]) < len(told_of[0])


def test_the_cache_is_brought_up_before_too_much_is_missing(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long lookup drafts alone: what is missing stays within the rings of states."""
    from spd.runtime.round.limits import CATCH_UP

    asked: list[int] = []
    real = ArbitratedProposer.catch_up

    def watched(self: ArbitratedProposer, tokens: int, views: Any) -> None:
        asked.append(tokens)
        real(self, tokens, views)

    monkeypatch.setattr(ArbitratedProposer, "catch_up", watched)
    behind: list[int] = []
    launch = RoundQueue.launch

    def counted(self: RoundQueue, k: int, *rest: Any) -> Any:
        ticket = launch(self, k, *rest)
        behind.append(self.behind)
        return ticket

    monkeypatch.setattr(RoundQueue, "launch", counted)
    engine = pairs.get("one+ngram").changing((COPYING,) * 9 + (0,) * 40 + (K,))
    run_all(engine, PROMPTS[:1], [SamplingParams(max_tokens=120, ignore_eos=True)])
    assert len(asked) > 6 and max(asked) <= CATCH_UP and max(behind) <= CATCH_UP
    assert {1 + COPYING + 1, CATCH_UP} <= set(asked), asked


def test_what_a_match_drafts_was_drawn_from_nothing(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that test a draft's probability find certainty there, and the model's own law elsewhere."""
    seen = {True: 0, False: 0}
    real = ArbitratedProposer.draft

    def checked(self: ArbitratedProposer, k: int, *rest: Any) -> None:
        laws, state = self.sampler.draft_laws, self.lookup.state
        assert laws is not None
        before = laws.clone()
        real(self, k, *rest)
        for slot in range(state.slots):
            if not state.active[slot]:
                assert torch.equal(laws[slot], before[slot])
                continue
            law, drafts = laws[slot, :k], state.draft[slot, :k]
            found = bool(state.match[slot])
            seen[found] += 1
            assert law.sum(-1) == pytest.approx([1.0] * k, abs=1e-4)
            assert (law.gather(-1, drafts[:, None]) == 1).all() == found

    monkeypatch.setattr(ArbitratedProposer, "draft", checked)
    prompts = random_prompts(4, 24, VOCAB, seed=2)
    params = [
        SamplingParams(temperature=1.1, max_tokens=12 + 9 * i, seed=i, logit_bias=FEW) for i in range(4)
    ]
    run_all(pairs.get("draft+ngram").engine(K, slots=3, verify="rejection", adaptive=None), prompts, params)
    assert min(seen.values()) > 3, seen


def test_rules_that_test_drafts_by_their_probability(pairs: Pairs) -> None:
    """A greedy text is the plain one, a request the same in any company; a match's drafts are certain."""
    pair = pairs.get("draft+ngram")
    prompts = random_prompts(4, 24, VOCAB, seed=2)
    greedy = [SamplingParams(max_tokens=20, ignore_eos=True, logit_bias=FEW)] * 4
    drawn = [
        SamplingParams(temperature=0.9, max_tokens=16 + 5 * i, seed=40 + i, logit_bias=FEW) for i in range(4)
    ]
    plain = [run.output for run in run_all(pair.plain(), prompts, greedy)]
    for rule in ("rejection", "block"):
        how: dict[str, Any] = {"verify": rule, "adaptive": None}
        assert [run.output for run in run_all(pair.engine(K, **how), prompts, greedy)] == plain
        alone = [run_all(pair.engine(K, **how), [p], [q])[0] for p, q in zip(prompts, drawn, strict=True)]
        together = run_all(pair.engine(K, slots=4, lag=2, **how), prompts, drawn)
        assert [run.output for run in together] == [run.output for run in alone]
        assert told(together) == told(alone)
        assert min(who_drafted(alone)) > 0
