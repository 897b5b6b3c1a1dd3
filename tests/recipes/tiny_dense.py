"""Tiny random checkpoints of the dense families beyond Llama and Qwen3, made of those by renaming.

Plain torch, safetensors and json; imports nothing from `spd`, as `tests.recipes.tiny`, whose tensors and
tokenizer these are. What a family has besides is drawn here, from (seed, tensor name) too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.recipes.tiny import LLAMA, QWEN3, drawn, write_json, write_tensors, write_tiny

Tensors = dict[str, torch.Tensor]
WINDOW = 24
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def unchanged(tensors: Tensors) -> Tensors:
    """As Llama has them."""
    return tensors


def without_output_bias(tensors: Tensors) -> Tensors:
    """Biases of queries, keys and values only."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("o_proj.bias")}


def with_gemma_norms(tensors: Tensors) -> Tensors:
    """Four norms a layer, every scale stored as its distance from 1; those behind a block speak softly."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("post_attention_layernorm.weight"):
            prefix = name.removesuffix("post_attention_layernorm.weight")
            found[f"{prefix}pre_feedforward_layernorm.weight"] = tensor - 1
            for number, behind in enumerate(("post_attention_layernorm", "post_feedforward_layernorm")):
                found[f"{prefix}{behind}.weight"] = tensor.roll(number + 1) * 0.4 - 1
        else:
            found[name] = tensor - 1 if name.endswith("norm.weight") else tensor
    return found


def fused(tensors: Tensors) -> Tensors:
    """Queries, keys and values in one tensor; gate and up in another."""
    found = dict(tensors)
    for name in tensors:
        for first, others, whole in (
            ("q_proj", ("k_proj", "v_proj"), "qkv_proj"),
            ("gate_proj", ("up_proj",), "gate_up_proj"),
        ):
            if f".{first}." in name:
                names = [name, *(name.replace(first, other) for other in others)]
                found[name.replace(first, whole)] = torch.cat([found.pop(part) for part in names])
    return found


def renamed(**names: str) -> Callable[[Tensors], Tensors]:
    """Parts of names, by what stands for them; None in place of one takes the tensor away."""

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            for old, new in names.items():
                name = name.replace(f".{old}.", f".{new}.")
            if ".none." not in name:
                found[name] = tensor
        return found

    return change


def with_post_norms_alone(tensors: Tensors) -> Tensors:
    """Two norms a layer, both behind a block."""
    names = {
        "post_attention_layernorm": "post_feedforward_layernorm",
        "input_layernorm": "post_attention_layernorm",
    }
    found = renamed(**names)(tensors)
    return {name: t * 0.4 if "layernorm" in name else t for name, t in found.items()}


def with_whole_norms(tensors: Tensors) -> Tensors:
    """As above; one norm over all heads of queries, and of keys."""
    found = with_post_norms_alone(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            norm = name.replace("_proj", "_norm")
            found[norm] = drawn(norm, tensor.shape[:1], 0.2, 1.4)
    return found


def with_glm4_norms(tensors: Tensors) -> Tensors:
    """Four norms a layer; gate and up in one tensor."""
    found = without_output_bias(tensors)
    for name, tensor in tensors.items():
        if name.endswith("input_layernorm.weight"):
            for number, behind in enumerate(("post_self_attn_layernorm", "post_mlp_layernorm")):
                found[name.replace("input_layernorm", behind)] = tensor.roll(number + 1) * 0.4
    both = fused({name: t for name, t in found.items() if "mlp" in name})
    return {**{name: t for name, t in found.items() if ".mlp." not in name}, **both}


def with_shared_expert(tensors: Tensors) -> Tensors:
    """Biases of queries, keys and values, no norms of heads, and a gated expert for every row."""
    found = renamed(q_norm="none", k_norm="none")(without_output_bias(tensors))
    for name in [name for name in found if name.endswith("mlp.gate.weight")]:
        stem, hidden = name.removesuffix("gate.weight"), found[name].shape[1]
        found[f"{stem}shared_expert_gate.weight"] = drawn(f"{stem}sg", (1, hidden), 0.2)
        for part, shape in (("gate", (48, hidden)), ("up", (48, hidden)), ("down", (hidden, 48))):
            own = f"{stem}shared_expert.{part}_proj.weight"
            found[own] = drawn(own, shape, 1.2 / shape[1] ** 0.5)
    return found


MIXTRAL = {
    **{"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    **{"q_norm": "none", "k_norm": "none"},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SPARSE = {"architecture": "Qwen3MoeForCausalLM", "tie": False, "extra": EXPERTS}


def packed_experts(tensors: Tensors) -> Tensors:
    """Every expert in two tensors, under Granite's names."""
    found = renamed(q_norm="none", k_norm="none")(tensors)
    for name in [name for name in found if name.endswith("mlp.gate.weight")]:
        stem = name.removesuffix("mlp.gate.weight")
        own = [f"{stem}mlp.experts.{i}." for i in range(found[name].shape[0])]
        each = {part: [found.pop(f"{e}{part}_proj.weight") for e in own] for part in ("gate", "up", "down")}
        block = f"{stem}block_sparse_moe."
        first = torch.cat((torch.stack(each["gate"]), torch.stack(each["up"])), 1)
        found[f"{block}router.layer.weight"] = found.pop(name)
        found[f"{block}input_linear.weight"] = first
        found[f"{block}output_linear.weight"] = torch.stack(each["down"])
    return found


