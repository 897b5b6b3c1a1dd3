"""Configurations and tensor lists of published hybrids, from a table; no weights, no `spd`.

Every row is a public release of huggingface.co/Qwen: sizes are those of its `config.json`, names
those of its index. In Qwen3.5, 3.6 and 3.8 projections are separate, and names begin with
`model.language_model.`; in Qwen3-Next projections are fused by key heads. Experts are stacked in
the 16-bit releases of Qwen3.5 and 3.6, and separate in Qwen3-Next and in FP8. A_log and the norm
after the recurrence are float32 in Qwen3.5, bfloat16 in later ones. The vision tower is the 27B's
everywhere; nothing reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.recipes.mtp_folders import Entry, entries, gated, weights, write_hollow

VOCAB = 248320
NEXT_VOCAB = 151936


@dataclass(frozen=True)
class Release:
    """One checkpoint. `experts`: their number, the number for each token, and their width."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    value_heads: int
    experts: tuple[int, int, int] = (0, 0, 0)
    tied: bool = False
    float32: bool = True
    fp8: bool = False
    fused_projections: bool = False
    """As in Qwen3-Next: no wrapper, projections fused by key heads."""
    gate_type: bool = False
    """As in Qwen3.8: the configuration names the gate after the recurrence."""
    separate_experts: tuple[str, ...] = ()
    """Prefixes below which experts are separate tensors.

    In FP8 and in Qwen3-Next they are everywhere.
    """


DENSE_27B = Release(
    hidden=5120, inner=17408, layers=64, heads=24, key_value_heads=4, value_heads=48, float32=False
)
SPARSE_35B = Release(
    hidden=2048,
    inner=512,
    layers=40,
    heads=16,
    key_value_heads=2,
    value_heads=32,
    experts=(256, 8, 512),
)
NEXT_80B = Release(
    hidden=2048,
    inner=5120,
    layers=48,
    heads=16,
    key_value_heads=2,
    value_heads=32,
    experts=(512, 10, 512),
    float32=False,
    fused_projections=True,
)
RELEASES = {
    "Qwen3.5-0.8B": Release(
        hidden=1024, inner=3584, layers=24, heads=8, key_value_heads=2, value_heads=16, tied=True
    ),
    "Qwen3.5-2B": Release(
        hidden=2048, inner=6144, layers=24, heads=8, key_value_heads=2, value_heads=16, tied=True
    ),
    "Qwen3.5-4B": Release(
        hidden=2560, inner=9216, layers=32, heads=16, key_value_heads=4, value_heads=32, tied=True
    ),
    "Qwen3.5-9B": Release(
        hidden=4096, inner=12288, layers=32, heads=16, key_value_heads=4, value_heads=32
    ),
    "Qwen3.5-27B": replace(DENSE_27B, float32=True),
    "Qwen3.5-35B-A3B": SPARSE_35B,
    "Qwen3.5-122B-A10B": Release(
        hidden=3072,
        inner=1024,
        layers=48,
        heads=32,
        key_value_heads=2,
        value_heads=64,
        experts=(256, 8, 1024),
    ),
    "Qwen3.5-397B-A17B": Release(
        hidden=4096,
        inner=1024,
        layers=60,
        heads=32,
        key_value_heads=2,
        value_heads=64,
        experts=(512, 10, 1024),
    ),
    "Qwen3.6-27B": DENSE_27B,
    "Qwen3.6-35B-A3B": replace(SPARSE_35B, float32=False),
    "Qwen3.6-35B-A3B-FP8": replace(SPARSE_35B, float32=False, fp8=True),
    "Qwen3.8-27B": replace(DENSE_27B, gate_type=True),
    "Qwen3.8-27B-FP8": replace(DENSE_27B, fp8=True, gate_type=True),
    "Qwen3-Next-80B-A3B-Instruct": NEXT_80B,
    "Qwen3-Next-80B-A3B-Instruct-FP8": replace(NEXT_80B, fp8=True),
}
TENSOR_COUNTS = {"Qwen3.8-27B": (851, 15, 333), "Qwen3.6-35B-A3B-FP8": (62303, 1560, 333)}
"""Numbers of tensors of the text model, its MTP layer and the vision tower, from the headers."""
KEY_HEADS = 16
HEAD = 256
DELTA_HEAD = 128
TAPS = 4
BLOCK = 128


