"""Write tiny random checkpoints in the Hugging Face layout, with names as published.

Plain torch, safetensors and json; imports nothing from `spd`, so that the checkpoints are evidence
independent of the program that reads them. Each tensor is drawn from (seed, tensor name), so the
bits of a variant stay when another one changes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

Json = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_SPECIAL = 256
SMALLEST_TOKENIZER = FIRST_SPECIAL + len(SPECIAL_TOKENS)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# Gains of the random layers. Attention is sharp (scores with this standard deviation) and the layers
# dominate the residual stream, or greedy text would repeat its last token; logits have LOGIT_STD, or
# sampling would be uniform and argmax a tie in bf16.
SCORE_STD = 2.0
LOGIT_STD = 3.0
EMBEDDING_STD = 0.05

LLAMA = "LlamaForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
QWEN3_MOE = "Qwen3MoeForCausalLM"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
BOUND_YARN = {**YARN, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
DEEPSEEK = {"architecture": "DeepseekV3ForCausalLM", "tie": False, "kv_heads": 4, "layers": 3}
DEEPSEEK_V3_KEYS = {**LATENT, **EXPERTS, "q_lora_rank": 24}
DEEPSEEK_V2 = {**DEEPSEEK, "architecture": "DeepseekV2ForCausalLM"}
DEEPSEEK_V2_KEYS = {
    **DEEPSEEK_V3_KEYS,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
GLM4 = {"architecture": "Glm4MoeForCausalLM", "attention_bias": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama2": {"architecture": LLAMA, "kv_heads": 4, "tie": False},
    "llama3": {"architecture": LLAMA, "tie": False, "rope": LLAMA3},
    "linear": {
        "architecture": LLAMA,
        "rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "yarn": {"architecture": QWEN3, "rope": YARN},
    "tied": {"architecture": LLAMA, "tie": True},
    "biases": {"architecture": LLAMA, "tie": False, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"architecture": QWEN3, "tie": False},
    "qwen3_bias": {"architecture": QWEN3, "attention_bias": True},
    "wide_heads": {"architecture": QWEN3, "head_dim": 32, "tie": False},
    **{
        f"gqa{8 // keys}": {"architecture": LLAMA, "heads": 8, "kv_heads": keys}
        for keys in (8, 4, 2, 1)
    },
    "deepseek_v3": {
        **DEEPSEEK,
        "rope": {**BOUND_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "extra": DEEPSEEK_V3_KEYS,
    },
    "deepseek_v3_lite": {**DEEPSEEK, "extra": {**DEEPSEEK_V3_KEYS, "q_lora_rank": None}},
    "deepseek_v3_groups": {
        **DEEPSEEK,
        "extra": {**DEEPSEEK_V3_KEYS, "norm_topk_prob": False, "topk_group": 4},
    },
    "deepseek_v2": {
        **DEEPSEEK_V2,
        "rope": {**BOUND_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "extra": {**DEEPSEEK_V2_KEYS, "topk_method": "group_limited_greedy"},
    },
    "deepseek_v2_lite": {
        **DEEPSEEK_V2,
        "rope": {**BOUND_YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
        "extra": {**DEEPSEEK_V2_KEYS, "q_lora_rank": None, "n_shared_experts": 2},
    },
    "glm4_moe": {
        **GLM4,
        "tie": False,
        "extra": {**EXPERTS, "use_qk_norm": True, "partial_rotary_factor": 0.5, **ONE_GROUP},
    },
    "glm4_moe_air": {
        **GLM4,
        "rope_style": "parameters",
        "extra": {**EXPERTS, "use_qk_norm": False, "partial_rotary_factor": 0.5},
    },
    "glm4_moe_lite": {
        **DEEPSEEK,
        "architecture": "Glm4MoeLiteForCausalLM",
        "extra": {**DEEPSEEK_V3_KEYS, **ONE_GROUP},
    },
    "qwen3_moe": {
        "architecture": QWEN3_MOE,
        "tie": False,
        "extra": {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
        },
    },
    "mimo": {"architecture": "MiMoForCausalLM", "tie": False, "attention_bias": True},
    "ernie4_5": {"architecture": "Ernie4_5ForCausalLM", "extra": {"use_bias": False}},
    "ernie4_5_moe": {
        "architecture": "Ernie4_5_MoeForCausalLM",
        "extra": {
            "use_bias": False,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
    },
    "sharded": {"architecture": QWEN3, "tie": False, "shards": 3},
}


def model_type(architecture: str) -> str:
    """Return the model_type of a class's name: qwen3_moe of Qwen3MoeForCausalLM."""
    stem = architecture.removesuffix("ForCausalLM").replace("MiMo", "Mimo")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()


