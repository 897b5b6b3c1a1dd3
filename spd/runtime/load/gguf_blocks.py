"""The values of GGUF's blocks: float32, as ggml's reference dequantizes them, a function for each
type.

Each takes blocks uint8 [B, bytes of a block] and gives float32 [B, elements]. Numbers of several
bytes are little-endian. Products and differences are taken in the reference's order, so that values
are equal bit for bit: (d * scale) * code - (dmin * minimum). Source: `ggml-common.h`,
`ggml-quants.c` of ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spd.kernels.linear.few_bits import IQ4_VALUES
from spd.runtime.load import gguf_codebooks as codebooks

LEVELS_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the 16 codes of MXFP4."""
E8M0_HALF_MIN = 0x00200000
"""The bits of half of 2 ** -127, float32: below a normal number's exponent."""


def _read_float16(blocks: Tensor, first: int) -> Tensor:
    """Return float16 numbers at a byte of each block: float32 [B, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def nibbles(codes: Tensor) -> Tensor:
    """Return the low halves of bytes uint8 [..., H], then the high ones: [..., 2 H]."""
    return torch.cat((codes & 0x0F, codes >> 4), dim=-1)


def extract_bits(codes: Tensor, width: int, count: int) -> Tensor:
    """Return `count` parts of each byte of uint8 [..., H], `width` bits each, lowest first, uint8
    [..., count, H].
    """
    parts = [(codes >> width * index) & ((1 << width) - 1) for index in range(count)]
    return torch.stack(parts, dim=-2)


def _look_up_levels(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Return the levels of codes uint8 by a table: float32."""
    return torch.tensor(levels, dtype=torch.float32, device=codes.device)[codes.int()]


