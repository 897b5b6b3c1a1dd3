"""What a drafter's cache holds while some slots wait for their masks: the text, with any drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.engine.request import GrammarText
from spd.runtime.proposers.arbitrated import ArbitratedProposer
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.round.kv_cache import KvCache
from spd.runtime.round.round_queue import RoundQueue
from spd.runtime.round.rows import SlotView
from tests.helpers import next_turn, random_prompts, run_requests
from tests.pairs import COPYING, Pair, Pairs, damped
from tests.test_invisible import VOCAB

BOUND = GrammarText("regex", "(abcdef){30,60}!")
LOOSE = GrammarText("regex", "([a-f]{2}xyz){10,60}!")


def engine_of(pair: Pair, lengths: Sequence[int], lag: int, **wishes: Any) -> Engine:
    """Three slots, of which those with a grammar sit out rounds; drafts are as many as the lengths say."""
    most = {} if pair.speculation["spec"].endswith("+ngram") else {"draft_max": 3}
    return pair.changing(lengths, **{**most, "slots": 3, "lag": lag, **wishes})


def requests(grammar: GrammarText) -> list[Request]:
    """Two with the grammar, and one without."""
    return [
        Request(
            str(i),
            prompt,
            SamplingParams(max_tokens=70 + 10 * i, seed=i, temperature=0.5 * (i % 2), ignore_eos=True),
            grammar=grammar if i < 2 else None,
        )
        for i, prompt in enumerate(random_prompts(3, 30, VOCAB, seed=8))
    ]


def entries(cache: KvCache, view: SlotView, count: int) -> torch.Tensor:
    """The first positions of a slot, of all layers: [count, all numbers]."""
    places = torch.tensor([view.pages[i // cache.page_size] * cache.page_size for i in range(count)])
    places += torch.arange(count) % cache.page_size
    pools = [pool for layer in cache.layers for pool in layer.pools]
    return torch.cat([pool.flatten(0, 1)[places].flatten(1) for pool in pools], 1)


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize(
    ("spec", "lengths"),
    [("draft", (0, 3)), ("draft+ngram", (COPYING, 3, 3)), ("draft+ngram", (COPYING, COPYING, 1, 3))],
)
def test_a_draft_model_that_is_the_target_has_its_cache(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, spec: str, lengths: tuple[int, ...], lag: int
) -> None:
    """After every round that it drafted for, of every slot that took part, up to the last token but one."""
    target = tiny("qwen3", layers=2, residual_gain=damped, seed=3)
    compared, launch = [0], RoundQueue.launch

    def checked(
        self: RoundQueue, k: int, views: Sequence[SlotView], needs: Any, top: Any, next_k: int
    ) -> Any:
        ticket = launch(self, k, views, needs, top, next_k)
        proposer = self.round.proposer
        assert proposer is not None
        model = proposer.model if isinstance(proposer, ArbitratedProposer) else proposer
        assert isinstance(model, DraftModelProposer)
        for slot, view in enumerate(views) if 0 < next_k <= proposer.most_drafts else ():
            count = int(self.state.length[slot]) - 1
            if view.bound and self.state.occupied[slot]:
                caches = model.runners[0].cache, self.round.runner.cache
                own, theirs = (entries(cache, view, count) for cache in caches)
                torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)
                compared[0] += 1
        return ticket

    monkeypatch.setattr(RoundQueue, "launch", checked)
    pair = Pair(target, {"spec": spec, "draft_model": target, "ngram_min": 2})
    run_requests(engine_of(pair, lengths, lag, **({"ngram_min": 1} if "+" in spec else {})), requests(BOUND))
    assert compared[0] > 15


@pytest.mark.parametrize(
    ("name", "lengths"), [("three", (0, 3)), ("three+ngram", (COPYING, 3)), ("eagle+ngram", (COPYING, 3))]
)
def test_a_next_turn_drafts_as_a_fresh_start_does(pairs: Pairs, name: str, lengths: tuple[int, ...]) -> None:
    """Heads: their entries of a slot that waited were made of the target's states too."""
    pair = pairs.get(name)
    engine, asked = engine_of(pair, lengths, 1), requests(LOOSE)
    compared = 0
    for request, run in zip(asked, run_requests(engine, asked), strict=True):
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        turn = next_turn(request.prompt_ids, run.tokens, params)
        engine._draft_length.choose = lambda: 3  # type: ignore[method-assign]
        (found,), (fresh,) = (
            run_requests(one, [turn]) for one in (engine, engine_of(pair, (3,), 1, prefix_sharing=False))
        )
        assert found.metrics.cached_tokens > 90
        assert found.drafts == fresh.drafts and found.output == fresh.output
        compared += len(found.rounds)
    assert compared > 20
