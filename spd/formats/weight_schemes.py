"""Layouts of a matrix W [out, in] in few bits: in which tensors, in which order of bits.

Codes are packed into words, the lowest bits first.

- pack: `weight_packed` I32 [out, in * bits / 32], codes along in, value + 2**(bits - 1);
  `weight_scale` [out, groups]; `weight_zero_point` I32 [out * bits / 32, groups], codes along out.
  W = (q - z) * s.
- gptq: `qweight` I32 [in * bits / 32, out], codes along in; `qzeros` I32 [groups, out * bits / 32],
  codes along out, of zero - `offset`; `scales` [groups, out]; `g_idx` I32 [in], the group of each
  column of W.
- awq: `qweight` I32 [in, out / 8], `qzeros` I32 [groups, out / 8], in `AWQ_ORDER`; `scales`
  [groups, out].
- int8: `weight` I8 [out, in]; `weight_scale` [out, 1] or [1].
- fp8: `weight` F8_E4M3 [out, in]; `weight_scale`, a multiplier: [1], [out, 1], or one a block, the
  last ones partial. DeepSeek calls it `weight_scale_inv`.
- nvfp4: `weight_packed` U8 [out, in / 2], E2M1, even columns low; `weight_scale` F8_E4M3
  [out, in / 16]; `weight_global_scale` [1]: W = e2m1 * (scale / global). As ModelOpt writes it:
  `weight`, `weight_scale_2` = 1 / global. mxfp4: the same with groups of 32 and `weight_scale` U8,
  the exponent + 127. gpt-oss packs all experts' in two tensors, which
  `tensor_names.unpack_experts` takes apart.

Source: compressed-tensors 0.20, AutoAWQ 0.2, AutoGPTQ and gptqmodel 7, NVIDIA ModelOpt, and
published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from spd.formats.checkpoint import FLOAT_DTYPES, Shape
from spd.formats.json_file import json_key

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of eight neighbouring columns."""
SPD_KINDS: Mapping[int, Literal["iq4", "int5", "int6", "int8"]] = {
    4: "iq4",
    5: "int5",
    6: "int6",
    8: "int8",
}
"""The kinds of codes that `spd quantize` writes, by their bits."""
SPD_GROUP = 32
NVFP4_GROUP = 16
MXFP4_GROUP = 32
PACKED_NAMES = dict.fromkeys(("pack", "nvfp4", "mxfp4", "spd"), "weight_packed")
PACKED_NAMES |= dict.fromkeys(("gptq", "awq"), "qweight")
"""The tensor that holds the codes, by layout, where it is not `weight`."""
CODE_TENSORS = frozenset({"weight", *PACKED_NAMES.values()})
AllowedTensor = tuple[tuple[Shape, ...], tuple[str, ...]]
"""The shapes that a tensor may have, and its dtypes."""


@dataclass(frozen=True)
class Scheme:
    """How one matrix is stored, by GPTQ's keys."""

    layout: str
    bits: int = field(metadata=json_key("bits", 2, 8))
    group_size: int | None = None
    """Columns that share a scale; None: all of a row."""
    symmetric: bool = field(default=True, metadata=json_key("sym"))
    """True if there are no zero points."""
    block_rows: int | None = None
    """Rows of a block of FP8."""
    offset: int = 0
    """The number to add to stored zero points."""
    reordered: bool = field(default=False, metadata=json_key("desc_act"))
    """True if the columns of a group are not neighbours."""

    @property
    def codes_name(self) -> str:
        """Return the last name of the tensor that holds the codes."""
        return PACKED_NAMES.get(self.layout, "weight")

    @property
    def code_kind(self) -> Literal["int4", "int8", "e2m1", "e4m3", "iq4", "int5", "int6"]:
        """Return the kind of a code in memory."""
        if self.layout == "spd":
            return SPD_KINDS[self.bits]
        if self.layout == "fp8":
            return "e4m3"
        if "fp4" in self.layout:
            return "e2m1"
        return "int4" if self.bits <= 4 else "int8"

    def tensors(self, shape: Shape) -> dict[str, AllowedTensor]:
        """Return the tensors that store a matrix [out, in], by last names."""
        rows, columns = shape
        groups = -(-columns // (self.group_size or columns))
        packed_rows = -(-rows * self.bits // 32)
        packed_columns = -(-columns * self.bits // 32)
        scalar: tuple[Shape, ...] = ((1,), (), (1, 1))
        words = ("I32",)
        per_group = (rows, groups)
        if self.layout == "pack":
            tensors: dict[str, AllowedTensor] = {
                "weight_packed": (((rows, packed_columns),), words),
                "weight_scale": ((per_group,), FLOAT_DTYPES),
            }
            if not self.symmetric:
                tensors["weight_zero_point"] = (((packed_rows, groups),), words)
            return tensors
        if self.layout in ("gptq", "awq"):
            is_gptq = self.layout == "gptq"
            codes = (packed_columns, rows) if is_gptq else (columns, packed_rows)
            tensors = {
                "qweight": ((codes,), words),
                "qzeros": (((groups, packed_rows),), words),
                "scales": (((groups, rows),), FLOAT_DTYPES),
            }
            if is_gptq:
                tensors["g_idx"] = (((columns,),), words)
            return tensors
        if self.layout in ("int8", "fp8"):
            scales: tuple[Shape, ...] = (*scalar, (rows, 1), (rows,))
            if self.block_rows is not None:
                scales = ((-(-rows // self.block_rows), groups),)
            dtype = "I8" if self.layout == "int8" else "F8_E4M3"
            return {
                "weight": ((shape,), (dtype,)),
                "weight_scale": (scales, (*FLOAT_DTYPES, "F8_E8M0")),
            }
        nibbles = (rows, columns // 2)
        if self.layout == "spd":
            upper = (rows, columns * (self.bits - 4) // 8)
            tensors = {
                "weight_packed": ((nibbles,), ("U8",)),
                "weight_scale": ((per_group,), ("F16",)),
            }
            return tensors | ({"weight_upper": ((upper,), ("U8",))} if self.bits > 4 else {})
        if self.layout == "mxfp4":
            return {
                "weight_packed": ((nibbles,), ("U8",)),
                "weight_scale": ((per_group,), ("U8",)),
            }
        global_scale = "weight_global_scale" if self.layout == "nvfp4" else "weight_scale_2"
        return {
            self.codes_name: ((nibbles,), ("U8",)),
            "weight_scale": ((per_group,), ("F8_E4M3",)),
            global_scale: (scalar, FLOAT_DTYPES),
        }
