"""Rounds a checkpoint's matrices to four bits, in the format of compressed-tensors
(`pack-quantized`).

Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from spd.runtime.models.weights import check_weights, iterate_parameters

ROUNDING_THREADS = 4
"""The most threads that round a matrix: each has buffers of some hundred megabytes."""


def int4_tensor_names(folder: ModelFolder, includes_mtp: bool) -> list[str]:
    """Return the names of the matrices that `--quantize int4` rounds.

    includes_mtp: among them those of MTP layers with the same last names.
    """
    layout = family_layout(folder.config)
    config = folder.config
    if config.quantization is not None:
        raise IncompatibleError(f"the weights of {folder.path} are quantized already")
    check_weights(folder.checkpoint, config, layout)
    names: set[str] = set()
    suffixes: set[str] = set()
    for prefix, parameter in iterate_parameters(config, layout):
        if not prefix or not parameter.is_quantizable or parameter.shape[1] % INT4_GROUP:
            continue
        weights = [source.name for source in parameter.sources if source.name.endswith(".weight")]
        names |= {prefix + name for name in weights}
        suffixes |= {f".{name}" for name in weights}
    tensors = folder.checkpoint.tensors
    if includes_mtp:
        for name, meta in tensors.items():
            is_matrix = len(meta.shape) == 2 and meta.shape[1] % INT4_GROUP == 0
            has_suffix = name.endswith(tuple(suffixes))
            if has_suffix and is_matrix and is_mtp_tensor(name, config.num_layers):
                names.add(name)
    return [name for name, meta in tensors.items() if name in names and meta.dtype in FLOAT_DTYPES]


def int4_checkpoint_tensors(checkpoint: Checkpoint, rounded: Collection[str]) -> list[OutputTensor]:
    """Return every tensor of a checkpoint as it is written: codes and scales of those that are
    rounded.
    """
    scales: dict[str, Tensor] = {}
    outputs: list[OutputTensor] = []
    for name, meta in checkpoint.tensors.items():
        if name not in rounded:
            outputs += output_tensors(checkpoint, [meta._replace(name=_stored_name(name, meta))])
            continue
        stem = _stored_name(name, meta).removesuffix("weight")
        rows, columns = meta.shape

        def codes(name: str = name) -> Iterator[bytes]:
            """Yield a matrix's codes; its scales are stored until they are written."""
            packed, scales[name] = _quantize_rows(checkpoint.read(name))
            # Eight codes in a word, the first in its lowest bits.
            yield _to_bytes(packed)

        def scale(name: str = name) -> Iterator[bytes]:
            # The writer writes wider types first: codes before their scales.
            yield _to_bytes(scales.pop(name))

        def shape(sizes: tuple[int, ...] = meta.shape) -> Iterator[bytes]:
            yield _to_bytes(torch.tensor(sizes))

        outputs.append(OutputTensor(f"{stem}weight_packed", "I32", (rows, columns // 8), codes))
        outputs.append(
            OutputTensor(f"{stem}weight_scale", "BF16", (rows, columns // INT4_GROUP), scale)
        )
        outputs.append(OutputTensor(f"{stem}weight_shape", "I64", (2,), shape))
    return outputs


def _quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a matrix, whose rows are divided among threads.

    Each of them computes by itself. Torch's own threads wait for each other after every operation,
    which took 17 times as long while other programs kept the processor busy.
    """
    parts = weight.chunk(min(ROUNDING_THREADS, len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(len(parts), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        groups = list(pool.map(quantize_int4, parts))
    return torch.cat([part.codes for part in groups]), torch.cat([part.scales for part in groups])


def quantization_config(checkpoint: Checkpoint, rounded: Collection[str]) -> dict[str, Any]:
    """Return the entry of config.json; matrices that are not rounded are in its ignore list."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": INT4_GROUP,
    }
    unrounded = (
        _stored_name(name, meta).removesuffix(".weight")
        for name, meta in checkpoint.tensors.items()
        if name not in rounded and len(meta.shape) == 2 and name.endswith(".weight")
    )
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": sorted(unrounded),
        "config_groups": {"group_0": group},
    }


def _stored_name(name: str, meta: TensorMeta) -> str:
    """Return a tensor's name in the file, or an expert's name where the file has all experts in one
    tensor.
    """
    return meta.name if text_name(meta.name) == name else name


def _to_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's bytes."""
    data = bytearray(tensor.nbytes)
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor.contiguous().view(torch.uint8).flatten())
    return bytes(data)
