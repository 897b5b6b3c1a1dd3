"""Hunyuan dense (0.5B to 7B): queries and keys are normalised per head after they are rotated."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Every layer alike."""
    names = ("query_layernorm", "key_layernorm")
    attention = replace(llama.attention(config), qk_norm=True, late_norms=True, head_norms=names)
    return llama.layers(config, attention)
