"""Olmo 3: norms behind the blocks only, one norm over all query heads and one over all key heads."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Layers that slide and layers that do not, in the configuration's pattern."""
    attention = replace(
        llama.attention(config), whole_norms=True, pre_norm=None, post_norm="post_attention_layernorm"
    )
    mlp = replace(llama.mlp(config), pre_norm=None, post_norm="post_feedforward_layernorm")
    return llama.layers(config, attention, mlp)
