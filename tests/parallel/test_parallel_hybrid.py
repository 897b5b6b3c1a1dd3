"""Hybrids on several ranks, recurrent layers divided by key heads: no token or draft changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.errors import IncompatibleError
from spd.formats.model_config import ModelConfig
from spd.kernels.native.build import unavailable_reason
from spd.runtime import Request, SamplingParams
from spd.runtime.models import family_layout, weights
from spd.runtime.models.parameters import Shard
from spd.runtime.models.weights import ModelLayout
from tests import helpers
from tests.helpers import (
    Run,
    collect_drafts,
    collect_outputs,
    count_accepted,
    make_engine,
    random_prompts,
    run_all,
    run_requests,
)
from tests.recipes.tiny_hybrid import write_tiny_hybrid
from tests.runtime.test_runtime_hybrid import FORMS, write_sparse

pytestmark = pytest.mark.usefixtures("threads")
PROMPTS = [*random_prompts(1, 75, 256), *random_prompts(2, 20, 256, seed=1), (5,)]
SHORT = SamplingParams(max_tokens=10, ignore_eos=True)
SEEDED = [replace(SHORT, temperature=t, seed=i) for i, t in enumerate((0, 1.0) * 2)]
SPLIT = (
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_a",
    "in_proj_b",
    "conv1d",
    "A_log",
    "dt_bias",
    "out_proj",
)


def runs_of(folder: Path, params: list[SamplingParams] = SEEDED, **options: Any) -> list[Run]:
    engine = make_engine(folder, **{"slots": 3, **options})
    runs = run_all(engine, PROMPTS, params)
    engine.close()
    return runs


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a target whose MTP layer is often right, and not always."""
    return write_tiny_hybrid(tmp_path_factory.mktemp("agreeing"), mtp=True, agreeing=True)


def test_logits_tokens_and_drafts_are_those_of_one_rank(agreeing: Path) -> None:
    with_logprobs = [replace(seeded, logprobs=0) for seeded in SEEDED]
    folder = agreeing
    alone, divided = (runs_of(folder, with_logprobs, kernels="torch", tp=tp) for tp in (1, 2))
    assert collect_outputs(divided) == collect_outputs(alone)
    for undivided_run, divided_run in zip(alone, divided, strict=True):
        assert divided_run.logprobs == pytest.approx(undivided_run.logprobs, abs=1e-4)
    options: dict[str, Any] = {"kernels": "auto", "spec": "mtp", "draft_max": 3}
    expected = runs_of(folder, **options)
    assert collect_outputs(expected) == collect_outputs(alone) and count_accepted(expected)
    for group in (1, 2):
        runs = runs_of(folder, tp=2, draft_tp=group, **options)
        assert (collect_outputs(runs), collect_drafts(runs)) == (
            collect_outputs(alone),
            collect_drafts(expected),
        ), group


@pytest.mark.parametrize("name", ["Qwen3_5Moe", "Qwen3Next"])
def test_sparse_hybrids_match_one_rank(name: str, tmp_path: Path) -> None:
    write_sparse(tmp_path, name)
    alone = collect_outputs(runs_of(tmp_path, kernels="auto"))
    assert (
        collect_outputs(
            runs_of(tmp_path, kernels="auto", tp=2, spec="ngram", ngram_min=1, draft_max=3)
        )
        == alone
    )


def test_a_recurrent_draft_model_drafts_the_same_on_one_or_two_ranks(
    agreeing: Path, tmp_path: Path
) -> None:
    draft = write_tiny_hybrid(
        tmp_path, agreeing=True, num_hidden_layers=2, full_attention_interval=2
    )
    options: dict[str, Any] = {
        "kernels": "auto",
        "spec": "draft",
        "draft_model": draft,
        "draft_max": 3,
    }
    alone = runs_of(agreeing, **options)
    assert count_accepted(alone)
    for group in (1, 2):
        runs = runs_of(agreeing, tp=2, draft_tp=group, **options)
        assert (collect_outputs(runs), collect_drafts(runs)) == (
            collect_outputs(alone),
            collect_drafts(alone),
        ), group


