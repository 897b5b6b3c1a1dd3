"""Qwen3, dense or with routed experts: queries and keys are normalised per head before they are rotated."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """RMS norm of each query and key head; experts where the configuration says so."""
    return llama.layers(config, replace(llama.attention(config), qk_norm=True))
