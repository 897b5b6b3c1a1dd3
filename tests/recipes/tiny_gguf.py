"""Write tiny GGUF models: a Llama whose matrices are random blocks of one type, without a vocabulary."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from spd.formats.gguf.block_types import BY_NAME
from tests.formats.gguf.gguf_helpers import Stored, Typed, Value, write_gguf

SIZES = {"hidden": 256, "inner": 512, "heads": 4, "kv_heads": 2, "layers": 2, "vocab": 320}
HALVES = {
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
"""Where the float16 numbers of a block stand, by types."""
LATTICES = {"IQ2_XXS": 50.0, "IQ2_XS": 50.0, "IQ2_S": 50.0, "IQ3_XXS": 120.0, "IQ3_S": 120.0}
LEVEL = {"Q2_K": 30.0, "Q3_K": 60.0, "Q4_K": 300.0, "Q5_K": 600.0, "Q6_K": 900.0, "IQ4_XS": 1200.0}
"""About how large a value is in units of the first of these numbers."""
USUAL_LEVEL = 8.0


def block_bytes(kind: str, shape: Sequence[int], seed: str, std: float) -> bytes:
    """Return random blocks whose values are about as large as `std`."""
    draw = random.Random(f"{seed} {kind}")
    block = BY_NAME[kind]
    count = math.prod(shape) // block.elements
    if block.elements == 1:
        return _floats(kind, [draw.gauss(0, std) for _ in range(count)])
    data = bytearray(draw.randbytes(count * block.nbytes))
    level = (LEVEL | LATTICES).get(kind, 60.0 if kind in ("Q8_0", "IQ4_NL") else USUAL_LEVEL)
    for start in range(0, len(data), block.nbytes):
        if kind == "MXFP4":
            data[start] = 126 + round(math.log2(std))
        if kind == "IQ1_M":  # whose number stands in the upper halves of four bytes
            (scale,) = struct.unpack("<H", struct.pack("<e", std / 8))
            for number, at in enumerate((49, 51, 53, 55)):
                data[start + at] = data[start + at] & 0x0F | scale >> 4 * number << 4 & 0xF0
        for number, at in enumerate(HALVES.get(kind, ())):
            scale = std / level * (draw.choice((-1, 1)) if number == 0 else -4.0)
            data[start + at : start + at + 2] = struct.pack("<e", scale)
    return bytes(data)


def _floats(kind: str, values: Sequence[float]) -> bytes:
    if kind == "BF16":  # the upper half of each number
        whole = struct.pack(f"<{len(values)}f", *values)
        return b"".join(whole[at + 2 : at + 4] for at in range(0, len(whole), 4))
    return struct.pack(f"<{len(values)}{'e' if kind == 'F16' else 'f'}", *values)


def tiny_tensors(kind: str | Mapping[str, str], seed: int = 0, **sizes: int) -> dict[str, Stored]:
    """Return the tensors of a Llama whose matrices are of one type, or of types by the ends of names."""
    kinds = {"": kind} if isinstance(kind, str) else kind
    own = SIZES | sizes
    hidden = own["hidden"]
    keys = hidden // own["heads"] * own["kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (own["vocab"], hidden),
        "output.weight": (own["vocab"], hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(own["layers"]):
        stem = f"blk.{layer}."
        shapes |= {
            f"{stem}attn_norm.weight": (hidden,),
            f"{stem}attn_q.weight": (hidden, hidden),
            f"{stem}attn_k.weight": (keys, hidden),
            f"{stem}attn_v.weight": (keys, hidden),
            f"{stem}attn_output.weight": (hidden, hidden),
            f"{stem}ffn_norm.weight": (hidden,),
            f"{stem}ffn_gate.weight": (own["inner"], hidden),
            f"{stem}ffn_up.weight": (own["inner"], hidden),
            f"{stem}ffn_down.weight": (hidden, own["inner"]),
        }
    found: dict[str, Stored] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            found[name] = Stored("F32", shape, _floats("F32", [1.0] * shape[0]))
            continue
        std = 1.5 / math.sqrt(shape[1])
        own_kind = next(other for end, other in kinds.items() if name.endswith(end))
        data = block_bytes(own_kind, shape, f"{seed} {name}", std)
        found[name] = Stored(own_kind, shape, data)
    return found


def tiny_metadata(**sizes: int) -> dict[str, Value]:
    """Return the keys of a Llama of these sizes, without a vocabulary."""
    own = SIZES | sizes
    return {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "llama.block_count": own["layers"],
        "llama.context_length": 512,
        "llama.embedding_length": own["hidden"],
        "llama.feed_forward_length": own["inner"],
        "llama.attention.head_count": own["heads"],
        "llama.attention.head_count_kv": own["kv_heads"],
        "llama.attention.layer_norm_rms_epsilon": Typed("f", 1e-5),
        "llama.rope.freq_base": Typed("f", 10000.0),
        "llama.rope.dimension_count": own["hidden"] // own["heads"],
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_tiny_gguf(path: Path, kind: str | Mapping[str, str], **sizes: int) -> Path:
    """Write a Llama whose matrices are of one type, or of types by the ends of names. Returns its path."""
    return write_gguf(path, tiny_metadata(**sizes), tiny_tensors(kind, **sizes))
