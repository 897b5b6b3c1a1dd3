"""Write twins of a checkpoint with quantized matrices, in the published layouts.

Plain torch; imports nothing from `spd`. Bits are packed by Python's integers, one row at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

UNQUANTIZED_IN_BLOCKS = ("embed_tokens", "lm_head", "mlp.gate.", "eh_proj", "shared_head")
UNQUANTIZED = (*UNQUANTIZED_IN_BLOCKS, "conv1d")
"""Parts of the names of matrices that are not quantized."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_COLUMN_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: the columns in the 4-bit codes of a word, lowest bits first."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class StoredMatrix:
    """One matrix: its tensors by last names, and its dequantized values in float32."""

    tensors: Tensors
    values: Tensor


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [R, n] into int32 [R, ceil(n * bits / 32)], each row a long integer, low first."""
    rows = []
    count = -(-codes.shape[1] * bits // 32)
    for row in codes.tolist():
        packed_row = sum(code << (bits * column) for column, code in enumerate(row))
        rows.append([(packed_row >> (32 * word)) & 0xFFFFFFFF for word in range(count)])
    wide = torch.tensor(rows, dtype=torch.int64)
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32)


def quantize_integers(
    weight: Tensor, bits: int, group: int, sym: bool, scale: torch.dtype = torch.float16
) -> list[Tensor]:
    """Return codes [N, K], scales and zeros [N, K / group] of a matrix.

    scale: dtype of the scales.
    """
    grouped = torch.unflatten(weight.float(), 1, (-1, group))
    max_code = (1 << bits) - 1
    low = grouped.amin(-1).clamp(max=0)
    high = grouped.amax(-1).clamp(min=0)
    if sym:
        scales = (torch.maximum(-low, high) / (max_code // 2 + 0.5)).clamp(min=1e-6).to(scale)
        zeros = torch.full_like(low, 1 << (bits - 1))
    else:
        scales = ((high - low) / max_code).clamp(min=1e-6).to(scale)
        zeros = (-low / scales.float()).round().clamp(0, max_code)
    codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    return [codes.clamp(0, max_code).long().flatten(1), scales, zeros.long()]


def dequantize(
    codes: Tensor, scales: Tensor, zeros: Tensor, column_groups: Tensor | None = None
) -> Tensor:
    """Return values by the definition. column_groups: each column's group."""
    if column_groups is None:
        column_groups = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return (codes - zeros[:, column_groups]).float() * scales.float()[:, column_groups]


