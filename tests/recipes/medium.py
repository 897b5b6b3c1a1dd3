"""Write the 0.35 B checkpoint of the CPU benchmarks, and the draft made of its first two layers.

Qwen3-shaped with random weights. The layers that the draft lacks have a small gain (DAMPING), so
that it agrees with the target's greedy choice about as often as a trained one would. Its acceptance
belongs to these two folders and says nothing about a trained model: it is for speed and equality.
Deterministic; imports nothing from `spd`. Run it from the repository root:

    python tests/recipes/medium.py OUT            writes OUT and OUT/draft
    python tests/recipes/medium.py OUT --hybrid   both as Qwen3.5, OUT with an MTP layer
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.recipes.tiny import QWEN3, write_json, write_tensors, write_tiny
from tests.recipes.tiny_hybrid import write_tiny_hybrid

DRAFT_LAYERS = 2
HYBRID_DRAFT_LAYERS = 4  # three of gated DeltaNet and one of attention
DAMPING = 0.03
SHAPE: dict[str, Any] = {
    "hidden": 1024,
    "layers": 28,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 64,
    "intermediate": 3072,
    "vocab": 8192,
    "max_positions": 4096,
}
HYBRID: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""As Qwen3.5-0.8B, with fewer layers and ids."""


def write_medium_hybrid(folder: Path, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write a hybrid whose MTP layer agrees with it often, and return its folder."""
    return write_tiny_hybrid(
        folder, dtype=dtype, mtp=True, agreeing=True, gain=0.006, seed=seed, **HYBRID
    )


def write_medium(folder: Path, dtype: str = "bfloat16", seed: int = 0, **shape: Any) -> Path:
    """Write the target and return its folder; `shape` overrides SHAPE (tests write a small one)."""
    return write_tiny(
        folder=folder,
        architecture=QWEN3,
        tie=True,
        dtype=dtype,
        seed=seed,
        rope={"rope_type": "default", "rope_theta": 1e6},
        residual_gain=lambda layer: 1.0 if layer < DRAFT_LAYERS else DAMPING,
        **{**SHAPE, **shape},
    )


def write_medium_draft(folder: Path, source: Path, layers: int = DRAFT_LAYERS) -> Path:
    """Write the draft: `source`'s embeddings, final norm and first layers, unchanged.

    Return its folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    config.pop("mtp_num_hidden_layers", None)
    write_json(folder / "config.json", config)
    draft_tensors = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if not name.startswith("mtp.")
        and (not name.startswith("model.layers.") or int(name.split(".")[2]) < layers)
    }
    write_tensors(folder, draft_tensors)
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / file, folder / file)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write the 0.35 B benchmark checkpoint and its draft."
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hybrid", action="store_true")
    options = parser.parse_args()
    write = write_medium_hybrid if options.hybrid else write_medium
    print(write(options.out, options.dtype, options.seed))
    layers = HYBRID_DRAFT_LAYERS if options.hybrid else DRAFT_LAYERS
    print(write_medium_draft(options.out / "draft", options.out, layers))
