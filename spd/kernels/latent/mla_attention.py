"""Latent attention over pages, absorbed: every head attends the same small vectors.

What is kept of a position is one row of a pool [P, page, L + R]: L latent values, normed, and R values of a
key that all heads share, rotated. A query head comes in the same L + R dimensions: its own key matrix has
been absorbed by it. What comes out are L values a head, of which its value matrix makes the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionPlan, Scores, paged_attention
from spd.kernels.attention.rotary_store import RotatedRows, apply_rotary, tamed
from spd.kernels.linear.norm_gate import rms_norm


def latent_store(
    query: Tensor, latent: Tensor, rows: RotatedRows, norm: Tensor, epsilon: float, pages: Tensor
) -> Tensor:
    """Norm and rotate rows of latent [T, L + R] into the pool; rotate query [T, H, R], R even, and return it.

    norm [L]: the scale of the latent values' norm, with epsilon. pages [P, page, L + R] are written in place,
    `tamed`. Of rows that share a slot, one wins, whichever.
    """
    rank = norm.shape[0]
    both = torch.cat((query, latent[:, None, rank:]), dim=1)
    turned = apply_rotary(both, *rows.own()).to(query.dtype)
    key, value = tamed(turned[:, -1], rms_norm(latent[:, :rank], norm, epsilon))
    kept = torch.cat((value, key), dim=-1)
    pages.flatten(0, 1).index_copy_(0, rows.kv_slots, kept)
    return turned[:, :-1]


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Each head's own product: x [T, H, A] by weight [H, A, B] to [T, H, B]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def mla_attention(
    query: Tensor, pages: Tensor, plan: AttentionPlan, rank: int, scale: float
) -> Tensor:
    """Attend windows query [S, Q, H, L + R] to the pool [P, page, L + R]; returns [S, Q, H, L], L = rank.

    plan: of `plan_attention` for one KV head of size L + R. A row sees the positions up to its own; a slot
    without valid rows gives zeros. Source: DeepSeek-V2 (2405.04434), section 2.1.
    """
    pool = pages.unsqueeze(2)  # its rows are keys and, with R columns that are not read, values
    return paged_attention(query, (pool, pool), plan, Scores(scale))[..., :rank]