@pytest.mark.covers(1, count=1)
@pytest.mark.parametrize("method", ["ngram", "mtp"])
@pytest.mark.parametrize("form", FORMS)
def test_speculation_changes_no_token(agreeing: Path, form: str, method: str) -> None:
    if form == "native" and unavailable_reason() is not None:
        pytest.skip("no C kernels here")
    options = {**FORMS[form], "tp": 2, "ngram_min": 1}
    plain = collect_outputs(runs_of(agreeing, **options))
    first, late = (
        runs_of(agreeing, spec=method, draft_max=4, lag=lag, **options) for lag in (0, 1)
    )
    assert collect_outputs(first) == collect_outputs(late) == plain
    assert collect_drafts(first) == collect_drafts(late), "the host's lag changes no draft"
    assert method == "ngram" or count_accepted(first)


def test_two_ranks_go_on_from_checkpoints(agreeing: Path) -> None:
    """A prompt again, and a next turn: each rank has its part of the snapshots."""
    form = "torch" if unavailable_reason() else "native"
    options = {**FORMS[form], "tp": 2, "spec": "mtp", "draft_max": 3, "lag": 1}
    engines = [
        make_engine(agreeing, prefix_sharing=sharing, **options) for sharing in (False, True)
    ]
    prompt = PROMPTS[0]
    params = replace(SEEDED[1], logprobs=0)
    results = list[Any]()
    cached = list[int]()
    for engine in engines:
        runs = run_all(engine, [prompt], [params])
        turn = helpers.make_next_turn(prompt, runs[0].tokens, params)
        runs += run_requests(engine, [Request("again", prompt, params)]) + run_requests(
            engine, [turn]
        )
        cached += [run.metrics.cached_tokens for run in runs]
        results.append([(run.output, run.logprobs, run.drafts) for run in runs])
        engine.close()
    assert results[0] == results[1] and cached == [0, 0, 0, 0, 74, 84]


def test_a_wrong_part_is_seen(tmp_path: Path) -> None:
    """The planted fault: every rank takes the first one's part of a tensor."""
    folder = write_tiny_hybrid(tmp_path, num_hidden_layers=2, full_attention_interval=2)
    expected = collect_outputs(runs_of(folder, kernels="auto"))
    honest = weights.source_tensors
    for name in SPLIT:

        def parts(config: ModelConfig, layout: ModelLayout, name: str = name) -> Any:
            first = honest(config, family_layout(config).sharded(Shard(0, layout.shard.size)))
            right_parts = honest(config, layout)
            return {
                key: first[key] if f".{name}" in key else part for key, part in right_parts.items()
            }

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights, "source_tensors", parts)
            assert collect_outputs(runs_of(folder, kernels="auto", tp=2)) != expected, name


def test_the_plan_counts_a_rank_s_states(agreeing: Path) -> None:
    engine = make_engine(agreeing, slots=3, tp=2, spec="mtp", draft_max=4)
    pools = [pool for layer in engine.round_queue.runner.cache.layers for pool in layer.pools]
    states = [pool for pool in pools if pool.dim() == 4 and pool.shape[1:] == (3, 16, 24)]
    assert len(states) == 4 and all(pool.dtype == torch.float32 for pool in states)
    pool_bytes = sum(pool.nbytes for pool in pools)
    need = engine.plan.need
    assert pool_bytes == need.cache + need.states
    engine.close()


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_hybrid(tmp_path, linear_num_key_heads=3, linear_num_value_heads=3)
    with pytest.raises(IncompatibleError, match="--tp 2 does not divide the target") as refused:
        make_engine(folder, tp=2)
    assert "3 recurrent key heads" in refused.value.reason[0] and refused.value.exit_code == 4
    assert refused.value.fix == ("--tp 1",)
