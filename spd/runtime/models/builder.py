"""Memory for a model's weights, and the products that blocks make of it: reorder, fold, round, pack.

A fused matrix is allocated once, with a view for each tensor of the file; what belongs into it is written
straight to its rows, so that loading never holds a part and the whole at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spd.errors import IncompatibleError
from spd.kernels.capabilities import INT4_GROUP
from spd.kernels.experts.moe import ExpertMatrices
from spd.kernels.interface import Kernels
from spd.kernels.linear.activation import Activation
from spd.kernels.linear.few_bits import (
    GroupedWeight,
    StackedWeight,
    quantize_int4,
    quantize_int8,
    row_magnitudes,
    tile_weight,
)
from spd.runtime.layers import linear as products
from spd.runtime.layers import skinny_linear as skinny
from spd.runtime.layers import torch_linear as dense
from spd.runtime.layers.base import Communicator
from spd.runtime.layers.linear import FoldedNorm, RowNorm
from spd.runtime.layers.native_linear import (
    NativeLinear,
    NativeNormedProjection,
    NativeProjection,
    NativeResidualProjection,
    PackedEmbedding,
)
from spd.runtime.models.destinations import WHOLE, Destination, Shard
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.models.weights import WIDE, PackedSpec, ScaleKind, WeightForm, part_name

Fill = Callable[
    [Mapping[str, Tensor]], None
]  # writes every view from its namesake, wherever that comes from


SCALE_DTYPES: Mapping[ScaleKind, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "exponents": torch.uint8,
    "factored": torch.uint8,
}
Kept = Tensor | GroupedWeight | StackedWeight


class Tensors(dict[str, Tensor]):
    """A block's tensors by the names that its layout gives them; of a matrix in codes the codes."""

    def __init__(self, found: Mapping[str, Tensor]) -> None:
        super().__init__(found)
        self.grouped: dict[str, GroupedWeight | StackedWeight] = {}
        """Matrices in codes, with what stands beside these."""

    def kept(self, name: str) -> Kept:
        """Return a matrix, in codes if it is."""
        return self.grouped.get(name, self[name])


Product = dense.Linear | skinny.SkinnyLinear | NativeLinear
LayerTensors = tuple[Tensors, Tensors]  # one layer's: of its attention block, and of its MLP block


@dataclass(frozen=True)
class Place:
    """Where a model runs, by which kernels, in what form, and on which of several ranks."""

    dtype: torch.dtype
    device: str
    kernels: Kernels
    form: WeightForm = WIDE
    ranks: Communicator | None = None
    positions: int = 0
    """Positions that rotary tables have."""
    rows: int = 64
    """The most rows of a forward pass other than a prompt chunk."""

    @property
    def shard(self) -> Shard:
        """This rank's part."""
        return WHOLE if self.ranks is None else Shard(self.ranks.rank, self.ranks.size)