def with_sinks(tensors: Tensors) -> Tensors:
    """gpt-oss: sinks, biases everywhere, experts packed with inputs before outputs, gate and up in turn."""
    found = renamed(q_norm="none", k_norm="none")(tensors)
    for name in [name for name in found if name.endswith("mlp.gate.weight")]:
        stem = name.removesuffix("mlp.gate.weight")
        router = found.pop(name)
        count = router.shape[0]
        each = {
            part: torch.stack([found.pop(f"{stem}mlp.experts.{i}.{part}_proj.weight") for i in range(count)])
            for part in ("gate", "up", "down")
        }
        both = torch.stack((each["gate"] * 2, each["up"] * 2), 2).flatten(1, 2)
        block = f"{stem}mlp.experts."
        found[f"{stem}mlp.router.weight"] = router
        found[f"{stem}mlp.router.bias"] = drawn(f"{stem}router.bias", (count,), 0.5)
        found[f"{block}gate_up_proj"] = both.mT.contiguous()
        found[f"{block}down_proj"] = each["down"].mT.contiguous()
        for part, width in (("gate_up", both.shape[1]), ("down", each["down"].shape[1])):
            found[f"{block}{part}_proj_bias"] = drawn(f"{block}{part}", (count, width), 0.3)
        found[f"{stem}self_attn.sinks"] = drawn(f"{stem}sinks", (4,), 1.0, 1.0)
        found[f"{stem}self_attn.o_proj.bias"] = drawn(f"{stem}o", (router.shape[1],), 0.1)
    return found


