"""Products with rows rounded to eight bits: the rounding against NumPy, sums against integers, and
C against torch's form, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from spd.kernels.experts.moe import ExpertWeights, experts
from spd.kernels.linear.activation import SILU
from spd.kernels.linear.few_bits import GroupedWeight
from spd.kernels.linear.int8_activations import BLOCK, int8_linear, round_rows, whole_numbers
from spd.kernels.native.library import NativeKernels
from spd.kernels.native.packed import FLOAT32, ROUNDED, epilogue_of
from spd.runtime.models.gguf_forms import FORMS
from tests.kernels.forms import needs_compiled, noise, normal
from tests.kernels.gguf_cases import drawn_blocks, grouped
from tests.kernels.skinny_cases import CODED, drawn

CASES = [
    *(case for case in CODED if case[0] != "e4m3"),
    ("int8", 70, 96, 16, True),
    ("int4", 70, 96, 16, True),
    ("int8", 40, 200, 96, True),
    ("int4", 33, 2816, 64, False),  # more groups than are read at a time
    ("int8", 1, 1, 1, False),
]
"""Weights in codes, as in `CODED`; of the last ones groups end within a block or a row."""
WEIGHTS = [*CASES, *FORMS]


def rounding_weight(case: tuple[str, int, int, int, bool] | str) -> GroupedWeight:
    """Return a random weight of a case, or of a type of GGUF, whose rows are rounded."""
    if isinstance(case, str):
        weight = grouped(case, drawn_blocks(case, 70, 512), 70)
    else:
        weight = drawn(*case)
    return replace(weight, rounds_rows=True)


def numpy_round(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the whole numbers and scales of rows x float32 [T, B, 32], by the definition."""
    largest = np.abs(x).max(-1, keepdims=True)
    with np.errstate(all="ignore"):
        factor = np.float32(127) / largest
        numbers = np.rint((x * factor).astype(np.float32))
    is_zero = largest < np.float32(2.0**-100)
    numbers = np.where(is_zero, 0, numbers)
    return numbers, np.where(is_zero, 0, largest / np.float32(127))[..., 0]


def test_rows_are_rounded_as_numpy_rounds_them() -> None:
    """Also ties, zeros, numbers too small for a scale, and the largest ones."""
    x = torch.cat([normal(40, 96, seed=1) * 10.0 ** (n - 20) for n in range(40)])
    x[0, :32] = 0
    x[1, 32:64] = 1e-33
    x[2] = torch.arange(96) / 2 - 24  # halves: ties
    x[3, 5] = 3e38
    rounded = round_rows(x)
    numbers, scales = numpy_round(x.view(-1, 3, BLOCK).numpy())
    assert np.array_equal(rounded.numbers.numpy(), numbers)
    assert np.array_equal(rounded.scales.numpy(), scales)
    assert rounded.numbers.abs().max() == 127 and rounded.scales[0, 0] == rounded.scales[1, 1] == 0
    restored = (rounded.numbers * rounded.scales.unsqueeze(-1)).flatten(1)
    steps = rounded.scales.repeat_interleave(BLOCK, 1)
    assert ((restored - x).abs() <= steps * 0.5001 + 1e-30).all()


