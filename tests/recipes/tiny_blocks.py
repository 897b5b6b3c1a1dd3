"""The layers of tiny checkpoints, block by block: matrices and vectors by name, as Hugging Face has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Matrix = tuple[str, int, int, float]
"""Name inside the layer, rows, columns, and how strongly it speaks."""
Vector = tuple[str, tuple[int, ...], float, float]
"""Name inside the layer, shape, standard deviation, mean."""

QWEN_NORMS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
ROUTER_GAIN = 1.5
"""Scores of experts differ, yet several of them matter."""


def attention_matrices(config: Mapping[str, Any], sharpness: float, gain: float) -> Iterator[Matrix]:
    """Latent attention where there is a rank, else queries, keys and values."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        rank, rope, nope = (config[k] for k in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
        value, query = config["v_head_dim"], heads * (nope + rope)
        if config["q_lora_rank"] is None:
            yield "self_attn.q_proj", query, hidden, sharpness
        else:
            yield "self_attn.q_a_proj", config["q_lora_rank"], hidden, 1.0
            yield "self_attn.q_b_proj", query, config["q_lora_rank"], sharpness
        yield "self_attn.kv_a_proj_with_mqa", rank + rope, hidden, sharpness
        yield "self_attn.kv_b_proj", heads * (nope + value), rank, sharpness
        yield "self_attn.o_proj", hidden, heads * value, 1.5 * gain
        return
    query, key = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    projection = 1.0 if normalises_heads(config) else sharpness
    yield "self_attn.q_proj", query, hidden, projection
    yield "self_attn.k_proj", key, hidden, projection
    yield "self_attn.v_proj", key, hidden, 1.0
    yield "self_attn.o_proj", hidden, query, 1.5 * gain


def is_biased(config: Mapping[str, Any], name: str) -> bool:
    """Whether a matrix has a bias in the config's family."""
    architecture = config["architectures"][0]
    if not name.startswith("self_attn"):
        return bool(config.get("mlp_bias")) and "expert" not in name
    if architecture in ("MiMoForCausalLM", "Glm4MoeForCausalLM") and name.endswith("o_proj"):
        return False
    if name.endswith(("q_b_proj", "kv_b_proj")) or ("kv_lora_rank" in config and name.endswith(".q_proj")):
        return False
    return bool(config.get("attention_bias"))


def normalises_heads(config: Mapping[str, Any]) -> bool:
    """Whether queries and keys are normalised per head."""
    return config["architectures"][0] in QWEN_NORMS or bool(config.get("use_qk_norm"))


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has routed experts."""
    if "moe_k" in config:
        return bool(layer >= config["moe_layer_start_index"])
    if "num_experts" in config:
        return layer not in config.get("mlp_only_layers", ())
    return "n_routed_experts" in config and layer >= config["first_k_dense_replace"]


def _experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Routed experts, and shared ones."""
    if "moe_k" in config:
        return config["moe_num_experts"], config["moe_num_shared_experts"]
    return config.get("num_experts") or config["n_routed_experts"], config.get("n_shared_experts", 0)


def mlp_matrices(config: Mapping[str, Any], layer: int, gain: float) -> Iterator[Matrix]:
    """Gate, up and down; of every expert where the layer has them."""
    hidden = config["hidden_size"]

    def gated(block: str, inner: int) -> Iterator[Matrix]:
        yield f"{block}.gate_proj", inner, hidden, 1.5
        yield f"{block}.up_proj", inner, hidden, 1.0
        yield f"{block}.down_proj", hidden, inner, 1.5 * gain

    if not is_sparse(config, layer):
        yield from gated("mlp", config["intermediate_size"])
        return
    routed, shared = _experts(config)
    inner = config["moe_intermediate_size"]
    yield "mlp.gate", routed, hidden, ROUTER_GAIN
    for expert in range(routed):
        yield from gated(f"mlp.experts.{expert}", inner)
    if shared:
        yield from gated("mlp.shared_experts", shared * inner)


def vectors(config: Mapping[str, Any], layer: int, sharpness: float) -> Iterator[Vector]:
    """Norms, and the corrections of routers."""
    hidden = (config["hidden_size"],)
    yield "input_layernorm.weight", hidden, 0.1, 1.0
    yield "post_attention_layernorm.weight", hidden, 0.1, 1.0
    if normalises_heads(config):
        yield "self_attn.q_norm.weight", (config["head_dim"],), 0.1, sharpness
        yield "self_attn.k_norm.weight", (config["head_dim"],), 0.1, sharpness
    if "kv_lora_rank" in config:
        yield "self_attn.kv_a_layernorm.weight", (config["kv_lora_rank"],), 0.1, 1.0
        if config["q_lora_rank"] is not None:
            yield "self_attn.q_a_layernorm.weight", (config["q_lora_rank"],), 0.1, 1.0
    if is_sparse(config, layer) and "moe_k" in config:
        yield "mlp.moe_statics.e_score_correction_bias", (1, config["moe_num_experts"]), 0.1, 0.0
    elif is_sparse(config, layer) and config.get("topk_method") == "noaux_tc":
        yield "mlp.gate.e_score_correction_bias", (config["n_routed_experts"],), 0.1, 0.0
