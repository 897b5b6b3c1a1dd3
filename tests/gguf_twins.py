"""Tiny folders, and the GGUF files that llama.cpp's own converter makes of them.

`LLAMA_CPP` names the folder of llama.cpp's source: `vendor/llama.cpp` in the sdist of `llama-cpp-python`. Its
converter runs without a vocabulary, which it would only take where it knows the tokenizer's hash.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.recipes.tiny import VARIANTS, write_json, write_tiny
from tests.recipes.tiny_dense import FAMILIES, FULL, SLIDING, write_dense
from tests.recipes.tiny_hybrid import write_tiny_hybrid
from tests.recipes.tiny_mtp import write_tiny_mtp

SCRIPT = "convert_hf_to_gguf.py"


def llama_cpp() -> Path | None:
    """Return the folder of llama.cpp's source, None where nobody names it."""
    named = os.environ.get("LLAMA_CPP")
    return Path(named) if named and Path(named, SCRIPT).is_file() else None


def _variant(folder: Path, name: str, config: Mapping[str, Any]) -> Path:
    write_tiny(folder, **VARIANTS[name])
    return _with_keys(folder, config)


def _family(folder: Path, name: str, config: Mapping[str, Any]) -> Path:
    options = {"layers": config["num_hidden_layers"]} if "num_hidden_layers" in config else {}
    write_dense(folder, name, max_positions=2048, config=dict(config), **options)
    return folder


def _hybrid(folder: Path, config: Mapping[str, Any], **options: Any) -> Path:
    return write_tiny_hybrid(folder, **options, **config)


def _mtp(folder: Path, config: Mapping[str, Any], **options: Any) -> Path:
    write_tiny_mtp(folder, **options)
    return _with_keys(folder, config)


def _with_keys(folder: Path, keys: Mapping[str, Any]) -> Path:
    path = folder / "config.json"
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **keys})
    return folder


HALF = {"query_pre_attn_scalar": 16}
"""Of heads of 16, whose root scores are divided by."""
KEYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "gemma2": HALF,
    "gemma3": {**HALF, "sliding_window_pattern": 6, "num_hidden_layers": 7},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 4},
    "cohere2": {"rotary_pct": 1.0, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]},
    "hunyuan": {"rope_scaling": None, "rope_theta": 1e4},
    "hunyuan_moe": {"rope_scaling": None, "rope_theta": 1e4},
    "granite_hybrid_moe": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "lfm2": {"block_auto_adjust_ff_dim": False},
}
"""What a file can say, where the recipe's own choice is lost by the converter."""
NOT_CONVERTED = (
    "ministral",
    "muse_glimmer",
    "mimo",
    "sharded",
    "glm",
    "gemma3_listed",
)
"""Classes that the converter does not know, and choices that its files cannot say."""
TWINS: dict[str, Callable[[Path], Path]] = {
    **{
        name: partial(_family, name=name, config=KEYS.get(name, {}))
        for name in FAMILIES
        if name not in NOT_CONVERTED
    },
    **{
        name: partial(_variant, name=name, config=KEYS.get(name, {}))
        for name in VARIANTS
        if name not in NOT_CONVERTED
    },
    "qwen35_mtp": partial(_hybrid, config={"mtp_num_hidden_layers": 1}, mtp=True),
    "glm4_moe_mtp": partial(
        _mtp, config={"num_nextn_predict_layers": 1}, family="glm4", variant="glm4_moe"
    ),
}
"""By names, what writes their folders."""


def convert(source: Path, folder: Path, out: Path, kind: str = "f32", *options: str) -> Path:
    """Run the converter in a process of its own. Raises CalledProcessError with what it said."""
    command = [sys.executable, "-W", "ignore", __file__, str(source), str(folder), str(out), kind]
    subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    return out


def main(source: str, folder: str, out: str, kind: str, *options: str) -> None:
    """Run the converter here, with no vocabulary set."""
    sys.path[:0] = [source, str(Path(source, "gguf-py"))]
    conversion: Any = __import__("conversion.base")
    find = conversion.get_model_class

    def without_vocabulary(kind: Any) -> None:
        kind.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
        for each in kind.__subclasses__():
            without_vocabulary(each)

    def found(*args: Any, **keys: Any) -> Any:
        result = find(*args, **keys)
        without_vocabulary(conversion.base.TextModel)
        return result

    conversion.get_model_class = found
    sys.argv = [SCRIPT, folder, "--outfile", out, "--outtype", kind, *options]
    runpy.run_path(str(Path(source, SCRIPT)), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
