"""Small folders with MTP layers, whole or damaged, and an index as large as DeepSeek-V3's; without `spd`."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.recipes.demo_checkpoint import common_config, deepseek_config, to_checkpoint
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
V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}


def write_deepseek(folder: Path, *, shards: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """A random DeepSeek-V3-shaped model with its MTP layer in the last shard; returns its tensors."""
    torch.manual_seed(seed)
    model = Decoder(SHAPE)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    tensors = to_checkpoint(model)
    folder.mkdir(parents=True)
    config = deepseek_config(SHAPE) | common_config(SHAPE, 2)
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, tensors, shards)
    return tensors


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> None:
    """One file, or shards of which the last holds the MTP layer and the one before it what is not a layer."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for index, (name, tensor) in enumerate(tensors.items()):
        outside = shards - 2 if not name.startswith("model.layers.") else index % (shards - 2)
        parts[-1 if name.startswith(PREFIX) else outside][name] = tensor
    weight_map = {}
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def change_tensors(folder: Path, drop: tuple[str, ...] = (), **added: Tensor) -> None:
    """Rewrite a folder's one file without some tensors and with others."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in drop}
    save_file(kept | added, folder / "model.safetensors", metadata={"format": "pt"})


Entry = tuple[str, str, tuple[int, ...]]


def v3_entries(experts: int) -> Iterator[Entry]:
    """(name, dtype, shape) of every tensor of DeepSeek-V3, its MTP layer last."""
    h, table = V3["hidden_size"], (V3["vocab_size"], V3["hidden_size"])
    yield from (("model.embed_tokens.weight", "BF16", table), ("lm_head.weight", "BF16", table))
    yield "model.norm.weight", "BF16", (h,)
    for layer in range(62):
        at = f"model.layers.{layer}."
        vectors = {"input_layernorm": h, "post_attention_layernorm": h}
        vectors |= {"self_attn.q_a_layernorm": 1536, "self_attn.kv_a_layernorm": 512}
        yield from ((f"{at}{name}.weight", "BF16", (size,)) for name, size in vectors.items())
        matrices = {
            "self_attn.q_a_proj": (1536, h),
            "self_attn.q_b_proj": (24576, 1536),
            "self_attn.kv_a_proj_with_mqa": (576, h),
            "self_attn.kv_b_proj": (32768, 512),
            "self_attn.o_proj": (h, 16384),
        }
        owners = {"mlp.": 18432}
        if layer >= 3:
            owners = {"mlp.shared_experts.": 2048} | {f"mlp.experts.{e}.": 2048 for e in range(experts)}
            yield f"{at}mlp.gate.weight", "BF16", (experts, h)
            yield f"{at}mlp.gate.e_score_correction_bias", "F32", (experts,)
        for owner, width in owners.items():
            matrices |= {f"{owner}gate_proj": (width, h), f"{owner}up_proj": (width, h)}
            matrices[f"{owner}down_proj"] = (h, width)
        for name, shape in matrices.items():
            yield f"{at}{name}.weight", "F8_E4M3", shape
            yield f"{at}{name}.weight_scale_inv", "F32", tuple(-(-size // 128) for size in shape)
    at = "model.layers.61."
    yield from ((f"{at}{name}.weight", "BF16", (h,)) for name in ("enorm", "hnorm", "shared_head.norm"))
    yield f"{at}eh_proj.weight", "BF16", (h, 2 * h)
    yield from ((f"{at}{name}.weight", "BF16", table) for name in ("embed_tokens", "shared_head.head"))


def write_sparse_v3(folder: Path, shards: int = 163, experts: int = 256) -> int:
    """DeepSeek-V3's names and shapes in files whose data are holes; returns how many tensors."""
    folder.mkdir(parents=True)
    config = deepseek_config(SHAPE) | common_config(SHAPE, 1) | V3 | {"n_routed_experts": experts}
    (folder / "config.json").write_text(json.dumps(config))
    entries = list(v3_entries(experts))
    per, weight_map = -(-len(entries) // shards), {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:06}.safetensors"
        part = entries[number * per : (number + 1) * per]
        write_hollow(folder / file, part)
        weight_map |= {name: file for name, _, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return len(entries)


def write_hollow(path: Path, entries: list[Entry]) -> None:
    """A safetensors file of these tensors, every byte of data a hole."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in entries:
        size = SIZES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
