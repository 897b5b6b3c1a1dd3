"""Linear layers in C, by packed weights: norms before and sums after are fused into the product.

A row's bits do not depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spd.kernels.linear.activation import Activation
from spd.kernels.native.packed import FLOAT32, ROUNDED, AnyMatrix, PackedProducts, epilogue_of
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.layers.linear import OutputHead, RowNorm


def _to_native_floats(vector: Tensor) -> Tensor:
    """Return a vector in the form that C reads: contiguous float32."""
    return vector.float().contiguous()


class NativeLinear(OutputHead):
    """A product by the C kernels."""

    def __init__(
        self,
        weight: AnyMatrix,
        bias: Tensor | None,
        kernels: PackedProducts,
        *,
        gated: bool = False,
    ) -> None:
        """gated: the first half of the weight's rows are gates."""
        self.kernels = kernels
        self.weight = kernels.pack(weight, gated=gated)
        self.bias = None if bias is None else _to_native_floats(bias)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V] of hidden [T, hidden]."""
        return self.kernels.packed_linear(hidden, self.weight, self.bias, FLOAT32)


class PackedEmbedding:
    """An embedding whose table [V, H] is a packed weight, shared with the head where they are tied."""

    def __init__(self, product: NativeLinear) -> None:
        self.product = product
        self.shape = torch.Size((product.weight.width, product.weight.depth))

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [T, H] of ids int64 [T]."""
        return self.product.kernels.packed_rows(self.product.weight, ids)


class NativeProjection:
    """A `Projection` by the C kernels."""

    def __init__(self, product: NativeLinear, norm: RowNorm | None, act: Activation | None) -> None:
        self.product = product
        self.norm_scales = None if norm is None else _to_native_floats(norm.scales)
        self.epsilon = 0.0 if norm is None else norm.epsilon
        self.epilogue = ROUNDED if act is None else epilogue_of(act)

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Tensor:
        """Return [T, N] of the stream [T, K], or [T, N / 2] after gates."""
        product = self.product
        return product.kernels.packed_linear(
            stream.x,
            product.weight,
            product.bias,
            self.epilogue,
            norm=self.norm_scales,
            epsilon=self.epsilon,
        )


@dataclass(frozen=True, eq=False)
class NativeResidualProjection:
    """A `ResidualProjection` by the C kernels."""

    product: NativeLinear
    """The linear layer whose result is added to the stream by the same call."""

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the product of x [T, K]."""
        product = self.product
        return Residual(
            product.kernels.packed_linear(
                x, product.weight, product.bias, ROUNDED, residual=stream.x
            )
        )


class NativeNormedProjection:
    """A `NativeResidualProjection` with a norm of the product."""

    def __init__(self, product: NativeLinear, post_norm: RowNorm) -> None:
        self.product = product
        self.scales = _to_native_floats(post_norm.scales)
        self.epsilon = post_norm.epsilon

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the norm of the product of x [T, K]."""
        product = self.product
        y = product.kernels.packed_linear(x, product.weight, product.bias, ROUNDED)
        return Residual(product.kernels.norm(y, self.scales, self.epsilon, stream.x))
