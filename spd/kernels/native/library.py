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
LARGEST_HEAD = 512
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, Sequence[type]] = {
    "spd_init": (),
    "spd_pack": (POINTER,) * 2 + (LONG,) * 2 + (INT,) * 2,
    "spd_linear": (POINTER, POINTER, FLOAT, *(POINTER,) * 4, *(LONG,) * 3, INT, POINTER, INT),
    "spd_norm": (POINTER, POINTER, FLOAT, POINTER, POINTER, LONG, LONG, INT),
    "spd_rotary_store": (*(POINTER,) * 6, FLOAT, *(POINTER,) * 3, *(LONG,) * 5, INT),
    "spd_attend": (*(POINTER,) * 4, LONG, *(POINTER,) * 2, *(LONG,) * 6, FLOAT, FLOAT, LONG, LONG, INT),
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
    """A weight [N, K] as tiles; gated: see `Ending.SILU`."""

    tiles: Tensor
    width: int
    depth: int
    gated: bool


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
        """A weight bfloat16 [N, K] in tiles, filled up with zeros."""
        width, depth = weight.shape
        blocks = _tiles(width // 2, SIDE) if gated else _tiles(width, 2 * SIDE)
        tiles = torch.empty(blocks * _tiles(depth, DEPTH) * 2 * SIDE * DEPTH, dtype=torch.bfloat16)
        source = weight.contiguous()
        self._library.spd_pack(source.data_ptr(), tiles.data_ptr(), width, depth, int(gated), self._threads)
        return PackedWeight(tiles, width, depth, gated)

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
        room = _tiles(rows, SIDE) * _tiles(weight.depth, DEPTH) * SIDE * DEPTH
        if self._scratch.shape[0] < room:
            self._scratch = torch.empty(room, dtype=torch.bfloat16)
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
            weight.depth,
            weight.width,
            ending,
            self._scratch.data_ptr(),
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
        assert isinstance(plan, NativePlan)
        slots, width, heads, size = query.shape
        query, mixed = query.contiguous(), torch.empty(query.shape, dtype=torch.bfloat16)
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
