"""A checkpoint's twins with matrices in few bits, in the layouts that people download, by their definitions.

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

BLOCKS_NEVER = ("embed_tokens", "lm_head", "mlp.gate.", "eh_proj", "shared_head")
NEVER = (*BLOCKS_NEVER, "conv1d")
"""What stays as it is, besides vectors."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: the columns that the nibbles of a word hold, low first."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Stored:
    """One matrix: its tensors by last names, and the values that they mean, float32."""

    tensors: Tensors
    values: Tensor


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes [R, n] as int32 [R, ceil(n * bits / 32)], each row one long integer, low first."""
    rows = []
    count = -(-codes.shape[1] * bits // 32)
    for row in codes.tolist():
        whole = sum(code << (bits * place) for place, code in enumerate(row))
        rows.append([(whole >> (32 * word)) & 0xFFFFFFFF for word in range(count)])
    wide = torch.tensor(rows, dtype=torch.int64)
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32)


def integers(
    weight: Tensor, bits: int, group: int, sym: bool, scale: Any = torch.float16
) -> list[Tensor]:
    """Codes [N, K], scales and zeros [N, K / group] of a matrix."""
    grouped = torch.unflatten(weight.float(), 1, (-1, group))
    most = (1 << bits) - 1
    low = grouped.amin(-1).clamp(max=0)
    high = grouped.amax(-1).clamp(min=0)
    if sym:
        scales = (torch.maximum(-low, high) / (most // 2 + 0.5)).clamp(min=1e-6).to(scale)
        zeros = torch.full_like(low, 1 << (bits - 1))
    else:
        scales = ((high - low) / most).clamp(min=1e-6).to(scale)
        zeros = (-low / scales.float()).round().clamp(0, most)
    codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    return [codes.clamp(0, most).long().flatten(1), scales, zeros.long()]


def meant(codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None = None) -> Tensor:
    """Values by the definition; order: each column's group."""
    if order is None:
        order = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return (codes - zeros[:, order]).float() * scales.float()[:, order]