@pytest.mark.parametrize("wild", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_is_nan(wild: float) -> None:
    x = normal(2, 96, seed=2)
    x[1, 40] = wild
    scales = round_rows(x).scales
    assert scales.isnan().tolist() == [[False] * 3, [False, True, False]]


@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_a_product_is_a_sum_of_whole_numbers_scaled(case: tuple[str, int, int, int, bool]) -> None:
    """In float64 of the rounded rows: the result is as near as additions in float32 allow."""
    weight = rounding_weight(case)
    x = normal(7, weight.shape[1], seed=3)
    rows = round_rows(x)
    restored = (rows.numbers.double() * rows.scales.double().unsqueeze(-1)).flatten(1)
    exact = restored[:, : x.shape[1]] @ weight.plain(torch.float64).t()
    size = restored[:, : x.shape[1]].abs() @ weight.plain(torch.float64).abs().t()
    if weight.minima is not None:  # parts of opposite signs
        size = size * 8
    assert ((int8_linear(x, weight).double() - exact).abs() <= 2e-6 * size + 1e-30).all()


@pytest.mark.parametrize("case", [("int4", 19, 32, 32, True), ("int8", 19, 32, 32, False)], ids=str)
def test_sums_of_one_group_are_exact(case: tuple[str, int, int, int, bool]) -> None:
    weight = rounding_weight(case)
    x = normal(5, 32, seed=4)
    rows = round_rows(x)
    numbers, _ = whole_numbers(weight)
    sums = rows.numbers[:, 0].numpy().astype(np.int64) @ numbers.numpy().astype(np.int64).T
    both = rows.scales[:, :1].numpy() * weight.scales[:, 0].float().numpy()
    assert np.array_equal(int8_linear(x, weight).numpy(), sums.astype(np.float32) * both)


@needs_compiled
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_c_gives_the_bits_of_the_torch_form(
    native: NativeKernels, case: tuple[str, int, int, int, bool]
) -> None:
    """Whatever the numbers of rows, with each of the instructions."""
    weight = rounding_weight(case)
    packed = native.pack(weight)
    assert packed.rounds_rows
    bias = noise(weight.shape[0]).float()
    x = normal(64, weight.shape[1], seed=5).to(native.dtype)
    x[3] *= 1e4
    x[5, : weight.shape[1] // 2] = 0
    expected = int8_linear(x.float(), weight, bias)
    assert torch.equal(int8_linear(x, weight, bias), expected.to(native.dtype))
    for rows in (64, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 33):
        own = native.packed_linear(x[:rows], packed, bias, FLOAT32)
        assert torch.equal(own, expected[:rows]), rows
        last = native.packed_linear(x[64 - rows :], packed, bias, ROUNDED)
        assert torch.equal(last, expected[64 - rows :].to(native.dtype)), rows


@needs_compiled
@pytest.mark.parametrize("kind", ["int4", "int8", "e2m1", *FORMS])
def test_the_largest_sums_do_not_overflow(native: NativeKernels, kind: str) -> None:
    """Every byte as a code, and rows of which all elements are as large as can be."""
    weight = rounding_weight(kind if kind in FORMS else (kind, 256, 512, 64, kind != "e2m1"))
    levels = {"e2m1": 256, "iq4": 256, "mx4": 256, "int4": 256, "int5": 32, "int6": 64, "int8": 256}
    every = torch.arange(weight.shape[0]) % levels[weight.kind]
    every[::2] = levels[weight.kind] - 1
    weight = replace(
        weight, codes=every.to(torch.uint8)[:, None].expand(weight.codes.shape).contiguous()
    )
    signs = torch.stack([torch.ones(512), -torch.ones(512), torch.arange(512) % 2 * 2.0 - 1])
    x = (signs * 3.0).to(native.dtype)
    own = native.packed_linear(x, native.pack(weight), None, FLOAT32)
    assert torch.equal(own, int8_linear(x.float(), weight))


@needs_compiled
def test_a_row_has_the_same_bits_in_any_batch_and_by_any_number_of_threads(
    native: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a norm before and gates behind; a row that is not finite spoils no other."""
    weight = rounding_weight(("int4", 512, 256, 64, False))
    norm = noise(256).float()
    x = noise(70, 256).to(native.dtype)
    gated = native.pack(weight, gated=True)

    def product(rows: Tensor) -> Tensor:
        return native.packed_linear(rows, gated, None, epilogue_of(SILU), norm=norm, epsilon=1e-6)

    alone = torch.cat([product(x[i : i + 1]) for i in range(70)])
    for threads in (1, 2):
        monkeypatch.setattr(native, "threads", threads)
        for count in (2, 8, 11, 16, 64, 70):
            assert torch.equal(product(x[:count]), alone[:count]), (threads, count)
    x[9, 100] = torch.nan
    spoilt = product(x)
    assert spoilt[9].isnan().all() and torch.equal(spoilt[10:], alone[10:])


@needs_compiled
def test_a_norm_is_rounded_to_elements_before_it_is_rounded_to_eight_bits(
    native: NativeKernels,
) -> None:
    weight = rounding_weight(("int8", 48, 128, 128, False))
    norm = noise(128).float()
    x = noise(5, 128).to(native.dtype)
    normed = native.norm(x, norm, 1e-6)
    packed = native.pack(weight)
    own = native.packed_linear(x, packed, None, FLOAT32, norm=norm, epsilon=1e-6)
    assert torch.equal(own, native.packed_linear(normed, packed, None, FLOAT32))


@needs_compiled
def test_experts_round_their_rows(native: NativeKernels) -> None:
    """Results are nearer to torch's with rounded rows than with whole ones, and the same alone."""
    count, hidden, inner = 4, 128, 96
    gate_up = rounding_weight(("int4", count * 2 * inner, hidden, 64, False)).as_experts(count)
    down = rounding_weight(("int8", count * hidden, inner, 96, False)).as_experts(count)
    x = normal(33, hidden, seed=6).to(native.dtype)
    ids = torch.stack([torch.arange(33) % count, (torch.arange(33) + 1) % count], 1)
    weights = torch.rand(33, 2, generator=torch.Generator().manual_seed(7))
    packed = ExpertWeights(native.pack(gate_up, gated=True), native.pack(down))
    stream = torch.zeros_like(x)
    own, _ = native.experts(x, ids, weights, packed, stream)
    for i in (0, 9, 32):
        row = slice(i, i + 1)
        single, _ = native.experts(x[row], ids[row], weights[row], packed, stream[row])
        assert torch.equal(single, own[row])
    rounded, _ = experts(x.float(), ids, weights, ExpertWeights(gate_up, down))
    whole_weights = ExpertWeights(
        replace(gate_up, rounds_rows=False), replace(down, rounds_rows=False)
    )
    whole, _ = experts(x.float(), ids, weights, whole_weights)
    error = (own.float() - rounded).abs().mean()
    assert error < 0.5 * (own.float() - whole).abs().mean()
