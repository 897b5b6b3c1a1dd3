"""Write a tiny random block drafter for a tiny target, in the published dialects.

All of its tensors matter, so that any error in its conventions changes its drafts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tests.recipes import tiny

LAYER_SHAPE = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-3,
}
"""Sizes of a drafter's layers, none of them the tiny target's."""
DEFAULTS: dict[str, Any] = {
    "dialect": "authors",
    "taps": (0, 1),
    "block_size": 5,
    "mask_token": 300,
    "layers": 2,
    "kinds": None,
    "window": 24,
    "is_causal": None,
    "bias": False,
    "embedding_scale": None,
    "multiplier": None,
    "softcap": None,
    "nested": True,
    "states_target_layers": True,
    "seed": 0,
    "dtype": "float32",
}


def write_tiny_block(folder: Path, target: Path, **options: Any) -> Path:
    """Write a drafter for the checkpoint in `target`; return its folder.

    taps: indices of the target's layers whose output is read. kinds: "f" for each full and "s" for
    each sliding layer, as in "fs"; None: no key lists them. nested: the keys of the block stand in
    `dflash_config`, else at the top level. is_causal: None leaves the key out.
    """
    o = tiny.with_defaults(DEFAULTS, options)
    verifier = json.loads((target / "config.json").read_text())
    verifier = verifier.get("text_config", verifier)
    folder.mkdir(parents=True, exist_ok=True)
    tiny.write_json(folder / "config.json", _block_config(o, verifier))
    tensors = {
        name: tensor.to(tiny.DTYPES[o.dtype]).contiguous()
        for name, tensor in _block_tensors(o, verifier).items()
    }
    tiny.write_tensors(folder, tensors)
    return folder


def _layer_config(o: Any, verifier: tiny.Json) -> dict[str, Any]:
    """Return the configuration of a drafter's layers, a Qwen3's."""
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": verifier["hidden_size"],
        "num_hidden_layers": o.layers,
        **LAYER_SHAPE,
        "vocab_size": verifier["vocab_size"],
        "max_position_embeddings": 512,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": o.bias,
        "tie_word_embeddings": False,
    }
    if o.kinds is not None:
        names = {"f": "full_attention", "s": "sliding_attention"}
        config["layer_types"] = [names[kind] for kind in o.kinds]
    if "s" in (o.kinds or ""):
        config |= {"sliding_window": o.window, "use_sliding_window": True, "max_window_layers": 0}
    return config


def _block_config(o: Any, verifier: tiny.Json) -> dict[str, Any]:
    """Return config.json of a drafter. o: the options of `write_tiny_block`."""
    config = {"architectures": ["DFlashDraftModel"], **_layer_config(o, verifier)}
    optional = {
        "is_causal": o.is_causal,
        "input_embedding_scale": o.embedding_scale,
        "output_multiplier": o.multiplier,
        "final_logit_softcapping": o.softcap,
    }
    block = {
        "target_layer_ids": list(o.taps),
        "mask_token_id": o.mask_token,
        **{key: value for key, value in optional.items() if value is not None},
    }
    is_causal = block.pop("is_causal", None)
    if is_causal is not None:
        config["is_causal"] = is_causal
    if o.states_target_layers:
        config["num_target_layers"] = verifier["num_hidden_layers"]
    config |= {"dflash_config": block} if o.nested else block
    return config | {"block_size": o.block_size, "torch_dtype": o.dtype}


def _block_tensors(o: Any, verifier: tiny.Json) -> tiny.Tensors:
    """Return the tensors of a drafter by name."""
    hidden = verifier["hidden_size"]
    layer = _layer_config(o, verifier)
    size = layer["head_dim"]
    query = layer["num_attention_heads"] * size
    key = layer["num_key_value_heads"] * size
    inner = layer["intermediate_size"]
    fused = len(o.taps) * hidden
    tensors: tiny.Tensors = {}

    def draw(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        tensors[name] = tiny.draw_normal(f"{o.seed}/block/{name}", shape, std, mean)

    draw("fc.weight", (hidden, fused), 1.0 / math.sqrt(fused))
    draw("hidden_norm.weight", (hidden,), 0.3, 1.0)
    draw("norm.weight", (hidden,), 0.3, 3.0)
    for index in range(o.layers):
        prefix = f"layers.{index}."
        matrices = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, (rows, columns) in matrices.items():
            draw(f"{prefix}{name}.weight", (rows, columns), 1.5 / math.sqrt(columns))
            if o.bias and name.startswith("self_attn"):
                draw(f"{prefix}{name}.bias", (rows,), 0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            draw(f"{prefix}{name}.weight", (hidden,), 0.3, 1.0)
        for name in ("q_norm", "k_norm"):
            draw(f"{prefix}self_attn.{name}.weight", (size,), 0.3, 1.5)
    return tensors


def write_tiny_block_pair(
    target: Path, drafter: Path, *, target_options: tiny.Json | None = None, **options: Any
) -> Path:
    """Write a tiny Qwen3 of four layers and a drafter for it; return the drafter's folder."""
    shape = {**tiny.VARIANTS["qwen3"], "layers": 4, **(target_options or {})}
    tiny.write_tiny(target, **shape)
    return write_tiny_block(drafter, target, **options)
