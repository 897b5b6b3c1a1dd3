"""Tensor lists of published quantized hybrids: the layout of each packed matrix; no weights.

Names, shapes, dtypes and counts are from reports of the releases' safetensors headers (the revision
is above each row); of RedHatAI's 9B the sizes of its two files are known. The configurations are
the releases' without the lists of unquantized modules, which nothing reads.
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
class QuantizedRelease:
    """One release. `layouts`: of matrices, by patterns of their modules; the first match counts."""

    base: Release
    layouts: dict[str, str]
    quantization: Json
    tensors: int | None = None
    """The number of all tensors, the vision tower's included."""


def _compressed(layout: str, weights: Json) -> Json:
    group = {"format": layout, "targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    status = {"quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}}
    config = {"config_groups": {"group_0": group}, "format": layout}
    return config | status | {"quant_method": "compressed-tensors", "kv_cache_scheme": None}


def _by_layer(quantization: Json, layers: int, delta: str, attending: str) -> dict[str, Json]:
    """Return the quantization of each layer's modules, by their names."""
    modules = {layer: attending if (layer + 1) % 4 == 0 else delta for layer in range(layers)}
    return {
        f"model.language_model.layers.{i}.{name}": quantization
        for i in modules
        for name in modules[i].split()
    }


NEXT = RELEASES["Qwen3-Next-80B-A3B-Instruct"]
BIG = RELEASES["Qwen3.5-122B-A10B"]
FLOAT4: Json = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
FLOAT4_GROUP = {"input_activations": FLOAT4, "weights": FLOAT4, "targets": ["Linear"]}
SPARSE_MODULES = (
    "mlp.experts mlp.shared_expert.gate_proj mlp.shared_expert.up_proj mlp.shared_expert.down_proj"
)
MIXED_LAYERS = {
    "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    **_by_layer(
        {"quant_algo": "FP8"},
        40,
        "linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.out_proj",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj",
    ),
    **_by_layer({"quant_algo": "NVFP4", "group_size": 16}, 40, SPARSE_MODULES, SPARSE_MODULES),
}
MATRICES = rf"{ATTENTION}|{LAYER}mlp\.\w+_proj"
QUANTIZED = {
    # @ 8fb2682f
    "nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4": QuantizedRelease(
        NEXT,
        {
            rf"{EXPERTS}|{SHARED}|{DELTA}out_proj|{LAYER}self_attn\.o_proj": "modelopt-nvfp4",
            rf"{LAYER}self_attn\.k_proj": "k_scale",
            rf"{LAYER}self_attn\.v_proj": "v_scale",
        },
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": FLOAT4_GROUP},
        },
        tensors=297_728,
    ),
    # @ 1355db6a; the MTP layer's experts are stacked
    "nvidia/Qwen3.6-35B-A3B-NVFP4": QuantizedRelease(
        replace(RELEASES["Qwen3.6-35B-A3B"], separate_experts=("model.",)),
        {
            rf"{EXPERTS}|{SHARED}|lm_head": "modelopt-nvfp4",
            rf"{DELTA}(in_proj_qkv|in_proj_z|out_proj)|{ATTENTION}": "modelopt-fp8",
        },
        {
            "quant_algo": "MIXED_PRECISION",
            "quant_method": "modelopt",
            "quantized_layers": MIXED_LAYERS,
        },
        tensors=124_468,
    ),
    # @ 56a6bdda; of the MTP layer its ignore list names nothing but `fc`
    "Sehyo/Qwen3.5-122B-A10B-NVFP4": QuantizedRelease(
        replace(BIG, float32=False, separate_experts=("model.", "mtp.")),
        {rf"{EXPERTS}|{SHARED}|{ATTENTION}": "nvfp4"},
        _compressed("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group"}),
        tensors=149_885,
    ),
    # @ a398088c: files of 10,952 and 486.58 million bytes
    "RedHatAI/Qwen3.5-9B-quantized.w4a16": QuantizedRelease(
        replace(RELEASES["Qwen3.5-9B"], float32=False),
        {MATRICES: "w4a16"},
        _compressed(
            "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
        ),
    ),
}


def _stored_entries(module: str, layout: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    """Yield the tensors that store a matrix of a shape [out, in] in a layout."""
    rows, columns = shape
    codes = ("U8", (rows, columns // 2))
    scalar = ("F32", ())
    one_value = ("F32", (1,))
    scales = "F8_E4M3", (rows, columns // 16)
    input_scale = {"weight_scale": scalar, "input_scale": scalar}
    entries: dict[str, tuple[str, tuple[int, ...]]] = {
        "modelopt-nvfp4": {
            "weight": codes,
            **input_scale,
            "weight_scale": scales,
            "weight_scale_2": scalar,
        },
        "nvfp4": {
            "weight_packed": codes,
            "weight_scale": scales,
            "weight_global_scale": one_value,
            "input_global_scale": one_value,
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
    for last, (dtype, size) in entries.items():
        yield f"{module}.{last}", dtype, size


def parts_of(release: QuantizedRelease) -> list[list[Entry]]:
    """Return the tensors of the text model, the MTP layer and the vision tower, if any."""
    row = release.base
    patterns = {re.compile(key): value for key, value in release.layouts.items()}
    vision = [] if row.fused_projections else list(hybrids.vision_tensors(row))
    parts = [list(hybrids.text_tensors(row)), list(hybrids.mtp_tensors(row)), vision]

    def stored(name: str, dtype: str, shape: tuple[int, ...]) -> Iterable[Entry]:
        """Return the entries of one tensor in its layout."""
        module = name.removesuffix(".weight")
        layout = next((way for pattern, way in patterns.items() if pattern.fullmatch(module)), None)
        return [(name, dtype, shape)] if layout is None else _stored_entries(module, layout, shape)

    return [
        [entry for name, dtype, shape in entries for entry in stored(name, dtype, shape)]
        for entries in parts
    ]


def write_quantized(folder: Path, release: QuantizedRelease) -> Path:
    """Write a release's folder, all data a hole."""
    weight_map: dict[str, str] = {}
    text, *other_shards = parts_of(release)
    shards = [text[start::SHARDS] for start in range(SHARDS)] + other_shards
    for number, part in enumerate(shards):
        write_hollow(folder / f"model-{number}.safetensors", part)
        weight_map |= {name: f"model-{number}.safetensors" for name, _, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {**hybrids.config_of(release.base), "quantization_config": release.quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