def store_packed(
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    scale: torch.dtype = torch.bfloat16,
) -> StoredMatrix:
    """Store a matrix as compressed-tensors packs integers; group -1: a scale a row."""
    codes, scales, zeros = quantize_integers(
        weight=weight,
        bits=bits,
        group=group if group > 0 else weight.shape[1],
        sym=sym,
        scale=scale,
    )
    tensors = {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = pack_words(zeros.t(), bits).t().contiguous()
    return StoredMatrix(tensors, dequantize(codes, scales, zeros))


def store_gptq(
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    offset: int = 1,
    shuffled: bool = False,
) -> StoredMatrix:
    """Store a matrix as GPTQ. offset: subtracted from stored zeros.

    shuffled: columns of mixed groups.
    """
    size = weight.shape[1]
    group = group if group > 0 else size
    column_groups = torch.arange(size) // group
    if shuffled:
        column_groups = column_groups[
            torch.randperm(size, generator=torch.Generator().manual_seed(size))
        ]
    by_group = torch.argsort(column_groups, stable=True)
    sorted_codes, scales, zeros = quantize_integers(weight[:, by_group], bits, group, sym)
    codes = torch.empty_like(sorted_codes)
    codes[:, by_group] = sorted_codes
    stored_zeros = (zeros - offset) % (1 << bits)
    tensors = {
        "qweight": pack_words(codes, bits).t().contiguous(),
        "qzeros": pack_words(stored_zeros.t(), bits),
    }
    tensors |= {"scales": scales.t().contiguous(), "g_idx": column_groups.to(torch.int32)}
    return StoredMatrix(tensors, dequantize(codes, scales, zeros, column_groups))


def store_awq(weight: Tensor) -> StoredMatrix:
    """Store a matrix as AutoAWQ."""
    codes, scales, zeros = quantize_integers(weight, 4, 32, False)

    def interleaved(rows: Tensor) -> Tensor:
        return pack_words(
            rows[:, [8 * (i // 8) + AWQ_COLUMN_ORDER[i % 8] for i in range(rows.shape[1])]], 4
        )

    tensors = {"qweight": interleaved(codes.t()), "qzeros": interleaved(zeros.t())}
    return StoredMatrix(
        {**tensors, "scales": scales.t().contiguous()}, dequantize(codes, scales, zeros)
    )


def store_int8(weight: Tensor) -> StoredMatrix:
    """Store a matrix as 8-bit integers with a scale a row."""
    codes, scales, zeros = quantize_integers(
        weight=weight, bits=8, group=weight.shape[1], sym=True, scale=torch.bfloat16
    )
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    return StoredMatrix(tensors, dequantize(codes, scales, zeros))


def quantize_blocks(
    weight: Tensor, block_rows: int, block_columns: int, *, ue8m0: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return FP8 values, float32 scales of blocks, and each element's scale."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % block_columns, 0, -rows % block_rows))
    tiles = torch.unflatten(torch.unflatten(padded, 1, (-1, block_columns)), 0, (-1, block_rows))
    maxima = tiles.abs().amax((1, 3))
    scales = (maxima / 448.0).clamp(min=1e-12)
    scales = scales.log2().ceil().exp2() if ue8m0 else scales
    element_scales = scales.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(
        block_columns, 1
    )[:, :columns]
    return (weight.float() / element_scales).to(torch.float8_e4m3fn), scales, element_scales


def store_fp8(weight: Tensor, strategy: str = "channel", block: int = 32) -> StoredMatrix:
    """Store a matrix in FP8 with a scale for the tensor, a row, or a block of rows and columns."""
    rows, columns = weight.shape
    block_rows, block_columns = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": (block, block),
    }[strategy]
    values, scales, element_scales = quantize_blocks(weight, block_rows, block_columns)
    stored_scales = scales.flatten() if strategy == "tensor" else scales
    return StoredMatrix(
        {"weight": values, "weight_scale": stored_scales}, values.float() * element_scales
    )


def store_fp4(weight: Tensor, layout: str) -> StoredMatrix:
    """Store a matrix of 4-bit floats in the layout nvfp4, modelopt or mxfp4."""
    group = 32 if layout == "mxfp4" else 16
    grouped = torch.unflatten(weight.float(), 1, (-1, group))
    maxima = grouped.abs().amax(-1)
    if layout == "mxfp4":
        exponent = (maxima / 6).clamp(min=1e-30).log2().ceil().clamp(-127, 127)
        scales = exponent.exp2()
        stored_scales = {"weight_scale": (exponent + 127).to(torch.uint8)}
    else:
        global_scale = (448 * 6 / maxima.max()).float()
        stored = (maxima / 6 * global_scale).clamp(min=2**-9).to(torch.float8_e4m3fn)
        stored_scales = {"weight_scale": stored}
        if layout == "nvfp4":
            stored_scales["weight_global_scale"] = global_scale.view(1)
            scales = stored.float() / global_scale
        else:
            scales = stored.float() * (1 / global_scale)
            stored_scales["weight_scale_2"] = 1 / global_scale
    nearest = ((grouped / scales[..., None]).abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (grouped < 0)).flatten(1)
    signs = torch.where(codes >= 8, -1.0, 1.0)
    values = E2M1[codes % 8] * signs * scales.repeat_interleave(group, 1)
    code_pairs = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return StoredMatrix(
        {"weight" if layout == "modelopt" else "weight_packed": code_pairs, **stored_scales}, values
    )


def compressed_tensors_config(weight_format: str, **weights: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors. weights: keys of its weights."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": weight_format,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {**group, "input_activations": None}},
    }


def group_config(bits: int, group: int, symmetric: bool = True) -> dict[str, Any]:
    """Return the configuration of packed integers; group -1: a scale a row."""
    size = {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    return compressed_tensors_config("pack-quantized", num_bits=bits, symmetric=symmetric, **size)


def gptq_config(bits: int = 4, group: int = 32, **keys: Any) -> dict[str, Any]:
    """Return a configuration of GPTQ with other keys on top."""
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        **keys,
    }


Layout = tuple[dict[str, Any], Callable[[Tensor], StoredMatrix]]
INTEGER_LAYOUTS = (
    (4, 32, True),
    (4, 32, False),
    (4, 64, True),
    (4, -1, True),
    (4, -1, False),
    (8, 32, True),
    (8, -1, True),
    (8, 64, False),
    (3, 32, True),
    (5, 32, False),
)
MODELOPT = {"quant_method": "modelopt"}
NVFP4 = {"quant_algo": "NVFP4", "ignore": ["lm_head"]}


def integer_layout(bits: int, group: int, sym: bool) -> Layout:
    """Return the layout of integers whose groups of columns share a scale.

    -1: those of a row do.
    """
    return group_config(bits, group, sym), partial(store_packed, bits=bits, group=group, sym=sym)


LAYOUTS: dict[str, Layout] = {
    **{
        f"w{bits}-{size}{'' if sym else '-zeros'}": integer_layout(bits, size, sym)
        for bits, size, sym in INTEGER_LAYOUTS
    },
    "w4-float": (group_config(4, 32), partial(store_packed, scale=torch.float32)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, store_awq),
    "gptq": (gptq_config(), store_gptq),
    "gptq-zeros": (gptq_config(sym=False), partial(store_gptq, sym=False)),
    "gptq-v2": (gptq_config(checkpoint_format="gptq_v2"), partial(store_gptq, offset=0)),
    "gptq-order": (
        gptq_config(desc_act=True, sym=False),
        partial(store_gptq, sym=False, shuffled=True),
    ),
    "gptq-3": (gptq_config(3, -1), partial(store_gptq, bits=3, group=-1)),
    "gptq-8": (gptq_config(8), partial(store_gptq, bits=8)),
    "int8": (
        compressed_tensors_config("int-quantized", num_bits=8, strategy="channel"),
        store_int8,
    ),
    **{
        f"fp8-{way}": (
            compressed_tensors_config(
                "float-quantized", num_bits=8, type="float", strategy=way, block_structure=[32, 32]
            ),
            partial(store_fp8, strategy=way),
        )
        for way in ("tensor", "channel", "block")
    },
    **{
        way: (
            compressed_tensors_config(f"{way}-pack-quantized", type="float"),
            partial(store_fp4, layout=way),
        )
        for way in ("nvfp4", "mxfp4")
    },
    "modelopt-nvfp4": (MODELOPT | NVFP4, partial(store_fp4, layout="modelopt")),
    "modelopt-fp8": (MODELOPT | {"quant_algo": "FP8"}, partial(store_fp8, strategy="tensor")),
}
"""Layouts by name: the configuration, and the function that stores a matrix."""


def stack_experts(experts: Sequence[StoredMatrix]) -> StoredMatrix:
    """Return the matrices of experts as one of three dimensions."""
    tensors = {
        last: torch.stack([expert.tensors[last] for expert in experts])
        for last in experts[0].tensors
    }
    return StoredMatrix(tensors, torch.stack([expert.values for expert in experts]))


def write_twins(
    source: Path, folder: Path, layout: str, unquantized: Sequence[str] = UNQUANTIZED
) -> tuple[Path, Path]:
    """Write the twin of an unsharded checkpoint, and the checkpoint of its dequantized values.

    unquantized: parts of the names of matrices that stay as they are.
    """
    config, store = LAYOUTS[layout]
    twin = folder / f"{source.name}-{layout}"
    plain = folder / f"{source.name}-{layout}-plain"
    shutil.copytree(source, twin)
    shutil.copytree(source, plain)
    tensors = Tensors()
    values = Tensors()
    for name, tensor in load_file(source / "model.safetensors").items():
        is_matrix = tensor.dim() > 1 and tensor.shape[-1] % 32 == 0
        if not is_matrix or any(part in name for part in unquantized):
            values[name] = tensor.float()
            tensors[name] = tensor
            continue
        if tensor.dim() == 2:
            stored = store(tensor)
        else:
            stored = stack_experts([store(expert) for expert in tensor])
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{last}": part for last, part in stored.tensors.items()}
        values[name] = stored.values
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    return _replace_weights(twin, tensors, config), plain


def write_twin(source: Path, folder: Path, *, block: int = 128, ue8m0: bool = False) -> Path:
    """Write the twin of an unsharded checkpoint with FP8 matrices in blocks, as DeepSeek-V3's."""
    shutil.copytree(source, folder)
    tensors = Tensors()
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if tensor.dim() == 2 and not any(part in name for part in UNQUANTIZED_IN_BLOCKS):
            tensors[name], tensors[f"{name}_scale_inv"], _ = quantize_blocks(
                tensor, block, block, ue8m0=ue8m0
            )
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }
    if ue8m0:
        quantization["scale_fmt"] = "ue8m0"
    return _replace_weights(folder, tensors, quantization)


def _replace_weights(folder: Path, tensors: Tensors, quantization: dict[str, Any]) -> Path:
    """Write a folder's tensors and the configuration of their quantization; return the folder."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder
