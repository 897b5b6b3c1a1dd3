"""Write small folders with MTP layers, and safetensors files of headers alone; without `spd`."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.recipes.demo_checkpoint import make_config, to_checkpoint
from tests.recipes.demo_model import Decoder, DeepseekShape

SHAPE = DeepseekShape(
    hidden=32,
    layers=2,
    heads=2,
    kv_rank=16,
    nope=8,
    rope=8,
    value=8,
    dense=48,
    expert=16,
    shared=1,
    routed=4,
    groups=2,
    top_groups=1,
    top_experts=2,
    vocab=64,
)
PREFIX = "model.layers.2."
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4, "I64": 8}


def write_deepseek(folder: Path, *, shards: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Write a random DeepSeek-V3-shaped model with its MTP layer in the last shard.

    Return its tensors.
    """
    torch.manual_seed(seed)
    model = Decoder(SHAPE)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    tensors = to_checkpoint(model)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(make_config(SHAPE, 2)))
    write_tensors(folder, tensors, shards)
    return tensors


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> None:
    """Write one file, or shards: the MTP layer in the last, tensors of no layer before it."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for index, (name, tensor) in enumerate(tensors.items()):
        shard = shards - 2 if not name.startswith("model.layers.") else index % (shards - 2)
        parts[-1 if name.startswith(PREFIX) else shard][name] = tensor
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


Entry = tuple[str, str, tuple[int, ...]]
Shape = int | tuple[int, ...]


def weights(
    stem: str, dtype: str = "BF16", last: str = ".weight", **shapes: Shape
) -> Iterator[Entry]:
    """Yield `entries` of shapes that are given as keywords."""
    return entries(stem, shapes, dtype, last)


def entries(
    stem: str, shapes: Mapping[str, Shape], dtype: str = "BF16", last: str = ".weight"
) -> Iterator[Entry]:
    """Yield tensors below a stem. In names __ stands for a point.

    A vector's shape is its length.
    """
    for name, shape in shapes.items():
        tensor_name = f"{stem}{name.replace('__', '.')}{last}"
        yield tensor_name, dtype, (shape,) if isinstance(shape, int) else shape


Names = tuple[str, ...]
Entries = Iterator[Entry]
Make = Callable[..., Entries]
GATED = ("gate_proj", "up_proj", "down_proj")


def gated(
    stem: str, hidden: int, inner: int, names: Names = GATED, make: Make = weights
) -> Iterator[Entry]:
    """Yield a gated MLP's matrices."""
    return make(
        stem, **dict(zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True))
    )


def attention(
    stem: str, hidden: int, heads: int, keys: int, size: int, make: Make = weights
) -> Entries:
    """Yield queries, keys, values and the output, without biases."""
    shapes = {"q_proj": (heads * size, hidden), "o_proj": (hidden, heads * size)}
    return make(stem, **shapes, **dict.fromkeys(("k_proj", "v_proj"), (keys * size, hidden)))


def write_hollow(path: Path, entries: list[Entry]) -> None:
    """Write a safetensors file of these tensors, all data a hole in the file."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in entries:
        size = SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
