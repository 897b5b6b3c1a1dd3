"""Hugging Face folders of the demo's models, written and read back (`fp8_twin.py` quantises them)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.recipes.demo_model import Decoder, DeepseekShape, Shape

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
SUMMED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
MTP_NAMES = {"mtp.norm.": "shared_head.norm.", "mtp.block.": "", "mtp.": ""}


def qwen3_config(shape: Shape) -> dict[str, Any]:
    """The architecture's part of a Qwen3 config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
    }


def deepseek_config(shape: DeepseekShape) -> dict[str, Any]:
    """The architecture's part of a DeepSeek-V3 config.json."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense,
        "moe_intermediate_size": shape.expert,
        "num_hidden_layers": shape.layers,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.value,
        "n_routed_experts": shape.routed,
        "n_shared_experts": shape.shared,
        "num_experts_per_tok": shape.top_experts,
        "n_group": shape.groups,
        "topk_group": shape.top_groups,
        "norm_topk_prob": True,
        "routed_scaling_factor": shape.routed_scaling,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_scaling": None,
    }


def common_config(shape: Shape | DeepseekShape, end_of_turn: int) -> dict[str, Any]:
    """What both families write alike."""
    return {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": end_of_turn,
    }


def _names(model: Decoder) -> Iterator[tuple[str, list[str], int, list[int]]]:
    """(parameter, published names of its parts, the dimension they are cut along, their sizes there)."""
    shape = model.shape
    for inner, value in model.state_dict().items():
        name = inner
        for ours, published in MTP_NAMES.items():
            if inner.startswith(ours):
                name = f"layers.{shape.layers}.{published}{inner.removeprefix(ours)}"
                break
        head, _, which = name.partition("mlp.experts.")
        if which and isinstance(shape, DeepseekShape):
            owners = ["shared_experts", *(f"experts.{e}" for e in range(shape.routed))]
            names = [f"model.{head}mlp.{owner}.{which}" for owner in owners]
            sizes = [shape.shared * shape.expert, *[shape.expert] * shape.routed]
            yield inner, names, int(which.startswith("down_proj")), sizes
        else:
            yield inner, [f"model.{name}"], 0, [len(value)]


def to_checkpoint(model: Decoder) -> dict[str, Tensor]:
    """Every tensor under its published name, bfloat16 but for the correction biases."""
    state, tensors = model.state_dict(), {}
    for inner, names, dim, sizes in _names(model):
        dtype = torch.float32 if inner.endswith("bias") else torch.bfloat16
        for name, part in zip(names, state[inner].split(sizes, dim), strict=True):
            tensors[name] = part.to(dtype).contiguous()
    if model.mtp is not None:
        for copy in ("embed_tokens", "shared_head.head"):
            name = f"model.layers.{model.shape.layers}.{copy}.weight"
            tensors[name] = tensors["model.embed_tokens.weight"].clone()
    return tensors


def load_decoder(folder: Path, shape: Shape | DeepseekShape) -> Decoder:
    """A saved model, read back in float32."""
    model, weights = Decoder(shape), load_file(folder / "model.safetensors")
    parts = {inner: ([weights[n].float() for n in names], dim) for inner, names, dim, _ in _names(model)}
    model.load_state_dict({inner: torch.cat(values, dim) for inner, (values, dim) in parts.items()})
    return model


def save_checkpoint(model: Decoder, folder: Path, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face folder: config, generation config, tokenizer, template, bf16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    end_of_text, _, end_of_turn = (tokenizer.token_to_id(t) for t in SPECIAL_TOKENS)
    own = qwen3_config(shape) if isinstance(shape, Shape) else deepseek_config(shape)
    _write_json(folder / "config.json", own | common_config(shape, end_of_turn))
    generation = {"eos_token_id": [end_of_turn, end_of_text], "temperature": 0.0, "do_sample": False}
    _write_json(folder / "generation_config.json", generation)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"eos_token": SPECIAL_TOKENS[2], "pad_token": SPECIAL_TOKENS[0], "chat_template": CHAT_TEMPLATE}
    _write_json(folder / "tokenizer_config.json", names)
    save_file(to_checkpoint(model), folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
