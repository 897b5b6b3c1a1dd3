"""Builds products from a model's weights: reorder, fold, round, pack."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby

import torch
from torch import Tensor

from spd.kernels.experts.moe import ExpertMatrices
from spd.kernels.linear.activation import Activation
from spd.kernels.linear.few_bits import (
    GroupedWeight,
    StackedWeight,
    quantize_int8,
    row_magnitudes,
)
from spd.kernels.linear.group_rounding import quantize_groups
from spd.kernels.linear.skinny_linear import AnyWeight
from spd.kernels.linear.tiled_weight import StackedTiles, tile_weight
from spd.runtime.layers import linear as products
from spd.runtime.layers import skinny_linear as skinny
from spd.runtime.layers import torch_linear as dense
from spd.runtime.layers.linear import FoldedNorm, RowNorm
from spd.runtime.layers.native_linear import (
    NativeLinear,
    NativeNormedProjection,
    NativeProjection,
    NativeResidualProjection,
    PackedEmbedding,
)
from spd.runtime.models.allocator import BlockTensors, ExecutionConfig, Piece, StoredWeight
from spd.runtime.models.weight_forms import rounded_spec

Product = dense.Linear | skinny.SkinnyLinear | NativeLinear
"""A product by a weight, in one of the backends."""


class LayerBuilder:
    """Builds products of one backend, for blocks that `WeightAllocator` allocated and that are
    filled.

    Where Triton's products need it, the scales of norms are folded into the fused matrices after
    them, before rows are rounded to int8; for other codes they become factors of columns. With
    `ranks` layouts and tensors are one rank's part.
    """

    def __init__(self, execution: ExecutionConfig, epsilon: float) -> None:
        self.execution = execution
        self.kernels = execution.kernels
        self.epsilon = epsilon
        self.dtype = execution.dtype
        self.form = execution.form
        self.ranks = execution.ranks
        self.fold_norms = execution.kernels.capabilities.folds_norms
        self.adder = products.make_residual_adder(execution.kernels)
        self.products: list[Product] = []
        """All products but those of heads, in the order in which they were built."""

    def projection(
        self,
        weight: StoredWeight,
        bias: Tensor | None = None,
        norm: RowNorm | FoldedNorm | None = None,
        act: Activation | None = None,
    ) -> products.Projection:
        """Return a product by weight [N, K] that reads the stream, in this builder's backend."""
        product = self._make_product(weight, bias, gated=act is not None and act.gated)
        self.products.append(product)
        if isinstance(product, NativeLinear):
            assert not isinstance(norm, FoldedNorm)
            return NativeProjection(product, norm, act)
        if isinstance(product, skinny.SkinnyLinear):
            assert not isinstance(norm, RowNorm)
            return skinny.SkinnyProjection(product, norm, act)
        return dense.TorchProjection(product, norm, act)

    def residual_projection(
        self, weight: StoredWeight, bias: Tensor | None = None, post_norm: RowNorm | None = None
    ) -> products.ResidualProjection:
        """Return a product by weight [N, K] that is added to the stream, in this builder's backend."""
        if self.fold_norms:
            weight = self._unstack(weight)  # one kernel adds up the squares of the stream's rows
        product = self._make_product(weight, bias)
        self.products.append(product)
        if isinstance(product, NativeLinear):
            if post_norm is None:
                return NativeResidualProjection(product)
            return NativeNormedProjection(product, post_norm)
        if isinstance(product, skinny.SkinnyLinear):
            if post_norm is None:
                return skinny.SkinnyResidualProjection(product)
            return skinny.SkinnyNormedProjection(product, post_norm)
        return dense.TorchResidualProjection(product, post_norm)

    def _make_product(
        self, weight: StoredWeight, bias: Tensor | None, *, gated: bool = False
    ) -> Product:
        """Return a product in this builder's backend.

        gated: the first half of its rows are gates.
        """
        if self.kernels.native is not None:
            return NativeLinear(weight, bias, self.kernels.native, gated=gated)
        if self.fold_norms:
            return skinny.SkinnyLinear(_tile_for_triton(weight), bias, self.kernels)
        return dense.Linear(self._unstack(weight), self.dtype, bias)

    def _unstack(self, weight: StoredWeight) -> Tensor | GroupedWeight:
        """Return a weight whose pieces have different codes dequantized, any other unchanged."""
        return weight.plain(self.dtype) if isinstance(weight, StackedWeight) else weight

    def embedding(
        self, table: StoredWeight, vocab_size: int, head: products.OutputHead | None = None
    ) -> products.AnyEmbedding:
        """Return an embedding by a table [V, H] of `vocab_size` ids, or by a rank's rows of it.

        head: the product by the same table, None where they are not tied.
        """
        rows = self.lookup_table(table, head)
        if self.ranks is None:
            return rows
        assert isinstance(rows, Tensor)
        return products.ShardedEmbedding(
            rows, self.execution.shard.id_range(vocab_size)[0], vocab_size, self.ranks
        )

    def lookup_table(
        self, table: StoredWeight, head: products.OutputHead | None = None
    ) -> products.AnyEmbedding:
        """Return a table whose rows are looked up, in codes or not, whole on every rank.

        head: the product by the same table, None where there is none.
        """
        if not isinstance(table, GroupedWeight):
            assert isinstance(table, Tensor)
            return table
        product = self._make_product(table, None) if head is None else head
        if isinstance(product, NativeLinear):
            return PackedEmbedding(product)
        assert isinstance(product, skinny.SkinnyLinear)
        return skinny.TiledEmbedding(product, self.dtype)

    def head(
        self, table: StoredWeight, vocab_size: int, ids: Tensor | None = None
    ) -> products.OutputHead:
        """Return the product that gives logits by a table [V, H], or by a rank's rows of it.

        ids: the token of each row, int64 and ascending, for a head over some of the `vocab_size`
        ids.
        """
        inner = self._make_product(table, None)
        if self.ranks is None:
            if isinstance(inner, skinny.SkinnyLinear):
                inner.ids = ids
            return inner
        return products.ShardedHead(inner, vocab_size if ids is None else len(ids), self.ranks)

    def share_workspace(self, rows: int) -> None:
        """Give the products built so far, which run in turn, one workspace for up to `rows` rows."""
        skinny_products = [
            product for product in self.products if isinstance(product, skinny.SkinnyLinear)
        ]
        if skinny_products:
            skinny.share_workspace(skinny_products, rows)

    def normed_projection(
        self, tensors: BlockTensors, name: str, act: Activation | None = None
    ) -> products.Projection:
        """Return the product by matrix `name` of the block's norm, or of the stream where it has no
        norm.
        """
        bias = tensors.get(f"{name}_bias")
        scales = tensors.get("norm")
        if scales is None:
            return self.projection(self._stored_weight(tensors, name), bias, act=act)
        norm: RowNorm | FoldedNorm = RowNorm(scales, self.epsilon)
        if self.fold_norms:
            norm = FoldedNorm(self.epsilon)
            weight = self._fold_norm(tensors, name, scales)
        else:
            weight = self._stored_weight(tensors, name)
        return self.projection(weight, bias, norm, act)

    def _fold_norm(self, tensors: BlockTensors, name: str, scales: Tensor) -> StoredWeight:
        """Return the matrix `name` times a norm's scales [K], in the form that weights are stored
        in.
        """
        if self.form.kind == "int8":
            # Rounded once, and without a copy.
            tensors[name].mul_(scales)
            return self._stored_weight(tensors, name)
        weight = self._stored_weight(tensors, name)
        if isinstance(weight, Tensor):
            return weight.mul_(scales)
        # Norms do not fold into codes.
        if isinstance(weight, StackedWeight):
            return StackedWeight(tuple(replace(piece, columns=scales) for piece in weight.pieces))
        return replace(weight, columns=scales)

    def unnormed_projection(self, tensors: BlockTensors, name: str) -> products.Projection:
        """Return the product by matrix `name`, without a norm before it."""
        return self.projection(self._stored_weight(tensors, name), tensors.get(f"{name}_bias"))

    def partial_projection(
        self, tensors: BlockTensors, name: str, *, cut: bool = False
    ) -> products.ResidualProjection:
        """Return the product by matrix `name` at the end of a part of a block, which later sums
        over ranks.

        cut: each rank has other columns of it.
        """
        weight = self._stored_weight(tensors, name, cut=cut)
        return self.residual_projection(weight, tensors.get(f"{name}_bias"))

    def _stored_weight(
        self, tensors: BlockTensors, name: str, *, cut: bool = False
    ) -> StoredWeight:
        """Return a matrix [N, K] in the form that weights are stored in.

        Rows that groups do not divide keep the run's dtype. cut: ranks have parts of its rows;
        int8 scales are those of the complete rows.
        """
        weight = tensors[name]
        kind = self.form.kind
        if (grouped := tensors.grouped.get(name)) is not None:
            return grouped
        if kind == "int4":
            return self.rounded_weight(tensors, name)
        if kind != "int8":
            return weight
        full_magnitudes = (
            self.ranks.gather(row_magnitudes(weight)).amax(dim=0) if cut and self.ranks else None
        )
        rounded = quantize_int8(weight, full_magnitudes)
        return replace(rounded, rounds_rows=self.form.rounds_rows)

    def rounded_weight(self, tensors: BlockTensors, name: str) -> StoredWeight:
        """Return a matrix that `--quantize int4` rounds, in codes or widened; any other as it is
        stored."""
        pieces = tensors.pieces.get(name)
        if pieces is None:
            return tensors.matrix(name)
        weight = tensors[name]
        parts = torch.split(weight, [rows for rows, _ in pieces]) if len(pieces) > 1 else (weight,)
        rounded: list[GroupedWeight] = []
        for part, (_, kind) in zip(parts, pieces, strict=True):
            if rounded_spec(part.shape[1], kind) is None:
                return weight
            groups = quantize_groups(part, kind)
            rounded.append(replace(groups, rounds_rows=self.form.rounds_rows))
        stored = rounded[0] if len(rounded) == 1 else StackedWeight(tuple(rounded))
        return stored.plain(self.dtype) if name in tensors.widened else stored

    def reorder(
        self, tensors: BlockTensors, name: str, order: list[int], part: slice = slice(None)
    ) -> None:
        """Reorder rows of `name`, or a part of them, within each head of len(order).

        Those of its bias too.
        """
        grouped = tensors.grouped.get(name)
        if isinstance(grouped, StackedWeight) and len(order) == grouped.shape[0]:
            tensors.grouped[name] = reorder_stack(grouped, order)
        elif grouped is not None:
            _reorder_codes(grouped, order, part)
        pieces = tensors.pieces.get(name, [])
        if sum(piece.rows for piece in pieces) == len(order):
            runs = find_runs([piece.rows for piece in pieces], order)
            tensors.pieces[name] = [Piece(len(rows), pieces[number].kind) for number, rows in runs]
        for key in (name, f"{name}_bias"):
            if key in tensors and key not in tensors.grouped:
                reorder_heads(tensors[key][part], order)

    def output_projection(
        self,
        tensors: BlockTensors,
        name: str,
        epsilon: float | None = None,
        *,
        removes_mean: bool = False,
    ) -> products.ResidualProjection:
        """Return the product by matrix `name` at a block's end; each rank has other columns of it.

        epsilon: that of the norm after it, where it differs from other norms'. removes_mean: the
        mean is removed from the result, of a matrix in codes after the product.
        """
        is_in_codes = name in tensors.grouped or name in tensors.pieces.keys() - tensors.widened
        is_centred_after = removes_mean and is_in_codes
        if removes_mean and not is_centred_after:
            self._remove_mean(tensors, name)
        scales = tensors.get("post_norm")
        post_norm = None if scales is None else RowNorm(scales, epsilon or self.epsilon)
        bias = tensors.get(f"{name}_bias")
        weight = self._stored_weight(tensors, name, cut=True)
        output: products.ResidualProjection
        if self.ranks is not None:
            add = self.adder.add
            if post_norm is not None:
                add = partial(self.adder.add_normed, norm=post_norm)
            elif is_centred_after:
                add = self.adder.add_centred
            output = products.RowParallelLinear(self.projection(weight), bias, self.ranks, add)
        elif is_centred_after:
            output = products.CentredProjection(self.projection(weight, bias), self.adder)
        else:
            output = self.residual_projection(weight, bias, post_norm)
        tile = tensors.tiles.get(name)
        return output if tile is None else products.TiledInputProjection(output, *tile)

    def _remove_mean(self, tensors: BlockTensors, name: str) -> None:
        """Subtract its mean from every column of a matrix [N, K], and from its bias."""
        for key in (name, f"{name}_bias"):
            if key in tensors:
                wide = tensors[key].float()
                tensors[key] = (wide - wide.mean(0)).to(tensors[key].dtype)

    def expert_matrices(
        self,
        tensors: BlockTensors,
        name: str,
        count: int,
        *,
        cut: bool = False,
        gated: bool = False,
    ) -> ExpertMatrices:
        """Return the experts' matrices [E, N, K] in the storage that this builder's kernels read.

        cut: ranks have parts of their rows; gated: the first half of each expert's rows are gates.
        """
        weight = self._unstack(self._stored_weight(tensors, name, cut=cut))
        stacked: Tensor | GroupedWeight
        if isinstance(weight, GroupedWeight):
            stacked = weight.as_experts(count)
        else:
            stacked = weight.view(count, -1, weight.shape[1])
        if self.kernels.native is not None:
            return self.kernels.native.pack(stacked, gated=gated)
        if isinstance(stacked, GroupedWeight) and self.fold_norms:
            return tile_weight(stacked)
        return stacked


