"""Architectures of GGUF files: which class of Hugging Face each one is, and in what its files differ.

Keys are those behind `ARCHITECTURE.`; names those behind `blk.N.`, without their endings where these stay the
same. Source: `convert_hf_to_gguf.py`, `gguf-py` and `llama-arch.cpp` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spd.formats.gguf.changes import ChangeName
from spd.formats.gguf.names import (
    AFTER,
    CONVOLUTIONS,
    DELTA,
    ENDS,
    EXPERT,
    LATENT,
    MAMBA,
    MIMO,
    NUMBERED,
    OUTSIDE,
    SHARED_EXPERT,
    SIDES,
    STEP,
    Joined,
    MtpNames,
    Names,
)

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "rms_norm_eps",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
"""Keys of most architectures, and Hugging Face's."""
SSM_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
"""Keys of layers that recur, besides `ssm.inner_size`."""
SCALE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Keys of Granite."""

GEMMA4_KEYS = {
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}
"""Keys of Gemma 4."""

Changes = Mapping[str, ChangeName]
TURNED: Changes = {"attn_q": "query_pairs", "attn_k": "key_pairs"}
"""Changes of tensors whose rows the converter orders by what turns together."""
DECAYS: Changes = {"ssm_a": "decay"}
TILED: Changes = {
    "attn_qkv": "tiled_channels",
    "attn_gate": "tiled_values",
    "ssm_alpha": "tiled_heads",
    "ssm_beta": "tiled_heads",
    "ssm_dt": "tiled_heads",
    "ssm_a": "tiled_decay",
    "ssm_conv1d": "tiled_channels",
    "ssm_out": "tiled_columns",
}
"""Changes of gated DeltaNet layers whose value heads stand key head minor."""


@dataclass(frozen=True)
class GgufArchitecture:
    """How one architecture's files are read."""

    model: str
    """Its class of Hugging Face, without ForCausalLM."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """Another class where a key is there, or a tensor whose name in its layer is this."""
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """Keys besides the usual ones, or with another meaning; None: it counts for nothing."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """What Hugging Face's configuration says of every such model, and no key does."""
    names: Names = field(default_factory=dict)
    """Names besides the usual ones, or with another meaning."""
    outer: Names = field(default_factory=dict)
    """The same of tensors outside the layers."""
    changes: Changes = field(default_factory=dict)
    """What the converter does to tensors, by their names without ending."""
    joined: tuple[Joined, ...] = ()
    """Tensors that it cuts into several."""
    centred: bool = False
    """True if scales of norms are stored larger by 1 than Hugging Face's."""
    recurs: str | None = None
    """What `layer_types` calls the layers that recur or convolve, where there are some."""
    single: bool = False
    """True if a layer has one block: it is called mlp or moe where it has no attention and does not recur."""
    around: str | None = None
    """The class of what has this model as its text; None: the model stands alone."""
    mtp: MtpNames | None = None
    """Where the tensors of its MTP head stand; None where spd knows no such heads."""


