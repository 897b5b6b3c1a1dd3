"""The layers of a decoder: two blocks each, and the classes that run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spd.kernels.interface import Kernels
from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual
from spd.runtime.layers.linear import with_square_sums
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models import layouts
from spd.runtime.models.allocator import LayerTensors
from spd.runtime.models.attention import Attention, LatentAttention
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.block_convolution import BlockConvolution
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.gated_delta import GatedDelta, ShortConv
from spd.runtime.models.gemma4_mlp import Gemma4Mlp
from spd.runtime.models.mlp import GatedMlp
from spd.runtime.models.moe import MoeMlp
from spd.runtime.models.recurrent_layouts import ConvLayout, DeltaLayout, ScanLayout

AttentionBlock = Attention | LatentAttention | GatedDelta | ShortConv | Callable[..., Residual]
"""A layer's first block: it writes the rows' cache entries and reads pages, or a state and rings.
"""
MlpBlock = GatedMlp | MoeMlp | Gemma4Mlp | Callable[..., Residual]
"""A layer's second block, applied to each row independently."""


@dataclass(frozen=True)
class DecoderLayer:
    """A layer's two blocks, each with its norm before and its sum after."""

    attention: AttentionBlock
    mlp: MlpBlock
    layout: layouts.MixerLayout
    """The layout of the first block, which has the shapes of cache entries."""

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """Return the stream [T, hidden] with both blocks added.

        The rows' cache entries are written.
        """
        return self.mlp(self.attention(stream, rotary, batch, cache), batch)


@dataclass(frozen=True)
class ParallelLayer(DecoderLayer):
    """A layer whose two blocks both read the stream that enters it."""

    mlp: GatedMlp

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """Return the stream [T, hidden] plus both blocks of it; neither reads the other's sum.

        The rows' cache entries are written.
        """
        return self.mlp(stream, batch, self.attention(stream, rotary, batch, cache))


@dataclass(frozen=True)
class ConvolvedLayer(DecoderLayer):
    """A layer of a block drafter with convolutions over the rows of a block, before and behind both
    of its blocks, which read rows that are normed already.
    """

    attention: Attention
    mlp: GatedMlp
    convolutions: tuple[BlockConvolution, BlockConvolution]
    """Those around attention and around the MLP."""
    kernels: Kernels

    @classmethod
    def build(
        cls, layout: layouts.LayerLayout, tensors: LayerTensors, build: LayerBuilder
    ) -> ConvolvedLayer:
        """Return the layer of allocated tensors, as `build_layer` does."""
        shape = layout.convolutions
        assert shape is not None
        assert isinstance(layout.attention, GqaLayout)
        assert isinstance(layout.mlp, layouts.MlpLayout)
        first, second = (BlockConvolution(shape, block, build) for block in tensors)
        return cls(
            attention=Attention(layout.attention, tensors[0], build),
            mlp=GatedMlp(layout.mlp, tensors[1], build),
            layout=layout.attention,
            convolutions=(first, second),
            kernels=build.kernels,
        )

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """Return the stream [T, hidden] with both blocks added; the rows' entries are written."""
        around_attention, around_mlp = self.convolutions
        zeros = Residual(torch.zeros_like(stream.x))
        x, factors = around_attention.convolve_input(stream.x, batch)
        mixed = self.attention(Residual(x), rotary, batch, cache, zeros)
        total = stream.x + around_attention.convolve_result(mixed.x, factors, batch)
        x, factors = around_mlp.convolve_input(total, batch)
        mixed = self.mlp(Residual(x), batch, Residual(torch.zeros_like(x)))
        total = total + around_mlp.convolve_result(mixed.x, factors, batch)
        if self.kernels.capabilities.folds_norms and batch.chunk_start is None:
            return with_square_sums(total, self.kernels)
        return Residual(total)


BLOCK_CLASSES: dict[type, Any] = {
    GqaLayout: Attention,
    layouts.LatentLayout: LatentAttention,
    DeltaLayout: GatedDelta,
    ScanLayout: GatedDelta,
    ConvLayout: ShortConv,
    layouts.MlpLayout: GatedMlp,
    layouts.MoeLayout: MoeMlp,
    layouts.Gemma4MlpLayout: Gemma4Mlp,
    layouts.EmptyLayout: lambda *_: lambda stream, *_: stream,
}
"""The class that runs a block, by the class of its layout.

Called with layout, tensors and builder.
"""


def build_layer(
    layout: layouts.LayerLayout, tensors: LayerTensors, build: LayerBuilder
) -> DecoderLayer:
    """Return one layer. Its tensors are changed in place, or packed and unusable afterwards."""
    if layout.convolutions is not None:
        return ConvolvedLayer.build(layout, tensors, build)
    if layout.is_parallel:
        tensors[1]["norm"] = tensors[0]["norm"]
    attention = BLOCK_CLASSES[type(layout.attention)](layout.attention, tensors[0], build)
    mlp = BLOCK_CLASSES[type(layout.mlp)](layout.mlp, tensors[1], build)
    if layout.is_parallel:
        return ParallelLayer(attention, mlp, layout.attention)
    return DecoderLayer(attention, mlp, layout.attention)
