"""Qwen3-Next, Qwen3.5, 3.6, 3.8: gated DeltaNet layers, and every few layers attention with gated output.

Source: `qwen3_next` and `qwen3_5` of Hugging Face transformers 5, and the published checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.layouts import DeltaLayout, LayerLayout
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Layers of both kinds, in the configuration's order."""
    assert config.delta is not None
    attention = replace(llama.attention(config), qk_norm=True, centred_norms=True, gated=True)
    delta = DeltaLayout(config.hidden_size, config.delta)
    mixers = [delta if linear else attention for linear in config.delta.layers]
    mlps = llama.layers(config, attention, replace(llama.mlp(config), centred_norms=True)).layers
    made = [LayerLayout(mixer, like.mlp) for mixer, like in zip(mixers, mlps, strict=True)]
    return ModelLayout(tuple(made), centred_norm=True)
