"""How positions turn, by a GGUF file's keys and tensors, in the words of Hugging Face's `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping

from spd.formats.family_keys import CAUSAL
from spd.formats.gguf.keys import Keys, read_numbers

STILL = 1e29
"""Factors from here on divide an angle to nothing: its pair does not turn."""
DEFAULT_THETA = 10_000.0
_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "attention.temperature_scale": "llama_4_scaling_beta",
}


def rotation(keys: Keys, model: str, values: Mapping[str, object]) -> dict[str, object]:
    """Return how positions turn: by factors of a tensor, or as keys say."""
    found: dict[str, object] = {}
    rotated = keys.whole("rope.dimension_count")
    width = head_width(values)
    if "partial_rotary_factor" in CAUSAL[model].defaults and rotated and width:
        found["partial_rotary_factor"] = share(rotated, width)
    scaling = _scaling(keys) | _factors(keys, values, rotated)
    if scaling:
        theta = values.get("rope_theta", DEFAULT_THETA)
        found["rope_parameters"] = {"rope_theta": theta, **scaling}
    return found


def head_width(values: Mapping[str, object]) -> int:
    """Return the elements of a head, 0 where the file does not say them."""
    width = values.get("head_dim")
    if type(width) is int:
        return width
    hidden = values.get("hidden_size")
    heads = values.get("num_attention_heads")
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else 0


def share(rotated: int, width: int) -> float:
    """Return the share of a head of so many elements that gives `rotated` again, rounded down."""
    found = rotated / width
    return found if int(width * found) == rotated else (rotated + 0.5) / width


def _scaling(keys: Keys) -> dict[str, object]:
    """Return what keys say of stretched positions, in Hugging Face's words; empty without."""
    kind = keys.get("rope.scaling.type")
    factor = keys.number("rope.scaling.factor")
    if kind not in ("linear", "yarn") or factor is None:
        return {}
    found: dict[str, object] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return found
    found["original_max_position_embeddings"] = keys.whole("rope.scaling.original_context_length")
    for own, key in _YARN.items():
        if (number := keys.number(own)) is not None:
            found[key] = number
    if (number := keys.number("rope.scaling.yarn_log_multiplier")) is not None:
        found["mscale"] = found["mscale_all_dim"] = number
    return found


def _factors(keys: Keys, values: Mapping[str, object], rotated: int | None) -> dict[str, object]:
    """Return what tensors of factors say, each of which divides an angle; empty without them."""
    tensors = keys.file.tensors
    context = values.get("max_position_embeddings")
    if (tensor := tensors.get("rope_freqs.weight")) is not None:
        numbers = read_numbers(keys.file, tensor)
        if numbers[-1] > STILL and all(number == 1.0 or number > STILL for number in numbers):
            turned = sum(number == 1.0 for number in numbers)
            return {"rope_type": "proportional", "partial_rotary_factor": turned / len(numbers)}
        numbers = numbers[: rotated // 2] if rotated else numbers
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
    original = keys.whole("rope.scaling.original_context_length")
    found: dict[str, object] = {
        "rope_type": "longrope",
        "short_factor": read_numbers(keys.file, short),
        "long_factor": read_numbers(keys.file, long),
        "original_max_position_embeddings": original or context,
    }
    if (factor := keys.number("rope.scaling.attn_factor")) is not None:
        found["attention_factor"] = factor
    return found
