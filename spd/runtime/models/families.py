"""What families make of a configuration: Llama's blocks as configured, then what differs, a function each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

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
from spd.runtime.models.destinations import ATTENTION_NORMS, MLP_NORMS
from spd.runtime.models.recurrent_layouts import ConvLayout, DeltaLayout, ScanLayout
from spd.runtime.models.weights import ModelLayout


def usual_attention(config: ModelConfig) -> GqaLayout:
    """Return grouped-query attention; biases follow the configuration."""
    dims = RotaryDims(config.head_dim, config.rope.rotary_dim or config.head_dim)
    return GqaLayout(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        RotationLayout(dims, query_growth=config.query_growth),
        ScoreLayout(scale=config.scales.scores, softcap=config.attention_softcap),
        ValueLayout(dim=config.value_dim, scale=config.scales.values),
        replace(ATTENTION_NORMS, after_epsilon=config.post_norm_eps),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
    )


def usual_mlp(config: ModelConfig) -> blocks.MlpLayout:
    """Return the gated MLP; biases follow the configuration."""
    return blocks.MlpLayout(
        config.hidden_size,
        config.intermediate_size,
        norms=replace(MLP_NORMS, after_epsilon=config.post_norm_eps),
        bias=config.mlp_bias,
    )


def usual_experts(config: ModelConfig) -> blocks.MoeLayout:
    """Return routed experts as the configuration says."""
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


def usual_recurrent(config: ModelConfig) -> blocks.RecurrentLayout | None:
    """Return what stands in place of attention in layers of which the configuration says so."""
    recurrent = config.recurrent
    hidden = config.hidden_size
    if recurrent is None:
        return None
    if isinstance(recurrent, ConvConfig):
        return ConvLayout(hidden, recurrent.kernel, hidden)
    if recurrent.uses_delta_rule:
        return DeltaLayout(hidden, recurrent, config.rms_norm_eps)
    return ScanLayout(hidden, recurrent, config.rms_norm_eps)


def layered(
    config: ModelConfig,
    attention: blocks.AttentionLayout,
    dense: blocks.MlpLayout | None = None,
    *,
    sinks_slide: bool = False,
) -> ModelLayout:
    """Return layers of one kind of attention but for sliding windows; experts as the configuration says.

    dense: the MLP of the other layers, by default the configuration's. sinks_slide: layers that slide
    have sinks.
    """
    centred = isinstance(attention, GqaLayout) and attention.norms.are_centred
    fields = {"norms": {"are_centred": centred}}
    dense = changed(dense or usual_mlp(config), fields)
    sparse = None if config.experts is None else changed(usual_experts(config), fields)
    recurrent = usual_recurrent(config)
    layers: list[blocks.LayerLayout] = []
    for i in range(config.num_layers):
        mixer: blocks.MixerLayout = attention
        if recurrent is not None and config.recurrent is not None and config.recurrent.layers[i]:
            mixer = recurrent
        elif isinstance(attention, GqaLayout):
            mixer = _attention_at(config, attention, i, sinks_slide=sinks_slide)
        mlp: blocks.MlpLayout | blocks.MoeLayout = dense
        if sparse is not None and sparse.experts.sparse_layers[i]:
            mlp = sparse
        if config.swiglu_limits:
            mlp = _limited(mlp, config.swiglu_limits[i])
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


def _limited(
    mlp: blocks.MlpLayout | blocks.MoeLayout, limits: tuple[float | None, float | None]
) -> blocks.MlpLayout | blocks.MoeLayout:
    """Return a layer's MLP with its limits of activations: of routed experts, and of all else."""
    routed, dense = limits
    if isinstance(mlp, blocks.MlpLayout):
        return replace(mlp, act=mlp.act._replace(limit=dense))
    shared_act = mlp.shared_act._replace(limit=dense)
    return replace(mlp, act=mlp.act._replace(limit=routed), shared_act=shared_act)


