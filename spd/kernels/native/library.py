"""The compiled C kernels as operations on tensors: what `spd.kernels.dispatch` takes from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionHeads, AttentionPlan, Scores, Windows
from spd.kernels.attention.rotary_store import Pools, RotatedRows
from spd.kernels.experts.moe import RoutingRule
from spd.kernels.native.build import library_path
from spd.kernels.native.products import (
    DEPTH,
    SIDE,
    TILE_BYTES,
    AmxRefused,
    CompiledLibrary,
    PackedWeight,
    address,
    tiles_of,
)
from spd.kernels.recurrent.delta_rule import DeltaMemory
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.round.window import RoundTensors
from spd.kernels.sampling.philox import STREAM_TARGET
from spd.kernels.sampling.sampling import SamplingTensors, adjust_rows


@dataclass(frozen=True)
class NativePlan(AttentionPlan):
    """Where the rows of a pass stand."""

    positions: Tensor  # [S, Q] int64
    first_key: int


class NativeLibrary(CompiledLibrary):
    """Attention, its cache and experts beside the products."""

    def rotary_store(
        self,
        qkv: Tensor,
        rows: RotatedRows,
        qk_weight: Tensor | None,
        epsilon: float,
        pools: Pools,
        num_heads: int,
    ) -> Tensor:
        """See `spd.kernels.attention.rotary_store`; positions are needed, qk_weight is float32.

        A page holds what these kernels alone read, head by head: as if it were [K, page, D].
        """
        assert rows.positions is not None
        (keys, values), (page, kv_heads, size) = pools, pools[0].shape[1:]
        query = torch.empty(qkv.shape[0], num_heads, size, dtype=self.dtype)
        self.library.spd_rotary_store(
            qkv.data_ptr(), rows.cos.data_ptr(), rows.sin.data_ptr(), rows.positions.data_ptr(),
            rows.kv_slots.data_ptr(), address(qk_weight), epsilon, keys.data_ptr(), values.data_ptr(),
            query.data_ptr(), qkv.shape[0], num_heads, kv_heads, size, page, self.threads,
        )  # fmt: skip
        return query

    def plan_attention(
        self, windows: Windows, heads: AttentionHeads, page_size: int, dtype: torch.dtype
    ) -> NativePlan:
        """See `spd.kernels.attention.paged_attention`: nothing is made but contiguous."""
        return NativePlan(windows.page_table.contiguous(), windows.positions.contiguous(), heads.first_key)

    def paged_attention(self, query: Tensor, pools: Pools, plan: AttentionPlan, scores: Scores) -> Tensor:
        """See `spd.kernels.attention.paged_attention`."""
        return self._mixed(query, pools, plan, scores, query.shape[-1])

    def _mixed(
        self, query: Tensor, pools: Pools, plan: AttentionPlan, scores: Scores, value_size: int
    ) -> Tensor:
        """Attend query [S, Q, H, D] to pools [P, page, K, D]: [S, Q, H, V], the values' first V elements."""
        assert isinstance(plan, NativePlan)
        (slots, width, heads, size), (keys, values) = query.shape, pools
        query, mixed = query.contiguous(), torch.empty(slots, width, heads, value_size, dtype=self.dtype)
        self._attend(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), plan.page_table.data_ptr(),
            plan.page_table.shape[1], plan.positions.data_ptr(), mixed.data_ptr(), slots, width, heads,
            keys.shape[2], size, value_size, keys.shape[1], scores.scale, scores.softcap or 0.0,
            plan.first_key, scores.sliding or 0, self.threads,
        )  # fmt: skip
        return mixed

    def prefill_attention(
        self, query: Tensor, pools: Pools, page_row: Tensor, start: int, scores: Scores, first_key: int = 0
    ) -> Tensor:
        """See `spd.kernels.attention.paged_attention`."""
        positions = torch.arange(start, start + query.shape[0])[None]
        plan = NativePlan(page_row.contiguous()[None], positions, first_key)
        return self.paged_attention(query[None], pools, plan, scores)[0]

    def latent_store(
        self, query: Tensor, latent: Tensor, rows: RotatedRows, norm: Tensor, epsilon: float, pages: Tensor
    ) -> Tensor:
        """See `spd.kernels.latent.mla_attention`; positions are needed."""
        assert rows.positions is not None and query.stride(2) == latent.stride(1) == 1
        count, heads, turned = query.shape
        out, scales = torch.empty(query.shape, dtype=self.dtype), norm.float()
        self.library.spd_latent_store(
            query.data_ptr(), latent.data_ptr(), rows.cos.data_ptr(), rows.sin.data_ptr(),
            rows.positions.data_ptr(), rows.kv_slots.data_ptr(), scales.data_ptr(), epsilon,
            pages.data_ptr(), out.data_ptr(), count, heads, norm.shape[0], turned, query.stride(0),
            query.stride(1), latent.stride(0), self.threads,
        )  # fmt: skip
        return out

    def mla_attention(
        self, query: Tensor, pages: Tensor, plan: AttentionPlan, rank: int, scale: float
    ) -> Tensor:
        """See `spd.kernels.latent.mla_attention`."""
        pool = pages.unsqueeze(2)
        return self._mixed(query, (pool, pool), plan, Scores(scale), rank)

    def mla_prefill(
        self, query: Tensor, pages: Tensor, page_row: Tensor, start: int, rank: int, scale: float
    ) -> Tensor:
        """See `spd.kernels.latent.mla_attention`."""
        positions = torch.arange(start, start + query.shape[0])[None]
        plan = NativePlan(page_row.contiguous()[None], positions, 0)
        return self.mla_attention(query[None], pages, plan, rank, scale)[0]

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `spd.kernels.experts.moe`."""
        x, weight = x.contiguous(), weight.contiguous()
        logits = torch.empty(x.shape[0], 1, weight.shape[0])
        self.library.spd_router(
            x.data_ptr(), weight.data_ptr(), logits.data_ptr(), *x.shape, weight.shape[0], self.threads
        )
        return logits

    def route(self, parts: Tensor, correction: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        """See `spd.kernels.experts.moe`; parts [T, 1, E] are `router_logits`'."""
        rows, _, experts = parts.shape
        correction = None if correction is None else correction.float().contiguous()
        ids = torch.empty(rows, rule.per_token, dtype=torch.int64)
        weights = torch.empty(rows, rule.per_token)
        each = tiles_of(4 * (2 * experts + rule.groups) + experts + rule.groups, 64) * 64
        room = torch.empty(rows * each, dtype=torch.uint8)
        self.library.spd_route(
            parts.data_ptr(), address(correction), ids.data_ptr(), weights.data_ptr(), room.data_ptr(),
            rows, experts, rule.per_token, rule.groups, rule.groups_kept, rule.group_best,
            int(rule.sigmoid), int(rule.normalised), rule.scale, self.threads,
        )  # fmt: skip
        return ids, weights

    def sample_rows(
        self,
        logits: Tensor,
        draft: Tensor,
        positions: Tensor,
        tensors: SamplingTensors,
        stream: int = STREAM_TARGET,
    ) -> tuple[Tensor, Tensor]:
        """See `spd.kernels.sampling.sampling`; bias, penalties, minimum length and masks are torch's."""
        steps = tensors.steps
        if steps.bias or steps.penalties or steps.min_length or steps.grammar:
            logits = adjust_rows(logits, draft, tensors)
        logits, positions, (slots, width, vocab) = logits.contiguous(), positions.contiguous(), logits.shape
        tokens = torch.empty(slots, width, dtype=torch.int64)
        finite = torch.empty(slots, width, dtype=torch.bool)
        usable = min(tensors.usable_vocab, vocab)
        bytes_each = tiles_of(16 * usable, 64) * 64
        self.library.spd_sample(
            logits.data_ptr(), tensors.temperature.data_ptr(), tensors.top_p.data_ptr(),
            tensors.min_p.data_ptr(), tensors.top_k.data_ptr(), tensors.seed.data_ptr(), positions.data_ptr(),
            tokens.data_ptr(), finite.data_ptr(), self.room(tiles_of(self.threads * bytes_each, TILE_BYTES)),
            slots, width, vocab, usable, stream, int(steps.noise), int(steps.truncation), self.threads,
        )  # fmt: skip
        return tokens, finite

    def ngram_lookup(
        self, state: RoundTensors, k: int, ngram_min: int, ngram_max: int, bound: int, over: bool = False
    ) -> None:
        """See `spd.kernels.round.ngram_lookup`; bound is not used."""
        tokens, draft = state.tokens, state.draft
        self.library.spd_lookup(
            tokens.data_ptr(), state.length.data_ptr(), state.active.data_ptr(), draft.data_ptr(),
            state.num_drafts.data_ptr(), state.match.data_ptr(), tokens.shape[0], tokens.stride(0),
            draft.stride(0), k, ngram_min, ngram_max, int(over),
        )  # fmt: skip

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: Segments
    ) -> Tensor:
        """See `spd.kernels.recurrent.short_conv`."""
        assert x.stride(1) == 1
        out, table = torch.zeros(x.shape), rows.table.contiguous()
        self.library.spd_short_conv(
            x.data_ptr(), weight.data_ptr(), address(bias), ring.data_ptr(), out.data_ptr(),
            table.data_ptr(), rows.applied.data_ptr(), table.shape[1], x.stride(0), x.shape[1],
            weight.shape[0], ring.shape[1], x.shape[0], self.threads,
        )  # fmt: skip
        return out

    def delta_rule(
        self,
        mixed: Tensor,
        raw_gates: Tensor,
        rate: Tensor,
        bias: Tensor,
        memory: DeltaMemory,
        rows: Segments,
    ) -> Tensor:
        """See `spd.kernels.recurrent.delta_rule`."""
        assert raw_gates.stride(1) == 1
        (heads, width, size), (depth, key_heads) = memory.state.shape[1:], memory.keys.shape[1:3]
        out, table = torch.zeros(mixed.shape[0], heads, size), rows.table.contiguous()
        room = self.room(tiles_of(self.threads * (32 * width + len(mixed) * (2 * width + 2)), SIDE * DEPTH))
        self.library.spd_delta_rule(
            mixed.data_ptr(), raw_gates.data_ptr(), rate.data_ptr(), bias.data_ptr(),
            *(kept.data_ptr() for kept in memory), room, out.data_ptr(), table.data_ptr(),
            rows.applied.data_ptr(), table.shape[1], raw_gates.stride(0), heads, key_heads, width, size,
            depth, mixed.shape[0], self.threads,
        )  # fmt: skip
        return out

    delta_chunks = delta_rule
    """A step a token is as fast here, and its bits are the same however rows are grouped."""

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See `spd.kernels.recurrent.delta_rule`."""
        assert gate.stride(1) == 1
        out = torch.empty(gate.shape, dtype=self.dtype)
        self.library.spd_gated_norm(
            x.data_ptr(), gate.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr(), x.shape[0],
            gate.stride(0), *x.shape[1:], self.threads,
        )  # fmt: skip
        return out

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: PackedWeight,
        down: PackedWeight,
        stream: Tensor,
    ) -> Tensor:
        """stream [T, K] + `spd.kernels.experts.moe.experts` of x [T, K], rounded once: [T, K]."""
        x, stream, (rows, per_token) = x.contiguous(), stream.contiguous(), ids.shape
        pairs, inner, depth, count = rows * per_token, down.depth, down.width, down.count
        out, made = (
            torch.empty(x.shape, dtype=self.dtype),
            torch.empty(pairs, inner, dtype=self.dtype),
        )
        lists, sums = torch.empty(pairs + 3 * count + 1, dtype=torch.int64), torch.empty(pairs, depth)
        self.library.spd_experts(
            x.data_ptr(), ids.data_ptr(), weights.data_ptr(), gate_up.address, down.address,
            stream.data_ptr(), out.data_ptr(), rows, depth, inner, count, per_token,
            lists.data_ptr(), self.room((pairs // SIDE + count + 1) * tiles_of(max(depth, inner), DEPTH)),
            made.data_ptr(), sums.data_ptr(), self.threads,
        )  # fmt: skip
        return out


def open_library(cache: Callable[[], Path], dtype: str) -> NativeLibrary:
    """The library of a dtype in the folder that `cache` names, made if need be. Raises NativeUnavailable."""
    kind = getattr(torch, dtype)
    try:
        return NativeLibrary(library_path(cache, dtype=dtype), kind)
    except AmxRefused:
        return NativeLibrary(library_path(cache, "AVX512-BF16", dtype=dtype), kind)
