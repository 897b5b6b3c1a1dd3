"""Layers that keep a state or the latest inputs in config.json: what is read and refused, by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spd.errors import CheckpointError
from spd.formats.block_config import ConvConfig, DeltaConfig, ExpertsConfig, RouterConfig
from tests.formats import test_formats_model_config
from tests.formats.formats_helpers import refused


def read(folder: Path, config: dict, **changes: Any) -> Any:
    return test_formats_model_config.read(folder, {**config, **changes})


LFM2: dict[str, Any] = {
    **{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True},
    **{"block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256},
    **{"bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "eos_token_id": 7},
    **{"full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000},
    **{"norm_eps": 1e-5, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8},
    **{"pad_token_id": 0, "rope_theta": 1e6, "torch_dtype": "bfloat16", "vocab_size": 65536},
}
LFM2_MOE: dict[str, Any] = {
    **{"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "hidden_size": 2048},
    **{"intermediate_size": 7168, "moe_intermediate_size": 1792, "num_hidden_layers": 4, "conv_L_cache": 3},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_dense_layers": 2, "num_experts": 32},
    **{"num_experts_per_tok": 4, "norm_topk_prob": True, "use_expert_bias": True, "norm_eps": 1e-5},
    **{"routed_scaling_factor": 1.0, "tie_embedding": True, "vocab_size": 65536, "rope_theta": 1e6},
    **{"layer_types": ["conv", "conv", "full_attention", "conv"], "max_position_embeddings": 128000},
}
"""The sizes are the defaults of `transformers`' classes, or those that their pages name."""
GRANITE: dict[str, Any] = {
    **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"},
    **{"attention_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12},
    **{"hidden_size": 1536, "intermediate_size": 512, "logits_scaling": 6, "mamba_chunk_size": 256},
    **{"mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128},
    **{"mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False},
    **{"max_position_embeddings": 131072, "num_attention_heads": 12, "num_experts_per_tok": 6},
    **{"num_hidden_layers": 4, "num_key_value_heads": 4, "num_local_experts": 64, "rms_norm_eps": 1e-5},
    **{"position_embedding_type": "nope", "residual_multiplier": 0.22, "rope_theta": 10000},
    **{"shared_intermediate_size": 1024, "tie_word_embeddings": True, "vocab_size": 100352},
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
}
"""As Granite 4.0 H Tiny's, with fewer layers."""
NEMOTRON: dict[str, Any] = {
    **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False},
    **{"chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128, "hidden_size": 2688},
    **{"hybrid_override_pattern": "MEM*E-", "intermediate_size": 1856, "layer_norm_epsilon": 1e-5},
    **{"mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False},
    **{"max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2", "n_group": 1},
    **{"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_groups": 8},
    **{"n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32},
    **{"num_experts_per_tok": 6, "num_hidden_layers": 6, "num_key_value_heads": 2, "rope_theta": 10000},
    **{"routed_scaling_factor": 2.5, "ssm_state_size": 128, "time_step_limit": [0.0, float("inf")]},
    **{"time_step_min": 0.001, "topk_group": 1, "use_bias": False, "use_conv_bias": True},
    **{"vocab_size": 131072, "tie_word_embeddings": False},
}
"""As Nemotron 3 Nano's, with fewer layers; json writes its limit as Infinity."""
KINDS = ["linear_attention", "moe", "linear_attention", "full_attention", "moe", "mlp"]
MAMBA = {"layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]}


def test_lfm2_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2)
    convolves = tuple(layer not in LFM2["full_attn_idxs"] for layer in range(16))
    assert config.recurrent == ConvConfig(3, convolves)
    assert (config.intermediate_size, config.head_dim, config.rms_norm_eps) == (8192, 64, 1e-5)
    assert config.tie_embeddings and not config.attention_bias
    kinds = ["conv" if one else "full_attention" for one in convolves]
    listed = {**LFM2, "layer_types": kinds, "full_attn_idxs": None, "intermediate_size": 12288}
    assert read(tmp_path, {**listed, "block_ff_dim": None}) == config, "as the library writes it"
    given = {"block_auto_adjust_ff_dim": False, "tie_embedding": False}
    assert read(tmp_path, LFM2, **given).intermediate_size == 12288
    assert not read(tmp_path, LFM2, **given).tie_embeddings


def test_lfm2_with_experts_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2_MOE)
    assert config.recurrent == ConvConfig(3, (True, True, False, True)) and config.intermediate_size == 7168
    router = RouterConfig(4, True, True, True, 1.0, group_best=2, added=1e-6)
    sparse = (False, False, True, True)
    assert config.experts == ExpertsConfig(32, 1792, 0, sparse, router, "expert_bias")


def test_granite_hybrids_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE)
    kept = (True, True, False, True)
    assert config.recurrent == DeltaConfig(4, 1, 48, 128, 64, kept, corrects=False, conv_bias=True)
    router = RouterConfig(6, False, False, True)
    assert config.experts == ExpertsConfig(64, 512, 1024, (True,) * 4, router, shared_name="shared_mlp")
    assert config.still == (True,) * 4 and config.tie_embeddings
    assert read(tmp_path, GRANITE, **MAMBA) == config, "as the library writes it"
    listed = {"layer_types": None, "layers_block_type": GRANITE["layer_types"], "mamba_d_head": "auto"}
    assert read(tmp_path, GRANITE, **listed) == config
    dense = read(tmp_path, GRANITE, num_local_experts=0, position_embedding_type="rope")
    assert dense.experts is None and dense.intermediate_size == 1024 and not dense.still


def test_nemotron_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, NEMOTRON)
    assert isinstance(config.recurrent, DeltaConfig)
    scans = tuple(kind == KINDS[0] for kind in KINDS)
    assert config.recurrent.single == tuple(KINDS) and config.recurrent.layers == scans
    sizes = config.recurrent.key_heads, config.recurrent.value_heads, config.recurrent.key_dim
    assert sizes == (8, 64, 128) and config.num_layers == 6 and config.still == (True,) * 6
    router = RouterConfig(6, True, True, True, 2.5, group_best=2)
    shared = {"shared_name": "shared_experts", "plain": True}
    assert config.experts == ExpertsConfig(128, 1856, 3712, (True,) * 6, router, **shared)
    older = [{"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind) for kind in KINDS]
    listed = {"hybrid_override_pattern": None, "num_hidden_layers": None, "layers_block_type": older}
    assert read(tmp_path, NEMOTRON, **listed) == config
    assert read(tmp_path, NEMOTRON, hybrid_override_pattern="M*-M").experts is None


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (LFM2, {"full_attn_idxs": [2, 16]}, "full_attn_idxs"),
        (LFM2, {"full_attn_idxs": []}, "full_attn_idxs: no layer is full_attention"),
        (LFM2, {"full_attn_idxs": None}, "layer_types: is missing"),
        (LFM2, {"layer_types": ["conv"] * 15}, "layer_types: is not a list of 16 names"),
        (LFM2, {"layer_types": ["conv", "mamba"] * 8}, "layer_types: 'mamba' is not supported"),
        (LFM2, {"conv_L_cache": 1}, "conv_L_cache: 1 is not a whole number"),
        (LFM2, {"conv_bias": True}, "conv_bias: true is not supported"),
        (LFM2, {"block_ff_dim": 0}, "block_ff_dim"),
        (LFM2, {"block_multiple_of": 0}, "block_multiple_of"),
        (LFM2_MOE, {"use_expert_bias": False}, "use_expert_bias: false is not supported"),
        (NEMOTRON, {"hybrid_override_pattern": "MX*"}, "hybrid_override_pattern: 'X' is not supported"),
        (NEMOTRON, {"hybrid_override_pattern": "*E-"}, "no layer is linear_attention"),
        (NEMOTRON, {"n_routed_experts": None}, "num_experts: is missing"),
        (NEMOTRON, {"mamba_dt_limit": [0.0, 1.0]}, "mamba_dt_limit"),
        (NEMOTRON, {"hybrid_override_pattern": "ME-"}, "no layer is full_attention"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act: 'silu' is not supported"),
        (NEMOTRON, {"moe_latent_size": 0}, "moe_latent_size"),
        (NEMOTRON, {"use_bias": True}, "use_bias: true is not supported"),
        (NEMOTRON, {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        (GRANITE, {"layer_types": ["mamba"] * 4}, "layer_types: no layer is full_attention"),
        (GRANITE, {"layer_types": None}, "layer_types: is missing"),
        (GRANITE, {"layer_types": ["mamba", "conv", "attention", "mamba"]}, "'conv' is not supported"),
        (GRANITE, {"mamba_n_groups": 5}, "mamba_n_groups: 5 does not divide 48 heads"),
        (GRANITE, {"mamba_proj_bias": True}, "mamba_proj_bias: true is not supported"),
        (GRANITE, {"mamba_d_state": 512}, "mamba_d_state: 512 is not a whole number"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (GRANITE, {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        (LFM2_MOE, {"num_experts": None}, "num_experts: is missing"),
    ],
)
def test_what_would_be_another_model(tmp_path: Path, base: dict, changes: dict, words: str) -> None:
    with refused(CheckpointError, "config.json", words):
        read(tmp_path, base, **changes)
