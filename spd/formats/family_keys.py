"""What `config.json` says in each family: its keys, what absent ones count as, and what values it may have.

A row names every key that the family's files may leave out. Source: the configurations of Hugging Face
transformers, versions 4 and 5, and of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from spd.formats import block_config as blocks
from spd.formats.json_file import Fields


@dataclass(frozen=True)
class FamilyKeys:
    """How the configuration of one family is read."""

    model_type: str
    absent: Mapping[str, object] = field(default_factory=dict)
    """What an absent key counts as, where there are files without it. A family that knows windows, the
    rotation of a part or shared caches has its key."""
    experts: blocks.ExpertsConfig | None = None
    """What no key says of experts."""
    spelled: Callable[[Fields], Mapping[str, object]] | None = None
    """What keys say in a way of the family's own."""
    only: Mapping[str, object] = field(default_factory=dict)
    """The one value that a key may have."""
    switch: str | None = None
    """A key without which there are no experts."""
    recurrent: Callable[[Fields, int], blocks.RecurrentConfig] | None = None
    """What reads of recurrent layers."""
    latent: bool = False
    """True if attention is latent."""
    local_base: str | None = None
    """The key of the rotary base of sliding layers, where these rotate in another way."""
    global_no_rope: bool = False
    """True if layers that see everything do not rotate, in models where others slide."""
    other_types: tuple[str, ...] = ()
    """Other model types of the same text."""


