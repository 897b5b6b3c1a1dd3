"""Values that only some architectures' files derive in another way: a function for each of them.

Each takes a file's keys and the values made of them so far, and returns Hugging Face's keys that
replace them. Source: the converter and `src/models` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from spd.errors import CheckpointError
from spd.formats.gguf.keys import FULL, SLIDING, Keys
from spd.formats.gguf.rotation import DEFAULT_THETA, read_head_dim

Values = Mapping[str, object]
SIGMOID = 2
"""The value of `expert_gating_func` for routers that take the sigmoid."""


def _positive_integer(values: Values, key: str) -> int:
    """Return a whole number above 0; 0 for any other value."""
    value = values.get(key)
    return value if type(value) is int and value > 0 else 0


def _gemma(keys: Keys, values: Values, *, large: int) -> dict[str, object]:
    """Return the number whose root divides scores of Gemma 2 and 3: a head's size, or another.

    large: the number of layers of the largest model, where it is another number.
    """
    if _positive_integer(values, "num_hidden_layers") == large:
        heads = _positive_integer(values, "num_attention_heads") or 1
        return {"query_pre_attn_scalar": _positive_integer(values, "hidden_size") // heads}
    return {"query_pre_attn_scalar": read_head_dim(values)}


def _latent(keys: Keys, values: Values) -> dict[str, object]:
    """Return the sizes of the parts of DeepSeek's heads; older files do not absorb keys."""
    rotary_dim = keys.integer("rope.dimension_count") or 0
    head_dim = keys.integer("attention.key_length_mla") or keys.integer("attention.key_length") or 0
    value_dim = keys.integer("attention.value_length_mla") or keys.integer("attention.value_length")
    derived: dict[str, object] = {
        "num_key_value_heads": values.get("num_attention_heads"),
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": head_dim - rotary_dim,
        "v_head_dim": value_dim,
        "norm_topk_prob": bool(values.get("norm_topk_prob")),
    }
    scaling = values.get("rope_parameters")
    multiplier = keys.number("rope.scaling.yarn_log_multiplier")
    if isinstance(scaling, dict) and multiplier is not None:
        # The file has a tenth of the factor, for old readers.
        scale = round(10 * multiplier, 6)
        derived["rope_parameters"] = {**scaling, "mscale": scale, "mscale_all_dim": scale}
    if not _positive_integer(values, "n_group"):
        derived |= {"n_group": 1, "topk_group": 1}
    elif values.get("architectures") == ["DeepseekV2ForCausalLM"]:
        derived["topk_method"] = "group_limited_greedy"
    return derived


def _glm(keys: Keys, values: Values) -> dict[str, object]:
    """Return nothing for GLM-4; refuse the text of a model of images.

    It rotates other pairs, for which its converter orders rows in another way.
    """
    if keys.get("rope.dimension_sections") is not None:
        reason = "the text of a model that sees images is not supported"
        raise CheckpointError(f"{keys.file.path}: glm4.rope.dimension_sections: {reason}")
    return {}


