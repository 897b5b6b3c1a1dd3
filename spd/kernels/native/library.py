"""The compiled C kernels as operations on tensors: bfloat16 on CPU, any number of rows with the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from spd.kernels.native.build import NativeUnavailable
from spd.kernels.paged_attention import AttentionHeads, AttentionPlan

SIDE, DEPTH = 16, 32
"""Rows or columns of a tile, and its depth."""
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, Sequence[type]] = {
    "spd_init": (),
    "spd_pack": (POINTER,) * 2 + (LONG,) * 2 + (INT,) * 2,
    "spd_linear": (POINTER, POINTER, FLOAT, *(POINTER,) * 4, *(LONG,) * 8, INT, POINTER, INT),
    "spd_norm": (POINTER, POINTER, FLOAT, POINTER, POINTER, LONG, LONG, INT),
    "spd_rotary_store": (*(POINTER,) * 6, FLOAT, *(POINTER,) * 3, *(LONG,) * 5, INT),
    "spd_attend": (*(POINTER,) * 4, LONG, *(POINTER,) * 2, *(LONG,) * 7, FLOAT, FLOAT, LONG, LONG, INT),
    "spd_latent_store": (*(POINTER,) * 7, FLOAT, *(POINTER,) * 2, *(LONG,) * 7, INT),
    "spd_router": (*(POINTER,) * 3, *(LONG,) * 3, INT),
    "spd_route": (*(POINTER,) * 5, *(LONG,) * 6, INT, INT, FLOAT, INT),
    "spd_experts": (*(POINTER,) * 7, *(LONG,) * 5, *(POINTER,) * 4, INT),
}


class Ending(IntEnum):
    """What becomes of a product's sums."""

    BFLOAT16 = 0
    FLOAT32 = 1
    SILU = 2
    """The first half of the columns are gates of the second half."""
    GELU = 3


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K], or one for each of some heads or experts, as tiles; gated: see `Ending.SILU`."""

    tiles: Tensor
    width: int
    depth: int
    gated: bool
    count: int = 1


@dataclass(frozen=True)
class NativePlan(AttentionPlan):
    """Where the rows of a pass stand."""

    positions: Tensor  # [S, Q] int64
    first_key: int


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _tiles(count: int, size: int) -> int:
    return -(-count // size)


class NativeLibrary:
    """The kernels of one compiled library, for one thread at a time: they share room for a product's rows."""

    def __init__(self, path: Path) -> None:
        """Raises NativeUnavailable."""
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"the compiled library cannot be loaded: {error}") from error
        for name, kinds in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = list(kinds), INT if name == "spd_init" else None
        tiles = library.spd_init()
        if tiles < 0:
            raise NativeUnavailable("the system does not grant AMX")
        self.instructions = "AMX" if tiles else "AVX512-BF16"
        self._library, self._scratch = library, torch.empty(0, dtype=torch.bfloat16)
        self._linear, self._attend = library.spd_linear, library.spd_attend
        self._threads = torch.get_num_threads()

    def pack(self, weight: Tensor, *, gated: bool = False) -> PackedWeight:
        """A weight bfloat16 [N, K], or several [E, N, K], in tiles filled up with zeros."""
        width, depth = weight.shape[-2:]
        every = weight.reshape(-1, width, depth)
        blocks = _tiles(width // 2, SIDE) if gated else _tiles(width, 2 * SIDE)
        size = blocks * _tiles(depth, DEPTH) * 2 * SIDE * DEPTH
        tiles = torch.empty(every.shape[0], size, dtype=torch.bfloat16)
        for own, one in zip(tiles, every, strict=True):
            source = one.contiguous()
            self._library.spd_pack(source.data_ptr(), own.data_ptr(), width, depth, int(gated), self._threads)
        return PackedWeight(tiles, width, depth, gated, every.shape[0])

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        ending: Ending = Ending.BFLOAT16,
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
        kind = torch.float32 if ending is Ending.FLOAT32 else torch.bfloat16
        y = torch.empty(rows, width, dtype=kind)
        scratch = self._room(_tiles(rows, SIDE) * _tiles(weight.depth, DEPTH))
        x = x.contiguous()
        self._linear(
            x.data_ptr(),
            _address(norm),
            epsilon,
            weight.tiles.data_ptr(),
            _address(bias),
            _address(residual),
            y.data_ptr(),
            rows,
            1,
            weight.depth,
            weight.width,
            weight.depth,
            0,
            width,
            0,
            ending,
            scratch,
            self._threads,
        )
        return y

    def _room(self, tiles: int) -> int:
        """The address of room for so many left-side tiles."""
        if self._scratch.shape[0] < tiles * SIDE * DEPTH:
            self._scratch = torch.empty(tiles * SIDE * DEPTH, dtype=torch.bfloat16)
        return self._scratch.data_ptr()

    def pack_heads(self, weight: Tensor) -> PackedWeight:
        """A weight for each head [H, A, B], as `head_linear` takes it."""
        return self.pack(weight.transpose(1, 2))

    def head_linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """See `spd.kernels.mla_attention`; weight comes from `pack_heads`."""
        rows, heads, depth = x.shape
        assert x.stride(2) == 1 and heads == weight.count
        y = torch.empty(rows, heads, weight.width, dtype=torch.bfloat16)
        self._linear(
            x.data_ptr(),
            None,
            0.0,
            weight.tiles.data_ptr(),
            None,
            None,
            y.data_ptr(),
            rows,
            heads,
            depth,
            weight.width,
            x.stride(0),
            x.stride(1),
            y.stride(0),
            y.stride(1),
            Ending.BFLOAT16,
            self._room(heads * _tiles(rows, SIDE) * _tiles(depth, DEPTH)),
            self._threads,
        )
        return y

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
        """The RMS norm of x [T, N] with scales weight float32 [N], plus residual [T, N]; rounded once."""
        x, y = x.contiguous(), torch.empty(x.shape, dtype=torch.bfloat16)
        self._library.spd_norm(
            x.data_ptr(),
            weight.data_ptr(),
            epsilon,
            _address(residual),
            y.data_ptr(),
            x.shape[0],
            x.shape[1],
            self._threads,
        )
        return y

    def rms_norm_rows(self, x: Tensor, squares: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """See `spd.kernels.skinny_linear`; no squares are needed."""
        return self.norm(x, weight.float(), epsilon)

    def rotary_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        kv_slots: Tensor,
        qk_weight: Tensor | None,
        epsilon: float,
        key_pages: Tensor,
        value_pages: Tensor,
        num_heads: int,
    ) -> Tensor:
        """See `spd.kernels.rotary_store`; positions are needed, qk_weight is float32.

        A page holds what these kernels alone read, head by head: as if it were [K, page, D].
        """
        assert positions is not None
        kv_heads, size = key_pages.shape[2:]
        query = torch.empty(qkv.shape[0], num_heads, size, dtype=torch.bfloat16)
        self._library.spd_rotary_store(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            kv_slots.data_ptr(),
            _address(qk_weight),
            epsilon,
            key_pages.data_ptr(),
            value_pages.data_ptr(),
            query.data_ptr(),
            qkv.shape[0],
            num_heads,
            kv_heads,
            size,
            key_pages.shape[1],
            self._threads,
        )
        return query

    def plan_attention(
        self,
        positions: Tensor,
        valid: Tensor,
        page_table: Tensor,
        heads: AttentionHeads,
        page_size: int,
        dtype: torch.dtype,
        bounds: Sequence[int],
        first_pages: Sequence[int | None],
    ) -> NativePlan:
        """See `spd.kernels.paged_attention`: nothing is made but contiguous."""
        return NativePlan(page_table.contiguous(), positions.contiguous(), heads.first_key)

    def paged_attention(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        plan: AttentionPlan,
        scale: float,
        sliding: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See `spd.kernels.paged_attention`."""
        return self._mixed(query, key_pages, value_pages, plan, scale, query.shape[-1], sliding, softcap)

    def _mixed(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        plan: AttentionPlan,
        scale: float,
        value_size: int,
        sliding: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend query [S, Q, H, D] to pools [P, page, K, D]: [S, Q, H, V], the values' first V elements."""
        assert isinstance(plan, NativePlan)
        slots, width, heads, size = query.shape
        query, mixed = query.contiguous(), torch.empty(slots, width, heads, value_size, dtype=torch.bfloat16)
        self._attend(
            query.data_ptr(),
            key_pages.data_ptr(),
            value_pages.data_ptr(),
            plan.page_table.data_ptr(),
            plan.page_table.shape[1],
            plan.positions.data_ptr(),
            mixed.data_ptr(),
            slots,
            width,
            heads,
            key_pages.shape[2],
            size,
            value_size,
            key_pages.shape[1],
            scale,
            softcap or 0.0,
            plan.first_key,
            sliding or 0,
            self._threads,
        )
        return mixed

    def prefill_attention(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        page_row: Tensor,
        start: int,
        scale: float,
        first_key: int = 0,
        sliding: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See `spd.kernels.prefill_attention`."""
        positions = torch.arange(start, start + query.shape[0])[None]
        plan = NativePlan(page_row.contiguous()[None], positions, first_key)
        return self.paged_attention(query[None], key_pages, value_pages, plan, scale, sliding, softcap)[0]

    def latent_store(
        self,
        query: Tensor,
        latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        kv_slots: Tensor,
        norm: Tensor,
        epsilon: float,
        pages: Tensor,
    ) -> Tensor:
        """See `spd.kernels.mla_attention`; positions are needed."""
        assert positions is not None and query.stride(2) == latent.stride(1) == 1
        rows, heads, turned = query.shape
        out, scales = torch.empty(query.shape, dtype=torch.bfloat16), norm.float()
        self._library.spd_latent_store(
            query.data_ptr(),
            latent.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            kv_slots.data_ptr(),
            scales.data_ptr(),
            epsilon,
            pages.data_ptr(),
            out.data_ptr(),
            rows,
            heads,
            norm.shape[0],
            turned,
            query.stride(0),
            query.stride(1),
            latent.stride(0),
            self._threads,
        )
        return out

    def mla_attention(
        self, query: Tensor, pages: Tensor, plan: AttentionPlan, rank: int, scale: float
    ) -> Tensor:
        """See `spd.kernels.mla_attention`."""
        pool = pages.unsqueeze(2)
        return self._mixed(query, pool, pool, plan, scale, rank)

    def mla_prefill(
        self, query: Tensor, pages: Tensor, page_row: Tensor, start: int, rank: int, scale: float
    ) -> Tensor:
        """See `spd.kernels.mla_attention`."""
        positions = torch.arange(start, start + query.shape[0])[None]
        plan = NativePlan(page_row.contiguous()[None], positions, 0)
        return self.mla_attention(query[None], pages, plan, rank, scale)[0]

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `spd.kernels.moe`."""
        x, weight = x.contiguous(), weight.contiguous()
        logits = torch.empty(x.shape[0], 1, weight.shape[0])
        self._library.spd_router(
            x.data_ptr(), weight.data_ptr(), logits.data_ptr(), *x.shape, weight.shape[0], self._threads
        )
        return logits

    def route(
        self,
        parts: Tensor,
        correction: Tensor | None,
        per_token: int,
        groups: int,
        groups_kept: int,
        group_best: int,
        sigmoid: bool,
        normalised: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """See `spd.kernels.moe`; parts [T, 1, E] are `router_logits`'."""
        rows, _, experts = parts.shape
        ids = torch.empty(rows, per_token, dtype=torch.int64)
        weights = torch.empty(rows, per_token)
        each = _tiles(4 * (2 * experts + groups) + experts + groups, 64) * 64
        room = torch.empty(rows * each, dtype=torch.uint8)
        self._library.spd_route(
            parts.data_ptr(),
            _address(None if correction is None else correction.float().contiguous()),
            ids.data_ptr(),
            weights.data_ptr(),
            room.data_ptr(),
            rows,
            experts,
            per_token,
            groups,
            groups_kept,
            group_best,
            int(sigmoid),
            int(normalised),
            scale,
            self._threads,
        )
        return ids, weights

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: PackedWeight,
        down: PackedWeight,
        stream: Tensor,
    ) -> Tensor:
        """stream [T, K] + `spd.kernels.moe.experts` of x [T, K], rounded once: [T, K]."""
        x, stream, (rows, per_token) = x.contiguous(), stream.contiguous(), ids.shape
        pairs, inner, depth, count = rows * per_token, down.depth, down.width, down.count
        out, made = (
            torch.empty(x.shape, dtype=torch.bfloat16),
            torch.empty(pairs, inner, dtype=torch.bfloat16),
        )
        lists, sums = torch.empty(pairs + 3 * count + 1, dtype=torch.int64), torch.empty(pairs, depth)
        self._library.spd_experts(
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            gate_up.tiles.data_ptr(),
            down.tiles.data_ptr(),
            stream.data_ptr(),
            out.data_ptr(),
            rows,
            depth,
            inner,
            count,
            per_token,
            lists.data_ptr(),
            self._room((pairs // SIDE + count + 1) * _tiles(max(depth, inner), DEPTH)),
            made.data_ptr(),
            sums.data_ptr(),
            self._threads,
        )
        return out
