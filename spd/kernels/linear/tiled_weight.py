"""Weights in codes as tiles of Triton's products read them: the order of codes and scales in memory.

Codes of four bits are two in a byte, in runs of columns: byte j of a run holds the column j in its
low half, and the one half a run behind it in the high half. So a kernel multiplies the halves of
its bytes as they are, and shuffles nothing. Of every four bytes of int4 the middle two are swapped:
a mask of a word leaves codes of neighbouring columns 16 bits apart, where a pair of numbers has its
lower bits (`unpack_triton`).

A weight whose scales are bytes or float16, as GGUF's blocks have them, is read `BLOCK_STEP` columns
at a time. Half a run is a group, or of codes with upper bits `UPPER_TILE` columns. Upper bits stand
apart: a byte holds those of one column in each of 8 or 4 neighbouring halves of runs, the first one
lowest. The scales of a step are one word, its minima another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.capabilities import CODE_BITS, CodeKind
from spd.kernels.launch import ceil_div
from spd.kernels.linear.few_bits import (
    DEFAULT_ZERO_POINTS,
    FOUR_BIT_KINDS,
    STRIP_VALUES,
    Codes,
    GroupedWeight,
    dequantize,
    pack_nibbles,
    unpack_nibbles,
)

BLOCK_STEP = 128
"""The columns that a product by GGUF's blocks multiplies at a time."""
UPPER_TILE = 16
"""The columns of half a run where codes have upper bits: 8 halves, a bit each, are a step."""
PAIRED_KINDS = (*FOUR_BIT_KINDS, "int5", "int6")
"""Kinds of which a tile's byte holds the lower four bits of two codes."""
SWAPPED_KINDS = ("int4",)
"""Kinds of which the middle two of every four bytes are swapped."""


@dataclass(frozen=True)
class TiledWeight(Codes):
    """A `GroupedWeight` [..., N, K] as tiles on a matrix unit read it, made by `tile_weight`.

    codes: uint8 [..., N, K]; or two of four bits in a byte, in whole steps of `step` columns. group
    0: codes are numbers, int8 [..., N, K], whose scales, of whole rows, meet the sums. upper: the
    fifth and sixth bits of codes, uint8.

    Of blocks, scales and minima are words of a step's, int32 or int64 [..., N, steps]. factors
    [..., N, K / `SUPER_BLOCK`]: float16, or int32 with the minima's in the upper half.
    """

    shape: torch.Size = torch.Size()
    upper: Tensor | None = None
    minima: Tensor | None = None
    factors: Tensor | None = None

    @property
    def step(self) -> int | None:
        """Return the columns that a tile multiplies at a time; None if any number is possible."""
        if self.is_blocked:
            return BLOCK_STEP
        return tile_step(self.kind, self.group, self.shape[-1]) if self.group else None

    @property
    def is_blocked(self) -> bool:
        """True if scales are words of a step's."""
        return not self.scales.is_floating_point()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that have a row for each row of the weight."""
        parts = (self.codes, self.upper, self.scales, self.zeros, self.minima, self.factors)
        return tuple(part for part in parts if part is not None)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., N, K] in a dtype, each value rounded once."""
        if self.is_blocked:
            return _untile_blocks(self).plain(dtype)
        codes = self.codes
        width = self.shape[-1]
        if not self.group:
            values = codes.float() * self.scales.float()
        else:
            if self.kind in PAIRED_KINDS:
                codes = _split_halves(self.kind, codes, tile_step(self.kind, self.group, width))
                codes = codes[..., :width]
            values = dequantize(self.kind, codes, self.scales, self.zeros, self.group)
        return (values if self.columns is None else values * self.columns.float()).to(dtype)


