"""Linear layers in the native form: weights packed for C kernels, norms before and sums after in one call."""

from __future__ import annotations

from torch import Tensor

from spd.kernels.native.library import NativeLibrary
from spd.kernels.native.products import Ending
from spd.runtime.models.base import ForwardBatch, Residual


class NativeLinear:
    """See `AnyLinear` and `AnyHead`. A row's bits do not depend on the number of rows."""

    carries_squares = False

    def __init__(
        self, weight: Tensor, bias: Tensor | None, library: NativeLibrary, *, gated: bool = False
    ) -> None:
        """weight [N, K]; gated: it is only asked for `gated`."""
        self.weight, self.library = library.pack(weight, gated=gated), library
        self.bias = None if bias is None else bias.float().contiguous()
        self._scales: tuple[Tensor, Tensor] | None = None

    def _float(self, norm: Tensor) -> Tensor:
        """The scales in float32, kept for the next time."""
        if self._scales is None or self._scales[0] is not norm:
            self._scales = norm, norm.float().contiguous()
        return self._scales[1]

    def after_norm(self, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch) -> Tensor:
        """See `AnyLinear`."""
        return self.library.linear(stream.x, self.weight, self.bias, norm=self._float(norm), epsilon=epsilon)

    def gated(
        self, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch, *, gelu: bool = False
    ) -> Tensor:
        """See `AnyLinear`."""
        ending, scales = Ending.GELU if gelu else Ending.SILU, self._float(norm)
        return self.library.linear(stream.x, self.weight, self.bias, ending, norm=scales, epsilon=epsilon)

    def product(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See `AnyLinear`."""
        return self.library.linear(x, self.weight, self.bias)

    def onto(self, x: Tensor, stream: Residual, batch: ForwardBatch) -> Residual:
        """See `AnyLinear`."""
        return Residual(self.library.linear(x, self.weight, self.bias, residual=stream.x))

    def normed_onto(
        self, x: Tensor, stream: Residual, norm: Tensor, epsilon: float, batch: ForwardBatch
    ) -> Residual:
        """See `AnyLinear`."""
        return Residual(self.library.norm(self.product(x, batch), self._float(norm), epsilon, stream.x))

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """See `CausalModel`."""
        return self.library.linear(hidden, self.weight, self.bias, Ending.FLOAT32)

    def sample(
        self, hidden: Tensor, usable_vocab: int, seed: Tensor, first: Tensor, step: int, temperature: Tensor
    ) -> None:
        """This form does not draw."""
