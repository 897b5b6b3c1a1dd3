"""A later draft's key or value that is not finite: who does not see it keeps its bits, who does is NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionHeads, Scores, Windows
from spd.kernels.attention.rotary_store import RotatedRows
from spd.kernels.dispatch import Kernels, load_kernels

pytest.importorskip("triton")

ROWS, WINDOW, WILD = 41, 4, 2
"""Positions in all, of which the last ones are a window; the row of it that is not finite."""
PAGE, HEADS, KV_HEADS, SIZE, RANK = 16, 4, 2, 16, 32
KINDS: dict[str, tuple[int | None, float | None]] = {
    "plain": (None, None),
    "sliding": (9, None),
    "capped": (None, 2.0),
    "latent": (None, None),
}


def attended(ops: Kernels, kind: str, prompt: bool, side: str, bad: float | None, device: str) -> Tensor:
    """The window's rows, after all positions' keys and values were stored, one of them not finite."""
    torch.manual_seed(0)
    latent, (sliding, softcap) = kind == "latent", KINDS[kind]
    turn = torch.rand(ROWS, SIZE, device=device)
    positions, slots = torch.arange(ROWS, device=device), torch.arange(PAGE, PAGE + ROWS, device=device)
    table, turning = torch.arange(1, 4, device=device)[None], RotatedRows(turn, turn, positions, slots)
    if latent:
        kept, query = torch.randn(ROWS, RANK + SIZE), torch.randn(ROWS, HEADS, RANK + SIZE, device=device)
        where = kept[:, 5:6] if side == "value" else kept[:, RANK + 3 : RANK + 4]
        pools, own = [torch.zeros(4, PAGE, RANK + SIZE, device=device)], AttentionHeads(HEADS, 1, RANK + SIZE)
    else:
        kept = torch.randn(ROWS, HEADS + 2 * KV_HEADS, SIZE)
        where = kept[:, HEADS + KV_HEADS * (side == "value") :, 3][:, :KV_HEADS]
        pools = [torch.zeros(4, PAGE, KV_HEADS, SIZE, device=device) for _ in range(2)]
        own = AttentionHeads(HEADS, KV_HEADS, SIZE, sliding=(sliding,))
    if bad is not None:
        where[ROWS - WINDOW + WILD] = bad
    kept = kept.flatten(1).to(device)
    if latent:
        part = query[..., RANK:].contiguous()
        norm = torch.ones(RANK, device=device)
        turned = ops.latent_store(part, kept, turning, norm, 1e-5, *pools)
        query = torch.cat((query[..., :RANK], turned), -1)
    else:
        query = ops.rotary_store(kept, turning, None, 1e-5, pools, HEADS)
    query, start = query[-WINDOW:].contiguous(), ROWS - WINDOW
    if prompt and latent:
        return ops.mla_prefill(query, *pools, table[0], start, RANK, 0.2)
    if prompt:
        return ops.prefill_attention(query, pools, table[0], start, Scores(0.2, sliding, softcap))
    seen = torch.ones(1, WINDOW, dtype=torch.bool, device=device)
    windows = Windows(positions[None, start:], seen, table, (48,), (None,))
    plan = ops.plan_attention(windows, own, PAGE, kept.dtype)
    if latent:
        return ops.mla_attention(query[None], *pools, plan, RANK, 0.2)[0]
    return ops.paged_attention(query[None], pools, plan, Scores(0.2, sliding, softcap))[0]


@pytest.mark.parametrize("prompt", [False, True], ids=["window", "prompt"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["torch", "triton"])
def test_rows_do_not_meet_what_they_do_not_see(form: str, kind: str, prompt: bool, device: str) -> None:
    ops = load_kernels(form)
    clean = attended(ops, kind, prompt, "value", None, device)
    assert clean.isfinite().all()
    for side, bad in (("value", math.inf), ("value", math.nan), ("key", -math.inf)):
        found = attended(ops, kind, prompt, side, bad, device)
        assert torch.equal(found[:WILD], clean[:WILD]), (side, bad)
        assert found[WILD:].isnan().all(), (side, bad)
