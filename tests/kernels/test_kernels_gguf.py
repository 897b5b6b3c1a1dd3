"""Weights as GGUF's blocks hold them: their values, and kernels' products of their codes."""

from __future__ import annotations

import math

import pytest
import torch

from spd.formats.gguf.block_types import TYPES_BY_NAME
from spd.kernels.capabilities import CodeKind
from spd.kernels.dispatch import load_kernels
from spd.kernels.linear import tiled_weight
from spd.kernels.linear.few_bits import StackedWeight
from spd.kernels.linear.group_rounding import quantize_groups
from spd.kernels.linear.skinny_linear import Norm
from spd.kernels.linear.tiled_weight import StackedTiles, tile_weight
from spd.kernels.native.library import NativeKernels
from spd.kernels.native.packed import FLOAT32, ROUNDED, epilogue_of
from spd.runtime.load.gguf_blocks import DEQUANTIZERS
from spd.runtime.models.gguf_forms import FORMS
from tests.kernels.forms import (
    ACTS,
    apply_activation,
    assert_rounded,
    needs_compiled,
    noise,
    normal,
)
from tests.kernels.gguf_cases import drawn_blocks, grouped

SIZES = [(96, 512), (33, 768)]
MOST_BYTES = 1.04
"""Of a packed matrix, to those of the file."""


@pytest.mark.parametrize("name", FORMS)
def test_codes_mean_what_blocks_mean(name: str) -> None:
    """Bit for bit, minus zero aside."""
    blocks = drawn_blocks(name, 64, 768)
    expected = DEQUANTIZERS[name](blocks).view(64, 768)
    assert torch.equal(grouped(name, blocks, 64).plain(torch.float32), expected)


@pytest.mark.parametrize("name", FORMS)
def test_packed_matrices_take_little_more_than_the_file(name: str) -> None:
    kind = TYPES_BY_NAME[name]
    assert FORMS[name].count_bytes((64, 1024)) <= MOST_BYTES * 64 * kind.row_bytes(1024)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("columns", [256, 768, 1536])
