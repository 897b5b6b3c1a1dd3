"""Llama (2, 3.x), Mistral, Ministral 3, Mixtral, SmolLM3, Granite: the shared blocks, as configured.

Other families start from these.
"""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.formats.rope_config import RotaryDims
from spd.runtime.models.layouts import AttentionLayout, GqaLayout, LayerLayout, MlpLayout, MoeLayout
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
        scale=config.scales.scores,
        query_growth=config.query_growth,
    )


def mlp(config: ModelConfig) -> MlpLayout:
    """The gated MLP; biases follow the configuration."""
    return MlpLayout(config.hidden_size, config.intermediate_size, config.mlp_bias)


def layers(config: ModelConfig, attention: AttentionLayout, dense: MlpLayout | None = None) -> ModelLayout:
    """One kind of attention but for its sliding windows; experts where the configuration says so.

    Elsewhere `dense`, which is this family's MLP unless given.
    """
    dense, experts, local = dense or mlp(config), config.experts, config.local_rope is not None
    sparse = MoeLayout(config.hidden_size, experts, dense.centred_norms) if experts else dense
    chosen = experts.sparse_layers if experts else (False,) * config.num_layers

    def attending(sliding: int | None, still: bool) -> AttentionLayout:
        if not isinstance(attention, GqaLayout):
            return attention
        return replace(attention, sliding=sliding, local_rope=local and sliding is not None, still=still)

    windows = config.sliding or (None,) * config.num_layers
    kinds = zip(windows, config.still or (False,) * config.num_layers, chosen, strict=True)
    scales = config.scales
    unit = scales.embedding / scales.residual
    return ModelLayout(
        tuple(LayerLayout(attending(w, still), sparse if of else dense) for w, still, of in kinds),
        embedding_scale=None if unit == 1.0 else unit,
        residual_scale=scales.residual,
        logit_scale=scales.logits,
    )


def layout(config: ModelConfig) -> ModelLayout:
    """Every layer alike but for its sliding window, if the configuration has any."""
    return layers(config, attention(config))
