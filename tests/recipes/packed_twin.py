"""A checkpoint's twins with matrices in few bits, in the layouts that people download, by their definitions.

Plain torch; imports nothing from `spd`. Bits are packed by Python's integers, one row at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NEVER = ("embed_tokens", "lm_head", "mlp.gate.", "eh_proj", "shared_head", "conv1d")
"""What stays as it is, besides vectors."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: the columns that the nibbles of a word hold, low first."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """One matrix: its tensors by last names, and the values that they mean, float32."""

    tensors: Tensors
    values: torch.Tensor


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [R, n] as int32 [R, ceil(n * bits / 32)], each row one long integer, low first."""
    rows = []
    count = -(-codes.shape[1] * bits // 32)
    for row in codes.tolist():
        whole = sum(code << (bits * place) for place, code in enumerate(row))
        rows.append([(whole >> (32 * word)) & 0xFFFFFFFF for word in range(count)])
    wide = torch.tensor(rows, dtype=torch.int64)
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32)


def integers(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, scale: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales and zeros [N, K / group] of a matrix."""
    grouped, most = weight.float().unflatten(1, (-1, group)), (1 << bits) - 1
    low, high = grouped.amin(-1), grouped.amax(-1)
    if symmetric:
        scales = (grouped.abs().amax(-1) / (most // 2 + 0.5)).clamp(min=1e-6).to(scale)
        zeros = torch.full_like(low, 1 << (bits - 1))
    else:
        scales = ((high.clamp(min=0) - low.clamp(max=0)) / most).clamp(min=1e-6).to(scale)
        zeros = (-low.clamp(max=0) / scales.float()).round().clamp(0, most)
    codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, most).long().flatten(1), scales, zeros.long()


def meant(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    """Values by the definition; order: each column's group."""
    return (codes - zeros[:, order]).float() * scales.float()[:, order]


def packed(
    weight: torch.Tensor, bits: int = 4, group: int = 32, symmetric: bool = True, scale: Any = torch.bfloat16
) -> Stored:
    group = weight.shape[1] if group < 0 else group
    codes, scales, zeros = integers(weight, bits, group, symmetric, scale)
    found = {"weight_packed": words(codes, bits), "weight_scale": scales}
    found["weight_shape"] = torch.tensor(weight.shape)
    if not symmetric:
        found["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    return Stored(found, meant(codes, scales, zeros, torch.arange(weight.shape[1]) // group))


def gptq(
    weight: torch.Tensor,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    offset: int = 1,
    shuffled: bool = False,
) -> Stored:
    size = weight.shape[1]
    group = size if group < 0 else group
    order = torch.arange(size) // group
    if shuffled:
        order = order[torch.randperm(size, generator=torch.Generator().manual_seed(size))]
    place = torch.argsort(order, stable=True)
    sorted_codes, scales, zeros = integers(weight[:, place], bits, group, symmetric, torch.float16)
    codes = torch.empty_like(sorted_codes)
    codes[:, place] = sorted_codes
    kept = (zeros - offset) % (1 << bits)
    found = {"qweight": words(codes, bits).t().contiguous(), "qzeros": words(kept.t(), bits)}
    found |= {"scales": scales.t().contiguous(), "g_idx": order.to(torch.int32)}
    return Stored(found, meant(codes, scales, zeros, order))


def awq(weight: torch.Tensor, group: int = 32) -> Stored:
    group = weight.shape[1] if group < 0 else group
    codes, scales, zeros = integers(weight, 4, group, False, torch.float16)

    def interleaved(rows: torch.Tensor) -> torch.Tensor:
        places = [8 * (i // 8) + NIBBLES[i % 8] for i in range(rows.shape[1])]
        return words(rows[:, places], 4)

    found = {"qweight": interleaved(codes.t()), "qzeros": interleaved(zeros.t())}
    found["scales"] = scales.t().contiguous()
    return Stored(found, meant(codes, scales, zeros, torch.arange(weight.shape[1]) // group))


def int8(weight: torch.Tensor) -> Stored:
    codes, scales, zeros = integers(weight, 8, weight.shape[1], True, torch.bfloat16)
    found = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    return Stored(found, meant(codes, scales, zeros, torch.zeros(weight.shape[1], dtype=torch.long)))


def fp8(weight: torch.Tensor, way: str = "channel", block: int = 32) -> Stored:
    rows, columns = weight.shape
    tall, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": (block, block)}[way]
    shape = -(-rows // tall), -(-columns // wide)
    place = torch.arange(rows)[:, None] // tall * shape[1] + torch.arange(columns) // wide
    most = torch.zeros(shape[0] * shape[1]).index_reduce_(
        0, place.flatten(), weight.float().abs().flatten(), "amax"
    )
    scales = (most / 448).clamp(min=1e-9)
    values = (weight.float() / scales[place]).to(torch.float8_e4m3fn)
    kept = scales if way == "tensor" else scales.view(shape)
    return Stored({"weight": values, "weight_scale": kept.float()}, values.float() * scales[place])


def floats(weight: torch.Tensor, layout: str) -> Stored:
    """nvfp4, modelopt or mxfp4."""
    group = 32 if layout == "mxfp4" else 16
    grouped = weight.float().unflatten(1, (-1, group))
    most = grouped.abs().amax(-1)
    if layout == "mxfp4":
        exponent = (most / 6).clamp(min=1e-30).log2().ceil().clamp(-127, 127)
        scales, kept = exponent.exp2(), {"weight_scale": (exponent + 127).to(torch.uint8)}
    else:
        whole = (448 * 6 / most.max()).float()
        stored = (most / 6 * whole).clamp(min=2**-9).to(torch.float8_e4m3fn)
        kept = {"weight_scale": stored}
        if layout == "nvfp4":
            kept["weight_global_scale"], scales = whole.view(1), stored.float() / whole
        else:
            kept["weight_scale_2"], scales = 1 / whole, stored.float() * (1 / whole)
    nearest = ((grouped / scales[..., None]).abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (grouped < 0)).flatten(1)
    signs = torch.where(codes >= 8, -1.0, 1.0)
    values = E2M1[codes % 8] * signs * scales.repeat_interleave(group, 1)
    both = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return Stored({"weight" if layout == "modelopt" else "weight_packed": both, **kept}, values)


def compressed(kept: str, **weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": kept,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {**group, "input_activations": None}},
    }


def of_groups(bits: int, group: int, symmetric: bool = True) -> dict[str, Any]:
    size = {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    return compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **size)


def of_gptq(bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


Way = tuple[dict[str, Any], Callable[[torch.Tensor], Stored]]
WAYS: dict[str, Way] = {
    **{
        f"w{bits}-{group}{'' if symmetric else '-zeros'}": (
            of_groups(bits, group, symmetric),
            lambda w, b=bits, g=group, s=symmetric: packed(w, b, g, s),  # type: ignore[misc]
        )
        for bits, group, symmetric in (
            *((4, 32, True), (4, 32, False), (4, 64, True), (4, -1, True), (4, -1, False)),
            *((8, 32, True), (8, -1, True), (8, 64, False), (3, 32, True), (5, 32, False)),
        )
    },
    "w4-float": (of_groups(4, 32), lambda w: packed(w, scale=torch.float32)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "gptq": (of_gptq(), gptq),
    "gptq-zeros": (of_gptq(sym=False), lambda w: gptq(w, symmetric=False)),
    "gptq-v2": (of_gptq(checkpoint_format="gptq_v2"), lambda w: gptq(w, offset=0)),
    "gptq-order": (of_gptq(desc_act=True, sym=False), lambda w: gptq(w, symmetric=False, shuffled=True)),
    "gptq-3": (of_gptq(3, -1), lambda w: gptq(w, 3, -1)),
    "gptq-8": (of_gptq(8), lambda w: gptq(w, 8)),
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), int8),
    **{
        f"fp8-{way}": (
            compressed("float-quantized", num_bits=8, type="float", strategy=way, block_structure=[32, 32]),
            lambda w, k=way: fp8(w, k),  # type: ignore[misc]
        )
        for way in ("tensor", "channel", "block")
    },
    "nvfp4": (compressed("nvfp4-pack-quantized", type="float"), lambda w: floats(w, "nvfp4")),
    "mxfp4": (compressed("mxfp4-pack-quantized", type="float"), lambda w: floats(w, "mxfp4")),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        lambda w: floats(w, "modelopt"),
    ),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda w: fp8(w, "tensor")),
}
"""Layouts: what config.json says, and how a matrix is stored."""


def stacked(each: Sequence[Stored]) -> Stored:
    """Experts of one tensor."""
    found = {last: torch.stack([one.tensors[last] for one in each]) for last in each[0].tensors}
    return Stored(found, torch.stack([one.values for one in each]))


def write_twins(
    source: Path, folder: Path, way: str, keep: Sequence[str] = NEVER, plain_dtype: Any = torch.float32
) -> tuple[Path, Path]:
    """The twin of an unsharded checkpoint in a layout, and the checkpoint of the values that it means."""
    config, store = WAYS[way]
    twin, plain = folder / f"{source.name}-{way}", folder / f"{source.name}-{way}-plain"
    for each in (twin, plain):
        shutil.copytree(source, each)
    tensors: Tensors = {}
    whole: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        matrix = tensor.dim() > 1 and tensor.shape[-1] % 32 == 0
        if not matrix or any(part in name for part in keep):
            tensors[name] = tensor
            whole[name] = tensor.to(plain_dtype)
            continue
        stored = store(tensor) if tensor.dim() == 2 else stacked([store(each) for each in tensor])
        tensors |= {f"{name.removesuffix('weight')}{last}": each for last, each in stored.tensors.items()}
        whole[name] = stored.values.to(plain_dtype)
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
    own = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps({**own, "quantization_config": config}))
    return twin, plain
