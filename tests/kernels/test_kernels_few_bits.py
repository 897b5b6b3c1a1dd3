"""Products with weights in codes: by every set of instructions, any number of rows alike."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.linear.few_bits import GroupedWeight, decoded, grouped_linear, paired, unpaired
from spd.kernels.native.library import Ending, NativeLibrary
from tests.kernels.forms import assert_rounded, needs_compiled, noise

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
    packed = native.pack_codes(weight)
    scores = native.linear(x, packed, None, Ending.FLOAT32)
    torch.testing.assert_close(scores.double(), plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))
    assert_rounded(native.linear(x, packed, bias), plain + bias)
    assert_rounded(grouped_linear(x, weight, bias), plain + bias)
    if width % 2 == 0:
        gate, up = plain.chunk(2, dim=-1)
        gated = native.pack_codes(weight, gated=True)
        assert_rounded(native.linear(x, gated, None, Ending.SILU), F.silu(gate) * up)


@needs_compiled
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_a_product_in_any_company(native: NativeLibrary, case: tuple) -> None:
    """The same bits for 1 to 300 rows, wherever a row stands, with any number of threads."""
    weight = drawn(*case)
    packed, depth = native.pack_codes(weight), weight.shape[1]
    x = noise(300, depth).to(native.dtype)

    def scores(rows: Tensor) -> Tensor:
        return native.linear(rows, packed, None, Ending.FLOAT32)

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


@needs_compiled
@pytest.mark.parametrize("kind", ["int4", "e2m1", "int8"])
def test_experts(native: NativeLibrary, kind: str) -> None:
    """As experts of the same numbers would make it."""
    gate_up, down = drawn(kind, 128, 64, 32, kind == "int4", count=3), drawn(kind, 64, 64, 32, False, count=3)
    x, stream = noise(9, 64).to(native.dtype), noise(9, 64, seed=4).to(native.dtype)
    ids = torch.arange(18).view(9, 2) * 5 % 3
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    made = native.experts(
        x, ids, weights, native.pack_codes(gate_up, gated=True), native.pack_codes(down), stream
    )
    right = stream.double()
    for row in range(9):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (x[row].double() @ gate_up.expert(expert).plain(torch.float64).t()).chunk(2)
            inner = (F.silu(gate) * up).to(native.dtype).double()
            right[row] += weight * (inner @ down.expert(expert).plain(torch.float64).t())
    torch.testing.assert_close(made.double(), right, rtol=0.02, atol=0.02 * float(right.abs().max()))
