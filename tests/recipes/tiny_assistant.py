"""Write an assistant for a tiny Gemma 4, in the published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.recipes.tiny import Json, draw_normal, named_generator, write_json, write_tensors

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def assistant_shapes(config: Json) -> dict[str, tuple[int, ...]]:
    """Return the shapes of floating-point tensors by published names, without clusters."""
    text = config["text_config"]
    target_hidden = config["backbone_hidden_size"]
    hidden = text["hidden_size"]
    inner = text["intermediate_size"]
    vocab = text["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (hidden, 2 * target_hidden),
        "post_projection.weight": (target_hidden, hidden),
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for number, kind in enumerate(text["layer_types"]):
        size = text["head_dim"] if kind == "sliding_attention" else text["global_head_dim"]
        width = text["num_attention_heads"] * size
        prefix = f"model.layers.{number}."
        layer_shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (width, hidden),
            "self_attn.o_proj": (hidden, width),
            "self_attn.q_norm": (size,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            **dict.fromkeys(NORMS, (hidden,)),
        }
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in layer_shapes.items()}
        shapes[f"{prefix}layer_scalar"] = (1,)
    return shapes


HEADS = 4
HIDDEN = 32
LAYERS = ("sliding_attention", "sliding_attention", "full_attention")


def write_assistant(folder: Path, target: Path, *, clusters: int = 0, selected: int = 0) -> Path:
    """Write config.json and model.safetensors of an assistant for `target`; returns its folder.

    clusters: of ids, of which `kept` get logits; 0: all ids do.
    """
    outer: dict[str, Any] = json.loads((target / "config.json").read_text())
    target_text = outer.get("text_config", outer)
    target_hidden = target_text["hidden_size"]
    vocab = target_text["vocab_size"]
    text = {
        **{
            key: value
            for key, value in target_text.items()
            if key not in ("architectures", "quantization_config")
        },
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": HEADS,
        "layer_types": list(LAYERS),
        "num_kv_shared_layers": len(LAYERS),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
    }
    config: dict[str, Any] = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target_hidden,
        "text_config": text,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    tensors = {}
    for name, shape in assistant_shapes(config).items():
        noise = draw_normal(f"0/{name}", shape, 1.0)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * 1.5 * shape[1] ** -0.5
    if clusters:
        config |= {"use_ordered_embeddings": True, "num_centroids": clusters}
        config |= {"centroid_intermediate_top_k": selected}
        tensors["masked_embedding.centroids.weight"] = draw_normal(
            "0/centroids", (clusters, HIDDEN), 1.0
        )
        order = torch.randperm(vocab, generator=named_generator("0/order"))
        tensors["masked_embedding.token_ordering"] = order
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    write_tensors(folder, tensors)
    return folder
