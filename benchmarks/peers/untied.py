"""A checkpoint with a head tensor of its own: vLLM's DeepSeek models read no tied embeddings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from spd.formats.names import EMBEDDING, HEAD


def read_config(model: Path) -> dict[str, Any]:
    """Return `config.json` of a folder."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return config


def is_latent(model: Path) -> bool:
    """True if the folder's attention is latent, as DeepSeek's."""
    return bool(read_config(model).get("kv_lora_rank"))


def untie(model: Path, to: Path) -> Path:
    """Write a copy of `model` into `to` where the head is written out; the same function of the same numbers.

    Returns the copy. For one-file checkpoints; raises FileNotFoundError for sharded ones.
    """
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, to)
    tensors = load_file(model / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING].clone()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = read_config(model) | {"tie_word_embeddings": False}
    (to / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return to