CAUSAL = {
    "Llama": FamilyKeys("llama"),
    "Mistral": FamilyKeys(
        "mistral",
        absent={"max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    ),
    "Phi3": FamilyKeys("phi3", absent={"partial_rotary_factor": 1.0, "sliding_window": None}),
    "Qwen2": FamilyKeys(
        "qwen2",
        absent={"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        other_types=("qwen2_5_vl", "qwen2_5_vl_text"),
    ),
    "Qwen3": FamilyKeys(
        "qwen3",
        absent={"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        other_types=("qwen3_vl_text",),
    ),
    "Qwen3Moe": FamilyKeys("qwen3_moe", absent={"norm_topk_prob": False}, experts=blocks.ROUTED),
    "Arcee": FamilyKeys("arcee", absent={"hidden_act": "relu2"}, only={"hidden_act": "relu2"}),
    "Gemma": FamilyKeys(
        "gemma",
        absent={"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True},
        only={"hidden_act": "gelu_pytorch_tanh"},
    ),
    "Gemma2": FamilyKeys(
        "gemma2",
        absent={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
    ),
    "Gemma3": FamilyKeys(
        "gemma3_text",
        absent={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "head_dim": 256,
            "sliding_window": 4096,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262_208,
        },
        local_base="rope_local_base_freq",
    ),
    "DeepseekV2": FamilyKeys(
        "deepseek_v2",
        absent={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "first_k_dense_replace": 0,
        },
        experts=blocks.ROUTED,
        only={"norm_topk_prob": False, "attention_bias": False},
        latent=True,
    ),
    "DeepseekV3": FamilyKeys(
        "deepseek_v3",
        absent={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
        },
        experts=blocks.SIGMOID,
        only={"attention_bias": False},
        latent=True,
    ),
    "Glm4Moe": FamilyKeys(
        "glm4_moe",
        absent={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
        },
        experts=blocks.SIGMOID,
    ),
    "Glm4MoeLite": FamilyKeys(
        "glm4_moe_lite",
        absent={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
        experts=blocks.SIGMOID,
        only={"attention_bias": False},
        latent=True,
    ),
    "MiMo": FamilyKeys("mimo"),
    "Lfm2": FamilyKeys(
        "lfm2",
        absent={
            "rope_theta": 1_000_000.0,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": True,
        },
        spelled=blocks.lfm2_keys,
        recurrent=partial(blocks.read_recurrent, kinds=blocks.CONVOLVING),
    ),
    "Lfm2Moe": FamilyKeys(
        "lfm2_moe",
        absent={
            "rope_theta": 1_000_000.0,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "first_k_dense_replace": 2,
        },
        experts=blocks.LFM2,
        spelled=blocks.lfm2_keys,
        recurrent=partial(blocks.read_recurrent, kinds=blocks.CONVOLVING),
    ),
    "Qwen3Next": FamilyKeys(
        "qwen3_next",
        absent={
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "partial_rotary_factor": 0.25,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        experts=blocks.SHARED,
        recurrent=partial(blocks.read_recurrent, kinds=blocks.RECURRENT, interleaved=True),
    ),
    "Qwen3_5": FamilyKeys(
        "qwen3_5_text",
        absent={
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "partial_rotary_factor": 0.25,
        },
        recurrent=partial(blocks.read_recurrent, kinds=blocks.RECURRENT),
    ),
    "Qwen3_5Moe": FamilyKeys(
        "qwen3_5_moe_text",
        absent={
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "partial_rotary_factor": 0.25,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        experts=blocks.SHARED,
        recurrent=partial(blocks.read_recurrent, kinds=blocks.RECURRENT),
    ),
    "Ernie4_5": FamilyKeys("ernie4_5", absent={"rope_theta": 500_000.0}),
    "Ernie4_5_Moe": FamilyKeys(
        "ernie4_5_moe",
        absent={"rope_theta": 500_000.0, "first_k_dense_replace": 1},
        experts=blocks.ERNIE,
    ),
    "SmolLM3": FamilyKeys(
        "smollm3",
        absent={
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
        },
    ),
    "Olmo2": FamilyKeys("olmo2"),
    "Olmo3": FamilyKeys(
        "olmo3",
        absent={"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0},
        local_base="rope_theta",
    ),
    "Granite": FamilyKeys(
        "granite",
        absent={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "GraniteMoe": FamilyKeys(
        "granitemoe",
        absent={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        experts=blocks.ROUTED,
    ),
    "GraniteMoeHybrid": FamilyKeys(
        "granitemoehybrid",
        absent={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
            "mamba_conv_bias": True,
            "num_experts": 8,
            "shared_expert_intermediate_size": 1024,
        },
        experts=blocks.GRANITE,
        spelled=blocks.granite_keys,
        switch="num_experts",
        recurrent=partial(blocks.read_recurrent, kinds=blocks.RECURRENT, uses_delta_rule=False),
    ),
    "NemotronH": FamilyKeys(
        "nemotron_h",
        absent={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "head_dim": 128,
            "shared_expert_intermediate_size": 7688,
            "mamba_conv_bias": True,
        },
        experts=blocks.NEMOTRON,
        spelled=blocks.nemotron_keys,
        only={"mlp_bias": False},
        switch="num_experts",
        recurrent=partial(blocks.read_recurrent, kinds=blocks.SINGLE, uses_delta_rule=False),
    ),
    "SeedOss": FamilyKeys("seed_oss", absent={"attention_bias": True, "head_dim": 128}),
    "Ministral": FamilyKeys(
        "ministral", absent={"sliding_window": 4096, "sliding_window_pattern": 1024}
    ),
    "Ministral3": FamilyKeys(
        "ministral3",
        absent={
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-05,
            "sliding_window": None,
            "head_dim": 128,
        },
    ),
    "Glm": FamilyKeys(
        "glm", absent={"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128}
    ),
    "Glm4": FamilyKeys(
        "glm4", absent={"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128}
    ),
    "Exaone4": FamilyKeys(
        "exaone4", absent={"sliding_window": 4096, "sliding_window_pattern": 4}, global_no_rope=True
    ),
    "Cohere": FamilyKeys(
        "cohere",
        absent={"tie_word_embeddings": True, "logit_scale": 0.0625, "rope_theta": 500_000.0},
        only={"use_qk_norm": False},
    ),
    "Cohere2": FamilyKeys(
        "cohere2",
        absent={
            "tie_word_embeddings": True,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        global_no_rope=True,
    ),
    "Gemma4": FamilyKeys(
        "gemma4_text",
        absent={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "head_dim": 256,
            "sliding_window": 512,
            "num_kv_shared_layers": 0,
        },
        experts=blocks.ROUTED,
        switch="enable_moe_block",
        local_base="rope_local_base_freq",
        other_types=("gemma4_unified_text",),
    ),
    "Gemma4Unified": FamilyKeys(
        "gemma4_text",
        absent={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "head_dim": 256,
            "sliding_window": 512,
            "num_kv_shared_layers": 0,
        },
        experts=blocks.ROUTED,
        switch="enable_moe_block",
        local_base="rope_local_base_freq",
        other_types=("gemma4_unified_text",),
    ),
    "MuseGlimmer": FamilyKeys(
        "muse_glimmer_text",
        absent={
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 2048,
            "sliding_window_pattern": 4,
            "hidden_activation": "silu",
            "attention_bias": False,
            "head_dim": 128,
            "post_norm_eps": 1e-08,
            "final_logit_softcapping": 20.0,
            "logit_scale": 0.19611613513818404,
        },
        spelled=blocks.muse_keys,
        only={"hidden_activation": "silu", "attention_bias": False},
    ),
    "GptOss": FamilyKeys(
        "gpt_oss",
        absent={
            "attention_bias": True,
            "rope_theta": 150_000.0,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
        experts=blocks.GPT_OSS,
    ),
    "HunYuanDenseV1": FamilyKeys("hunyuan_v1_dense", absent={"alpha": None}),
    "HunYuanMoEV1": FamilyKeys(
        "hunyuan_v1_moe",
        absent={"alpha": None, "num_experts_per_tok": 1, "shared_expert_intermediate_size": None},
        experts=blocks.ROUTED,
        spelled=blocks.hunyuan_keys,
        only={"use_qk_norm": True},
    ),
    "Mixtral": FamilyKeys(
        "mixtral", absent={"rope_theta": 1_000_000.0, "sliding_window": None}, experts=blocks.ROUTED
    ),
    "MiniMaxM2": FamilyKeys(
        "minimax_m2",
        absent={"rope_theta": 5_000_000.0, "head_dim": 128, "partial_rotary_factor": 1.0},
        experts=blocks.MINIMAX,
        spelled=blocks.minimax_keys,
        only={"use_qk_norm": True, "shared_expert_intermediate_size": 0},
    ),
    "MiMoV2Flash": FamilyKeys(
        "mimo_v2_flash",
        absent={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "rope_theta": 5_000_000.0,
            "swa_rope_theta": 10000.0,
            "head_dim": 192,
            "sliding_window": 129,
            "v_head_dim": 128,
            "sliding_window_pattern": 6,
            "partial_rotary_factor": 0.334,
            "attention_value_scale": 0.707,
            "swa_num_attention_heads": None,
            "swa_num_key_value_heads": None,
        },
        experts=blocks.SIGMOID,
        spelled=blocks.mimo_keys,
        local_base="swa_rope_theta",
    ),
    "Step3p5": FamilyKeys(
        "step3p5",
        absent={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-05,
            "head_dim": 128,
            "partial_rotary_factor": 1.0,
            "sliding_window": 512,
            "sliding_window_pattern": 4,
            "shared_expert_intermediate_size": 1280,
            "swa_num_attention_heads": None,
            "swa_num_key_value_heads": None,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
            "query_pre_attn_scalar": None,
        },
        experts=blocks.SIGMOID,
        spelled=blocks.step_keys,
        local_base="rope_theta",
    ),
    "Qwen2Moe": FamilyKeys(
        "qwen2_moe",
        absent={
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "norm_topk_prob": False,
            "attention_bias": True,
            "shared_expert_intermediate_size": 5632,
        },
        experts=blocks.SHARED,
        only={"qkv_bias": True},
    ),
}
"""Families by their architectures, without ForCausalLM.

Every file of its own says max_position_embeddings and rms_norm_eps: the text's part of another may leave them
out. Of `sliding_window_pattern` layers the last one sees everything.
"""
