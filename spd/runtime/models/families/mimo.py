"""MiMo-7B: a dense model whose queries, keys and values have biases."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """The biases stand in every checkpoint, whatever the configuration says."""
    return llama.layers(config, replace(llama.attention(config), qkv_bias=True, output_bias=False))
