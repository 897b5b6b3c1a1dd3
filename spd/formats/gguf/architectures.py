"""Architectures of GGUF files: the class of Hugging Face of each, and how its files differ.

Keys stand behind `ARCHITECTURE.`, names behind `blk.N.`, without their endings where these stay the
same. Source: `convert_hf_to_gguf.py`, `gguf-py` and `llama-arch.cpp` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spd.formats.gguf.changes import ChangeName
from spd.formats.gguf.names import (
    CONV_NAMES,
    DELTA_NAMES,
    EXPERT,
    GEMMA4_NAMES,
    LATENT_NAMES,
    MAMBA_NAMES,
    MIMO_MTP,
    NEMOTRON_MTP,
    NUMBERED_MTP,
    POST_NORM_NAMES,
    QWEN_MTP,
    SHARED_EXPERT_NAMES,
    STEP_MTP,
    JoinedTensor,
    MtpNames,
    Names,
)

COMMON_KEYS = {
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
"""Keys of most architectures, and Hugging Face's for them."""
SSM_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
"""Keys of recurrent layers, without `ssm.inner_size`."""
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
"""Changes of tensors by their names without ending."""
ROTARY_CHANGES: Changes = {"attn_q": "query_pairs", "attn_k": "key_pairs"}
"""Changes of tensors whose rows the converter orders by pairs that rotate together."""
DECAY_CHANGES: Changes = {"ssm_a": "decay"}
"""Changes of recurrent layers whose heads are stored in Hugging Face's order."""
TILED_CHANGES: Changes = {
    "attn_qkv": "tiled_channels",
    "attn_gate": "tiled_values",
    "ssm_alpha": "tiled_heads",
    "ssm_beta": "tiled_heads",
    "ssm_dt": "tiled_heads",
    "ssm_a": "tiled_decay",
    "ssm_conv1d": "tiled_channels",
    "ssm_out": "tiled_columns",
}
"""Changes of gated DeltaNet layers, whose value heads are stored key head minor."""


@dataclass(frozen=True)
class GgufArchitecture:
    """How one architecture's files are read."""

    model_class: str
    """Its class of Hugging Face, without ForCausalLM."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """Another class, by a key that the file has, or by a tensor's name in its layer."""
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """Keys in addition to `COMMON_KEYS`, or with another meaning; None: the key is ignored."""
    constants: Mapping[str, object] = field(default_factory=dict)
    """Values of Hugging Face's configuration that no key of the file has."""
    names: Names = field(default_factory=dict)
    """Names in addition to `LAYER_NAMES`, or with another meaning."""
    outer_names: Names = field(default_factory=dict)
    """The same for tensors outside the layers."""
    changes: Changes = field(default_factory=dict)
    """Changes that the converter makes to tensors, by their names without ending."""
    joined_tensors: tuple[JoinedTensor, ...] = ()
    """Tensors that the converter splits."""
    norms_plus_one: bool = False
    """True if scales of norms are stored larger by 1 than Hugging Face's."""
    recurrent_kind: str | None = None
    """The kind in `layer_types` of recurrent layers and of convolutions, where there are some."""
    is_single_block: bool = False
    """True if a layer has one block.

    Its kind is mlp or moe where it is neither attention nor recurrent.
    """
    wrapper_class: str | None = None
    """The class of the drafter whose text model this is; None: the model stands alone."""
    mtp: MtpNames | None = None
    """Names of the tensors of its MTP head; None where spd knows no such heads."""