def packed(
    w: Tensor, bits: int = 4, group: int = 32, sym: bool = True, scale: Any = torch.bfloat16
) -> Stored:
    codes, scales, zeros = integers(w, bits, group if group > 0 else w.shape[1], sym, scale)
    found = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(w.shape),
    }
    if not sym:
        found["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    return Stored(found, meant(codes, scales, zeros))


def gptq(
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    offset: int = 1,
    mixed: bool = False,
) -> Stored:
    size = weight.shape[1]
    group = group if group > 0 else size
    order = torch.arange(size) // group
    if mixed:
        order = order[torch.randperm(size, generator=torch.Generator().manual_seed(size))]
    place = torch.argsort(order, stable=True)
    sorted_codes, scales, zeros = integers(weight[:, place], bits, group, sym)
    codes = torch.empty_like(sorted_codes)
    codes[:, place] = sorted_codes
    kept = (zeros - offset) % (1 << bits)
    found = {"qweight": words(codes, bits).t().contiguous(), "qzeros": words(kept.t(), bits)}
    found |= {"scales": scales.t().contiguous(), "g_idx": order.to(torch.int32)}
    return Stored(found, meant(codes, scales, zeros, order))


def awq(weight: Tensor) -> Stored:
    codes, scales, zeros = integers(weight, 4, 32, False)

    def interleaved(rows: Tensor) -> Tensor:
        return words(rows[:, [8 * (i // 8) + NIBBLES[i % 8] for i in range(rows.shape[1])]], 4)

    found = {"qweight": interleaved(codes.t()), "qzeros": interleaved(zeros.t())}
    return Stored({**found, "scales": scales.t().contiguous()}, meant(codes, scales, zeros))


def int8(weight: Tensor) -> Stored:
    codes, scales, zeros = integers(weight, 8, weight.shape[1], True, torch.bfloat16)
    found = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    return Stored(found, meant(codes, scales, zeros))


def quantize(
    weight: Tensor, tall: int, wide: int, *, ue8m0: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 values, float32 scales of blocks of `tall` rows and `wide` columns, and each element's scale."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % wide, 0, -rows % tall))
    tiles = torch.unflatten(torch.unflatten(padded, 1, (-1, wide)), 0, (-1, tall))
    most = tiles.abs().amax((1, 3))
    scales = (most / 448.0).clamp(min=1e-12)
    scales = scales.log2().ceil().exp2() if ue8m0 else scales
    every = scales.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return (weight.float() / every).to(torch.float8_e4m3fn), scales, every


def fp8(weight: Tensor, way: str = "channel", block: int = 32) -> Stored:
    rows, columns = weight.shape
    tall, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": (block, block)}[way]
    values, scales, every = quantize(weight, tall, wide)
    kept = scales.flatten() if way == "tensor" else scales
    return Stored({"weight": values, "weight_scale": kept}, values.float() * every)


def floats(weight: Tensor, layout: str) -> Stored:
    """nvfp4, modelopt or mxfp4."""
    group = 32 if layout == "mxfp4" else 16
    grouped = torch.unflatten(weight.float(), 1, (-1, group))
    most = grouped.abs().amax(-1)
    if layout == "mxfp4":
        exponent = (most / 6).clamp(min=1e-30).log2().ceil().clamp(-127, 127)
        scales = exponent.exp2()
        kept = {"weight_scale": (exponent + 127).to(torch.uint8)}
    else:
        whole = (448 * 6 / most.max()).float()
        stored = (most / 6 * whole).clamp(min=2**-9).to(torch.float8_e4m3fn)
        kept = {"weight_scale": stored}
        if layout == "nvfp4":
            kept["weight_global_scale"], scales = whole.view(1), stored.float() / whole
        else:
            scales = stored.float() * (1 / whole)
            kept["weight_scale_2"] = 1 / whole
    nearest = ((grouped / scales[..., None]).abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (grouped < 0)).flatten(1)
    signs = torch.where(codes >= 8, -1.0, 1.0)
    values = E2M1[codes % 8] * signs * scales.repeat_interleave(group, 1)
    both = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return Stored({"weight" if layout == "modelopt" else "weight_packed": both, **kept}, values)


def compressed(kept: str, **weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights},
    }
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
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        **more,
    }


Way = tuple[dict[str, Any], Callable[[Tensor], Stored]]
GROUPED = (
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
FOUR_BITS = {"quant_algo": "NVFP4", "ignore": ["lm_head"]}


def grouped(bits: int, group: int, sym: bool) -> Way:
    """Integers whose groups of columns share a scale; -1: whole rows do."""
    return of_groups(bits, group, sym), partial(packed, bits=bits, group=group, sym=sym)


WAYS: dict[str, Way] = {
    **{
        f"w{bits}-{size}{'' if sym else '-zeros'}": grouped(bits, size, sym)
        for bits, size, sym in GROUPED
    },
    "w4-float": (of_groups(4, 32), partial(packed, scale=torch.float32)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "gptq": (of_gptq(), gptq),
    "gptq-zeros": (of_gptq(sym=False), partial(gptq, sym=False)),
    "gptq-v2": (of_gptq(checkpoint_format="gptq_v2"), partial(gptq, offset=0)),
    "gptq-order": (of_gptq(desc_act=True, sym=False), partial(gptq, sym=False, mixed=True)),
    "gptq-3": (of_gptq(3, -1), partial(gptq, bits=3, group=-1)),
    "gptq-8": (of_gptq(8), partial(gptq, bits=8)),
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), int8),
    **{
        f"fp8-{way}": (
            compressed(
                "float-quantized", num_bits=8, type="float", strategy=way, block_structure=[32, 32]
            ),
            partial(fp8, way=way),
        )
        for way in ("tensor", "channel", "block")
    },
    **{
        way: (compressed(f"{way}-pack-quantized", type="float"), partial(floats, layout=way))
        for way in ("nvfp4", "mxfp4")
    },
    "modelopt-nvfp4": (MODELOPT | FOUR_BITS, partial(floats, layout="modelopt")),
    "modelopt-fp8": (MODELOPT | {"quant_algo": "FP8"}, partial(fp8, way="tensor")),
}
"""Layouts: what config.json says, and how a matrix is stored."""


def stacked(each: Sequence[Stored]) -> Stored:
    """Experts of one tensor."""
    found = {last: torch.stack([one.tensors[last] for one in each]) for last in each[0].tensors}
    return Stored(found, torch.stack([one.values for one in each]))


def write_twins(
    source: Path, folder: Path, way: str, keep: Sequence[str] = NEVER
) -> tuple[Path, Path]:
    """The twin of an unsharded checkpoint in a layout, and the checkpoint of the values that it means."""
    config, store = WAYS[way]
    twin = folder / f"{source.name}-{way}"
    plain = folder / f"{source.name}-{way}-plain"
    for each in (twin, plain):
        shutil.copytree(source, each)
    tensors = Tensors()
    whole = Tensors()
    for name, tensor in load_file(source / "model.safetensors").items():
        matrix = tensor.dim() > 1 and tensor.shape[-1] % 32 == 0
        if not matrix or any(part in name for part in keep):
            whole[name] = tensor.float()
            tensors[name] = tensor
            continue
        stored = store(tensor) if tensor.dim() == 2 else stacked([store(each) for each in tensor])
        tensors |= {
            f"{name.removesuffix('weight')}{last}": each for last, each in stored.tensors.items()
        }
        whole[name] = stored.values
    save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
    return _rewritten(twin, tensors, config), plain


def write_twin(source: Path, folder: Path, *, block: int = 128, ue8m0: bool = False) -> Path:
    """The twin of an unsharded checkpoint with block-scaled FP8 matrices, as DeepSeek-V3 is published."""
    shutil.copytree(source, folder)
    tensors = Tensors()
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if tensor.dim() == 2 and not any(part in name for part in BLOCKS_NEVER):
            tensors[name], tensors[f"{name}_scale_inv"], _ = quantize(
                tensor, block, block, ue8m0=ue8m0
            )
    how: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }
    if ue8m0:
        how["scale_fmt"] = "ue8m0"
    return _rewritten(folder, tensors, how)


def _rewritten(folder: Path, tensors: Tensors, how: dict[str, Any]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, "quantization_config": how}))
    return folder