@dataclass(frozen=True)
class StackedTiles:
    """Weights [N, K] in tiles of different forms, concatenated by rows."""

    pieces: tuple[TiledWeight, ...]

    @property
    def shape(self) -> torch.Size:
        """Return (N, K)."""
        rows = sum(piece.shape[0] for piece in self.pieces)
        return torch.Size((rows, self.pieces[0].shape[1]))

    @property
    def device(self) -> torch.device:
        """Return the device of the codes."""
        return self.pieces[0].device

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in a dtype, each value rounded once."""
        return torch.cat([piece.plain(dtype) for piece in self.pieces])


def tile_step(kind: CodeKind, group: int, width: int) -> int:
    """Return the columns of a step: two halves of a row's groups, or one or two groups of bytes.

    A step has 256 columns where that many divide a row of `width`, for a step has its own cost.
    """
    most = 256 if width % 256 == 0 else 128
    return min(most, 2 * group)


def block_tile(kind: CodeKind, group: int) -> int:
    """Return the columns of blocks that a kernel multiplies by one product: half a run, or a group
    of whole bytes."""
    return UPPER_TILE if kind in ("int5", "int6") else group


def tile_weight(weight: GroupedWeight) -> TiledWeight:
    """Return a weight in tiles.

    Groups have 16, 32, 64, a multiple of 128, or all columns; those of blocks 16 or 32.
    """
    if weight.scales.dtype in (torch.uint8, torch.float16):
        return _tile_blocks(weight)
    width = weight.shape[-1]
    codes = weight.codes
    group = weight.group if weight.group < width else ceil_div(width, 128) * 128
    if weight.kind == "int8" and weight.zeros is None and weight.group >= width:
        codes = (codes ^ DEFAULT_ZERO_POINTS["int8"]).view(torch.int8)
        group = 0
    if weight.kind in PAIRED_KINDS:
        step = tile_step(weight.kind, group, width)
        parts = torch.split(codes.flatten(0, -2), max(1, STRIP_VALUES // width))
        strips = [_join_halves(weight.kind, unpack_nibbles(part), step, step) for part in parts]
        codes = torch.cat(strips).view(*codes.shape[:-1], -1)
    return TiledWeight(
        weight.kind, codes, weight.scales, weight.zeros, group, weight.columns, weight.shape
    )


def _swap_bytes(kind: CodeKind, codes: Tensor) -> Tensor:
    """Return bytes [..., B] with the middle two of every four swapped, where the kind has them
    so."""
    if kind not in SWAPPED_KINDS:
        return codes
    fours = codes.view(*codes.shape[:-1], -1, 2, 2)
    return fours.transpose(-1, -2).flatten(-3)


def _join_halves(kind: CodeKind, codes: Tensor, run: int, step: int) -> Tensor:
    """Return codes [N, K] of four bits as bytes of two halves of a run, in whole steps."""
    padded = F.pad(codes, (0, -codes.shape[1] % step))
    low, high = padded.view(codes.shape[0], -1, 2, run // 2).unbind(-2)
    return _swap_bytes(kind, (low | high << 4).flatten(-2))


def _split_halves(kind: CodeKind, codes: Tensor, run: int) -> Tensor:
    """Return codes [..., K] of bytes [..., K / 2] that hold two halves of a run."""
    codes = _swap_bytes(kind, codes)
    runs = codes.view(*codes.shape[:-1], -1, run // 2)
    return torch.stack((runs & 15, runs >> 4), dim=-2).flatten(-3)


def _tile_blocks(weight: GroupedWeight) -> TiledWeight:
    """Return a weight whose scales are bytes or float16 in tiles."""
    group = weight.group
    kind = weight.kind
    tile = block_tile(kind, group)
    codes = weight.codes
    upper = None
    if kind in PAIRED_KINDS:
        lower_strips = []
        upper_strips = []
        for part in torch.split(codes.flatten(0, -2), max(1, STRIP_VALUES // weight.shape[-1])):
            whole = unpack_nibbles(part) if kind in FOUR_BIT_KINDS else part
            lower_strips.append(_join_halves(kind, whole & 15, 2 * tile, BLOCK_STEP))
            if CODE_BITS[kind] > 4:
                upper_strips.append(_join_upper_bits(whole >> 4, tile, CODE_BITS[kind] - 4))
        leading = codes.shape[:-1]
        codes = torch.cat(lower_strips).view(*leading, -1)
        upper = torch.cat(upper_strips).view(*leading, -1) if upper_strips else None
    factors = weight.factors
    if factors is not None and weight.minimum_factors is not None:
        pairs = torch.stack((factors, weight.minimum_factors), dim=-1)
        factors = pairs.view(torch.int32).squeeze(-1)
    return TiledWeight(
        kind,
        codes,
        _join_words(weight.scales, group),
        None,
        group,
        weight.columns,
        weight.shape,
        upper=upper,
        minima=None if weight.minima is None else _join_words(weight.minima, group),
        factors=factors,
    )


def _join_upper_bits(bits: Tensor, tile: int, width: int) -> Tensor:
    """Return numbers [N, K] of `width` bits as bytes of those of 8 / width tiles, the first one
    lowest."""
    count = 8 // width
    padded = F.pad(bits, (0, -bits.shape[1] % (count * tile)))
    tiles = padded.view(bits.shape[0], -1, count, tile)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=bits.device)
    return (tiles << shifts[:, None]).sum(dim=2, dtype=torch.uint8).flatten(1)


def _join_words(numbers: Tensor, group: int) -> Tensor:
    """Return scales or minima [..., N, K / group] as a word for each step of columns."""
    per_step = BLOCK_STEP // group
    padded = F.pad(numbers, (0, -numbers.shape[-1] % per_step)).contiguous()
    return padded.view(torch.int32 if per_step * numbers.element_size() == 4 else torch.int64)


def _untile_blocks(weight: TiledWeight) -> GroupedWeight:
    """Return the weight of which `_tile_blocks` made this one."""
    kind = weight.kind
    group = weight.group
    width = weight.shape[-1]
    codes = weight.codes
    tile = block_tile(kind, group)
    if kind in PAIRED_KINDS:
        codes = _split_halves(kind, codes, 2 * tile)[..., :width]
    if weight.upper is not None:
        bits = CODE_BITS[kind] - 4
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        tiles = weight.upper.view(*weight.upper.shape[:-1], -1, 1, tile) >> shifts[:, None]
        codes = codes | (tiles & (1 << bits) - 1).flatten(-3)[..., :width] << 4
    factors = weight.factors
    minimum_factors = None
    dtype = torch.uint8 if weight.scales.dtype == torch.int32 or group < 32 else torch.float16
    if factors is not None and factors.dtype == torch.int32:
        pairs = factors.unsqueeze(-1).view(torch.float16)
        factors, minimum_factors = pairs.unbind(-1)
    groups_in_row = ceil_div(width, group)
    return GroupedWeight(
        kind,
        pack_nibbles(codes) if kind in FOUR_BIT_KINDS else codes,
        weight.scales.view(dtype)[..., :groups_in_row],
        None,
        group,
        weight.columns,
        minima=None if weight.minima is None else weight.minima.view(dtype)[..., :groups_in_row],
        factors=factors,
        minimum_factors=minimum_factors,
    )
