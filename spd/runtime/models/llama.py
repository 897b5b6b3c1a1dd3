"""Llama (2, 3.x): the shared blocks as they are. Other dense families start from these."""

from __future__ import annotations

from spd.formats.model_config import ModelConfig
from spd.runtime.models.layouts import (
    AttentionLayout,
    GqaLayout,
    LayerLayout,
    MlpLayout,
    MoeLayout,
    RotaryDims,
)
from spd.runtime.models.weights import ModelLayout


def attention(config: ModelConfig) -> GqaLayout:
    """Grouped-query attention; biases follow the configuration."""
    return GqaLayout(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        RotaryDims(config.head_dim, config.rotary_dim or config.head_dim),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
    )


def mlp(config: ModelConfig) -> MlpLayout:
    """The gated MLP; biases follow the configuration."""
    return MlpLayout(config.hidden_size, config.intermediate_size, config.mlp_bias)


def layers(config: ModelConfig, attention: AttentionLayout) -> ModelLayout:
    """One kind of attention; experts where the configuration says so, else the MLP."""
    dense, experts = LayerLayout(attention, mlp(config)), config.experts
    if experts is None:
        return ModelLayout((dense,) * config.num_layers)
    sparse = LayerLayout(attention, MoeLayout(config.hidden_size, experts))
    return ModelLayout(tuple(sparse if chosen else dense for chosen in experts.sparse_layers))


def layout(config: ModelConfig) -> ModelLayout:
    """Every layer alike."""
    return layers(config, attention(config))
