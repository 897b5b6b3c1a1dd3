"""Write tiny random checkpoints of the Qwen3.5 kind: DeltaNets, gated attention, an MTP layer.

Plain torch, safetensors and json; imports nothing from `spd`. Names and shapes are those of the
published checkpoints and of `transformers`' `qwen3_5`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from tests.recipes.tiny import (
    DTYPES,
    EMBEDDING_STD,
    Json,
    Tensors,
    draw_normal,
    write_json,
    write_tensors,
    write_tokenizer,
)

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 258,
    "bos_token_id": 256,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 2],
    "mrope_interleaved": True,
}
LATE_GAIN = 0.12
"""The gain of layers after the first two, relative to theirs, where drafters shall agree often."""


def write_tiny_hybrid(
    folder: Path,
    *,
    dtype: str = "float32",
    mtp: bool = False,
    agreeing: bool = False,
    wrapped: bool = False,
    gain: float = 0.1,
    seed: int = 0,
    **sizes: Any,
) -> Path:
    """Write one checkpoint and return its folder; `sizes` are keys of its configuration.

    agreeing: later layers have a small gain and the MTP layer reads mostly the token, so that
    drafts are often accepted. gain: of the first two. wrapped: as the text model of a vision model,
    with one of its tensors.
    """
    config = {**SIZES, **sizes}
    interval = config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    config |= {
        "layer_types": kinds,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
    }
    config |= {"rope_parameters": ROPE, "dtype": dtype}
    text = config
    tensors = _draw_model(config, kinds, seed, gain if agreeing else None)
    if mtp:
        tensors |= _draw_mtp(config, seed, gain if agreeing else None)
    if wrapped:
        tensors = {
            name.replace("model.", "model.language_model.", 1)
            if name.startswith("model.")
            else name: tensor
            for name, tensor in tensors.items()
        }
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)
        text.pop("architectures")
        config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
        config |= {"text_config": text, "vision_config": {"depth": 1}, "image_token_id": 300}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}, 1)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": 258})
    write_tokenizer(folder, text["vocab_size"], text["max_position_embeddings"])
    return folder


def _draw(
    seed: int, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0
) -> torch.Tensor:
    return draw_normal(f"{seed}/{name}", shape, std, mean)


def _attention_shapes(config: Json, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    size = config["head_dim"]
    heads = config["num_attention_heads"] * size
    keys = config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj": (2 * heads, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "q_norm": (size,),
        "k_norm": (size,),
        "o_proj": (hidden, heads),
    }
    return {f"{prefix}self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _delta_shapes(config: Json, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    heads = config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    values = heads * size
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv": (channels, hidden),
        "in_proj_z": (values, hidden),
        "in_proj_b": (heads, hidden),
        "in_proj_a": (heads, hidden),
        "conv1d": (channels, 1, config["linear_conv_kernel_dim"]),
        "norm": (size,),
        "out_proj": (hidden, values),
    }
    named_shapes = {f"{prefix}linear_attn.{name}.weight": shape for name, shape in shapes.items()}
    return named_shapes | {f"{prefix}linear_attn.{name}": (heads,) for name in ("A_log", "dt_bias")}


def _draw_layer(config: Json, prefix: str, linear: bool, seed: int, gain: float) -> Tensors:
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    shapes = (_delta_shapes if linear else _attention_shapes)(config, prefix)
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}{name}.weight"] = (hidden,)
    shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    tensors = {}
    for name, shape in shapes.items():
        last = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        std = (gain if last else 1.2) / math.sqrt(shape[-1])
        mean = 0.0
        if name.endswith("conv1d.weight"):
            std = 0.5
        elif len(shape) == 1:
            is_decay = name.endswith("A_log")
            std = 0.7 if is_decay else 0.2
            mean = 0.3 if is_decay else float("linear_attn.norm" in name)
        tensors[name] = _draw(seed=seed, name=name, shape=shape, std=std, mean=mean)
    return tensors


def _draw_model(config: Json, kinds: list[str], seed: int, agreeing: float | None) -> Tensors:
    vocab = config["vocab_size"]
    hidden = config["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": _draw(seed, "embedding", (vocab, hidden), EMBEDDING_STD),
        "model.norm.weight": _draw(seed, "norm", (hidden,), 0.1),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _draw(seed, "head", (vocab, hidden), 3.0 / math.sqrt(hidden))
    for layer, kind in enumerate(kinds):
        gain = 0.3 if agreeing is None else agreeing if layer < 2 else agreeing * LATE_GAIN
        tensors |= _draw_layer(
            config=config,
            prefix=f"model.layers.{layer}.",
            linear=kind == "linear_attention",
            seed=seed,
            gain=gain,
        )
    return tensors


def _draw_mtp(config: Json, seed: int, agreeing: float | None) -> Tensors:
    hidden = config["hidden_size"]
    square = (hidden, hidden)
    state_gain = 2.5 * agreeing * EMBEDDING_STD if agreeing else 0.8
    token = EMBEDDING_STD * torch.eye(hidden) if agreeing else _draw(seed, "token", square, 0.1)
    state = _draw(seed, "state", square, state_gain / math.sqrt(hidden))
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
    return {
        **{name: _draw(seed, name, (hidden,), 0.1) for name in norms},
        "mtp.fc.weight": torch.cat((token, state), 1),
        # As the target's last norm where they shall agree.
        "mtp.norm.weight": _draw(seed, "norm" if agreeing else "mtp.norm", (hidden,), 0.1),
        **_draw_layer(
            config=config,
            prefix="mtp.layers.0.",
            linear=False,
            seed=seed,
            gain=0.01 if agreeing else 0.5,
        ),
    }
