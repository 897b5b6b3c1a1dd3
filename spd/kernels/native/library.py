# mypy: disable-error-code="no-untyped-call"
"""The compiled C kernels as operations on tensors: bfloat16 or float32 on CPU, any number of rows alike."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionHeads, AttentionPlan, Scores, Windows
from spd.kernels.attention.rotary_store import Pools, RotatedRows
from spd.kernels.experts.moe import ExpertWeights, RoutingRule
from spd.kernels.launch import ceil_div
from spd.kernels.linear.activation import Activation
from spd.kernels.linear.few_bits import GroupedWeight
from spd.kernels.native.build import NativeUnavailable, library_path
from spd.kernels.recurrent.delta_rule import DeltaMemory, Rule
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.round.window import Places, RoundTensors, RoundWindow, Rows
from spd.kernels.sampling.philox import STREAM_TARGET
from spd.kernels.sampling.sampling import SamplingTensors, adjust_rows

SIDE, DEPTH = 16, 32
"""Rows or columns of a tile, and its depth."""
TILE_BYTES, LARGE_PAGE = 2 * SIDE * DEPTH, 1 << 21
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def at(*tensors: Tensor | None) -> Iterator[int | None]:
    """Where tensors lie. What every layer calls writes them out, which takes half the time."""
    return map(address, tensors)


ROUND = (
    *("tokens", "length", "length_limit", "draft", "num_drafts", "match", "draft_limit", "draft_cap"),
    *("page_table", "stop_ids", "active", "ring", "times", "counter"),
)


class RoundFields(ctypes.Structure):
    """`RoundTensors` as the C files know them: round.c."""

    _fields_ = (*((name, POINTER) for name in ROUND), ("sizes", LONG * 11))

    @classmethod
    def of(cls, state: RoundTensors) -> RoundFields:
        wide = (state.page_table, state.stop_ids)
        sizes = [state.length.shape[0], state.tokens.stride(0), state.draft.stride(0)]
        sizes += [size for each in wide for size in (each.stride(0), each.shape[1])]
        sizes += [*state.ring.shape, state.times.shape[1]]
        return cls(*(getattr(state, name).data_ptr() for name in ROUND), (LONG * 11)(*sizes))


class RowsFields(ctypes.Structure):
    """`Rows` as the C files know them, and how positions become rows of the pools."""

    _fields_ = (("tensors", POINTER * 4), ("sizes", LONG * 4))

    @classmethod
    def of(cls, rows: Rows, places: Places) -> RowsFields:
        tensors = (rows.token_ids, rows.positions, rows.valid, rows.kv_slots)
        return cls((POINTER * 4)(*at(*tensors)), (LONG * 4)(rows.token_ids.shape[1], *places))


SIGNATURES: dict[str, Sequence[Any]] = {
    "spd_init": (),
    "spd_pack": (POINTER,) * 2 + (LONG,) * 2 + (INT,) * 2,
    "spd_pack_codes": (*(POINTER,) * 6, *(LONG,) * 3, *(INT,) * 4),
    "spd_linear": (POINTER, POINTER, FLOAT, *(POINTER,) * 4, *(LONG,) * 8, INT, FLOAT, FLOAT, POINTER, INT),
    "spd_mark_time": (POINTER, POINTER, *(LONG,) * 3, INT),
    "spd_round_window": (RoundFields, RowsFields, POINTER, POINTER, LONG, LONG),
    "spd_committed_window": (RoundFields, RowsFields, POINTER, POINTER, LONG),
    "spd_draft_step": (RoundFields, RowsFields, POINTER, LONG, LONG),
    "spd_round_commit": (RoundFields, *(POINTER,) * 6, LONG, LONG),
    "spd_norm": (POINTER, POINTER, FLOAT, POINTER, POINTER, LONG, LONG, INT),
    "spd_rotary_store": (*(POINTER,) * 6, FLOAT, *(POINTER,) * 3, *(LONG,) * 5, INT),
    "spd_attend": (*(POINTER,) * 4, LONG, *(POINTER,) * 3, *(LONG,) * 7, FLOAT, FLOAT, LONG, LONG, INT),
    "spd_latent_store": (*(POINTER,) * 7, FLOAT, *(POINTER,) * 2, *(LONG,) * 7, INT),
    "spd_router": (*(POINTER,) * 3, *(LONG,) * 3, INT),
    "spd_route": (*(POINTER,) * 5, *(LONG,) * 6, INT, INT, FLOAT, FLOAT, INT),
    "spd_sample": (*(POINTER,) * 10, *(LONG,) * 5, *(INT,) * 3),
    "spd_lookup": (*(POINTER,) * 6, *(LONG,) * 6, INT),
    "spd_short_conv": (*(POINTER,) * 7, *(LONG,) * 6, INT, INT),
    "spd_delta_rule": (*(POINTER,) * 12, *(LONG,) * 8, INT, INT),
    "spd_gated_norm": (*(POINTER,) * 3, FLOAT, POINTER, *(LONG,) * 5, INT, INT),
    "spd_experts": (*(POINTER,) * 7, INT, FLOAT, FLOAT, *(POINTER,) * 2, *(LONG,) * 5, *(POINTER,) * 4, INT),
}


ROUNDED, FLOAT32 = (0, math.inf, 1.0), (1, math.inf, 1.0)
"""What becomes of a product's sums: they are rounded to the library's dtype, or not; or see `ending_of`."""


def ending_of(act: Activation) -> tuple[int, float, float]:
    """An activation of a product's sums, as C takes it: its number, limit and alpha."""
    number = ("relu2", "silu", "gelu", "swiglu").index(act.kind)
    return 2 + number, math.inf if act.limit is None else act.limit, act.alpha


