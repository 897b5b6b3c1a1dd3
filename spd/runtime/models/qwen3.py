"""Qwen3 (dense): queries and keys are normalised per head before they are rotated."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models import llama
from spd.runtime.models.layouts import GqaLayout, LayerLayout
from spd.runtime.models.weights import ModelLayout


def attention(config: ModelConfig) -> GqaLayout:
    """RMS norm of each query and key head."""
    return replace(llama.attention(config), qk_norm=True)


def layout(config: ModelConfig) -> ModelLayout:
    """Every layer alike."""
    return ModelLayout((LayerLayout(attention(config), llama.mlp(config)),) * config.num_layers)
