"""The values of GGUF's blocks of one to three bits, whose codes are indices of codebook entries.

`gguf_codebooks.bin` holds the codebooks (grids in llama.cpp) that the format defines. An entry is a
level index for each coordinate: two bits each, four to a byte, or four bits, two to a byte, the
first one lowest. Source: `ggml-common.h` of ggml.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

CODEBOOK_FILE = Path(__file__).with_name("gguf_codebooks.bin")
IQ1_DELTA = 0.125
"""The offset of IQ1's entries, added or subtracted."""


@dataclass(frozen=True)
class Codebook:
    """A codebook: `entries` of `coordinates` values each, all among `levels`.

    `offset`: its place in the file.
    """

    offset: int
    entries: int
    coordinates: int
    levels: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Return the bits of a coordinate."""
        return 2 if len(self.levels) < 4 else 4

    @property
    def nbytes(self) -> int:
        """Return the bytes of all entries."""
        return self.entries * self.coordinates * self.bits // 8


LEVELS_IQ2 = (8, 25, 43)
IQ2_XXS = Codebook(0, 256, 8, LEVELS_IQ2)
IQ2_XS = Codebook(512, 512, 8, LEVELS_IQ2)
IQ2_S = Codebook(1536, 1024, 8, LEVELS_IQ2)
IQ3_XXS = Codebook(3584, 256, 4, (4, 12, 20, 28, 36, 44, 52, 62))
IQ3_S = Codebook(4096, 512, 4, (1, 3, 5, 7, 9, 11, 13, 15))
IQ1 = Codebook(5120, 2048, 8, (-1, 0, 1))


@cache
def read_entries(codebook: Codebook) -> Tensor:
    """Read a codebook's entries from the file: float32 [entries, coordinates]; they are cached."""
    data = CODEBOOK_FILE.read_bytes()[codebook.offset : codebook.offset + codebook.nbytes]
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    count = 8 // codebook.bits
    mask = (1 << codebook.bits) - 1
    codes = torch.stack([packed >> codebook.bits * at & mask for at in range(count)], dim=1)
    levels = torch.tensor(codebook.levels, dtype=torch.float32)
    return levels[codes.flatten().int()].view(codebook.entries, codebook.coordinates)


def _look_up_entries(codebook: Codebook, codes: Tensor) -> Tensor:
    """Return the entries of codes int32 [...]: float32 [..., coordinates]."""
    return read_entries(codebook).to(codes.device)[codes]


