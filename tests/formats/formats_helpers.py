"""What the tests of this folder share: writing small model files, and asserting a proper refusal."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spd.errors import SpdError

LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64},
    **{"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512},
    **{"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "bos_token_id": 1},
    "eos_token_id": 2,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}


@contextmanager
def refused(kind: type[SpdError], *words: str, exit_code: int = 4, seconds: float = 2.0) -> Iterator[Any]:
    """The block must raise exactly `kind`, with one printable line that holds all the words.

    It may take `seconds` of this process's CPU time: a busy machine must not fail a test.
    """
    start = time.process_time()
    with pytest.raises(SpdError) as caught:
        yield caught
    assert time.process_time() - start < seconds
    error = caught.value
    assert type(error) is kind, error
    assert error.exit_code == exit_code
    assert error.message.isprintable() and len(error.message) < 600
    for word in words:
        assert word in error.message, f"{word!r} is not in {error.message!r}"


def write_json(folder: Path, name: str, value: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(value))
    return path


def shard_bytes(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_shard(path: Path, shapes: Mapping[str, list[int]], dtype: str = "F32", size: int = 4) -> Path:
    """A valid file; every element of tensor i has all bytes equal to i + 1."""
    header, data = {}, b""
    for number, (name, shape) in enumerate(shapes.items()):
        nbytes = size
        for length in shape:
            nbytes *= length
        header[name] = entry(shape, len(data), len(data) + nbytes, dtype)
        data += bytes([number + 1]) * nbytes
    path.write_bytes(shard_bytes(header, data))
    return path


def write_sharded(folder: Path, shards: Mapping[str, Mapping[str, list[int]]]) -> dict[str, str]:
    """Shards and their index; returns the weight map."""
    weight_map = {}
    for shard, shapes in shards.items():
        write_shard(folder / shard, shapes)
        weight_map.update(dict.fromkeys(shapes, shard))
    write_json(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return weight_map
