"""Speculation is invisible in models with latent attention and routed experts too: tokens, text and end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.kernels.attention.rotary_store import RotatedRows
from spd.runtime import SamplingParams
from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models import decoder, layouts, moe
from spd.runtime.models.latent_attention import LATENT_EPSILON, LatentAttention
from tests.helpers import Run, make_engine, random_prompts, run_all
from tests.test_invisible import damped

PROMPTS = random_prompts(3, 20, 256) + random_prompts(1, 75, 256, seed=1)
TEMPERATURES = (0.0, 0.9)
FAMILIES = ("deepseek_v3", "deepseek_v2_lite", "glm4_moe", "qwen3_moe", "ernie4_5_moe")


def folders(tiny: Callable[..., Path], variant: str) -> tuple[Path, Path]:
    """A target, and a draft of its first layers that often agrees."""
    target = tiny(variant, layers=4, residual_gain=damped, seed=3)
    return target, tiny(variant, layers=2, residual_gain=damped, seed=3)


def runs(model: Path, count: int = 16, **wishes: Any) -> list[Run]:
    """Every prompt at every temperature."""
    params = [
        SamplingParams(temperature=t, max_tokens=count, seed=100 + i)
        for i in range(len(PROMPTS))
        for t in TEMPERATURES
    ]
    return run_all(make_engine(model, **wishes), [p for p in PROMPTS for _ in TEMPERATURES], params)


def compare(plain: list[Run], speculated: list[Run], method: str) -> None:
    assert [run.output for run in speculated] == [run.output for run in plain]
    drafted = sum(run.metrics.draft_n for run in speculated)
    accepted = sum(run.metrics.draft_n_accepted for run in speculated)
    seen = {"ngram": drafted > 0, "draft": 0 < accepted < drafted, "self": 0 < accepted <= drafted}
    assert seen[method], "nothing was seen"  # random text rarely goes on as n-grams say


@pytest.mark.parametrize("method", ["ngram", "draft"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepseek(tiny: Callable[..., Path], dtype: str, method: str) -> None:
    target, draft = folders(tiny, "deepseek_v3")
    how = {"spec": "ngram", "ngram_min": 1} if method == "ngram" else {"spec": "draft", "draft_model": draft}
    plain = runs(target, dtype=dtype)
    for k, lag, slots in ((1, 2, 1), (4, 1, 4)):
        compare(plain, runs(target, dtype=dtype, draft_max=k, lag=lag, slots=slots, **how), method)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_every_family_method_k_and_lag(tiny: Callable[..., Path], variant: str, dtype: str) -> None:
    target, draft = folders(tiny, variant)
    plain = runs(target, dtype=dtype)
    for method in ("ngram", "draft", "self"):
        how: dict[str, Any] = {"spec": "ngram", "ngram_min": 1}
        if method != "ngram":
            how = {"spec": "draft", "draft_model": draft if method == "draft" else target}
        for k, lag, slots in ((1, 2, 3), (2, 0, 1), (3, 1, 4), (4, 0, 4), (4, 2, 2)):
            compare(plain, runs(target, dtype=dtype, draft_max=k, lag=lag, slots=slots, **how), method)


def test_a_chosen_form_of_experts_too(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are too large to be computed for every row."""
    monkeypatch.setattr(moe, "SMALL_EXPERTS", 0)
    target, draft = folders(tiny, "qwen3_moe")
    plain = runs(target, count=12)
    how = {"spec": "draft", "draft_model": draft, "draft_max": 3, "slots": 4}
    compare(plain, runs(target, count=12, **how), "draft")


def test_prefix_hit_equals_miss(tiny: Callable[..., Path]) -> None:
    target, _ = folders(tiny, "deepseek_v3")
    common = random_prompts(1, 150, 256, seed=9)[0]
    params = [SamplingParams(temperature=0.8, max_tokens=30, seed=4, ignore_eos=True)]
    engine = make_engine(target, ctx=300, spec="ngram", draft_max=3)
    for prompt in (common, (*common, 1, 2, 3), common[:140]):
        shared = run_all(engine, [prompt], params)[0]
        fresh = run_all(make_engine(target, ctx=300, prefix_sharing=False), [prompt], params)[0]
        assert shared.output == fresh.output
    assert shared.metrics.cached_tokens == 128


class NaiveLatentAttention(LatentAttention):
    """The same layer with keys and values of every head expanded from the pool."""

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        of, (pages,) = self.latent, cache.pools
        query, latent = self._project(stream, batch)
        turning = RotatedRows(rotary.cos, rotary.sin, rotary.positions, batch.kv_slots)
        given = (latent, turning, self.latent_norm, LATENT_EPSILON, pages)
        turned = self.kernels.latent_store(query[..., of.nope_dim :], *given)
        query = torch.cat((query[..., : of.nope_dim], turned), -1)
        values = query.new_zeros(*query.shape[:2], of.value_dim)
        for slot in range(batch.num_slots):
            rows = slice(slot * batch.width, (slot + 1) * batch.width)
            kept = pages[batch.page_table[slot]].flatten(0, 1)
            still = torch.einsum("tl,hnl->thn", kept[:, : of.rank], self.key_up)
            key = torch.cat((still, kept[:, None, of.rank :].expand(-1, self.num_heads, -1)), -1)
            value = torch.einsum("tl,hlv->thv", kept[:, : of.rank], self.value_up)
            hidden = torch.arange(kept.shape[0]) > batch.positions[rows, None]
            scores = torch.einsum("qhd,thd->hqt", query[rows], key) * self.scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            values[rows] = torch.einsum("hqt,thv->qhv", weights, value)
        return self.output(Residual(values.flatten(1)), batch, stream)


def test_naive_and_absorbed_accept_alike(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, drafts and acceptances, round by round; in float32 the two forms differ in the last bits."""
    target, draft = folders(tiny, "deepseek_v3")
    how = {"spec": "draft", "draft_model": draft, "draft_max": 3, "slots": 2}
    absorbed = runs(target, count=12, **how)
    monkeypatch.setitem(decoder.BLOCKS, layouts.LatentLayout, NaiveLatentAttention)
    naive = runs(target, count=12, **how)
    assert [run.output for run in naive] == [run.output for run in absorbed]
    assert [run.drafts for run in naive] == [run.drafts for run in absorbed]
    assert sum(run.metrics.draft_n_accepted for run in naive) > 0