def _attention_at(
    config: ModelConfig, attention: GqaLayout, layer: int, *, sinks_slide: bool
) -> GqaLayout:
    """Return a layer's attention: whether it slides, how it then rotates, and with how many heads."""
    window = config.sliding_windows[layer] if config.sliding_windows else None
    is_absent = layer < len(config.no_rope) and config.no_rope[layer]
    rotation = replace(attention.rotation, is_absent=is_absent)
    scores = replace(attention.scores, sliding=window)
    if window is None:
        return replace(attention, rotation=rotation, scores=scores)
    if config.local_rope is not None:
        rotated = config.local_rope.rotary_dim or rotation.dims.rotary_dim
        dims = replace(rotation.dims, rotary_dim=rotated)
        rotation = replace(rotation, is_local=True, dims=dims)
    if sinks_slide:
        scores = replace(scores, has_sinks=True)
    num_heads, num_kv_heads = config.local_heads or (attention.num_heads, attention.num_kv_heads)
    return replace(
        attention,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        rotation=rotation,
        scores=scores,
    )


def varied(
    config: ModelConfig, mlp: Mapping[str, Any] | None = None, **attention: Any
) -> ModelLayout:
    """Return Llama with other fields of its MLP's layout and of its attention's; see `changed`."""
    changed_mlp = changed(usual_mlp(config), mlp or {})
    return layered(config, changed(usual_attention(config), attention), changed_mlp)


Block = TypeVar("Block", GqaLayout, blocks.MlpLayout, blocks.MoeLayout)


