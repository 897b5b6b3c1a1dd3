"""Latent attention and routed experts in their other forms: the same texts and the same acceptances."""

from __future__ import annotations

import pytest
import torch

from spd.kernels.attention.rotary_store import RotatedRows
from spd.runtime import Engine
from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models import decoder, layouts, moe
from spd.runtime.models.latent_attention import LATENT_EPSILON, LatentAttention
from tests.helpers import Run, accepted, assert_same, drafted
from tests.pairs import Pairs
from tests.test_invisible import matrix_params, outputs


def runs(engine: Engine) -> list[Run]:
    """Every fourth question of the matrix, answered shortly."""
    return outputs(engine, matrix_params(12)[::4])


def test_a_chosen_form_of_experts_too(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are too large to be computed for every row."""
    monkeypatch.setattr(moe, "SMALL_EXPERTS", 0)
    pair = pairs.get("qwen3_moe/draft")
    speculated = runs(pair.engine(3, slots=4))
    assert_same(speculated, runs(pair.plain()))
    assert 0 < accepted(speculated) < drafted(speculated)


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


def test_naive_and_absorbed_accept_alike(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, drafts and acceptances, round by round; in float32 the two forms differ in the last bits."""
    pair = pairs.get("deepseek_v3/draft")
    absorbed = runs(pair.engine(3, slots=2))
    monkeypatch.setitem(decoder.BLOCKS, layouts.LatentLayout, NaiveLatentAttention)
    naive = runs(pair.engine(3, slots=2))
    assert_same(naive, absorbed)
    assert [run.drafts for run in naive] == [run.drafts for run in absorbed] and accepted(naive) > 0
