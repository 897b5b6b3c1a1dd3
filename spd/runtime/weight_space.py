"""Memory for a model's weights, fused as the layers want them, with a view for each tensor of the file.

A fused matrix is allocated once; what belongs into it is written straight to its rows, so that loading
never holds a part and the whole at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spd.runtime.models.layouts import Destination, LayerLayout

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

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self._views: dict[str, Tensor] = {}

    def take(self) -> Mapping[str, Tensor]:
        """Checkpoint names and the views that they fill, of everything allocated since the last call."""
        views, self._views = self._views, {}
        return views

    def block(self, destinations: Mapping[str, Destination], prefix: str = "") -> Tensors:
        """Allocate what is described; the checkpoint's names begin with `prefix`."""
        return {name: self._tensor(destination, prefix) for name, destination in destinations.items()}

    def layer(self, layout: LayerLayout, prefix: str) -> LayerTensors:
        """Allocate one layer whose tensors stand below `prefix`, such as `model.layers.0.`."""
        attention, mlp = layout.attention.destinations(), layout.mlp.destinations()
        return LayerTensors(self.block(attention, prefix), self.block(mlp, prefix))

    def _tensor(self, destination: Destination, prefix: str) -> Tensor:
        dtype = torch.float32 if destination.exact else self.dtype
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
    heads = tensor.view(-1, len(order), *tensor.shape[1:])
    heads.copy_(heads[:, order])
