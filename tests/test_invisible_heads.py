"""MTP and EAGLE-3 heads change no text, and draft as well after a hit, a pause or an interruption as ever."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from spd.formats.demo import demo_folder
from spd.runtime import Engine, Request, RoundRecord, SamplingParams
from tests.helpers import Run, make_engine, random_prompts, run_all, run_requests
from tests.recipes.tiny_eagle3 import write_tiny_pair
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime.eagle3_reference import PlainEagle3
from tests.runtime.mtp_reference import PlainDrafter, PlainMtp
from tests.runtime.test_runtime_mtp import compared
from tests.test_invisible import PARAMETERS, PROMPTS, VOCAB, matrix_params, outputs

HEADS: dict[str, dict[str, Any]] = {
    "one": {"family": "deepseek"},
    "three": {"family": "mimo", "modules": 3, "hidden_share": 0.1},
    "deepseek": {"family": "deepseek", "variant": "deepseek_v3"},
    "eagle": {"aux": (1, 2, 3), "hidden_share": 0.3, "target_options": {"layers": 3}},
    "speculators": {
        "layout": "speculators",
        "aux": (0, 2),
        "hidden_share": 0.4,
        "target_options": {"layers": 2},
    }
    | {"norm_output": True, "fc_norm": True, "own_embedding": True},
}
EAGLES = ("eagle", "speculators")


@dataclass(frozen=True)
class Headed:
    """A target, and what asks for drafts by its head."""

    target: Path
    speculation: dict[str, Any]
    reference: Callable[[], PlainDrafter]

    def engine(self, k: int, **wishes: Any) -> Engine:
        """One that drafts k tokens a round, or as other wishes say."""
        return make_engine(self.target, **{**self.speculation, "draft_max": k, **wishes})

    def known(self) -> set[int]:
        """The ids that its head can draft."""
        plain = self.reference()
        return set(plain.said.tolist() if isinstance(plain, PlainEagle3) else range(320))


Heads = Callable[[str], Headed]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """Targets whose heads often agree with them."""
    shelf = tmp_path_factory.mktemp("agreeing")

    def get(name: str) -> Headed:
        folder, options = shelf / name, HEADS[name]
        if name in EAGLES:
            target, head = folder / "target", folder / "head"
            if not folder.exists():
                write_tiny_pair(target, head, kind="copy", **options)
            return Headed(target, {"spec": "eagle3", "draft_model": head}, lambda: PlainEagle3(target, head))
        if not folder.exists():
            write_tiny_mtp(folder, kind="copy", **options)
        return Headed(
            folder, {"spec": "mtp"}, lambda: PlainMtp(folder, options["family"], options.get("modules", 1))
        )

    return get


@pytest.mark.parametrize(
    ("name", "k"),
    [
        *(("one", 1), ("deepseek", 2), ("three", 3), ("one", 4)),
        *(("speculators", 1), ("eagle", 2), ("speculators", 3), ("eagle", 4)),
    ],
)
def test_tokens_do_not_depend_on_k_temperature_or_lag(heads: Heads, name: str, k: int) -> None:
    work, headed = matrix_params(16)[::4], heads(name)
    plain = outputs(make_engine(headed.target), work)
    reference: list[Run] = []
    for lag in (0, 1, 2):
        runs = outputs(headed.engine(k, lag=lag), work)
        assert [run.output for run in runs] == [run.output for run in plain]
        reference = reference or runs
        assert [run.drafts for run in runs] == [run.drafts for run in reference]
    accepted, drafted = (
        sum(getattr(run.metrics, counted) for run in reference) for counted in ("draft_n_accepted", "draft_n")
    )
    assert 0 < accepted < drafted
    if k > 1:
        assert max(record.accepted for run in reference for record in run.rounds) > 1


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_every_parameter(heads: Heads, name: str) -> None:
    headed = heads("one")
    work = [
        (prompt, SamplingParams(**{"max_tokens": 20, "seed": 5, **PARAMETERS[name]}))
        for prompt in PROMPTS[1:4:2]
    ]
    base = outputs(make_engine(headed.target), work)
    for lag in (0, 2):
        runs = outputs(headed.engine(3, lag=lag), work)
        assert [run.output for run in runs] == [run.output for run in base], lag
        assert [run.logprobs for run in runs] == [run.logprobs for run in base], lag
        assert sum(len(run.rounds) for run in runs) >= 3


SOME = ("top_p", "repetition", "bias", "stop_ids", "logprobs", "frequency")


@pytest.mark.parametrize(
    ("name", "lag", "kinds"),
    [
        ("three", 0, SOME),
        ("deepseek", 2, SOME),
        ("eagle", 2, sorted(PARAMETERS)),
        pytest.param("speculators", 0, sorted(PARAMETERS), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_of_different_requests_equals_each_alone(
    heads: Heads, name: str, lag: int, kinds: Sequence[str]
) -> None:
    work = [
        (
            PROMPTS[i % 6],
            SamplingParams(**{"max_tokens": 10 + 4 * (i % 6), "seed": i, **PARAMETERS[kind]}),
        )
        for i, kind in enumerate(kinds)
    ]
    alone = outputs(make_engine(heads(name).target), work)
    runs = outputs(heads(name).engine(3, slots=4, lag=lag), work)
    assert [run.output for run in runs] == [run.output for run in alone]
    assert [run.logprobs for run in runs] == [run.logprobs for run in alone]


@pytest.mark.parametrize(
    "name",
    [
        "three",
        "eagle",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("one", "deepseek", "speculators")),
    ],
)
def test_a_prefix_hit_drafts_as_a_miss_does(heads: Heads, name: str) -> None:
    common = random_prompts(1, 150, VOCAB, seed=9)[0]
    params = SamplingParams(temperature=0.8, max_tokens=30, seed=4, ignore_eos=True)
    prompts = [common, (*common, 1, 2, 3), common[:140], common[:129], common[:100] + (9,) * 60]
    engine = heads(name).engine(4, ctx=500)
    shared = [run_all(engine, [prompt], [params])[0] for prompt in prompts]
    alone = heads(name).engine(4, ctx=500, prefix_sharing=False)
    fresh = [run_all(alone, [prompt], [params])[0] for prompt in prompts]
    assert [run.metrics.cached_tokens for run in shared] == [0, 128, 128, 128, 64]
    assert [run.output for run in shared] == [run.output for run in fresh]
    assert [run.drafts for run in shared] == [run.drafts for run in fresh]
    # The reply goes on from the reply, whose last rounds wrote entries of the head that are found again.
    engine = heads(name).engine(4, ctx=500)
    reply = run_all(engine, [common], [replace(params, max_tokens=70)])[0].tokens
    longer, spans = (*common, *reply, 7, 8, 9), (("prompt", 150), ("generated", 70), ("prompt", 3))
    turn = Request("x", longer, params, spans)
    found, again = (run_requests(one, [turn])[0] for one in (engine, alone))
    assert found.drafts == again.drafts
    assert found.metrics.cached_tokens == 150 + 70 - 1


def assert_the_reference_s(headed: Headed, prompts: list[tuple[int, ...]], runs: list[Run]) -> None:
    """Every draft must be the reference's."""
    wrong, seen, _ = compared(headed.reference(), list(zip(prompts, runs, strict=True)))
    assert seen > 10 and wrong == 0