def config_of(row: Release) -> dict[str, Any]:
    """Return the release's `config.json`."""
    text = _text_config(row)
    is_sparse = row.experts[0] > 0
    if row.fused_projections:
        text |= {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
        text |= {"norm_topk_prob": True, "rope_scaling": None, "rope_theta": 10000000}
        text |= {"use_sliding_window": False, "bos_token_id": 151643, "eos_token_id": 151645}
        return text | {"output_router_logits": False} | _quantization(row)
    kind = "qwen3_5_moe" if is_sparse else "qwen3_5"
    if is_sparse:
        del text["intermediate_size"]
    kinds = (
        "full_attention" if _attends(layer) else "linear_attention" for layer in range(row.layers)
    )
    text |= {
        "attn_output_gate": True,
        "layer_types": list(kinds),
        "mamba_ssm_dtype": "float32",
        "model_type": f"{kind}_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    rope = {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    }
    text |= {"pad_token_id": None, "rope_parameters": rope}
    if row.gate_type:
        text["output_gate_type"] = "swish"
    vision = {"depth": 27, "hidden_size": 1152, "model_type": kind, "out_hidden_size": row.hidden}
    return {
        "architectures": [f"Qwen3_5{'Moe' if is_sparse else ''}ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": row.tied,
        "video_token_id": 248057,
        "vision_config": vision,
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
        **_quantization(row),
    }


def _text_config(row: Release) -> dict[str, Any]:
    """Return the keys that text models of all releases share."""
    count, per_token, width = row.experts
    text: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": row.hidden,
        "initializer_range": 0.02,
        "intermediate_size": row.inner,
        "linear_conv_kernel_dim": TAPS,
        "linear_key_head_dim": DELTA_HEAD,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": row.value_heads,
        "linear_value_head_dim": DELTA_HEAD,
        "max_position_embeddings": 262144,
        "num_attention_heads": row.heads,
        "num_hidden_layers": row.layers,
        "num_key_value_heads": row.key_value_heads,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": row.tied,
        "use_cache": True,
        "vocab_size": NEXT_VOCAB if row.fused_projections else VOCAB,
    }
    if count:
        text |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": width,
            "num_experts": count,
            "num_experts_per_tok": per_token,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": width,
        }
    return text


def _quantization(row: Release) -> dict[str, Any]:
    """Return the key of an FP8 release's quantization; nothing for another one."""
    if not row.fp8:
        return {}
    block = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    format_keys = {
        "modules_to_not_convert": ["lm_head", "model.visual"],
        "weight_block_size": [BLOCK, BLOCK],
    }
    return {"quantization_config": block | format_keys}


def _attends(layer: int) -> bool:
    """True if a layer has full attention."""
    return (layer + 1) % 4 == 0


def text_tensors(row: Release) -> Iterator[Entry]:
    """Yield the text model's tensors, without the MTP layer."""
    prefix = "model." if row.fused_projections else "model.language_model."
    table = (NEXT_VOCAB if row.fused_projections else VOCAB, row.hidden)
    yield from weights(prefix, embed_tokens=table, norm=row.hidden)
    for layer in range(row.layers):
        yield from _layer(row, f"{prefix}layers.{layer}.", attends=_attends(layer))
    if not row.tied:
        yield from weights("", lm_head=table)


def mtp_tensors(row: Release) -> Iterator[Entry]:
    """Yield the MTP layer, which has full attention."""
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    yield from weights("mtp.", fc=(row.hidden, 2 * row.hidden))
    yield from entries("mtp.", dict.fromkeys(norms, row.hidden))
    yield from _layer(row, "mtp.layers.0.", attends=True)


def vision_tensors(row: Release) -> Iterator[Entry]:
    """Yield the vision tower of the 27B."""
    hidden = 1152
    inner = 4304
    merged = 4608
    block_shapes: dict[str, tuple[int, ...]] = {
        "attn__qkv": (3 * hidden, hidden),
        "attn__proj": (hidden, hidden),
        "mlp__linear_fc1": (inner, hidden),
        "mlp__linear_fc2": (hidden, inner),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    parts: dict[str, dict[str, tuple[int, ...]]] = {
        "patch_embed": {"proj": (hidden, 3, 2, 16, 16)},
        "merger": {
            "norm": (hidden,),
            "linear_fc1": (merged, merged),
            "linear_fc2": (row.hidden, merged),
        },
    }
    parts |= {f"blocks.{block}": block_shapes for block in range(27)}
    yield from weights("model.visual.", pos_embed=(2304, hidden))
    for part, shapes in parts.items():
        yield from entries(f"model.visual.{part}.", shapes)
        biases = {name: shape[0] for name, shape in shapes.items()}
        yield from entries(f"model.visual.{part}.", biases, last=".bias")


def _matrices(row: Release, stem: str, **shapes: tuple[int, int]) -> Iterator[Entry]:
    """Yield matrices of a layer; in FP8 with their scales."""
    yield from entries(stem, shapes, "F8_E4M3" if row.fp8 else "BF16")
    if row.fp8:
        blocks = {
            name: tuple(-(-size // BLOCK) for size in shape) for name, shape in shapes.items()
        }
        yield from entries(stem, blocks, last=".weight_scale_inv")


def _layer(row: Release, prefix: str, *, attends: bool) -> Iterator[Entry]:
    hidden = row.hidden
    attention = f"{prefix}self_attn."
    yield from weights(prefix, input_layernorm=hidden, post_attention_layernorm=hidden)
    if attends:
        query = row.heads * HEAD
        key = row.key_value_heads * HEAD
        shapes = {"k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
        yield from _matrices(row, attention, q_proj=(2 * query, hidden), **shapes)
        yield from weights(attention, q_norm=HEAD, k_norm=HEAD)
    else:
        yield from _delta(row, f"{prefix}linear_attn.")
    yield from (
        _experts(row, f"{prefix}mlp.") if row.experts[0] else _mlp(row, f"{prefix}mlp.", row.inner)
    )


def _delta(row: Release, prefix: str) -> Iterator[Entry]:
    hidden = row.hidden
    heads = row.value_heads
    exact = "F32" if row.float32 else "BF16"
    values = heads * DELTA_HEAD
    channels = (2 * KEY_HEADS + heads) * DELTA_HEAD
    matrices = {"in_proj_qkv": (channels, hidden), "in_proj_z": (values, hidden)}
    small = {"in_proj_a": (heads, hidden), "in_proj_b": (heads, hidden)}
    if row.fused_projections:
        matrices = {"in_proj_qkvz": (channels + values, hidden)}
        small = {"in_proj_ba": (2 * heads, hidden)}
    yield from _matrices(row, prefix, **matrices, out_proj=(hidden, values))
    yield from weights(prefix, conv1d=(channels, 1, TAPS))
    yield from entries(prefix, small)
    yield from weights(prefix, exact, norm=DELTA_HEAD)
    yield from weights(prefix, exact, "", A_log=heads)
    yield from weights(prefix, last="", dt_bias=heads)


def _mlp(row: Release, prefix: str, inner: int) -> Iterator[Entry]:
    return gated(prefix, row.hidden, inner, make=partial(_matrices, row))


def _experts(row: Release, prefix: str) -> Iterator[Entry]:
    count, _, inner = row.experts
    yield from weights(prefix, gate=(count, row.hidden), shared_expert_gate=(1, row.hidden))
    yield from _mlp(row, f"{prefix}shared_expert.", inner)
    if row.fp8 or row.fused_projections or prefix.startswith(row.separate_experts):
        for expert in range(count):
            yield from _mlp(row, f"{prefix}experts.{expert}.", inner)
        return
    packed = {
        "gate_up_proj": (count, 2 * inner, row.hidden),
        "down_proj": (count, row.hidden, inner),
    }
    yield from entries(f"{prefix}experts.", packed, last="")


def write_published(folder: Path, row: Release) -> Path:
    """Write a release's folder without data, in shards: text model, MTP layer, vision tower."""
    parts = [
        list(text_tensors(row)),
        list(mtp_tensors(row)),
        [] if row.fused_projections else list(vision_tensors(row)),
    ]
    weight_map: dict[str, str] = {}
    shards = [part for part in parts if part]
    for number, part in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_hollow(folder / shard, part)
        weight_map |= {name: shard for name, _, _ in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_of(row)))
    return folder
