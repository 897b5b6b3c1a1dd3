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
from spd.kernels.dispatch import Kernels
from spd.kernels.linear.eight_bits import int8_rows, magnitudes, multiplies_int8
from spd.kernels.linear.few_bits import INT4_GROUP, GroupedWeight, int4_groups
from spd.kernels.linear.skinny_linear import SCALE_ROWS, AnyWeight, ScaledWeight, plain_weight
from spd.runtime.layers.base import Communicator
from spd.runtime.layers.linear import (
    ALONE,
    AnyHead,
    AnyLinear,
    Around,
    Gate,
    GroupedLinear,
    Int8Linear,
    Linear,
    NativeLinear,
    SkinnyLinear,
    share_workspace,
)
from spd.runtime.layers.sharded import AnyEmbedding, ShardedEmbedding, ShardedHead, SummedLinear
from spd.runtime.models.destinations import Destination, Shard
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.models.weight_form import BLOCK, WIDE, PackedSpec, WeightForm, part_name
from spd.runtime.models.weights import ModelLayout, scale_name, scale_shape

Fill = Callable[[Mapping[str, Tensor]], None]
"""Writes every view from its namesake, wherever that comes from."""


class Tensors(dict[str, Tensor]):
    """A block's tensors by the names that its layout gives them; of a matrix in codes the codes."""

    def __init__(self, found: Mapping[str, Tensor]) -> None:
        super().__init__(found)
        self.grouped: dict[str, GroupedWeight] = {}
        """Matrices in codes, with what stands beside these."""


LayerTensors = tuple[Tensors, Tensors]
"""One layer's: of its attention block, and of its MLP block."""


