"""Makes a running layer of its layout and its filled tensors: reorder, fold, pack, put together."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.runtime.layers.attention import Attention
from spd.runtime.layers.linear import AnyLinear, Linear, SkinnyLinear, share_workspace
from spd.runtime.layers.mlp import GatedMlp
from spd.runtime.models.decoder import DecoderLayer
from spd.runtime.models.layouts import GqaLayout, LayerLayout, MlpLayout
from spd.runtime.weight_space import LayerTensors, Tensors, fold_norm, reorder_heads


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
        attention = self._gqa(layout.attention, tensors.attention)
        return DecoderLayer(attention, self._mlp(layout.mlp, tensors.mlp), layout.attention.cache)

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
        )

    def _mlp(self, layout: MlpLayout, tensors: Tensors) -> GatedMlp:
        gate_up = self._after_norm(tensors, "gate_up")
        return GatedMlp(tensors["norm"], gate_up, self._matrix(tensors, "down"), self.epsilon)


def share_products(layers: Iterable[DecoderLayer], rows: int) -> None:
    """Give the products of layers that run in turn one workspace, for up to `rows` rows, if they need it."""
    products = [p for layer in layers for p in layer.products() if isinstance(p, SkinnyLinear)]
    if products:
        share_workspace(products, rows)
