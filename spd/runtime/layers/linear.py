"""Linear layers on prebound weights, in the two forms that the layers can be built with.

`Linear` is torch's: prepacked for oneDNN on CPU; the number of rows never chooses the arithmetic freely,
since rows come in buckets that were seen to give the same bits (see `spd.runtime.row_buckets`).
`SkinnyLinear` is Triton's: its arithmetic does not depend on the number of rows by construction, except
in the prompt-chunk program, which has one size.

Either takes weights of eight bits. Triton's products multiply them as they are, torch's where it has such a
product (`multiplies_int8`); elsewhere torch's form keeps their values in the run's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.eight_bits import int8_linear, multiplies_int8
from spd.kernels.rms_norm import rms_norm
from spd.kernels.silu_mul import gelu_mul, silu_mul
from spd.kernels.skinny_config import config_for, workspace_sizes
from spd.kernels.skinny_linear import AnyWeight, LinearWorkspace, ScaledWeight, capability_of
from spd.runtime.models.base import ForwardBatch, Residual

PACK_ROWS = 16
"""Rows that oneDNN is told to expect when it lays out a weight."""


class AnyLinear(Protocol):
    """y = x Wᵀ + b with what stands before and after it in a layer, W [N, K]."""

    def after_norm(self, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch) -> Tensor:
        """RMS-norm the stream [T, K] with scales norm [K], then multiply: [T, N]."""
        ...

    def gated(
        self, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch, *, gelu: bool = False
    ) -> Tensor:
        """`after_norm`, then silu (or gelu) of the first half of N times the second: [T, N / 2]."""
        ...

    def product(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """The product of x [T, K] alone: [T, N]."""
        ...

    def onto(self, x: Tensor, stream: Residual, batch: ForwardBatch) -> Residual:
        """The stream [T, N] plus the product of x [T, K]."""
        ...

    def normed_onto(
        self, x: Tensor, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch
    ) -> Residual:
        """The stream [T, N] plus the RMS norm, by scales norm [N], of the product of x [T, K]."""
        ...


class AnyHead(Protocol):
    """The product that makes logits of hidden states, and perhaps draws from them itself."""

    carries_squares: bool
    """Whether this form's products want a row's sum of squares beside the residual stream."""

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """See `CausalModel`."""
        ...

    def sample(
        self, hidden: Tensor, usable_vocab: int, seed: Tensor, first: Tensor, step: int, temperature: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """See `CausalModel`."""
        ...


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN holds this weight in its own layout: on CPU, bfloat16 or float32."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def in_tiles(apply: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> Tensor:
    """apply x [T, ...] at most `tile` rows at a time; a last partial tile is a bucket's size."""
    if x.shape[0] <= tile:
        return apply(x)
    return torch.cat([apply(x[i : i + tile]) for i in range(0, x.shape[0], tile)])


def unscaled_norm(x: Tensor, epsilon: float) -> Tensor:
    """The root-mean-square norm of x [T, K] whose scales are folded into the matrix behind it."""
    return F.rms_norm(x, (x.shape[-1],), None, epsilon)


