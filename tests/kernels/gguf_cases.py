"""Random weights as GGUF's blocks hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.formats.gguf.block_types import TYPES_BY_NAME
from spd.kernels.linear.few_bits import GroupedWeight, pack_nibbles
from spd.runtime.load.gguf_codes import SPLITTERS
from spd.runtime.models.gguf_forms import FORMS

FLOATS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q6_K": (208,)}
"""Where the float16 numbers of a block begin; in others at its first byte."""


def drawn_blocks(name: str, rows: int, columns: int) -> Tensor:
    """Return random blocks uint8 [rows * blocks of a row, bytes of a block], whose floats are
    small."""
    kind = TYPES_BY_NAME[name]
    generator = torch.Generator().manual_seed(rows * columns + kind.number)
    count = rows * columns // kind.elements
    blocks = torch.randint(0, 256, (count, kind.nbytes), generator=generator).to(torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 8 + 120
        return blocks
    for first in FLOATS.get(name, (0,)):
        numbers = torch.rand(count, 1, generator=generator) * 0.002 + 0.0005
        blocks[:, first : first + 2] = numbers.half().view(torch.uint8)
    return blocks


def grouped(name: str, blocks: Tensor, rows: int) -> GroupedWeight:
    """Return blocks of a type as kernels take them: a weight [rows, K]."""
    spec = FORMS[name]
    parts = {key: part.reshape(rows, -1) for key, part in SPLITTERS[name](blocks).items()}
    codes = parts.pop("codes")
    assert spec.group is not None
    scales = parts.pop("scales")
    return GroupedWeight(
        spec.kind,
        pack_nibbles(codes) if spec.is_paired else codes,
        scales,
        None,
        spec.group,
        minima=parts.get("minima"),
        factors=parts.get("factors"),
        minimum_factors=parts.get("minimum_factors"),
    )
