"""GLM-4 (0414, dense): half of each head rotates in interleaved pairs, norms behind the blocks too."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.formats.rope_config import RotaryDims
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Every layer alike; gate and up are one tensor in the checkpoint."""
    attention = replace(
        llama.attention(config),
        rotary=RotaryDims(config.head_dim, config.rotary_dim or config.head_dim, interleaved=True),
        output_bias=False,
        post_norm="post_self_attn_layernorm",
    )
    mlp = replace(llama.mlp(config), fused_gate_up=True, post_norm="post_mlp_layernorm")
    return llama.layers(config, attention, mlp)
