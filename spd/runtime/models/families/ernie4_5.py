"""ERNIE-4.5, dense or with routed experts: heads rotate in interleaved pairs."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.formats.rope_config import RotaryDims
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Pairs (2i, 2i + 1) turn together; experts where the configuration says so."""
    rotary = RotaryDims(config.head_dim, config.head_dim, interleaved=True)
    return llama.layers(config, replace(llama.attention(config), rotary=rotary))
