"""The steps of an attention block, chosen when it is built: norms of heads, rotation, values,
gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.attention.rotary_store import RotatedRows, apply_rotary
from spd.kernels.interface import Kernels
from spd.kernels.linear.norm_gate import rms_norm
from spd.runtime.layers.base import Communicator, ForwardBatch, LayerCache, Residual
from spd.runtime.layers.linear import Projection, unscaled_norm
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models.allocator import BlockTensors
from spd.runtime.models.attention_layout import GqaLayout, RotationLayout
from spd.runtime.models.builder import LayerBuilder


class QkvStep(Protocol):
    """A function of the fused projection, applied before keys and values are stored."""

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return changed queries, keys and values [T, N]."""
        ...


class QueryStep(Protocol):
    """A function of rotated queries."""

    def __call__(self, query: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the changed query [T, H, D]."""
        ...


class QueryKeyStep(Protocol):
    """The step that rotates queries, and writes the layer's cache entries."""

    def __call__(self, qkv: Tensor, rows: RotatedRows, cache: LayerCache) -> Tensor:
        """Return rotated queries [T, H, D] of a projection [T, N].

        Keys and values are written in place.
        """
        ...


class OutputGating(Protocol):
    """The gates of an attention's result."""

    def split_gates(self, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the projection without gates, and its gates [T, H * D], None if it has none."""
        ...

    def apply_gates(
        self, mixed: Tensor, gates: Tensor | None, stream: Residual, batch: ForwardBatch
    ) -> Tensor:
        """Return the result [T, H * D] multiplied by the sigmoid of its gates."""
        ...


def select_rotary(rotary: RotaryRows, rotation: RotationLayout) -> RotaryRows:
    """Return the angles of a layer's rows: the model's, those of its sliding layers, or none."""
    if rotation.is_local and rotary.local is not None:
        rotary = rotary.local
    return rotary.without_rotation() if rotation.is_absent else rotary


def head_norm_scales(
    layout: GqaLayout, tensors: BlockTensors, build: LayerBuilder
) -> Tensor | None:
    """Return the scales [H + K, D] of norms of heads before the rotation, or None without such
    norms.
    """
    norms = layout.head_norms
    if norms is None or norms.kind == "joint":
        return None
    heads = (
        layout.num_heads
        if layout.cache_source is not None
        else layout.num_heads + layout.num_kv_heads
    )
    if norms.kind == "each":
        query_scale = tensors["q_norm"]
        key_scales = []
        if layout.cache_source is None:
            key_scale = tensors["k_norm"]
            if build.execution.rounds_cache and not norms.has_other_readers:
                query_scale, key_scale = balance_scales(query_scale, key_scale)
            key_scales = [key_scale.expand(layout.num_kv_heads, -1)]
        weight = torch.cat([query_scale.expand(layout.num_heads, -1), *key_scales])
    elif norms.kind == "rotated":
        weight = torch.ones_like(tensors["q_norm"].expand(heads, -1))
    else:
        shape = layout.num_heads + layout.num_kv_heads, layout.head_dim
        weight = torch.ones(shape, dtype=build.dtype, device=build.execution.device)
    return weight if build.kernels.native is None else weight.float()


def balance_scales(query_scale: Tensor, key_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales [D] of queries and keys with the same products, for keys in eight bits.

    A row of keys has one scale there, so that its largest elements cost the smaller ones their bits,
    and what is lost of an element counts as often as its query is large. A power of 2 for what
    rotates together, elements i and i + D / 2, moves size from keys to queries until both norms are
    about as large; it rounds nothing. Source: Xiao et al., "SmoothQuant" (2022), equation 4.
    """
    key_size, query_size = (
        scale.float().abs().view(2, -1).amax(0).clamp(min=2.0**-10)
        for scale in (key_scale, query_scale)
    )
    exponents = torch.frexp(key_size / query_size).exponent.div(2, rounding_mode="floor")
    factors = torch.ldexp(torch.ones_like(key_size), exponents).repeat(2).to(key_scale.dtype)
    return query_scale * factors, key_scale / factors


class JointHeadNorms:
    """One norm over all query heads together, and one over all key heads, of every rank."""

    def __init__(
        self, query_scale: Tensor, key_scale: Tensor, epsilon: float, ranks: Communicator | None
    ) -> None:
        self.scales = (query_scale, key_scale)
        self.epsilon = epsilon
        self.ranks = ranks

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return qkv [T, N] with queries and keys normalised."""
        query_width, key_width = (scale.shape[0] for scale in self.scales)
        query, key, value = torch.split(qkv, [query_width, key_width, key_width], dim=1)
        means = torch.stack([x.float().square().mean(1) for x in (query, key)], 1)
        if self.ranks is not None:
            means = self.ranks.sum(means) / self.ranks.size
        factors = (means + self.epsilon).rsqrt().unbind(1)
        normed = [
            ((x.float() * factor[:, None]).to(qkv.dtype) * scale).to(qkv.dtype)
            for x, factor, scale in zip((query, key), factors, self.scales, strict=True)
        ]
        return torch.cat([*normed, value], 1)


@dataclass(frozen=True, eq=False)
class WidenValues:
    """Widens values to the width of keys: pads narrower ones with zeros, takes the keys for missing
    ones.
    """

    layout: GqaLayout
    epsilon: float

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return queries, keys and values [T, (H + 2 K) * D] of a projection [T, N]."""
        layout = self.layout
        size = layout.head_dim
        key_width = layout.num_kv_heads * size
        end_of_keys = layout.num_heads * size + key_width
        value = qkv[:, end_of_keys:]
        if layout.values.is_key:
            value = qkv[:, end_of_keys - key_width : end_of_keys]
        value = value.reshape(qkv.shape[0], layout.num_kv_heads, -1)
        if layout.values.is_normed:
            value = unscaled_norm(value, self.epsilon)
        wide = F.pad(value, (0, size - value.shape[2]))
        return torch.cat((qkv[:, :end_of_keys], wide.flatten(1)), 1)


@dataclass(frozen=True, eq=False)
class RotateAndStore:
    """Rotates queries and keys, and writes keys and values to the layer's pools."""

    kernels: Kernels
    scales: Tensor | None
    epsilon: float
    num_heads: int

    def __call__(self, qkv: Tensor, rows: RotatedRows, cache: LayerCache) -> Tensor:
        """Return queries [T, H, D] of qkv [T, (H + 2 K) * D]; the pools are written in place."""
        return self.kernels.rotary_store(
            qkv=qkv,
            rows=rows,
            qk_weight=self.scales,
            epsilon=self.epsilon,
            pools=cache.keys_and_values,
            num_heads=self.num_heads,
        )


@dataclass(frozen=True, eq=False)
class RotateQueries:
    """Rotates queries alone: the layer reads the keys and values of another layer."""

    scales: Tensor | None
    epsilon: float
    num_heads: int

    def __call__(self, qkv: Tensor, rows: RotatedRows, cache: LayerCache) -> Tensor:
        """Return queries [T, H, D] of a projection [T, H * D], normed and rotated."""
        query = qkv.view(qkv.shape[0], self.num_heads, -1)
        if self.scales is not None:
            query = rms_norm(query, self.scales, self.epsilon)
        return apply_rotary(query, *rows.select_cos_sin()).to(qkv.dtype)


class RotatedNormScales:
    """The scales of norms after the rotation: those of keys are applied to queries, with equal
    products.
    """

    def __init__(self, query_scale: Tensor, key_scale: Tensor, dtype: torch.dtype) -> None:
        self.factor = (query_scale.float() * key_scale.float()).to(dtype)

    def __call__(self, query: Tensor, batch: ForwardBatch) -> Tensor:
        """Return query [T, H, D] times both scales."""
        return query * self.factor


@dataclass(frozen=True, eq=False)
class QueryGrowth:
    """Scales queries by their position, for long contexts."""

    slope: float
    period: int

    def __call__(self, query: Tensor, batch: ForwardBatch) -> Tensor:
        """Return query [T, H, D] times 1 + slope * ln(1 + floor(position / period))."""
        steps = torch.floor(batch.positions.float() / self.period)
        growth = 1 + self.slope * torch.log1p(steps)
        return query * growth.to(query.dtype)[:, None, None]


@dataclass(frozen=True, eq=False)
class NarrowValues:
    """Takes the first `dim` elements of each value head, which is as wide as a key, times a scale."""

    num_heads: int
    dim: int
    scale: float

    def __call__(self, mixed: Tensor) -> Tensor:
        """Return [T, H * dim] of attention results [T, H * D]."""
        heads = mixed.view(mixed.shape[0], self.num_heads, -1)
        return heads[..., : self.dim].flatten(1) * self.scale


class FusedGates:
    """Gates of every element, which follow queries, keys and values in their matrix."""

    def __init__(self, layout: GqaLayout) -> None:
        self.widths = [layout.widest, layout.num_heads * layout.head_dim]

    def split_gates(self, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the projection without gates, and the gates [T, H * D]."""
        qkv, gates = torch.split(qkv, self.widths, dim=1)
        return qkv.contiguous(), gates.contiguous()

    def apply_gates(
        self, mixed: Tensor, gates: Tensor | None, stream: Residual, batch: ForwardBatch
    ) -> Tensor:
        """Return the result [T, H * D] multiplied by the sigmoid of its gates."""
        assert gates is not None
        return mixed * gates.sigmoid()


@dataclass(frozen=True, eq=False)
class HeadGates:
    """One gate for each head, from a separate matrix that reads the block's norm."""

    projection: Projection

    def split_gates(self, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the projection unchanged, and None: gates have a separate matrix."""
        return qkv, None

    def apply_gates(
        self, mixed: Tensor, gates: Tensor | None, stream: Residual, batch: ForwardBatch
    ) -> Tensor:
        """Return the result [T, H * D], each head multiplied by the sigmoid of its gate."""
        gate_values = self.projection(stream, batch).sigmoid()
        return (mixed.view(*gate_values.shape, -1) * gate_values[..., None]).flatten(1)
