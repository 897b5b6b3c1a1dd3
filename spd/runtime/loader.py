"""Checkpoint to model: check every name and shape, read, cast, fuse, pack.

Tensors are read one at a time through the memory-mapped shards and laid out for the forward pass;
nothing of the folder is executed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.model_config import ModelConfig, read_model_config
from spd.runtime.layers.attention import Attention
from spd.runtime.layers.linear import Linear
from spd.runtime.layers.mlp import GatedMlp
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.models import family_differences
from spd.runtime.models.decoder import Decoder, DecoderLayer
from spd.runtime.models.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Differences,
    expected_tensors,
    is_ignorable,
    layer_prefix,
)

logger = logging.getLogger(__name__)

Read = Callable[[str], Tensor]


def _dummy_reader(shapes: dict[str, tuple[int, ...]]) -> Read:
    """Random weights of the right shapes: for speed measurements, never for text."""
    generator = torch.Generator().manual_seed(0)

    def read(name: str) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        return torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5)

    return read


def _build_layer(config: ModelConfig, differences: Differences, read: Read, layer: int) -> DecoderLayer:
    prefix = layer_prefix(layer)

    def fused(block: str, names: tuple[str, ...], biased: bool) -> Linear:
        weights = [read(f"{prefix}{block}.{name}.weight") for name in names]
        bias = torch.cat([read(f"{prefix}{block}.{name}.bias") for name in names]) if biased else None
        return Linear(torch.cat(weights) if len(weights) > 1 else weights[0], bias)

    norms = None
    if differences.qk_norm:
        norms = (read(prefix + "self_attn.q_norm.weight"), read(prefix + "self_attn.k_norm.weight"))
    attention = Attention(
        fused("self_attn", ("q_proj", "k_proj", "v_proj"), config.attention_bias),
        fused("self_attn", ("o_proj",), config.attention_bias),
        config.head_dim,
        config.num_heads,
        config.num_kv_heads,
        norms,
        config.rms_norm_eps,
    )
    mlp = GatedMlp(
        fused("mlp", ("gate_proj", "up_proj"), config.mlp_bias), fused("mlp", ("down_proj",), config.mlp_bias)
    )
    return DecoderLayer(
        read(prefix + "input_layernorm.weight"),
        attention,
        read(prefix + "post_attention_layernorm.weight"),
        mlp,
    )


def build_decoder(
    config: ModelConfig, read: Read, positions: int, dtype: torch.dtype, device: str
) -> Decoder:
    """A decoder whose tensors come from `read`, with rotary tables for `positions` positions."""
    differences = family_differences(config)

    def placed(name: str) -> Tensor:
        # A copy: the mapped file may change or go away, and packing wants its own memory.
        return read(name).to(device=device, dtype=dtype, copy=True)

    embedding = placed(EMBEDDING)
    head = Linear(embedding if config.tie_embeddings else placed(HEAD))
    layers = [_build_layer(config, differences, placed, layer) for layer in range(config.num_layers)]
    rotary = RotaryTable(config.rope, config.head_dim, positions, dtype, device)
    return Decoder(embedding, layers, placed(FINAL_NORM), head, rotary, config.rms_norm_eps)


@torch.inference_mode()
def load_model(folder: Path, *, dtype: str, device: str, positions: int, load: str = "auto") -> Decoder:
    """Load a folder's weights, or random ones of its shapes when load is "dummy".

    Raises CheckpointError with every missing or mis-shaped tensor in one message.
    """
    config = read_model_config(folder)
    shapes = expected_tensors(config, family_differences(config))
    kind: torch.dtype = getattr(torch, dtype)
    if load == "dummy":
        return build_decoder(config, _dummy_reader(shapes), positions, kind, device)
    with Checkpoint.open(folder) as checkpoint:
        unexpected = check_tensors(checkpoint, shapes, ignorable=is_ignorable)
        if unexpected:
            logger.warning("%d tensors of %s are not used, %s first", len(unexpected), folder, unexpected[0])
        model = build_decoder(config, checkpoint.read, positions, kind, device)
        checkpoint.check_unchanged()
        return model
