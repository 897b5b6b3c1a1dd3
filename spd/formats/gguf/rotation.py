"""Rotary parameters of a GGUF file, as Hugging Face's `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping

from spd.formats.family_keys import CAUSAL
from spd.formats.gguf.keys import Keys, read_factors

NO_ROTATION_FACTOR = 1e29
"""Factors from here on divide an angle to zero: its pair does not rotate."""
DEFAULT_THETA = 10_000.0
"""The rotary base of files that have none, where their scaling needs one written."""
_YARN_KEYS = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
"""Hugging Face's keys of YaRN's optional numbers, by the file's keys behind the architecture."""


def read_rotation(keys: Keys, model_class: str, values: Mapping[str, object]) -> dict[str, object]:
    """Read the rotary parameters from keys and tensors of factors, as values of `config.json`.

    values: those of `config.json` that are known so far. Empty where the file only has defaults.
    """
    rotary_values: dict[str, object] = {}
    rotary_dim = keys.integer("rope.dimension_count")
    head_dim = read_head_dim(values)
    if "partial_rotary_factor" in CAUSAL[model_class].defaults and rotary_dim and head_dim:
        rotary_values["partial_rotary_factor"] = rotated_share(rotary_dim, head_dim)
    scaling = _read_scaling(keys) | _read_factor_tensors(keys, values, rotary_dim)
    if scaling:
        theta = values.get("rope_theta", DEFAULT_THETA)
        rotary_values["rope_parameters"] = {"rope_theta": theta, **scaling}
    return rotary_values


def read_head_dim(values: Mapping[str, object]) -> int:
    """Return the elements of a head in values of `config.json`.

    It is `head_dim`, else the hidden size over the number of heads, else 0.
    """
    head_dim = values.get("head_dim")
    if type(head_dim) is int:
        return head_dim
    hidden = values.get("hidden_size")
    heads = values.get("num_attention_heads")
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else 0


def rotated_share(rotary_dim: int, head_dim: int) -> float:
    """Return the share of a head that gives `rotary_dim` when it is multiplied and rounded down."""
    quotient = rotary_dim / head_dim
    return quotient if int(head_dim * quotient) == rotary_dim else (rotary_dim + 0.5) / head_dim


def _read_scaling(keys: Keys) -> dict[str, object]:
    """Return the parameters of linear or YaRN scaling in the keys; empty without them."""
    kind = keys.get("rope.scaling.type")
    factor = keys.number("rope.scaling.factor")
    if kind not in ("linear", "yarn") or factor is None:
        return {}
    scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = keys.integer(
        "rope.scaling.original_context_length"
    )
    for gguf_key, key in _YARN_KEYS.items():
        if (number := keys.number(gguf_key)) is not None:
            scaling[key] = number
    if (number := keys.number("rope.scaling.yarn_log_multiplier")) is not None:
        scaling["mscale"] = number
        scaling["mscale_all_dim"] = number
    return scaling


def _read_factor_tensors(
    keys: Keys, values: Mapping[str, object], rotary_dim: int | None
) -> dict[str, object]:
    """Read tensors of factors, which divide angles, as rotary parameters; empty without them.

    values: those of `config.json` that are known so far.
    """
    tensors = keys.file.tensors
    context = values.get("max_position_embeddings")
    if (tensor := tensors.get("rope_freqs.weight")) is not None:
        numbers = read_factors(tensor)
        if numbers[-1] > NO_ROTATION_FACTOR and all(
            number == 1.0 or number > NO_ROTATION_FACTOR for number in numbers
        ):
            rotated_pairs = sum(number == 1.0 for number in numbers)
            return {
                "rope_type": "proportional",
                "partial_rotary_factor": rotated_pairs / len(numbers),
            }
        numbers = numbers[: rotary_dim // 2] if rotary_dim else numbers
        return {
            "rope_type": "longrope",
            "short_factor": numbers,
            "long_factor": numbers,
            "original_max_position_embeddings": context,
        }
    short = tensors.get("rope_factors_short.weight")
    long = tensors.get("rope_factors_long.weight")
    if short is None or long is None:
        return {}
    original = keys.integer("rope.scaling.original_context_length")
    factors: dict[str, object] = {
        "rope_type": "longrope",
        "short_factor": read_factors(short),
        "long_factor": read_factors(long),
        "original_max_position_embeddings": original or context,
    }
    if (factor := keys.number("rope.scaling.attn_factor")) is not None:
        factors["attention_factor"] = factor
    return factors