_GPT_OSS_JOINED = (
    Joined(
        f"{EXPERT}.gate_up_proj.weight",
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "interleaved",
    ),
    Joined(
        "mlp.experts.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), "interleaved"
    ),
)
_HYBRID_JOINED = (
    Joined("mlp.shared_mlp.gate_up_proj.weight", ("ffn_gate.weight", "ffn_up.weight"), "below"),
    Joined(
        "mlp.shared_mlp.gate_up_proj.weight",
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
        "below",
    ),
)
_LATENT_JOINED = (
    Joined("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), "latent_heads"),
)
_NEXT_JOINED = (
    Joined(
        "linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), "key_head_major"
    ),
)

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("Llama", variants={"ffn_gate_inp": "Mixtral"}, changes=TURNED),
    "mistral3": GgufArchitecture("Ministral3", changes=TURNED),
    "smollm3": GgufArchitecture("SmolLM3", changes=TURNED),
    "arcee": GgufArchitecture("Arcee", changes=TURNED),
    "qwen2": GgufArchitecture("Qwen2"),
    "qwen3": GgufArchitecture("Qwen3"),
    "qwen2moe": GgufArchitecture("Qwen2Moe", names=SHARED_EXPERT),
    "qwen3moe": GgufArchitecture("Qwen3Moe", facts={"norm_topk_prob": True}),
    "qwen3next": GgufArchitecture(
        "Qwen3Next",
        keys=SSM_KEYS,
        names={**DELTA, **SHARED_EXPERT},
        changes=DECAYS,
        joined=_NEXT_JOINED,
        centred=True,
        recurs="linear_attention",
        mtp=OUTSIDE,
    ),
    "qwen35": GgufArchitecture(
        "Qwen3_5",
        keys=SSM_KEYS,
        names=DELTA,
        changes=TILED,
        centred=True,
        recurs="linear_attention",
        mtp=OUTSIDE,
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5Moe",
        keys=SSM_KEYS,
        names={**DELTA, **SHARED_EXPERT},
        changes=TILED,
        centred=True,
        recurs="linear_attention",
        mtp=OUTSIDE,
    ),
    "gemma": GgufArchitecture("Gemma", centred=True),
    "gemma2": GgufArchitecture("Gemma2", names=AFTER, centred=True),
    "gemma3": GgufArchitecture(
        "Gemma3",
        keys={"rope.freq_base_swa": "rope_local_base_freq"},
        names=AFTER,
        centred=True,
    ),
    "phi3": GgufArchitecture(
        "Phi3", names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "glm4": GgufArchitecture(
        "Glm4",
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": GgufArchitecture(
        "Glm4Moe", names={"post_attention_norm": "post_attention_layernorm"}, mtp=NUMBERED
    ),
    "deepseek2": GgufArchitecture(
        "DeepseekV2",
        variants={"nextn_predict_layers": "Glm4MoeLite", "exp_probs_b.bias": "DeepseekV3"},
        keys={
            "attention.key_length": None,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "expert_shared_feed_forward_length": None,
        },
        names=LATENT,
        joined=_LATENT_JOINED,
        mtp=NUMBERED,
    ),
    "gpt-oss": GgufArchitecture(
        "GptOss",
        facts={"experts_are_transposed": False},
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        joined=_GPT_OSS_JOINED,
    ),
    "granite": GgufArchitecture("Granite", keys=SCALE_KEYS, changes=TURNED),
    "granitemoe": GgufArchitecture("GraniteMoe", keys=SCALE_KEYS, changes=TURNED),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybrid",
        keys={**SCALE_KEYS, **SSM_KEYS},
        names={
            **MAMBA,
            "ffn_down": "mlp.shared_mlp.down_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        changes={**TURNED, **DECAYS},
        joined=_HYBRID_JOINED,
        recurs="mamba",
    ),
    "nemotron_h": GgufArchitecture(
        "NemotronH",
        keys=SSM_KEYS,
        names={**MAMBA, "attn_norm": "norm"},
        changes={**TURNED, **DECAYS},
        recurs="linear_attention",
        single=True,
    ),
    "nemotron_h_moe": GgufArchitecture(
        "NemotronH",
        keys={
            **SSM_KEYS,
            "moe_latent_size": "moe_latent_size",
            "feed_forward_length": None,
            "expert_shared_count": None,
        },
        names={
            **MAMBA,
            "attn_norm": "norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_latent_down": "mlp.fc1_latent_proj",
            "ffn_latent_up": "mlp.fc2_latent_proj",
        },
        changes={**TURNED, **DECAYS},
        recurs="linear_attention",
        single=True,
        mtp=ENDS,
    ),
    "lfm2": GgufArchitecture(
        "Lfm2",
        keys={"shortconv.l_cache": "conv_L_cache"},
        facts={"block_auto_adjust_ff_dim": False},
        names=CONVOLUTIONS,
        outer={"token_embd_norm": "model.norm"},
        recurs="conv",
    ),
    "lfm2moe": GgufArchitecture(
        "Lfm2Moe",
        keys={"shortconv.l_cache": "conv_L_cache"},
        names={**CONVOLUTIONS, "exp_probs_b.bias": "mlp.expert_bias"},
        outer={"token_embd_norm": "model.norm"},
        recurs="conv",
    ),
    "olmo2": GgufArchitecture("Olmo2", variants={"attention.sliding_window": "Olmo3"}, names=AFTER),
    "command-r": GgufArchitecture(
        "Cohere",
        keys={"logit_scale": "logit_scale"},
    ),
    "cohere2": GgufArchitecture(
        "Cohere2",
        keys={"logit_scale": "logit_scale"},
    ),
    "exaone4": GgufArchitecture("Exaone4", names=AFTER),
    "seed_oss": GgufArchitecture(
        "SeedOss", names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "hunyuan-dense": GgufArchitecture(
        "HunYuanDenseV1",
        names={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "hunyuan-moe": GgufArchitecture(
        "HunYuanMoEV1",
        keys={
            "expert_shared_count": "num_shared_expert",
            "expert_shared_feed_forward_length": None,
        },
        names={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "ernie4_5": GgufArchitecture("Ernie4_5"),
    "ernie4_5-moe": GgufArchitecture(
        "Ernie4_5_Moe",
        keys={"expert_shared_feed_forward_length": None},
        names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    "minimax-m2": GgufArchitecture(
        "MiniMaxM2",
        keys={"rope.dimension_count": "rotary_dim"},
        names={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    ),
    "step35": GgufArchitecture(
        "Step3p5",
        keys={
            "rope.freq_base": None,
            "swiglu_clamp_exp": "swiglu_limits",
            "swiglu_clamp_shexp": "swiglu_limits_shared",
        },
        names={"attn_gate": "self_attn.g_proj"},
        centred=True,
        mtp=STEP,
    ),
    "mimo2": GgufArchitecture(
        "MiMoV2Flash",
        keys={
            "rope.freq_base_swa": "swa_rope_theta",
            "attention.value_length": "v_head_dim",
            "attention.value_scale": "attention_value_scale",
        },
        mtp=MIMO,
    ),
    "gemma4-assistant": GgufArchitecture(
        "Gemma4",
        keys={**GEMMA4_KEYS, "nextn_predict_layers": None},
        names=SIDES,
        outer={
            "nextn.pre_projection": "pre_projection",
            "nextn.post_projection": "post_projection",
        },
        around="Gemma4AssistantForCausalLM",
    ),
    "gemma4": GgufArchitecture(
        "Gemma4",
        keys=GEMMA4_KEYS,
        names=SIDES,
        outer={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
    ),
}
