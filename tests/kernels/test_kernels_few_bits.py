"""Products with weights in codes: by every set of instructions, any number of rows alike."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.experts import moe
from spd.kernels.linear import few_bits
from spd.kernels.linear import skinny_linear as reference
from spd.kernels.linear.activation import SILU
from spd.kernels.linear.few_bits import (
    CodeKind,
    GroupedWeight,
    decoded,
    grouped_linear,
    int8_rows,
    paired,
    tiled,
    unpaired,
)
from spd.kernels.linear.skinny_config import LinearConfig
from spd.kernels.linear.skinny_linear import Norm
from spd.kernels.native.library import FLOAT32, NativeLibrary, ending_of
from tests.kernels.forms import assert_rounded, near, needs_compiled, noise, normal
from tests.kernels.skinny_cases import Operands

KINDS = ("int4", "int8", "e2m1", "e4m3")
CASES = [
    *(("int4", 96, 128, group, zeros) for group in (32, 64) for zeros in (False, True)),
    ("int8", 96, 128, 64, True),
    *((kind, 70, 224, 224, False) for kind in KINDS),
    *(("e2m1", 70, 96, group, False) for group in (16, 32)),
    ("e2m1", 33, 48, 16, False),
    ("int4", 100, 1040, 1040, True),
    ("int8", 32, 256, 128, False),
    ("e4m3", 40, 200, 128, False),  # the last group partial
]


def drawn(
    kind: str, width: int, depth: int, group: int, zeros: bool, wide: bool = True, count: int = 0
) -> GroupedWeight:
    """A weight of every code, drawn from its sizes."""
    made = torch.Generator().manual_seed(width * depth + group)
    rows = width * max(1, count)
    most = 16 if kind in ("int4", "e2m1") else 256
    codes = torch.randint(0, most, (rows, depth), generator=made).to(torch.uint8)
    if kind == "e4m3":
        codes = torch.where(codes & 127 == 127, codes - 1, codes)
    groups = math.ceil(depth / group)
    scales = torch.rand(rows, groups, generator=made) * 0.02 + 0.001
    zero = torch.randint(0, most, (rows, groups), generator=made).to(torch.uint8)
    kept = paired(codes) if kind in ("int4", "e2m1") else codes
    scales = scales if wide else scales.bfloat16()
    whole = GroupedWeight(kind, kept, scales, zero if zeros else None, group)  # type: ignore[arg-type]
    return whole.stacked(count) if count else whole


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_a_bfloat16(kind: str) -> None:
    codes = torch.arange(16 if kind in ("int4", "e2m1") else 256).to(torch.uint8)
    made = decoded(kind, codes)  # type: ignore[arg-type]
    made = made[made.isfinite()]
    assert torch.equal(made, made.bfloat16().float()) and made.unique().numel() >= len(codes) - 3
    if kind in ("int4", "e2m1"):
        assert torch.equal(unpaired(paired(codes)), codes)


@needs_compiled
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(native: NativeLibrary, case: tuple, wide: bool) -> None:
    weight = drawn(*case, wide)
    width, depth = weight.shape
    x, bias = noise(47, depth).to(native.dtype), noise(width).float()
    plain = x.double() @ weight.plain(torch.float64).t()
    packed = native.pack(weight)
    scores = native.linear(x, packed, None, FLOAT32)
    torch.testing.assert_close(scores.double(), plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))
    assert_rounded(native.linear(x, packed, bias), plain + bias)
    assert_rounded(grouped_linear(x, weight, bias), plain + bias)
    if width % 2 == 0:
        gate, up = plain.chunk(2, dim=-1)
        gated = native.pack(weight, gated=True)
        assert_rounded(native.linear(x, gated, None, ending_of(SILU)), F.silu(gate) * up)


@needs_compiled
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_a_product_in_any_company(native: NativeLibrary, case: tuple) -> None:
    """The same bits for 1 to 300 rows, wherever a row stands, with any number of threads."""
    weight = drawn(*case)
    packed, depth = native.pack(weight), weight.shape[1]
    x = noise(300, depth).to(native.dtype)

    def scores(rows: Tensor) -> Tensor:
        return native.linear(rows, packed, None, FLOAT32)

    whole, usual = scores(x), native.threads
    for count in (1, 2, 5, 15, 16, 17, 32, 33, 64, 257):
        for first in (0, 5, 300 - count if count < 295 else 0):
            own = slice(first, first + count)
            assert torch.equal(scores(x[own]), whole[own] if first + count <= 300 else whole[first:]), count
    try:
        native.threads = 1 + usual % 2
        assert torch.equal(scores(x), whole)
    finally:
        native.threads = usual


TILED = [
    ("int4", 70, 256, 64, True),
    ("int4", 34, 320, 128, False),
    ("e2m1", 48, 80, 16, False),
    ("e2m1", 33, 160, 32, False),
    ("int4", 40, 136, 136, True),
    ("int8", 32, 128, 64, True),
    ("e4m3", 40, 200, 128, False),
]
"""Every kind and group, with halves of a step beyond K, parts of K, and a last group that is partial."""


@pytest.mark.parametrize("case", TILED, ids=str)
def test_tiled_products(case: tuple, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Triton's products by codes against float64, and a row's bits in any company."""
    twin = pytest.importorskip("spd.kernels.linear.skinny_linear_triton")
    kept = drawn(*case)
    assert torch.equal(tiled(kept).plain(torch.float32), kept.plain(torch.float32))
    for dtype in dtypes:
        o = Operands(*kept.shape, 17, dtype, device)
        factors = replace(kept.each(lambda part: part.to(device)), columns=o.scale)
        normed = (o.x.double() * torch.rsqrt(o.x.double().square().mean(-1, keepdim=True) + 1e-5)).cpu()
        plain = kept.plain(torch.float64)
        fed = plain * o.scale.double().cpu()
        weight, norm = tiled(factors), Norm(o.squares, 1e-5)
        found = twin.linear(o.x, weight, None, norm=norm)[0]
        near(found.cpu(), normed @ fed.T, reference.linear(o.x, weight, None, norm=norm)[0].cpu())
        for count in (1, 16):
            alone = twin.linear(o.x[:count], weight, None, norm=Norm(o.squares[:count], 1e-5))[0]
            assert torch.equal(alone, found[:count])
        if kept.shape[0] % 2 == 0:
            gate, up = (normed @ fed.T).chunk(2, dim=-1)
            made = reference.norm_gate_up(o.x, weight, None, None, norm).cpu()
            near(twin.norm_gate_up(o.x, weight, None, None, norm).cpu(), F.silu(gate) * up, made)
        bare = tiled(replace(factors, columns=None))
        split = LinearConfig(block_n=16, block_k=bare.step, split_k=2)
        y, _ = twin.linear(o.x, bare, o.bias, residual=o.residual, config=split)
        right = o.residual.double().cpu() + o.x.double().cpu() @ plain.T + o.bias.double().cpu()
        near(y.cpu(), right, reference.linear(o.x, bare, o.bias, residual=o.residual)[0].cpu())


