# mypy: disable-error-code="no-untyped-call"
"""The compiled C kernels as operations on tensors: bfloat16 or float32 on CPU, for any number of
rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import (
    AttentionHeads,
    AttentionParams,
    AttentionPlan,
    Windows,
)
from spd.kernels.attention.rotary_store import Pools, RotatedRows
from spd.kernels.capabilities import CAPABILITIES, Capabilities
from spd.kernels.experts.moe import ExpertWeights, RoutingRule
from spd.kernels.launch import ceil_div
from spd.kernels.native.build import library_path
from spd.kernels.native.calls import AmxRefused
from spd.kernels.native.packed import (
    TILE_BYTES,
    TILE_DEPTH,
    TILE_SIDE,
    PackedWeight,
    epilogue_of,
)
from spd.kernels.native.rounds import NativeRounds
from spd.kernels.recurrent.delta_rule import DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.sampling.philox import STREAM_TARGET
from spd.kernels.sampling.sampling import SamplingTensors, adjust_rows

SMALL_SECTION = 256
SMALL_UNTIL = 4096
LARGE_SECTION = 1024
"""The sections that attention sums up by themselves, and the position where large ones begin: see
attention.c."""
MOST_BLOCKS = 8
"""Blocks of 16 rows that share the keys of a section, at most."""
MOST_PARTIAL = 64 << 20
"""Bytes for the sums of sections, at most."""


@dataclass(frozen=True)
class NativePlan(AttentionPlan):
    """The positions of a pass's rows."""

    positions: Tensor  # [S, Q] int64
    first_key: int
    last: Tensor | None  # [S, Q] int64


