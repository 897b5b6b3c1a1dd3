"""Convolutions over the rows of a block drafter's block; see `ConvolutionLayout`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from spd.kernels.linear.norm_gate import rms_norm
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.models.allocator import BlockTensors
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.layouts import ConvolutionLayout


class BlockConvolution:
    """The norm before a layer's block, and the convolutions before and behind it.

    Both take their rows' own factors from the normed rows. Rows that are not a block's, such as
    those that only try the arithmetic, are not convolved.
    """

    def __init__(
        self, layout: ConvolutionLayout, tensors: BlockTensors, build: LayerBuilder
    ) -> None:
        """tensors: the layer's block's, from which its norm is removed."""
        self.layout = layout
        self.epsilon = build.epsilon
        self.norm = tensors.pop("norm")
        self.base = tensors["conv_base"]
        self.projection = build.unnormed_projection(tensors, "conv")

    def convolve_input(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return the normed and convolved rows x [T, hidden], and their factors for `convolve_result`."""
        layout = self.layout
        x = rms_norm(x, self.norm, self.epsilon)
        own = self.projection(Residual(x), batch)
        before, behind = own.view(len(x), 2, layout.kernel, -1).unbind(1)
        return self._convolve(x, before, self.base[0], batch), behind

    def convolve_result(self, x: Tensor, factors: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the convolved rows x [T, hidden] of the block's result."""
        return self._convolve(x, factors, self.base[1], batch)

    def _convolve(self, x: Tensor, factors: Tensor, base: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the sums of rows x [T, hidden] and those before them in their block.

        factors: the rows' own, [T, kernel, groups]; base: those of all rows, [kernel, hidden].
        """
        if not batch.is_block:
            return x
        count = batch.num_slots * batch.width
        group = self.layout.group
        rows = x[:count].view(batch.num_slots, batch.width, -1, group)
        own = factors[:count].view(batch.num_slots, batch.width, self.layout.kernel, -1, 1)
        total = rows * (base[0].view(-1, group) + own[:, :, 0])
        for offset in range(1, self.layout.kernel):
            earlier = F.pad(rows[:, :-offset], (0, 0, 0, 0, offset, 0))
            total = total + earlier * (base[offset].view(-1, group) + own[:, :, offset])
        padded: Tensor = F.pad(total.view(count, -1), (0, 0, 0, len(x) - count))
        return padded
