"""While text is copied lookup drafts alone, more at a time than a model; and what that is held against."""

from __future__ import annotations

from typing import Any

import pytest

from spd.formats.demo import demo_folder
from spd.runtime import Engine, EngineConfig, SamplingParams
from spd.runtime.engine.draft_length import WARM_UP_ROUNDS, Acceptance, DraftLength
from spd.runtime.plan.config import LONG_MATCH, NGRAM_MIN
from spd.runtime.plan.plan import EnginePlan, make_plan
from tests.helpers import make_engine, random_prompts, run_all

K, COPYING = 3, 8


def play(
    length: DraftLength,
    copied: list[bool],
    present: list[tuple[Acceptance, int]],
    draft_seconds: float = 0.004,
    row_seconds: float = 0.0001,
    rate: float = 0.6,
) -> list[int]:
    """The k of each round; in those that copy, lookup drafts and is right, elsewhere it finds nothing."""
    length.attend(present)
    chosen = []
    for copies in copied:
        k = length.choose()
        chosen.append(k)
        forwards = k if k <= length.maximum else 0
        length.observe_cost(k, 0.010 + row_seconds * k, draft_seconds * forwards, forwards)
        for own, _ in present:
            if copies:
                length.observe(k, k, k, own, 7)
            elif k > length.maximum:
                length.observe(k, 0, 0, own)
            else:
                length.observe(k, k, round(rate * k), own)
    return chosen


def test_lookup_drafts_alone_while_text_is_copied() -> None:
    length = DraftLength(K, True, copying=COPYING)
    chosen = play(length, [False] * 40 + [True] * 20 + [False] * 20, [(Acceptance(), COPYING)])
    assert COPYING not in chosen[:41] and COPYING not in chosen[62:]
    assert chosen[41:61].count(COPYING) > 15, "but for the rounds that time another k"
    assert chosen[61] in (COPYING, *range(K + 1))


def test_what_lookup_gives_says_nothing_of_the_model() -> None:
    own = Acceptance()
    length = DraftLength(K, True, copying=COPYING)
    play(length, [False] * 60, [(own, COPYING)])
    before = length.rate, own.accepted, own.tried
    for _ in range(30):
        length.observe_cost(COPYING, 0.011, 0.0, 0)
        length.observe(COPYING, COPYING, COPYING, own, 7)
    assert (length.rate, own.accepted, own.tried) == before
    length.observe(COPYING, 0, 0, own)
    assert (length.rate, own.accepted, own.tried) == before and not own.copies


def test_disappointment_ends_it() -> None:
    """Where copies break off at once, hoping for them is given up."""
    length, own = DraftLength(K, True, copying=COPYING), Acceptance()
    play(length, [False] * 40, [(own, COPYING)])
    chosen = []
    for _ in range(60):
        own.copies = True
        k = length.choose()
        chosen.append(k)
        length.observe_cost(k, 0.010 + 0.0001 * k, 0.004 * min(k, K) * (k <= K), k if k <= K else 0)
        length.observe(k, k, 0 if k > K else 1, own, 6 if k > K else 0)
    assert COPYING in chosen[:10] and COPYING not in chosen[-20:]


def test_where_no_model_pays_a_match_is_followed() -> None:
    """Plain rounds tell of matches, so that no slot drafts to hear of one; right ones go on."""
    length, own = DraftLength(K, True, copying=COPYING), Acceptance()
    play(length, [False] * 60, [(own, COPYING)], draft_seconds=0.05, rate=0.3)
    length.times.trials.clear()
    assert length.choose() == 0
    for match, k in ((0, 0), (6, COPYING)):
        length.observe(0, 0, 0, own, match)
        length.times.trials.clear()
        assert own.copies == (match > 0) and length.choose() == k
    for accepted, trail in ((COPYING, True), (3, False)):
        length.observe(COPYING, COPYING, accepted, own, 6)
        assert own.copies == trail


def plan_of(**wishes: Any) -> EnginePlan:
    return make_plan(EngineConfig(**{"model": demo_folder(), "device": "cpu", **wishes}))


@pytest.mark.parametrize(
    ("wishes", "spec", "lengths"),
    [
        ({"spec": "mtp+ngram"}, "mtp+ngram", (3, 8)),
        ({"spec": "draft+ngram"}, "draft+ngram", (4, 8)),
        ({"spec": "eagle3+ngram"}, "eagle3+ngram", (4, 8)),
        ({"spec": "auto+ngram"}, "mtp+ngram", (3, 8)),
        ({"spec": "mtp+ngram", "draft_max": 2}, "mtp+ngram", (2, 2)),
        ({"spec": "mtp+ngram", "draft_max": 16}, "mtp+ngram", (3, 16)),
        ({"spec": "mtp+ngram", "draft_max": 16, "adaptive": False}, "mtp+ngram", (16, 16)),
        ({"spec": "mtp+ngram", "adaptive": False}, "mtp+ngram", (3, 3)),
        ({"spec": "mtp+ngram", "verify": "block"}, "mtp+ngram", (3, 3)),
        ({"spec": "mtp+ngram", "draft_max": 0}, "off", (0, 0)),
        ({"spec": "mtp"}, "mtp", (3, 3)),
        ({"spec": "ngram"}, "ngram", (8, 8)),
    ],
)
def test_how_many_each_drafts(wishes: dict[str, Any], spec: str, lengths: tuple[int, int]) -> None:
    plan = plan_of(**wishes)
    assert plan.spec == spec and (plan.shape.model_drafts, plan.shape.draft_max) == lengths
    assert plan.copying == (plan.shape.draft_max if lengths[0] < lengths[1] else 0)
    assert max(plan.draft_tiers) == lengths[0]


def test_the_shortest_match(tiny: Any) -> None:
    assert (
        plan_of(spec="ngram").ngram_min
        == plan_of(model=tiny("qwen3"), spec="auto+ngram").ngram_min
        == NGRAM_MIN
    )
    assert plan_of(spec="mtp+ngram").ngram_min == LONG_MATCH
    assert plan_of(spec="mtp+ngram", ngram_min=2).ngram_min == 2
    assert plan_of(spec="mtp+ngram", ngram_max=4).ngram_min == 4


def test_the_demo_copies() -> None:
    """A prompt full of one line: lookup drafts alone, and the text is the plain one."""
    prompt = random_prompts(1, 20, 900, seed=3)[0] * 4
    params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias=tuple((t, 12.0) for t in prompt[:3]))
    plain = run_all(make_engine(demo_folder(), ctx=512), [prompt], [params])[0]
    engine: Engine = make_engine(demo_folder(), ctx=512, spec="mtp+ngram", adaptive=True)
    assert engine._device.proposer.looks_up and engine._device.proposer.draws
    run = run_all(engine, [prompt], [params])[0]
    assert run.output == plain.output
    alone = [r for r in run.rounds if r.k > engine.plan.shape.model_drafts]
    assert run.rounds[0].k == 0 and len(run.rounds) > WARM_UP_ROUNDS
    assert alone and max(r.accepted for r in alone) > engine.plan.shape.model_drafts, [
        r.k for r in run.rounds
    ]
    assert all(
        r.draft_forwards == 0 for r, after in zip(run.rounds, run.rounds[1:], strict=False) if after.k > 3
    )
