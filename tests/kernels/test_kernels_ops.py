"""Each operation against its definition in float64, and the rows' independence of each other."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from spd.kernels.attention.paged_attention import (
    AttentionHeads,
    MaskPlan,
    Scores,
    SlotMask,
    Windows,
    causal_bias,
    paged_attention,
    plan_attention,
)
from spd.kernels.attention.rotary_store import apply_rotary, store_kv
from spd.kernels.linear.rms_norm import rms_norm
from spd.kernels.linear.silu_mul import silu_mul
from spd.kernels.round.commit import coupled_verify


def test_rms_norm_against_its_definition() -> None:
    x, weight = torch.randn(5, 3, 16), torch.rand(16) + 0.5
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert (rms_norm(x, weight, 1e-5) - expected).abs().max() < 1e-5
    heads = torch.rand(3, 16) + 0.5
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * heads
    assert (rms_norm(x, heads, 1e-5) - expected).abs().max() < 1e-5


def test_rotary_turns_pairs_of_halves() -> None:
    x, angle = torch.randn(4, 2, 6), torch.rand(4, 3)
    cos, sin = angle.cos(), angle.sin()
    turned = apply_rotary(x, torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))
    first = x[..., :3] * cos[:, None] - x[..., 3:] * sin[:, None]
    second = x[..., 3:] * cos[:, None] + x[..., :3] * sin[:, None]
    assert (turned - torch.cat((first, second), -1)).abs().max() < 1e-6


def test_silu_mul_gates_the_first_half() -> None:
    x = torch.randn(3, 8)
    assert (silu_mul(x) - x[:, :4] * torch.sigmoid(x[:, :4]) * x[:, 4:]).abs().max() < 1e-6


def test_store_kv_writes_slots_only() -> None:
    pages_k, pages_v = torch.zeros(4, 2, 1, 3), torch.zeros(4, 2, 1, 3)
    key, value = torch.randn(2, 1, 3), torch.randn(2, 1, 3)
    store_kv(key, value, (pages_k, pages_v), torch.tensor([5, 0]))
    assert torch.equal(pages_k.flatten(0, 1)[5], key[0]) and torch.equal(pages_v.flatten(0, 1)[0], value[1])
    assert pages_k.count_nonzero() == 6


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (8, 1)])
def test_paged_attention_against_its_definition(heads: int, kv_heads: int) -> None:
    size, page, width = 16, 64, 3
    pool_k, pool_v = torch.randn(20, page, kv_heads, size), torch.randn(20, page, kv_heads, size)
    table = torch.tensor([[7, 3, 12, 5, 1, 0, 2, 19], list(range(8, 16))])
    starts = [130, 5]
    query = torch.randn(2, width, heads, size)
    positions = torch.tensor([[s + i for i in range(width)] for s in starts])
    shape, valid = AttentionHeads(heads, kv_heads, size), torch.ones(2, width, dtype=torch.bool)
    windows = Windows(positions, valid, table, [133, 8], [None, 8])
    plan = plan_attention(windows, shape, page, torch.float32)
    out = paged_attention(query, (pool_k, pool_v), plan, Scores(size**-0.5))
    for s in range(2):
        keys = pool_k[table[s]].flatten(0, 1).double()
        values = pool_v[table[s]].flatten(0, 1).double()
        for i in range(width):
            for h in range(heads):
                seen = starts[s] + i + 1
                group = h // (heads // kv_heads)
                weights = (keys[:seen, group] @ query[s, i, h].double() * size**-0.5).softmax(0)
                assert (out[s, i, h] - weights @ values[:seen, group]).abs().max() < 1e-4


@pytest.mark.parametrize("form", ["", "_triton"])
@pytest.mark.parametrize("first", [1, 3])
def test_keys_before_the_first_are_not_seen(device: str, form: str, first: int) -> None:
    """Windows and prompt chunks; a row before the first key sees itself, so that it stays finite."""
    if form:
        pytest.importorskip("triton")
    paged = importlib.import_module(f"spd.kernels.attention.paged_attention{form}")
    size, page, heads = 16, 64, AttentionHeads(4, 2, 16, first)
    pool_k, pool_v = (torch.randn(10, page, 2, size, device=device) for _ in range(2))
    table = torch.tensor([[7, 3, 5, 1, 0, 2, 9, 8]], device=device)
    keys, values = (pool[table[0]].flatten(0, 1).double() for pool in (pool_k, pool_v))
    for start, width in ((0, 6), (130, 3)):
        query = torch.randn(1, width, 4, size, device=device)
        positions = torch.arange(start, start + width, device=device)[None]
        valid = torch.ones_like(positions, dtype=torch.bool)
        windows = Windows(positions, valid, table, [start + width], [None])
        plan = paged.plan_attention(windows, heads, page, torch.float32)
        pools, scores = (pool_k, pool_v), Scores(0.25)
        window = paged.paged_attention(query, pools, plan, scores)[0]
        chunk = paged.prefill_attention(query[0], pools, table[0], start, scores, first)
        for i in range(width):
            seen = slice(min(first, start + i), start + i + 1)
            for h in range(4):
                weights = (keys[seen, h // 2] @ query[0, i, h].double() * 0.25).softmax(0)
                expected = weights @ values[seen, h // 2]
                assert (window[i, h] - expected).abs().max() < 1e-4
                assert (chunk[i, h] - expected).abs().max() < 1e-4


def test_attention_does_not_see_past_its_bound() -> None:
    """One block or two, pages consecutive or not: the same bits; hidden blocks may hold anything finite."""
    size, page = 16, 64
    pool = torch.randn(40, page, 2, size)
    query = torch.randn(1, 4, 4, size)
    positions, valid = torch.arange(100, 104)[None], torch.ones(1, 4, dtype=torch.bool)
    heads = AttentionHeads(4, 2, size)
    consecutive = torch.arange(2, 18)[None]
    scattered = consecutive.flip(1)
    moved = pool.clone()
    moved[scattered[0]] = pool[consecutive[0]]

    def run(pages: torch.Tensor, table: torch.Tensor, bound: int, first: int | None) -> torch.Tensor:
        windows = Windows(positions, valid, table, [bound], [first])
        plan = plan_attention(windows, heads, page, torch.float32)
        return paged_attention(query, (pages, pages), plan, Scores(0.25))

    base = run(pool, consecutive, 104, 2)
    assert torch.equal(base, run(pool, consecutive, 512, 2))
    assert torch.equal(base, run(pool, consecutive, 513, 2))
    assert torch.equal(base, run(pool, consecutive, 104, None))
    assert torch.equal(base, run(moved, scattered, 104, None))


KINDS = [(None, None), (None, 3.0), (700, None), (700, 3.0), (40, None), (40, 3.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sliding", "softcap"), KINDS)
def test_sliding_and_capped_attention(sliding: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    """Against the definition; and the same bits in fours, and where blocks left behind are read."""
    size, page, start = 16, 64, 1060
    generator = torch.Generator().manual_seed(1)
    pool_k, pool_v = (torch.randn(40, page, 2, size, generator=generator).to(dtype) for _ in range(2))
    table = torch.randperm(40, generator=generator)[None, :32]
    query = torch.randn(1, 32, 4, size, generator=generator).to(dtype)
    heads = AttentionHeads(4, 2, size, sliding=(None, sliding))

    def run(first: int, rows: int, bound: int, *, read_all: bool = False) -> torch.Tensor:
        positions = torch.arange(start + first, start + first + rows)[None]
        valid = torch.ones(1, rows, dtype=torch.bool)
        plan = plan_attention(Windows(positions, valid, table, [bound], [None]), heads, page, dtype)
        assert isinstance(plan, MaskPlan)
        if read_all:
            bias = causal_bias(positions[0], bound, 2, dtype, 0, sliding)
            plan = replace(plan, masks={sliding: (SlotMask(bias),)})
        rows_ = query[:, first : first + rows]
        return paged_attention(rows_, (pool_k, pool_v), plan, Scores(0.25, sliding, softcap))[0]

    together = run(0, 32, 1536)
    assert torch.equal(together, run(0, 32, 1536, read_all=True))
    for first in range(0, 32, 4):
        assert torch.equal(run(first, 4, 1536 if first % 8 else 2048), together[first : first + 4])
    keys, values = (pool[table[0]].flatten(0, 1).double() for pool in (pool_k, pool_v))
    for i in (0, 17, 31):
        seen = slice(max(0, start + i + 1 - (sliding or 9999)), start + i + 1)
        for h in range(4):
            scores = keys[seen, h // 2] @ query[0, i, h].double() * 0.25
            scores = scores if softcap is None else softcap * (scores / softcap).tanh()
            right = scores.softmax(0) @ values[seen, h // 2]
            assert (together[i, h] - right).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)


def test_rows_that_do_not_count_are_finite_under_a_window() -> None:
    """Rows that are not valid may stand behind the pages that are read, where a window shows them nothing."""
    pool = torch.randn(10, 64, 1, 8)
    table, valid = torch.arange(8)[None], torch.tensor([[True, False]])
    for softcap in (None, 2.0):
        heads = AttentionHeads(2, 1, 8, sliding=(16,))
        windows = Windows(torch.tensor([[3, 400]]), valid, table, [64], [None])
        plan = plan_attention(windows, heads, 64, torch.float32)
        out = paged_attention(torch.randn(1, 2, 2, 8), (pool, pool), plan, Scores(1.0, 16, softcap))
        assert out.isfinite().all()


def test_slot_without_rows_gives_zeros() -> None:
    pool = torch.randn(10, 64, 1, 8)
    query = torch.randn(2, 1, 2, 8)
    table, valid = torch.arange(8).expand(2, -1), torch.tensor([[False], [True]])
    positions, heads = torch.full((2, 1), 3), AttentionHeads(2, 1, 8)
    plan = plan_attention(Windows(positions, valid, table, [0, 4], [None, 0]), heads, 64, torch.float32)
    out = paged_attention(query, (pool, pool), plan, Scores(1.0))
    assert out[0].count_nonzero() == 0 and out[1].count_nonzero() > 0


@pytest.mark.parametrize(
    ("draft", "sampled", "real", "accepted"),
    [
        ([4, 5, 6], [4, 5, 6, 7], 3, 3),
        ([4, 5, 6], [4, 5, 6, 7], 2, 2),
        ([4, 5, 6], [4, 9, 6, 7], 3, 1),
        ([4, 5, 6], [9, 5, 6, 7], 3, 0),
        ([4, 5, 6], [4, 5, 6, 7], 0, 0),
    ],
)
def test_coupled_verify_counts_the_leading_matches(
    draft: list[int], sampled: list[int], real: int, accepted: int
) -> None:
    found = coupled_verify(torch.tensor([draft]), torch.tensor([sampled]), torch.tensor([real]))
    assert found.tolist() == [accepted]


def test_coupled_verify_of_no_drafts() -> None:
    none = torch.empty(2, 0, dtype=torch.long)
    assert coupled_verify(none, torch.tensor([[1], [2]]), torch.tensor([0, 0])).tolist() == [0, 0]
