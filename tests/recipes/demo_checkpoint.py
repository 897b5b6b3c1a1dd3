"""Write and read Hugging Face folders of the demo's models (`packed_twin.py` quantizes them)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.recipes.demo_model import Decoder, DeepseekShape, HybridShape, Shape, Sizes, new_decoder
from tests.recipes.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS

SUMMED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
MTP_NAMES = {"mtp.norm.": "shared_head.norm.", "mtp.block.": "", "mtp.": ""}
HYBRID_MTP_NAMES = {
    "mtp.enorm.": "mtp.pre_fc_norm_embedding.",
    "mtp.hnorm.": "mtp.pre_fc_norm_hidden.",
    "mtp.eh_proj.": "mtp.fc.",
    "mtp.block.": "mtp.layers.0.",
    "mtp.norm.": "mtp.norm.",
}


def qwen3_config(shape: Shape) -> dict[str, Any]:
    """Return the architecture's part of a Qwen3 config.json."""
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
    """Return the architecture's part of a DeepSeek-V3 config.json."""
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


def hybrid_config(shape: HybridShape) -> dict[str, Any]:
    """Return the architecture's part of a Qwen3.5 text model's config.json."""
    kinds = ("linear" if i % shape.interval else "full" for i in range(1, shape.layers + 1))
    frequencies = shape.rope // 2
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "full_attention_interval": shape.interval,
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": shape.kernel,
        "linear_key_head_dim": shape.key_dim,
        "linear_value_head_dim": shape.value_dim,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rope / shape.head_dim,
            "mrope_interleaved": True,
            "mrope_section": [(frequencies + 2) // 3, (frequencies + 1) // 3, frequencies // 3],
        },
    }


ARCHITECTURE_CONFIGS: dict[type[Sizes], Callable[..., dict[str, Any]]] = {
    Shape: qwen3_config,
    DeepseekShape: deepseek_config,
    HybridShape: hybrid_config,
}


def make_config(shape: Sizes, end_of_turn: int) -> dict[str, Any]:
    """Return config.json: the architecture's part and the keys that all families share."""
    return {
        **ARCHITECTURE_CONFIGS[type(shape)](shape),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        **({} if isinstance(shape, HybridShape) else {"rope_theta": shape.rope_theta}),
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": end_of_turn,
    }


def _published_parts(model: Decoder) -> Iterator[tuple[str, list[str], int, list[int]]]:
    """Yield each parameter, its parts' published names, their dimension and their sizes."""
    shape = model.shape
    for inner, value in model.state_dict().items():
        name = _published_name(inner, shape)
        head, _, which = name.partition("mlp.experts.")
        if which and isinstance(shape, DeepseekShape):
            owners = ["shared_experts", *(f"experts.{e}" for e in range(shape.routed))]
            names = [f"{head}mlp.{owner}.{which}" for owner in owners]
            sizes = [shape.shared * shape.expert, *[shape.expert] * shape.routed]
            yield inner, names, int(which.startswith("down_proj")), sizes
        else:
            yield inner, [name], 0, [len(value)]


def _published_name(inner: str, shape: Sizes) -> str:
    """Return the published name of a parameter."""
    hybrid = shape if isinstance(shape, HybridShape) else None
    for ours, published in (HYBRID_MTP_NAMES if hybrid else MTP_NAMES).items():
        if inner.startswith(ours):
            home = "" if hybrid else f"model.layers.{shape.layers}."
            return home + published + inner.removeprefix(ours)
    parts = inner.split(".")
    if hybrid and parts[0] == "layers" and (int(parts[1]) + 1) % hybrid.interval:
        inner = inner.replace("self_attn", "linear_attn")
    return f"model.{inner}"


def to_checkpoint(model: Decoder) -> dict[str, Tensor]:
    """Return all tensors by published names, bfloat16 except for the correction biases."""
    state = model.state_dict()
    tensors = {}
    for inner, names, dim, sizes in _published_parts(model):
        dtype = torch.float32 if inner.endswith("e_score_correction_bias") else torch.bfloat16
        for name, part in zip(names, state[inner].split(sizes, dim), strict=True):
            tensors[name] = part.to(dtype).contiguous()
    if isinstance(model.shape, DeepseekShape):
        for copy in ("embed_tokens", "shared_head.head"):
            name = f"model.layers.{model.shape.layers}.{copy}.weight"
            tensors[name] = tensors["model.embed_tokens.weight"].clone()
    return tensors


def load_decoder(folder: Path, shape: Sizes) -> Decoder:
    """Read a saved model back in float32."""
    model = new_decoder(shape)
    weights = load_file(folder / "model.safetensors")
    parts = {
        inner: ([weights[n].float() for n in names], dim)
        for inner, names, dim, _ in _published_parts(model)
    }
    model.load_state_dict({inner: torch.cat(values, dim) for inner, (values, dim) in parts.items()})
    return model


def save_checkpoint(model: Decoder, folder: Path, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face folder: config, generation config, tokenizer, template, bf16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    end_of_text, _, end_of_turn = (tokenizer.token_to_id(t) for t in SPECIAL_TOKENS)
    _write_json(folder / "config.json", make_config(model.shape, end_of_turn))
    generation = {
        "eos_token_id": [end_of_turn, end_of_text],
        "temperature": 0.0,
        "do_sample": False,
    }
    _write_json(folder / "generation_config.json", generation)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", names)
    save_file(to_checkpoint(model), folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of the folder and of the drafters in it."""
    parts = [folder / part / name for part in (".", "draft", "eagle3") for name in SUMMED_FILES]
    names = [path.relative_to(folder) for path in parts if path.exists()]
    sums = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names
    ]
    (folder / "SHA256SUMS").write_text("".join(sums))