CODES = ("int4", "int8", "e2m1", "e4m3")
"""Kinds of codes, numbered from 1."""


class Weight(ctypes.Structure):
    """A packed weight as the C files know it: codes.h."""

    _fields_ = (
        *((name, POINTER) for name in ("tiles", "scales", "zeros")),
        *((name, LONG) for name in ("group", "groups", "steps")),
        *((name, INT) for name in ("kind", "wide")),
    )


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K], or one for each of some heads or experts, as tiles; gated: its first half are gates.

    Of a weight in codes the tiles are codes, with scales and perhaps zeros of groups of so many columns.
    """

    tiles: Tensor
    width: int
    depth: int
    gated: bool
    count: int = 1
    kind: int = 0
    group: int = 0
    groups: int = 0
    scales: Tensor | None = None
    zeros: Tensor | None = None

    @cached_property
    def described(self) -> Weight:
        """What is handed to C: it points into these tensors."""
        wide = self.scales is not None and self.scales.dtype == torch.float32
        parts = at(self.tiles, self.scales, self.zeros)
        return Weight(*parts, self.group, self.groups, ceil_div(self.depth, DEPTH), self.kind, wide)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.described)


def _rows(slots: int, width: int) -> Rows:
    ids, positions, places = (torch.empty(slots, width, dtype=torch.int64) for _ in range(3))
    return Rows(ids, positions, torch.empty(slots, width, dtype=torch.bool), places)


def in_large_pages(tensor: Tensor) -> Tensor:
    """The tensor, for which large pages are asked of the system: reading it waits less for translations."""
    skipped = -tensor.data_ptr() % mmap.PAGESIZE
    if tensor.nbytes > LARGE_PAGE:
        place, size = tensor.data_ptr() + skipped, tensor.nbytes - skipped
        ctypes.CDLL(None).madvise(POINTER(place), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return tensor


@dataclass(frozen=True)
class NativePlan(AttentionPlan):
    """Where the rows of a pass stand."""

    positions: Tensor  # [S, Q] int64
    first_key: int


class AmxRefused(NativeUnavailable):
    """The processor has it, and programs may not use it."""


class NativeLibrary:
    """The kernels of one compiled library, for one thread at a time: they share room for a product's rows.

    Operations have the contracts of their torch forms, see `spd.kernels.dispatch.OPERATIONS`.
    """

    def __init__(self, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """dtype is that of the file's elements. Raises NativeUnavailable."""
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"the compiled library cannot be loaded: {error}") from error
        for name, kinds in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = list(kinds), INT if name == "spd_init" else None
        chosen = library.spd_init()
        if chosen < 0:
            raise AmxRefused("the system does not grant AMX")
        self.instructions = ("AVX2", "AVX512", "AVX512-BF16", "AMX", "NEON")[chosen]
        self.dtype = dtype
        self.library: Any = library
        self.rooms = [torch.UntypedStorage(0)]
        """For a product's rows: the last one is used, recordings go on with those that they began with."""
        self.threads = torch.get_num_threads()

    @contextmanager
    def noted(self, calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Iterator[None]:
        """Have calls of C functions noted, with arguments that need no conversion, instead of made."""
        library, plain = self.library, ctypes.CDLL(None, handle=self.library._handle)

        def note(name: str, *given: Any) -> None:
            kinds = zip(SIGNATURES[name], given, strict=True)
            converted = (each if isinstance(each, kind) else kind(each) for kind, each in kinds)
            calls.append((getattr(plain, name), tuple(converted)))

        self.library = SimpleNamespace(**{name: partial(note, name) for name in SIGNATURES})
        try:
            yield
        finally:
            self.library = library

    def mark_time(self, times: Tensor, counter: Tensor, column: int, advance: bool) -> None:
        self.library.spd_mark_time(*at(times, counter), *times.shape, column, advance)

    def round_window(self, state: RoundTensors, k: int, places: Places, usable_vocab: int) -> RoundWindow:
        slots = state.length.shape[0]
        rows, draft = _rows(slots, k + 1), torch.empty(slots, k, dtype=torch.int64)
        num_drafts = torch.empty(slots, dtype=torch.int64)
        given = (RoundFields.of(state), RowsFields.of(rows, places))
        self.library.spd_round_window(*given, *at(draft, num_drafts), k, usable_vocab)
        return RoundWindow(rows.token_ids, rows.positions, rows.valid, rows.kv_slots, draft, num_drafts)

    def committed_window(
        self,
        state: RoundTensors,
        width: int,
        chosen: Tensor,
        places: Places,
        first: Tensor | None = None,
        ahead: int = 0,
    ) -> Rows:
        rows, chosen = _rows(state.length.shape[0], width + ahead), chosen.contiguous()
        given = (RoundFields.of(state), RowsFields.of(rows, places))
        self.library.spd_committed_window(*given, *at(chosen, first), ahead)
        return rows

    def draft_step(self, state: RoundTensors, sampled: Tensor, step: int, k: int, places: Places) -> Rows:
        rows, sampled = _rows(state.length.shape[0], 1), sampled.contiguous()
        given = (RoundFields.of(state), RowsFields.of(rows, places))
        self.library.spd_draft_step(*given, *at(sampled), step, k)
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
        drawn = (window.draft.contiguous(), window.num_drafts, sampled.contiguous(), finite.contiguous())
        stride, k = 0 if generated is None else generated.stride(0), window.draft.shape[1]
        self.library.spd_round_commit(RoundFields.of(state), *at(*drawn, accepted, generated), k, stride)

    def pack(self, weight: Tensor | GroupedWeight, *, gated: bool = False) -> PackedWeight:
        """A weight [N, K], or several [E, N, K], in tiles filled up with zeros."""
        if isinstance(weight, GroupedWeight):
            return self._pack_codes(weight, gated)
        width, depth = weight.shape[-2:]
        every = weight.reshape(-1, width, depth)
        blocks = ceil_div(width // 2, SIDE) if gated else ceil_div(width, 2 * SIDE)
        size = blocks * ceil_div(depth, DEPTH) * 2 * SIDE * DEPTH
        tiles = in_large_pages(torch.empty(every.shape[0], size, dtype=self.dtype))
        for own, one in zip(tiles, every, strict=True):
            source = one.to(self.dtype).contiguous()
            self.library.spd_pack(*at(source, own), width, depth, gated, self.threads)
        return PackedWeight(tiles, width, depth, gated, every.shape[0])

    def _pack_codes(self, weight: GroupedWeight, gated: bool) -> PackedWeight:
        """Groups are 16, multiples of 32, or a whole row."""
        (width, depth), groups = weight.shape[-2:], weight.scales.shape[-1]
        group = weight.group if groups > 1 else ceil_div(depth, DEPTH) * DEPTH
        every = weight if len(weight.shape) == 3 else weight.each(lambda part: part[None])
        blocks = ceil_div(width // 2, SIDE) if gated else ceil_div(width, 2 * SIDE)
        count, kind = every.shape[0], 1 + CODES.index(weight.kind)
        step = SIDE * DEPTH if weight.kind in ("int4", "e2m1") else 2 * SIDE * DEPTH
        tiles = in_large_pages(torch.empty(count, blocks * ceil_div(depth, DEPTH) * step, dtype=torch.uint8))
        beside = [
            torch.empty(count, blocks * groups * 2 * SIDE, dtype=each.dtype) for each in every.parts[1:]
        ]
        for number in range(count):
            own = [part.contiguous() for part in every.expert(number).parts]
            to = [tiles[number], *(each[number] for each in beside)]
            self.library.spd_pack_codes(
                *at(*[*own, None][:3], *[*to, None][:3]), width, depth, groups, gated, kind,
                weight.scales.dtype == torch.float32, self.threads,
            )  # fmt: skip
        return PackedWeight(tiles, width, depth, gated, count, kind, group, groups, *beside)

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        ending: tuple[int, float, float] = ROUNDED,
        *,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x [T, K] times W, plus bias float32 [N] and residual [T, N]: [T, N], or [T, N / 2] with a gate.

        x is RMS-normed first where the scales norm float32 [K] are given. Summed in float32, rounded once.
        """
        rows = x.shape[0]
        width = weight.width // 2 if weight.gated else weight.width
        kind = torch.float32 if ending is FLOAT32 else self.dtype
        y = torch.empty(rows, width, dtype=kind)
        scratch = self.room(ceil_div(rows, SIDE) * ceil_div(weight.depth, DEPTH))
        x = x.contiguous()
        self.library.spd_linear(
            x.data_ptr(), address(norm), epsilon, weight.address, address(bias), address(residual),
            y.data_ptr(), rows, 1, weight.depth, weight.width, weight.depth, 0, width, 0, *ending, scratch,
            self.threads,
        )  # fmt: skip
        return y

    def room(self, tiles: int) -> int:
        """The address of room for so many left-side tiles, of float32 where products are."""
        size = 2 * tiles * TILE_BYTES
        if self.rooms[-1].nbytes() < size:
            self.rooms.append(torch.UntypedStorage(max(size, 2 * self.rooms[-1].nbytes())))
        return self.rooms[-1].data_ptr()

    def head_linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """Weight packs the heads' own, transposed."""
        rows, heads, depth = x.shape
        assert x.stride(2) == 1 and heads == weight.count
        y = torch.empty(rows, heads, weight.width, dtype=self.dtype)
        self.library.spd_linear(
            *at(x, None), 0.0, weight.address, *at(None, None, y), rows, heads, depth, weight.width,
            x.stride(0), x.stride(1), y.stride(0), y.stride(1), *ROUNDED,
            self.room(heads * ceil_div(rows, SIDE) * ceil_div(depth, DEPTH)), self.threads,
        )  # fmt: skip
        return y

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
        """The RMS norm of x [T, N] with scales weight float32 [N], plus residual [T, N]; rounded once."""
        x, y = x.contiguous(), torch.empty(x.shape, dtype=self.dtype)
        self.library.spd_norm(*at(x, weight), epsilon, *at(residual, y), *x.shape, self.threads)
        return y

    def rms_norm_rows(self, x: Tensor, squares: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """No squares are needed."""
        return self.norm(x, weight.float(), epsilon)

    def rotary_store(
        self,
        qkv: Tensor,
        rows: RotatedRows,
        norm: Tensor | None,
        epsilon: float,
        pools: Pools,
        num_heads: int,
    ) -> Tensor:
        """Positions are needed, the norm's scales are float32.

        A page holds what these kernels alone read, head by head: as if it were [K, page, D].
        """
        assert rows.positions is not None
        (keys, values), (page, kv_heads, size) = pools, pools[0].shape[1:]
        query = torch.empty(qkv.shape[0], num_heads, size, dtype=self.dtype)
        self.library.spd_rotary_store(
            qkv.data_ptr(), rows.cos.data_ptr(), rows.sin.data_ptr(), rows.positions.data_ptr(),
            rows.kv_slots.data_ptr(), address(norm), epsilon, keys.data_ptr(), values.data_ptr(),
            query.data_ptr(), qkv.shape[0], num_heads, kv_heads, size, page, self.threads,
        )  # fmt: skip
        return query

    def plan_attention(
        self, windows: Windows, heads: AttentionHeads, page_size: int, dtype: torch.dtype
    ) -> NativePlan:
        """Nothing is made but contiguous."""
        return NativePlan(windows.page_table.contiguous(), windows.positions.contiguous(), heads.first_key)

    def paged_attention(
        self, query: Tensor, pools: Pools, plan: AttentionPlan, scores: Scores, rank: int | None = None
    ) -> Tensor:
        """Of values the first `rank` elements."""
        assert isinstance(plan, NativePlan)
        (slots, width, heads, size), (keys, values) = query.shape, pools
        query, mixed = query.contiguous(), torch.empty(slots, width, heads, rank or size, dtype=self.dtype)
        self.library.spd_attend(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), plan.page_table.data_ptr(),
            plan.page_table.shape[1], plan.positions.data_ptr(), address(scores.sinks), mixed.data_ptr(),
            slots, width, heads, keys.shape[2], size, rank or size, keys.shape[1], scores.scale,
            scores.softcap or 0.0, plan.first_key, scores.sliding or 0, self.threads,
        )  # fmt: skip
        return mixed

    def prefill_attention(
        self,
        query: Tensor,
        pools: Pools,
        page_row: Tensor,
        start: int,
        scores: Scores,
        first_key: int = 0,
        rank: int | None = None,
    ) -> Tensor:
        """Of values the first `rank` elements."""
        positions = torch.arange(start, start + query.shape[0])[None]
        plan = NativePlan(page_row.contiguous()[None], positions, first_key)
        return self.paged_attention(query[None], pools, plan, scores, rank)[0]

    def latent_store(
        self, query: Tensor, latent: Tensor, rows: RotatedRows, norm: Tensor, epsilon: float, pages: Tensor
    ) -> Tensor:
        """Positions are needed."""
        assert rows.positions is not None and query.stride(2) == latent.stride(1) == 1
        count, heads, turned = query.shape
        out, scales = torch.empty(query.shape, dtype=self.dtype), norm.float()
        self.library.spd_latent_store(
            *at(query, latent, rows.cos, rows.sin, rows.positions, rows.kv_slots, scales), epsilon,
            *at(pages, out), count, heads, norm.shape[0], turned, query.stride(0), query.stride(1),
            latent.stride(0), self.threads,
        )  # fmt: skip
        return out

    def mla_attention(
        self, query: Tensor, pages: Tensor, plan: AttentionPlan, rank: int, scale: float
    ) -> Tensor:
        pool = pages.unsqueeze(2)
        return self.paged_attention(query, (pool, pool), plan, Scores(scale), rank)

    def mla_prefill(
        self, query: Tensor, pages: Tensor, page_row: Tensor, start: int, rank: int, scale: float
    ) -> Tensor:
        pool = pages.unsqueeze(2)
        return self.prefill_attention(query, (pool, pool), page_row, start, Scores(scale), rank=rank)

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        logits = torch.empty(x.shape[0], 1, weight.shape[0])
        self.library.spd_router(*at(x, weight, logits), *x.shape, weight.shape[0], self.threads)
        return logits

    def route(self, parts: Tensor, correction: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        """Parts [T, 1, E] are `router_logits`'."""
        rows, _, experts = parts.shape
        correction = None if correction is None else correction.float().contiguous()
        ids = torch.empty(rows, rule.per_token, dtype=torch.int64)
        weights = torch.empty(rows, rule.per_token)
        each = ceil_div(4 * (2 * experts + rule.groups) + experts + rule.groups, 64) * 64
        room = torch.empty(rows * each, dtype=torch.uint8)
        self.library.spd_route(
            *at(parts, correction, ids, weights, room), rows, experts, rule.per_token, rule.groups,
            rule.groups_kept, rule.group_best, rule.sigmoid, rule.normalised, rule.added, rule.scale,
            self.threads,
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
        """Bias, penalties, minimum length and masks are torch's."""
        steps = (tensors.bias, tensors.generated, tensors.min_length, tensors.mask)
        if any(step is not None for step in steps):
            logits = adjust_rows(logits, draft, tensors)
        logits, positions, (slots, width, vocab) = logits.contiguous(), positions.contiguous(), logits.shape
        tokens = torch.empty(slots, width, dtype=torch.int64)
        finite = torch.empty(slots, width, dtype=torch.bool)
        usable = min(tensors.usable_vocab, vocab)
        bytes_each = ceil_div(16 * usable, 64) * 64
        numbers = (tensors.temperature, tensors.top_p, tensors.min_p, tensors.top_k, tensors.seed)
        self.library.spd_sample(
            *at(logits, *numbers, positions, tokens, finite),
            self.room(ceil_div(self.threads * bytes_each, TILE_BYTES)), slots, width, vocab, usable, stream,
            tensors.noise, tensors.truncation, self.threads,
        )  # fmt: skip
        return tokens, finite

    def ngram_lookup(
        self, state: RoundTensors, k: int, ngram_min: int, ngram_max: int, bound: int, over: bool = False
    ) -> None:
        """Bound is not used."""
        tokens, draft = state.tokens, state.draft
        self.library.spd_lookup(
            *at(tokens, state.length, state.active, draft, state.num_drafts, state.match), tokens.shape[0],
            tokens.stride(0), draft.stride(0), k, ngram_min, ngram_max, over,
        )  # fmt: skip

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: Segments, silu: bool = True
    ) -> Tensor:
        assert x.stride(1) == 1
        out, table = torch.zeros(x.shape), rows.table.contiguous()
        self.library.spd_short_conv(
            *at(x, weight, bias, ring, out, table, rows.applied), table.shape[1], x.stride(0), x.shape[1],
            weight.shape[0], ring.shape[1], x.shape[0], silu, self.threads,
        )  # fmt: skip
        return out

    def delta_rule(
        self, mixed: Tensor, raw_gates: Tensor, rule: Rule, memory: DeltaMemory, rows: Segments
    ) -> Tensor:
        assert raw_gates.stride(1) == 1
        (heads, width, size), (depth, key_heads) = memory.state.shape[1:], memory.keys.shape[1:3]
        out, table = torch.zeros(mixed.shape[0], heads, size), rows.table.contiguous()
        room = self.room(ceil_div(self.threads * (32 * width + len(mixed) * (2 * width + 2)), SIDE * DEPTH))
        self.library.spd_delta_rule(
            *at(mixed, raw_gates, rule.rate, rule.bias, *memory), room, *at(out, table, rows.applied),
            table.shape[1], raw_gates.stride(0), heads, key_heads, width, size, depth, mixed.shape[0],
            rule.corrects, self.threads,
        )  # fmt: skip
        return out

    delta_chunks = delta_rule
    """A step a token is as fast here, and its bits are the same however rows are grouped."""

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, first: bool = False
    ) -> Tensor:
        assert gate.stride(1) == 1
        out = torch.empty(gate.shape, dtype=self.dtype)
        self.library.spd_gated_norm(
            *at(x, gate, weight), epsilon, *at(out), x.shape[0], gate.stride(0), *x.shape[1:],
            (weight.dim() - 1) * x.shape[2], first, self.threads,
        )  # fmt: skip
        return out

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        own: ExpertWeights,
        stream: Tensor,
    ) -> tuple[Tensor, None]:
        """Of packed weights, onto a stream in a prompt chunk too; without squares."""
        gate_up, down = own.gate_up, own.down
        x, stream, (rows, per_token) = x.contiguous(), stream.contiguous(), ids.shape
        pairs, inner, depth, count = rows * per_token, down.depth, down.width, down.count
        out, made = torch.empty(x.shape, dtype=self.dtype), torch.empty(pairs, inner, dtype=self.dtype)
        lists, sums = torch.empty(pairs + 3 * count + 1, dtype=torch.int64), torch.empty(pairs, depth)
        room = self.room((pairs // SIDE + count + 1) * ceil_div(max(depth, inner), DEPTH))
        self.library.spd_experts(
            *at(x, ids, weights), gate_up.address, down.address, *at(own.gate_up_bias, own.down_bias),
            *ending_of(own.act), *at(stream, out), rows, depth, inner, count, per_token, *at(lists), room,
            *at(made, sums), self.threads,
        )  # fmt: skip
        return out, None


def open_library(cache: Callable[[], Path], dtype: str) -> NativeLibrary:
    """The library of a dtype in the folder that `cache` names, made if need be. Raises NativeUnavailable."""
    kind = getattr(torch, dtype)
    try:
        return NativeLibrary(library_path(cache, dtype=dtype), kind)
    except AmxRefused:
        return NativeLibrary(library_path(cache, "AVX512-BF16", dtype=dtype), kind)
