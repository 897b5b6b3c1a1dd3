"""A checkpoint's twin with block-scaled FP8 matrices, in the layout of the published DeepSeek-V3.

Plain torch; imports nothing from `spd`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

LARGEST = 448.0
NEVER = ("embed_tokens", "lm_head", "mlp.gate.", "eh_proj", "shared_head")
"""What stays as it is, besides vectors."""


def quantize(
    weight: torch.Tensor, tall: int, wide: int, *, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 values, float32 scales of blocks of `tall` rows and `wide` columns, and each element's scale."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % wide, 0, -rows % tall))
    most = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, tall)).abs().amax((1, 3))
    scales = (most / LARGEST).clamp(min=1e-12)
    scales = scales.log2().ceil().exp2() if ue8m0 else scales
    every = scales.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return (weight.float() / every).to(torch.float8_e4m3fn), scales, every


def write_twin(source: Path, folder: Path, *, block: int = 128, ue8m0: bool = False) -> Path:
    """Write the twin of an unsharded checkpoint beside its other files."""
    shutil.copytree(source, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() == 2 and not any(part in name for part in NEVER):
            tensors[name], tensors[f"{name}_scale_inv"], _ = quantize(tensor, block, block, ue8m0=ue8m0)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    how |= {"weight_block_size": [block, block]} | ({"scale_fmt": "ue8m0"} if ue8m0 else {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    return folder
