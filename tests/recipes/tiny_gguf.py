"""Write tiny GGUF models: a Llama of random blocks of one type, without a vocabulary."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from spd.formats.gguf.block_types import TYPES_BY_NAME
from tests.formats.gguf.gguf_helpers import TensorSpec, TypedValue, Value, write_gguf

SIZES = {
    "hidden": 256,
    "inner": 512,
    "heads": 4,
    "kv_heads": 2,
    "layers": 2,
    "vocab": 320,
    "full_layers": 2,
}
"""Sizes of the default model; layers behind the first `full_layers` are damped."""
DAMPED_GAIN = 0.4
"""The factor of a damped layer's output projections: a draft of the full layers often agrees."""
FLOAT16_OFFSETS = {
    "F16": range(0),
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
}
"""Offsets of the float16 numbers in a block, by types."""
LATTICE_LEVELS = {"IQ2_XXS": 50.0, "IQ2_XS": 50.0, "IQ2_S": 50.0, "IQ3_XXS": 120.0, "IQ3_S": 120.0}
LEVELS = {"Q2_K": 30.0, "Q3_K": 60.0, "Q4_K": 300.0, "Q5_K": 600.0, "Q6_K": 900.0, "IQ4_XS": 1200.0}
"""About the size of a value in units of a block's first float16 number."""
DEFAULT_LEVEL = 8.0


def block_bytes(kind: str, shape: Sequence[int], seed: str, std: float) -> bytes:
    """Return random blocks whose values are about as large as `std`."""
    draw = random.Random(f"{seed} {kind}")
    block = TYPES_BY_NAME[kind]
    count = math.prod(shape) // block.elements
    if block.elements == 1:
        return _floats(kind, [draw.gauss(0, std) for _ in range(count)])
    data = bytearray(draw.randbytes(count * block.nbytes))
    level = (LEVELS | LATTICE_LEVELS).get(
        kind, 60.0 if kind in ("Q8_0", "IQ4_NL") else DEFAULT_LEVEL
    )
    for start in range(0, len(data), block.nbytes):
        if kind == "MXFP4":
            data[start] = 126 + round(math.log2(std))
        if kind == "IQ1_M":  # its number is in the upper halves of four bytes
            (scale,) = struct.unpack("<H", struct.pack("<e", std / 8))
            for number, offset in enumerate((49, 51, 53, 55)):
                data[start + offset] = data[start + offset] & 0x0F | scale >> 4 * number << 4 & 0xF0
        for number, offset in enumerate(FLOAT16_OFFSETS.get(kind, ())):
            scale = std / level * (draw.choice((-1, 1)) if number == 0 else -4.0)
            data[start + offset : start + offset + 2] = struct.pack("<e", scale)
    return bytes(data)


def _floats(kind: str, values: Sequence[float]) -> bytes:
    if kind == "BF16":  # the upper half of each number
        data = struct.pack(f"<{len(values)}f", *values)
        return b"".join(data[offset + 2 : offset + 4] for offset in range(0, len(data), 4))
    return struct.pack(f"<{len(values)}{'e' if kind == 'F16' else 'f'}", *values)


def tiny_tensors(
    kind: str | Mapping[str, str], seed: int = 0, **sizes: int
) -> dict[str, TensorSpec]:
    """Return a Llama's tensors, with matrices of one type, or of types by the ends of names."""
    kinds = {"": kind} if isinstance(kind, str) else kind
    model_sizes = SIZES | sizes
    hidden = model_sizes["hidden"]
    keys = hidden // model_sizes["heads"] * model_sizes["kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (model_sizes["vocab"], hidden),
        "output.weight": (model_sizes["vocab"], hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(model_sizes["layers"]):
        stem = f"blk.{layer}."
        shapes |= {
            f"{stem}attn_norm.weight": (hidden,),
            f"{stem}attn_q.weight": (hidden, hidden),
            f"{stem}attn_k.weight": (keys, hidden),
            f"{stem}attn_v.weight": (keys, hidden),
            f"{stem}attn_output.weight": (hidden, hidden),
            f"{stem}ffn_norm.weight": (hidden,),
            f"{stem}ffn_gate.weight": (model_sizes["inner"], hidden),
            f"{stem}ffn_up.weight": (model_sizes["inner"], hidden),
            f"{stem}ffn_down.weight": (hidden, model_sizes["inner"]),
        }
    tensors: dict[str, TensorSpec] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[name] = TensorSpec("F32", shape, _floats("F32", [1.0] * shape[0]))
            continue
        std = 1.5 / math.sqrt(shape[1])
        is_output = name.endswith(("attn_output.weight", "ffn_down.weight"))
        if is_output and int(name.split(".")[1]) >= model_sizes["full_layers"]:
            std *= DAMPED_GAIN
        tensor_kind = next(other for end, other in kinds.items() if name.endswith(end))
        data = block_bytes(tensor_kind, shape, f"{seed} {name}", std)
        tensors[name] = TensorSpec(tensor_kind, shape, data)
    return tensors


def tiny_metadata(**sizes: int) -> dict[str, Value]:
    """Return the keys of a Llama of these sizes, without a vocabulary."""
    model_sizes = SIZES | sizes
    return {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "llama.block_count": model_sizes["layers"],
        "llama.context_length": 512,
        "llama.embedding_length": model_sizes["hidden"],
        "llama.feed_forward_length": model_sizes["inner"],
        "llama.attention.head_count": model_sizes["heads"],
        "llama.attention.head_count_kv": model_sizes["kv_heads"],
        "llama.attention.layer_norm_rms_epsilon": TypedValue("f", 1e-5),
        "llama.rope.freq_base": TypedValue("f", 10000.0),
        "llama.rope.dimension_count": model_sizes["hidden"] // model_sizes["heads"],
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_tiny_gguf(path: Path, kind: str | Mapping[str, str], **sizes: int) -> Path:
    """Write a Llama whose matrices are of one type, or of types by the ends of names.

    Returns its path.
    """
    return write_gguf(path, tiny_metadata(**sizes), tiny_tensors(kind, **sizes))
