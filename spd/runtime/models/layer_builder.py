"""Makes a running layer of its layout and its filled tensors: reorder, fold, pack, put together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.eight_bits import int8_rows, joined_scales, magnitudes, multiplies_int8
from spd.kernels.skinny_linear import SCALE_ROWS, AnyWeight, ScaledWeight, plain_weight
from spd.runtime.layers import moe
from spd.runtime.layers.attention import Attention
from spd.runtime.layers.latent_attention import LatentAttention
from spd.runtime.layers.linear import (
    AnyHead,
    AnyLinear,
    Linear,
    SkinnyLinear,
    share_workspace,
    torch_linear,
)
from spd.runtime.layers.mlp import GatedMlp
from spd.runtime.layers.moe import Experts, MergedExperts, MoeMlp, NativeExperts, RoutedExperts
from spd.runtime.layers.native_linear import NativeLinear
from spd.runtime.layers.sharded import AnyEmbedding, ShardedEmbedding, ShardedHead, SummedLinear
from spd.runtime.models.decoder import AttentionBlock, DecoderLayer, MlpBlock
from spd.runtime.models.layouts import (
    AttentionLayout,
    FeedForwardLayout,
    GqaLayout,
    LatentLayout,
    LayerLayout,
    MlpLayout,
    MoeLayout,
)
from spd.runtime.models.shards import Shard
from spd.runtime.models.weight_form import WIDE, WeightForm
from spd.runtime.parallel.communicator import Communicator
from spd.runtime.weight_space import LayerTensors, Tensors, centre_norms, fold_norm, reorder_heads


class LayerBuilder:
    """Builds layers whose products run in one form: allocate by `WeightSpace.layer`, fill, then `layer`.

    With `fold_norms` the norms before fused matrices are folded into them, as Triton's products want it, and
    as int8 does in both forms, whose rows are thus the same. Norms before FP8 blocks become factors of their
    columns. With `ranks` layouts and tensors are one rank's part.
    """

    def __init__(
        self,
        kernels: Kernels,
        epsilon: float,
        dtype: torch.dtype,
        *,
        fold_norms: bool,
        form: WeightForm = WIDE,
        ranks: Communicator | None = None,
    ) -> None:
        self.kernels, self.epsilon, self.dtype, self.form = kernels, epsilon, dtype, form
        self.fold_norms, self.ranks = fold_norms or form.kind == "int8", ranks

    def linear(
        self, weight: AnyWeight, bias: Tensor | None = None, *, folded: bool = False, gated: bool = False
    ) -> Linear | SkinnyLinear | NativeLinear:
        """A product by weight [N, K] in this builder's form; folded: a norm before it is part of it.

        gated: the first half of N are gates of the second one.
        """
        if self.kernels.native is not None:
            return NativeLinear(plain_weight(weight, self.dtype), bias, self.kernels.native, gated=gated)
        if self.kernels.name == "triton":
            return SkinnyLinear(weight, bias, self.kernels)
        return torch_linear(weight, bias, self.dtype, folded=folded)

    def embedding(self, table: Tensor, vocab_size: int) -> AnyEmbedding:
        """A table [V, H] of `vocab_size` ids, or of a rank's own."""
        if self.ranks is None:
            return table
        first, _ = Shard(self.ranks.rank, self.ranks.size).ids(vocab_size)
        return ShardedEmbedding(table, first, vocab_size, self.ranks)

    def head(self, table: Tensor, vocab_size: int, ids: tuple[Tensor, int] | None = None) -> AnyHead:
        """The product that makes logits by a table [V, H], or a rank's own rows; ids: see `ShardedHead`."""
        inner = self.linear(table)
        if self.ranks is None:
            if ids is not None and isinstance(inner, SkinnyLinear):
                inner.ids = ids[0]
            return inner
        first, _ = Shard(self.ranks.rank, self.ranks.size).ids(vocab_size)
        return ShardedHead(inner, first, vocab_size, self.ranks, ids)

    def layer(self, layout: LayerLayout, tensors: LayerTensors) -> DecoderLayer:
        """One layer. The tensors belong to it from then on: they are changed, or packed and worthless."""
        join_scales(layout.attention, tensors.attention)
        join_scales(layout.mlp, tensors.mlp)
        attention: AttentionBlock
        match layout.attention:
            case GqaLayout():
                attention = self._gqa(layout.attention, tensors.attention)
            case LatentLayout():
                attention = self._latent(layout.attention, tensors.attention)
        mlp: MlpBlock
        match layout.mlp:
            case MlpLayout():
                mlp = self._mlp(layout.mlp, tensors.mlp)
            case MoeLayout():
                mlp = self._moe(layout.mlp, tensors.mlp)
        return DecoderLayer(attention, mlp, layout.attention.cache)

    def _after_norm(self, tensors: Tensors, name: str) -> AnyLinear:
        """The fused matrix `name` that reads the block's norm."""
        weight, bias, gated = tensors[name], tensors.get(f"{name}_bias"), name == "gate_up"
        if (scales := tensors.get(f"{name}_scales")) is not None:
            return self.linear(ScaledWeight(weight, scales, tensors["norm"]), bias, gated=gated)
        if self.fold_norms:
            fold_norm(weight, tensors["norm"])
        return self.linear(self._kept(tensors, name), bias, folded=self.fold_norms, gated=gated)

    def _matrix(self, tensors: Tensors, name: str, *, cut: bool = False) -> AnyLinear:
        return self.linear(self._kept(tensors, name, cut=cut), tensors.get(f"{name}_bias"))

    def _kept(self, tensors: Tensors, name: str, *, cut: bool = False) -> AnyWeight:
        """A matrix in the form that weights are kept in; cut: ranks have parts of its rows."""
        weight = tensors[name]
        if (scales := tensors.get(f"{name}_scales")) is not None:
            return ScaledWeight(weight, scales)
        return self._rounded(weight, cut) if self.form.kind == "int8" else weight

    def _rounded(self, weight: Tensor, cut: bool) -> ScaledWeight:
        """Int8 rows of weight [..., N, K]; parts of rows have the scales of the whole ones."""
        if not cut or self.ranks is None:
            return int8_rows(weight)
        return int8_rows(weight, self.ranks.gather(magnitudes(weight)).amax(dim=0))

    def _reorder(self, tensors: Tensors, name: str, part: slice, order: list[int]) -> None:
        """Reorder a part of the rows of `name`, if it is there, within each head.

        FP8 rows that would leave their block behind are multiplied out first.
        """
        if name not in tensors:
            return
        if (scales := tensors.get(f"{name}_scales")) is not None:
            spread = scales.repeat_interleave(SCALE_ROWS, 0)[: tensors[name].shape[0]]
            moved = spread[part].clone()
            reorder_heads(moved, order)
            if not torch.equal(moved, spread[part]):
                tensors[name] = ScaledWeight(tensors[name], scales).plain(self.dtype)
                del tensors[f"{name}_scales"]
        reorder_heads(tensors[name][part], order)

    def _summed(self, tensors: Tensors, name: str) -> AnyLinear:
        """The matrix `name` at a block's end, of whose columns a rank has its own."""
        if self.ranks is None:
            return self._matrix(tensors, name)
        bias = tensors.get(f"{name}_bias")
        inner = self.linear(self._kept(tensors, name, cut=True))
        return SummedLinear(inner, bias, self.ranks, self.kernels)

    def _gqa(self, layout: GqaLayout, tensors: Tensors) -> Attention:
        order, turned = layout.rotary.order, layout.heads[0] + layout.heads[1]
        if order is not None:
            for name in ("qkv", "qkv_bias", "q_norm", "k_norm"):
                self._reorder(tensors, name, slice(turned * layout.head_dim), order)
        if layout.centred_norms:
            centre_norms(tensors)
        qk_norm = (tensors["q_norm"], tensors["k_norm"]) if layout.qk_norm else None
        return Attention(
            tensors["norm"],
            self._matrix(tensors, "qkv") if layout.reads_pairs else self._after_norm(tensors, "qkv"),
            self._summed(tensors, "output"),
            layout.head_dim,
            layout.num_heads,
            layout.num_kv_heads,
            qk_norm,
            self.epsilon,
            self.kernels,
            scale=layout.scale,
            sliding=layout.sliding,
            softcap=layout.softcap,
            local_rope=layout.local_rope,
            post_norm=tensors.get("post_norm"),
        )

    def _latent(self, layout: LatentLayout, tensors: Tensors) -> LatentAttention:
        order, latent = layout.rotary.order, layout.latent
        if order is not None:
            head = [*range(latent.nope_dim), *(latent.nope_dim + i for i in order)]
            queries = "query" if "query" in tensors else "down"
            self._reorder(tensors, queries, slice(layout.query_rows), head)
            for name in ("down", "down_bias"):
                self._reorder(tensors, name, slice(-latent.rope_dim, None), order)
        query: AnyLinear | None = None
        if "query_norm" in tensors:
            query = self._matrix(tensors, "query")
        elif "query" in tensors:
            query = self._after_norm(tensors, "query")
        return LatentAttention(
            tensors["norm"],
            self._after_norm(tensors, "down"),
            tensors.get("query_norm"),
            query,
            tensors["latent_norm"],
            tensors["up"],
            self._summed(tensors, "output"),
            latent,
            layout.num_heads,
            layout.scale,
            self.epsilon,
            self.kernels,
        )

    def _moe(self, layout: MoeLayout, tensors: Tensors) -> MoeMlp:
        experts = layout.experts
        correction = tensors.get("correction")
        shared = None
        if layout.shared:
            shared = self._after_norm(tensors, "gate_up"), self._matrix(tensors, "down", cut=True)
        return MoeMlp(
            tensors["norm"],
            tensors["router"],
            correction.flatten() if correction is not None else None,
            self._experts(tensors, experts.num_experts),
            shared,
            experts.router,
            self.epsilon,
            self.kernels,
            self.ranks,
        )

    def _experts(self, tensors: Tensors, count: int) -> Experts:
        """Of gate_up [E * 2 I, K] and down [E * K, I]."""
        names = ("experts_gate_up", "experts_down")
        small = sum(tensors[name].nbytes for name in names) <= moe.SMALL_EXPERTS
        gate_up, down = (self._stacked(tensors, name, count, cut=name == names[1]) for name in names)
        if self.kernels.native is not None:
            wide = [plain_weight(weight, self.dtype) for weight in (gate_up, down)]
            return NativeExperts(wide[0], wide[1], self.kernels.native)
        if (
            self.kernels.name == "torch"
            and small
            and isinstance(gate_up, Tensor)
            and isinstance(down, Tensor)
        ):
            merged = down.transpose(0, 1).flatten(1)
            return MergedExperts(Linear(gate_up.flatten(0, 1)), Linear(merged), count)
        return RoutedExperts(gate_up, down, self.kernels)

    def _stacked(self, tensors: Tensors, name: str, count: int, *, cut: bool) -> AnyWeight:
        """The experts' matrices [E, N, K] in the form that weights are kept in."""
        weight = tensors[name].view(count, -1, tensors[name].shape[1])
        if (scales := tensors.get(f"{name}_scales")) is not None:
            return ScaledWeight(weight, scales.view(count, -1, scales.shape[1]))
        if self.form.kind != "int8":
            return weight
        rows = self._rounded(weight, cut)
        stays = self.kernels.name == "triton" or multiplies_int8(weight.device, self.dtype, weight.shape[-1])
        return rows if stays else rows.plain(self.dtype)

    def _mlp(self, layout: MlpLayout, tensors: Tensors) -> GatedMlp:
        if layout.centred_norms:
            centre_norms(tensors)
        gate_up, down = self._after_norm(tensors, "gate_up"), self._summed(tensors, "down")
        post_norm = tensors.get("post_norm")
        return GatedMlp(tensors["norm"], gate_up, down, self.epsilon, gelu=layout.gelu, post_norm=post_norm)


def join_scales(block: AttentionLayout | FeedForwardLayout, tensors: Tensors) -> None:
    """Group the scales of FP8 matrices as `ScaledWeight` wants them, in place."""
    for name, destination in block.destinations().items():
        if (scales := tensors.get(f"{name}_scales")) is not None:
            tensors[f"{name}_scales"] = joined_scales(scales, [shape[0] for _, shape in destination.parts])


def share_products(layers: Iterable[DecoderLayer], rows: int) -> None:
    """Give the products of layers that run in turn one workspace, for up to `rows` rows, if they need it."""
    share_workspace_of((p for layer in layers for p in layer.products()), rows)


def share_workspace_of(products: Iterable[AnyLinear], rows: int) -> None:
    """Give those products that need one a workspace."""
    plain = (p.inner if isinstance(p, SummedLinear) else p for p in products)
    skinny = [p for p in plain if isinstance(p, SkinnyLinear)]
    if skinny:
        share_workspace(skinny, rows)