@pytest.mark.parametrize(
    "name",
    ["three", "eagle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one", "speculators"))],
)
def test_drafts_after_rounds_without_any_are_right(heads: Heads, name: str) -> None:
    """Pauses shorter and longer than a catch-up, between rounds of every length."""
    headed, prompts = heads(name), PROMPTS[1:5]
    greedy = [SamplingParams(max_tokens=60, ignore_eos=True)] * 4
    plain = run_all(make_engine(headed.target), prompts, greedy)
    for slots, lag in ((1, 0), (3, 2)):
        engine = headed.engine(4, adaptive=True, slots=slots, lag=lag)
        source = random.Random(slots)
        pauses = [[0] * n + [source.choice((1, 2, 3, 4)) for _ in range(2)] for n in (1, 3, 18, 5, 35, 2) * 9]
        ks = iter([k for pause in pauses for k in pause])
        engine._draft_length.choose = lambda ks=ks: next(ks)  # type: ignore[method-assign, misc]
        runs = run_all(engine, prompts, greedy)
        assert_the_reference_s(headed, prompts, runs)
        assert [run.tokens for run in runs] == [run.tokens for run in plain]


@pytest.mark.parametrize("name", ["one", "three", *EAGLES])
def test_pages_given_away_in_a_pause_are_whole(heads: Heads, name: str) -> None:
    """A text that ends while the head lags behind leaves what a later prompt can draft from."""
    engine = heads(name).engine(3, ctx=400, adaptive=True)
    engine._draft_length.choose = lambda: 0  # type: ignore[method-assign]
    greedy = SamplingParams(max_tokens=70, ignore_eos=True)
    first = run_all(engine, [PROMPTS[0]], [greedy])[0]
    engine._draft_length.choose = lambda: 3  # type: ignore[method-assign]
    longer = (*PROMPTS[0], *first.tokens)
    spans = (("prompt", len(PROMPTS[0])), ("generated", 70))
    run = run_requests(engine, [Request("x", longer, greedy, spans)])[0]
    assert run.metrics.cached_tokens == len(longer) - 1
    assert_the_reference_s(heads(name), [longer], [run])


