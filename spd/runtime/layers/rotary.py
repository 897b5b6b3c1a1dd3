"""Rotary frequencies of every supported kind, and the cos and sin tables that a forward pass reads.

Kinds: default, linear (position interpolation), llama3 (frequency bands), yarn (Peng et al. 2023),
longrope (Ding et al. 2024) with the factors of its original context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.formats.rope_config import RopeConfig, RotaryDims, yarn_scale


def _scale_llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Return frequencies with slow ones divided by the factor, fast ones unchanged, a smooth band
    between.
    """
    original = float(rope.original_max_positions or 8192)
    wavelength = 2 * math.pi / inverse
    low = original / rope.low_freq_factor
    high = original / rope.high_freq_factor
    smooth = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = torch.where(wavelength > low, inverse / rope.factor, inverse)
    return torch.where((wavelength <= low) & (wavelength >= high), mixed, scaled)


def _scale_yarn(inverse: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Return frequencies divided by the factor where they rotate rarely over the original context,
    and unchanged where they rotate often, with a ramp between.
    """
    original = float(rope.original_max_positions or 4096)

    def dimension(rotations: float) -> float:
        return (
            head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low = dimension(rope.beta_fast)
    high = dimension(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def attention_factor(rope: RopeConfig) -> float:
    """Return the scale that YaRN and LongRoPE put on cos and sin; 1 for the other kinds."""
    if rope.attention_factor is not None and rope.kind in ("yarn", "longrope"):
        return rope.attention_factor
    if rope.kind == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions or 4096))
    if rope.kind != "yarn":
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dim)
    return yarn_scale(rope.factor, 1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the angles in radians that each position adds, float32 [D / 2], by the kind of
    `rope`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _scale_llama3(inverse, rope)
    if rope.kind == "yarn":
        return _scale_yarn(inverse, rope, head_dim)
    if rope.kind == "proportional":
        inverse[int(rope.rotated_share * head_dim // 2) :] = 0.0
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.short_factor) * rope.theta**exponents)
    return inverse


@dataclass(frozen=True)
class RotaryRows:
    """cos and sin for the rows of one pass: [T, D], or the full tables and int64 positions [T].

    `local` holds those of the layers with other angles.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    local: RotaryRows | None = None

    def without_rotation(self) -> RotaryRows:
        """Return as many rows without rotation: one angle of 0 for all."""
        cos = torch.ones_like(self.cos[:1])
        sin = torch.zeros_like(self.sin[:1])
        positions = None if self.positions is None else torch.zeros_like(self.positions)
        return RotaryRows(cos, sin, positions)


class RotaryTable:
    """cos and sin [M, D] for every position below a limit; the sine's first half is negated.

    D is dims.width; elements that do not rotate have cos 1 and sin 0, at the end of each half. The
    entry of a position has the angles of `shift` positions earlier.
    """

    def __init__(
        self,
        rope: RopeConfig,
        dims: RotaryDims,
        max_positions: int,
        dtype: torch.dtype,
        device: str,
        shift: int = 0,
    ) -> None:
        inverse = inverse_frequencies(rope, dims.rotary_dim)
        angles = (torch.arange(max_positions, dtype=torch.float32)[:, None] - shift) * inverse
        scale = attention_factor(rope)
        padding = (0, (dims.width - dims.rotary_dim) // 2)
        cos = F.pad(angles.cos() * scale, padding, value=1.0)
        sin = F.pad(angles.sin() * scale, padding)
        self.max_positions = max_positions
        self.local: RotaryTable | None = None
        """The table of layers with other angles, where a model has such."""
        self.cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype)

    def rows(self, positions: Tensor, *, gathered: bool) -> RotaryRows:
        """Return cos and sin for rows at int64 positions [T].

        gathered: gather them here; otherwise a kernel looks them up in the full tables.
        """
        local = None if self.local is None else self.local.rows(positions, gathered=gathered)
        if not gathered:
            return RotaryRows(self.cos, self.sin, positions, local)
        return RotaryRows(self.cos[positions], self.sin[positions], None, local)