def _recurrent(keys: Keys, values: Values) -> dict[str, object]:
    """Return the size of a recurrent layer's value head.

    The file has the size of all heads together.
    """
    heads = _positive_integer(values, "linear_num_value_heads") or 1
    return {"linear_value_head_dim": (keys.integer("ssm.inner_size") or 0) // heads}


def _nemotron(keys: Keys, values: Values) -> dict[str, object]:
    """Return the width of Nemotron-H's MLPs, from a tensor: the lists in the file may be empty."""
    derived = _recurrent(keys, values)
    widths = (name for name in keys.file.tensors if name.endswith(".ffn_up.weight"))
    if (name := next(widths, None)) is not None:
        derived["intermediate_size"] = keys.file.tensors[name].shape[0]
    return derived


def _granite_hybrid(keys: Keys, values: Values) -> dict[str, object]:
    """Return whether Granite 4's positions rotate, and the width of MLPs without experts."""
    rotates = keys.get("rope.scaling.finetuned") is not False
    derived = _recurrent(keys, values)
    derived["position_embedding_type"] = "rope" if rotates else "nope"
    shared = values.get("shared_expert_intermediate_size")
    derived["shared_expert_intermediate_size"] = shared or values.get("intermediate_size")
    derived["num_experts"] = values.get("num_experts", 0)
    return derived


def _gpt_oss(keys: Keys, values: Values) -> dict[str, object]:
    """Return gpt-oss's rotation, where YaRN's bounds are not rounded to whole dimensions."""
    scaling = values.get("rope_parameters")
    return {"rope_parameters": {**scaling, "truncate": False}} if isinstance(scaling, dict) else {}


def _by_kind(keys: Keys, values: Values, key: str) -> tuple[object, object]:
    """Return a value of layers with full attention, and that of sliding layers."""
    by_layer = keys.get(key)
    kinds = values.get("layer_types")
    if not isinstance(by_layer, tuple) or not isinstance(kinds, list):
        return by_layer, by_layer
    by_kind = dict(zip(reversed(kinds), reversed(by_layer[: len(kinds)]), strict=False))
    return by_kind.get(FULL), by_kind.get(SLIDING)


def _mimo(keys: Keys, values: Values) -> dict[str, object]:
    """Return the key heads of MiMo-V2's layers of both kinds."""
    kv_heads, local_kv_heads = _by_kind(keys, values, "attention.head_count_kv")
    return {"num_key_value_heads": kv_heads, "swa_num_key_value_heads": local_kv_heads}


def _step(keys: Keys, values: Values) -> dict[str, object]:
    """Return heads and rotation of Step-3.5 by kinds of layers.

    Full attention rotates half of a head.
    """
    kinds = values.get("layer_types")
    if not isinstance(kinds, list):
        return {}
    heads, local_heads = _by_kind(keys, values, "attention.head_count")
    kv_heads, local_kv_heads = _by_kind(keys, values, "attention.head_count_kv")
    base = keys.number("rope.freq_base") or DEFAULT_THETA
    local_base = keys.number("rope.freq_base_swa") or base
    derived: dict[str, object] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "swa_num_attention_heads": local_heads,
        "num_sliding_attention_heads": local_heads,
        "swa_num_key_value_heads": local_kv_heads,
        "rope_theta": [local_base if kind == SLIDING else base for kind in kinds],
        "partial_rotary_factors": [1.0 if kind == SLIDING else 0.5 for kind in kinds],
        "rope_parameters": None,
    }
    scaling = values.get("rope_parameters")
    if isinstance(scaling, dict):
        factors = scaling["short_factor"][: read_head_dim(values) // 4]
        rope_scaling = {**scaling, "short_factor": factors, "long_factor": factors}
        rope_scaling.pop("rope_theta", None)
        derived["rope_scaling"] = rope_scaling
    return derived


def _key_is_value(keys: Keys, layers: list[int]) -> bool:
    """True if a layer makes values from the projection of keys: it has no matrix for values."""
    return any(not keys.has(layer, "attn_v.weight") for layer in layers)


def _gemma4(keys: Keys, values: Values) -> dict[str, object]:
    """Return Gemma 4's heads and rotation by kinds of layers, and its differing MLPs.

    Values may be keys, and MLPs may be twice as wide.
    """
    kv_heads, local_kv_heads = _by_kind(keys, values, "attention.head_count_kv")
    kinds = values.get("layer_types")
    layers = range(len(kinds)) if isinstance(kinds, list) else range(0)
    full_layers = [layer for layer in layers if isinstance(kinds, list) and kinds[layer] == FULL]
    with_keys = [layer for layer in full_layers if keys.has(layer, "attn_k.weight")]
    widths = keys.get("feed_forward_length")
    table = keys.file.tensors.get("per_layer_token_embd.weight")
    scaling = values.get("rope_parameters")
    base = values.get("rope_theta", DEFAULT_THETA)
    full_rope: object = {"rope_type": "default", "rope_theta": base}
    if isinstance(scaling, dict):
        full_rope = scaling
    key_is_value = kv_heads != local_kv_heads
    if with_keys:
        key_is_value = _key_is_value(keys, with_keys)
    local_base = keys.number("rope.freq_base_swa") or DEFAULT_THETA
    derived: dict[str, object] = {
        "num_key_value_heads": local_kv_heads,
        "num_global_key_value_heads": kv_heads,
        "attention_k_eq_v": key_is_value,
        "rope_parameters": {
            FULL: full_rope,
            SLIDING: {"rope_type": "default", "rope_theta": local_base},
        },
        "enable_moe_block": bool(values.get("num_experts")),
    }
    if isinstance(widths, tuple) and widths:
        derived["intermediate_size"] = widths[0]
        derived["use_double_wide_mlp"] = len(set(widths)) > 1
    if table is not None:
        derived["vocab_size_per_layer_input"] = table.shape[0]
    return derived


DERIVED_VALUES: Mapping[str, Callable[[Keys, Values], dict[str, object]]] = {
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
"""Functions by architecture."""