@pytest.mark.parametrize("name", ["three", "eagle"])
def test_interrupted_texts_draft_as_before(heads: Heads, name: str) -> None:
    prompts = [random_prompts(1, n, VOCAB, seed=n)[0] for n in (70, 130, 9, 200, 64, 30)]
    greedy = [SamplingParams(max_tokens=50 + 9 * i, ignore_eos=True) for i in range(6)]
    alone = run_all(make_engine(heads(name).target, ctx=320), prompts, greedy)
    engine = heads(name).engine(4, ctx=320, slots=5, lag=1, cache_pages=6)
    runs = run_all(engine, prompts, greedy)
    assert [run.output for run in runs] == [run.output for run in alone]
    assert sum(run.metrics.preemptions for run in runs) > 1
    assert_the_reference_s(heads(name), prompts, runs)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["three", "eagle"])
def test_what_drafts_were_drawn_from_is_kept(heads: Heads, name: str, rule: str) -> None:
    """A law over the target's ids for each draft, with nothing for those that a head does not know."""
    engine = heads(name).engine(3, verify=rule)
    state, laws, known = engine._parts.state, engine._parts.sampler.draft_laws, heads(name).known()
    assert laws is not None
    seen = 0

    def look(record: RoundRecord) -> None:
        nonlocal seen
        for draft, law in zip(state.draft[0, : state.num_drafts[0]].tolist(), laws[0], strict=False):
            assert law.sum() == pytest.approx(1, abs=1e-5) and law[draft] > 0
            possible = set(law.nonzero().flatten().tolist())
            assert possible <= known and len(possible) > len(known) // 2
            seen += 1

    engine.trace = look
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=2, ignore_eos=True)
    list(engine.stream([Request("r", PROMPTS[1], params)]))
    metrics = engine.metrics("r")
    assert seen > 20 and 0 < metrics.draft_n_accepted < metrics.draft_n


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_and_its_own_head(dtype: str) -> None:
    """Trained weights, latent attention and experts: greedy and drawn, beside each other, at every lag."""
    prompts = [tuple(range(5 + n, 45 + n)) for n in (0, 40, 900)] * 2
    params = [SamplingParams(max_tokens=24, temperature=0.8 * (i > 2), seed=i) for i in range(6)]
    wishes: dict[str, Any] = {"dtype": dtype, "slots": 3}
    plain = run_all(make_engine(demo_folder(), **wishes), prompts, params)
    for k in (1, 4):
        story: list[Any] = []
        for lag in (0, 1, 2):
            runs = run_all(
                make_engine(demo_folder(), spec="mtp", draft_max=k, lag=lag, **wishes), prompts, params
            )
            assert [run.output for run in runs] == [run.output for run in plain]
            story = story or [run.drafts for run in runs]
            assert [run.drafts for run in runs] == story
        assert sum(accepted for run in story for _, accepted in run) > 0
