# mypy: disable-error-code="no-untyped-call"
"""The compiled C kernels as operations on tensors: bfloat16 or float32 on CPU, any number of rows alike."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import (
    AttentionHeads,
    AttentionParams,
    AttentionPlan,
    Windows,
)
from spd.kernels.attention.rotary_store import Pools, RotatedRows
from spd.kernels.capabilities import CAPABILITIES, CODE_BITS, Capabilities
from spd.kernels.experts.moe import ExpertWeights, RoutingRule
from spd.kernels.latent.mla_attention import HeadMatrices
from spd.kernels.launch import ceil_div
from spd.kernels.linear.activation import Activation
from spd.kernels.linear.few_bits import GroupedWeight, StackedWeight
from spd.kernels.native.build import NativeUnavailable, library_path
from spd.kernels.native.packed import (
    CODES,
    DEPTH,
    SIDE,
    SUM_BYTES,
    TILE_BYTES,
    WEIGHT_FORMAT,
    AnyMatrix,
    Epilogue,
    PackedWeight,
    c_values,
    in_column_blocks,
    in_large_pages,
    pack_structure,
    tile_steps,
)
from spd.kernels.recurrent.delta_rule import DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.round.window import Paging, RoundTensors, RoundWindow, Rows
from spd.kernels.sampling.philox import STREAM_TARGET
from spd.kernels.sampling.sampling import SamplingTensors, adjust_rows
from spd.kernels.torch_form import TorchKernels

Step = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments
ROUND = (
    "tokens",
    "length",
    "length_limit",
    "draft",
    "num_drafts",
    "match",
    "draft_limit",
    "draft_cap",
    "page_table",
    "stop_ids",
    "active",
    "ring",
    "times",
    "counter",
)
"""The tensors of `RoundTensors` as round.c has them."""
STRUCTURES = {
    "pack": "2P2li",
    "pack_codes": "2P2l2i",
    "linear": f"3P{WEIGHT_FORMAT}3P2li2f6lf",
    "rows": f"{WEIGHT_FORMAT}2P2l",
    "norm": "4P2lf",
    "rotary_store": "9P5lf",
    "attend": "7P10l2f",
    "latent_store": "9P7lf",
    "router": "3P3l",
    "route": "5P6l2i2f",
    "experts": f"6P{WEIGHT_FORMAT}{WEIGHT_FORMAT}i2f9P7l",
    "sample": "10P5l2i",
    "short_conv": "2P2l5P4li",
    "delta_rule": "2P2l10P6li",
    "gated_norm": "4P5lfi",
}
"""What C functions of several threads are given: their structures, as the module struct writes them."""
ROUNDED: Epilogue = (0, math.inf, 1.0)
"""The sums are rounded to the library's dtype."""
FLOAT32: Epilogue = (1, math.inf, 1.0)
"""The sums stay float32."""


def epilogue_of(act: Activation) -> Epilogue:
    """An activation of a product's sums, as C takes it: its number, limit and alpha."""
    number = ("relu2", "silu", "gelu", "swiglu").index(act.kind)
    return 2 + number, math.inf if act.limit is None else act.limit, act.alpha


def _round(state: RoundTensors) -> bytes:
    wide = (state.page_table, state.stop_ids)
    sizes = [state.length.shape[0], state.tokens.stride(0), state.draft.stride(0)]
    sizes += [size for each in wide for size in (each.stride(0), each.shape[1])]
    sizes += [*state.ring.shape, state.times.shape[1]]
    return pack_structure("14P11l", *(getattr(state, name) for name in ROUND), *sizes)


def _rows(slots: int, width: int, paging: Paging) -> tuple[Rows, bytes]:
    """Room for rows, and their structure."""
    ids, positions, slots_of = (torch.empty(slots, width, dtype=torch.int64) for _ in range(3))
    rows = (ids, positions, torch.empty(slots, width, dtype=torch.bool), slots_of)
    return Rows(*rows), pack_structure("4P4l", *rows, width, *paging)


@dataclass(frozen=True)
class NativePlan(AttentionPlan):
    """Where the rows of a pass stand."""

    positions: Tensor  # [S, Q] int64
    first_key: int


class AmxRefused(NativeUnavailable):
    """The processor has it, and programs may not use it."""


