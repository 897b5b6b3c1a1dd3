"""Generations under rejection and block verification: what has to be equal, and what is accepted."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from spd.runtime import Engine, SamplingParams
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.round.sampler import Sampler
from tests import helpers
from tests.helpers import (
    DampedLayers,
    Patch,
    Run,
    Tiny,
    collect_drafts,
    collect_outputs,
    count_accepted,
    get_local_queue,
    make_engine,
    run_all,
)
from tests.runtime import seeded_faults as fault

RULES = ["rejection", "block"]
PROMPTS = helpers.random_prompts(4, 16, 256)
by_rule = pytest.mark.parametrize("rule", RULES)
Methods = dict[str, dict[str, Any]]
damped = DampedLayers(full_layers=1)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 30, "logit_bias": ((7, 2.0),)},
    {
        "temperature": 1.0,
        "min_tokens": 6,
        "stop_token_ids": tuple(range(0, 256, 16)),
        "logprobs": 2,
    },
]
SAMPLED = [
    SamplingParams(max_tokens=6 + 5 * i, seed=40 + i, **kind) for i, kind in enumerate(KINDS)
]


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Path:
    return tiny("qwen3", layers=2, residual_gain=damped, seed=5)


@pytest.fixture(scope="module")
def methods(tiny: Tiny, target: Path) -> Methods:
    draft = tiny("qwen3", layers=1, residual_gain=damped, seed=5)
    by = {"draft_max": 3, "spec": "draft"}
    draft_methods = {"draft": {**by, "draft_model": draft}, "self": {**by, "draft_model": target}}
    return {"ngram": {"spec": "ngram", "ngram_min": 1, "draft_max": 3}, **draft_methods}


def engine_of(target: Path, rule: str, **options: Any) -> Engine:
    return make_engine(target, **{"verify": rule, "slots": 4, "adaptive": None, **options})


def story(runs: list[Run]) -> list[object]:
    return [(run.output, run.drafts, run.logprobs) for run in runs]


@pytest.mark.covers(1)
@by_rule
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_a_request_is_itself_among_others(
    target: Path, methods: Methods, method: str, rule: str
) -> None:
    """k is fixed, and noise depends on the request's seed and position, at every lag."""
    alone = run_all(engine_of(target, rule, slots=1, **methods[method]), PROMPTS, SAMPLED)
    for slots, lag in ((2, 1), (4, 2)):
        engine = engine_of(target, rule, slots=slots, lag=lag, **methods[method])
        together = run_all(engine, PROMPTS, SAMPLED)
        assert story(together) == story(alone), (slots, lag)
    for run in alone:
        assert run.metrics.completion_tokens == len(run.tokens)
        for record in run.rounds:
            assert record.sampled[: record.accepted] == record.draft[: record.accepted]
            assert len(record.sampled) == record.accepted + 1 and min(record.sampled) >= 0
            assert record.committed == record.sampled[: len(record.committed)]


@pytest.mark.covers(1)
@by_rule
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_greedy_texts_are_the_plain_ones(
    target: Path, methods: Methods, method: str, rule: str
) -> None:
    """Alone, where nothing is sampled, and next to requests that sample."""
    greedy = SamplingParams(max_tokens=24, repetition_penalty=1.1)
    plain = run_all(make_engine(target), PROMPTS, [greedy] * 4)
    alone = run_all(engine_of(target, rule, **methods[method]), PROMPTS, [greedy] * 4)
    assert collect_outputs(alone) == collect_outputs(plain)
    drawing = SamplingParams(temperature=1.5, max_tokens=50, ignore_eos=True)
    prompts = [*PROMPTS[2:], *PROMPTS[:2]]
    params = [drawing] * 2 + [greedy] * 2
    alongside_sampled = run_all(engine_of(target, rule, **methods[method]), prompts, params)[2:]
    assert collect_outputs(alongside_sampled) == collect_outputs(plain[:2]) and collect_drafts(
        alongside_sampled
    ) == collect_drafts(alone[:2])
    assert count_accepted(alone)