class WeightSpace:
    """Allocates tensors, not yet filled, and keeps which view each checkpoint tensor fills."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._views: dict[str, Tensor] = {}

    def take(self) -> Mapping[str, Tensor]:
        """Checkpoint names and the views that they fill, of everything allocated since the last call."""
        views = self._views
        self._views = {}
        return views

    def layer(self, layout: LayerLayout, prefix: str) -> LayerTensors:
        """Allocate one layer whose tensors stand below `prefix`, such as `model.layers.0.`."""
        attention = layout.attention.destinations()
        mlp = layout.mlp.destinations()
        return self.block(attention, prefix), self.block(mlp, prefix)

    def block(self, destinations: Mapping[str, Destination], prefix: str = "") -> Tensors:
        """Allocate what is described; the checkpoint's names begin with `prefix`.

        A matrix in codes is among the `grouped`.
        """
        form = self.place.form
        made = Tensors({})
        for name, each in destinations.items():
            packs = bool(prefix) or (form.packs_tables and name in ("embedding", "head"))
            if packs and (spec := form.stays_packed(each, prefix)) is not None:
                codes = self._codes(each, spec, prefix)
                made.grouped[name] = codes
                made[name] = codes.codes
            elif packs and (pieces := form.stacked(each, prefix)):
                stack = StackedWeight(tuple(self._codes(*piece, prefix) for piece in pieces))
                made.grouped[name] = stack
                made[name] = stack.pieces[0].codes
            else:
                dtype = torch.float32 if each.exact else self.place.dtype
                whole = torch.empty(each.shape, dtype=dtype, device=self.place.device)
                made[name] = self._viewed(whole, each, prefix)
        return made

    def _codes(self, destination: Destination, spec: PackedSpec, prefix: str) -> GroupedWeight:
        rows, columns = destination.shape
        groups = -(-columns // (spec.group or columns))

        def empty(width: int, dtype: torch.dtype, part: str = "") -> Tensor:
            whole = torch.empty(rows, width, dtype=dtype, device=self.place.device)
            return self._viewed(whole, destination, prefix, part)

        dtypes = dict.fromkeys(("scales", "minima"), SCALE_DTYPES[spec.scales])
        codes = empty(columns // 2 if spec.paired else columns, torch.uint8)
        beside: dict[str, Tensor | None] = {"zeros": None}
        for part, each in spec.beside.items():
            width = columns // each if each else groups
            factored = torch.float16 if each else torch.uint8
            beside[part] = empty(width, dtypes.get(part, factored), part)
        return GroupedWeight(spec.kind, codes, group=spec.group or columns, **beside)  # type: ignore[arg-type]

    def _viewed(
        self, whole: Tensor, destination: Destination, prefix: str, part: str = ""
    ) -> Tensor:
        """Keep which rows are each checkpoint tensor's, or belong to a part of it beside its codes."""
        row = 0
        for each in destination.parts:
            name = prefix + each.name
            self._views[part_name(name, part) if part else name] = whole[row : row + each.shape[0]]
            row += each.shape[0]
        return whole


