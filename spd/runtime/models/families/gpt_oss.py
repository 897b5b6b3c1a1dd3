"""gpt-oss: heads with sinks, every other layer slides, routed experts with biases and clamped gates."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Experts in every layer, wide as `transformers` keeps them where MXFP4 blocks are multiplied out."""
    return llama.layers(config, replace(llama.attention(config), sinks=True))