_GPT_OSS_JOINED = (
    JoinedTensor(
        f"{EXPERT}.gate_up_proj.weight",
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "interleaved",
    ),
    JoinedTensor(
        "mlp.experts.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), "interleaved"
    ),
)
_HYBRID_JOINED = (
    JoinedTensor(
        "mlp.shared_mlp.gate_up_proj.weight", ("ffn_gate.weight", "ffn_up.weight"), "below"
    ),
    JoinedTensor(
        "mlp.shared_mlp.gate_up_proj.weight",
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
        "below",
    ),
)
_LATENT_JOINED = (
    JoinedTensor(
        "self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), "latent_heads"
    ),
)
_NEXT_JOINED = (
    JoinedTensor(
        "linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), "key_head_major"
    ),
)

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "Llama", variants={"ffn_gate_inp": "Mixtral"}, changes=ROTARY_CHANGES
    ),
    "mistral3": GgufArchitecture("Ministral3", changes=ROTARY_CHANGES),
    "smollm3": GgufArchitecture("SmolLM3", changes=ROTARY_CHANGES),
    "arcee": GgufArchitecture("Arcee", changes=ROTARY_CHANGES),
    "qwen2": GgufArchitecture("Qwen2"),
    "qwen3": GgufArchitecture("Qwen3"),
    "qwen2moe": GgufArchitecture("Qwen2Moe", names=SHARED_EXPERT_NAMES),
    "qwen3moe": GgufArchitecture("Qwen3Moe", constants={"norm_topk_prob": True}),
    "qwen3next": GgufArchitecture(
        "Qwen3Next",
        keys=SSM_KEYS,
        names={**DELTA_NAMES, **SHARED_EXPERT_NAMES},
        changes=DECAY_CHANGES,
        joined_tensors=_NEXT_JOINED,
        norms_plus_one=True,
        recurrent_kind="linear_attention",
        mtp=QWEN_MTP,
    ),
    "qwen35": GgufArchitecture(
        "Qwen3_5",
        keys=SSM_KEYS,
        names=DELTA_NAMES,
        changes=TILED_CHANGES,
        norms_plus_one=True,
        recurrent_kind="linear_attention",
        mtp=QWEN_MTP,
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5Moe",
        keys=SSM_KEYS,
        names={**DELTA_NAMES, **SHARED_EXPERT_NAMES},
        changes=TILED_CHANGES,
        norms_plus_one=True,
        recurrent_kind="linear_attention",
        mtp=QWEN_MTP,
    ),
    "gemma": GgufArchitecture("Gemma", norms_plus_one=True),
    "gemma2": GgufArchitecture("Gemma2", names=POST_NORM_NAMES, norms_plus_one=True),
    "gemma3": GgufArchitecture(
        "Gemma3",
        keys={"rope.freq_base_swa": "rope_local_base_freq"},
        names=POST_NORM_NAMES,
        norms_plus_one=True,
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
        "Glm4Moe", names={"post_attention_norm": "post_attention_layernorm"}, mtp=NUMBERED_MTP
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
        names=LATENT_NAMES,
        joined_tensors=_LATENT_JOINED,
        mtp=NUMBERED_MTP,
    ),
    "gpt-oss": GgufArchitecture(
        "GptOss",
        constants={"experts_are_transposed": False},
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        joined_tensors=_GPT_OSS_JOINED,
    ),
    "granite": GgufArchitecture("Granite", keys=SCALE_KEYS, changes=ROTARY_CHANGES),
    "granitemoe": GgufArchitecture("GraniteMoe", keys=SCALE_KEYS, changes=ROTARY_CHANGES),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybrid",
        keys={**SCALE_KEYS, **SSM_KEYS},
        names={
            **MAMBA_NAMES,
            "ffn_down": "mlp.shared_mlp.down_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        changes={**ROTARY_CHANGES, **DECAY_CHANGES},
        joined_tensors=_HYBRID_JOINED,
        recurrent_kind="mamba",
    ),
    "nemotron_h": GgufArchitecture(
        "NemotronH",
        keys=SSM_KEYS,
        names={**MAMBA_NAMES, "attn_norm": "norm"},
        changes={**ROTARY_CHANGES, **DECAY_CHANGES},
        recurrent_kind="linear_attention",
        is_single_block=True,
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
            **MAMBA_NAMES,
            "attn_norm": "norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_latent_down": "mlp.fc1_latent_proj",
            "ffn_latent_up": "mlp.fc2_latent_proj",
        },
        changes={**ROTARY_CHANGES, **DECAY_CHANGES},
        recurrent_kind="linear_attention",
        is_single_block=True,
        mtp=NEMOTRON_MTP,
    ),
    "lfm2": GgufArchitecture(
        "Lfm2",
        keys={"shortconv.l_cache": "conv_L_cache"},
        constants={"block_auto_adjust_ff_dim": False},
        names=CONV_NAMES,
        outer_names={"token_embd_norm": "model.norm"},
        recurrent_kind="conv",
    ),
    "lfm2moe": GgufArchitecture(
        "Lfm2Moe",
        keys={"shortconv.l_cache": "conv_L_cache"},
        names={**CONV_NAMES, "exp_probs_b.bias": "mlp.expert_bias"},
        outer_names={"token_embd_norm": "model.norm"},
        recurrent_kind="conv",
    ),
    "olmo2": GgufArchitecture(
        "Olmo2", variants={"attention.sliding_window": "Olmo3"}, names=POST_NORM_NAMES
    ),
    "command-r": GgufArchitecture(
        "Cohere",
        keys={"logit_scale": "logit_scale"},
    ),
    "cohere2": GgufArchitecture(
        "Cohere2",
        keys={"logit_scale": "logit_scale"},
    ),
    "exaone4": GgufArchitecture("Exaone4", names=POST_NORM_NAMES),
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
        norms_plus_one=True,
        mtp=STEP_MTP,
    ),
    "mimo2": GgufArchitecture(
        "MiMoV2Flash",
        keys={
            "rope.freq_base_swa": "swa_rope_theta",
            "attention.value_length": "v_head_dim",
            "attention.value_scale": "attention_value_scale",
        },
        mtp=MIMO_MTP,
    ),
    "gemma4-assistant": GgufArchitecture(
        "Gemma4",
        keys={**GEMMA4_KEYS, "nextn_predict_layers": None},
        names=GEMMA4_NAMES,
        outer_names={
            "nextn.pre_projection": "pre_projection",
            "nextn.post_projection": "post_projection",
        },
        wrapper_class="Gemma4AssistantForCausalLM",
    ),
    "gemma4": GgufArchitecture(
        "Gemma4",
        keys=GEMMA4_KEYS,
        names=GEMMA4_NAMES,
        outer_names={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
    ),
}
