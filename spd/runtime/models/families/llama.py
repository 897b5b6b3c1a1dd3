"""Llama (2, 3.x), Mistral, Ministral 3, Mixtral, SmolLM3, Granite: the shared blocks, as configured.

Other families start from these.
"""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.formats.recurrent_config import ConvConfig
from spd.formats.rope_config import RotaryDims
from spd.runtime.models.layouts import (
    AttentionLayout,
    GqaLayout,
    LayerLayout,
    MixerLayout,
    MlpLayout,
    MoeLayout,
    RecurrentLayout,
)
from spd.runtime.models.recurrent_layouts import ConvLayout, DeltaLayout, ScanLayout
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


def recurrent(config: ModelConfig) -> RecurrentLayout | None:
    """What stands in place of attention in layers of which the configuration says so."""
    facts, hidden = config.recurrent, config.hidden_size
    if facts is None:
        return None
    if isinstance(facts, ConvConfig):
        return ConvLayout(hidden, facts.kernel, hidden)
    return (DeltaLayout if facts.corrects else ScanLayout)(hidden, facts, config.rms_norm_eps)


def layers(config: ModelConfig, attention: AttentionLayout, dense: MlpLayout | None = None) -> ModelLayout:
    """One kind of attention but for its sliding windows; experts where the configuration says so.

    Elsewhere `dense`, which is this family's MLP unless given.
    """
    dense, experts, local = dense or mlp(config), config.experts, config.local_rope is not None
    wide = config.quantization is None
    sparse = MoeLayout(config.hidden_size, experts, dense.centred_norms, turned=wide) if experts else dense
    chosen = experts.sparse_layers if experts else (False,) * config.num_layers

    other, plain = recurrent(config), (False,) * config.num_layers

    def mixing(sliding: int | None, still: bool, keeps: bool) -> MixerLayout:
        if keeps and other is not None:
            return other
        if not isinstance(attention, GqaLayout):
            return attention
        return replace(attention, sliding=sliding, local_rope=local and sliding is not None, still=still)

    windows, keeping = config.sliding or (None,) * config.num_layers, plain
    if config.recurrent is not None:
        keeping = config.recurrent.layers
    mixers = map(mixing, windows, config.still or plain, keeping)
    scales = config.scales
    unit = scales.embedding / scales.residual
    return ModelLayout(
        tuple(
            LayerLayout(*of) for of in zip(mixers, (sparse if of else dense for of in chosen), strict=True)
        ),
        embedding_scale=None if unit == 1.0 else unit,
        residual_scale=scales.residual,
        logit_scale=scales.logits,
    )


def layout(config: ModelConfig) -> ModelLayout:
    """Every layer alike but for its sliding window, if the configuration has any."""
    return layers(config, attention(config))
