"""Linear layers on prebound weights, in the forms that the layers can be built with: one call for all.

`Linear` is torch's: prepacked for oneDNN on CPU; the number of rows never chooses the arithmetic freely,
since rows come in buckets that were seen to give the same bits (see `spd.runtime.round.arithmetic_probe`).
`SkinnyLinear` is Triton's: its arithmetic does not depend on the number of rows by construction, except
in the prompt-chunk program, which has one size.
`NativeLinear` is C's: norms before and sums after are a part of the product.

Of some layers every rank holds a part: sums after a block, the vocabulary at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.interface import Kernels
from spd.kernels.launch import device_facts
from spd.kernels.linear.activation import Activation
from spd.kernels.linear.few_bits import GroupedWeight, grouped_linear
from spd.kernels.linear.norm_gate import activate, rms_norm
from spd.kernels.linear.skinny_config import config_for, workspace_sizes
from spd.kernels.linear.skinny_linear import AnyWeight, Draw, LinearWorkspace, Norm, step_of
from spd.kernels.native.library import FLOAT32, ROUNDED, ending_of
from spd.kernels.native.packed import PackedProducts
from spd.runtime.layers.base import Communicator, ForwardBatch, Residual

PACK_ROWS = 16  # rows that oneDNN is told to expect when it lays out a weight


@dataclass(frozen=True)
class Around:
    """What stands before and after a product in its layer."""

    epsilon: float = 0.0  # of both norms
    norm: Tensor | None = None  # scales [K] of an RMS norm of the rows before the product
    folded: bool = False  # whether these scales are in the weight already
    act: Activation | None = None  # what becomes of the product
    post_norm: Tensor | None = None  # scales [N] of an RMS norm of what is added to a stream

    def ended(self, y: Tensor, onto: Residual | None) -> Residual:
        """What becomes of a product y [T, N] by torch's operations, each rounded by itself."""
        if self.act is not None:
            y = activate(y, self.act)
        if onto is None:
            return Residual(y)
        if self.post_norm is not None:
            y = rms_norm(y, self.post_norm, self.epsilon)
        return Residual(onto.x + y)


ALONE = Around()


class AnyLinear(Protocol):
    """y = x Wᵀ + b with what stands before and after it in its layer, W [N, K]."""

    def __call__(
        self, stream: Residual, batch: ForwardBatch, onto: Residual | None = None
    ) -> Residual:
        """Of rows [T, K]: [T, N], or half of N behind a gate. With `onto` [T, N] that stream plus it."""
        ...


class AnyHead(Protocol):
    """The product that makes logits of hidden states."""

    carries_squares: bool = False
    """Whether this form's products want a row's sum of squares beside the residual stream."""

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V] of hidden [T, hidden]."""
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


def normed(stream: Residual, weight: Tensor, epsilon: float, kernels: Kernels) -> Tensor:
    """Return the RMS norm of the stream [T, hidden] with scales weight [hidden]."""
    return kernels.rms_norm_rows(stream.x, stream.squares, weight, epsilon)


class Linear(AnyHead):
    """Torch's form, with W packed once and never changed; codes are multiplied out at each call."""

    def __init__(
        self,
        weight: Tensor | GroupedWeight,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        around: Around = ALONE,
    ) -> None:
        """dtype: of the rows that it is given."""
        self.bias, self.around, self.dtype, self.columns = bias, around, dtype, weight.shape[1]
        self.packed = isinstance(weight, Tensor) and can_prepack(weight)
        if isinstance(weight, Tensor) and self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self.weight: Tensor | GroupedWeight = weight

    def __call__(
        self, stream: Residual, batch: ForwardBatch, onto: Residual | None = None
    ) -> Residual:
        x, around = stream.x, self.around
        if around.folded:
            x = unscaled_norm(x, around.epsilon)
        elif around.norm is not None:
            x = rms_norm(x, around.norm, around.epsilon)
        return around.ended(self.product(x, batch.tile), onto)

    def product(self, x: Tensor, tile: int) -> Tensor:
        """x [T, K] to [T, N], at most `tile` rows a call; see `in_tiles`."""
        return in_tiles(self._apply, x, tile)

    def _apply(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, GroupedWeight):
            return grouped_linear(x, self.weight, self.bias)
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.default(
                x, self.weight, self.bias, "none", [], ""
            )
            return y
        return F.linear(x, self.weight, self.bias)

    def lost(self, x: Tensor, y: Tensor) -> Tensor | None:
        """What rounding takes from the product of x [T, K] on its way to y [T, N], as exact as y is.

        None where nothing is rounded, or no product says so.
        """
        if self.dtype == torch.float32:
            return None
        if isinstance(self.weight, GroupedWeight):
            bias = None if self.bias is None else self.bias.float()
            return grouped_linear(x.float(), self.weight, bias) - y.float()
        if not self.packed:
            return None
        rest: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, -y, self.weight, self.bias, "add"
        )
        return rest

    def example(self, count: int) -> Tensor:
        """Random rows [count, K], always the same, such as it is given."""
        x = torch.randn(count, self.columns, generator=torch.Generator().manual_seed(0))
        return x.to(self.weight.device, self.dtype)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        return self.product(hidden, tile).float()


