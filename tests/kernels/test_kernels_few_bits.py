"""Weights in codes: their numbers and layouts, and the C kernels' products where numbers are
extreme."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from spd.kernels.linear import few_bits, tiled_weight
from spd.kernels.linear.group_rounding import quantize_groups
from spd.kernels.native.library import NativeKernels
from spd.kernels.native.packed import FLOAT32
from tests.kernels.forms import needs_compiled, noise, normal
from tests.kernels.skinny_cases import CODED, drawn

KINDS = ("int4", "int8", "e2m1", "e4m3")


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_a_bfloat16(kind: str) -> None:
    codes = torch.arange(16 if kind in ("int4", "e2m1") else 256).to(torch.uint8)
    values = few_bits.decode_codes(kind, codes)  # type: ignore[arg-type]
    values = values[values.isfinite()]
    assert (
        torch.equal(values, values.bfloat16().float()) and values.unique().numel() >= len(codes) - 3
    )
    if kind in ("int4", "e2m1"):
        assert torch.equal(few_bits.unpack_nibbles(few_bits.pack_nibbles(codes)), codes)


@pytest.mark.parametrize("case", [("int4", 70, 256, 64, True), *CODED], ids=str)
def test_tiles_hold_the_same_numbers(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made a few rows at a time, too."""
    weight = drawn(*case)
    values = weight.plain(torch.float32)
    for module in (few_bits, tiled_weight):
        monkeypatch.setattr(module, "STRIP_VALUES", 700)
    assert torch.equal(tiled_weight.tile_weight(weight).plain(torch.float32), values)


@needs_compiled
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_size_equal_their_definition(native: NativeKernels, kind: str) -> None:
    """Far from 1, zero, with elements far above the others: as exact as float32; infinity is not
    lost."""
    weight = drawn(kind, 96, 128, 32, False)
    x = noise(6, 128)
    x[1] *= 2.0**-60
    x[2] *= 2.0**60
    x[3] = 0
    x[4, ::7] *= 3000
    x[5, 9] = math.inf
    x = x.to(native.dtype)
    result = native.packed_linear(x, native.pack(weight), None, FLOAT32).double()
    numbers = weight.plain(torch.float64).t()
    off = (result - x.double() @ numbers)[:5].abs()
    size = (x.double().abs() @ numbers.abs())[:5]
    assert (off <= 2.0**-19 * size).all()
    assert not result[5].isfinite().any()


@needs_compiled
@pytest.mark.parametrize(("kind", "code"), [("int4", 0), ("int4", 15), ("e2m1", 7), ("e2m1", 15)])
@pytest.mark.parametrize("group", [16, 32, 64])
def test_largest_sums_are_exact(native: NativeKernels, kind: Any, code: int, group: int) -> None:
    """Equal codes and equal numbers, whose digits are the largest that there are."""
    codes = torch.full((32, 64), code | code << 4, dtype=torch.uint8)
    weight = few_bits.GroupedWeight(
        kind, codes, torch.ones(32, 128 // group).bfloat16(), None, group
    )
    x = torch.tensor([[1 + 2**-6], [-1 - 2**-6], [255 / 128]]).expand(3, 128).to(native.dtype)
    result = native.packed_linear(x, native.pack(weight), None, FLOAT32)
    assert torch.equal(result, few_bits.grouped_linear(x.float(), weight))


@needs_compiled
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_every_byte_is_its_number_at_every_depth(native: NativeKernels, rows: int) -> None:
    """Also the least one, -128, which quantizers seldom choose."""
    codes = torch.arange(256).to(torch.uint8)[:, None].expand(256, 32).contiguous()
    weight = few_bits.GroupedWeight("int8", codes, torch.ones(256, 1).bfloat16(), None, 32)
    packed = native.pack(weight)
    for depth in range(32):
        x = torch.zeros(rows, 32).to(native.dtype)
        x[:, depth] = 1
        result = native.packed_linear(x, packed, None, FLOAT32)
        assert torch.equal(result, (torch.arange(256.0) - 128).expand(rows, 256))


@needs_compiled
@pytest.mark.parametrize("group", [16, 32])
def test_what_is_not_finite_gives_the_same_alone(native: NativeKernels, group: int) -> None:
    """Numbers of another group, in the same step of the depth, do not meet it."""
    packed = native.pack(drawn("int8", 70, 96, group, True))
    x = noise(9, 96)
    x[0, 5] = math.inf
    x[3, 24] = -math.inf
    x[8, 40] = math.nan
    x = x.to(native.dtype)
    rows = native.packed_linear(x, packed, None, FLOAT32)
    for row in range(9):
        alone = native.packed_linear(x[row : row + 1], packed, None, FLOAT32)
        assert torch.equal(
            alone.nan_to_num(0.5, 1.5, 2.5), rows[row : row + 1].nan_to_num(0.5, 1.5, 2.5)
        )


def test_int8_is_within_half_a_step() -> None:
    wide = normal(33, 70, seed=4) * torch.exp2(torch.arange(33) - 16.0)[:, None]
    wide[5] = 0
    quantized = few_bits.quantize_int8(wide)
    assert ((quantized.plain(torch.float32) - wide).abs() <= 0.5001 * quantized.scales).all()
    numbers = tiled_weight.tile_weight(quantized).codes.int()
    assert numbers.abs().amax(1).tolist() == [127] * 5 + [0] + [127] * 27
    assert quantized.scales[5] == 1 and not numbers[5].any()
    half = few_bits.quantize_int8(torch.tensor([[127.0, 0.5, 1.5, -2.5]]))
    assert half.codes.tolist() == [[255, 128, 130, 126]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "rounded", [few_bits.quantize_int8, partial(quantize_groups, kind="iq4")], ids=["int8", "iq4"]
)
def test_what_is_not_finite_is_not_rounded_away(rounded: Any, value: float) -> None:
    weight = torch.ones(3, 32)
    weight[1, 7] = value
    plain = rounded(weight).plain(torch.float32)
    assert not plain[1].isfinite().any()
    assert plain[::2].isfinite().all()