class NativeKernels(NativeRounds):
    """The set "native": the operations of one compiled library, and torch's for those that it
    lacks.

    For one thread at a time: products share scratch memory for their rows. See
    `spd.kernels.interface.Kernels` for the contracts.
    """

    name = "native"
    capabilities: Capabilities = CAPABILITIES["native"]

    def __init__(self, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """dtype: the library's elements'. Raises NativeUnavailable."""
        super().__init__(path, dtype)
        self.native = self

    def rotary_store(
        self,
        qkv: Tensor,
        rows: RotatedRows,
        qk_weight: Tensor | None,
        epsilon: float,
        pools: Pools,
        num_heads: int,
    ) -> Tensor:
        """Compute `Kernels.rotary_store` by C; positions are not None, the norm's scales are
        float32.

        A page has a layout that only these kernels read: head by head, as tiles of their products.
        """
        assert rows.positions is not None
        count = qkv.shape[0]
        page, kv_heads, size = pools[0].shape[1:]
        query = torch.empty(count, num_heads, size, dtype=self.dtype)
        keys, values, *scales = pools
        key_scales, value_scales = scales or (None, None)
        self.call_threads(
            "rotary_store",
            qkv,
            rows.cos,
            rows.sin,
            rows.positions,
            rows.kv_slots,
            qk_weight,
            keys,
            values,
            key_scales,
            value_scales,
            query,
            count,
            num_heads,
            kv_heads,
            size,
            page,
            epsilon,
        )
        return query

    def plan_attention(
        self, windows: Windows, heads: AttentionHeads, page_size: int, dtype: torch.dtype
    ) -> NativePlan:
        """Compute `Kernels.plan_attention`: make the tensors contiguous."""
        last = windows.last
        return NativePlan(
            windows.page_table.contiguous(),
            windows.positions.contiguous(),
            heads.first_key,
            None if last is None else last.contiguous(),
        )

    def paged_attention(
        self,
        query: Tensor,
        pools: Pools,
        plan: AttentionPlan,
        params: AttentionParams,
        rank: int | None = None,
    ) -> Tensor:
        """Compute `Kernels.paged_attention` by C.

        Values have `rank` elements, or as many as keys.
        """
        assert isinstance(plan, NativePlan)
        page, kv_heads, size = pools[0].shape[1:]
        table = plan.page_table
        keys, values, *scales = pools
        key_scales, value_scales = scales or (None, None)
        query = query.contiguous()
        out = torch.empty(*query.shape[:3], rank or size, dtype=self.dtype)
        partial_bytes = self._partial_bytes(query, kv_heads, rank or size, page * table.shape[1])
        self.call_threads(
            "attend",
            query,
            keys,
            values,
            table,
            plan.positions,
            plan.last,
            out,
            params.sinks,
            self.scratch_address(ceil_div(partial_bytes, TILE_BYTES)),
            key_scales,
            value_scales,
            partial_bytes,
            *query.shape[:3],
            kv_heads,
            size,
            rank or size,
            page,
            table.shape[1],
            plan.first_key,
            params.sliding or 0,
            params.scale,
            params.softcap or 0.0,
        )
        return out

    def _partial_bytes(self, query: Tensor, kv_heads: int, size: int, context: int) -> int:
        """Return the bytes with which threads share the sections of a context; 0 where it is no gain.

        It is none for many rows, and where there are several heads and slots for each thread.
        """
        slots, width, heads, _ = query.shape
        blocks = ceil_div(width * (heads // kv_heads), TILE_SIDE)
        units = slots * kv_heads * blocks
        if blocks > MOST_BLOCKS or (blocks == 1 and units >= 4 * self.threads):
            return 0
        small = ceil_div(min(context, SMALL_UNTIL), SMALL_SECTION)
        sections = small + ceil_div(max(0, context - SMALL_UNTIL), LARGE_SECTION)
        bytes_ = units * sections * 2 * TILE_BYTES * (ceil_div(size, TILE_DEPTH) + 1)
        return min(bytes_, MOST_PARTIAL)

    def latent_store(
        self,
        query: Tensor,
        latent: Tensor,
        rows: RotatedRows,
        norm: Tensor,
        epsilon: float,
        pages: Tensor,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Compute `Kernels.latent_store` by C; positions are not None."""
        assert rows.positions is not None and query.stride(2) == latent.stride(1) == 1
        count, heads, size = query.shape
        out = torch.empty(query.shape, dtype=self.dtype)
        factors = norm.float()
        self.call_threads(
            "latent_store",
            query,
            latent,
            rows.cos,
            rows.sin,
            rows.positions,
            rows.kv_slots,
            factors,
            pages,
            scales,
            out,
            count,
            heads,
            norm.shape[0],
            size,
            query.stride(0),
            query.stride(1),
            latent.stride(0),
            epsilon,
        )
        return out

    def mla_attention(
        self,
        query: Tensor,
        pages: Tensor,
        plan: AttentionPlan,
        rank: int,
        scale: float,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Compute `Kernels.mla_attention` by `paged_attention`."""
        pool = pages.unsqueeze(2)
        pools: Pools = (pool, pool) if scales is None else (pool, pool, scales, scales)
        return self.paged_attention(query, pools, plan, AttentionParams(scale), rank)

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute `Kernels.router_logits` by C, in one part."""
        logits = torch.empty(x.shape[0], 1, weight.shape[0])
        self.call_threads(
            "router", x.contiguous(), weight.contiguous(), logits, *x.shape, weight.shape[0]
        )
        return logits

    def route(
        self, parts: Tensor, correction: Tensor | None, rule: RoutingRule
    ) -> tuple[Tensor, Tensor]:
        """Compute `Kernels.route` by C, of parts [T, 1, E]."""
        rows, _, experts = parts.shape
        correction = None if correction is None else correction.float().contiguous()
        ids = torch.empty(rows, rule.per_token, dtype=torch.int64)
        weights = torch.empty(rows, rule.per_token)
        row_bytes = ceil_div(4 * (2 * experts + rule.groups) + experts + rule.groups, 64) * 64
        scratch = torch.empty(rows * row_bytes, dtype=torch.uint8)
        self.call_threads(
            "route",
            parts,
            correction,
            ids,
            weights,
            scratch,
            rows,
            experts,
            rule.per_token,
            rule.groups,
            rule.top_groups,
            rule.experts_per_group_score,
            rule.sigmoid,
            rule.normalised,
            rule.weight_epsilon,
            rule.scale,
        )
        return ids, weights

    def sample_rows(
        self,
        logits: Tensor,
        draft: Tensor,
        positions: Tensor,
        tensors: SamplingTensors,
        stream: int = STREAM_TARGET,
    ) -> tuple[Tensor, Tensor]:
        """Compute `Kernels.sample_rows` by C.

        Bias, penalties and minimum length are applied by torch.
        """
        mask = tensors.mask
        steps = (tensors.bias, tensors.generated, tensors.min_length)
        if any(step is not None for step in steps):
            logits = adjust_rows(logits, draft, replace(tensors, mask=None))
        logits = logits.contiguous()
        positions = positions.contiguous()
        slots, width, vocab = logits.shape
        tokens = torch.empty(slots, width, dtype=torch.int64)
        finite = torch.empty(slots, width, dtype=torch.bool)
        usable = min(tensors.usable_vocab, vocab)
        scratch_bytes = self.threads * ceil_div(16 * usable, 64) * 64
        self.call_threads(
            "sample",
            logits,
            tensors.temperature,
            tensors.top_p,
            tensors.min_p,
            tensors.top_k,
            tensors.seed,
            positions,
            mask,
            tokens,
            finite,
            self.scratch_address(ceil_div(scratch_bytes, TILE_BYTES)),
            slots,
            width,
            vocab,
            usable,
            stream,
            *((0, 0) if mask is None else mask.stride()[:2]),
            tensors.noise,
            tensors.truncation,
        )
        return tokens, finite

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ring: Tensor,
        rows: Segments,
        silu: bool = True,
    ) -> Tensor:
        """Compute `Kernels.short_conv` by C; rows of x have stride 1."""
        assert x.stride(1) == 1
        out = torch.zeros(x.shape)
        table = rows.table.contiguous()
        self.call_threads(
            "short_conv",
            table,
            rows.applied,
            table.shape[1],
            x.shape[0],
            x,
            weight,
            bias,
            ring,
            out,
            x.stride(0),
            x.shape[1],
            weight.shape[0],
            ring.shape[1],
            silu,
        )
        return out

    def delta_rule(
        self, mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
    ) -> Tensor:
        """Compute `Kernels.delta_rule` by C; rows of raw_gates have stride 1."""
        assert raw_gates.stride(1) == 1
        heads, width, size = memory.state.shape[1:]
        depth, key_heads = memory.keys.shape[1:3]
        count = mixed.shape[0]
        table = rows.table.contiguous()
        out = torch.zeros(count, heads, size)
        scratch = self.scratch_address(
            ceil_div(self.threads * (32 * width + count * (2 * width + 35)), TILE_SIDE * TILE_DEPTH)
        )
        self.call_threads(
            "delta_rule",
            table,
            rows.applied,
            table.shape[1],
            count,
            mixed,
            rule.rate,
            rule.bias,
            raw_gates,
            memory.state,
            memory.keys,
            memory.updates,
            memory.gates,
            scratch,
            out,
            raw_gates.stride(0),
            heads,
            key_heads,
            width,
            size,
            depth,
            rule.corrects,
        )
        return out

    delta_chunks = delta_rule
    """A step a token is as fast in C, and its bits do not depend on the grouping of rows."""

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, gate_first: bool = False
    ) -> Tensor:
        """Compute `Kernels.gated_norm` by C; rows of gate have stride 1."""
        assert gate.stride(1) == 1
        out = torch.empty(gate.shape, dtype=self.dtype)
        rows, heads, size = x.shape
        self.call_threads(
            "gated_norm",
            x,
            weight,
            gate,
            out,
            rows,
            gate.stride(0),
            heads,
            size,
            (weight.dim() - 1) * size,  # the stride of a head's scales
            epsilon,
            gate_first,
        )
        return out

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        expert_weights: ExpertWeights,
        stream: Tensor | None = None,
        *,
        chunk: bool = False,
    ) -> tuple[Tensor, None]:
        """Compute `Kernels.experts` by packed weights, with a stream in a prompt chunk, too."""
        gate_up = expert_weights.gate_up
        down = expert_weights.down
        assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight)
        assert stream is not None
        x = x.contiguous()
        stream = stream.contiguous()
        rows, per_token = ids.shape
        pairs = rows * per_token
        inner = down.depth
        depth = down.width
        count = down.count
        out = torch.empty(x.shape, dtype=self.dtype)
        activations = torch.empty(pairs, inner, dtype=self.dtype)
        results = torch.empty(pairs, depth)
        pair_places = torch.empty(pairs, dtype=torch.int64)
        starts = torch.empty(count + 1, dtype=torch.int64)
        next_places = torch.empty(count, dtype=torch.int64)
        used_experts = torch.empty(count, dtype=torch.int64)
        num_tiles = (pairs // TILE_SIDE + count + 1) * ceil_div(max(depth, inner), TILE_DEPTH)
        scratch = self.scratch_address(num_tiles)
        self.call_threads(
            "experts",
            x,
            stream,
            ids,
            weights,
            expert_weights.gate_up_bias,
            expert_weights.down_bias,
            *gate_up.fields,
            *down.fields,
            *epilogue_of(expert_weights.act),
            pair_places,
            starts,
            next_places,
            used_experts,
            activations,
            out,
            results,
            scratch,
            scratch + num_tiles * 2 * TILE_BYTES,  # row sums follow the tiles
            rows,
            depth,
            inner,
            gate_up.width,
            count,
            per_token,
            0,
        )
        return out, None


def open_library(cache: Callable[[], Path], dtype: str) -> NativeKernels:
    """Return the library of a dtype in the folder that `cache` returns, compiled if it is not
    there.

    Raises NativeUnavailable.
    """
    kind = getattr(torch, dtype)
    try:
        return NativeKernels(library_path(cache, dtype=dtype), kind)
    except AmxRefused:
        return NativeKernels(library_path(cache, "AVX512-BF16", dtype=dtype), kind)