def dequantize_q4_0(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, 16 bytes of codes: d * (code - 8)."""
    return _read_float16(blocks, 0) * (nibbles(blocks[:, 2:]).float() - 8)


def dequantize_q4_1(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, m f16, 16 bytes of codes: d * code + m."""
    return _read_float16(blocks, 0) * nibbles(blocks[:, 4:]).float() + _read_float16(blocks, 2)


def fifth_bits(high: Tensor) -> Tensor:
    """Return 32 bits of 4 bytes uint8 [B, 4], lowest first, as the fifth bits of codes: [B, 32]."""
    return extract_bits(high, 1, 8).transpose(1, 2).flatten(1) << 4


def dequantize_q5_0(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, 4 bytes of fifth bits, 16 bytes of codes: d * (code - 16)."""
    codes = nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return _read_float16(blocks, 0) * (codes.float() - 16)


def dequantize_q5_1(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, m f16, 4 bytes of fifth bits, 16 bytes of codes: d * code + m."""
    codes = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return _read_float16(blocks, 0) * codes.float() + _read_float16(blocks, 2)


def dequantize_q8_0(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, 32 signed bytes: d * code."""
    return blocks[:, 2:].view(torch.int8).float() * _read_float16(blocks, 0)


def dequantize_q2_k(blocks: Tensor) -> Tensor:
    """Dequantize blocks of 16 bytes of a scale and a minimum each, 64 bytes of codes of 2 bits, d
    f16, dmin f16.
    """
    count = len(blocks)
    scales = _read_float16(blocks, 80) * (blocks[:, :16] & 0x0F).float()
    minima = _read_float16(blocks, 82) * (blocks[:, :16] >> 4).float()
    codes = extract_bits(blocks[:, 16:80].reshape(count, 2, 32), 2, 4).reshape(count, 16, 16)
    return (scales[:, :, None] * codes.float() - minima[:, :, None]).flatten(1)


def dequantize_q3_k(blocks: Tensor) -> Tensor:
    """Dequantize blocks of 32 bytes of third bits, 64 of codes of 2 bits, 12 of scales of 6 bits, d
    f16.

    A code counts 4 less where its third bit is 0, a scale 32 less than it says.
    """
    count = len(blocks)
    packed = blocks[:, 96:108]
    low = nibbles(packed[:, :8])
    high = extract_bits(packed[:, 8:], 2, 4).flatten(1)
    scales = _read_float16(blocks, 108) * ((low | high << 4).float() - 32)
    codes = extract_bits(blocks[:, 32:96].reshape(count, 2, 32), 2, 4).reshape(count, 8, 32)
    third = extract_bits(blocks[:, :32], 1, 8)
    values = (codes.float() - 4 * (1 - third.float())).reshape(count, 16, 16)
    return (scales[:, :, None] * values).flatten(1)


def unpack_scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minima of 6 bits in 12 bytes uint8 [B, 12] of a K type: uint8 [B,
    8] each.
    """
    first = packed[:, :4]
    second = packed[:, 4:8]
    third = packed[:, 8:]
    scales = torch.cat((first & 0x3F, third & 0x0F | first >> 2 & 0x30), dim=1)
    minima = torch.cat((second & 0x3F, third >> 4 | second >> 2 & 0x30), dim=1)
    return scales, minima


def _dequantize_k(blocks: Tensor, codes: Tensor) -> Tensor:
    """Return the values float32 [B, 256] of codes [B, 8, 32], for blocks that begin with d f16,
    dmin f16, scales and minima.
    """
    scales, minima = unpack_scales_and_minima(blocks[:, 4:16])
    by_scale = _read_float16(blocks, 0) * scales.float()
    by_minimum = _read_float16(blocks, 2) * minima.float()
    return (by_scale[:, :, None] * codes.float() - by_minimum[:, :, None]).flatten(1)


def dequantize_q4_k(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, dmin f16, 12 bytes of scales and minima, 128 of codes."""
    codes = extract_bits(blocks[:, 16:].reshape(-1, 4, 32), 4, 2)
    return _dequantize_k(blocks, codes.reshape(-1, 8, 32))


def dequantize_q5_k(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, dmin f16, 12 bytes of scales and minima, 32 of fifth bits, 128 of
    codes.
    """
    codes = extract_bits(blocks[:, 48:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return _dequantize_k(blocks, codes | extract_bits(blocks[:, 16:48], 1, 8) << 4)


def dequantize_q6_k(blocks: Tensor) -> Tensor:
    """Dequantize blocks of 128 bytes of low bits, 64 of two high bits, 16 signed scales, d f16: (d
    * scale) * (code - 32).
    """
    count = len(blocks)
    low = extract_bits(blocks[:, :128].reshape(count, 2, 64), 4, 2).reshape(count, 8, 32)
    high = extract_bits(blocks[:, 128:192].reshape(count, 2, 32), 2, 4).reshape(count, 8, 32)
    scales = _read_float16(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    codes = ((low | high << 4).float() - 32).reshape(count, 16, 16)
    return (scales[:, :, None] * codes).flatten(1)


def dequantize_iq4_nl(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, 16 bytes of codes: d * level."""
    return _read_float16(blocks, 0) * _look_up_levels(nibbles(blocks[:, 2:]), IQ4_VALUES)


def dequantize_iq4_xs(blocks: Tensor) -> Tensor:
    """Dequantize blocks of d f16, 2 bytes of scales' high bits, 4 of their low ones, 128 of codes:
    (d * (scale - 32)) * level.
    """
    count = len(blocks)
    high = extract_bits(blocks[:, 2:4], 2, 4).transpose(1, 2).flatten(1)
    low = extract_bits(blocks[:, 4:8], 4, 2).transpose(1, 2).flatten(1)
    scales = _read_float16(blocks, 0) * ((low | high << 4).float() - 32)
    codes = nibbles(blocks[:, 8:].reshape(count, 8, 16))
    return (scales[:, :, None] * _look_up_levels(codes, IQ4_VALUES)).flatten(1)


def dequantize_mxfp4(blocks: Tensor) -> Tensor:
    """Dequantize blocks of an exponent byte e, 16 bytes of codes: 2 ** (e - 128) * level."""
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, E8M0_HALF_MIN << exponents, (exponents - 1) << 23)
    return bits.view(torch.float32) * _look_up_levels(nibbles(blocks[:, 1:]), LEVELS_E2M1)


def dequantize_f32(blocks: Tensor) -> Tensor:
    """Dequantize blocks of 4 bytes."""
    return blocks.view(torch.float32)


def dequantize_f16(blocks: Tensor) -> Tensor:
    """Dequantize blocks of 2 bytes."""
    return blocks.view(torch.float16).float()


def dequantize_bf16(blocks: Tensor) -> Tensor:
    """Dequantize blocks of 2 bytes."""
    return blocks.view(torch.bfloat16).float()


DEQUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": dequantize_f32,
    "F16": dequantize_f16,
    "BF16": dequantize_bf16,
    "Q8_0": dequantize_q8_0,
    "Q4_0": dequantize_q4_0,
    "Q4_1": dequantize_q4_1,
    "Q5_0": dequantize_q5_0,
    "Q5_1": dequantize_q5_1,
    "Q2_K": dequantize_q2_k,
    "Q3_K": dequantize_q3_k,
    "Q4_K": dequantize_q4_k,
    "Q5_K": dequantize_q5_k,
    "Q6_K": dequantize_q6_k,
    "IQ4_NL": dequantize_iq4_nl,
    "IQ4_XS": dequantize_iq4_xs,
    "MXFP4": dequantize_mxfp4,
    "IQ2_XXS": codebooks.dequantize_iq2_xxs,
    "IQ2_XS": codebooks.dequantize_iq2_xs,
    "IQ2_S": codebooks.dequantize_iq2_s,
    "IQ3_XXS": codebooks.dequantize_iq3_xxs,
    "IQ3_S": codebooks.dequantize_iq3_s,
    "IQ1_S": codebooks.dequantize_iq1_s,
    "IQ1_M": codebooks.dequantize_iq1_m,
}
"""The function that dequantizes blocks, by the name of their GGUF type."""