class NativeKernels(TorchKernels):
    """The set "native": the operations of one compiled library, and torch's for those that it lacks.

    For one thread at a time: products share scratch memory for their rows. See
    `spd.kernels.interface.Kernels` for the contracts.
    """

    name = "native"
    capabilities: Capabilities = CAPABILITIES["native"]

    def __init__(self, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """dtype is that of the file's elements. Raises NativeUnavailable."""
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"the compiled library cannot be loaded: {error}") from error
        chosen = library.spd_init()
        if chosen < 0:
            raise AmxRefused("the system does not grant AMX")
        self.native = self
        self.instructions = ("AVX2", "AVX512", "AVX512-BF16", "AMX", "NEON")[chosen]
        self.dtype = dtype
        self.library = library
        self.calls: list[Step] | None = None
        self.scratch_storages = [torch.UntypedStorage(0)]
        """For a product's rows: the last one is used, recordings go on with those that they began with."""
        self.threads = torch.get_num_threads()

    @contextmanager
    def record_calls(self, calls: list[Step]) -> Iterator[None]:
        """Have calls of C functions record_calls, with arguments that need no conversion, instead of made."""
        self.calls = calls
        try:
            yield
        finally:
            self.calls = None

    def call(self, name: str, *given: Any) -> None:
        """Call a C function with tensors, whole c_values and structures, or note the call."""
        function = getattr(self.library, f"spd_{name}")
        plain = c_values(given)
        made = tuple(each if isinstance(each, bytes) else ctypes.c_long(each) for each in plain)
        if self.calls is None:
            function(*made)
        else:
            self.calls.append((function, made))

    def call_threads(self, name: str, *given: Any) -> None:
        """Call a C function of several threads with its structure."""
        self.call(name, pack_structure(STRUCTURES[name], *given), self.threads)

    def scratch_address(self, tiles: int) -> int:
        """Return the address of room for left-side tiles, float32 where products are, and sums of rows."""
        size = tiles * (2 * TILE_BYTES + SUM_BYTES)
        if self.scratch_storages[-1].nbytes() < size:
            self.scratch_storages.append(
                torch.UntypedStorage(max(size, 2 * self.scratch_storages[-1].nbytes()))
            )
        address: int = self.scratch_storages[-1].data_ptr()
        return address

    def mark_time(self, times: Tensor, counter: Tensor, column: int, advance: bool) -> None:
        self.call("mark_time", times, counter, *times.shape, column, advance)

    def round_window(
        self, state: RoundTensors, k: int, paging: Paging, usable_vocab: int
    ) -> RoundWindow:
        slots = state.length.shape[0]
        rows, made = _rows(slots, k + 1, paging)
        draft = torch.empty(slots, k, dtype=torch.int64)
        count = torch.empty(slots, dtype=torch.int64)
        self.call("round_window", _round(state), made, draft, count, k, usable_vocab)
        return RoundWindow(rows.token_ids, rows.positions, rows.valid, rows.kv_slots, draft, count)

    def committed_window(
        self,
        state: RoundTensors,
        width: int,
        chosen: Tensor,
        paging: Paging,
        first: Tensor | None = None,
        ahead: int = 0,
    ) -> Rows:
        rows, made = _rows(state.length.shape[0], width + ahead, paging)
        self.call("committed_window", _round(state), made, chosen.contiguous(), first, ahead)
        return rows

    def draft_step(
        self, state: RoundTensors, sampled: Tensor, step: int, k: int, paging: Paging
    ) -> Rows:
        rows, made = _rows(state.length.shape[0], 1, paging)
        self.call("draft_step", _round(state), made, sampled.contiguous(), step, k)
        return rows

    def round_commit(
        self,
        state: RoundTensors,
        window: RoundWindow,
        sampled: Tensor,
        finite: Tensor,
        accepted: Tensor | None = None,
        generated: Tensor | None = None,
    ) -> None:
        drawn = (
            window.draft.contiguous(),
            window.num_drafts,
            sampled.contiguous(),
            finite.contiguous(),
        )
        k = window.draft.shape[1]
        stride = 0 if generated is None else generated.stride(0)
        self.call("round_commit", _round(state), *drawn, accepted, generated, k, stride)

    def pack(self, weight: AnyMatrix, *, gated: bool = False) -> PackedWeight:
        """A weight [N, K], or several [E, N, K], in tiles filled up with zeros."""
        if isinstance(weight, GroupedWeight):
            return self._pack_codes(weight, gated)
        if isinstance(weight, StackedWeight) and not gated:
            first, *rest = (self._pack_codes(piece, gated) for piece in weight.pieces)
            return replace(first, further_pieces=tuple(rest))
        if isinstance(weight, StackedWeight):  # gates and what they open are of one form
            weight = weight.plain(self.dtype)
        width, depth = weight.shape[-2:]
        every = weight.reshape(-1, width, depth)
        size = tile_steps(width, depth, gated) * 2 * SIDE * DEPTH
        tiles = in_large_pages(torch.empty(every.shape[0], size, dtype=self.dtype))
        for own, one in zip(tiles, every, strict=True):
            self.call_threads("pack", one.to(self.dtype).contiguous(), own, width, depth, gated)
        return PackedWeight(tiles, width, depth, gated, every.shape[0])

    def _pack_codes(self, weight: GroupedWeight, gated: bool) -> PackedWeight:
        """Groups are 16, multiples of 32, or a whole row."""
        width, depth = weight.shape[-2:]
        groups = weight.scales.shape[-1]
        group = weight.group if groups > 1 else ceil_div(depth, DEPTH) * DEPTH
        codes = weight.codes.view(-1, width, weight.codes.shape[-1])
        count = codes.shape[0]
        kind = 1 + CODES.index(weight.kind)
        size = tile_steps(width, depth, gated) * 2 * SIDE * CODE_BITS[weight.kind] * DEPTH // 8
        tiles = in_large_pages(torch.empty(count, size, dtype=torch.uint8))
        for to, own in zip(tiles, codes, strict=True):
            self.call_threads("pack_codes", own.contiguous(), to, width, depth, gated, kind)
        beside = {
            name: in_column_blocks(part.reshape(count, width, part.shape[-1]), gated)
            for name, part in weight.quant_parameters.items()
        }
        return PackedWeight(tiles, width, depth, gated, count, kind, group, groups, beside)

    def packed_linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        epilogue: Epilogue = ROUNDED,
        *,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x [T, K] times W, plus bias float32 [N] and residual [T, N]: [T, N], or [T, N / 2] with a gate.

        x is RMS-normed first where the scales norm float32 [K] are given. Summed in float32, rounded once.
        Of x [T, H, K] each head is multiplied by its own of H weights.
        """
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows = x.shape[0]
        heads = weight.count
        depth = weight.depth
        width = weight.width // 2 if weight.gated else weight.rows
        kind = torch.float32 if epilogue is FLOAT32 else self.dtype
        y = torch.empty(*x.shape[:-1], width, dtype=kind)
        room = self.scratch_address(heads * ceil_div(rows, SIDE) * ceil_div(depth, DEPTH))
        strides = (x.stride(0), x.stride(-2), width)
        sizes = (rows, heads, depth, *strides, epsilon)
        first = 0
        for part in (weight, *weight.further_pieces):
            columns = slice(first, None)
            own = (None if each is None else each[..., columns] for each in (bias, residual, y))
            ends = (*own, part.width, heads * width, *epilogue)
            self.call_threads("linear", x, norm, room, *part.fields, *ends, *sizes)
            first += part.width
        return y

    def packed_rows(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        """Return rows [T, K] of a weight in codes, each value rounded once; ids: int64 [T]."""
        made = torch.empty(ids.shape[0], weight.depth, dtype=self.dtype)
        self.call_threads(
            "rows", *weight.fields, ids.contiguous(), made, ids.shape[0], weight.depth
        )
        return made

    def head_linear(self, x: Tensor, weight: HeadMatrices) -> Tensor:
        """Compute `Kernels.head_linear`; the weight packs the heads' matrices, transposed."""
        assert isinstance(weight, PackedWeight) and x.shape[1] == weight.count
        return self.packed_linear(x, weight, None)

    def norm(
        self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
    ) -> Tensor:
        """The RMS norm of x [T, N] with scales weight float32 [N], plus residual [T, N]; rounded once."""
        x, y = x.contiguous(), torch.empty(x.shape, dtype=self.dtype)
        self.call_threads("norm", x, residual, weight, y, *x.shape, epsilon)
        return y

    def rms_norm_rows(
        self, x: Tensor, squares: Tensor | None, weight: Tensor, epsilon: float
    ) -> Tensor:
        """No squares are needed."""
        return self.norm(x, weight.float(), epsilon)

    def rotary_store(
        self,
        qkv: Tensor,
        rows: RotatedRows,
        qk_weight: Tensor | None,
        epsilon: float,
        pools: Pools,
        num_heads: int,
    ) -> Tensor:
        """Positions are needed, the norm's scales are float32.

        A page holds what these kernels alone read, head by head: as if it were [K, page, D].
        """
        assert rows.positions is not None
        count = qkv.shape[0]
        page, kv_heads, size = pools[0].shape[1:]
        query = torch.empty(count, num_heads, size, dtype=self.dtype)
        given = (qkv, rows.cos, rows.sin, rows.positions, rows.kv_slots, qk_weight, *pools, query)
        self.call_threads("rotary_store", *given, count, num_heads, kv_heads, size, page, epsilon)
        return query

    def plan_attention(
        self, windows: Windows, heads: AttentionHeads, page_size: int, dtype: torch.dtype
    ) -> NativePlan:
        """Nothing is made but contiguous."""
        return NativePlan(
            windows.page_table.contiguous(), windows.positions.contiguous(), heads.first_key
        )

    def paged_attention(
        self,
        query: Tensor,
        pools: Pools,
        plan: AttentionPlan,
        params: AttentionParams,
        rank: int | None = None,
    ) -> Tensor:
        """Of values the first `rank` elements."""
        assert isinstance(plan, NativePlan)
        page, kv_heads, size = pools[0].shape[1:]
        table = plan.page_table
        query, mixed = (
            query.contiguous(),
            torch.empty(*query.shape[:3], rank or size, dtype=self.dtype),
        )
        given = (
            query,
            *pools,
            table,
            plan.positions,
            mixed,
            params.sinks,
            *query.shape[:3],
            kv_heads,
            size,
        )
        more = (rank or size, page, table.shape[1], plan.first_key, params.sliding or 0)
        self.call_threads("attend", *given, *more, params.scale, params.softcap or 0.0)
        return mixed

    def latent_store(
        self,
        query: Tensor,
        latent: Tensor,
        rows: RotatedRows,
        norm: Tensor,
        epsilon: float,
        pages: Tensor,
    ) -> Tensor:
        """Positions are needed."""
        assert rows.positions is not None and query.stride(2) == latent.stride(1) == 1
        count, heads, turned = query.shape
        out = torch.empty(query.shape, dtype=self.dtype)
        given = (
            query,
            latent,
            rows.cos,
            rows.sin,
            rows.positions,
            rows.kv_slots,
            norm.float(),
            pages,
            out,
        )
        strides = (query.stride(0), query.stride(1), latent.stride(0))
        self.call_threads(
            "latent_store", *given, count, heads, norm.shape[0], turned, *strides, epsilon
        )
        return out

    def mla_attention(
        self, query: Tensor, pages: Tensor, plan: AttentionPlan, rank: int, scale: float
    ) -> Tensor:
        pool = pages.unsqueeze(2)
        return self.paged_attention(query, (pool, pool), plan, AttentionParams(scale), rank)

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        logits = torch.empty(x.shape[0], 1, weight.shape[0])
        self.call_threads(
            "router", x.contiguous(), weight.contiguous(), logits, *x.shape, weight.shape[0]
        )
        return logits

    def route(
        self, parts: Tensor, correction: Tensor | None, rule: RoutingRule
    ) -> tuple[Tensor, Tensor]:
        """Parts [T, 1, E] are `router_logits`'."""
        rows, _, experts = parts.shape
        correction = None if correction is None else correction.float().contiguous()
        ids = torch.empty(rows, rule.per_token, dtype=torch.int64)
        weights = torch.empty(rows, rule.per_token)
        each = ceil_div(4 * (2 * experts + rule.groups) + experts + rule.groups, 64) * 64
        room = torch.empty(rows * each, dtype=torch.uint8)
        sizes = (
            rows,
            experts,
            rule.per_token,
            rule.groups,
            rule.top_groups,
            rule.experts_per_group_score,
        )
        how = (rule.sigmoid, rule.normalised, rule.weight_epsilon, rule.scale)
        self.call_threads("route", parts, correction, ids, weights, room, *sizes, *how)
        return ids, weights

    def sample_rows(
        self,
        logits: Tensor,
        draft: Tensor,
        positions: Tensor,
        tensors: SamplingTensors,
        stream: int = STREAM_TARGET,
    ) -> tuple[Tensor, Tensor]:
        """Bias, penalties, minimum length and masks are torch's."""
        steps = (tensors.bias, tensors.generated, tensors.min_length, tensors.mask)
        if any(step is not None for step in steps):
            logits = adjust_rows(logits, draft, tensors)
        logits, positions, (slots, width, vocab) = (
            logits.contiguous(),
            positions.contiguous(),
            logits.shape,
        )
        tokens = torch.empty(slots, width, dtype=torch.int64)
        finite = torch.empty(slots, width, dtype=torch.bool)
        usable = min(tensors.usable_vocab, vocab)
        room = self.scratch_address(
            ceil_div(self.threads * ceil_div(16 * usable, 64) * 64, TILE_BYTES)
        )
        rules = (tensors.temperature, tensors.top_p, tensors.min_p, tensors.top_k, tensors.seed)
        given = (
            logits,
            *rules,
            positions,
            tokens,
            finite,
            room,
            slots,
            width,
            vocab,
            usable,
            stream,
        )
        self.call_threads("sample", *given, tensors.noise, tensors.truncation)
        return tokens, finite

    def ngram_lookup(
        self,
        state: RoundTensors,
        k: int,
        ngram_min: int,
        ngram_max: int,
        bound: int,
        keep_drafts: bool = False,
    ) -> None:
        """Bound is not used."""
        self.call("lookup", _round(state), k, ngram_min, ngram_max, keep_drafts)

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ring: Tensor,
        rows: Segments,
        silu: bool = True,
    ) -> Tensor:
        assert x.stride(1) == 1
        out = torch.zeros(x.shape)
        table = rows.table.contiguous()
        runs = (table, rows.applied, table.shape[1], x.shape[0])
        sizes = (x.stride(0), x.shape[1], weight.shape[0], ring.shape[1])
        self.call_threads("short_conv", *runs, x, weight, bias, ring, out, *sizes, silu)
        return out

    def delta_rule(
        self, mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
    ) -> Tensor:
        assert raw_gates.stride(1) == 1
        heads, width, size = memory.state.shape[1:]
        depth, key_heads = memory.keys.shape[1:3]
        count = mixed.shape[0]
        table = rows.table.contiguous()
        out = torch.zeros(count, heads, size)
        room = self.scratch_address(
            ceil_div(self.threads * (32 * width + count * (2 * width + 2)), SIDE * DEPTH)
        )
        runs = (table, rows.applied, table.shape[1], count)
        given = (mixed, rule.rate, rule.bias, raw_gates, *memory, room, out)
        sizes = (raw_gates.stride(0), heads, key_heads, width, size, depth)
        self.call_threads("delta_rule", *runs, *given, *sizes, rule.corrects)
        return out

    delta_chunks = delta_rule
    """A step a token is as fast here, and its bits are the same however rows are grouped."""

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, gate_first: bool = False
    ) -> Tensor:
        assert gate.stride(1) == 1
        out = torch.empty(gate.shape, dtype=self.dtype)
        own = (weight.dim() - 1) * x.shape[2]
        sizes = (x.shape[0], gate.stride(0), *x.shape[1:], own)
        self.call_threads("gated_norm", x, weight, gate, out, *sizes, epsilon, gate_first)
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
        """Compute `Kernels.experts` by pack_structure weights, onto a stream in a prompt chunk too."""
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
        made = torch.empty(pairs, inner, dtype=self.dtype)
        lists = [torch.empty(size, dtype=torch.int64) for size in (pairs, count + 1, count, count)]
        num_tiles = (pairs // SIDE + count + 1) * ceil_div(max(depth, inner), DEPTH)
        room = self.scratch_address(num_tiles)
        given = (
            x,
            stream,
            ids,
            weights,
            expert_weights.gate_up_bias,
            expert_weights.down_bias,
            *gate_up.fields,
            *down.fields,
        )
        row_sums = room + num_tiles * 2 * TILE_BYTES
        places = (*lists, made, out, torch.empty(pairs, depth), room, row_sums)
        sizes = (rows, depth, inner, gate_up.width, count, per_token, 0)
        self.call_threads("experts", *given, *epilogue_of(expert_weights.act), *places, *sizes)
        return out, None


def open_library(cache: Callable[[], Path], dtype: str) -> NativeKernels:
    """The library of a dtype in the folder that `cache` names, made if need be. Raises NativeUnavailable."""
    kind = getattr(torch, dtype)
    try:
        return NativeKernels(library_path(cache, dtype=dtype), kind)
    except AmxRefused:
        return NativeKernels(library_path(cache, "AVX512-BF16", dtype=dtype), kind)
