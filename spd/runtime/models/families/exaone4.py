"""EXAONE 4: norms behind the blocks only; beside sliding layers those that see everything do not rotate."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Queries and keys are normalised per head."""
    attention = replace(
        llama.attention(config), qk_norm=True, pre_norm=None, post_norm="post_attention_layernorm"
    )
    mlp = replace(llama.mlp(config), pre_norm=None, post_norm="post_feedforward_layernorm")
    return llama.layers(config, attention, mlp)