class LayerBuilder:
    """Builds products that all run in one form, for blocks allocated by `WeightSpace` and filled.

    The norms before fused matrices are folded into them, as Triton's products want it, and before rows are
    rounded to int8; before other codes they become factors of columns.
    With `ranks` layouts and tensors are one rank's part.
    """

    def __init__(self, place: Place, epsilon: float) -> None:
        self.place = place
        self.kernels = place.kernels
        self.epsilon = epsilon
        self.dtype = place.dtype
        self.form = place.form
        self.ranks = place.ranks
        self.fold_norms = place.kernels.capabilities.folds_norms
        self.sums = products.stream_sums(place.kernels)
        self.products: list[Product] = []
        """All products but those of heads, in the order in which they were made."""

    def projection(
        self,
        weight: Kept,
        bias: Tensor | None = None,
        norm: RowNorm | FoldedNorm | None = None,
        act: Activation | None = None,
    ) -> products.Projection:
        """Return a product by weight [N, K] that reads the stream, in this builder's form."""
        product = self._product(weight, bias, gated=act is not None and act.gated)
        self.products.append(product)
        if isinstance(product, NativeLinear):
            assert not isinstance(norm, FoldedNorm)
            return NativeProjection(product, norm, act)
        if isinstance(product, skinny.SkinnyLinear):
            assert not isinstance(norm, RowNorm)
            return skinny.SkinnyProjection(product, norm, act)
        return dense.TorchProjection(product, norm, act)

    def residual_projection(
        self, weight: Kept, bias: Tensor | None = None, post_norm: RowNorm | None = None
    ) -> products.ResidualProjection:
        """Return a product by weight [N, K] that is added to the stream, in this builder's form."""
        product = self._product(weight, bias)
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

    def _product(self, weight: Kept, bias: Tensor | None, *, gated: bool = False) -> Product:
        """Return a product in this builder's form; gated: the first half of its rows are gates."""
        if self.kernels.native is not None:
            return NativeLinear(weight, bias, self.kernels.native, gated=gated)
        weight = self._in_one_form(weight)
        if self.kernels.capabilities.folds_norms:
            laid_out = tile_weight(weight) if isinstance(weight, GroupedWeight) else weight
            return skinny.SkinnyLinear(laid_out, bias, self.kernels)
        return dense.Linear(weight, self.dtype, bias)

    def _in_one_form(self, weight: Kept) -> Tensor | GroupedWeight:
        """Return a weight whose pieces have different forms multiplied out, others as they are."""
        return weight.plain(self.dtype) if isinstance(weight, StackedWeight) else weight

    def embedding(
        self, table: Kept, vocab_size: int, head: products.AnyHead | None = None
    ) -> products.AnyEmbedding:
        """Return a table [V, H] of `vocab_size` ids, or of a rank's own; head: the product by that table."""
        if isinstance(table, GroupedWeight):
            product = head if isinstance(head, NativeLinear) else self._product(table, None)
            assert isinstance(product, NativeLinear) and self.ranks is None
            return PackedEmbedding(product)
        assert isinstance(table, Tensor)
        if self.ranks is None:
            return table
        return products.ShardedEmbedding(
            table, self.place.shard.ids(vocab_size)[0], vocab_size, self.ranks
        )

    def head(self, table: Kept, vocab_size: int, ids: Tensor | None = None) -> products.AnyHead:
        """The product that makes logits by a table [V, H], or a rank's own rows.

        ids: of a head of some of the `vocab_size` ids each row's, int64, ascending.
        """
        inner = self._product(table, None)
        if self.ranks is None:
            if isinstance(inner, skinny.SkinnyLinear):
                inner.ids = ids
            return inner
        return products.ShardedHead(inner, vocab_size if ids is None else len(ids), self.ranks)

    def share_workspace(self, rows: int) -> None:
        """Give the products made so far, which run in turn, one workspace for up to `rows` rows."""
        sharing = [product for product in self.products if isinstance(product, skinny.SkinnyLinear)]
        if sharing:
            skinny.share_workspace(sharing, rows)

    def after_norm(
        self, tensors: Tensors, name: str, act: Activation | None = None
    ) -> products.Projection:
        """Return the fused matrix `name` that reads the block's norm, or the stream where there is none."""
        bias = tensors.get(f"{name}_bias")
        scales = tensors.get("norm")
        if scales is None:
            return self.projection(self._kept(tensors, name), bias, act=act)
        norm: RowNorm | FoldedNorm = RowNorm(scales, self.epsilon)
        if self.fold_norms:
            norm = FoldedNorm(self.epsilon)
            weight = self._folded(tensors, name, scales)
        else:
            weight = self._kept(tensors, name)
        return self.projection(weight, bias, norm, act)

    def _folded(self, tensors: Tensors, name: str, scales: Tensor) -> Kept:
        """Return the matrix `name` times a norm's scales [K], in the form that weights are kept in."""
        if self.form.kind == "int8":
            # In float32 and rounded once, without a copy.
            tensors[name].mul_(scales)
            return self._kept(tensors, name)
        weight = self._in_one_form(self._kept(tensors, name))
        if isinstance(weight, Tensor):
            return weight.mul_(scales)
        # Norms do not fold into codes.
        return replace(weight, columns=scales)

    def matrix(self, tensors: Tensors, name: str) -> products.Projection:
        """Return the matrix `name`, which reads what it is given without a norm."""
        return self.projection(self._kept(tensors, name), tensors.get(f"{name}_bias"))

    def part_of_sum(
        self, tensors: Tensors, name: str, *, cut: bool = False
    ) -> products.ResidualProjection:
        """Return the matrix `name` at the end of a part of a block, which later sums over ranks.

        cut: a rank has its own columns of it.
        """
        weight = self._kept(tensors, name, cut=cut)
        return self.residual_projection(weight, tensors.get(f"{name}_bias"))

    def _kept(self, tensors: Tensors, name: str, *, cut: bool = False) -> Kept:
        """A matrix [N, K] in the form that weights are kept in; a row that int4 groups do not divide is wide.

        cut: ranks have parts of its rows; int8 scales are those of the whole ones.
        """
        weight = tensors[name]
        kind = self.form.kind
        if (grouped := tensors.grouped.get(name)) is not None:
            return grouped
        if kind == "int4" and weight.shape[1] % INT4_GROUP == 0:
            groups = quantize_int4(weight)
            return groups.plain(self.dtype) if self.form.widened else groups
        if kind != "int8":
            return weight
        whole = (
            self.ranks.gather(row_magnitudes(weight)).amax(dim=0) if cut and self.ranks else None
        )
        return quantize_int8(weight, whole)

    def reorder(
        self, tensors: Tensors, name: str, order: list[int], part: slice = slice(None)
    ) -> None:
        """Reorder rows of `name`, or of a part of them, within each head of len(order); its bias' too."""
        if (grouped := tensors.grouped.get(name)) is not None:  # rows have scales of their own
            _reorder_codes(grouped, order, part)
        for each_name in (name, f"{name}_bias"):
            if each_name in tensors and each_name not in tensors.grouped:
                reorder_heads(tensors[each_name][part], order)

    def summed(
        self, tensors: Tensors, name: str, epsilon: float | None = None, *, centred: bool = False
    ) -> products.ResidualProjection:
        """Return the matrix `name` at a block's end, of whose columns a rank has its own.

        epsilon: of the norm behind it, where it is another than elsewhere.
        centred: what it makes of any row has a mean of 0.
        """
        if centred:
            self._centre(tensors, name)
        scales = tensors.get("post_norm")
        post_norm = None if scales is None else RowNorm(scales, epsilon or self.epsilon)
        bias = tensors.get(f"{name}_bias")
        weight = self._kept(tensors, name, cut=True)
        if self.ranks is None:
            return self.residual_projection(weight, bias, post_norm)
        part = self.projection(weight)
        return products.SummedLinear(part, bias, post_norm, self.ranks, self.sums)

    def _centre(self, tensors: Tensors, name: str) -> None:
        """Take the mean of every column out of a matrix [N, K], and of its bias. Raises IncompatibleError."""
        if name in tensors.grouped:
            raise IncompatibleError(
                "packed weights cannot be centred, which layer norms of this model need"
            )
        for each in (name, f"{name}_bias"):
            if each in tensors:
                wide = tensors[each].float()
                tensors[each] = (wide - wide.mean(0)).to(tensors[each].dtype)

    def experts_matrix(
        self, tensors: Tensors, name: str, count: int, *, cut: bool = False, gated: bool = False
    ) -> ExpertMatrices:
        """Return the experts' matrices [E, N, K] in the storage that this builder's kernels read.

        cut: ranks have parts of their rows; gated: the first half of each one's rows are gates.
        """
        kept = self._in_one_form(self._kept(tensors, name, cut=cut))
        stacked: Tensor | GroupedWeight
        if isinstance(kept, GroupedWeight):
            stacked = kept.as_experts(count)
        else:
            stacked = kept.view(count, -1, kept.shape[1])
        if self.kernels.native is not None:
            return self.kernels.native.pack(stacked, gated=gated)
        if isinstance(stacked, GroupedWeight) and self.kernels.capabilities.folds_norms:
            return tile_weight(stacked)
        return stacked


def _reorder_codes(weight: GroupedWeight | StackedWeight, order: list[int], part: slice) -> None:
    """Reorder some rows of a matrix in codes within each head of len(order), in place."""
    first, end, _ = part.indices(weight.shape[0])
    pieces = weight.pieces if isinstance(weight, StackedWeight) else (weight,)
    for piece in pieces:
        rows = piece.shape[0]
        own = slice(max(0, min(first, rows)), max(0, min(end, rows)))
        for each in piece.parts:
            reorder_heads(each[own], order)
        first -= rows
        end -= rows


def reorder_heads(tensor: Tensor, order: list[int]) -> None:
    """Put rows of tensor [heads * D, ...] in another order within each head, in place; order lists D."""
    for head in tensor.view(-1, len(order), *tensor.shape[1:]):
        head.copy_(head[order])