def test_codes_are_laid_out_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = drawn("int4", 40, 96, 32, False, count=3)
    whole, made = tiled(kept), []
    monkeypatch.setattr(few_bits, "STRIP", 700)
    monkeypatch.setattr(few_bits, "unpaired", lambda codes: made.append(codes.shape[0]) or unpaired(codes))
    assert torch.equal(tiled(kept).codes, whole.codes) and max(made) == 7 and sum(made) == 120


@pytest.mark.parametrize("kind", ["int4", "e2m1"])
def test_tiled_experts(kind: str, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Triton's experts in codes are those of the same numbers."""
    twin = pytest.importorskip("spd.kernels.experts.moe_triton")
    gate_up, down = drawn(kind, 64, 64, 32, kind == "int4", count=3), drawn(kind, 64, 32, 32, False, count=3)
    x = noise(9, 64).to(device, dtypes[0])
    ids = (torch.arange(18).view(9, 2) * 5 % 3).to(device)
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(1)).to(device)
    both = [tiled(each.each(lambda part: part.to(device))) for each in (gate_up, down)]
    found = twin.experts(x, ids, weights, moe.ExpertWeights(*both))[0]
    wide = moe.ExpertWeights(*(each.plain(torch.float32) for each in both))
    right = moe.experts(x.float(), ids, weights, wide)[0]
    near(found.cpu(), right.double().cpu(), found.cpu(), slack=8)


