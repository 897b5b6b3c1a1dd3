"""Gemma 4 (text): two sizes of heads, normed values, shared caches, embeddings of layers, experts.

Source: `gemma4` of Hugging Face transformers 5, and the published configurations.
"""

from __future__ import annotations

import math
from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.formats.rope_config import RotaryDims
from spd.runtime.models.families import llama
from spd.runtime.models.layouts import GqaLayout, LayerLayout, SideLayout
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Layers that slide and wider ones that do not; the last of a kind may read an earlier one's cache."""
    assert config.gemma4 is not None
    facts, sources, layers = config.gemma4, dict[int | None, int](), []
    usual = replace(
        llama.attention(config),
        qk_norm=True,
        value_norm=True,
        scale=1.0,
        post_norm="post_attention_layernorm",
    )
    behind = "post_feedforward_layernorm_1" if config.experts else "post_feedforward_layernorm"
    mlp = replace(llama.mlp(config), gelu=True, pre_norm="pre_feedforward_layernorm", post_norm=behind)
    for index, window in enumerate(config.sliding or (None,) * config.num_layers):
        shares = index >= config.num_layers - facts.shared
        width = config.intermediate_size * (2 if shares and facts.double_wide else 1)
        if not shares:
            sources[window] = index
        attention = replace(_of_window(config, usual, window), reads=sources[window] if shares else None)
        side = SideLayout(replace(mlp, intermediate_size=width), config.experts, facts.per_layer, index)
        layers.append(LayerLayout(attention, side))
    per_layer = (facts.per_layer_vocab, facts.per_layer) if facts.per_layer else None
    return ModelLayout(tuple(layers), embedding_scale=math.sqrt(config.hidden_size), per_layer=per_layer)


def _of_window(config: ModelConfig, usual: GqaLayout, window: int | None) -> GqaLayout:
    if window is not None:
        return replace(usual, sliding=window, local_rope=True)
    assert config.gemma4 is not None
    size, heads = config.gemma4.head_dim, config.gemma4.kv_heads
    own = replace(usual, head_dim=size, num_kv_heads=heads, rotary=RotaryDims(size, size))
    return replace(own, key_is_value=config.gemma4.key_is_value)
