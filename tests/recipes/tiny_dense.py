"""Tiny random checkpoints of the dense families beyond Llama and Qwen3, made of those by renaming.

Plain torch, safetensors and json; imports nothing from `spd`, as `tests.recipes.tiny`, whose tensors and
tokenizer these are. What a family has besides is drawn here, from (seed, tensor name) too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.recipes.tiny import LLAMA, QWEN3, write_json, write_tensors, write_tiny

Tensors = dict[str, torch.Tensor]
WINDOW = 24
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
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
    for key in ("attention_bias", "mlp_bias"):
        config.pop(key, None)
    write_json(path, {**config, **keys, **extra})
    write_tensors(folder, change(load_file(folder / "model.safetensors")))
    return folder
