"""Olmo 3 and EXAONE 4: norms behind the blocks only; one over all heads together, or one a head."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Layers that slide and layers that do not, in the configuration's pattern."""
    whole = config.architecture == "Olmo3ForCausalLM"
    attention = replace(llama.attention(config), whole_norms=whole, qk_norm=not whole)
    attention = replace(attention, pre_norm=None, post_norm="post_attention_layernorm")
    mlp = replace(llama.mlp(config), pre_norm=None, post_norm="post_feedforward_layernorm")
    return llama.layers(config, attention, mlp)