def test_tiles_mean_what_blocks_mean(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take what was planned, for one matrix and for experts', made in strips of rows."""
    blocks = drawn_blocks(name, 12, columns)
    expected = DEQUANTIZERS[name](blocks).view(12, columns)
    monkeypatch.setattr(tiled_weight, "STRIP_VALUES", 5 * columns)
    weight = grouped(name, blocks, 12)
    tiles = tile_weight(weight)
    assert torch.equal(tiles.plain(torch.float32), expected)
    assert sum(part.nbytes for part in tiles.tensors) == FORMS[name].count_bytes((12, columns))
    stacked = tile_weight(weight.as_experts(3))
    assert torch.equal(stacked.plain(torch.float32), expected.view(3, 4, columns))


@pytest.mark.parametrize(("name", "columns"), [("Q4_1", 96), ("Q5_0", 160), ("Q8_0", 352)])
def test_tiles_of_steps_that_columns_do_not_fill_mean_what_blocks_mean(
    name: str, columns: int
) -> None:
    blocks = drawn_blocks(name, 5, columns)
    tiles = tile_weight(grouped(name, blocks, 5))
    assert torch.equal(tiles.plain(torch.float32), DEQUANTIZERS[name](blocks).view(5, columns))
    assert sum(part.nbytes for part in tiles.tensors) <= FORMS[name].count_bytes((5, columns))


@pytest.mark.parametrize("name", FORMS)
def test_triton_looks_rows_up_in_tiles(name: str) -> None:
    """Values are those of blocks bit for bit, each rounded once; exponents of all sizes."""
    pytest.importorskip("triton")
    kernels = load_kernels("triton")
    blocks = drawn_blocks(name, 100, 768)
    if name == "MXFP4":
        blocks[:, 0] = torch.arange(len(blocks)) % 253
    table = tile_weight(grouped(name, blocks, 100))
    ids = torch.tensor([99, 0, 31, 32, 16, 99])
    expected = DEQUANTIZERS[name](blocks).view(100, 768)[ids]
    for form in (kernels, load_kernels("torch")):
        for dtype in (torch.float32, torch.float16):
            assert torch.equal(form.code_rows(ids, table, dtype), expected.to(dtype))


def test_triton_multiplies_stacked_matrices_one_by_one() -> None:
    """Each piece has the bits that it has alone, with its part of the bias; gates too."""
    pytest.importorskip("triton")
    ops = load_kernels("triton")
    sizes = {"Q4_K": 20, "Q6_K": 12, "Q8_0": 8}
    pieces = [
        tile_weight(grouped(name, drawn_blocks(name, rows, 256), rows))
        for name, rows in sizes.items()
    ]
    stack = StackedTiles(tuple(pieces))
    x = normal(3, 256, seed=1)
    bias = normal(40, seed=2)
    norm = Norm(x.square().sum(1, keepdim=True), 1e-6)
    result = ops.linear(x, stack, bias, None, norm)[0]
    first = 0
    for piece in pieces:
        columns = slice(first, first + piece.shape[0])
        first = columns.stop
        alone = ops.linear(x, piece, bias[columns], None, norm)[0]
        assert torch.equal(result[:, columns], alone)
    expected = load_kernels("torch").norm_gate_up(
        x=x, weight=stack, bias=bias, workspace=None, norm=norm
    )
    opened = ops.norm_gate_up(x=x, weight=stack, bias=bias, workspace=None, norm=norm)
    torch.testing.assert_close(opened, expected, rtol=1e-4, atol=1e-3)


@needs_compiled
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_equal_their_definition(
    native: NativeKernels, name: str, size: tuple[int, int]
) -> None:
    """Within the bound of float32 sums, with norms, residuals and gates; packed as large as was
    planned."""
    rows, columns = size
    weight = grouped(name, drawn_blocks(name, rows, columns), rows)
    packed = native.pack(weight)
    if rows % 32 == 0:
        stored_bytes = packed.tiles.nbytes + sum(
            part.nbytes for part in packed.quant_parameters.values()
        )
        assert stored_bytes == FORMS[name].count_bytes((rows, columns))
    wide = weight.plain(torch.float64).t()
    x = noise(47, columns).to(native.dtype)
    scores = native.packed_linear(x, packed, None, FLOAT32).double()
    bound = 2.0**-18 * (x.double().abs() @ wide.abs())
    assert ((scores - x.double() @ wide).abs() <= bound).all()
    residual = noise(47, rows).to(native.dtype)
    result = native.packed_linear(x, packed, None, residual=residual)
    assert_rounded(result, x.double() @ wide + residual.double())
    if rows % 2 == 0:
        act = next(activation for activation in ACTS if activation.gated)
        gated = native.packed_linear(x, native.pack(weight, gated=True), None, epilogue_of(act))
        assert_rounded(gated, apply_activation(x.double() @ wide, act))


@needs_compiled
@pytest.mark.parametrize("name", FORMS)
def test_a_row_has_the_same_bits_in_any_batch(native: NativeKernels, name: str) -> None:
    """The same bits for 1 to 70 rows, wherever a row stands, whatever beside it."""
    weight = grouped(name, drawn_blocks(name, 96, 512), 96)
    packed = native.pack(weight)
    x = noise(70, 512).to(native.dtype)
    norm = noise(512).float()

    def product(rows: torch.Tensor) -> torch.Tensor:
        return native.packed_linear(rows, packed, None, FLOAT32, norm=norm, epsilon=1e-6)

    all_rows = product(x)
    for count in (1, 2, 5, 8, 15, 17, 33, 69):
        for first in (0, 1, 70 - count):
            row_slice = slice(first, first + count)
            assert torch.equal(product(x[row_slice]), all_rows[row_slice]), (count, first)
    wild = x.clone()
    wild[::2] = float("nan")
    assert torch.equal(product(wild)[1::2], all_rows[1::2])


@needs_compiled
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_a_scale_that_is_not_finite_shows(native: NativeKernels, name: str, number: float) -> None:
    """In a product's row alone, and in the row that is looked up."""
    weight = grouped(name, drawn_blocks(name, 32, 512), 32)
    floats = weight.scales if weight.factors is None else weight.factors
    floats[5, 1] = number
    packed = native.pack(weight)
    for count in (1, 20):
        result = native.packed_linear(noise(count, 512).to(native.dtype), packed, None, FLOAT32)
        assert not result[:, 5].isfinite().any()
        assert result[:, :5].isfinite().all()
    assert not native.packed_rows(packed, torch.tensor([5])).isfinite().all()


@needs_compiled
@pytest.mark.parametrize("name", FORMS)
def test_rows_are_looked_up_in_a_packed_matrix(native: NativeKernels, name: str) -> None:
    weight = grouped(name, drawn_blocks(name, 100, 768), 100)
    ids = torch.tensor([99, 0, 31, 32, 16, 15, 63, 99])
    expected = weight.plain(torch.float32)[ids].to(native.dtype)
    assert torch.equal(native.packed_rows(native.pack(weight), ids), expected)


@needs_compiled
def test_stacked_matrices_of_different_types_are_multiplied(native: NativeKernels) -> None:
    """Each piece is multiplied as it is alone, with its part of what is added."""
    sizes = {"Q4_K": 80, "Q6_K": 48, "Q8_0": 7}
    pieces = [grouped(name, drawn_blocks(name, rows, 512), rows) for name, rows in sizes.items()]
    packed = native.pack(StackedWeight(tuple(pieces)))
    x = noise(19, 512).to(native.dtype)
    bias = noise(135).float()
    residual = noise(19, 135).to(native.dtype)
    result = native.packed_linear(x, packed, bias, ROUNDED, residual=residual)
    first = 0
    for piece in pieces:
        columns = slice(first, first + piece.shape[0])
        first = columns.stop
        alone = native.packed_linear(
            x,
            native.pack(piece),
            bias[columns].contiguous(),
            residual=residual[:, columns].contiguous(),
        )
        assert torch.equal(result[:, columns], alone)


ROUNDED_KINDS: tuple[CodeKind, ...] = ("iq4", "int5", "int6", "int8")


@needs_compiled
@pytest.mark.parametrize("kind", ROUNDED_KINDS)
def test_what_is_rounded_at_load_is_multiplied_and_looked_up(
    native: NativeKernels, kind: CodeKind
) -> None:
    """Cover six bits with a scale for 32 columns, which no type of GGUF has."""
    weight = quantize_groups(normal(70, 288, seed=1), kind)
    packed = native.pack(weight)
    wide = weight.plain(torch.float64).t()
    x = noise(18, 288).to(native.dtype)
    for rows in (x, x[:1]):
        scores = native.packed_linear(rows, packed, None, FLOAT32).double()
        bound = 2.0**-18 * (rows.double().abs() @ wide.abs())
        assert ((scores - rows.double() @ wide).abs() <= bound).all()
    ids = torch.tensor([69, 0, 31])
    assert torch.equal(native.packed_rows(packed, ids), weight.plain(native.dtype)[ids])


@pytest.mark.parametrize("kind", ROUNDED_KINDS)
def test_triton_multiplies_what_is_rounded_at_load(kind: CodeKind) -> None:
    pytest.importorskip("triton")
    weight = quantize_groups(normal(20, 288, seed=1), kind)
    tiled = tile_weight(weight)
    assert torch.equal(tiled.plain(torch.float32), weight.plain(torch.float32))
    x = normal(3, 288, seed=2)
    norm = Norm(x.square().sum(1, keepdim=True), 1e-6)
    result = load_kernels("triton").linear(x, tiled, None, None, norm)[0]
    expected = load_kernels("torch").linear(x, tiled, None, None, norm)[0]
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-3)
