"""Random weights in GGUF's blocks, as a loaded file has them."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.capabilities import CODE_BITS, SUPER_BLOCK
from spd.kernels.linear.few_bits import GroupedWeight, pack_nibbles
from spd.kernels.linear.tiled_weight import TiledWeight, tile_weight
from spd.runtime.models.gguf_forms import FORMS

TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")
"""The types of most published files: every kind of codes, and of scales."""
SCALE = 1e-3
EXPONENT = 118
"""The byte of a scale of 2 ** -10."""


def draw_blocks(kind: str, n: int, k: int, device: torch.device) -> TiledWeight:
    """Return a weight [N, K] of a type: any codes, and scales that no product overflows with."""
    spec = FORMS[kind]
    assert spec.group is not None
    groups = k // spec.group

    def draw_bytes(columns: int, below: int) -> Tensor:
        return torch.randint(0, below, (n, columns), dtype=torch.uint8, device=device)

    def draw_scales() -> Tensor:
        if spec.scales == "float16":
            return torch.full((n, groups), SCALE, dtype=torch.float16, device=device)
        if spec.scales == "exponents":
            return torch.full((n, groups), EXPONENT, dtype=torch.uint8, device=device)
        return draw_bytes(groups, 256)

    def draw_factors() -> Tensor | None:
        if spec.scales != "factored":
            return None
        return torch.full((n, k // SUPER_BLOCK), SCALE / 64, dtype=torch.float16, device=device)

    codes = draw_bytes(k, 1 << CODE_BITS[spec.kind])
    return tile_weight(
        GroupedWeight(
            spec.kind,
            pack_nibbles(codes) if spec.is_paired else codes,
            draw_scales(),
            None,
            spec.group,
            minima=draw_scales() if spec.minima else None,
            factors=draw_factors(),
            minimum_factors=draw_factors() if spec.minima else None,
        )
    )
