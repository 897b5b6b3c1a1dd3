"""Products of packed weights by the compiled C kernels, and norms."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spd.kernels.capabilities import CODE_BITS
from spd.kernels.latent.mla_attention import HeadMatrices
from spd.kernels.launch import ceil_div
from spd.kernels.linear.few_bits import GroupedWeight, StackedWeight
from spd.kernels.native.calls import NativeCalls
from spd.kernels.native.packed import (
    CODE_KINDS,
    FLOAT32,
    ROUNDED,
    TILE_DEPTH,
    TILE_SIDE,
    AnyMatrix,
    Epilogue,
    PackedWeight,
    advise_large_pages,
    in_column_blocks,
    tile_steps,
)


class NativeProducts(NativeCalls):
    """The products of a compiled library; see `spd.kernels.native.packed.PackedProducts`."""

    def pack(self, weight: AnyMatrix, *, gated: bool = False) -> PackedWeight:
        """Return a weight [N, K], or several [E, N, K], in tiles padded with zeros."""
        if isinstance(weight, GroupedWeight):
            return self._pack_codes(weight, gated)
        if isinstance(weight, StackedWeight) and not gated:
            first, *further = (self._pack_codes(piece, gated) for piece in weight.pieces)
            return replace(first, further_pieces=tuple(further))
        if isinstance(weight, StackedWeight):  # gates and their inputs must have one form
            weight = weight.plain(self.dtype)
        width, depth = weight.shape[-2:]
        matrices = weight.reshape(-1, width, depth)
        size = tile_steps(width, depth, gated) * 2 * TILE_SIDE * TILE_DEPTH
        tiles = advise_large_pages(torch.empty(matrices.shape[0], size, dtype=self.dtype))
        for target, matrix in zip(tiles, matrices, strict=True):
            source = matrix.to(self.dtype).contiguous()
            self.call_threads("pack", source, target, width, depth, gated)
        return PackedWeight(
            tiles=tiles, width=width, depth=depth, gated=gated, count=matrices.shape[0]
        )

    def _pack_codes(self, weight: GroupedWeight, gated: bool) -> PackedWeight:
        """Return a quantized weight in tiles. Groups have 16, a multiple of 32, or all columns."""
        width, depth = weight.shape[-2:]
        groups = weight.scales.shape[-1]
        group = weight.group if groups > 1 else ceil_div(depth, TILE_DEPTH) * TILE_DEPTH
        codes = weight.codes.view(-1, width, weight.codes.shape[-1])
        count = codes.shape[0]
        kind = 1 + CODE_KINDS.index(weight.kind)
        size = (
            tile_steps(width, depth, gated)
            * 2
            * TILE_SIDE
            * CODE_BITS[weight.kind]
            * TILE_DEPTH
            // 8
        )
        tiles = advise_large_pages(torch.empty(count, size, dtype=torch.uint8))
        for target, matrix in zip(tiles, codes, strict=True):
            source = matrix.contiguous()
            self.call_threads("pack_codes", source, target, width, depth, gated, kind)
        parameters = {
            name: in_column_blocks(part.reshape(count, width, part.shape[-1]), gated)
            for name, part in weight.quant_parameters.items()
        }
        return PackedWeight(
            tiles=tiles,
            width=width,
            depth=depth,
            gated=gated,
            count=count,
            kind=kind,
            group=group,
            groups=groups,
            rounds_rows=weight.rounds_rows,
            quant_parameters=parameters,
        )

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
        """Compute `PackedProducts.packed_linear` by C."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows = x.shape[0]
        heads = weight.count
        depth = weight.depth
        width = weight.width // 2 if weight.gated else weight.rows
        dtype = torch.float32 if epilogue is FLOAT32 else self.dtype
        y = torch.empty(*x.shape[:-1], width, dtype=dtype)
        tiles = heads * ceil_div(rows, TILE_SIDE) * ceil_div(depth, TILE_DEPTH)
        scratch = self.scratch_address(tiles)
        first = 0
        for part in (weight, *weight.further_pieces):
            self.call_threads(
                "linear",
                x,
                norm,
                scratch,
                *part.fields,
                None if bias is None else bias[..., first:],
                None if residual is None else residual[..., first:],
                y[..., first:],
                part.width,
                heads * width,
                *epilogue,
                rows,
                heads,
                depth,
                x.stride(0),
                x.stride(-2),
                width,
                epsilon,
            )
            first += part.width
        return y

    def packed_rows(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        """Return rows [T, K] of a weight in codes, each value rounded once; ids: int64 [T]."""
        rows = torch.empty(ids.shape[0], weight.depth, dtype=self.dtype)
        self.call_threads("rows", *weight.fields, ids.contiguous(), rows, *rows.shape)
        return rows

    def head_linear(self, x: Tensor, weight: HeadMatrices) -> Tensor:
        """Compute `Kernels.head_linear`; the weight packs the heads' matrices, transposed."""
        assert isinstance(weight, PackedWeight) and x.shape[1] == weight.count
        return self.packed_linear(x, weight, None)

    def norm(
        self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
    ) -> Tensor:
        """Return the RMS norm of x [T, N] with scales float32 [N], plus residual [T, N], rounded
        once."""
        x = x.contiguous()
        y = torch.empty(x.shape, dtype=self.dtype)
        self.call_threads("norm", x, residual, weight, y, *x.shape, epsilon)
        return y

    def rms_norm_rows(
        self, x: Tensor, squares: Tensor | None, weight: Tensor, epsilon: float
    ) -> Tensor:
        """Compute `Kernels.rms_norm_rows` by C, without squares."""
        return self.norm(x, weight.float(), epsilon)
