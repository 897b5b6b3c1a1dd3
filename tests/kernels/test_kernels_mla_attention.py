"""Latent attention over pages: what is kept, and attention in the latent space, against float64."""

from __future__ import annotations

import pytest
import torch

from spd.kernels.attention.paged_attention import KV_BLOCK, AttentionHeads, Windows, plan_attention
from spd.kernels.attention.rotary_store import RotatedRows
from spd.kernels.latent.mla_attention import head_linear, latent_store, mla_attention

RANK, ROPE, HEADS, PAGE = 24, 8, 5, 64


@pytest.mark.parametrize("gathered", [False, True])
def test_what_is_kept(gathered: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(6, HEADS, ROPE, generator=generator)
    latent = torch.randn(6, RANK + ROPE, generator=generator)
    angles = torch.arange(40.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.02])
    cos, sin = torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1)
    norm, positions = torch.rand(RANK, generator=generator) + 0.5, torch.tensor([0, 3, 39, 4, 5, 6])
    pages = torch.full((3, PAGE, RANK + ROPE), 7.0)
    slots = torch.tensor([70, 1, 0, 191, 3, 64])
    tables = (cos[positions], sin[positions], None) if gathered else (cos, sin, positions)
    turned = latent_store(query, latent, RotatedRows(*tables, slots), norm, 1e-6, pages)

    def rotated(x: torch.Tensor, row: int) -> torch.Tensor:
        pairs = torch.view_as_complex(torch.stack((x[..., :4], x[..., 4:]), -1).double())
        moved = pairs * torch.polar(torch.ones(4), angles[positions[row]]).to(torch.complex128)
        return torch.cat((moved.real, moved.imag), -1)

    flat = pages.flatten(0, 1)
    for row, slot in enumerate(slots.tolist()):
        vector = latent[row, :RANK].double()
        normed = vector / (vector.square().mean() + 1e-6).sqrt() * norm
        torch.testing.assert_close(flat[slot, :RANK].double(), normed, atol=1e-5, rtol=0)
        expected = rotated(latent[row, RANK:], row)
        torch.testing.assert_close(flat[slot, RANK:].double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(turned[row].double(), rotated(query[row], row), atol=1e-5, rtol=0)
    others = [slot for slot in range(3 * PAGE) if slot not in slots.tolist()]
    assert bool((flat[others] == 7).all())


def test_each_head_has_its_own_matrix() -> None:
    x, weight = torch.randn(7, HEADS, 6), torch.randn(HEADS, 6, 9)
    expected = torch.stack([x[:, head] @ weight[head] for head in range(HEADS)], dim=1)
    torch.testing.assert_close(head_linear(x, weight), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_the_latent_space(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    size, blocks = RANK + ROPE, KV_BLOCK // PAGE
    pages = torch.randn(3 + 2 * blocks, PAGE, size, generator=generator).to(dtype)
    query = torch.randn(2, 4, HEADS, size, generator=generator).to(dtype)
    table = torch.stack((torch.arange(3, 3 + blocks), torch.randperm(blocks, generator=generator) + 3))
    positions = torch.tensor([[10, 11, 12, 13], [200, 201, 202, 203]])
    valid = torch.ones(2, 4, dtype=torch.bool)
    windows = Windows(positions, valid, table, [KV_BLOCK, KV_BLOCK], [3, None])
    plan = plan_attention(windows, AttentionHeads(HEADS, 1, size), PAGE, dtype)
    found = mla_attention(query, pages, plan, RANK, 0.31)
    assert found.shape == (2, 4, HEADS, RANK)
    for slot in range(2):
        kept = pages[table[slot]].flatten(0, 1).double()
        for row in range(4):
            seen = kept[: int(positions[slot, row]) + 1]
            scores = (query[slot, row].double() @ seen.T * 0.31).softmax(-1)
            error = (found[slot, row].double() - scores @ seen[:, :RANK]).abs().max()
            assert error < (1e-5 if dtype == torch.float32 else 0.02)
