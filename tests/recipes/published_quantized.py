"""Tensor lists of published hybrids in few bits: which matrices are packed, in which layout; no weights.

Names, shapes, dtypes and counts are those that readers of the releases' safetensors headers wrote down (the
revision stands beside each row); RedHatAI's 9B is known by the sizes of its two files. The configurations are
the releases' own but for lists of what is not quantized, which nothing reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.recipes import published_hybrids as hybrids
from tests.recipes.mtp_folders import Entry, write_hollow
from tests.recipes.published_hybrids import RELEASES, Release

Json = dict[str, Any]
SHARDS = 10
TEXT = r"model\.(language_model\.)?"
LAYER = r"model\.(language_model\.)?layers\.\d+\."
EXPERTS = LAYER + r"mlp\.experts\.\d+\.\w+"
SHARED = LAYER + r"mlp\.shared_expert\.\w+"
ATTENTION = LAYER + r"self_attn\.[qkvo]_proj"
DELTA = LAYER + r"linear_attn\."


@dataclass(frozen=True)
class Packed:
    """One release: `stored` says which matrices are in which layout, the first match counts."""

    base: Release
    stored: dict[str, str]
    quantization: Json
    tensors: int | None = None
    """All of them, the vision tower's too."""


def _compressed(layout: str, weights: Json) -> Json:
    group = {"format": layout, "targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    status = {"quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}}
    config = {"config_groups": {"group_0": group}, "format": layout}
    return config | status | {"quant_method": "compressed-tensors", "kv_cache_scheme": None}


def _by_layer(how: Json, layers: int, delta: str, attending: str) -> dict[str, Json]:
    """How modules of each layer are stored, by their names."""
    own = {layer: attending if (layer + 1) % 4 == 0 else delta for layer in range(layers)}
    return {f"model.language_model.layers.{i}.{name}": how for i in own for name in own[i].split()}


NEXT = RELEASES["Qwen3-Next-80B-A3B-Instruct"]
BIG = RELEASES["Qwen3.5-122B-A10B"]
FLOAT4: Json = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
BOTH = {"input_activations": FLOAT4, "weights": FLOAT4, "targets": ["Linear"]}
SPARSE = (
    "mlp.experts mlp.shared_expert.gate_proj mlp.shared_expert.up_proj mlp.shared_expert.down_proj"
)
MIXED = {
    "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    **_by_layer(
        *(
            {"quant_algo": "FP8"},
            40,
            "linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.out_proj",
        ),
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj",
    ),
    **_by_layer({"quant_algo": "NVFP4", "group_size": 16}, 40, SPARSE, SPARSE),
}
MATRICES = rf"{ATTENTION}|{LAYER}mlp\.\w+_proj"
QUANTIZED = {
    # @ 8fb2682f
    "nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4": Packed(
        NEXT,
        {
            rf"{EXPERTS}|{SHARED}|{DELTA}out_proj|{LAYER}self_attn\.o_proj": "modelopt-nvfp4",
            rf"{LAYER}self_attn\.k_proj": "k_scale",
            rf"{LAYER}self_attn\.v_proj": "v_scale",
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": BOTH}},
        tensors=297_728,
    ),
    # @ 1355db6a; the MTP layer's experts are stacked
    "nvidia/Qwen3.6-35B-A3B-NVFP4": Packed(
        replace(RELEASES["Qwen3.6-35B-A3B"], apart=("model.",)),
        {
            rf"{EXPERTS}|{SHARED}|lm_head": "modelopt-nvfp4",
            rf"{DELTA}(in_proj_qkv|in_proj_z|out_proj)|{ATTENTION}": "modelopt-fp8",
        },
        {"quant_algo": "MIXED_PRECISION", "quant_method": "modelopt", "quantized_layers": MIXED},
        tensors=124_468,
    ),
    # @ 56a6bdda; of the MTP layer its ignore list names nothing but `fc`
    "Sehyo/Qwen3.5-122B-A10B-NVFP4": Packed(
        replace(BIG, float32=False, apart=("model.", "mtp.")),
        {rf"{EXPERTS}|{SHARED}|{ATTENTION}": "nvfp4"},
        _compressed("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group"}),
        tensors=149_885,
    ),
    # @ a398088c: files of 10,952 and 486.58 million bytes
    "RedHatAI/Qwen3.5-9B-quantized.w4a16": Packed(
        replace(RELEASES["Qwen3.5-9B"], float32=False),
        {MATRICES: "w4a16"},
        _compressed(
            "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
        ),
    ),
}


def _stored(module: str, layout: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    """What stores a matrix of a shape [out, in] in a layout."""
    rows, columns = shape
    codes = ("U8", (rows, columns // 2))
    scalar = ("F32", ())
    one = ("F32", (1,))
    scales = "F8_E4M3", (rows, columns // 16)
    input_scale = {"weight_scale": scalar, "input_scale": scalar}
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "modelopt-nvfp4": {
            "weight": codes,
            **input_scale,
            "weight_scale": scales,
            "weight_scale_2": scalar,
        },
        "nvfp4": {
            "weight_packed": codes,
            "weight_scale": scales,
            "weight_global_scale": one,
            "input_global_scale": one,
        },
        "modelopt-fp8": {"weight": ("F8_E4M3", shape), **input_scale},
        "w4a16": {
            "weight_packed": ("I32", (rows, columns // 8)),
            "weight_shape": ("I64", (2,)),
            "weight_scale": ("BF16", (rows, columns // 128)),
        },
        "k_scale": {"weight": ("BF16", shape), "k_scale": scalar},
        "v_scale": {"weight": ("BF16", shape), "v_scale": scalar},
    }[layout]
    for last, (dtype, size) in found.items():
        yield f"{module}.{last}", dtype, size


def parts_of(release: Packed) -> list[list[Entry]]:
    """The tensors of the text model, the MTP layer and the vision tower, which may have none."""
    row = release.base
    patterns = {re.compile(key): value for key, value in release.stored.items()}
    seen = [] if row.fused else list(hybrids.vision_tensors(row))
    whole = [list(hybrids.text_tensors(row)), list(hybrids.mtp_tensors(row)), seen]

    def stored(name: str, dtype: str, shape: tuple[int, ...]) -> Iterable[Entry]:
        module = name.removesuffix(".weight")
        layout = next((way for pattern, way in patterns.items() if pattern.fullmatch(module)), None)
        return [(name, dtype, shape)] if layout is None else _stored(module, layout, shape)

    return [[each for entry in entries for each in stored(*entry)] for entries in whole]


def write_quantized(folder: Path, release: Packed) -> Path:
    """A release's folder, all data a hole."""
    weight_map: dict[str, str] = {}
    text, *others = parts_of(release)
    shards = [text[start::SHARDS] for start in range(SHARDS)] + others
    for number, part in enumerate(shards):
        write_hollow(folder / f"model-{number}.safetensors", part)
        weight_map |= {name: f"model-{number}.safetensors" for name, _, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {**hybrids.config_of(release.base), "quantization_config": release.quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
