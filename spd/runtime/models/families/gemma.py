"""Gemma 2 and 3 (text): norms behind the blocks too, their scales stored around 0, capped scores, gelu.

Gemma 3 normalises queries and keys instead of capping scores; its sliding layers turn by a base of their own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Layers that slide and layers that do not, in the configuration's pattern."""
    attention = replace(
        llama.attention(config),
        qk_norm=config.architecture == "Gemma3ForCausalLM",
        scale=None if config.query_scalar is None else config.query_scalar**-0.5,
        softcap=config.attention_softcap,
        centred_norms=True,
        post_norm="post_attention_layernorm",
    )
    mlp = replace(
        llama.mlp(config),
        gelu=True,
        centred_norms=True,
        pre_norm="pre_feedforward_layernorm",
        post_norm="post_feedforward_layernorm",
    )
    layers = llama.layers(config, attention, mlp)
    return replace(layers, centred_norm=True, embedding_scale=math.sqrt(config.hidden_size))
