"""Latent attention, experts and FP8 blocks in config.json: what is read, and what is refused by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spd.errors import CheckpointError
from spd.formats.block_config import ExpertsConfig, LatentConfig, RouterConfig
from spd.formats.model_config import ModelConfig
from spd.formats.rope_config import RopeConfig
from tests.formats.formats_helpers import write_json
from tests.helpers import read_model_config

DEEPSEEK_V3: dict[str, Any] = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False},
    **{"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0},
    **{"eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu"},
    **{"hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512},
    **{"max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048},
    **{"moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8},
    **{"num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1},
    **{"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    **{"rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"},
    **{"tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc"},
    **{"torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280},
}
DEEPSEEK_V2_LITE = {
    **{k: v for k, v in DEEPSEEK_V3.items() if k != "quantization_config"},
    **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None},
    **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27},
    "first_k_dense_replace": 1,
    **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1},
    **{"topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    **{"moe_intermediate_size": 1408, "routed_scaling_factor": 1.0},
}
GLM4 = {
    **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True},
    **{"first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 10944},
    **{"moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1},
    **{"norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8},
    **{"num_hidden_layers": 46, "num_key_value_heads": 8, "partial_rotary_factor": 0.5},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "routed_scaling_factor": 1.0, "topk_group": 1},
    **{"vocab_size": 151552, "use_qk_norm": False, "max_position_embeddings": 131072},
}
QWEN3_MOE = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_local_experts": 8},
    **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 300},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_experts_per_tok": 2},
}


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    write_json(folder, "config.json", {**config, **changes})
    return read_model_config(folder)


def test_deepseek_v3_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK_V3)
    assert config.latent == LatentConfig(1536, 512, 128, 64, 128, True)
    assert (config.head_dim, config.num_heads, config.fp8_block) == (192, 128, (128, 128))
    assert config.rope == RopeConfig(
        "yarn", 10000.0, 40.0, 4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
    )
    router = RouterConfig(8, True, True, True, 2.5, groups=8, groups_kept=4, group_best=2)
    assert config.experts == ExpertsConfig(256, 2048, 2048, (False,) * 3 + (True,) * 58, router)


def test_deepseek_v2_lite_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK_V2_LITE)
    assert config.latent == LatentConfig(None, 512, 128, 64, 128, True) and config.fp8_block is None
    router = RouterConfig(6, False, False, False, 1.0)
    assert config.experts == ExpertsConfig(64, 1408, 2816, (False,) + (True,) * 26, router)
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    limited = read(tmp_path, DEEPSEEK_V2_LITE, **grouped).experts
    assert limited is not None and (limited.router.groups, limited.router.groups_kept) == (8, 3)
    assert limited.router.group_best == 1


def test_glm_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GLM4)
    assert (config.head_dim, config.rotary_dim, config.qk_norm) == (128, 64, False)
    assert config.attention_bias and config.experts is not None
    assert config.experts.router == RouterConfig(8, True, True, True, 1.0, group_best=2)
    assert read(tmp_path, {**GLM4, "partial_rotary_factor": None}).rotary_dim == 64, "the family's default"
    nested = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25}
    new = {k: v for k, v in GLM4.items() if k not in ("rope_theta", "partial_rotary_factor")}
    assert read(tmp_path, {**new, "rope_parameters": nested}).rotary_dim == 32


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK_V3, {"n_group": 7}, "n_group: 7 does not divide 256"),
        (DEEPSEEK_V3, {"n_group": 256, "topk_group": 256}, "hold one each"),
        (DEEPSEEK_V3, {"topk_group": 9}, "topk_group"),
        (DEEPSEEK_V3, {"n_group": 128, "topk_group": 3}, "3 groups hold fewer than 8"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 257}, "num_experts_per_tok"),
        (DEEPSEEK_V3, {"num_experts_per_tok": None}, "num_experts_per_tok"),
        (DEEPSEEK_V3, {"n_routed_experts": 10**6}, "n_routed_experts"),
        (DEEPSEEK_V3, {"kv_lora_rank": 0}, "kv_lora_rank"),
        (DEEPSEEK_V3, {"q_lora_rank": -1}, "q_lora_rank"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, "odd"),
        (DEEPSEEK_V3, {"v_head_dim": "128"}, "v_head_dim"),
        (DEEPSEEK_V3, {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (DEEPSEEK_V3, {"compression_config": {}}, "compression_config"),
        (DEEPSEEK_V3, {"architectures": ["DeepseekV32ForCausalLM"]}, "sparse-attention indexer"),
        (DEEPSEEK_V3, {"architectures": ["GlmMoeDsaForCausalLM"]}, "sparse-attention indexer"),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob"),
        (DEEPSEEK_V2_LITE, {"topk_method": "noaux_tc"}, "topk_method"),
        (GLM4, {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        (GLM4, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (QWEN3_MOE, {"num_experts": 9}, "num_local_experts: 8 disagrees with num_experts 9"),
        (QWEN3_MOE, {"num_local_experts": None}, "num_experts: is missing"),
    ],
)
def test_what_would_be_another_model_is_refused(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, base, **changes)
    assert words in caught.value.message and "config.json" in caught.value.message
