"""A checkpoint's twin with block-scaled FP8 matrices, in the layout of the published DeepSeek-V3.

Plain torch; imports nothing from `spd`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LARGEST = 448.0
NEVER = ("embed_tokens", "lm_head", "mlp.gate.", "eh_proj", "shared_head")
"""What stays as it is, besides vectors."""


def quantize(weight: torch.Tensor, block: int, *, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values, and the float32 scales [ceil(N / block), ceil(K / block)] that belong to them."""
    rows, columns = (-(-size // block) for size in weight.shape)
    values, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale = (weight[part].float().abs().max() / LARGEST).clamp(min=1e-12)
            scales[i, j] = scale = scale.log2().ceil().exp2() if ue8m0 else scale
            values[part] = (weight[part].float() / scale).to(torch.float8_e4m3fn)
    return values, scales


def write_twin(source: Path, folder: Path, *, block: int = 128, ue8m0: bool = False) -> Path:
    """Write the twin of an unsharded checkpoint beside its other files."""
    shutil.copytree(source, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() == 2 and not any(part in name for part in NEVER):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensor, block, ue8m0=ue8m0)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config["quantization_config"] = {**how, "weight_block_size": [block, block]}
    if ue8m0:
        config["quantization_config"]["scale_fmt"] = "ue8m0"
    (folder / "config.json").write_text(json.dumps(config))
    return folder
