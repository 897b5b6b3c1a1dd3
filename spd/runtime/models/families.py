"""The layouts of model families: a function each, of Llama's blocks as configured and the
differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spd.formats.block_config import ConvConfig, DeltaConfig
from spd.formats.model_config import ModelConfig
from spd.formats.names import FINAL_NORM
from spd.formats.rope_config import RotaryDims, yarn_scale
from spd.kernels.linear.activation import GELU, RELU2, SILU, Activation
from spd.runtime.models import layouts as blocks
from spd.runtime.models.attention_layout import (
    GqaLayout,
    HeadNorms,
    RotationLayout,
    ScoreLayout,
    ValueLayout,
)
from spd.runtime.models.layout_changes import (
    AttentionChanges,
    MlpChanges,
    NormChanges,
    RotationChanges,
    change_attention,
    change_mlp,
    change_norms,
)
from spd.runtime.models.parameters import ATTENTION_NORMS, MLP_NORMS
from spd.runtime.models.recurrent_layouts import ConvLayout, DeltaLayout, ScanLayout
from spd.runtime.models.weights import ModelLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack


def default_attention(config: ModelConfig) -> GqaLayout:
    """Return grouped-query attention; biases follow the configuration."""
    dims = RotaryDims(config.head_dim, config.rope.rotary_dim or config.head_dim)
    return GqaLayout(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotation=RotationLayout(dims, query_growth=config.query_growth),
        scores=ScoreLayout(scale=config.scales.scores, softcap=config.attention_softcap),
        values=ValueLayout(dim=config.value_dim, scale=config.scales.values),
        norms=replace(ATTENTION_NORMS, after_epsilon=config.post_norm_eps),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
    )


def default_mlp(config: ModelConfig) -> blocks.MlpLayout:
    """Return the gated MLP; biases follow the configuration."""
    return blocks.MlpLayout(
        config.hidden_size,
        config.intermediate_size,
        norms=replace(MLP_NORMS, after_epsilon=config.post_norm_eps),
        bias=config.mlp_bias,
    )


def default_experts(config: ModelConfig) -> blocks.MoeLayout:
    """Return the layout of routed experts."""
    experts = config.experts
    assert experts is not None
    shared_act = RELU2 if experts.is_ungated else SILU
    act = shared_act
    if experts.swiglu_clamp is not None:
        limit, alpha = experts.swiglu_clamp
        act = Activation("swiglu", limit, alpha)
    return blocks.MoeLayout(
        config.hidden_size,
        experts,
        act,
        shared_act,
        is_transposed=config.quantization is None and experts.is_transposed,
    )


def default_recurrent(config: ModelConfig) -> blocks.RecurrentLayout | None:
    """Return the layout of the blocks that replace attention in recurrent layers, None without such
    layers.
    """
    recurrent = config.recurrent
    hidden = config.hidden_size
    if recurrent is None:
        return None
    if isinstance(recurrent, ConvConfig):
        return ConvLayout(hidden, recurrent.kernel, hidden)
    if recurrent.uses_delta_rule:
        return DeltaLayout(hidden, recurrent, config.rms_norm_eps)
    return ScanLayout(hidden, recurrent, config.rms_norm_eps)


def make_layers(
    config: ModelConfig,
    attention: blocks.AttentionLayout,
    dense: blocks.MlpLayout | None = None,
    *,
    sliding_sinks: bool = False,
) -> ModelLayout:
    """Return layers with one kind of attention, except for sliding windows; experts as the
    configuration has them.

    dense: the MLP of the other layers, by default the configuration's. sliding_sinks: sliding
    layers have sinks.
    """
    centred = isinstance(attention, GqaLayout) and attention.norms.are_centred
    norms: NormChanges = {"are_centred": centred}
    dense = change_norms(dense or default_mlp(config), norms)
    sparse = None if config.experts is None else change_norms(default_experts(config), norms)
    recurrent = default_recurrent(config)
    layers: list[blocks.LayerLayout] = []
    for i in range(config.num_layers):
        mixer: blocks.MixerLayout = attention
        if recurrent is not None and config.recurrent is not None and config.recurrent.layers[i]:
            mixer = recurrent
        elif isinstance(attention, GqaLayout):
            mixer = _layer_attention(config, attention, i, sliding_sinks=sliding_sinks)
        mlp: blocks.MlpLayout | blocks.MoeLayout = dense
        if sparse is not None and sparse.experts.sparse_layers[i]:
            mlp = sparse
        if config.swiglu_limits:
            mlp = _set_limits(mlp, config.swiglu_limits[i])
        layers.append(blocks.LayerLayout(mixer, mlp))
    scales = config.scales
    embedding_scale = scales.embedding / scales.residual
    return ModelLayout(
        tuple(layers),
        centred,
        embedding_scale=None if embedding_scale == 1.0 else embedding_scale,
        residual_scale=scales.residual,
        logit_scale=scales.logits,
    )


def _set_limits(
    mlp: blocks.MlpLayout | blocks.MoeLayout, limits: tuple[float | None, float | None]
) -> blocks.MlpLayout | blocks.MoeLayout:
    """Return a layer's MLP with limits of activations: of routed experts, and of everything else."""
    routed, dense = limits
    if isinstance(mlp, blocks.MlpLayout):
        return replace(mlp, act=mlp.act._replace(limit=dense))
    shared_act = mlp.shared_act._replace(limit=dense)
    return replace(mlp, act=mlp.act._replace(limit=routed), shared_act=shared_act)


