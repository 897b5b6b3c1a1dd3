"""Tiny folders, and the GGUF files that llama.cpp's converter makes of them.

`LLAMA_CPP` names the folder of llama.cpp's source: `vendor/llama.cpp` in the sdist of
`llama-cpp-python`. Its converter runs without a vocabulary, which it would only take where it knows
the tokenizer's hash.
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
from tests.recipes.tiny_changes import with_layer_embeddings
from tests.recipes.tiny_dense import FAMILIES, FULL, SLIDING, write_dense
from tests.recipes.tiny_hybrid import write_tiny_hybrid
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime.test_runtime_hybrid import write_sparse

SCRIPT = "convert_hf_to_gguf.py"


def llama_cpp() -> Path | None:
    """Return the folder of llama.cpp's source, None where `LLAMA_CPP` does not name one."""
    folder = os.environ.get("LLAMA_CPP")
    return Path(folder) if folder and Path(folder, SCRIPT).is_file() else None


def quantize_tool(source: Path) -> Path | None:
    """Return llama.cpp's `llama-quantize` where it was built in its source, else None."""
    tool = source / "build" / "bin" / "llama-quantize"
    return tool if os.access(tool, os.X_OK) else None


def _variant(folder: Path, name: str, config: Mapping[str, Any]) -> Path:
    options = dict(VARIANTS[name])
    if "extra" in options:
        options["extra"] = {**options["extra"], **config}
    write_tiny(folder, **options)
    return _with_keys(folder, config)


def _family(folder: Path, name: str, config: Mapping[str, Any]) -> Path:
    options: dict[str, Any] = {"tie": True} if config.get("tie_word_embeddings") else {}
    if "num_hidden_layers" in config:
        options["layers"] = config["num_hidden_layers"]
    return write_dense(folder, name, max_positions=2048, config=dict(config), **options)


def _hybrid(folder: Path, config: Mapping[str, Any], **options: Any) -> Path:
    return write_tiny_hybrid(folder, **options, **config)


def _mtp(folder: Path, config: Mapping[str, Any], **options: Any) -> Path:
    write_tiny_mtp(folder, **options)
    return _with_keys(folder, config)


def _sparse_hybrid(folder: Path, name: str) -> Path:
    write_sparse(folder, name)
    return folder


def _with_keys(folder: Path, keys: Mapping[str, Any]) -> Path:
    path = folder / "config.json"
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **keys})
    return folder


CONVERTER_OPTIONS = dict.fromkeys(("mimo_v2", "qwen35_moe", "qwen3_next"), ("--no-mtp",))
"""Options of the converter for some twins."""
READ_AS_PUBLISHED = ("mimo_v2", "step3", "mimo_v2_mtp", "step3_mtp")
"""Twins whose configuration the converter reads as published, which `transformers` would change."""
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
HEAD_SCALE = {"query_pre_attn_scalar": 16}
"""The score scale of heads of 16 elements."""
CONFIG_KEYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "gemma2": HEAD_SCALE,
    "gemma3": {**HEAD_SCALE, "sliding_window_pattern": 6, "num_hidden_layers": 7},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 4},
    "cohere2": {"rotary_pct": 1.0, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]},
    "hunyuan": {"rope_scaling": None, "rope_theta": 1e4},
    "hunyuan_moe": {"rope_scaling": None, "rope_theta": 1e4},
    "granite_hybrid_moe": {
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "position_embedding_type": "nope",
    },
    "lfm2_moe": {"tie_embedding": True, "tie_word_embeddings": True, "routed_scaling_factor": 1.0},
    "qwen3_moe": {"mlp_only_layers": []},
    "deepseek_v2_lite": {"n_group": 1, "topk_group": 1, "rope_scaling": YARN},
    "step3": {
        "num_attention_groups": 2,
        "rope_parameters": FAMILIES["step3"][1]["rope_scaling"],
    },
    "mimo_v2": {
        "rope_parameters": None,
        "rope_theta": 1e5,
        "swa_rope_theta": 200.0,
        "partial_rotary_factor": 0.5,
        "hybrid_layer_pattern": [0, 1, 1, 1],
        "swa_head_dim": 16,
        "swa_v_head_dim": 10,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "topk_method": "noaux_tc",
    },
}
"""Values that a file can express, where the converter loses the recipe's."""
NOT_CONVERTED = (
    "ministral",
    "muse_glimmer",
    "mimo",
    "sharded",
    "glm",
    "gemma3_listed",
)
"""Classes that the converter does not know, and values that its files cannot express."""
TWINS: dict[str, Callable[[Path], Path]] = {
    **{
        name: partial(_family, name=name, config=CONFIG_KEYS.get(name, {}))
        for name in FAMILIES
        if name not in NOT_CONVERTED
    },
    **{
        name: partial(_variant, name=name, config=CONFIG_KEYS.get(name, {}))
        for name in VARIANTS
        if name not in NOT_CONVERTED
    },
    "qwen35_moe": partial(_sparse_hybrid, name="Qwen3_5Moe"),
    "qwen3_next": partial(_sparse_hybrid, name="Qwen3Next"),
    "qwen35_mtp": partial(_hybrid, config={"mtp_num_hidden_layers": 1}, mtp=True, agreeing=True),
    **{
        f"{variant}_mtp": partial(
            _mtp,
            config={**CONFIG_KEYS.get(variant, {}), "num_nextn_predict_layers": 1},
            family=family,
            variant=variant,
            kind="copy",
            modules=3 if variant == "mimo_v2" else 1,
        )
        for variant, family in (
            ("glm4_moe", "glm4"),
            ("glm4_moe_lite", "glm4"),
            ("nemotron_h_latent", "nemotron_h"),
            ("step3", "step3"),
            ("mimo_v2", "mimo_v2"),
        )
    },
}
"""The functions that write the twins' folders, by name."""


