"""Linear layers by torch, prepacked for oneDNN on a CPU.

Libraries choose their arithmetic by the number of rows, so rows come in buckets that a probe found
to give the same bits (see `spd.runtime.round.arithmetic_probe`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.linear.activation import Activation
from spd.kernels.linear.few_bits import GroupedWeight
from spd.kernels.linear.int8_activations import codes_linear
from spd.kernels.seeded import seeded_generator
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.layers.linear import (
    FoldedNorm,
    OutputHead,
    RowNorm,
    RowStep,
    activation_steps,
    apply_in_tiles,
)

PACK_ROWS = 16
"""The number of rows that oneDNN expects when it lays out a weight."""


class MatrixProduct(Protocol):
    """A product by a weight [N, K] in one storage format."""

    @property
    def weight(self) -> Tensor | GroupedWeight:
        """Return the weight as it is stored."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, K] Wᵀ + bias: [T, N]."""
        ...

    def rounding_error(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return the rounding error of y [T, N], the product of x; None where it is not known."""
        ...


@dataclass(frozen=True, eq=False)
class PlainProduct:
    """A product by a weight as the checkpoint stores it."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, K] Wᵀ + bias: [T, N]."""
        return F.linear(x, self.weight, self.bias)

    def rounding_error(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return None: torch's products do not report rounding errors."""
        return None


@dataclass(frozen=True, eq=False)
class PrepackedProduct:
    """A product by a weight in oneDNN's own layout."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, K] Wᵀ + bias: [T, N]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.weight, self.bias, "none", [], ""
        )
        return y

    def rounding_error(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return the rounding error of y [T, N], the product of x."""
        error: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, -y, self.weight, self.bias, "add"
        )
        return error


@dataclass(frozen=True, eq=False)
class GroupedProduct:
    """A product by codes, which are dequantized at each call."""

    weight: GroupedWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, K] Wᵀ + bias: [T, N]."""
        return codes_linear(x, self.weight, self.bias)

    def rounding_error(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return the rounding error of y [T, N], the product of x."""
        bias = None if self.bias is None else self.bias.float()
        return codes_linear(x.float(), self.weight, bias) - y.float()


def can_prepack(weight: Tensor) -> bool:
    """True if oneDNN can store this weight in its own layout: on CPU, bfloat16 or float32."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def make_product(weight: Tensor | GroupedWeight, bias: Tensor | None) -> MatrixProduct:
    """Return the product by a weight [N, K]; the weight may be packed, and unusable afterwards."""
    if isinstance(weight, GroupedWeight):
        return GroupedProduct(weight, bias)
    if can_prepack(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        return PrepackedProduct(packed, bias)
    return PlainProduct(weight, bias)


class Linear(OutputHead):
    """A product by torch, with W laid out once and never changed."""

    def __init__(
        self,
        weight: Tensor | GroupedWeight,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> None:
        """dtype: the dtype of the rows that are multiplied."""
        self.dtype = dtype
        self.columns = weight.shape[1]
        self.multiply = make_product(weight, bias)
        self.weight = self.multiply.weight
        self.bias = bias

    def multiply_in_tiles(self, x: Tensor, tile: int) -> Tensor:
        """Return [T, N] of x [T, K], at most `tile` rows a call; see `apply_in_tiles`."""
        return apply_in_tiles(self.multiply, x, tile)

    def rounding_error(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return the rounding error of y [T, N], the product of x [T, K], as exactly as y's dtype
        allows.

        Return None where nothing is rounded, or where the error is not known.
        """
        if self.dtype == torch.float32:
            return None
        return self.multiply.rounding_error(x, y)

    def make_example_rows(self, count: int) -> Tensor:
        """Return random rows [count, K], always the same, in the dtype that is multiplied."""
        x = torch.randn(count, self.columns, generator=seeded_generator())
        return x.to(self.weight.device, self.dtype)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V] of hidden [T, hidden]."""
        return self.multiply_in_tiles(hidden, tile).float()


class TorchProjection:
    """A `Projection` whose steps are rounded one by one."""

    def __init__(
        self, product: Linear, norm: RowNorm | FoldedNorm | None, act: Activation | None
    ) -> None:
        self.product = product
        self.steps_before: tuple[RowStep, ...] = () if norm is None else (norm,)
        self.steps_after = activation_steps(act)

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Tensor:
        """Return [T, N] of the stream [T, K], or [T, N / 2] after gates."""
        x = stream.x
        for step in self.steps_before:
            x = step(x)
        y = self.product.multiply_in_tiles(x, batch.tile)
        for step in self.steps_after:
            y = step(y)
        return y


class TorchResidualProjection:
    """A `ResidualProjection` whose steps are rounded one by one."""

    def __init__(self, product: Linear, post_norm: RowNorm | None) -> None:
        self.product = product
        self.steps_after: tuple[RowStep, ...] = () if post_norm is None else (post_norm,)

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the product of x [T, K]."""
        y = self.product.multiply_in_tiles(x, batch.tile)
        for step in self.steps_after:
            y = step(y)
        return Residual(stream.x + y)
