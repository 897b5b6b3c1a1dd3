"""Memory for a model's weights, fused as the layers want them, with a view for each tensor of the file.

A fused matrix is allocated once; what belongs into it is written straight to its rows, so that loading
never holds a part and the whole at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spd.formats.model_config import ModelConfig
from spd.runtime.models.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Differences,
    expected_tensors,
    layer_prefix,
)

Fill = Callable[[Mapping[str, Tensor]], None]
"""Writes every view from its namesake, wherever that comes from."""


@dataclass(frozen=True)
class Fused:
    """A matrix [N, K] and its bias [N]; N counts the rows of every part."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class TableWeights:
    """What stands outside the layers; a tied head is the embedding itself."""

    embedding: Tensor
    head: Tensor
    final_norm: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer's tensors."""

    input_norm: Tensor
    qkv: Fused
    output: Fused
    qk_norm: tuple[Tensor, Tensor] | None
    post_norm: Tensor
    gate_up: Fused
    down: Fused


class WeightSpace:
    """Allocates a model's tensors, not yet filled, and keeps which view each checkpoint tensor fills."""

    def __init__(
        self, config: ModelConfig, differences: Differences, dtype: torch.dtype, device: str
    ) -> None:
        self.config, self.differences, self.dtype, self.device = config, differences, dtype, device
        self._shapes = expected_tensors(config, differences)
        self._views: dict[str, Tensor] = {}

    def take(self) -> Mapping[str, Tensor]:
        """Checkpoint names and the views that they fill, of everything allocated since the last call."""
        views, self._views = self._views, {}
        return views

    def tables(self) -> TableWeights:
        """Allocate embedding, head and final norm."""
        embedding = self._tensor(EMBEDDING)
        head = embedding if self.config.tie_embeddings else self._tensor(HEAD)
        return TableWeights(embedding, head, self._tensor(FINAL_NORM))

    def layer(self, layer: int) -> LayerWeights:
        """Allocate one layer."""
        config, prefix = self.config, layer_prefix(layer)
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qk_norm = None
        if self.differences.qk_norm:
            qk_norm = (self._tensor(attention + "q_norm.weight"), self._tensor(attention + "k_norm.weight"))
        return LayerWeights(
            self._tensor(prefix + "input_layernorm.weight"),
            self._fused(attention, ("q_proj", "k_proj", "v_proj"), config.attention_bias),
            self._fused(attention, ("o_proj",), config.attention_bias),
            qk_norm,
            self._tensor(prefix + "post_attention_layernorm.weight"),
            self._fused(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
            self._fused(mlp, ("down_proj",), config.mlp_bias),
        )

    def _fused(self, block: str, names: tuple[str, ...], biased: bool) -> Fused:
        weight = self._tensor(*(f"{block}{name}.weight" for name in names))
        bias = self._tensor(*(f"{block}{name}.bias" for name in names)) if biased else None
        return Fused(weight, bias)

    def _tensor(self, *names: str) -> Tensor:
        """One tensor that holds the named ones below each other."""
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        whole = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype, device=self.device)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            self._views[name] = whole[row : row + shape[0]]
            row += shape[0]
        return whole


def fold_norm(weight: Tensor, norm: Tensor) -> None:
    """Scale the columns of weight [N, K] by norm [K] in place: the norm's own scales become ones.

    torch multiplies in float32 and rounds once, without a copy of the matrix.
    """
    weight.mul_(norm)