@by_rule
def test_a_drafter_of_the_targets_distribution_is_never_rejected(
    target: Path, methods: Methods, rule: str
) -> None:
    ts = enumerate((0.0, 0.6, 1.0, 2.0))
    params = [SamplingParams(temperature=t, max_tokens=30, seed=i) for i, t in ts]
    runs = run_all(engine_of(target, rule, **methods["self"]), PROMPTS, params)
    assert all(run.metrics.draft_n_accepted == run.metrics.draft_n > 15 for run in runs)


def test_faults_are_caught(target: Path, methods: Methods, monkeypatch: Patch) -> None:
    """A sampled draft treated as certain, a draft other than the sampled one, and greedy rows that sample."""
    draw = Sampler.draw_draft
    never = test_a_drafter_of_the_targets_distribution_is_never_rejected
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(Sampler, "allocate_draft_distributions", lambda self: None)
        never(target, methods, "rejection")
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(
            Sampler,
            "draw_draft",
            lambda self, runner, hidden, step, needs: (
                (draw(self, runner, hidden, step, needs) + 1) % self.usable_vocab
            ),
        )
        never(target, methods, "block")
    warm = lambda t: dataclasses.replace(t, temperature=t.temperature.where(t.temperature > 0, 1.0))  # noqa: E731
    fault.operation("row_distributions", lambda a: {"tensors": warm(a.tensors)})(monkeypatch)
    with pytest.raises(AssertionError):
        test_greedy_texts_are_the_plain_ones(target, methods, "draft", "block")


@pytest.mark.covers(count=3)
@pytest.mark.parametrize("rule", ["coupled", *RULES])
@pytest.mark.parametrize("who", ["runner", "draft"])
def test_logits_that_are_not_finite_cost_one_request(
    target: Path, methods: Methods, rule: str, who: str
) -> None:
    """The target's logits end one request with an error; the drafter's cost it one draft."""
    params = [
        SamplingParams(max_tokens=16, temperature=0.8, seed=i, ignore_eos=True) for i in range(3)
    ]
    alone = run_all(engine_of(target, rule, **methods["draft"]), PROMPTS[:3], params)
    engine = engine_of(target, rule, **methods["draft"])
    queue = get_local_queue(engine)
    assert isinstance(queue.proposer, DraftModelProposer)
    runner = queue.runner if who == "runner" else queue.proposer.runners[0]
    honest = runner.logits

    def poisoned(hidden: Tensor, views: Any = ()) -> Tensor:
        logits = honest(hidden, views)
        if queue.state.length[1] > len(PROMPTS[1]) + 6:
            logits[1] = float("nan")
        return logits

    runner.logits = poisoned  # type: ignore[method-assign]
    runs = run_all(engine, PROMPTS[:3], params)
    assert [runs[i].output for i in (0, 2)] == [alone[i].output for i in (0, 2)]
    assert runs[1].finish_reason == ("error" if who == "runner" else "length")
    tokens_before = runs[1].tokens if who == "runner" else runs[1].tokens[:7]
    assert len(tokens_before) >= 7 and tokens_before == alone[1].tokens[: len(tokens_before)]
    if who == "draft":
        assert len(runs[1].tokens) == 16
        assert not any(
            record.accepted for record in runs[1].rounds if record.position > len(PROMPTS[1]) + 11
        )
    runner.logits = honest  # type: ignore[method-assign]
    assert run_all(engine, PROMPTS[1:2], params[1:2])[0].output == alone[1].output


def test_the_plan_counts_the_stored_distributions(target: Path, methods: Methods) -> None:
    """k does not adapt, certain drafts need no distributions, and the plan counts the stored ones."""
    coupled = make_engine(target, adaptive=None, **methods["draft"])
    block = engine_of(target, "block", slots=1, **methods["draft"])
    assert (coupled.plan.adaptive, block.plan.adaptive, block.plan.config.verify) == (
        True,
        False,
        "block",
    )
    distributions = block.round_queue.sampler.draft_distributions
    assert distributions is not None and distributions.shape == (1, 3, 320)
    assert block.plan.need.workspace - coupled.plan.need.workspace == distributions.numel() * 4
    assert coupled.round_queue.sampler.draft_distributions is None
    assert (
        engine_of(target, "block", **methods["ngram"]).round_queue.sampler.draft_distributions
        is None
    )
