"""Qwen2, Qwen2.5, dense or with routed experts: queries, keys and values have a bias, the output has none."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Every layer alike but for its sliding window, if it is switched on."""
    return llama.layers(config, replace(llama.attention(config), qkv_bias=True, output_bias=False))
