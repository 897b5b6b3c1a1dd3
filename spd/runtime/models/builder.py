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
from spd.kernels.interface import Kernels
from spd.kernels.linear.activation import Activation
from spd.kernels.linear.few_bits import (
    GroupedWeight,
    int4_groups,
    int8_rows,
    magnitudes,
    tiled,
)
from spd.runtime.layers import linear as products
from spd.runtime.layers.base import Communicator
from spd.runtime.layers.linear import ALONE, Around
from spd.runtime.models.destinations import WHOLE, Destination, Shard
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.models.weights import WIDE, PackedSpec, WeightForm, part_name

Fill = Callable[
    [Mapping[str, Tensor]], None
]  # writes every view from its namesake, wherever that comes from


class Tensors(dict[str, Tensor]):
    """A block's tensors by the names that its layout gives them; of a matrix in codes the codes."""

    def __init__(self, found: Mapping[str, Tensor]) -> None:
        super().__init__(found)
        self.grouped: dict[
            str, GroupedWeight
        ] = {}  # matrices in codes, with what stands beside these


Kept = Tensor | GroupedWeight
Product = products.Linear | products.SkinnyLinear | products.NativeLinear
LayerTensors = tuple[Tensors, Tensors]  # one layer's: of its attention block, and of its MLP block


