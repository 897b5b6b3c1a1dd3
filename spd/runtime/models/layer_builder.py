"""Makes a running layer of its layout and its filled tensors: reorder, fold, pack, put together."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.runtime.layers import moe
from spd.runtime.layers.attention import Attention
from spd.runtime.layers.latent_attention import LatentAttention
from spd.runtime.layers.linear import AnyLinear, Linear, SkinnyLinear, share_workspace
from spd.runtime.layers.mlp import GatedMlp
from spd.runtime.layers.moe import Experts, MergedExperts, MoeMlp, RoutedExperts
from spd.runtime.models.decoder import AttentionBlock, DecoderLayer, MlpBlock
from spd.runtime.models.layouts import GqaLayout, LatentLayout, LayerLayout, MlpLayout, MoeLayout
from spd.runtime.weight_space import LayerTensors, Tensors, centre_norms, fold_norm, reorder_heads


class LayerBuilder:
    """Builds layers whose products run in one form: allocate by `WeightSpace.layer`, fill, then `layer`.

    With `fold_norms` the norms before fused matrices are folded into them, as Triton's products want it.
    """

    def __init__(self, kernels: Kernels, epsilon: float, *, fold_norms: bool) -> None:
        self.kernels, self.epsilon, self.fold_norms = kernels, epsilon, fold_norms

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear | SkinnyLinear:
        """A product by weight [N, K] in this builder's form."""
        if self.kernels.name == "triton":
            return SkinnyLinear(weight, bias, self.kernels)
        return Linear(weight, bias)

    def layer(self, layout: LayerLayout, tensors: LayerTensors) -> DecoderLayer:
        """One layer. The tensors belong to it from then on: they are changed, or packed and worthless."""
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
        if self.fold_norms:
            fold_norm(tensors[name], tensors["norm"])
        return self._matrix(tensors, name)

    def _matrix(self, tensors: Tensors, name: str) -> AnyLinear:
        return self.linear(tensors[name], tensors.get(f"{name}_bias"))

    def _gqa(self, layout: GqaLayout, tensors: Tensors) -> Attention:
        order, turned = layout.rotary.order, layout.heads[0] + layout.heads[1]
        if order is not None:
            for name in ("qkv", "qkv_bias", "q_norm", "k_norm"):
                if name in tensors:
                    reorder_heads(tensors[name][: turned * layout.head_dim], order)
        if layout.centred_norms:
            centre_norms(tensors)
        qk_norm = (tensors["q_norm"], tensors["k_norm"]) if layout.qk_norm else None
        return Attention(
            tensors["norm"],
            self._after_norm(tensors, "qkv"),
            self._matrix(tensors, "output"),
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
            own = "query" in tensors
            reorder_heads(tensors["query"] if own else tensors["down"][: layout.query_rows], head)
            for name in ("down", "down_bias"):
                if name in tensors:
                    reorder_heads(tensors[name][-latent.rope_dim :], order)
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
            self._matrix(tensors, "output"),
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
            shared = self._after_norm(tensors, "gate_up"), self._matrix(tensors, "down")
        return MoeMlp(
            tensors["norm"],
            tensors["router"],
            correction.flatten() if correction is not None else None,
            self._experts(tensors["experts_gate_up"], tensors["experts_down"], experts.num_experts),
            shared,
            experts.router,
            self.epsilon,
            self.kernels,
        )

    def _experts(self, gate_up: Tensor, down: Tensor, count: int) -> Experts:
        """Of gate_up [E * 2 I, K] and down [E * K, I]."""
        downs = down.view(count, gate_up.shape[1], -1)
        if self.kernels.name == "torch" and gate_up.nbytes + down.nbytes <= moe.SMALL_EXPERTS:
            merged = downs.transpose(0, 1).flatten(1)
            return MergedExperts(Linear(gate_up), Linear(merged), count)
        return RoutedExperts(gate_up.view(count, -1, gate_up.shape[1]), downs, self.kernels)

    def _mlp(self, layout: MlpLayout, tensors: Tensors) -> GatedMlp:
        if layout.centred_norms:
            centre_norms(tensors)
        gate_up, down = self._after_norm(tensors, "gate_up"), self._matrix(tensors, "down")
        post_norm = tensors.get("post_norm")
        return GatedMlp(tensors["norm"], gate_up, down, self.epsilon, gelu=layout.gelu, post_norm=post_norm)


def share_products(layers: Iterable[DecoderLayer], rows: int) -> None:
    """Give the products of layers that run in turn one workspace, for up to `rows` rows, if they need it."""
    products = [p for layer in layers for p in layer.products() if isinstance(p, SkinnyLinear)]
    if products:
        share_workspace(products, rows)