@dataclass(frozen=True)
class Place:
    """Where a model runs, by which kernels, in what form, and on which of several ranks."""

    dtype: torch.dtype
    device: str
    kernels: Kernels
    form: WeightForm = WIDE
    ranks: Communicator | None = None

    @property
    def shard(self) -> Shard | None:
        """This rank's part; None where it is the whole."""
        return None if self.ranks is None else Shard(self.ranks.rank, self.ranks.size)

    def part_of(self, layout: ModelLayout) -> ModelLayout:
        """This rank's part of a model."""
        return layout if self.shard is None else layout.sharded(self.shard)

    def ids(self, count: int) -> tuple[int, int]:
        """Which of so many rows of a table by ids are this rank's."""
        return (0, count) if self.shard is None else self.shard.ids(count)


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

        A matrix that stays FP8 has float32 scales of its parts' blocks beside it, as NAME_scales; one in
        codes is among the `grouped`.
        """
        form = self.place.form
        packed = {n: form.stays_packed(each, prefix) for n, each in destinations.items()} if prefix else {}
        fp8 = {n for n, each in destinations.items() if prefix and self.place.form.stays_fp8(each, prefix)}
        plain = {
            n: self._tensor(each, prefix)
            for n, each in destinations.items()
            if n not in fp8 and packed.get(n) is None
        }
        made = Tensors(plain)
        for name, spec in packed.items():
            if spec is not None:
                made.grouped[name] = self._codes(destinations[name], prefix, spec)
                made[name] = made.grouped[name].codes
        for name in (name for name in destinations if name in fp8):
            made[name] = self._tensor(destinations[name], prefix, torch.float8_e4m3fn)
            parts = destinations[name].parts
            shapes = {scale_name(part.name): scale_shape(part.shape, (BLOCK, BLOCK)) for part in parts}
            made[f"{name}_scales"] = self._tensor(Destination.of(shapes, exact=True), prefix)
        return made

    def _codes(self, destination: Destination, prefix: str, spec: PackedSpec) -> GroupedWeight:
        (rows, columns), device = destination.shape, self.place.device
        groups = -(-columns // (spec.group or columns))
        scale = torch.float32 if spec.wide_scales else torch.bfloat16
        kept = {
            "": torch.empty(rows, columns // 2 if spec.paired else columns, dtype=torch.uint8, device=device)
        }
        kept["scales"] = torch.empty(rows, groups, dtype=scale, device=device)
        if spec.zeros:
            kept["zeros"] = torch.empty(rows, groups, dtype=torch.uint8, device=device)
        row = 0
        for part in destination.parts:
            for which, whole in kept.items():
                named = prefix + part.name
                self._views[part_name(named, which) if which else named] = whole[row : row + part.shape[0]]
            row += part.shape[0]
        return GroupedWeight(spec.kind, kept[""], kept["scales"], kept.get("zeros"), spec.group or columns)

    def _tensor(self, destination: Destination, prefix: str, dtype: torch.dtype | None = None) -> Tensor:
        dtype = torch.float32 if destination.exact else dtype or self.place.dtype
        whole = torch.empty(destination.shape, dtype=dtype, device=self.place.device)
        row = 0
        for part in destination.parts:
            self._views[prefix + part.name] = whole[row : row + part.shape[0]]
            row += part.shape[0]
        return whole


class LayerBuilder:
    """Builds products that all run in one form, for blocks allocated by `WeightSpace` and filled.

    The norms before fused matrices are folded into them, as Triton's products want it, and
    as int8 does in both forms, whose rows are thus the same. Norms before FP8 blocks become factors of their
    columns. With `ranks` layouts and tensors are one rank's part.
    """

    def __init__(self, place: Place, epsilon: float, *, fold_norms: bool = False) -> None:
        self.place, self.kernels, self.epsilon = place, place.kernels, epsilon
        self.dtype, self.form, self.ranks = place.dtype, place.form, place.ranks
        self.fold_norms = fold_norms or place.kernels.facts.folds_norms or place.form.kind == "int8"
        self.skinny: list[SkinnyLinear] = []
        """Products that want a workspace: all but the heads'."""

    def linear(
        self, weight: AnyWeight | GroupedWeight, bias: Tensor | None = None, around: Around = ALONE
    ) -> Linear | SkinnyLinear | NativeLinear:
        """A product by weight [N, K] in this builder's form, with what stands around it in its layer."""
        if self.kernels.native is not None:
            if not isinstance(weight, GroupedWeight):
                weight = plain_weight(weight, self.dtype)
            return NativeLinear(weight, bias, self.kernels.native, around)
        if isinstance(weight, GroupedWeight):
            return GroupedLinear(weight, bias, around, self.dtype)
        if self.kernels.facts.folds_norms:
            self.skinny.append(SkinnyLinear(weight, bias, self.kernels, around))
            return self.skinny[-1]
        if isinstance(weight, ScaledWeight) and multiplies_int8(weight.device, self.dtype, weight.shape[-1]):
            return Int8Linear(weight, bias, around)
        return Linear(plain_weight(weight, self.dtype), bias, around)

    def embedding(self, table: Tensor, vocab_size: int) -> AnyEmbedding:
        """A table [V, H] of `vocab_size` ids, or of a rank's own."""
        if self.ranks is None:
            return table
        return ShardedEmbedding(table, self.place.ids(vocab_size)[0], vocab_size, self.ranks)

    def head(self, table: Tensor, vocab_size: int, ids: Tensor | None = None) -> AnyHead:
        """The product that makes logits by a table [V, H], or a rank's own rows.

        ids: of a head of some of the `vocab_size` ids each row's, int64, ascending.
        """
        inner = self.linear(table)
        if isinstance(inner, SkinnyLinear):
            self.skinny.pop()
        if self.ranks is None:
            if isinstance(inner, SkinnyLinear):
                inner.ids = ids
            return inner
        rows, named = (vocab_size, None) if ids is None else (len(ids), (ids, vocab_size))
        return ShardedHead(inner, self.place.ids(rows)[0], rows, self.ranks, named)

    def share_workspace(self, rows: int) -> None:
        """Give the products made so far, which run in turn, one workspace for up to `rows` rows."""
        if self.skinny:
            share_workspace(self.skinny, rows)

    def after_norm(self, tensors: Tensors, name: str, gate: Gate | None = None) -> AnyLinear:
        """The fused matrix `name` that reads the block's norm, or the stream itself where there is none."""
        weight, bias, norm = tensors[name], tensors.get(f"{name}_bias"), tensors.get("norm")
        if norm is None:
            return self.linear(self._kept(tensors, name), bias, Around(gate=gate))
        around = Around(self.epsilon, norm, self.fold_norms, gate)
        if (grouped := tensors.grouped.get(name)) is not None:
            return self.linear(grouped, bias, replace(around, folded=False))
        if (scales := tensors.get(f"{name}_scales")) is not None:
            return self.linear(ScaledWeight(weight, scales, norm), bias, around)
        if self.form.kind == "int4":  # rounded before a norm is folded in
            kept = self._grouped(weight)
            if isinstance(kept, GroupedWeight):
                return self.linear(kept, bias, replace(around, folded=False))
            weight = kept
        if self.fold_norms:
            fold_norm(weight, norm)
        return self.linear(self._rounded(weight, False) if self.form.kind == "int8" else weight, bias, around)

    def matrix(self, tensors: Tensors, name: str, *, cut: bool = False) -> AnyLinear:
        return self.linear(self._kept(tensors, name, cut=cut), tensors.get(f"{name}_bias"))

    def _kept(self, tensors: Tensors, name: str, *, cut: bool = False) -> AnyWeight | GroupedWeight:
        """A matrix in the form that weights are kept in; cut: ranks have parts of its rows."""
        weight = tensors[name]
        if (grouped := tensors.grouped.get(name)) is not None:
            return grouped
        if (scales := tensors.get(f"{name}_scales")) is not None:
            return ScaledWeight(weight, scales)
        if self.form.kind == "int4":
            return self._grouped(weight)
        return self._rounded(weight, cut) if self.form.kind == "int8" else weight

    def _grouped(self, weight: Tensor) -> Tensor | GroupedWeight:
        """Int4 groups of weight [..., N, K], or their values; a row that groups do not divide stays."""
        if weight.shape[-1] % INT4_GROUP:
            return weight
        groups = int4_groups(weight)
        return groups.plain(self.dtype) if self.form.widened else groups

    def _rounded(self, weight: Tensor, cut: bool) -> ScaledWeight:
        """Int8 rows of weight [..., N, K]; parts of rows have the scales of the whole ones."""
        if not cut or self.ranks is None:
            return int8_rows(weight)
        return int8_rows(weight, self.ranks.gather(magnitudes(weight)).amax(dim=0))

    def reorder(self, tensors: Tensors, name: str, part: slice, order: list[int]) -> None:
        """Reorder a part of the rows of `name`, if it is there, within each head.

        FP8 rows that would leave their block behind are multiplied out first.
        """
        if name not in tensors:
            return
        if (grouped := tensors.grouped.get(name)) is not None:  # rows have scales of their own
            for each in grouped.parts:
                reorder_heads(each[part], order)
            return
        if (scales := tensors.get(f"{name}_scales")) is not None:
            spread = scales.repeat_interleave(SCALE_ROWS, 0)[: tensors[name].shape[0]]
            moved = spread[part].clone()
            reorder_heads(moved, order)
            if not torch.equal(moved, spread[part]):
                tensors[name] = ScaledWeight(tensors[name], scales).plain(self.dtype)
                del tensors[f"{name}_scales"]
        reorder_heads(tensors[name][part], order)

    def arrange(self, tensors: Tensors, name: str, order: list[int]) -> None:
        """Put the rows of `name`, and of its bias if there is one, in another order.

        FP8 rows that move by whole groups take their scales along; others are multiplied out first.
        """
        groups = order[::SCALE_ROWS]
        if (scales := tensors.pop(f"{name}_scales", None)) is not None:
            together = [first + row for first in groups for row in range(SCALE_ROWS)]
            if order == together and not any(first % SCALE_ROWS for first in groups):
                tensors[f"{name}_scales"] = scales[[first // SCALE_ROWS for first in groups]]
            else:
                tensors[name] = ScaledWeight(tensors[name], scales).plain(self.dtype)
        if (grouped := tensors.grouped.get(name)) is not None:
            tensors.grouped[name] = grouped.arranged(order)
            tensors[name] = tensors.grouped[name].codes
        for each in (name, f"{name}_bias"):
            if each in tensors and each not in tensors.grouped:
                rows = tensors[each]
                kind = torch.uint8 if rows.dtype == torch.float8_e4m3fn else rows.dtype
                tensors[each] = rows.view(kind)[order].view(rows.dtype)

    def summed(self, tensors: Tensors, name: str, *, centred: bool = False) -> AnyLinear:
        """The matrix `name` at a block's end, of whose columns a rank has its own.

        centred: what it makes of any row has a mean of 0.
        """
        if centred:
            self._centre(tensors, name)
        around, bias = Around(self.epsilon, post_norm=tensors.get("post_norm")), tensors.get(f"{name}_bias")
        weight = self._kept(tensors, name, cut=True)
        if self.ranks is None:
            return self.linear(weight, bias, around)
        return SummedLinear(self.linear(weight), bias, around, self.ranks, self.kernels)

    def _centre(self, tensors: Tensors, name: str) -> None:
        """Take the mean of every column out of a matrix [N, K], and of its bias. Raises IncompatibleError."""
        if name in tensors.grouped:
            raise IncompatibleError("packed weights cannot be centred, which layer norms of this model need")
        if (scales := tensors.pop(f"{name}_scales", None)) is not None:
            tensors[name] = ScaledWeight(tensors[name], scales).plain(self.dtype)
        for each in (name, f"{name}_bias"):
            if each in tensors:
                wide = tensors[each].float()
                tensors[each] = (wide - wide.mean(0)).to(tensors[each].dtype)

    def stacked(self, tensors: Tensors, name: str, count: int, *, cut: bool) -> AnyWeight | GroupedWeight:
        """The experts' matrices [E, N, K] in the form that weights are kept in."""
        if (grouped := tensors.grouped.get(name)) is not None:
            return grouped.stacked(count)
        weight = tensors[name].view(count, -1, tensors[name].shape[1])
        if (scales := tensors.get(f"{name}_scales")) is not None:
            return ScaledWeight(weight, scales.view(count, -1, scales.shape[1]))
        if self.form.kind == "int4":
            return self._grouped(weight)
        if self.form.kind != "int8":
            return weight
        rows = self._rounded(weight, cut)
        stays = self.kernels.facts.any_int8 or multiplies_int8(weight.device, self.dtype, weight.shape[-1])
        return rows if stays else rows.plain(self.dtype)


def fold_norm(weight: Tensor, norm: Tensor) -> None:
    """Scale the columns of weight [N, K] by norm [K] in place: the norm's own scales become ones.

    torch multiplies in float32 and rounds once, without a copy of the matrix.
    """
    weight.mul_(norm)


def reorder_heads(tensor: Tensor, order: list[int]) -> None:
    """Put rows of tensor [heads * D, ...] in another order within each head, in place; order lists D."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor = tensor.view(torch.uint8)
    heads = tensor.view(-1, len(order), *tensor.shape[1:])
    heads.copy_(heads[:, order])