def _tile_for_triton(weight: StoredWeight) -> AnyWeight:
    """Return a weight as Triton's products read it."""
    if isinstance(weight, GroupedWeight):
        return tile_weight(weight)
    if isinstance(weight, StackedWeight):
        return StackedTiles(tuple(map(tile_weight, weight.pieces)))
    return weight


def find_runs(sizes: Sequence[int], order: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the runs of rows of one piece in an order of all rows: the piece's number, and its own
    rows.

    sizes: rows of the pieces.
    """
    ends = [*accumulate(sizes)]
    runs = groupby(order, key=lambda row: bisect_right(ends, row))
    return [(number, [row - ends[number] + sizes[number] for row in rows]) for number, rows in runs]


def reorder_stack(stack: StackedWeight, order: list[int]) -> StackedWeight:
    """Return a stack with all its rows in another order, which parts pieces where others stand
    between their rows."""
    runs = find_runs([piece.shape[0] for piece in stack.pieces], order)
    pieces = []
    for number, rows in runs:
        index = torch.tensor(rows, device=stack.pieces[number].device)
        select = partial(torch.index_select, dim=0, index=index)
        pieces.append(stack.pieces[number].map_tensors(select))
    return StackedWeight(tuple(pieces))


def _reorder_codes(weight: GroupedWeight | StackedWeight, order: list[int], part: slice) -> None:
    """Reorder some rows of a matrix in codes within each head of len(order), in place."""
    first, end, _ = part.indices(weight.shape[0])
    pieces = weight.pieces if isinstance(weight, StackedWeight) else (weight,)
    for piece in pieces:
        rows = piece.shape[0]
        piece_rows = slice(max(0, min(first, rows)), max(0, min(end, rows)))
        for tensor in piece.parts:
            reorder_heads(tensor[piece_rows], order)
        first -= rows
        end -= rows


def reorder_heads(tensor: Tensor, order: list[int]) -> None:
    """Reorder rows of tensor [heads * D, ...] within each head, in place.

    order: the D old indices.
    """
    for head in tensor.view(-1, len(order), *tensor.shape[1:]):
        head.copy_(head[order])