def _layer_attention(
    config: ModelConfig, attention: GqaLayout, layer: int, *, sliding_sinks: bool
) -> GqaLayout:
    """Return a layer's attention, with the window, rotation and heads of that layer."""
    window = config.sliding_windows[layer] if config.sliding_windows else None
    is_absent = layer < len(config.no_rope) and config.no_rope[layer]
    rotation = replace(attention.rotation, is_absent=is_absent)
    scores = replace(attention.scores, sliding=window)
    if window is None:
        return replace(attention, rotation=rotation, scores=scores)
    if config.local_rope is not None:
        rotary_dim = config.local_rope.rotary_dim or rotation.dims.rotary_dim
        dims = replace(rotation.dims, rotary_dim=rotary_dim)
        rotation = replace(rotation, is_local=True, dims=dims)
    if sliding_sinks:
        scores = replace(scores, has_sinks=True)
    num_heads, num_kv_heads = config.local_heads or (attention.num_heads, attention.num_kv_heads)
    return replace(
        attention,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        rotation=rotation,
        scores=scores,
    )


def make_llama_variant(
    config: ModelConfig, mlp: MlpChanges | None = None, **attention: Unpack[AttentionChanges]
) -> ModelLayout:
    """Return Llama's layout with some fields of its MLP and attention changed."""
    return make_layers(
        config,
        change_attention(default_attention(config), attention),
        change_mlp(default_mlp(config), mlp or {}),
    )


def _llama_variant(
    description: str, mlp: MlpChanges | None = None, **attention: Unpack[AttentionChanges]
) -> Callable[..., ModelLayout]:
    """Return the layout function of a family that is Llama except for these fields."""
    layout = partial(make_llama_variant, mlp=mlp, **attention)
    layout.__doc__ = description
    return layout


EACH_HEAD = HeadNorms("each")
llama = _llama_variant(
    "Llama (2, 3.x), Mistral, Ministral 3, Mixtral, SmolLM3, Granite: the shared blocks, as configured"
)
qwen2 = _llama_variant(
    "Qwen2, Qwen2.5, dense or with routed experts, and MiMo-7B: queries, keys and values have a bias",
    qkv_bias=True,
    output_bias=False,
)
qwen3 = _llama_variant(
    "Qwen3, dense or with routed experts: queries and keys are normalised per head, then rotated",
    head_norms=EACH_HEAD,
)
lfm2 = _llama_variant(
    "LFM2 and 2.5, dense or with routed experts: short convolutions, and between them attention",
    head_norms=HeadNorms("each", ("q_layernorm", "k_layernorm")),
)
granite_hybrid = _llama_variant(
    "Granite 4 hybrids, dense or with routed experts: Mamba-2 layers, and every few layers attention",
    {"names": {"block": "mlp.shared_mlp", "is_fused_in_checkpoint": True}},
)
arcee = _llama_variant("Arcee's AFM: no gates in the MLP", {"act": RELU2})
gpt_oss = _llama_variant(
    "gpt-oss: heads with sinks, every other layer slides, routed experts with biases and clamped gates",
    scores={"has_sinks": True},
)
hunyuan = _llama_variant(
    "Hunyuan, dense or with routed experts: queries and keys are normalised per head after they are rotated",
    head_norms=HeadNorms("rotated", ("query_layernorm", "key_layernorm")),
)
phi3 = _llama_variant(
    "Phi-3, Phi-3.5 and Phi-4 (dense): projections are fused in the checkpoint too",
    {"names": {"is_fused_in_checkpoint": True}},
    is_fused_in_checkpoint=True,
)
# Source: `qwen3_next` and `qwen3_5` of transformers 5, and the published checkpoints.
qwen3_5 = _llama_variant(
    "Qwen3-Next, Qwen3.5, 3.6, 3.8: gated DeltaNet layers, and every few layers attention with gated output",
    head_norms=EACH_HEAD,
    norms={"are_centred": True},
    gate="after_queries",
)
step3 = _llama_variant(
    "Step-3.5 and 3.7-Flash (text): gates of heads, more heads where layers slide, gates that layers cut",
    head_norms=EACH_HEAD,
    norms={"are_centred": True},
    gate="per_head",
)
minimax_m2 = _llama_variant(
    "MiniMax-M2: one norm over all query heads together and one over all key heads, experts everywhere",
    head_norms=HeadNorms("joint"),
)