WIDE_SIZES = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
"""Widths that blocks of 256 divide."""
WIDE_KEYS = {
    "moe_intermediate_size": 256,
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
"""The widths of experts and of latent attention, where a twin has them."""
WIDE_HYBRID = {
    "hidden_size": 256,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "linear_num_value_heads": 4,
}
"""A block of 256 columns holds the heads of two keys, which the converter has moved."""
WIDE_EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
LAYER_TABLE_WIDTH = 64
"""Elements of a token's embedding in each layer of a wide Gemma 4."""


def _widened(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of a configuration, with those that are widths made wide."""
    return {key: WIDE_KEYS.get(key, value) if value else value for key, value in keys.items()}


def _wide_variant(folder: Path, name: str) -> Path:
    options = {**VARIANTS[name], **WIDE_SIZES}
    options["kv_heads"] = VARIANTS[name].get("kv_heads", WIDE_SIZES["kv_heads"])
    if "extra" in options:
        options["extra"] = {**_widened(options["extra"]), **CONFIG_KEYS.get(name, {})}
    write_tiny(folder, **options)
    return _with_keys(folder, CONFIG_KEYS.get(name, {}))


def _wide_family(folder: Path, name: str) -> Path:
    shape, keys, _ = FAMILIES[name]
    options: dict[str, Any] = dict(WIDE_SIZES)
    if "extra" in shape:
        options["extra"] = _widened(shape["extra"])
    config = dict(CONFIG_KEYS.get(name, {}))
    if "num_local_experts" in keys:
        config["intermediate_size"] = WIDE_KEYS["moe_intermediate_size"]
    if "tie_word_embeddings" in config:
        options["tie"] = config["tie_word_embeddings"]
    return write_dense(folder, name, max_positions=2048, config=config, **options)


def _wide_gemma4(folder: Path) -> Path:
    change = partial(with_layer_embeddings, width=LAYER_TABLE_WIDTH)
    config = {"hidden_size_per_layer_input": LAYER_TABLE_WIDTH}
    return write_dense(folder, "gemma4", max_positions=2048, config=config, change=change)


def _wide_sparse_hybrid(folder: Path, name: str) -> Path:
    write_sparse(folder, name, **WIDE_HYBRID, **WIDE_EXPERTS)
    return folder


WIDE_TWINS: dict[str, Callable[[Path], Path]] = {
    **{
        name: partial(_wide_variant, name=name)
        for name in ("qwen3_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "ernie4_5_moe")
    },
    **{
        name: partial(_wide_family, name=name)
        for name in (
            "cohere2",
            "phi3",
            "gpt_oss",
            "granite_moe",
            "lfm2_moe",
            "mixtral",
            "minimax_m2",
        )
    },
    "gemma4": _wide_gemma4,
    "qwen35_moe": partial(_wide_sparse_hybrid, name="Qwen3_5Moe"),
    "qwen3_next": partial(_wide_sparse_hybrid, name="Qwen3Next"),
    "qwen35_mtp": partial(
        _hybrid,
        config={"mtp_num_hidden_layers": 1, "intermediate_size": 512, **WIDE_HYBRID},
        mtp=True,
        agreeing=True,
    ),
}
"""Twins of widths that blocks of 256 divide, all or most of them."""


def convert(source: Path, folder: Path, out: Path, kind: str = "f32", *options: str) -> Path:
    """Run the converter in a separate process. Raises CalledProcessError with its output."""
    command = [sys.executable, "-W", "ignore", __file__, str(source), str(folder), str(out), kind]
    subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    return out


def quantize(tool: Path, file: Path, out: Path, mixture: str, kind: str | None = None) -> Path:
    """Run llama-quantize: a mixture of types, such as Q4_K_M, or one type for every matrix.

    Raises CalledProcessError with its output.
    """
    options = []
    if kind is not None:
        options = ["--tensor-type", f".*={kind.lower()}", "--token-embedding-type", kind.lower()]
        options += ["--output-tensor-type", kind.lower()]
    subprocess.run([tool, *options, file, out, mixture], check=True, capture_output=True)
    return out


def dequantize(tool: Path, file: Path, out: Path) -> Path:
    """Write a file's values in float32, as llama-quantize computes them."""
    subprocess.run([tool, "--allow-requantize", file, out, "F32"], check=True, capture_output=True)
    return out


def main(source: str, folder: str, out: str, kind: str, *options: str) -> None:
    """Run the converter in this process, without a vocabulary."""
    sys.path[:0] = [source, str(Path(source, "gguf-py"))]
    conversion: Any = __import__("conversion.base")
    find = conversion.get_model_class

    def drop_vocabulary(kind: Any) -> None:
        kind.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
        for subclass in kind.__subclasses__():
            drop_vocabulary(subclass)

    def find_text_class(*args: Any, **keys: Any) -> Any:
        """Return the converter's class of a model, without a vocabulary."""
        model_class = find(*args, **keys)
        drop_vocabulary(conversion.base.TextModel)
        return model_class

    def read_published_config(folder: Path, *_: object) -> Any:
        return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))

    if Path(folder).name in READ_AS_PUBLISHED:
        conversion.base.ModelBase.load_hparams = staticmethod(read_published_config)
    conversion.get_model_class = find_text_class
    sys.argv = [SCRIPT, folder, "--outfile", out, "--outtype", kind, *options]
    runpy.run_path(str(Path(source, SCRIPT)), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