@dataclass(frozen=True)
class Place:
    """Where a model runs, by which kernels, in what form, and on which of several ranks."""

    dtype: torch.dtype
    device: str
    kernels: Kernels
    form: WeightForm = WIDE
    ranks: Communicator | None = None

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
        views, self._views = self._views, {}
        return views

    def layer(self, layout: LayerLayout, prefix: str) -> LayerTensors:
        """Allocate one layer whose tensors stand below `prefix`, such as `model.layers.0.`."""
        attention, mlp = layout.attention.destinations(), layout.mlp.destinations()
        return self.block(attention, prefix), self.block(mlp, prefix)

    def block(self, destinations: Mapping[str, Destination], prefix: str = "") -> Tensors:
        """Allocate what is described; the checkpoint's names begin with `prefix`.

        A matrix in codes is among the `grouped`.
        """
        form, made = self.place.form, Tensors({})
        for name, each in destinations.items():
            if prefix and (spec := form.stays_packed(each, prefix)) is not None:
                made.grouped[name] = self._codes(each, prefix, spec)
                made[name] = made.grouped[name].codes
            else:
                dtype = torch.float32 if each.exact else self.place.dtype
                whole = torch.empty(each.shape, dtype=dtype, device=self.place.device)
                made[name] = self._viewed(whole, each, prefix)
        return made

    def _codes(self, destination: Destination, prefix: str, spec: PackedSpec) -> GroupedWeight:
        rows, columns = destination.shape
        groups = -(-columns // (spec.group or columns))

        def empty(width: int, dtype: torch.dtype, part: str = "") -> Tensor:
            whole = torch.empty(rows, width, dtype=dtype, device=self.place.device)
            return self._viewed(whole, destination, prefix, part)

        codes = empty(columns // 2 if spec.paired else columns, torch.uint8)
        scales = empty(groups, torch.float32 if spec.wide_scales else torch.bfloat16, "scales")
        zeros = empty(groups, torch.uint8, "zeros") if spec.zeros else None
        return GroupedWeight(spec.kind, codes, scales, zeros, spec.group or columns)

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
        self.place, self.kernels, self.epsilon = place, place.kernels, epsilon
        self.dtype, self.form, self.ranks = place.dtype, place.form, place.ranks
        self.fold_norms = place.kernels.capabilities.folds_norms
        self.products: list[
            Product
        ] = []  # all but the heads', in the order in which they were made

    def linear(self, weight: Kept, bias: Tensor | None = None, around: Around = ALONE) -> Product:
        """A product by weight [N, K] in this builder's form, with what stands around it in its layer."""
        self.products.append(self._linear(weight, bias, around))
        return self.products[-1]

    def _linear(self, weight: Kept, bias: Tensor | None, around: Around) -> Product:
        if self.kernels.native is not None:
            return products.NativeLinear(weight, bias, self.kernels.native, around)
        if self.kernels.capabilities.folds_norms:
            laid_out = tiled(weight) if isinstance(weight, GroupedWeight) else weight
            return products.SkinnyLinear(laid_out, bias, self.kernels, around)
        return products.Linear(weight, self.dtype, bias, around)

    def embedding(self, table: Tensor, vocab_size: int) -> products.AnyEmbedding:
        """A table [V, H] of `vocab_size` ids, or of a rank's own."""
        if self.ranks is None:
            return table
        return products.ShardedEmbedding(
            table, self.place.shard.ids(vocab_size)[0], vocab_size, self.ranks
        )

    def head(self, table: Tensor, vocab_size: int, ids: Tensor | None = None) -> products.AnyHead:
        """The product that makes logits by a table [V, H], or a rank's own rows.

        ids: of a head of some of the `vocab_size` ids each row's, int64, ascending.
        """
        inner = self._linear(table, None, ALONE)
        if self.ranks is None:
            if isinstance(inner, products.SkinnyLinear):
                inner.ids = ids
            return inner
        return products.ShardedHead(inner, vocab_size if ids is None else len(ids), self.ranks)

    def share_workspace(self, rows: int) -> None:
        """Give the products made so far, which run in turn, one workspace for up to `rows` rows."""
        if skinny := [
            product for product in self.products if isinstance(product, products.SkinnyLinear)
        ]:
            products.share_workspace(skinny, rows)

    def after_norm(
        self, tensors: Tensors, name: str, act: Activation | None = None
    ) -> products.AnyLinear:
        """The fused matrix `name` that reads the block's norm, or the stream itself where there is none."""
        bias, norm, folds = tensors.get(f"{name}_bias"), tensors.get("norm"), self.fold_norms
        rounds = folds and self.form.kind == "int8"
        if norm is not None and rounds:
            tensors[name].mul_(norm)  # in float32 and rounded once, without a copy
        kept = self._kept(tensors, name)
        if norm is None:
            return self.linear(kept, bias, Around(act=act))
        if folds and not rounds:  # norms do not fold into codes
            kept = kept.mul_(norm) if isinstance(kept, Tensor) else replace(kept, columns=norm)
        return self.linear(kept, bias, Around(self.epsilon, norm, folds, act))

    def matrix(self, tensors: Tensors, name: str, *, cut: bool = False) -> products.AnyLinear:
        return self.linear(self._kept(tensors, name, cut=cut), tensors.get(f"{name}_bias"))

    def _kept(self, tensors: Tensors, name: str, *, cut: bool = False) -> Kept:
        """A matrix [N, K] in the form that weights are kept in; a row that int4 groups do not divide is wide.

        cut: ranks have parts of its rows; int8 scales are those of the whole ones.
        """
        weight, kind = tensors[name], self.form.kind
        if (grouped := tensors.grouped.get(name)) is not None:
            return grouped
        if kind == "int4" and weight.shape[1] % INT4_GROUP == 0:
            groups = int4_groups(weight)
            return groups.plain(self.dtype) if self.form.widened else groups
        if kind != "int8":
            return weight
        whole = self.ranks.gather(magnitudes(weight)).amax(dim=0) if cut and self.ranks else None
        return int8_rows(weight, whole)

    def reorder(
        self, tensors: Tensors, name: str, order: list[int], part: slice = slice(None)
    ) -> None:
        """Reorder rows of `name`, or of a part of them, within each head of len(order); its bias' too."""
        if (grouped := tensors.grouped.get(name)) is not None:  # rows have scales of their own
            for each in grouped.parts:
                reorder_heads(each[part], order)
        for each_name in (name, f"{name}_bias"):
            if each_name in tensors and each_name not in tensors.grouped:
                reorder_heads(tensors[each_name][part], order)

    def summed(
        self, tensors: Tensors, name: str, epsilon: float | None = None, *, centred: bool = False
    ) -> products.AnyLinear:
        """The matrix `name` at a block's end, of whose columns a rank has its own.

        epsilon: of the norm behind it, where it is another than elsewhere.
        centred: what it makes of any row has a mean of 0.
        """
        if centred:
            self._centre(tensors, name)
        around = Around(epsilon or self.epsilon, post_norm=tensors.get("post_norm"))
        bias = tensors.get(f"{name}_bias")
        weight = self._kept(tensors, name, cut=True)
        if self.ranks is None:
            return self.linear(weight, bias, around)
        return products.SummedLinear(self.linear(weight), bias, around, self.ranks, self.kernels)

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

    def stacked(self, tensors: Tensors, name: str, count: int, *, cut: bool) -> Kept:
        """The experts' matrices [E, N, K] in the form that weights are kept in."""
        kept = self._kept(tensors, name, cut=cut)
        if isinstance(kept, GroupedWeight):
            return kept.stacked(count)
        return kept.view(count, -1, kept.shape[1])


def reorder_heads(tensor: Tensor, order: list[int]) -> None:
    """Put rows of tensor [heads * D, ...] in another order within each head, in place; order lists D."""
    for head in tensor.view(-1, len(order), *tensor.shape[1:]):
        head.copy_(head[order])