def glm4_moe(config: ModelConfig) -> ModelLayout:
    """Lay out GLM-4.5 and 4.6, with experts as DeepSeek-V3's, and Seed-OSS: the output has no bias."""
    return make_llama_variant(
        config, output_bias=False, head_norms=EACH_HEAD if config.qk_norm else None
    )


def nemotron_h(config: ModelConfig) -> ModelLayout:
    """Lay out Nemotron-H, Nano 2 and 3: a layer is Mamba-2, attention without positions, an MLP or
    experts.
    """
    recurrent = config.recurrent
    assert isinstance(recurrent, DeltaConfig)
    empty = blocks.EmptyLayout()
    norms: NormChanges = {"before": "norm"}
    scan = ScanLayout(config.hidden_size, recurrent, config.rms_norm_eps, pre_norm="norm")
    attention = change_attention(
        default_attention(config), {"rotation": {"is_absent": True}, "norms": norms}
    )
    mlp = change_mlp(default_mlp(config), {"act": RELU2, "norms": norms})
    layers = {
        "linear_attention": blocks.LayerLayout(scan, empty),
        "full_attention": blocks.LayerLayout(attention, empty),
        "mlp": blocks.LayerLayout(empty, mlp),
    }
    if config.experts is not None:
        experts = change_norms(default_experts(config), norms)
        layers["moe"] = blocks.LayerLayout(empty, experts)
    return ModelLayout(tuple(layers[kind] for kind in recurrent.block_kinds))


def ernie4_5(config: ModelConfig) -> ModelLayout:
    """Lay out ERNIE-4.5, dense or with routed experts: elements 2i and 2i + 1 of a head rotate
    together.
    """
    return make_llama_variant(config, rotation=_interleaved_rotation(config))


def _interleaved_rotation(config: ModelConfig) -> RotationChanges:
    """Return the field of a rotation of elements 2i and 2i + 1 together."""
    rotary_dim = config.rope.rotary_dim or config.head_dim
    return {"dims": RotaryDims(config.head_dim, rotary_dim, interleaved=True)}


def olmo3(config: ModelConfig) -> ModelLayout:
    """Lay out Olmo 2 and 3 and EXAONE 4: norms after the blocks only; one over all heads, or one a
    head.
    """
    is_joint = config.architecture.startswith("Olmo")
    return make_llama_variant(
        config,
        {"norms": {"before": None, "after": "post_feedforward_layernorm"}},
        head_norms=HeadNorms("joint") if is_joint else EACH_HEAD,
        norms={"before": None, "after": "post_attention_layernorm"},
    )


def mimo_v2(config: ModelConfig) -> ModelLayout:
    """Lay out MiMo-V2-Flash: values narrower than keys; sliding layers have sinks and more key
    heads.
    """
    return make_layers(config, default_attention(config), sliding_sinks=True)


def glm4(config: ModelConfig) -> ModelLayout:
    """Lay out GLM-4 (dense): a part of each head rotates in interleaved pairs.

    Gate and up are one tensor, the attention's output has no bias; since 0414 norms follow blocks.
    """
    has_norms = config.architecture == "Glm4ForCausalLM"
    after_mlp = "post_mlp_layernorm" if has_norms else None
    return make_llama_variant(
        config,
        {"names": {"is_fused_in_checkpoint": True}, "norms": {"after": after_mlp}},
        rotation=_interleaved_rotation(config),
        output_bias=False,
        norms={"after": "post_self_attn_layernorm" if has_norms else None},
    )


def cohere2(config: ModelConfig) -> ModelLayout:
    """Lay out Command R, R7B and A (Cohere, Cohere 2): both blocks read one norm, which subtracts
    the mean.

    The stream has a mean of 0, so that this is a root-mean-square norm. Sliding layers rotate
    interleaved pairs, full-attention layers do not rotate.
    """
    model = make_llama_variant(
        config,
        {"norms": {"before": None}, "removes_mean": True},
        rotation=_interleaved_rotation(config),
        removes_mean=True,
    )
    layers = tuple(replace(layer, is_parallel=True) for layer in model.layers)
    return replace(model, layers=layers, centred_stream=True)


