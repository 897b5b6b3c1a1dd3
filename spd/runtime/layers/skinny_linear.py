"""Linear layers by Triton, for the few rows of verification windows.

The arithmetic does not depend on the number of rows by construction. Whole chunks of a prompt have
one size and other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.interface import Kernels
from spd.kernels.launch import device_properties
from spd.kernels.linear.activation import Activation
from spd.kernels.linear.skinny_config import config_for, workspace_sizes
from spd.kernels.linear.skinny_linear import (
    AnyWeight,
    Draw,
    LinearWorkspace,
    Norm,
    pieces_of,
    step_of,
)
from spd.kernels.linear.tiled_weight import TiledWeight
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.layers.linear import FoldedNorm, OutputHead, RowNorm, RowStep, activation_steps


def _multiply_chunk(x: Tensor, kernels: Kernels, weight: AnyWeight, bias: Tensor | None) -> Tensor:
    """Return x [T, K] Wᵀ + bias for a whole chunk of a prompt, by a weight in codes."""
    return kernels.linear(x.contiguous(), weight, bias, chunk=True)[0]


class SkinnyLinear(OutputHead):
    """A product by Triton kernels.

    The scales of a norm before it are folded into W at load: only row scales are applied here.
    """

    carries_square_sums = True

    def __init__(self, weight: AnyWeight, bias: Tensor | None, kernels: Kernels) -> None:
        self.weight = weight.contiguous() if isinstance(weight, Tensor) else weight
        self.bias = bias
        self.kernels = kernels
        self.ids: Tensor | None = None
        """The token of each row of a head over some ids, int64 and ascending.

        None where rows are ids.
        """
        self.workspace: LinearWorkspace | None = None
        """The workspace that all products of a model share, since they run in turn."""
        self.chunk: RowStep = partial(
            _multiply_chunk, kernels=kernels, weight=self.weight, bias=bias
        )
        """The product of a whole chunk of a prompt."""
        if isinstance(self.weight, Tensor):
            self.chunk = partial(F.linear, weight=self.weight, bias=bias)

    def window(
        self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the product [T, N] of rows x [T, K] of windows, plus `residual`, and its sums of
        squares; see `Kernels.linear`.
        """
        return self.kernels.linear(
            x, self.weight, self.bias, self.workspace, norm=norm, residual=residual
        )

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V] of hidden [T, hidden]."""
        return self.kernels.head_logits(hidden, self.weight)

    def sample_tokens(self, hidden: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return sampled tokens [T] of hidden [T, hidden], and which are finite: product and draw
        are fused.
        """
        return self.kernels.head_sample(hidden, self.weight, draw, self.ids)


class TiledEmbedding:
    """An embedding whose table [V, H] is in GGUF's blocks, shared with the head where they are
    tied.
    """

    def __init__(self, product: SkinnyLinear, dtype: torch.dtype) -> None:
        assert isinstance(product.weight, TiledWeight)
        self.table = product.weight
        self.kernels = product.kernels
        self.dtype = dtype
        self.shape = self.table.shape

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [T, H] of ids int64 [T]."""
        return self.kernels.code_rows(ids, self.table, self.dtype)


class WindowProduct(Protocol):
    """A projection of a window's few rows, with the norm and the gates that are fused into it."""

    def __call__(self, stream: Residual) -> Tensor:
        """Return [T, N] of the stream [T, K]."""
        ...


@dataclass(frozen=True, eq=False)
class PlainWindow:
    """The product of the stream itself."""

    product: SkinnyLinear

    def __call__(self, stream: Residual) -> Tensor:
        """Return [T, N] of the stream [T, K]."""
        return self.product.window(stream.x)[0]


