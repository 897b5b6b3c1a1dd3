"""Seed-OSS: queries, keys and values have biases, the output has none."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Every layer alike."""
    return llama.layers(config, replace(llama.attention(config), output_bias=False))