def deepseek(config: ModelConfig) -> ModelLayout:
    """Lay out DeepSeek V2, V2-Lite, V3, R1, V3.1, GLM-4.7-Flash: latent attention, experts after
    the first layers.

    Source: DeepSeek-V2 (2405.04434), DeepSeek-V3 (2412.19437), and their published configurations.
    """
    rope = config.rope
    latent = config.latent
    assert latent is not None
    # YaRN's correction grows with the factor of the context.
    correction = yarn_scale(rope.factor, rope.mscale_all_dim or 0.0) if rope.kind == "yarn" else 1.0
    scale = config.head_dim**-0.5 * correction**2
    attention = blocks.LatentLayout(config.hidden_size, config.num_heads, latent, scale)
    return make_layers(config, attention)


def gemma(config: ModelConfig) -> ModelLayout:
    """Lay out Gemma 1 to 3 (text): norms after the blocks too, scales stored minus 1, capped
    scores, gelu.

    Gemma 1 has no norms after blocks. Gemma 3 normalises queries and keys instead of capping
    scores; its sliding layers have another rotary base.
    """
    if config.architecture == "GemmaForCausalLM":
        model = make_llama_variant(config, {"act": GELU}, norms={"are_centred": True})
    else:
        model = make_llama_variant(
            config,
            {
                "act": GELU,
                "norms": {
                    "before": "pre_feedforward_layernorm",
                    "after": "post_feedforward_layernorm",
                },
            },
            head_norms=EACH_HEAD if config.architecture == "Gemma3ForCausalLM" else None,
            norms={"are_centred": True, "after": "post_attention_layernorm"},
        )
    return replace(model, embedding_scale=math.sqrt(config.hidden_size))


def muse_glimmer(config: ModelConfig) -> ModelLayout:
    """Lay out Muse-Glimmer (text): normed embeddings, gated attention, heads normed without scales,
    NoPE layers.
    """
    model = make_llama_variant(
        config,
        {
            "norms": {
                "before": "pre_feedforward_layernorm",
                "after": "post_feedforward_layernorm",
            }
        },
        gate="separate_matrix",
        head_norms=HeadNorms("unscaled"),
        norms={"are_centred": True, "after": "post_attention_layernorm"},
    )
    return replace(model, plain_norm=FINAL_NORM, normed_embedding=True)


def gemma4(config: ModelConfig, cache_sources: Mapping[bool, int] | None = None) -> ModelLayout:
    """Lay out Gemma 4 (text): two sizes of heads, normed values, shared caches, layers' embeddings,
    experts.

    The last full-attention (True) and sliding layers may read an earlier layer's cache of their
    kind; cache_sources: the layers that are read where they belong to another model. Source:
    `gemma4` of Hugging Face transformers 5, and the published configurations.
    """
    assert config.gemma4 is not None
    gemma = config.gemma4
    sources = dict(cache_sources or {})
    layers = []
    sliding = change_attention(
        default_attention(config),
        {
            "head_norms": HeadNorms("each", has_other_readers=True),
            "values": {"is_normed": True},
            "scores": {"scale": 1.0},
            "norms": {"after": "post_attention_layernorm"},
        },
    )
    full_attention = change_attention(
        sliding,
        {
            "head_dim": gemma.head_dim,
            "num_kv_heads": gemma.kv_heads,
            "rotation": {"dims": RotaryDims(gemma.head_dim, gemma.head_dim)},
            "values": {"is_key": gemma.key_is_value},
        },
    )
    after = "post_feedforward_layernorm_1" if config.experts else "post_feedforward_layernorm"
    norms: NormChanges = {"before": "pre_feedforward_layernorm", "after": after}
    mlp = change_mlp(default_mlp(config), {"act": GELU, "norms": norms})
    experts = None if config.experts is None else replace(default_experts(config), act=GELU)
    for i, window in enumerate(config.sliding_windows or (None,) * config.num_layers):
        shares_cache = i >= config.num_layers - gemma.num_shared_layers
        width = config.intermediate_size * (2 if shares_cache and gemma.double_wide else 1)
        if not shares_cache:
            sources[window is None] = i
        attention = full_attention
        if window is not None:
            attention = change_attention(
                sliding, {"scores": {"sliding": window}, "rotation": {"is_local": True}}
            )
        if shares_cache:
            attention = replace(attention, cache_source=sources[window is None])
        second_block = blocks.Gemma4MlpLayout(
            replace(mlp, intermediate_size=width), experts, gemma.per_layer_width, i
        )
        layers.append(blocks.LayerLayout(attention, second_block))
    per_layer = (gemma.per_layer_vocab, gemma.per_layer_width) if gemma.per_layer_width else None
    return ModelLayout(
        tuple(layers), embedding_scale=math.sqrt(config.hidden_size), per_layer=per_layer
    )