class Linear:
    """Torch's form, with W packed once and never changed."""

    carries_squares = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, folded: bool = False) -> None:
        """folded: whether the scales of a norm before the product are in the weight already."""
        self.bias, self.folded = bias, folded
        self.packed = can_prepack(weight)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self.weight = weight

    def __call__(self, x: Tensor, tile: int) -> Tensor:
        """x [T, K] to [T, N], at most `tile` rows a call; see `in_tiles`."""
        return in_tiles(self._apply, x, tile)

    def _apply(self, x: Tensor) -> Tensor:
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self.weight, self.bias)

    def lost(self, x: Tensor, y: Tensor) -> Tensor | None:
        """What rounding takes from the product of x [T, K] on its way to y [T, N], as exact as y is.

        None where nothing is rounded, or no product says so.
        """
        if not self.packed or self.weight.dtype == torch.float32:
            return None
        rest: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, -y, self.weight, self.bias, "add")
        return rest

    def after_norm(self, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch) -> Tensor:
        """See `AnyLinear`."""
        x = unscaled_norm(stream.x, epsilon) if self.folded else rms_norm(stream.x, norm, epsilon)
        return self(x, batch.tile)

    def gated(
        self, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch, *, gelu: bool = False
    ) -> Tensor:
        """See `AnyLinear`."""
        return (gelu_mul if gelu else silu_mul)(self.after_norm(stream, norm, epsilon, batch))

    def product(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See `AnyLinear`."""
        return self(x, batch.tile)

    def onto(self, x: Tensor, stream: Residual, batch: ForwardBatch) -> Residual:
        """See `AnyLinear`."""
        return Residual(stream.x + self(x, batch.tile))

    def normed_onto(
        self, x: Tensor, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch
    ) -> Residual:
        """See `AnyLinear`."""
        return Residual(stream.x + rms_norm(self(x, batch.tile), norm, epsilon))

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """See `CausalModel`."""
        return self(hidden, tile).float()

    def sample(
        self, hidden: Tensor, usable_vocab: int, seed: Tensor, first: Tensor, step: int, temperature: Tensor
    ) -> None:
        """This form does not draw."""


class Int8Linear(Linear):
    """Torch's form by int8 rows, which the CPU reads as they are."""

    def __init__(self, weight: ScaledWeight, bias: Tensor | None = None, *, folded: bool = False) -> None:
        super().__init__(weight.values, bias, folded=folded)
        self.rows = weight

    def _apply(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.rows, self.bias)

    def lost(self, x: Tensor, y: Tensor) -> None:
        """This product does not say."""


def torch_linear(
    weight: AnyWeight, bias: Tensor | None, dtype: torch.dtype, *, folded: bool = False
) -> Linear:
    """Torch's form for values of a dtype: int8 rows stay where they can be multiplied, else are widened."""
    if not isinstance(weight, ScaledWeight):
        return Linear(weight, bias, folded=folded)
    if multiplies_int8(weight.device, dtype, weight.shape[-1]):
        return Int8Linear(weight, bias, folded=folded)
    return Linear(weight.plain(dtype), bias, folded=folded)


class SkinnyLinear:
    """Triton's form. A norm before it is folded into W at load: only its row scale is applied here."""

    carries_squares = True

    def __init__(self, weight: AnyWeight, bias: Tensor | None, kernels: Kernels) -> None:
        self.weight = weight if isinstance(weight, ScaledWeight) else weight.contiguous()
        self.bias, self.kernels = bias, kernels
        self.ids: Tensor | None = None
        """Of a head of some ids the token that each row stands for, int64 and ascending."""
        self.workspace: LinearWorkspace | None = None
        """Shared by all of a model's products, since they run in turn."""

    def after_norm(self, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch) -> Tensor:
        """See `AnyLinear`."""
        if batch.chunk_start is not None:
            return self._many(unscaled_norm(stream.x, epsilon))
        y: Tensor = self.kernels.norm_linear(
            stream.x, stream.squares, epsilon, self.weight, self.bias, self.workspace
        )
        return y

    def gated(
        self, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch, *, gelu: bool = False
    ) -> Tensor:
        """See `AnyLinear`."""
        if batch.chunk_start is not None:
            return (gelu_mul if gelu else silu_mul)(self.after_norm(stream, norm, epsilon, batch))
        y: Tensor = self.kernels.norm_gate_up(
            stream.x, stream.squares, epsilon, self.weight, self.bias, self.workspace, gelu
        )
        return y

    def product(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See `AnyLinear`."""
        if batch.chunk_start is not None:
            return self._many(x)
        y: Tensor = self.kernels.linear(x, self.weight, self.bias, self.workspace)
        return y

    def onto(self, x: Tensor, stream: Residual, batch: ForwardBatch) -> Residual:
        """See `AnyLinear`."""
        if batch.chunk_start is not None:
            return Residual(stream.x + self._many(x))
        return Residual(*self.kernels.linear_residual(x, self.weight, self.bias, stream.x, self.workspace))

    def normed_onto(
        self, x: Tensor, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch
    ) -> Residual:
        """See `AnyLinear`."""
        if batch.chunk_start is not None:
            return Residual(stream.x + rms_norm(self._many(x), norm, epsilon))
        y = self.kernels.linear(x, self.weight, self.bias, self.workspace)
        return Residual(*self.kernels.norm_residual(y, norm, epsilon, stream.x))

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """See `CausalModel`."""
        scores: Tensor = self.kernels.head_logits(hidden, self.weight)
        return scores

    def sample(
        self, hidden: Tensor, usable_vocab: int, seed: Tensor, first: Tensor, step: int, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `CausalModel`."""
        drawn: tuple[Tensor, Tensor] = self.kernels.head_sample(
            hidden, self.weight, usable_vocab, seed, first, step, temperature, self.ids
        )
        return drawn

    def _many(self, x: Tensor) -> Tensor:
        """The product of a prompt chunk's x [T, K]: [T, N]. Eight bits are multiplied as in a window."""
        if isinstance(self.weight, ScaledWeight):
            y: Tensor = self.kernels.linear(x.contiguous(), self.weight, self.bias)  # workspaces are windows'
            return y
        return F.linear(x, self.weight, self.bias)


def value_bytes(weight: AnyWeight) -> int:
    """Bytes of each of a weight's values."""
    return (weight.values if isinstance(weight, ScaledWeight) else weight).element_size()


def share_workspace(products: Iterable[SkinnyLinear], rows: int) -> None:
    """Give products that run in turn one workspace, for up to `rows` rows."""
    products = list(products)
    sizes = [
        workspace_sizes(n, rows, config_for(n, k, value_bytes(p.weight), capability_of(p.weight.device)))
        for p in products
        for n, k in [p.weight.shape]
    ]
    partials, counters = (max(column) for column in zip(*sizes, strict=True))
    device = products[0].weight.device
    workspace = LinearWorkspace(
        torch.zeros(partials, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
    for product in products:
        product.workspace = workspace
