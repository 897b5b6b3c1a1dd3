"""GLM-4.5, 4.6, with experts as DeepSeek-V3's, and Seed-OSS: queries, keys and values have biases."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Biases everywhere but on the output; the norm of heads as the configuration says."""
    attention = replace(llama.attention(config), output_bias=False, qk_norm=config.qk_norm)
    return llama.layers(config, attention)