class SkinnyLinear(AnyHead):
    """Triton's form. A norm before it is folded into W at load: only its row scale is applied here."""

    carries_squares = True

    def __init__(
        self, weight: AnyWeight, bias: Tensor | None, kernels: Kernels, around: Around = ALONE
    ) -> None:
        self.weight = weight.contiguous() if isinstance(weight, Tensor) else weight
        self.bias, self.kernels, self.around = bias, kernels, around
        self.ids: Tensor | None = None
        """Of a head of some ids the token that each row stands for, int64 and ascending."""
        self.workspace: LinearWorkspace | None = None
        """Shared by all of a model's products, since they run in turn."""

    def __call__(
        self, stream: Residual, batch: ForwardBatch, onto: Residual | None = None
    ) -> Residual:
        x, around, kernels = stream.x, self.around, self.kernels
        if batch.chunk_start is not None:
            if around.norm is not None:
                x = unscaled_norm(x, around.epsilon)
            if isinstance(self.weight, Tensor):
                return around.ended(F.linear(x, self.weight, self.bias), onto)
            return around.ended(
                kernels.linear(x.contiguous(), self.weight, self.bias, chunk=True)[0], onto
            )
        given = (x, self.weight, self.bias, self.workspace)
        norm = None
        if around.norm is not None:
            assert stream.squares is not None
            norm = Norm(stream.squares, around.epsilon)
            if around.act is not None and around.act.gated:
                return Residual(kernels.norm_gate_up(*given, norm, around.act))
        if onto is not None and around.post_norm is None:
            return Residual(*kernels.linear(*given, norm, onto.x))
        y, _ = kernels.linear(*given, norm)
        if onto is None:
            return around.ended(y, onto)
        assert around.post_norm is not None
        return Residual(*kernels.norm_residual(y, around.post_norm, around.epsilon, onto.x))

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        return self.kernels.head_logits(hidden, self.weight)

    def sample(self, hidden: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Tokens [T] of hidden [T, hidden] and whether each is finite: the product fused with the draw."""
        return self.kernels.head_sample(hidden, self.weight, draw, self.ids)


class NativeLinear(AnyHead):
    """C's form, by packed weights. A row's bits do not depend on the number of rows."""

    def __init__(
        self,
        weight: Tensor | GroupedWeight,
        bias: Tensor | None,
        kernels: PackedProducts,
        around: Around = ALONE,
    ) -> None:
        act, norm, post_norm = around.act, around.norm, around.post_norm
        self.weight = kernels.pack(weight, gated=act is not None and act.gated)
        self.kernels = kernels
        self.ending = ROUNDED if act is None else ending_of(act)
        self.bias, self.norm, self.post_norm = (
            None if vector is None else vector.float().contiguous()
            for vector in (bias, norm, post_norm)
        )
        self.epsilon = around.epsilon

    def __call__(
        self, stream: Residual, batch: ForwardBatch, onto: Residual | None = None
    ) -> Residual:
        residual = None if onto is None or self.post_norm is not None else onto.x
        y = self.kernels.packed_linear(
            stream.x,
            self.weight,
            self.bias,
            self.ending,
            norm=self.norm,
            epsilon=self.epsilon,
            residual=residual,
        )
        if onto is None or self.post_norm is None:
            return Residual(y)
        return Residual(self.kernels.norm(y, self.post_norm, self.epsilon, onto.x))

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        return self.kernels.packed_linear(hidden, self.weight, self.bias, FLOAT32)


def share_workspace(products: Sequence[SkinnyLinear], rows: int) -> None:
    """Give products that run in turn one workspace, for up to `rows` rows."""
    sizes = []
    for weight in (product.weight for product in products):
        (n, k), itemsize = weight.shape, weight.element_size() if isinstance(weight, Tensor) else 1
        config = config_for(n, k, itemsize, device_facts(weight.device), step_of(weight))
        sizes.append(workspace_sizes(n, rows, config))
    partials, counters = (max(column) for column in zip(*sizes, strict=True))
    device = products[0].weight.device
    workspace = LinearWorkspace(
        torch.zeros(partials, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )
    for product in products:
        product.workspace = workspace


def squared(x: Tensor, kernels: Kernels, scale: float | None = None) -> Residual:
    """Rows x [T, N], times scale, as a stream that carries its squares."""
    return Residual(*kernels.embed(torch.arange(x.shape[0], device=x.device), x, scale))


def added(stream: Residual, y: Tensor, kernels: Kernels) -> Residual:
    """The stream [T, N] plus y [T, N], rounded alone before, with squares where it has them."""
    x = stream.x + y
    return Residual(x) if stream.squares is None else squared(x, kernels)


class SummedLinear:
    """A product whose columns [N, K / ranks] are a rank's own: see `AnyLinear`. The bias is added once."""

    def __init__(
        self,
        inner: AnyLinear,
        bias: Tensor | None,
        around: Around,
        ranks: Communicator,
        kernels: Kernels,
    ) -> None:
        """around: of the whole; none of it stands before the product."""
        self.inner, self.bias, self.around, self.ranks, self.kernels = (
            inner,
            bias,
            around,
            ranks,
            kernels,
        )

    def __call__(
        self, stream: Residual, batch: ForwardBatch, onto: Residual | None = None
    ) -> Residual:
        y, around = self.ranks.sum(self.inner(stream, batch).x), self.around
        y = y if self.bias is None else y + self.bias
        if onto is None or onto.squares is None:
            return around.ended(y, onto)
        if around.post_norm is None:
            return added(onto, y, self.kernels)
        return Residual(*self.kernels.norm_residual(y, around.post_norm, around.epsilon, onto.x))


class ShardedEmbedding:
    """The rows of a table [V, H] that begin with a rank's first id; others come from other ranks."""

    def __init__(self, weight: Tensor, first: int, vocab_size: int, ranks: Communicator) -> None:
        self.weight, self.first, self.ranks = weight, first, ranks
        self.shape = torch.Size((vocab_size, weight.shape[1]))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [T, H] of ids int64 [T]: zeros but on one rank, so that their sum is exact."""
        own = ids - self.first
        here = (own >= 0) & (own < self.weight.shape[0])
        found = self.weight[torch.where(here, own, 0)]
        return self.ranks.sum(torch.where(here.unsqueeze(-1), found, torch.zeros_like(found)))


AnyEmbedding = Tensor | ShardedEmbedding


class ShardedHead(AnyHead):
    """Logits of a rank's own ids, of `vocab_size` in all, gathered."""

    def __init__(self, inner: AnyHead, vocab_size: int, ranks: Communicator) -> None:
        self.inner, self.vocab_size, self.ranks = inner, vocab_size, ranks
        self.carries_squares = inner.carries_squares
        self.width = -(-vocab_size // ranks.size)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        own = self.inner.logits(hidden, tile)
        every = self.ranks.gather(F.pad(own, (0, self.width - own.shape[-1])))
        return every.transpose(0, 1).flatten(1)[:, : self.vocab_size]
