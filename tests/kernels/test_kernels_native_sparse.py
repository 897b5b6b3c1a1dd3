"""The C kernels of latent attention and of experts against torch's, and their rows in any company."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from spd.kernels.attention.paged_attention import AttentionHeads, Windows
from spd.kernels.attention.rotary_store import RotatedRows
from spd.kernels.experts import moe
from spd.kernels.latent import mla_attention
from spd.kernels.native.build import library_path
from spd.kernels.native.library import NativeLibrary
from tests.kernels.native_cases import PAGE, ROUNDED, assert_rounded, needs_compiled, noise

pytestmark = needs_compiled


@pytest.mark.parametrize(
    ("heads", "rank", "turned", "still"), [(4, 128, 32, 32), (3, 40, 8, 24), (16, 512, 64, 128)]
)
def test_latents(native: NativeLibrary, heads: int, rank: int, turned: int, still: int) -> None:
    """Store, absorb, attend, and up again: strided as the layer cuts them; rows alone and together."""
    rows, context = 9, 200
    positions = torch.arange(context - rows, context)
    cut = noise(rows, heads * (still + turned) + rank + turned)
    query = cut[:, : -(rank + turned)].reshape(rows, heads, still + turned)
    latent = cut[:, -(rank + turned) :]
    angles = torch.rand(context, turned // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos, sin = angles.cos().repeat(1, 2).bfloat16(), angles.sin()
    sin = torch.cat((-sin, sin), -1).bfloat16()
    norm, scale = noise(rank), (still + turned) ** -0.5
    table = torch.tensor([5, 1, 4, 2])
    pages = torch.full((6, PAGE, rank + turned), float("nan")).bfloat16()
    pages[table] = noise(4, PAGE, rank + turned)
    places = table[positions // PAGE] * PAGE + positions % PAGE
    wide = pages.double()
    turning = RotatedRows(cos.double(), sin.double(), positions, places)
    exact = mla_attention.latent_store(
        query[..., still:].double(), latent.double(), turning, norm.double(), 1e-6, wide
    )
    turning = RotatedRows(cos, sin, positions, places)
    found = native.latent_store(query[..., still:], latent, turning, norm, 1e-6, pages)
    assert_rounded(found, exact)
    assert_rounded(pages[table], wide[table])
    assert pages[[0, 3]].isnan().all()

    weight = noise(heads, still, rank, seed=2)
    packed = native.pack_heads(weight)
    absorbed = native.head_linear(query[..., :still], packed)
    assert_rounded(absorbed, mla_attention.head_linear(query[..., :still].double(), weight.double()))
    assert torch.equal(native.head_linear(query[3:4, :, :still], packed), absorbed[3:4])

    whole = torch.cat((absorbed * 0.1, found), -1).contiguous()
    windows = Windows(positions[None], positions[None] >= 0, table[None], [], [])
    plan = native.plan_attention(windows, AttentionHeads(heads, 1, rank + turned), PAGE, torch.bfloat16)
    mixed = native.mla_attention(whole[None], pages, plan, rank, scale)
    expected = mla_attention.mla_prefill(whole.double(), pages.double(), table, context - rows, rank, scale)
    assert mixed.shape == (1, rows, heads, rank)
    assert (mixed[0].double() - expected).abs().max() <= 3 * ROUNDED * float(pages[table].abs().max())
    chunk = native.mla_prefill(whole, pages, table, context - rows, rank, scale)
    assert torch.equal(chunk, mixed[0])
    for r in range(rows):
        alone = native.mla_prefill(whole[r : r + 1], pages, table, int(positions[r]), rank, scale)
        assert torch.equal(alone[0], mixed[0, r])


RULES = [
    {"per_token": 2, "groups": 1, "groups_kept": 1, "group_best": 1, "sigmoid": False, "normalised": True},
    {"per_token": 3, "groups": 3, "groups_kept": 2, "group_best": 2, "sigmoid": True, "normalised": True},
    {"per_token": 4, "groups": 4, "groups_kept": 2, "group_best": 1, "sigmoid": False, "normalised": False},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule['groups']}-groups")
@pytest.mark.parametrize("corrected", [False, True])
def test_routing(native: NativeLibrary, rule: dict[str, int], corrected: bool) -> None:
    """The same experts in the same order, weights in float32; ties, infinities and NaN as torch's form."""
    x, weight = noise(40, 50), noise(12, 50, seed=3).float()
    correction = noise(12, seed=4).float() * 0.1 if corrected else None
    logits = native.router_logits(x, weight)
    torch.testing.assert_close(logits[:, 0], F.linear(x.float(), weight), rtol=1e-5, atol=1e-5)
    assert torch.equal(native.router_logits(x[7:8], weight), logits[7:8])
    logits[3] = 1.0
    logits[4, 0, 5] = float("nan")
    logits[5, 0, :6] = float("inf")
    logits[6, 0, 2:] = float("-inf")
    given = SimpleNamespace(**rule, scale=2.5)
    ids, weights = native.route(logits, correction, given)
    wanted, shares = moe.route(logits, correction, given)
    assert torch.equal(ids[7:], wanted[7:]) and torch.equal(ids[3:5], wanted[3:5])
    torch.testing.assert_close(weights[7:], shares[7:], rtol=1e-5, atol=1e-6)
    assert all(len(set(row)) == rule["per_token"] and set(row) <= set(range(12)) for row in ids.tolist())
    one, share = native.route(logits[9:10], correction, given)
    assert torch.equal(one[0], ids[9]) and torch.equal(share[0], weights[9])


@pytest.mark.parametrize(
    ("count", "per_token", "depth", "inner"), [(6, 3, 256, 64), (5, 2, 40, 24), (32, 8, 96, 32)]
)
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_experts(
    native: NativeLibrary, count: int, per_token: int, depth: int, inner: int, rows: int
) -> None:
    """The weighed sum of what they make of their rows, onto the stream; a row's bits whoever else comes."""
    x, stream = noise(rows, depth), noise(rows, depth, seed=1)
    gate_up, down = noise(count, 2 * inner, depth, seed=2) * 0.2, noise(count, depth, inner, seed=3) * 0.2
    order = torch.rand(rows, count, generator=torch.Generator().manual_seed(4))
    ids = order.argsort(-1)[:, :per_token].contiguous()
    weights = order[:, :per_token].contiguous()
    packed = native.pack(gate_up, gated=True), native.pack(down)
    found = native.experts(x, ids, weights, *packed, stream)
    exact = stream.double()
    for r in range(rows):
        for expert, share in zip(ids[r].tolist(), weights[r].double(), strict=True):
            gate, up = (gate_up[expert].double() @ x[r].double()).chunk(2)
            exact[r] = exact[r] + share * (down[expert].double() @ (F.silu(gate) * up))
    # What is inside is rounded before the second product.
    assert (found.double() - exact).abs().max() <= 3 * ROUNDED * exact.abs().max()
    for part in (slice(0, 1), slice(rows - 1, rows), slice(0, rows // 2 + 1)):
        some = native.experts(x[part], ids[part], weights[part], *packed, stream[part])
        assert torch.equal(some, found[part])
    same = torch.zeros_like(ids) + torch.arange(per_token)  # all rows to the same experts
    crowd = native.experts(x, same, weights, *packed, stream)
    alone = native.experts(x[:1], same[:1], weights[:1], *packed, stream[:1])
    assert torch.equal(crowd[:1], alone)


def test_the_place_of_the_library_may_have_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "a folder, with words"
    assert NativeLibrary(library_path(lambda: folder)).instructions
