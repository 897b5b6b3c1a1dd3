"""DeepSeek V2, V2-Lite, V3, R1, V3.1, GLM-4.7-Flash: latent attention; experts after the first layers.

Source: DeepSeek-V2 (2405.04434), DeepSeek-V3 (2412.19437), and their published configurations.
"""

from __future__ import annotations

from spd.formats.model_config import ModelConfig
from spd.formats.rope_config import yarn_scale
from spd.runtime.models.families import llama
from spd.runtime.models.layouts import LatentLayout
from spd.runtime.models.weights import ModelLayout


def softmax_scale(config: ModelConfig) -> float:
    """1 / sqrt(head size), with YaRN's correction, which grows with the stretch of the context."""
    rope = config.rope
    correction = yarn_scale(rope.factor, rope.mscale_all_dim or 0.0) if rope.kind == "yarn" else 1.0
    return float(config.head_dim**-0.5 * correction**2)


def layout(config: ModelConfig) -> ModelLayout:
    """Latent attention, queries with or without a rank of their own; experts as the configuration says."""
    assert config.latent is not None
    attention = LatentLayout(
        config.hidden_size, config.num_heads, config.latent, softmax_scale(config), config.attention_bias
    )
    return llama.layers(config, attention)
