"""What some architectures' files say in a way of their own: a function each, for what no table can say.

Each takes a file's keys and what was made of them so far, and returns Hugging Face's keys in their place.
Source: the converter and `src/models` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from spd.errors import CheckpointError
from spd.formats.gguf.keys import FULL, SLIDING, Keys
from spd.formats.gguf.rotation import DEFAULT_THETA, head_width

Values = Mapping[str, object]
SIGMOID = 2
"""What `expert_gating_func` says of routers that take the sigmoid."""


def _whole(values: Values, key: str) -> int:
    """Return a whole number above 0, or 0."""
    value = values.get(key)
    return value if type(value) is int and value > 0 else 0


def _gemma(keys: Keys, values: Values, *, large: int) -> dict[str, object]:
    """Gemma 2 and 3: scores are divided by the root of a head's size, in the largest of another number."""
    if _whole(values, "num_hidden_layers") == large:
        heads = _whole(values, "num_attention_heads") or 1
        return {"query_pre_attn_scalar": _whole(values, "hidden_size") // heads}
    return {"query_pre_attn_scalar": head_width(values)}


def _latent(keys: Keys, values: Values) -> dict[str, object]:
    """DeepSeek: sizes of the parts of a head, of new files or of those from before keys were absorbed."""
    turned = keys.whole("rope.dimension_count") or 0
    width = keys.whole("attention.key_length_mla") or keys.whole("attention.key_length") or 0
    value = keys.whole("attention.value_length_mla") or keys.whole("attention.value_length")
    found: dict[str, object] = {
        "num_key_value_heads": values.get("num_attention_heads"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": width - turned,
        "v_head_dim": value,
        "norm_topk_prob": bool(values.get("norm_topk_prob")),
    }
    scaling = values.get("rope_parameters")
    number = keys.number("rope.scaling.yarn_log_multiplier")
    if isinstance(scaling, dict) and number is not None:  # a tenth of it, for old readers
        scale = round(10 * number, 6)
        found["rope_parameters"] = {**scaling, "mscale": scale, "mscale_all_dim": scale}
    if not _whole(values, "n_group"):
        found |= {"n_group": 1, "topk_group": 1}
    elif values.get("architectures") == ["DeepseekV2ForCausalLM"]:
        found["topk_method"] = "group_limited_greedy"
    return found


def _glm(keys: Keys, values: Values) -> dict[str, object]:
    """GLM-4: what sees images turns other pairs, for which its converter orders rows in another way."""
    if keys.get("rope.dimension_sections") is not None:
        why = "the text of a model that sees images is not supported"
        raise CheckpointError(f"{keys.file.path}: glm4.rope.dimension_sections: {why}")
    return {}


def _recurrent(keys: Keys, values: Values) -> dict[str, object]:
    """Layers that recur: the size of a value head is a share of all of them."""
    heads = _whole(values, "linear_num_value_heads") or 1
    return {"linear_value_head_dim": (keys.whole("ssm.inner_size") or 0) // heads}


def _nemotron(keys: Keys, values: Values) -> dict[str, object]:
    """Nemotron-H: the width of MLPs, which stands in lists of which some are empty."""
    found = _recurrent(keys, values)
    widths = (name for name in keys.file.tensors if name.endswith(".ffn_up.weight"))
    if (name := next(widths, None)) is not None:
        found["intermediate_size"] = keys.file.tensors[name].shape[0]
    return found


def _granite_hybrid(keys: Keys, values: Values) -> dict[str, object]:
    """Granite 4: whether positions turn, and the width without experts."""
    turns = keys.get("rope.scaling.finetuned") is not False
    found = _recurrent(keys, values)
    found["position_embedding_type"] = "rope" if turns else "nope"
    shared = values.get("shared_expert_intermediate_size")
    found["shared_expert_intermediate_size"] = shared or values.get("intermediate_size")
    found["num_experts"] = values.get("num_experts", 0)
    return found


def _gpt_oss(keys: Keys, values: Values) -> dict[str, object]:
    """gpt-oss: YaRN's borders are no whole dimensions."""
    scaling = values.get("rope_parameters")
    return {"rope_parameters": {**scaling, "truncate": False}} if isinstance(scaling, dict) else {}


def _by_kind(keys: Keys, values: Values, key: str) -> tuple[object, object]:
    """Return the number of layers that see everything, and that of layers that slide."""
    listed = keys.get(key)
    kinds = values.get("layer_types")
    if not isinstance(listed, tuple) or not isinstance(kinds, list):
        return listed, listed
    pairs = dict(zip(reversed(kinds), reversed(listed[: len(kinds)]), strict=False))
    return pairs.get(FULL), pairs.get(SLIDING)


def _mimo(keys: Keys, values: Values) -> dict[str, object]:
    """MiMo-V2: key heads of both kinds of layers."""
    full, slides = _by_kind(keys, values, "attention.head_count_kv")
    return {"num_key_value_heads": full, "swa_num_key_value_heads": slides}


def _step(keys: Keys, values: Values) -> dict[str, object]:
    """Step-3.5: heads, bases and shares that turn by kinds of layers; one half where all is seen."""
    kinds = values.get("layer_types")
    if not isinstance(kinds, list):
        return {}
    full, slides = _by_kind(keys, values, "attention.head_count")
    groups, local_groups = _by_kind(keys, values, "attention.head_count_kv")
    base = keys.number("rope.freq_base") or DEFAULT_THETA
    local = keys.number("rope.freq_base_swa") or base
    found: dict[str, object] = {
        "num_attention_heads": full,
        "num_key_value_heads": groups,
        "swa_num_attention_heads": slides,
        "num_sliding_attention_heads": slides,
        "swa_num_key_value_heads": local_groups,
        "rope_theta": [local if kind == SLIDING else base for kind in kinds],
        "partial_rotary_factors": [1.0 if kind == SLIDING else 0.5 for kind in kinds],
        "rope_parameters": None,
    }
    scaling = values.get("rope_parameters")
    if isinstance(scaling, dict):
        numbers = scaling["short_factor"][: head_width(values) // 4]
        own = {**scaling, "short_factor": numbers, "long_factor": numbers}
        found["rope_scaling"] = {key: own[key] for key in own if key != "rope_theta"}
    return found


def _key_is_value(keys: Keys, layers: list[int]) -> bool:
    """True if layers make values of what keys are made of: they have no matrix for them."""
    return any(not keys.has(layer, "attn_v.weight") for layer in layers)


def _gemma4(keys: Keys, values: Values) -> dict[str, object]:
    """Gemma 4: heads of both kinds of layers, values that are keys, wide MLPs, rotation by kinds."""
    full, slides = _by_kind(keys, values, "attention.head_count_kv")
    kinds = values.get("layer_types")
    layers = range(len(kinds)) if isinstance(kinds, list) else range(0)
    wide = [layer for layer in layers if isinstance(kinds, list) and kinds[layer] == FULL]
    own = [layer for layer in wide if keys.has(layer, "attn_k.weight")]
    widths = keys.get("feed_forward_length")
    table = keys.file.tensors.get("per_layer_token_embd.weight")
    scaling = values.get("rope_parameters")
    base = values.get("rope_theta", DEFAULT_THETA)
    turned = scaling if isinstance(scaling, dict) else {"rope_type": "default", "rope_theta": base}
    local = keys.number("rope.freq_base_swa") or DEFAULT_THETA
    found: dict[str, object] = {
        "num_key_value_heads": slides,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": _key_is_value(keys, own) if own else full != slides,
        "rope_parameters": {
            FULL: turned,
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
        "enable_moe_block": bool(values.get("num_experts")),
    }
    if isinstance(widths, tuple) and widths:
        found["intermediate_size"] = widths[0]
        found["use_double_wide_mlp"] = len(set(widths)) > 1
    if table is not None:
        found["vocab_size_per_layer_input"] = table.shape[0]
    return found


DERIVED: Mapping[str, Callable[[Keys, Values], dict[str, object]]] = {
    "gemma2": partial(_gemma, large=46),
    "gemma3": partial(_gemma, large=62),
    "deepseek2": _latent,
    "glm4": _glm,
    "qwen3next": _recurrent,
    "qwen35": _recurrent,
    "qwen35moe": _recurrent,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "gpt-oss": _gpt_oss,
    "mimo2": _mimo,
    "step35": _step,
    "gemma4": _gemma4,
    "gemma4-assistant": _gemma4,
}
"""By architectures."""
