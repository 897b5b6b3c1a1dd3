"""Splits GGUF's blocks into codes, scales and minima as they are stored, for kernels that multiply
by codes.

`spd.runtime.models.gguf_forms` has the storage of each type. Numbers of six bits or signed ones
become bytes with 128 added. Source of the layouts: `gguf_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from spd.kernels.linear.few_bits import BYTE_OFFSET
from spd.runtime.load.gguf_blocks import extract_bits, fifth_bits, nibbles, unpack_scales_and_minima

BlockParts = Mapping[str, Tensor]
"""`codes` uint8 [B, elements], and the `few_bits.QUANT_PARAMETERS` of B blocks [B, numbers of a
block].
"""


def _read_float16(blocks: Tensor, first: int) -> Tensor:
    """Return float16 numbers at a byte of each block: [B, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16)


def _to_offset_bytes(numbers: Tensor) -> Tensor:
    """Return whole numbers from -128 to 127 as bytes."""
    return (numbers.short() + BYTE_OFFSET).to(torch.uint8)


def split_q4_0(blocks: Tensor) -> BlockParts:
    """Split blocks of d f16, 16 bytes of codes."""
    return {"codes": nibbles(blocks[:, 2:]), "scales": _read_float16(blocks, 0)}


def split_q4_1(blocks: Tensor) -> BlockParts:
    """Split blocks of d f16, m f16, 16 bytes of codes.

    What is added is a minimum with its sign changed.
    """
    codes = nibbles(blocks[:, 4:])
    return {"codes": codes, "scales": _read_float16(blocks, 0), "minima": -_read_float16(blocks, 2)}


def split_q5_0(blocks: Tensor) -> BlockParts:
    """Split blocks of d f16, 4 bytes of fifth bits, 16 bytes of codes."""
    codes = nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return {"codes": codes, "scales": _read_float16(blocks, 0)}


def split_q5_1(blocks: Tensor) -> BlockParts:
    """Split blocks of d f16, m f16, 4 bytes of fifth bits, 16 bytes of codes."""
    codes = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return {"codes": codes, "scales": _read_float16(blocks, 0), "minima": -_read_float16(blocks, 2)}


def split_q8_0(blocks: Tensor) -> BlockParts:
    """Split blocks of d f16, 32 signed bytes."""
    return {"codes": blocks[:, 2:] ^ BYTE_OFFSET, "scales": _read_float16(blocks, 0)}


def _split_factored(blocks: Tensor, codes: Tensor) -> BlockParts:
    """Return the parts of blocks that begin with d f16, dmin f16, 12 bytes of scales and minima."""
    scales, minima = unpack_scales_and_minima(blocks[:, 4:16])
    return {
        "codes": codes.flatten(1),
        "scales": _to_offset_bytes(scales),
        "minima": _to_offset_bytes(minima),
        "factors": _read_float16(blocks, 0),
        "minimum_factors": _read_float16(blocks, 2),
    }


def split_q4_k(blocks: Tensor) -> BlockParts:
    """Split blocks of d f16, dmin f16, 12 bytes of scales and minima, 128 of codes."""
    return _split_factored(blocks, extract_bits(blocks[:, 16:].reshape(-1, 4, 32), 4, 2))


def split_q5_k(blocks: Tensor) -> BlockParts:
    """Split blocks of d f16, dmin f16, 12 bytes of scales and minima, 32 of fifth bits, 128 of
    codes.
    """
    codes = extract_bits(blocks[:, 48:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return _split_factored(blocks, codes | extract_bits(blocks[:, 16:48], 1, 8) << 4)


def split_q6_k(blocks: Tensor) -> BlockParts:
    """Split blocks of 128 bytes of low bits, 64 of two high bits, 16 signed scales, d f16."""
    count = len(blocks)
    low = extract_bits(blocks[:, :128].reshape(count, 2, 64), 4, 2).reshape(count, 8, 32)
    high = extract_bits(blocks[:, 128:192].reshape(count, 2, 32), 2, 4).reshape(count, 8, 32)
    return {
        "codes": (low | high << 4).flatten(1),
        "scales": blocks[:, 192:208] ^ BYTE_OFFSET,
        "factors": _read_float16(blocks, 208),
    }


def split_iq4_xs(blocks: Tensor) -> BlockParts:
    """Split blocks of d f16, 2 bytes of scales' high bits, 4 of their low ones, 128 of codes.

    A scale counts 32 less.
    """
    count = len(blocks)
    high = extract_bits(blocks[:, 2:4], 2, 4).transpose(1, 2).flatten(1)
    low = extract_bits(blocks[:, 4:8], 4, 2).transpose(1, 2).flatten(1)
    return {
        "codes": nibbles(blocks[:, 8:].reshape(count, 8, 16)).flatten(1),
        "scales": _to_offset_bytes((low | high << 4).short() - 32),
        "factors": _read_float16(blocks, 0),
    }


def split_mxfp4(blocks: Tensor) -> BlockParts:
    """Split blocks of an exponent byte, 16 bytes of codes."""
    return {"codes": nibbles(blocks[:, 1:]), "scales": blocks[:, :1]}


SPLITTERS: Mapping[str, Callable[[Tensor], BlockParts]] = {
    "Q4_0": split_q4_0,
    "Q4_1": split_q4_1,
    "Q5_0": split_q5_0,
    "Q5_1": split_q5_1,
    "Q8_0": split_q8_0,
    "Q4_K": split_q4_k,
    "Q5_K": split_q5_k,
    "Q6_K": split_q6_k,
    "IQ4_NL": split_q4_0,
    "IQ4_XS": split_iq4_xs,
    "MXFP4": split_mxfp4,
}
"""The function that splits blocks into parts, by the name of their GGUF type."""
