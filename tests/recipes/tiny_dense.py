"""Write tiny random checkpoints of families beyond Llama and Qwen3, made of those by renaming.

Plain torch, safetensors and json; imports nothing from `spd`, like `tests.recipes.tiny`, whose
tensors and tokenizer these are. Further tensors of a family are drawn from (seed, tensor name) too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.recipes import tiny_changes as to
from tests.recipes.tiny import (
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    Tensors,
    model_type,
    write_json,
    write_tensors,
    write_tiny,
)

WINDOW = 24
SLIDING_WINDOW: dict[str, Any] = {"sliding_window": WINDOW}
PAD_TOKEN: dict[str, Any] = {"pad_token_id": 0}
FULL = "full_attention"
SLIDING = "sliding_attention"
GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    **SLIDING_WINDOW,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
GEMMA3: dict[str, Any] = {**GEMMA, "model_type": "gemma3_text"}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
DYNAMIC: dict[str, Any] = {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
TIED_LLAMA: dict[str, Any] = {"architecture": LLAMA}
UNTIED_LLAMA: dict[str, Any] = {"architecture": LLAMA, "tie": False}
TIED_QWEN3: dict[str, Any] = {"architecture": QWEN3}
BIAS: dict[str, Any] = {"attention_bias": True}
BIASED_LLAMA: dict[str, Any] = {**UNTIED_LLAMA, **BIAS}
WITH_ROPE_PARAMETERS: dict[str, Any] = {**TIED_QWEN3, "rope_style": "parameters"}
UNTIED_QWEN3: dict[str, Any] = {**TIED_QWEN3, "tie": False}
AS_NEMOTRON_MOE = partial(to.with_single_blocks, kinds="M*-E")
SPARSE: dict[str, Any] = {"architecture": QWEN3_MOE, "tie": False, "extra": EXPERTS}
DENSE_FIRST: dict[str, Any] = {**SPARSE, "extra": {**EXPERTS, "mlp_only_layers": [0]}}
SPARSE_LAST: dict[str, Any] = {**SPARSE, "extra": {**EXPERTS, "mlp_only_layers": [0, 1, 2]}}
LOCAL: dict[str, Any] = {"num_local_experts": 8, "intermediate_size": 32}
NEMOTRON: dict[str, Any] = {
    "layer_norm_epsilon": 1e-5,
    "hybrid_override_pattern": "M*-M",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 24,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "mlp_hidden_act": "relu2",
    "time_step_min": 0.0,
    "use_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
}
"""`time_step_min` is 0: with another the library bounds the steps of prompts alone."""
NEMOTRON_MOE: dict[str, Any] = {
    **NEMOTRON,
    "hybrid_override_pattern": "M*-E",
    "n_routed_experts": 8,
    "n_group": 1,
    "moe_shared_expert_intermediate_size": 48,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
    "attention_bias": False,
}
GRANITE_GAIN: dict[str, Any] = {"residual_multiplier": 0.7}
GRANITE_HYBRID: dict[str, Any] = {
    **GRANITE,
    "model_type": "granitemoehybrid",
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 4,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "position_embedding_type": "nope",
    "num_local_experts": 0,
    "shared_intermediate_size": 128,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    **SLIDING_WINDOW,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 8.0,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 320,
    "layer_types": [SLIDING, FULL] * 2,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
        SLIDING: {"rope_type": "default", "rope_theta": 200.0},
    },
}
LONG_ORIGINAL = 256
Change = Callable[[Tensors], Tensors]
Family = tuple[dict[str, Any], dict[str, Any], Change]


def family(name: str, shape: dict[str, Any], change: Change = dict, **keys: Any) -> Family:
    """Return the options of `write_tiny`, the keys and the change of tensors of a family.

    name: of its class. change: from a Llama's or Qwen3's tensors; by default none.
    """
    architecture = f"{name}ForCausalLM"
    return (
        shape,
        {"architectures": [architecture], "model_type": model_type(architecture), **keys},
        change,
    )


def with_yarn(base: float) -> dict[str, Any]:
    """Return an untied Llama's options with YaRN."""
    return {**UNTIED_LLAMA, "rope": {"rope_theta": base, **YARN}}