DEFAULTS: dict[str, Any] = {
    "architecture": LLAMA,
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate": 128,
    "vocab": 320,
    "rope": None,
    "tie": True,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "float32",
    "shards": 1,
    "seed": 0,
    "max_positions": 512,
    "eos": None,
    "tokenizer": True,
    "rope_style": "legacy",
    "residual_gain": None,
    "extra": None,
}


def with_defaults(defaults: Json, options: Json) -> SimpleNamespace:
    """Return all options: those given, and the defaults of the others."""
    assert options.keys() <= defaults.keys(), options.keys() - defaults.keys()
    return SimpleNamespace(**{**defaults, **options})


def write_tiny(folder: Path, **options: Any) -> Path:
    """Write one random checkpoint and return its folder; the same arguments give the same bytes.

    rope: Hugging Face's dictionary with `rope_type` and `rope_theta`. rope_style: how it is
    written, as before ("legacy": `rope_theta` and `rope_scaling`) or as in transformers 5
    ("parameters"). residual_gain: the factor of layer i's output projections. extra: keys that are
    put into the configuration and choose the blocks of the layers. eos: by default the tokenizer's
    two end tokens.
    """
    o = with_defaults(DEFAULTS, options)
    eos = ((FIRST_SPECIAL + 2, FIRST_SPECIAL) if o.tokenizer else ()) if o.eos is None else o.eos
    config: dict[str, Any] = {
        "architectures": [o.architecture],
        "model_type": model_type(o.architecture),
        "hidden_size": o.hidden,
        "intermediate_size": o.intermediate,
        "num_hidden_layers": o.layers,
        "num_attention_heads": o.heads,
        "num_key_value_heads": o.kv_heads,
        "head_dim": o.head_dim,
        "vocab_size": o.vocab,
        "max_position_embeddings": o.max_positions,
        "rms_norm_eps": 1e-6 if o.architecture == QWEN3 else 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": o.tie,
        "attention_bias": o.attention_bias,
        "torch_dtype": o.dtype,
        "bos_token_id": FIRST_SPECIAL if o.tokenizer else None,
        "eos_token_id": list(eos) if len(eos) > 1 else (eos[0] if eos else None),
        "use_cache": True,
        **({"mlp_bias": o.mlp_bias} if o.architecture == LLAMA else {}),
        **(o.extra or {}),
    }
    if "kv_lora_rank" in config:
        del config["head_dim"]
    _put_rope(config, o.rope or {"rope_type": "default", "rope_theta": 10000.0}, o.rope_style)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, o.seed, o.residual_gain or (lambda layer: 1.0))
    write_tensors(
        folder, {name: tensor.to(DTYPES[o.dtype]) for name, tensor in tensors.items()}, o.shards
    )
    write_json(folder / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    write_json(folder / "generation_config.json", {**ends, "do_sample": False})
    if o.tokenizer:
        write_tokenizer(folder, o.vocab, o.max_positions)
    return folder


def _put_rope(config: dict[str, Any], rope: Mapping[str, Any], style: str) -> None:
    """Put the rotary embedding's parameters into a configuration in a style."""
    if style == "parameters":
        config["rope_parameters"] = dict(rope)
        if "partial_rotary_factor" in config:
            config["rope_parameters"]["partial_rotary_factor"] = config.pop("partial_rotary_factor")
        return
    config["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling


def named_generator(name: str) -> torch.Generator:
    """Return a random generator that is seeded by a name."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def draw_normal(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> torch.Tensor:
    """Return a tensor of normal numbers in float32, seeded by its name."""
    return torch.randn(shape, generator=named_generator(name)) * std + mean


Matrix = tuple[str, int, int, float]
"""Name inside the layer, rows, columns, and gain."""
Vector = tuple[str, tuple[int, ...], float, float]
"""Name inside the layer, shape, standard deviation, mean."""

ROUTER_GAIN = 1.5
"""With this gain the scores of experts differ, yet several of them matter."""


def attention_matrices(config: Json, sharpness: float, gain: float) -> Iterator[Matrix]:
    """Yield latent attention's matrices where there is a rank, else queries, keys and values."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    if "kv_lora_rank" in config:
        rank, rope, nope = (
            config[k] for k in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
        )
        value = config["v_head_dim"]
        query = heads * (nope + rope)
        if config["q_lora_rank"] is None:
            yield "self_attn.q_proj", query, hidden, sharpness
        else:
            yield "self_attn.q_a_proj", config["q_lora_rank"], hidden, 1.0
            yield "self_attn.q_b_proj", query, config["q_lora_rank"], sharpness
        yield "self_attn.kv_a_proj_with_mqa", rank + rope, hidden, sharpness
        yield "self_attn.kv_b_proj", heads * (nope + value), rank, sharpness
        yield "self_attn.o_proj", hidden, heads * value, 1.5 * gain
        return
    query = heads * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    projection = 1.0 if has_head_norms(config) else sharpness
    yield "self_attn.q_proj", query, hidden, projection
    yield "self_attn.k_proj", key, hidden, projection
    yield "self_attn.v_proj", key, hidden, 1.0
    yield "self_attn.o_proj", hidden, query, 1.5 * gain


def has_bias(config: Json, name: str) -> bool:
    """True if a matrix has a bias in the config's family."""
    architecture = config["architectures"][0]
    if not name.startswith("self_attn"):
        return bool(config.get("mlp_bias")) and "expert" not in name
    if architecture in ("MiMoForCausalLM", "Glm4MoeForCausalLM") and name.endswith("o_proj"):
        return False
    return bool(config.get("attention_bias"))


def has_head_norms(config: Json) -> bool:
    """True if queries and keys are normalised per head."""
    return config["architectures"][0] in (QWEN3, QWEN3_MOE) or bool(config.get("use_qk_norm"))


def has_routed_experts(config: Json, layer: int) -> bool:
    """True if a layer has routed experts."""
    if "moe_k" in config:
        return bool(layer >= config["moe_layer_start_index"])
    if "num_experts" in config:
        return layer not in config.get("mlp_only_layers", ())
    return "n_routed_experts" in config and layer >= config["first_k_dense_replace"]


def _count_experts(config: Json) -> tuple[int, int]:
    """Return the numbers of routed experts and of shared ones."""
    if "moe_k" in config:
        return config["moe_num_experts"], config["moe_num_shared_experts"]
    return config.get("num_experts") or config["n_routed_experts"], config.get(
        "n_shared_experts", 0
    )


def mlp_matrices(config: Json, layer: int, gain: float) -> Iterator[Matrix]:
    """Yield gate, up and down; of every expert where the layer has them."""
    hidden = config["hidden_size"]

    def gated(block: str, inner: int) -> Iterator[Matrix]:
        """Yield gate, up and down of a block."""
        yield f"{block}.gate_proj", inner, hidden, 1.5
        yield f"{block}.up_proj", inner, hidden, 1.0
        yield f"{block}.down_proj", hidden, inner, 1.5 * gain

    if not has_routed_experts(config, layer):
        yield from gated("mlp", config["intermediate_size"])
        return
    routed, shared = _count_experts(config)
    inner = config["moe_intermediate_size"]
    yield "mlp.gate", routed, hidden, ROUTER_GAIN
    for expert in range(routed):
        yield from gated(f"mlp.experts.{expert}", inner)
    if shared:
        yield from gated("mlp.shared_experts", shared * inner)


def draw_vectors(config: Json, layer: int, sharpness: float) -> Iterator[Vector]:
    """Yield norms, and the corrections of routers."""
    hidden = (config["hidden_size"],)
    yield "input_layernorm.weight", hidden, 0.1, 1.0
    yield "post_attention_layernorm.weight", hidden, 0.1, 1.0
    if has_head_norms(config):
        yield "self_attn.q_norm.weight", (config["head_dim"],), 0.1, sharpness
        yield "self_attn.k_norm.weight", (config["head_dim"],), 0.1, sharpness
    if "kv_lora_rank" in config:
        yield "self_attn.kv_a_layernorm.weight", (config["kv_lora_rank"],), 0.1, 1.0
        if config["q_lora_rank"] is not None:
            yield "self_attn.q_a_layernorm.weight", (config["q_lora_rank"],), 0.1, 1.0
    if has_routed_experts(config, layer) and "moe_k" in config:
        yield "mlp.moe_statics.e_score_correction_bias", (1, config["moe_num_experts"]), 0.1, 0.0
    elif has_routed_experts(config, layer) and config.get("topk_method") == "noaux_tc":
        yield "mlp.gate.e_score_correction_bias", (config["n_routed_experts"],), 0.1, 0.0


def random_tensors(config: Json, seed: int, residual_gain: Callable[[int], float]) -> Tensors:
    """Draw every tensor of a checkpoint in float32, named as Hugging Face names them."""
    hidden = config["hidden_size"]
    tensors: Tensors = {}

    def draw(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        tensors[name] = draw_normal(f"{seed}/{name}", shape, std, mean)

    draw("model.embed_tokens.weight", (config["vocab_size"], hidden), EMBEDDING_STD)
    # q·k / sqrt(d) has the standard deviation SCORE_STD when each factor has its square root
    # (where heads are normalised their norms have it, since they undo any scale of the projections).
    sharpness = math.sqrt(SCORE_STD)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        gain = residual_gain(layer)
        matrices = (
            *attention_matrices(config, sharpness, gain),
            *mlp_matrices(config, layer, gain),
        )
        for name, rows, columns, scale in matrices:
            draw(f"{prefix}{name}.weight", (rows, columns), scale / math.sqrt(columns))
            if has_bias(config, name):
                draw(f"{prefix}{name}.bias", (rows,), 0.2)
        for name, shape, std, mean in draw_vectors(config, layer, sharpness):
            draw(f"{prefix}{name}", shape, std, mean)
    head_std = EMBEDDING_STD if config["tie_word_embeddings"] else 1.0 / math.sqrt(hidden)
    final = LOGIT_STD / (head_std * math.sqrt(hidden))
    draw("model.norm.weight", (hidden,), 0.1 * final, final)
    if not config["tie_word_embeddings"]:
        draw("lm_head.weight", (config["vocab_size"], hidden), head_std)
    return tensors


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    """Write one `model.safetensors`, or `shards` files of consecutive tensors with their index."""
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata=metadata)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata=metadata)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of each byte, as GPT-2's byte-level BPE defines it."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    replacements = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(replacements)) for byte in range(256)]


def write_tokenizer(folder: Path, vocab: int, max_positions: int) -> None:
    """Write a byte-level BPE: ids 0..255 are bytes, then specials, then pairs of bytes.

    Every id below `vocab` is a token, so that any id a random model emits can be decoded.
    """
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    added = {
        FIRST_SPECIAL + i: {"content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, **token} for number, token in added.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": _byte_pair_model(vocab),
    }
    write_json(folder / "tokenizer.json", tokenizer)
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(number): token for number, token in added.items()},
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[2],
        "model_max_length": max_positions,
        "pad_token": SPECIAL_TOKENS[0],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    write_json(folder / "tokenizer_config.json", config)


def _byte_pair_model(vocab: int) -> dict[str, object]:
    """Return the BPE model of tokenizer.json with `vocab` tokens."""
    alphabet = byte_alphabet()
    # The specials are in the vocabulary too, or the library would number them after its last entry.
    ids = {token: index for index, token in enumerate((*alphabet, *SPECIAL_TOKENS))}
    common = [alphabet[byte] for byte in (32, *range(97, 123), *range(33, 97), *range(123, 127))]
    last = len(common) - 1
    num_merges = vocab - SMALLEST_TOKENIZER
    merges = [
        [common[first], common[total - first]]
        for total in range(2 * last + 1)
        for first in range(max(0, total - last), min(total, last) + 1)
    ]
    assert 0 <= num_merges <= len(merges), vocab
    del merges[num_merges:]
    ids |= {"".join(pair): SMALLEST_TOKENIZER + number for number, pair in enumerate(merges)}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": ids,
        "merges": merges,
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object, indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