@needs_compiled
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_size(native: NativeLibrary, kind: str) -> None:
    """Far from 1, zero, with elements far above the others: as exact as float32; infinity is not lost."""
    weight = drawn(kind, 96, 128, 32, False)
    x = noise(6, 128)
    x[1] *= 2.0**-60
    x[2] *= 2.0**60
    x[3] = 0
    x[4, ::7] *= 3000
    x[5, 9] = math.inf
    x = x.to(native.dtype)
    found = native.linear(x, native.pack(weight), None, FLOAT32).double()
    numbers = weight.plain(torch.float64).t()
    off, size = (found - x.double() @ numbers)[:5].abs(), (x.double().abs() @ numbers.abs())[:5]
    assert (off <= 2.0**-19 * size).all()
    assert not found[5].isfinite().any()


@needs_compiled
@pytest.mark.parametrize(("kind", "code"), [("int4", 0), ("int4", 15), ("e2m1", 7), ("e2m1", 15)])
@pytest.mark.parametrize("group", [16, 32, 64])
def test_largest_sums_are_exact(native: NativeLibrary, kind: CodeKind, code: int, group: int) -> None:
    """Equal codes and equal numbers, whose digits are the largest that there are."""
    codes = torch.full((32, 64), code | code << 4, dtype=torch.uint8)
    weight = GroupedWeight(kind, codes, torch.ones(32, 128 // group).bfloat16(), None, group)
    x = torch.tensor([[1 + 2**-6], [-1 - 2**-6], [255 / 128]]).expand(3, 128).to(native.dtype)
    found = native.linear(x, native.pack(weight), None, FLOAT32)
    assert torch.equal(found, grouped_linear(x.float(), weight))


@needs_compiled
@pytest.mark.parametrize("kind", ["int4", "e2m1", "int8"])
def test_experts(native: NativeLibrary, kind: str) -> None:
    """As experts of the same numbers would make it."""
    gate_up, down = drawn(kind, 128, 64, 32, kind == "int4", count=3), drawn(kind, 64, 64, 32, False, count=3)
    x, stream = noise(9, 64).to(native.dtype), noise(9, 64, seed=4).to(native.dtype)
    ids = torch.arange(18).view(9, 2) * 5 % 3
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    own = moe.ExpertWeights(native.pack(gate_up, gated=True), native.pack(down))
    made, _ = native.experts(x, ids, weights, own, stream)
    right = stream.double()
    for row in range(9):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (x[row].double() @ gate_up.expert(expert).plain(torch.float64).t()).chunk(2)
            inner = (F.silu(gate) * up).to(native.dtype).double()
            right[row] += weight * (inner @ down.expert(expert).plain(torch.float64).t())
    torch.testing.assert_close(made.double(), right, rtol=0.02, atol=0.02 * float(right.abs().max()))


def test_int8_is_within_half_a_step() -> None:
    wide = normal(33, 70, seed=4) * torch.exp2(torch.arange(33) - 16.0)[:, None]
    wide[5] = 0
    made = int8_rows(wide)
    assert ((made.plain(torch.float32) - wide).abs() <= 0.5001 * made.scales).all()
    numbers = tiled(made).codes.int()
    assert numbers.abs().amax(1).tolist() == [127] * 5 + [0] + [127] * 27
    assert made.scales[5] == 1 and not numbers[5].any()
    half = int8_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5]]))
    assert half.codes.tolist() == [[255, 128, 130, 126]]
