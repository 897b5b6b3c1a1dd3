"""A checkpoint's matrices rounded to four bits, as compressed-tensors stores them (`pack-quantized`).

Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from spd.errors import IncompatibleError
from spd.formats.checkpoint import FLOAT_DTYPES, Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.mtp_layout import is_mtp_tensor
from spd.formats.safetensors_header import TensorMeta
from spd.formats.tensor_names import text_name
from spd.formats.writer import OutputTensor, output_tensors
from spd.kernels.capabilities import INT4_GROUP
from spd.kernels.linear.few_bits import quantize_int4
from spd.runtime.models import family_layout
from spd.runtime.models.weights import check_weights, destinations


def rounded_names(folder: ModelFolder, mtp_too: bool) -> list[str]:
    """The matrices that `--quantize int4` rounds; with mtp_too, those of MTP layers that are called alike."""
    layout = family_layout(folder.config)
    config = folder.config
    if config.quantization is not None:
        raise IncompatibleError(f"the weights of {folder.path} are quantized already")
    check_weights(folder.checkpoint, config, layout)
    found = [
        (prefix, part.name)
        for prefix, destination in destinations(config, layout)
        if prefix and destination.multiplied and destination.shape[1] % INT4_GROUP == 0
        for part in destination.parts
        if part.name.endswith(".weight")
    ]
    names = {prefix + name for prefix, name in found}
    own = tuple({f".{name}" for _, name in found})
    tensors = folder.checkpoint.tensors
    if mtp_too:
        heads = (n for n in tensors if n.endswith(own) and is_mtp_tensor(n, config.num_layers))
        names |= {
            n for n in heads if len(size := tensors[n].shape) == 2 and size[1] % INT4_GROUP == 0
        }
    return [name for name, meta in tensors.items() if name in names and meta.dtype in FLOAT_DTYPES]


def rounded_outputs(checkpoint: Checkpoint, rounded: Collection[str]) -> list[OutputTensor]:
    """Every tensor of a checkpoint as it is written: codes and scales of those that are rounded."""
    scales: dict[str, Tensor] = {}
    found: list[OutputTensor] = []
    for name, meta in checkpoint.tensors.items():
        if name not in rounded:
            found += output_tensors(checkpoint, [meta._replace(name=_called(name, meta))])
            continue
        stem = _called(name, meta).removesuffix("weight")
        rows, columns = meta.shape

        def codes(name: str = name) -> Iterator[bytes]:
            groups = quantize_int4(checkpoint.read(name))
            scales[name] = groups.scales
            yield _bytes_of(groups.codes)  # eight in a word, the first in its lowest bits

        def scale(name: str = name) -> Iterator[bytes]:  # the writer asks for wider types first
            yield _bytes_of(scales.pop(name))

        def shape(sizes: tuple[int, ...] = meta.shape) -> Iterator[bytes]:
            yield _bytes_of(torch.tensor(sizes))

        found.append(OutputTensor(f"{stem}weight_packed", "I32", (rows, columns // 8), codes))
        found.append(
            OutputTensor(f"{stem}weight_scale", "BF16", (rows, columns // INT4_GROUP), scale)
        )
        found.append(OutputTensor(f"{stem}weight_shape", "I64", (2,), shape))
    return found


def quantization_config(checkpoint: Checkpoint, rounded: Collection[str]) -> dict[str, Any]:
    """What config.json says of it; matrices that stay as they are stand in the ignore list."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": INT4_GROUP,
    }
    kept = (
        _called(name, meta).removesuffix(".weight")
        for name, meta in checkpoint.tensors.items()
        if name not in rounded and len(meta.shape) == 2 and name.endswith(".weight")
    )
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    groups = {"ignore": sorted(kept), "config_groups": {"group_0": group}}
    return {**how, "quantization_status": "compressed", **groups}


def _called(name: str, meta: TensorMeta) -> str:
    """A tensor's name in the file; an expert's own where the file holds all experts in one."""
    return meta.name if text_name(meta.name) == name else name


def _bytes_of(tensor: Tensor) -> bytes:
    held = bytearray(tensor.nbytes)
    torch.frombuffer(held, dtype=torch.uint8).copy_(tensor.contiguous().view(torch.uint8).flatten())
    return bytes(held)
