"""Memory for a model's weights, fused as the layers want them, with a view for each tensor of the file.

A fused matrix is allocated once; what belongs into it is written straight to its rows, so that loading
never holds a part and the whole at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spd.runtime.models.destinations import Destination
from spd.runtime.models.layouts import LayerLayout
from spd.runtime.models.weight_form import BLOCK, WIDE, WeightForm
from spd.runtime.models.weights import scale_name, scale_shape

Fill = Callable[[Mapping[str, Tensor]], None]
"""Writes every view from its namesake, wherever that comes from."""

Tensors = dict[str, Tensor]
"""A block's tensors by the names that its layout gives them."""


@dataclass(frozen=True)
class LayerTensors:
    """One layer's tensors, block by block."""

    attention: Tensors
    mlp: Tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for block in (self.attention, self.mlp) for tensor in block.values())


class WeightSpace:
    """Allocates tensors, not yet filled, and keeps which view each checkpoint tensor fills."""

    def __init__(self, dtype: torch.dtype, device: str, form: WeightForm = WIDE) -> None:
        self.dtype, self.device, self.form = dtype, device, form
        self._views: dict[str, Tensor] = {}

    def take(self) -> Mapping[str, Tensor]:
        """Checkpoint names and the views that they fill, of everything allocated since the last call."""
        views, self._views = self._views, {}
        return views

    def block(self, destinations: Mapping[str, Destination], prefix: str = "") -> Tensors:
        """Allocate what is described; the checkpoint's names begin with `prefix`."""
        return {name: self._tensor(destination, prefix) for name, destination in destinations.items()}

    def layer(self, layout: LayerLayout, prefix: str) -> LayerTensors:
        """Allocate one layer whose tensors stand below `prefix`, such as `model.layers.0.`.

        A matrix that stays FP8 has its blocks' scales beside it, as NAME_scales.
        """
        made = []
        for block in (layout.attention, layout.mlp):
            destinations = block.destinations()
            blocks = {n: d for n, d in destinations.items() if self.form.stays_fp8(d, prefix)}
            made.append(
                {name: self._tensor(d, prefix) for name, d in destinations.items() if name not in blocks}
            )
            for name, destination in blocks.items():
                made[-1] |= self._fp8(name, destination, prefix)
        return LayerTensors(*made)

    def _fp8(self, name: str, destination: Destination, prefix: str) -> Tensors:
        """A matrix [N, K] as stored and float32 scales, those of its parts' blocks below each other."""
        shapes = {part: scale_shape(shape, (BLOCK, BLOCK)) for part, shape in destination.parts}
        values = self._tensor(destination, prefix, torch.float8_e4m3fn)
        scales = Destination.of({scale_name(part): shape for part, shape in shapes.items()}, exact=True)
        return {name: values, f"{name}_scales": self._tensor(scales, prefix)}

    def _tensor(self, destination: Destination, prefix: str, dtype: torch.dtype | None = None) -> Tensor:
        dtype = torch.float32 if destination.exact else dtype or self.dtype
        whole = torch.empty(destination.shape, dtype=dtype, device=self.device)
        row = 0
        for name, shape in destination.parts:
            self._views[prefix + name] = whole[row : row + shape[0]]
            row += shape[0]
        return whole


def fold_norm(weight: Tensor, norm: Tensor) -> None:
    """Scale the columns of weight [N, K] by norm [K] in place: the norm's own scales become ones.

    torch multiplies in float32 and rounds once, without a copy of the matrix.
    """
    weight.mul_(norm)


def centre_norms(tensors: Tensors) -> None:
    """Add 1, in place, to the scales of norms that a checkpoint stores as their distance from it."""
    for name, tensor in tensors.items():
        if name.endswith("norm"):
            tensor.add_(1)


def reorder_heads(tensor: Tensor, order: list[int]) -> None:
    """Put rows of tensor [heads * D, ...] in another order within each head, in place; order lists D."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor = tensor.view(torch.uint8)
    heads = tensor.view(-1, len(order), *tensor.shape[1:])
    heads.copy_(heads[:, order])