def _read_words(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as little-endian numbers of 16 or 32 bits: int64."""
    size = torch.tensor([], dtype=dtype).element_size()
    wide = blocks.clone(memory_format=torch.contiguous_format).view(dtype).long()
    return wide & ((1 << 8 * size) - 1)


def _read_float16(blocks: Tensor, first: int) -> Tensor:
    """Return the float16 number at a byte of each block: float32 [B, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _unpack_signs(bits: Tensor) -> Tensor:
    """Return 1 for a bit 0 and -1 for a bit 1 of numbers [...], lowest first: float32 [..., 8]."""
    places = torch.arange(8, device=bits.device)
    return 1.0 - 2.0 * (bits[..., None] >> places & 1).float()


def _unpack_even_signs(codes: Tensor) -> Tensor:
    """Return the signs of codes of 7 bits, with an eighth bit that makes the number of ones even."""
    parity = codes
    for shift in (4, 2, 1):
        parity = parity ^ parity >> shift
    return _unpack_signs(codes | (parity & 1) << 7)


def _unpack_nibbles(packed: Tensor) -> Tensor:
    """Return low and high halves of bytes in turn: [B, 2 H]."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(1)


def _scale_entries(scales: Tensor, entries: Tensor, signs: Tensor) -> Tensor:
    """Return values of entries and signs [B, G, ...] whose scales are [B, G]: float32 [B, 256]."""
    groups = scales.shape[1]
    shape = (len(scales), groups, -1)
    return (scales[:, :, None] * entries.reshape(shape) * signs.reshape(shape)).flatten(1)


def dequantize_iq2_xxs(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, then for 32 elements 4 bytes of codes, 4 of 7 bits of signs each
    and 4 bits of a scale.
    """
    words = _read_words(blocks[:, 2:], torch.int32).view(len(blocks), 8, 2)
    codes = blocks[:, 2:].reshape(len(blocks), 8, 8)[:, :, :4].int()
    scales = _read_float16(blocks, 0) * (0.5 + (words[..., 1] >> 28).float()) * 0.25
    shifts = torch.tensor([0, 7, 14, 21], device=blocks.device)
    signs = _unpack_even_signs(words[..., 1, None] >> shifts & 0x7F)
    return _scale_entries(scales, _look_up_entries(IQ2_XXS, codes), signs)


def dequantize_iq2_xs(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, 32 codes of 9 bits with 7 of signs, 8 bytes of two scales each."""
    words = _read_words(blocks[:, 2:66], torch.int16)
    scales = _read_float16(blocks, 0) * (0.5 + _unpack_nibbles(blocks[:, 66:]).float()) * 0.25
    return _scale_entries(
        scales, _look_up_entries(IQ2_XS, words & 511), _unpack_even_signs(words >> 9)
    )


def dequantize_iq2_s(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, 32 bytes of codes, 32 of signs, 8 of two high bits of codes, 8 of
    two scales.
    """
    high = blocks[:, 66:74, None] >> torch.tensor([0, 2, 4, 6], device=blocks.device) & 3
    codes = blocks[:, 2:34].int() | high.flatten(1).int() << 8
    scales = _read_float16(blocks, 0) * (0.5 + _unpack_nibbles(blocks[:, 74:]).float()) * 0.25
    return _scale_entries(
        scales, _look_up_entries(IQ2_S, codes), _unpack_signs(blocks[:, 34:66].int())
    )


def dequantize_iq3_xxs(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, 64 bytes of codes, then for 32 elements 4 of 7 bits of signs and
    4 bits of a scale.
    """
    words = _read_words(blocks[:, 66:], torch.int32)
    scales = _read_float16(blocks, 0) * (0.5 + (words >> 28).float()) * 0.5
    shifts = torch.tensor([0, 7, 14, 21], device=blocks.device)
    signs = _unpack_even_signs(words[..., None] >> shifts & 0x7F)
    return _scale_entries(scales, _look_up_entries(IQ3_XXS, blocks[:, 2:66].int()), signs)


def dequantize_iq3_s(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, 64 bytes of codes, 8 of their high bits, 32 of signs, 4 of two
    scales.
    """
    high = blocks[:, 66:74, None] >> torch.arange(8, device=blocks.device) & 1
    codes = blocks[:, 2:66].int() | high.flatten(1).int() << 8
    scales = _read_float16(blocks, 0) * (1 + 2 * _unpack_nibbles(blocks[:, 106:])).float()
    return _scale_entries(
        scales, _look_up_entries(IQ3_S, codes), _unpack_signs(blocks[:, 74:106].int())
    )


def dequantize_iq1_s(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, 32 low bytes of codes, and a word for every 32 elements.

    A word has the 3 high bits of 4 codes, a scale of 3 bits, and the sign of IQ1_DELTA, which is
    added to the entries.
    """
    words = _read_words(blocks[:, 34:], torch.int16)
    scales = _read_float16(blocks, 0) * (2 * (words >> 12 & 7) + 1).float()
    deltas = torch.where(words & 0x8000 == 0, IQ1_DELTA, -IQ1_DELTA)
    shifts = torch.tensor([0, 3, 6, 9], device=blocks.device)
    high = (words[..., None] >> shifts & 7).flatten(1)
    entries = _look_up_entries(IQ1, blocks[:, 2:34].long() | high << 8).reshape(len(blocks), 8, 32)
    return (scales[:, :, None] * (entries + deltas[:, :, None])).flatten(1)


def dequantize_iq1_m(blocks: Tensor) -> Tensor:
    """Dequantize blocks of 32 bytes of codes, 16 of two of 3 high bits and a move, 4 words of 4
    scales and a part of d f16.
    """
    words = _read_words(blocks[:, 48:], torch.int16)
    parts = words >> 12 << torch.tensor([0, 4, 8, 12], device=blocks.device)
    scale_words = parts.sum(dim=1, keepdim=True)
    d = (
        torch.where(scale_words > 0x7FFF, scale_words - 0x10000, scale_words)
        .short()
        .view(torch.float16)
        .float()
    )
    shifts = torch.tensor([0, 3, 6, 9], device=blocks.device)
    scales = d * (2 * (words[..., None] >> shifts & 7).flatten(1) + 1).float()
    high = _unpack_nibbles(blocks[:, 32:48]).long()
    deltas = torch.where(high & 8 == 0, IQ1_DELTA, -IQ1_DELTA)
    entries = _look_up_entries(IQ1, blocks[:, :32].long() | (high & 7) << 8)
    values = (entries + deltas[..., None]).reshape(len(blocks), 16, 16)
    return (scales[:, :, None] * values).flatten(1)
