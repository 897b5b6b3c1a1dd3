"""A later draft's key or value that is not finite: who does not see it keeps its bits, who does is NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionHeads, Scores, Windows
from spd.kernels.attention.rotary_store import RotatedRows
from tests.kernels.forms import Form, normal

ROWS, WINDOW, WILD = 41, 4, 2
"""Positions in all, of which the last ones are a window; the row of it that is not finite."""
HEADS, KV_HEADS, SIZE, RANK = 4, 2, 16, 32
KINDS: dict[str, tuple[int | None, float | None]] = {
    "plain": (None, None),
    "sliding": (9, None),
    "capped": (None, 2.0),
    "latent": (None, None),
}


def attended(form: Form, kind: str, prompt: bool, side: str, bad: float | None) -> Tensor:
    """The window's rows, after all positions' keys and values were stored, one of them not finite."""
    ops, device, dtype, page = form.ops, form.device, form.dtypes[0], 64 if form.native else 16
    latent, (sliding, softcap) = kind == "latent", KINDS[kind]
    turn = torch.rand(ROWS, SIZE, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    positions, slots = torch.arange(ROWS, device=device), torch.arange(page, page + ROWS, device=device)
    table, turning = torch.arange(1, 4, device=device)[None], RotatedRows(turn, turn, positions, slots)
    if latent:
        kept, query = normal(ROWS, RANK + SIZE, seed=1), normal(ROWS, HEADS, RANK + SIZE, seed=2)
        where = kept[:, 5:6] if side == "value" else kept[:, RANK + 3 : RANK + 4]
        own, shapes = AttentionHeads(HEADS, 1, RANK + SIZE), [(4, page, RANK + SIZE)]
    else:
        kept = normal(ROWS, HEADS + 2 * KV_HEADS, SIZE, seed=1)
        where = kept[:, HEADS + KV_HEADS * (side == "value") :, 3][:, :KV_HEADS]
        own, shapes = (
            AttentionHeads(HEADS, KV_HEADS, SIZE, sliding=(sliding,)),
            [(4, page, KV_HEADS, SIZE)] * 2,
        )
    pools = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
    if bad is not None:
        where[ROWS - WINDOW + WILD] = bad
    kept = kept.flatten(1).to(device, dtype)
    if latent:
        query = query.to(device, dtype)
        norm = torch.ones(RANK, device=device, dtype=dtype)
        turned = ops.latent_store(query[..., RANK:].contiguous(), kept, turning, norm, 1e-5, *pools)
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
    plan = ops.plan_attention(windows, own, page, dtype)
    if latent:
        return ops.mla_attention(query[None], *pools, plan, RANK, 0.2)[0]
    return ops.paged_attention(query[None], pools, plan, Scores(0.2, sliding, softcap))[0]


@pytest.mark.parametrize("prompt", [False, True], ids=["window", "prompt"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_meet_what_they_do_not_see(form: Form, kind: str, prompt: bool) -> None:
    clean = attended(form, kind, prompt, "value", None)
    assert clean.isfinite().all()
    for side, bad in (("value", math.inf), ("value", math.nan), ("key", -math.inf)):
        found = attended(form, kind, prompt, side, bad)
        assert torch.equal(found[:WILD], clean[:WILD]), (side, bad)
        if form.native and side == "key":  # scores of minus infinity count for nothing
            assert not torch.equal(found[WILD:], clean[WILD:])
        elif form.native:  # in the head that sees it
            assert not found[WILD:].isfinite().all(-1).any(), (side, bad)
        else:
            assert found[WILD:].isnan().all(), (side, bad)
