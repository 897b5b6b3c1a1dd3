"""A later draft's key or value that is not finite: who does not see it keeps its bits, who does is
NaN."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionHeads, AttentionParams, Windows
from spd.kernels.attention.rotary_store import RotatedRows
from tests.kernels.forms import Form, normal, parametrize_forms

ROWS = 41
WINDOW = 4
WILD = 2
"""Positions in all, of which the last ones are a window; the row of it that is not finite."""
HEADS = 4
KV_HEADS = 2
SIZE = 16
RANK = 32
KINDS: dict[str, Any] = {"plain": (None, None), "sliding": (9, None), "capped": (None, 2.0)}
KINDS["latent"] = (None, None)


def attended(form: Form, kind: str, side: str, bad: float | None) -> list[Tensor]:
    """Return the last rows, as a window and as a prompt, with one stored key or value not
    finite."""
    ops = form.ops
    device = form.device
    dtype = form.dtypes[0]
    page = 64 if form.native else 16
    latent = kind == "latent"
    sliding, softcap = KINDS[kind]
    turn = torch.rand(ROWS, SIZE, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    positions = torch.arange(ROWS, device=device)
    slots = torch.arange(page, page + ROWS, device=device)
    table = torch.arange(1, 4, device=device)[None]
    turning = RotatedRows(turn, turn, positions, slots)
    shapes: list[tuple[int, ...]]
    if latent:
        stored = normal(ROWS, RANK + SIZE, seed=1)
        query = normal(ROWS, HEADS, RANK + SIZE, seed=2)
        where = stored[:, 5:6] if side == "value" else stored[:, RANK + 3 : RANK + 4]
        heads = AttentionHeads(HEADS, 1, RANK + SIZE)
        shapes = [(4, page, RANK + SIZE)]
    else:
        stored = normal(ROWS, HEADS + 2 * KV_HEADS, SIZE, seed=1)
        where = stored[:, HEADS + KV_HEADS * (side == "value") :, 3][:, :KV_HEADS]
        heads = AttentionHeads(HEADS, KV_HEADS, SIZE, sliding=(sliding,))
        shapes = [(4, page, KV_HEADS, SIZE)] * 2
    pools = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
    if bad is not None:
        where[ROWS - WINDOW + WILD] = bad
    stored = stored.flatten(1).to(device, dtype)
    start = ROWS - WINDOW
    seen = torch.ones(1, WINDOW, dtype=torch.bool, device=device)
    windows = Windows(positions[None, start:], seen, table, (48,), (None,))
    plan = ops.plan_attention(windows, heads, page, dtype)
    scores = AttentionParams(0.2, sliding, softcap)
    prompt = ops.plan_attention(replace(windows, chunk_start=start), heads, page, dtype)
    if latent:
        query = query.to(device, dtype)
        norm = torch.ones(RANK, device=device, dtype=dtype)
        rotated = ops.latent_store(
            query=query[..., RANK:].contiguous(),
            latent=stored,
            rows=turning,
            norm=norm,
            epsilon=1e-5,
            pages=pools[0],
        )
        query = torch.cat((query[..., :RANK], rotated), -1)[start:]
        attend_latent = partial(ops.mla_attention, query[None], pools[0], rank=RANK, scale=0.2)
        return [attend_latent(plan=plan)[0], attend_latent(plan=prompt)[0]]
    query = ops.rotary_store(
        qkv=stored, rows=turning, qk_weight=None, epsilon=1e-5, pools=pools, num_heads=HEADS
    )[start:].contiguous()
    window = ops.paged_attention(query[None], pools, plan, scores)[0]
    return [window, ops.paged_attention(query[None], pools, prompt, scores)[0]]


@pytest.mark.parametrize(
    ("form", "kind"),
    parametrize_forms([(kind,) for kind in KINDS], (3,)),
    indirect=["form"],
)
def test_rows_do_not_meet_what_they_do_not_see(form: Form, kind: str) -> None:
    both = attended(form, kind, "value", None)
    assert all(clean.isfinite().all() for clean in both)
    for side, bad in (("value", math.inf), ("value", math.nan), ("key", -math.inf)):
        for result, clean in zip(attended(form, kind, side, bad), both, strict=True):
            assert torch.equal(result[:WILD], clean[:WILD]), (side, bad)
            if form.native and side == "key":  # scores of minus infinity count for nothing
                assert not torch.equal(result[WILD:], clean[WILD:])
            elif form.native:  # in the head that sees it
                assert not result[WILD:].isfinite().all(-1).any(), (side, bad)
            else:
                assert result[WILD:].isnan().all(), (side, bad)