FAMILIES: dict[str, Family] = {
    "mistral": family("Mistral", UNTIED_LLAMA, **SLIDING_WINDOW),
    "qwen2": family(
        "Qwen2",
        {"architecture": LLAMA, "attention_bias": True},
        to.without_output_bias,
        use_sliding_window=True,
        **SLIDING_WINDOW,
        max_window_layers=1,
    ),
    "phi3": family(
        "Phi3",
        UNTIED_LLAMA,
        to.with_fused_matrices,
        partial_rotary_factor=0.75,
        **PAD_TOKEN,
        **SLIDING_WINDOW,
    ),
    "phi3_long": family(
        "Phi3",
        TIED_LLAMA,
        to.with_fused_matrices,
        partial_rotary_factor=0.75,
        **PAD_TOKEN,
        original_max_position_embeddings=LONG_ORIGINAL,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.4, 2.0, 3.0],
            "long_factor": [float(2 + i) for i in range(6)],
        },
    ),
    "gemma2": family(
        "Gemma2",
        TIED_LLAMA,
        to.with_gemma_norms,
        **{**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": family(
        "Gemma3",
        {**TIED_QWEN3, "rope": {"rope_theta": 1e6, **LINEAR}},
        to.with_gemma_norms,
        **{**GEMMA3, "sliding_window_pattern": 3, "rope_local_base_freq": 100.0},
    ),
    "gemma": family(
        "Gemma",
        {**TIED_LLAMA, "kv_heads": 1},
        to.with_zero_centered_norms,
        hidden_act="gelu_pytorch_tanh",
    ),
    "arcee": family(
        "Arcee", with_yarn(1e4), to.with_renamed_parts(gate_proj="none"), hidden_act="relu2"
    ),
    "olmo2": family("Olmo2", UNTIED_LLAMA, to.with_full_width_norms, **PAD_TOKEN),
    "glm": family(
        "Glm", BIASED_LLAMA, to.with_fused_mlp, **BIAS, partial_rotary_factor=0.5, **PAD_TOKEN
    ),
    "cohere": family(
        "Cohere",
        TIED_LLAMA,
        to.with_renamed_parts(post_attention_layernorm="none"),
        layer_norm_eps=1e-5,
        logit_scale=0.7,
        **PAD_TOKEN,
    ),
    "ministral": family(
        "Ministral", UNTIED_LLAMA, **SLIDING_WINDOW, layer_types=[SLIDING, FULL] * 2
    ),
    "smollm3": family(
        "SmolLM3", TIED_LLAMA, model_type="smollm3", no_rope_layers=[1, 0, 1, 0], **PAD_TOKEN
    ),
    "olmo3": family("Olmo3", with_yarn(5e5), to.with_full_width_norms, **SLIDING_WINDOW),
    "granite": family("Granite", TIED_LLAMA, **GRANITE),
    "granite_moe": family(
        "GraniteMoe",
        SPARSE,
        to.with_packed_experts,
        **{**GRANITE, "model_type": "granitemoe", **LOCAL, "num_experts_per_tok": 3},
    ),
    "seed_oss": family(
        "SeedOss", BIASED_LLAMA, to.without_output_bias, **BIAS, attention_out_bias=False
    ),
    "ministral3": family(
        "Ministral3",
        UNTIED_LLAMA,
        rope_theta=None,
        rope_parameters={
            **YARN,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.3,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "glm4": family(
        "Glm4", BIASED_LLAMA, to.with_glm4_norms, **BIAS, partial_rotary_factor=0.5, **PAD_TOKEN
    ),
    "exaone4": family(
        "Exaone4", UNTIED_QWEN3, to.with_only_post_norms, **SLIDING_WINDOW, sliding_window_pattern=2
    ),
    "cohere2": family(
        "Cohere2",
        TIED_LLAMA,
        to.with_renamed_parts(post_attention_layernorm="none"),
        **SLIDING_WINDOW,
        layer_norm_eps=1e-5,
        logit_scale=0.7,
        layer_types=[SLIDING, FULL] * 2,
        **PAD_TOKEN,
    ),
    "gemma4": family("Gemma4", WITH_ROPE_PARAMETERS, to.with_layer_embeddings, **GEMMA4),
    "gemma4_moe": family(
        "Gemma4",
        WITH_ROPE_PARAMETERS,
        partial(to.with_layer_embeddings, sparse=True),
        **GEMMA4,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=32,
    ),
    "muse_glimmer": family(
        "MuseGlimmer",
        {**UNTIED_LLAMA, "rope_style": "parameters"},
        to.with_separate_gates,
        model_type="muse_glimmer_text",
        hidden_activation="silu",
        **SLIDING_WINDOW,
        layer_rope_theta=[0, 1e4, 1e4, 0],
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        qk_scale_factor=1.7,
        output_multiplier=0.7,
        final_logit_softcapping=8.0,
        post_norm_eps=1e-3,
        **PAD_TOKEN,
    ),
    "gpt_oss": family(
        "GptOss",
        {**SPARSE, "attention_bias": True, "heads": 4},
        to.with_sinks,
        attention_bias=True,
        **SLIDING_WINDOW,
        **LOCAL,
        rope_theta=1e4,
        rope_scaling={**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "hunyuan": family(
        "HunYuanDenseV1",
        {**TIED_QWEN3, "rope": DYNAMIC},
        to.with_renamed_parts(q_norm="query_layernorm", k_norm="key_layernorm"),
        model_type="hunyuan_v1_dense",
    ),
    "hunyuan_moe": family(
        "HunYuanMoEV1",
        {**SPARSE, "extra": {"num_experts": 8, "moe_intermediate_size": 32}, "rope": DYNAMIC},
        to.with_shared_mlp,
        model_type="hunyuan_v1_moe",
        moe_topk=[3] * 4,
        moe_intermediate_size=[32] * 4,
        num_shared_expert=[1] * 4,
        intermediate_size=32,
        **PAD_TOKEN,
    ),
    "granite_hybrid": family(
        "GraniteMoeHybrid", TIED_LLAMA, to.with_mamba, **{**GRANITE_HYBRID, **GRANITE_GAIN}
    ),
    "granite_hybrid_moe": family(
        "GraniteMoeHybrid",
        SPARSE,
        partial(to.with_mamba, groups=1),
        **{
            **GRANITE_HYBRID,
            **LOCAL,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
            "layer_types": [f"{kind}_attention" for kind in ("linear", "full", "linear", "linear")],
        },
    ),
    "nemotron_h": family(
        "NemotronH", UNTIED_LLAMA, partial(to.with_single_blocks, kinds="M*-M"), **NEMOTRON
    ),
    "nemotron_h_moe": family("NemotronH", SPARSE_LAST, AS_NEMOTRON_MOE, **NEMOTRON_MOE),
    "nemotron_h_latent": family(
        "NemotronH",
        SPARSE_LAST,
        partial(AS_NEMOTRON_MOE, latent=24),
        **{**NEMOTRON_MOE, "routed_scaling_factor": 2.5, "moe_latent_size": 24},
        mtp_hybrid_override_pattern="*E",
    ),
    "lfm2": family(
        "Lfm2",
        {**TIED_QWEN3, "intermediate": 80},
        to.with_convolutions,
        norm_eps=1e-5,
        conv_L_cache=3,
        block_ff_dim=120,
        block_multiple_of=16,
        full_attn_idxs=[2],
        **PAD_TOKEN,
    ),
    "lfm2_moe": family(
        "Lfm2Moe",
        DENSE_FIRST,
        to.with_convolutions,
        norm_eps=1e-5,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
        tie_embedding=False,
        layer_types=["conv", "conv", FULL, "conv"],
    ),
    "mixtral": family("Mixtral", SPARSE, to.as_mixtral, **LOCAL),
    "step3": family(
        "Step3p5",
        {**DENSE_FIRST, "rope_style": "parameters"},
        to.with_head_gates,
        share_expert_dim=48,
        **SLIDING_WINDOW,
        moe_num_experts=8,
        moe_top_k=3,
        moe_layers_enum="1,2,3",
        moe_router_scaling_factor=1.5,
        rope_parameters=None,
        rope_theta=[1e5, 200.0, 200.0, 1e5],
        partial_rotary_factors=[0.5, 1.0, 1.0, 0.5],
        swiglu_limits=[0.0, 0.0, 0.6, 0.0],
        swiglu_limits_shared=[0.7, 0.0, 0.5, 0.0],
        attention_other_setting={"num_attention_heads": 6},
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        rope_scaling={
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mimo_v2": family(
        "MiMoV2Flash",
        {**DENSE_FIRST, "kv_heads": 1, "rope_style": "parameters"},
        to.with_narrow_values,
        v_head_dim=10,
        **SLIDING_WINDOW,
        n_routed_experts=8,
        layer_types=[FULL, *[SLIDING] * 3],
        mlp_layer_types=["dense", *["sparse"] * 3],
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
            for kind, base in ((FULL, 1e5), (SLIDING, 200.0))
        },
    ),
    "minimax_m2": family(
        "MiniMaxM2",
        SPARSE,
        to.with_routed_norms,
        model_type="minimax_m2",
        rotary_dim=8,
        **LOCAL,
        scoring_func="sigmoid",
        use_qk_norm=True,
        qk_norm_type="per_layer",
        use_routing_bias=True,
        shared_intermediate_size=0,
    ),
    "qwen2_moe": family(
        "Qwen2Moe",
        {**SPARSE, "attention_bias": True},
        to.with_shared_expert,
        qkv_bias=True,
        shared_expert_intermediate_size=48,
        norm_topk_prob=False,
    ),
    "gemma3_listed": family(
        "Gemma3",
        TIED_QWEN3,
        to.with_gemma_norms,
        **{**GEMMA3, "layer_types": [FULL, SLIDING, SLIDING, FULL], "rope_theta": None},
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": base}
            for kind, base in ((FULL, 1e5), (SLIDING, 200.0))
        },
    ),
}


def write_dense(folder: Path, family: str, **options: Any) -> Path:
    """Write one checkpoint of a family, of four layers; return its folder.

    options: those of `write_tiny`, and `config`, further keys of config.json, and `change`, another
    change of tensors than the family's.
    """
    shape, keys, change = FAMILIES[family]
    change = options.pop("change", change)
    config_keys = options.pop("config", {})
    write_tiny(folder, **{"layers": 4} | shape | options)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    renames_experts = {"num_local_experts", "moe_num_experts"} & keys.keys()
    for key in ("attention_bias", "mlp_bias", *(("num_experts",) if renames_experts else ())):
        config.pop(key, None)
    if {"layer_norm_eps", "norm_eps", "layer_norm_epsilon"} & keys.keys():
        config.pop("rms_norm_eps")
    write_json(path, {**config, **keys, **config_keys})
    write_tensors(folder, change(load_file(folder / "model.safetensors")))
    return folder


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NOT_CONVERTED = [f"model.layers.*.{name}" for name in ("self_attn", "mlp.router")]
NOT_CONVERTED += ["model.embed_tokens", "lm_head"]


def quantize_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [E, N, K / 32, 16] and scales [E, N, K / 32] of values [E, N, K].

    A byte has two codes, the first in its low bits.
    """
    groups = values.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    signed_values = torch.cat((E2M1, -E2M1))
    codes = (groups[..., None] / exponent.exp2()[..., None, None] - signed_values).abs().argmin(-1)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).byte(), (exponent + 127).byte()


def write_mxfp4(folder: Path, **options: Any) -> Path:
    """Write a gpt-oss with its experts in MXFP4, as published; return its folder."""
    write_dense(folder, "gpt_oss", **options)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = quantize_mxfp4(tensors.pop(name).mT)
    write_tensors(folder, tensors)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    write_json(folder / "config.json", {**config, "quantization_config": quantization})
    return folder