@dataclass(frozen=True, eq=False)
class NormedWindow:
    """The product of the norm of the stream, by its squares."""

    product: SkinnyLinear
    epsilon: float

    def __call__(self, stream: Residual) -> Tensor:
        """Return [T, N] of the stream [T, K]."""
        return self.product.window(stream.x, self.norm(stream))[0]

    def norm(self, stream: Residual) -> Norm:
        """Return the inputs of the norm that a product's kernel applies."""
        assert stream.square_sums is not None
        return Norm(stream.square_sums, self.epsilon)


@dataclass(frozen=True, eq=False)
class GatedWindow(NormedWindow):
    """A `NormedWindow` whose kernel applies gates too."""

    act: Activation

    def __call__(self, stream: Residual) -> Tensor:
        """Return gated rows [T, N / 2] of the stream [T, K]."""
        product = self.product
        return product.kernels.norm_gate_up(
            stream.x,
            product.weight,
            product.bias,
            product.workspace,
            norm=self.norm(stream),
            act=self.act,
        )


class SkinnyProjection:
    """A `Projection` with different steps in windows and in whole chunks of a prompt."""

    def __init__(
        self, product: SkinnyLinear, norm: FoldedNorm | None, act: Activation | None
    ) -> None:
        self.product = product
        self.steps_before_chunk: tuple[RowStep, ...] = () if norm is None else (norm,)
        self.steps_after_chunk = activation_steps(act)
        self.steps_after_window = self.steps_after_chunk
        self.window: WindowProduct = PlainWindow(product)
        if norm is not None:
            self.window = NormedWindow(product, norm.epsilon)
        if norm is not None and act is not None and act.gated:
            self.window = GatedWindow(product, norm.epsilon, act)
            self.steps_after_window = ()

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Tensor:
        """Return [T, N] of the stream [T, K], or [T, N / 2] after gates."""
        if batch.chunk_start is not None:
            return self._project_chunk(stream.x)
        y = self.window(stream)
        for step in self.steps_after_window:
            y = step(y)
        return y

    def _project_chunk(self, x: Tensor) -> Tensor:
        """Return [T, N] of the rows [T, K] of a whole chunk of a prompt."""
        for step in self.steps_before_chunk:
            x = step(x)
        y = self.product.chunk(x)
        for step in self.steps_after_chunk:
            y = step(y)
        return y


@dataclass(frozen=True, eq=False)
class SkinnyResidualProjection:
    """A `ResidualProjection` whose kernel adds the stream in windows."""

    product: SkinnyLinear

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the product of x [T, K]."""
        if batch.chunk_start is not None:
            return Residual(stream.x + self.product.chunk(x))
        total, square_sums = self.product.window(x, residual=stream.x)
        return Residual(total, square_sums)


@dataclass(frozen=True, eq=False)
class SkinnyNormedProjection:
    """A `ResidualProjection` with a norm of the product, which another kernel adds to the stream."""

    product: SkinnyLinear
    post_norm: RowNorm

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the norm of the product of x [T, K]."""
        norm = self.post_norm
        if batch.chunk_start is not None:
            return Residual(stream.x + norm(self.product.chunk(x)))
        y = self.product.window(x)[0]
        kernels = self.product.kernels
        total, square_sums = kernels.norm_residual(y, norm.scales, norm.epsilon, stream.x)
        return Residual(total, square_sums)


def share_workspace(products: Sequence[SkinnyLinear], rows: int) -> None:
    """Allocate one workspace for up to `rows` rows, and set it as that of products that run in
    turn.
    """
    partials = 0
    counters = 0
    for weight in (piece for product in products for piece in pieces_of(product.weight)):
        n, k = weight.shape
        itemsize = weight.element_size() if isinstance(weight, Tensor) else 1
        config = config_for(
            n=n,
            k=k,
            itemsize=itemsize,
            device=device_properties(weight.device),
            step=step_of(weight),
        )
        sizes = workspace_sizes(n, rows, config)
        partials = max(partials, sizes[0])
        counters = max(counters, sizes[1])
    device = products[0].weight.device
    workspace = LinearWorkspace(
        torch.zeros(partials, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
    for product in products:
        product.workspace = workspace
