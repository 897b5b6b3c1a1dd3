"""Types of a GGUF file's tensors: their numbers, names, and the bytes of a block of elements.

Elements of a row are stored in blocks of equal size; a row holds whole blocks. Source: `ggml.h`,
`ggml-common.h` of ggml.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockType:
    """A type of tensors: `elements` of a row are stored in `nbytes`."""

    number: int
    name: str
    elements: int
    """Elements of a block, neighbours in a row."""
    nbytes: int
    """Bytes of a block."""

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of whole blocks."""
        return columns // self.elements * self.nbytes


_TYPES = (
    BlockType(0, "F32", 1, 4),
    BlockType(1, "F16", 1, 2),
    BlockType(2, "Q4_0", 32, 18),
    BlockType(3, "Q4_1", 32, 20),
    BlockType(6, "Q5_0", 32, 22),
    BlockType(7, "Q5_1", 32, 24),
    BlockType(8, "Q8_0", 32, 34),
    BlockType(9, "Q8_1", 32, 40),
    BlockType(10, "Q2_K", 256, 84),
    BlockType(11, "Q3_K", 256, 110),
    BlockType(12, "Q4_K", 256, 144),
    BlockType(13, "Q5_K", 256, 176),
    BlockType(14, "Q6_K", 256, 210),
    BlockType(15, "Q8_K", 256, 292),
    BlockType(16, "IQ2_XXS", 256, 66),
    BlockType(17, "IQ2_XS", 256, 74),
    BlockType(18, "IQ3_XXS", 256, 98),
    BlockType(19, "IQ1_S", 256, 50),
    BlockType(20, "IQ4_NL", 32, 18),
    BlockType(21, "IQ3_S", 256, 110),
    BlockType(22, "IQ2_S", 256, 82),
    BlockType(23, "IQ4_XS", 256, 136),
    BlockType(24, "I8", 1, 1),
    BlockType(25, "I16", 1, 2),
    BlockType(26, "I32", 1, 4),
    BlockType(27, "I64", 1, 8),
    BlockType(28, "F64", 1, 8),
    BlockType(29, "IQ1_M", 256, 56),
    BlockType(30, "BF16", 1, 2),
    BlockType(34, "TQ1_0", 256, 54),
    BlockType(35, "TQ2_0", 256, 66),
    BlockType(39, "MXFP4", 32, 17),
    BlockType(40, "NVFP4", 64, 36),
    BlockType(41, "Q1_0", 128, 18),
)
TYPES_BY_NUMBER = {block_type.number: block_type for block_type in _TYPES}
TYPES_BY_NAME = {block_type.name: block_type for block_type in _TYPES}
"""The types that are read, by ggml's numbers and names."""

_REMOVED = "which llama.cpp no longer reads"
_OF_IK_LLAMA = "a type of ik_llama.cpp's own"
UNREADABLE_TYPES = {
    4: f"Q4_2, {_REMOVED}",
    5: f"Q4_3, {_REMOVED}",
    31: f"Q4_0_4_4, {_REMOVED}",
    32: f"Q4_0_4_8, {_REMOVED}",
    33: f"Q4_0_8_8, {_REMOVED}",
    36: f"IQ4_NL_4_4, {_REMOVED}",
    37: f"IQ4_NL_4_8, {_REMOVED}",
    38: f"IQ4_NL_8_8, {_REMOVED}",
} | dict.fromkeys(range(97, 256), _OF_IK_LLAMA)
"""Descriptions of other numbers, as far as they are known."""

READABLE_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ1_S",
    "IQ1_M",
)
"""Names of the types that `runtime.load` can decode."""
