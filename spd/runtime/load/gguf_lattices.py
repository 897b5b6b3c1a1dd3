"""The values of GGUF's blocks of one to three bits, whose codes name points of lattices.

`gguf_lattices.bin` holds the lattices that the format defines, a point as the numbers of its coordinates'
levels: two bits each, four to a byte, or four bits, two to a byte, first ones low. Source: `ggml-common.h` of
ggml.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

FILE = Path(__file__).with_name("gguf_lattices.bin")
DELTA = 0.125
"""What points of IQ1 are moved by, up or down."""


@dataclass(frozen=True)
class Lattice:
    """Points of so many coordinates, each of one of the levels; `offset` is that of its first byte."""

    offset: int
    points: int
    coordinates: int
    levels: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Return the bits of a coordinate."""
        return 2 if len(self.levels) < 4 else 4

    @property
    def nbytes(self) -> int:
        """Return the bytes of all points."""
        return self.points * self.coordinates * self.bits // 8


_TWO = (8, 25, 43)
IQ2_XXS = Lattice(0, 256, 8, _TWO)
IQ2_XS = Lattice(512, 512, 8, _TWO)
IQ2_S = Lattice(1536, 1024, 8, _TWO)
IQ3_XXS = Lattice(3584, 256, 4, (4, 12, 20, 28, 36, 44, 52, 62))
IQ3_S = Lattice(4096, 512, 4, (1, 3, 5, 7, 9, 11, 13, 15))
IQ1 = Lattice(5120, 2048, 8, (-1, 0, 1))


@cache
def points_of(lattice: Lattice) -> Tensor:
    """Return a lattice's points: float32 [points, coordinates]."""
    data = FILE.read_bytes()[lattice.offset : lattice.offset + lattice.nbytes]
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    count = 8 // lattice.bits
    mask = (1 << lattice.bits) - 1
    codes = torch.stack([packed >> lattice.bits * at & mask for at in range(count)], dim=1)
    levels = torch.tensor(lattice.levels, dtype=torch.float32)
    return levels[codes.flatten().int()].view(lattice.points, lattice.coordinates)


def _looked_up(lattice: Lattice, codes: Tensor) -> Tensor:
    """Return the points that codes int32 [...] name: float32 [..., coordinates]."""
    return points_of(lattice).to(codes.device)[codes]


