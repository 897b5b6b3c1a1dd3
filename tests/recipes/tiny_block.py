"""Write a tiny random block drafter for a tiny target, in the published dialects.

All of its tensors matter, so that any error in its conventions changes its drafts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

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
    "draft_vocab": None,
    "from_anchor": None,
    "sees_block": None,
    "markov": None,
    "markov_rank": 12,
    "selector_top_k": None,
    "selector_rank": 12,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "confidence": None,
    "seed": 0,
    "dtype": "float32",
}
"""Options of both dialects; `is_causal` to `states_target_layers` are of the authors' alone, the next
ones up to `confidence` of speculators'."""


def write_tiny_block(folder: Path, target: Path, **options: Any) -> Path:
    """Write a drafter for the checkpoint in `target`; return its folder.

    taps: indices of the target's layers whose output is read. kinds: "f" for each full and "s" for
    each sliding layer, as in "fs"; None: no key lists them. nested: the keys of the block stand in
    `dflash_config`, else at the top level. is_causal: None leaves the key out. draft_vocab: the
    number of the target's ids that a drafter of speculators has logits for; None: all. from_anchor,
    sees_block: None leaves the key out. selector_top_k: candidates of a DFlash 2; None: no DFlash 2.
    markov: the kind of a DSpark's bias; confidence: whether it
    has that head, None leaves the key out, which means that it has.
    """
    o = tiny.with_defaults(DEFAULTS, options)
    verifier = json.loads((target / "config.json").read_text())
    verifier = verifier.get("text_config", verifier)
    folder.mkdir(parents=True, exist_ok=True)
    tiny.write_json(folder / "config.json", _block_config(o, verifier))
    tensors = {
        name: (
            tensor.to(tiny.DTYPES[o.dtype]) if tensor.is_floating_point() else tensor
        ).contiguous()
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
    if o.dialect == "speculators":
        return _speculators_config(o, verifier)
    name = "DFlashDraftModel" if o.selector_top_k is None else "DFlash2DraftModel"
    config = {"architectures": [name], **_layer_config(o, verifier)}
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
        **_selector_config(o),
    }
    is_causal = block.pop("is_causal", None)
    if is_causal is not None:
        config["is_causal"] = is_causal
    if o.states_target_layers:
        config["num_target_layers"] = verifier["num_hidden_layers"]
    config |= {"dflash_config": block} if o.nested else block
    return config | {"block_size": o.block_size, "torch_dtype": o.dtype}


def _selector_config(o: Any) -> dict[str, Any]:
    """Return the keys of a DFlash 2, none for another drafter."""
    if o.selector_top_k is None:
        return {}
    names = ("selector_top_k", "selector_rank", "conv_kernel_size", "conv_group_size")
    return {name: getattr(o, name) for name in names}


def _speculators_config(o: Any, verifier: tiny.Json) -> dict[str, Any]:
    """Return config.json of a drafter as `speculators` writes it."""
    kind = "dflash" if o.markov is None else "dspark"
    kind = kind if o.selector_top_k is None else "dflash2"
    names = {"dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator"}
    optional = {
        "sample_from_anchor": o.from_anchor,
        "sliding_window_non_causal": o.sees_block,
        "enable_confidence_head": o.confidence,
    }
    config: dict[str, Any] = {
        "architectures": [names.get(kind, "DFlashSpeculator")],
        "speculators_model_type": kind,
        "transformer_layer_config": _layer_config(o, verifier),
        "draft_vocab_size": o.draft_vocab or verifier["vocab_size"],
        "block_size": o.block_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in o.taps],
        "mask_token_id": o.mask_token,
        "torch_dtype": o.dtype,
        **_selector_config(o),
    }
    if o.markov is not None:
        config |= {"markov_head_type": o.markov, "markov_rank": o.markov_rank}
    return config | {key: value for key, value in optional.items() if value is not None}


def _vocabulary_tensors(o: Any, verifier: tiny.Json) -> tiny.Tensors:
    """Return the head and the ids of a drafter of fewer ids than the target's."""
    vocab = verifier["vocab_size"]
    hidden = verifier["hidden_size"]
    order = torch.randperm(vocab, generator=tiny.named_generator(f"{o.seed}/block/ids"))
    ids = order[: o.draft_vocab].sort().values
    std = tiny.LOGIT_STD / math.sqrt(hidden)
    return {
        "lm_head.weight": tiny.draw_normal(f"{o.seed}/block/head", (len(ids), hidden), std),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True),
    }


def _markov_tensors(o: Any, verifier: tiny.Json) -> tiny.Tensors:
    """Return the tensors of a DSpark's heads."""
    rank = o.markov_rank
    hidden = verifier["hidden_size"]
    rows = o.draft_vocab or verifier["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (verifier["vocab_size"], rank),
        "markov_head.markov_w2.weight": (rows, rank),
    }
    if o.markov == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    elif o.markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, hidden + 2 * rank)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if o.confidence is not False:
        shapes["confidence_head.proj.weight"] = (1, hidden + rank)
        shapes["confidence_head.proj.bias"] = (1,)
    return {
        name: tiny.draw_normal(f"{o.seed}/block/{name}", shape, 1.5 if "w1" in name else 0.5)
        for name, shape in shapes.items()
    }


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
        for name in ("attention_conv", "mlp_conv") if o.selector_top_k is not None else ():
            kernel = o.conv_kernel_size
            draw(f"{prefix}{name}.base_kernel", (2, kernel, hidden), 0.4, 0.4)
            factors = 2 * kernel * hidden // o.conv_group_size
            std = 0.5 / math.sqrt(hidden)
            draw(f"{prefix}{name}.kernel_projection.weight", (factors, hidden), std)
    if o.selector_top_k is not None:
        rank = o.selector_rank
        for name in ("predecessor_codebook", "successor_codebook"):
            draw(f"candidate_selector.{name}", (verifier["vocab_size"], rank), 1.0)
        draw("candidate_selector.hidden_projection.weight", (rank, hidden), 0.5 / math.sqrt(hidden))
    if o.draft_vocab is not None:
        tensors |= _vocabulary_tensors(o, verifier)
    if o.markov is not None:
        tensors |= _markov_tensors(o, verifier)
    return tensors


def write_tiny_block_pair(
    target: Path, drafter: Path, *, target_options: tiny.Json | None = None, **options: Any
) -> Path:
    """Write a tiny Qwen3 of four layers and a drafter for it; return the drafter's folder."""
    shape = {**tiny.VARIANTS["qwen3"], "layers": 4, **(target_options or {})}
    tiny.write_tiny(target, **shape)
    return write_tiny_block(drafter, target, **options)