def with_sides(tensors: Tensors, sparse: bool = False) -> Tensors:
    """Gemma 4: every second layer wider, the last two without keys of their own, embeddings of layers."""
    found = {n: t + 1 if n.endswith("norm.weight") else t for n, t in with_gemma_norms(tensors).items()}
    width, hidden, experts = 12, 64, 8

    def draw(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        found[name] = drawn(name, shape, std, mean)

    for layer in range(4):
        stem, wide, shares = f"model.layers.{layer}.", bool(layer % 2), layer > 1
        size = 32 if wide else 16
        if wide:
            for name, rows in (("q", 4), ("k", 1), ("v", 1)):
                draw(f"{stem}self_attn.{name}_proj.weight", (rows * size, hidden), hidden**-0.5)
            draw(f"{stem}self_attn.o_proj.weight", (hidden, 4 * size), 1.5 / (4 * size) ** 0.5)
            draw(f"{stem}self_attn.k_norm.weight", (size,), 0.2, 1.4)
        draw(f"{stem}self_attn.q_norm.weight", (size,), 0.1, 1.4 * size**-0.5)
        for name in (*(("k_proj", "v_proj", "k_norm") if shares else ()), *(("v_proj",) if wide else ())):
            found.pop(f"{stem}self_attn.{name}.weight", None)
        if shares:
            for name, shape in (("gate", (256, hidden)), ("up", (256, hidden)), ("down", (hidden, 256))):
                draw(f"{stem}mlp.{name}_proj.weight", shape, 1.4 / shape[1] ** 0.5)
        draw(f"{stem}layer_scalar", (1,), 0.05, 0.9)
        draw(f"{stem}per_layer_input_gate.weight", (width, hidden), 0.2)
        draw(f"{stem}per_layer_projection.weight", (hidden, width), 0.4)
        draw(f"{stem}post_per_layer_input_norm.weight", (hidden,), 0.05, 0.4)
        if sparse:
            draw(f"{stem}router.scale", (hidden,), 0.1, 1.0)
            draw(f"{stem}router.proj.weight", (experts, hidden), 1.5)
            draw(f"{stem}router.per_expert_scale", (experts,), 0.2, 1.0)
            draw(f"{stem}experts.gate_up_proj", (experts, 64, hidden), 1.2 / hidden**0.5)
            draw(f"{stem}experts.down_proj", (experts, hidden, 32), 1.5 / 32**0.5)
            for name in (
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
            ):
                draw(f"{stem}{name}.weight", (hidden,), 0.1, 0.8)
    draw("model.embed_tokens_per_layer.weight", (320, 4 * width), 0.3)
    draw("model.per_layer_model_projection.weight", (4 * width, hidden), 2.0)
    draw("model.per_layer_projection_norm.weight", (width,), 0.1, 1.0)
    return found


def with_convolutions(tensors: Tensors) -> Tensors:
    """LFM2: every layer but each third one convolves; norms and projections under its own names."""
    names = {"input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj", "mlp": "feed_forward"}
    names |= {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "norm": "embedding_norm"}
    found = renamed(**names)(tensors)
    for name in [name for name in found if name.endswith("self_attn.out_proj.weight")]:
        stem, hidden = name.removesuffix("self_attn.out_proj.weight"), len(found[name])
        if int(stem.split(".")[2]) % 3 != 2:
            found[f"{stem}conv.out_proj.weight"] = found[name]
            found = {each: t for each, t in found.items() if not each.startswith(f"{stem}self_attn.")}
            found[f"{stem}conv.in_proj.weight"] = drawn(f"{stem}in", (3 * hidden, hidden), 1.5 / hidden**0.5)
            found[f"{stem}conv.conv.weight"] = drawn(f"{stem}conv", (hidden, 1, 3), 0.7)
        if f"{stem}feed_forward.gate.weight" in found:
            found[f"{stem}feed_forward.expert_bias"] = drawn(f"{stem}bias", (8,), 0.1)
    return found


def with_mamba(tensors: Tensors, groups: int = 2) -> Tensors:
    """Granite 4: all layers but one are Mamba-2's, with 8 heads of 16; gate and up of the MLP are one."""
    both = fused({name: t for name, t in tensors.items() if "mlp.gate_proj" in name or "mlp.up_proj" in name})
    found = packed_experts(
        {**{n: t for n, t in tensors.items() if "mlp.gate_p" not in n and "mlp.up_p" not in n}, **both}
    )
    for name in [name for name in found if name.endswith("mlp.gate_up_proj.weight")]:
        stem = name.removesuffix("mlp.gate_up_proj.weight")
        found[f"{stem}shared_mlp.input_linear.weight"] = found.pop(name)
        found[f"{stem}shared_mlp.output_linear.weight"] = found.pop(f"{stem}mlp.down_proj.weight")
    for name in [name for name in found if name.endswith("block_sparse_moe.router.layer.weight")]:
        stem, hidden = name.removesuffix("block_sparse_moe.router.layer.weight"), found[name].shape[1]
        for part, shape in (("input", (96, hidden)), ("output", (hidden, 48))):
            own = f"{stem}shared_mlp.{part}_linear.weight"
            found[own] = drawn(own, shape, 1.2 / shape[1] ** 0.5)
    for name in [name for name in found if name.endswith("self_attn.o_proj.weight")]:
        stem = name.removesuffix("self_attn.o_proj.weight")
        if int(stem.split(".")[2]) != 1:
            gain = found[name].std() * len(found[name]) ** 0.5
            found = {each: t for each, t in found.items() if not each.startswith(f"{stem}self_attn.")}
            found |= mamba(f"{stem}mamba.", 64, 8, 16, groups, 24, float(gain))
    return found


def mamba(stem: str, hidden: int, heads: int, size: int, groups: int, state: int, gain: float) -> Tensors:
    """One Mamba-2 layer's tensors, every one of which matters."""
    inner, channels = heads * size, heads * size + 2 * groups * state
    shapes: dict[str, tuple[tuple[int, ...], float, float]] = {
        "in_proj.weight": ((inner + channels + heads, hidden), 1.2 / hidden**0.5, 0.0),
        "conv1d.weight": ((channels, 1, 4), 0.5, 0.0),
        "conv1d.bias": ((channels,), 0.2, 0.0),
        "A_log": ((heads,), 0.7, 0.3),
        "dt_bias": ((heads,), 1.0, -1.0),
        "D": ((heads,), 0.5, 1.0),
        "norm.weight": ((inner,), 0.2, 1.0),
        "out_proj.weight": ((hidden, inner), gain / inner**0.5, 0.0),
    }
    return {stem + name: drawn(stem + name, *how) for name, how in shapes.items()}


GRANITE_HYBRID = {
    **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"},
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "attention_bias": False},
    **{"position_embedding_type": "nope", "num_local_experts": 0, "shared_intermediate_size": 128},
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}
LFM2 = {
    **{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "norm_eps": 1e-5, "conv_L_cache": 3},
    **{"block_ff_dim": 120, "block_multiple_of": 16, "full_attn_idxs": [2], "pad_token_id": 0},
}
GEMMA4 = {
    **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "sliding_window": WINDOW},
    **{"hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 8.0, "global_head_dim": 32},
    **{"num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2},
    **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 320},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
    },
}
GRANITE = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    **{"attention_multiplier": 0.2, "attention_bias": False},
}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "partial_rotary_factor": 0.75,
    "pad_token_id": 0,
}
LONG_ORIGINAL = 256
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "mistral": (
        {"architecture": LLAMA, "tie": False},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
        unchanged,
    ),
    "qwen2": (
        {"architecture": LLAMA, "attention_bias": True},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
        without_output_bias,
    ),
    "phi3": ({"architecture": LLAMA, "tie": False}, {**PHI3, "sliding_window": WINDOW}, fused),
    "phi3_long": (
        {"architecture": LLAMA},
        {
            **PHI3,
            "original_max_position_embeddings": LONG_ORIGINAL,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.4, 2.0, 3.0],
                "long_factor": [float(2 + i) for i in range(6)],
            },
        },
        fused,
    ),
    "gemma2": (
        {"architecture": LLAMA},
        {
            **GEMMA,
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
        with_gemma_norms,
    ),
    "gemma3": (
        {"architecture": QWEN3, "rope": {"rope_theta": 1e6, **LINEAR}},
        {
            **GEMMA,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "sliding_window_pattern": 3,
            "rope_local_base_freq": 100.0,
        },
        with_gemma_norms,
    ),
    "smollm3": (
        {"architecture": LLAMA},
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "no_rope_layers": [1, 0, 1, 0],
            "pad_token_id": 0,
        },
        unchanged,
    ),
    "olmo3": (
        {"architecture": LLAMA, "tie": False, "rope": {"rope_theta": 5e5, **YARN}},
        {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": WINDOW},
        with_whole_norms,
    ),
    "granite": (
        {"architecture": LLAMA},
        {**GRANITE, "architectures": ["GraniteForCausalLM"], "model_type": "granite"},
        unchanged,
    ),
    "granite_moe": (
        SPARSE,
        {
            **GRANITE,
            "architectures": ["GraniteMoeForCausalLM"],
            "model_type": "granitemoe",
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
        },
        packed_experts,
    ),
    "seed_oss": (
        {"architecture": LLAMA, "attention_bias": True, "tie": False},
        {
            "architectures": ["SeedOssForCausalLM"],
            "model_type": "seed_oss",
            "attention_bias": True,
            "attention_out_bias": False,
        },
        without_output_bias,
    ),
    "ministral3": (
        {"architecture": LLAMA, "tie": False},
        {
            "architectures": ["Ministral3ForCausalLM"],
            "model_type": "ministral3",
            "rope_theta": None,
            "rope_parameters": {
                **{**YARN, "original_max_position_embeddings": 64, "rope_theta": 1e4},
                **{"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        },
        unchanged,
    ),
    "glm4": (
        {"architecture": LLAMA, "attention_bias": True, "tie": False},
        {
            "architectures": ["Glm4ForCausalLM"],
            "model_type": "glm4",
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "pad_token_id": 0,
        },
        with_glm4_norms,
    ),
    "exaone4": (
        {"architecture": QWEN3, "tie": False},
        {
            "architectures": ["Exaone4ForCausalLM"],
            "model_type": "exaone4",
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
        with_post_norms_alone,
    ),
    "cohere2": (
        {"architecture": LLAMA},
        {
            "architectures": ["Cohere2ForCausalLM"],
            "model_type": "cohere2",
            "sliding_window": WINDOW,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "pad_token_id": 0,
        },
        renamed(post_attention_layernorm="none"),
    ),
    "gemma4": ({"architecture": QWEN3, "rope_style": "parameters"}, GEMMA4, with_sides),
    "gemma4_moe": (
        {"architecture": QWEN3, "rope_style": "parameters"},
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
        partial(with_sides, sparse=True),
    ),
    "gpt_oss": (
        {**SPARSE, "attention_bias": True, "heads": 4},
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "sliding_window": WINDOW,
            "num_local_experts": 8,
            "intermediate_size": 32,
            "rope_theta": 1e4,
            "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
        with_sinks,
    ),
    "hunyuan": (
        {
            "architecture": QWEN3,
            "rope": {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
        {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"},
        renamed(q_norm="query_layernorm", k_norm="key_layernorm"),
    ),
    "granite_hybrid": (
        {"architecture": LLAMA},
        {**GRANITE, **GRANITE_HYBRID, "residual_multiplier": 0.7},
        with_mamba,
    ),
    "granite_hybrid_moe": (
        SPARSE,
        {
            **{**GRANITE, **GRANITE_HYBRID, "position_embedding_type": "rope", "mamba_n_groups": 1},
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
            **{
                "shared_intermediate_size": 48,
                "layer_types": ["linear_attention", "full_attention"] + ["linear_attention"] * 2,
            },
        },
        partial(with_mamba, groups=1),
    ),
    "lfm2": ({"architecture": QWEN3, "intermediate": 80}, LFM2, with_convolutions),
    "lfm2_moe": (
        {"architecture": "Qwen3MoeForCausalLM", "extra": {**EXPERTS, "mlp_only_layers": [0]}, "tie": False},
        {
            **{"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "norm_eps": 1e-5},
            **{"num_dense_layers": 1, "routed_scaling_factor": 1.5, "tie_embedding": False},
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        with_convolutions,
    ),
    "mixtral": (
        SPARSE,
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": 8,
            "intermediate_size": 32,
        },
        renamed(**MIXTRAL),
    ),
    "qwen2_moe": (
        {**SPARSE, "attention_bias": True},
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "qkv_bias": True,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
        },
        with_shared_expert,
    ),
    "gemma3_listed": (
        {"architecture": QWEN3},
        {
            **GEMMA,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "rope_theta": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
            },
        },
        with_gemma_norms,
    ),
}


def write_dense(folder: Path, family: str, **options: Any) -> Path:
    """Write one checkpoint of a family, of four layers; options are `write_tiny`'s, and `config`: keys of
    config.json on top. Returns its folder."""
    shape, keys, change = FAMILIES[family]
    extra = options.pop("config", {})
    write_tiny(folder, **{"layers": 4, **shape, **options})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("attention_bias", "mlp_bias", *(("num_experts",) if "num_local_experts" in keys else ())):
        config.pop(key, None)
    if "layer_norm_eps" in keys or "norm_eps" in keys:
        config.pop("rms_norm_eps")
    write_json(path, {**config, **keys, **extra})
    write_tensors(folder, change(load_file(folder / "model.safetensors")))
    return folder


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NOT_CONVERTED = [f"model.layers.*.{name}" for name in ("self_attn", "mlp.router")]
NOT_CONVERTED += ["model.embed_tokens", "lm_head"]


def mxfp4(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [E, N, K / 32, 16], the first of two low, and scales [E, N, K / 32] near values [E, N, K]."""
    groups = wide.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    values = torch.cat((E2M1, -E2M1))
    codes = (groups[..., None] / exponent.exp2()[..., None, None] - values).abs().argmin(-1)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).byte(), (exponent + 127).byte()


def write_mxfp4(folder: Path, **options: Any) -> Path:
    """Write a gpt-oss as it is published: its experts in MXFP4. Returns its folder."""
    write_dense(folder, "gpt_oss", **options)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4(tensors.pop(name).mT)
    write_tensors(folder, tensors)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    how = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    write_json(folder / "config.json", {**config, "quantization_config": how})
    return folder