def changed(layout: Block, fields: Mapping[str, Any]) -> Block:
    """Return a block with other fields; of a group of fields, a mapping names those that differ."""
    values = {
        name: replace(getattr(layout, name), **value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
    }
    return replace(layout, **values)


def _family(
    says: str, mlp: Mapping[str, Any] | None = None, **attention: Any
) -> Callable[..., ModelLayout]:
    """A family that is Llama but for such fields, and what it is called."""
    made = partial(varied, mlp=mlp, **attention)
    made.__doc__ = says
    return made


EACH_HEAD = HeadNorms("each")
llama = _family(
    "Llama (2, 3.x), Mistral, Ministral 3, Mixtral, SmolLM3, Granite: the shared blocks, as configured"
)
qwen2 = _family(
    "Qwen2, Qwen2.5, dense or with routed experts, and MiMo-7B: queries, keys and values have a bias",
    qkv_bias=True,
    output_bias=False,
)
qwen3 = _family(
    "Qwen3, dense or with routed experts: queries and keys are normalised per head, then rotated",
    head_norms=EACH_HEAD,
)
lfm2 = _family(
    "LFM2 and 2.5, dense or with routed experts: short convolutions, and between them attention",
    head_norms=HeadNorms("each", ("q_layernorm", "k_layernorm")),
)
granite_hybrid = _family(
    "Granite 4 hybrids, dense or with routed experts: Mamba-2 layers, and every few layers attention",
    {"names": {"block": "mlp.shared_mlp", "is_fused": True}},
)
arcee = _family("Arcee's AFM: no gates in the MLP", {"act": RELU2})
gpt_oss = _family(
    "gpt-oss: heads with sinks, every other layer slides, routed experts with biases and clamped gates",
    scores={"has_sinks": True},
)
hunyuan = _family(
    "Hunyuan, dense or with routed experts: queries and keys are normalised per head after they are rotated",
    head_norms=HeadNorms("rotated", ("query_layernorm", "key_layernorm")),
)
phi3 = _family(
    "Phi-3, Phi-3.5 and Phi-4 (dense): projections are fused in the checkpoint too",
    {"names": {"is_fused": True}},
    is_fused=True,
)
qwen3_5 = _family(  # Source: `qwen3_next` and `qwen3_5` of transformers 5, and the published checkpoints
    "Qwen3-Next, Qwen3.5, 3.6, 3.8: gated DeltaNet layers, and every few layers attention with gated output",
    head_norms=EACH_HEAD,
    norms={"are_centred": True},
    gate="beside_queries",
)
step3 = _family(
    "Step-3.5 and 3.7-Flash (text): gates of heads, more heads where layers slide, gates that layers cut",
    head_norms=EACH_HEAD,
    norms={"are_centred": True},
    gate="per_head",
)
minimax_m2 = _family(
    "MiniMax-M2: one norm over all query heads together and one over all key heads, experts everywhere",
    head_norms=HeadNorms("joint"),
)


def glm4_moe(config: ModelConfig) -> ModelLayout:
    """GLM-4.5, 4.6, with experts as DeepSeek-V3's, and Seed-OSS: the output has no bias."""
    return varied(config, output_bias=False, head_norms=EACH_HEAD if config.qk_norm else None)


def nemotron_h(config: ModelConfig) -> ModelLayout:
    """Nemotron-H and Nano 2 and 3: a block a layer, Mamba-2, attention without positions, MLP or experts."""
    recurrent = config.recurrent
    assert isinstance(recurrent, DeltaConfig)
    nothing = blocks.NoLayout()
    norms = {"before": "norm"}
    scan = ScanLayout(config.hidden_size, recurrent, config.rms_norm_eps, pre_norm="norm")
    fields = {"rotation": {"is_absent": True}, "norms": norms}
    attention = changed(usual_attention(config), fields)
    mlp = changed(usual_mlp(config), {"act": RELU2, "norms": norms})
    layers = {
        "linear_attention": blocks.LayerLayout(scan, nothing),
        "full_attention": blocks.LayerLayout(attention, nothing),
        "mlp": blocks.LayerLayout(nothing, mlp),
    }
    if config.experts is not None:
        experts = changed(usual_experts(config), {"norms": norms})
        layers["moe"] = blocks.LayerLayout(nothing, experts)
    return ModelLayout(tuple(layers[kind] for kind in recurrent.block_kinds))


def ernie4_5(config: ModelConfig) -> ModelLayout:
    """ERNIE-4.5, dense or with routed experts: elements 2i and 2i + 1 of a head turn together."""
    return varied(config, rotation=_interleaved(config))


def _interleaved(config: ModelConfig) -> dict[str, RotaryDims]:
    """Return the rotation of elements 2i and 2i + 1 together."""
    rotated = config.rope.rotary_dim or config.head_dim
    return {"dims": RotaryDims(config.head_dim, rotated, interleaved=True)}


def olmo3(config: ModelConfig) -> ModelLayout:
    """Olmo 2 and 3 and EXAONE 4: norms behind the blocks only; one over all heads together, or one a head."""
    is_joint = config.architecture.startswith("Olmo")
    return varied(
        config,
        {"norms": {"before": None, "after": "post_feedforward_layernorm"}},
        head_norms=HeadNorms("joint") if is_joint else EACH_HEAD,
        norms={"before": None, "after": "post_attention_layernorm"},
    )


def mimo_v2(config: ModelConfig) -> ModelLayout:
    """MiMo-V2-Flash: values narrower than keys; layers that slide have sinks and more key heads."""
    return layered(config, usual_attention(config), sinks_slide=True)


def glm4(config: ModelConfig) -> ModelLayout:
    """GLM-4 (dense): half of each head rotates in interleaved pairs; since 0414 norms behind blocks too."""
    has_norms = config.architecture == "Glm4ForCausalLM"
    after_mlp = "post_mlp_layernorm" if has_norms else None
    return varied(
        config,
        {"names": {"is_fused": True}, "norms": {"after": after_mlp}},
        rotation=_interleaved(config),
        output_bias=False,
        norms={"after": "post_self_attn_layernorm" if has_norms else None},
    )


def cohere2(config: ModelConfig) -> ModelLayout:
    """Command R, R7B and A (Cohere, Cohere 2): both blocks read one norm, which subtracts the mean.

    The stream is kept without a mean, so that this is a root-mean-square norm. Layers that slide turn in
    interleaved pairs, those that see everything do not turn.
    """
    model = varied(
        config,
        {"norms": {"before": None}, "centred_output": True},
        rotation=_interleaved(config),
        centred_output=True,
    )
    layers = tuple(replace(layer, parallel=True) for layer in model.layers)
    return replace(model, layers=layers, centred_stream=True)


def deepseek(config: ModelConfig) -> ModelLayout:
    """DeepSeek V2, V2-Lite, V3, R1, V3.1, GLM-4.7-Flash: latent attention; experts after the first layers.

    Source: DeepSeek-V2 (2405.04434), DeepSeek-V3 (2412.19437), and their published configurations.
    """
    rope = config.rope
    latent = config.latent
    assert latent is not None
    # YaRN's correction grows with the stretch of the context.
    correction = yarn_scale(rope.factor, rope.mscale_all_dim or 0.0) if rope.kind == "yarn" else 1.0
    scale = config.head_dim**-0.5 * correction**2
    attention = blocks.LatentLayout(config.hidden_size, config.num_heads, latent, scale)
    return layered(config, attention)


def gemma(config: ModelConfig) -> ModelLayout:
    """Gemma 1 to 3 (text): norms behind the blocks too, their scales stored around 0, capped scores, gelu.

    Gemma 1 has none behind. Gemma 3 normalises queries and keys instead of capping scores; its sliding
    layers turn by their own base.
    """
    if config.architecture == "GemmaForCausalLM":
        model = varied(config, {"act": GELU}, norms={"are_centred": True})
    else:
        model = varied(
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
    """Muse-Glimmer (text): normed embeddings, gated attention, heads normed without scales, still layers."""
    model = varied(
        config,
        {
            "norms": {
                "before": "pre_feedforward_layernorm",
                "after": "post_feedforward_layernorm",
            }
        },
        gate="own_matrix",
        head_norms=HeadNorms("unscaled"),
        norms={"are_centred": True, "after": "post_attention_layernorm"},
    )
    return replace(model, plain_norm=FINAL_NORM, normed_embedding=True)


def gemma4(config: ModelConfig, reads: Mapping[bool, int] | None = None) -> ModelLayout:
    """Gemma 4 (text): two sizes of heads, normed values, shared caches, embeddings of layers, experts.

    The last layers of a kind, which see everything (True) or slide, may read an earlier one's cache: reads
    says whose where that is not among them. Source: `gemma4` of Hugging Face transformers 5, and the
    published configurations.
    """
    assert config.gemma4 is not None
    facts = config.gemma4
    sources = dict(reads or {})
    layers = []
    sliding = changed(
        usual_attention(config),
        {
            "head_norms": EACH_HEAD,
            "values": {"is_normed": True},
            "scores": {"scale": 1.0},
            "norms": {"after": "post_attention_layernorm"},
        },
    )
    wide = changed(
        sliding,
        {
            "head_dim": facts.head_dim,
            "num_kv_heads": facts.kv_heads,
            "rotation": {"dims": RotaryDims(facts.head_dim, facts.head_dim)},
            "values": {"is_key": facts.key_is_value},
        },
    )
    after = "post_feedforward_layernorm_1" if config.experts else "post_feedforward_layernorm"
    norms = {"before": "pre_feedforward_layernorm", "after": after}
    mlp = changed(usual_mlp(config), {"act": GELU, "norms": norms})
    experts = None if config.experts is None else replace(usual_experts(config), act=GELU)
    for i, window in enumerate(config.sliding_windows or (None,) * config.num_layers):
        shares = i >= config.num_layers - facts.num_shared_layers
        width = config.intermediate_size * (2 if shares and facts.double_wide else 1)
        if not shares:
            sources[window is None] = i
        attention = wide
        if window is not None:
            local = {"scores": {"sliding": window}, "rotation": {"is_local": True}}
            attention = changed(sliding, local)
        attention = replace(attention, reads=sources[window is None] if shares else None)
        side = blocks.SideLayout(
            replace(mlp, intermediate_size=width), experts, facts.per_layer_width, i
        )
        layers.append(blocks.LayerLayout(attention, side))
    per_layer = (facts.per_layer_vocab, facts.per_layer_width) if facts.per_layer_width else None
    return ModelLayout(
        tuple(layers), embedding_scale=math.sqrt(config.hidden_size), per_layer=per_layer
    )