def _words(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as little-endian numbers of 16 or 32 bits: int64."""
    size = torch.tensor([], dtype=dtype).element_size()
    wide = blocks.clone(memory_format=torch.contiguous_format).view(dtype).long()
    return wide & ((1 << 8 * size) - 1)


def _half(blocks: Tensor, first: int) -> Tensor:
    """Return the float16 number at a byte of each block: float32 [B, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _signs(bits: Tensor) -> Tensor:
    """Return 1 for a bit 0 and -1 for a bit 1 of numbers [...], lowest first: float32 [..., 8]."""
    places = torch.arange(8, device=bits.device)
    return 1.0 - 2.0 * (bits[..., None] >> places & 1).float()


def _even_signs(codes: Tensor) -> Tensor:
    """Return the signs of codes of 7 bits, to which an eighth is added that makes their number even."""
    parity = codes
    for shift in (4, 2, 1):
        parity = parity ^ parity >> shift
    return _signs(codes | (parity & 1) << 7)


def _nibbles(packed: Tensor) -> Tensor:
    """Return low and high halves of bytes in turn: [B, 2 H]."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(1)


def _scaled(scales: Tensor, points: Tensor, signs: Tensor) -> Tensor:
    """Return values of points and signs [B, G, ...] whose scales are [B, G]: float32 [B, 256]."""
    groups = scales.shape[1]
    shape = (len(scales), groups, -1)
    return (scales[:, :, None] * points.reshape(shape) * signs.reshape(shape)).flatten(1)


def iq2_xxs(blocks: Tensor) -> Tensor:
    """d f16, then for 32 elements 4 bytes of codes, 4 of 7 bits of signs each and 4 bits of a scale."""
    words = _words(blocks[:, 2:], torch.int32).view(len(blocks), 8, 2)
    codes = blocks[:, 2:].reshape(len(blocks), 8, 8)[:, :, :4].int()
    scales = _half(blocks, 0) * (0.5 + (words[..., 1] >> 28).float()) * 0.25
    shifts = torch.tensor([0, 7, 14, 21], device=blocks.device)
    signs = _even_signs(words[..., 1, None] >> shifts & 0x7F)
    return _scaled(scales, _looked_up(IQ2_XXS, codes), signs)


def iq2_xs(blocks: Tensor) -> Tensor:
    """d f16, 32 codes of 9 bits with 7 of signs, 8 bytes of two scales each."""
    words = _words(blocks[:, 2:66], torch.int16)
    scales = _half(blocks, 0) * (0.5 + _nibbles(blocks[:, 66:]).float()) * 0.25
    return _scaled(scales, _looked_up(IQ2_XS, words & 511), _even_signs(words >> 9))


def iq2_s(blocks: Tensor) -> Tensor:
    """d f16, 32 bytes of codes, 32 of signs, 8 of two high bits of codes, 8 of two scales."""
    high = blocks[:, 66:74, None] >> torch.tensor([0, 2, 4, 6], device=blocks.device) & 3
    codes = blocks[:, 2:34].int() | high.flatten(1).int() << 8
    scales = _half(blocks, 0) * (0.5 + _nibbles(blocks[:, 74:]).float()) * 0.25
    return _scaled(scales, _looked_up(IQ2_S, codes), _signs(blocks[:, 34:66].int()))


def iq3_xxs(blocks: Tensor) -> Tensor:
    """d f16, 64 bytes of codes, then for 32 elements 4 of 7 bits of signs and 4 bits of a scale."""
    words = _words(blocks[:, 66:], torch.int32)
    scales = _half(blocks, 0) * (0.5 + (words >> 28).float()) * 0.5
    shifts = torch.tensor([0, 7, 14, 21], device=blocks.device)
    signs = _even_signs(words[..., None] >> shifts & 0x7F)
    return _scaled(scales, _looked_up(IQ3_XXS, blocks[:, 2:66].int()), signs)


def iq3_s(blocks: Tensor) -> Tensor:
    """d f16, 64 bytes of codes, 8 of their high bits, 32 of signs, 4 of two scales."""
    high = blocks[:, 66:74, None] >> torch.arange(8, device=blocks.device) & 1
    codes = blocks[:, 2:66].int() | high.flatten(1).int() << 8
    scales = _half(blocks, 0) * (1 + 2 * _nibbles(blocks[:, 106:])).float()
    return _scaled(scales, _looked_up(IQ3_S, codes), _signs(blocks[:, 74:106].int()))


def iq1_s(blocks: Tensor) -> Tensor:
    """d f16, 32 bytes of codes, 8 words of 4 of 3 high bits, a scale of 3 bits, and which way points move."""
    words = _words(blocks[:, 34:], torch.int16)
    scales = _half(blocks, 0) * (2 * (words >> 12 & 7) + 1).float()
    moved = torch.where(words & 0x8000 == 0, DELTA, -DELTA)
    shifts = torch.tensor([0, 3, 6, 9], device=blocks.device)
    high = (words[..., None] >> shifts & 7).flatten(1)
    points = _looked_up(IQ1, blocks[:, 2:34].long() | high << 8).reshape(len(blocks), 8, 32)
    return (scales[:, :, None] * (points + moved[:, :, None])).flatten(1)


def iq1_m(blocks: Tensor) -> Tensor:
    """32 bytes of codes, 16 of two of 3 high bits and a move, 4 words of 4 scales and a part of d f16."""
    words = _words(blocks[:, 48:], torch.int16)
    parts = words >> 12 << torch.tensor([0, 4, 8, 12], device=blocks.device)
    whole = parts.sum(dim=1, keepdim=True)
    d = torch.where(whole > 0x7FFF, whole - 0x10000, whole).short().view(torch.float16).float()
    shifts = torch.tensor([0, 3, 6, 9], device=blocks.device)
    scales = d * (2 * (words[..., None] >> shifts & 7).flatten(1) + 1).float()
    high = _nibbles(blocks[:, 32:48]).long()
    moved = torch.where(high & 8 == 0, DELTA, -DELTA)
    points = _looked_up(IQ1, blocks[:, :32].long() | (high & 7) << 8)
    values = (points + moved[..., None]).reshape(len(blocks), 16, 16)
    return (scales[:, :, None] * values).flatten(1)
