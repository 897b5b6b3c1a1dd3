"""Rotary embedding: the rotary part of `config.json`, in both of Hugging Face's spellings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from spd.formats.block_config import ATTENTION_KINDS, MAX_POSITIONS
from spd.formats.json_file import Fields, display_text

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
"""Supported values of `rope_type`."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the base, and how frequencies are stretched (Hugging Face `rope_type`)."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    rotated_share: float = 1.0
    """Proportional: the share of a head's pairs, from the first on, that rotate."""
    rotary_dim: int | None = None
    """The first dimensions of a head that rotate; None: all of them."""
    short_factor: tuple[float, ...] = ()
    """Longrope: divides each angle, up to the original context."""


_YARN_KEYS = ("beta_fast", "beta_slow", "attention_factor")
_MINIMA: dict[RopeKind, dict[str, float]] = {
    "default": {},
    "linear": {"factor": 1.0},
    "llama3": {"factor": 1.0, "low_freq_factor": 1e-6, "high_freq_factor": 1e-6},
    "yarn": {
        "factor": 1.0,
        **dict.fromkeys(_YARN_KEYS, 1e-6),
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
    },
    "longrope": {"factor": 1e-6, "attention_factor": 1e-6},
    "proportional": {},
}
"""The numbers that each kind reads, and the minimum of each; the maximum is a million."""
_OPTIONAL_KEYS = {*_YARN_KEYS, "mscale", "mscale_all_dim"}
_SHARE_KEY = "partial_rotary_factor"
_OUTER_KEYS = ("rope_theta", _SHARE_KEY, "original_max_position_embeddings")
"""Keys that may stand outside of the rotary part."""
IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""The layout of the three positions of an image's part: a token of text has one position."""
_KNOWN_KEYS = {
    "rope_type",
    "type",
    "truncate",
    "finetuned",
    "short_factor",
    "long_factor",
    "alpha",
    *_OUTER_KEYS,
    "llama_4_scaling_beta",
    "max_position_embeddings",
    *IMAGE_ROPE_KEYS,
    *(key for minima in _MINIMA.values() for key in minima),
}


def rope_fields(fields: Fields, by_kind: bool) -> Fields:
    """Return the rotary parameters of full attention: `rope_parameters`, or version 4's keys.

    by_kind: `rope_parameters` may have an entry for each kind of layers.
    """
    rope = fields.optional_nested("rope_parameters")
    version4 = fields.optional_nested("rope_scaling")
    if rope is None or not rope.values:
        rope = version4 or Fields(fields.where, {})
    if by_kind and ATTENTION_KINDS[0] in rope and set(rope.values) <= set(ATTENTION_KINDS):
        rope = rope.nested(ATTENTION_KINDS[0])
    version4_values = version4.values if version4 else {}
    agrees = all(
        rope.get(key) == value
        for key, value in version4_values.items()
        if key not in ("type", "rope_type")
    )
    fields.require(agrees, "rope_scaling", "disagrees with rope_parameters")
    outer_values = {
        key: fields.get(key) for key in _OUTER_KEYS if key in fields and key not in rope
    }
    return Fields(rope.where, {**rope.values, **outer_values})


def read_local_rope(
    fields: Fields, theta_key: str, max_positions: int, head_dim: int, *, is_partial: bool
) -> RopeConfig:
    """Return the rotation of sliding layers, where it differs; theta_key: the key of its base."""
    by_kind = fields.optional_nested("rope_parameters")
    rope = by_kind.optional_nested(ATTENTION_KINDS[1]) if by_kind else None
    values: dict[str, object] = {"rope_theta": fields.get(theta_key)}
    if is_partial:
        values[_SHARE_KEY] = fields.get(_SHARE_KEY)
    if rope is not None:
        values |= rope.values
    local = Fields(rope.where if rope else fields.where, values)
    return read_rope(local, max_positions, head_dim, is_partial=is_partial)


def read_rope(
    rope: Fields, max_positions: int, head_dim: int, *, is_partial: bool = False
) -> RopeConfig:
    """Return the rotation that `rope_fields` describes, every number in range.

    is_partial: the first dimensions of a head may rotate alone.
    """
    for key in rope.values:
        rope.require(key in _KNOWN_KEYS, display_text(key), "is not a known rope parameter")
    theta = rope.number("rope_theta", 1.0, 1e12)
    kind = _read_kind(rope)
    if kind == "dynamic":
        # A fixed `alpha` is a larger base. Source: `hunyuan_v1_dense` of transformers 5.
        theta *= rope.number("alpha", 1.0, 1e6) ** (head_dim / max(head_dim - 2, 1))
        return RopeConfig("default", theta)
    share = rope.number(_SHARE_KEY, 0.0, 1.0, 1.0)
    rotary_dim = None
    if kind != "proportional":
        rotary_dim = _rotary_dim(rope, head_dim, share, is_partial=is_partial)
        head_dim = rotary_dim or head_dim
    original = None
    default_factor = None
    short_factor: tuple[float, ...] = ()
    if kind in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"
        default = None if kind == "llama3" else max_positions
        smallest = 2 if kind == "longrope" else 1  # longrope divides by its logarithm
        original = rope.integer(key, smallest, MAX_POSITIONS, default)
        if kind == "longrope":
            default_factor = max_positions / original
            rope.numbers("long_factor", head_dim // 2, 1e-3, 1e6)  # checked, and not used
            short_factor = rope.numbers("short_factor", head_dim // 2, 1e-3, 1e6)
    numbers = {
        key: rope.number(key, minimum, 1e6, default_factor if key == "factor" else None)
        for key, minimum in _MINIMA[kind].items()
        if key in rope or key not in _OPTIONAL_KEYS
    }
    truncate = True
    if kind == "yarn":
        truncate = rope.boolean("truncate", True)
        rope.require(theta > 1.0, "rope_theta", "yarn needs a base above 1")
    config = RopeConfig(
        kind,
        theta,
        factor=numbers.get("factor", RopeConfig.factor),
        original_max_positions=original,
        low_freq_factor=numbers.get("low_freq_factor", RopeConfig.low_freq_factor),
        high_freq_factor=numbers.get("high_freq_factor", RopeConfig.high_freq_factor),
        beta_fast=numbers.get("beta_fast", RopeConfig.beta_fast),
        beta_slow=numbers.get("beta_slow", RopeConfig.beta_slow),
        attention_factor=numbers.get("attention_factor"),
        mscale=numbers.get("mscale"),
        mscale_all_dim=numbers.get("mscale_all_dim"),
        truncate=truncate,
        rotated_share=share if kind == "proportional" else 1.0,
        rotary_dim=rotary_dim,
        short_factor=short_factor,
    )
    _require_ordered_bounds(rope, config)
    return config


def _rotary_dim(rope: Fields, head_dim: int, share: float, *, is_partial: bool) -> int | None:
    """Return the first dimensions of a head that rotate; None for all, where there is no choice."""
    if not is_partial:
        reason = "rotating a part of the head is not supported"
        rope.require(share == 1.0, _SHARE_KEY, reason)
        return None
    rotary_dim = int(head_dim * share)
    reason = f"{share:g} of {head_dim} is no even number above 0"
    rope.require(rotary_dim >= 2 and rotary_dim % 2 == 0, _SHARE_KEY, reason)
    return rotary_dim


def _require_ordered_bounds(rope: Fields, config: RopeConfig) -> None:
    """Refuse bounds of which the upper one is not above the lower one."""
    for upper, high, lower, low in (
        ("high_freq_factor", config.high_freq_factor, "low_freq_factor", config.low_freq_factor),
        ("beta_fast", config.beta_fast, "beta_slow", config.beta_slow),
    ):
        rope.require(high > low, upper, f"{high:g} is not above {lower} {low:g}")


def _read_kind(rope: Fields) -> RopeKind | Literal["dynamic"]:
    """Return the kind, under its new key or its old one.

    "su" was longrope's first name; "mrope" describes the positions of images alone.
    """
    names: dict[str, RopeKind | Literal["dynamic"]] = {name: name for name in _MINIMA}
    names |= {"su": "longrope", "mrope": "default"}
    if "alpha" in rope:
        names["dynamic"] = "dynamic"
    is_scaled = any(key in rope for key in _KNOWN_KEYS.difference(_OUTER_KEYS, IMAGE_ROPE_KEYS))
    key = "type" if "type" in rope and "rope_type" not in rope else "rope_type"
    return names[rope.choice(key, names, None if is_scaled else "default")]


def read_query_growth(rope: Fields) -> tuple[float, int] | None:
    """Return (b, n) if queries at position p are scaled by 1 + b ln(1 + floor(p / n)), or None."""
    if "llama_4_scaling_beta" not in rope:
        return None
    period = rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    return rope.number("llama_4_scaling_beta", 0.0, 1e3), period


@dataclass(frozen=True)
class RotaryDims:
    """The dimensions of a head that rotate, and how they are paired.

    The kernels know one form: all `width` dimensions rotate, the first half against the second.
    Weights are reordered for it when they are loaded, and dimensions that do not rotate have the
    angle 0.
    """

    width: int
    """All dimensions of a head."""
    rotary_dim: int
    """The first dimensions, which rotate."""
    interleaved: bool = False
    """True if they rotate in pairs (2i, 2i + 1)."""

    @property
    def order(self) -> list[int] | None:
        """Return the old index of each dimension in the kernels' form; None where nothing moves."""
        rotated = range(self.rotary_dim)
        unrotated = range(self.rotary_dim, self.width)
        half = self.rotary_dim // 2
        unrotated_half = len(unrotated) // 2
        first = rotated[:half]
        second = rotated[half:]
        if self.interleaved:
            first = rotated[0::2]
            second = rotated[1::2]
        order = [*first, *unrotated[:unrotated_half], *second, *unrotated[unrotated_half:]]
        return None if order == list(range(self.width)) else order


def yarn_scale(factor: float, mscale: float) -> float:
    """Return YaRN's factor of attention's temperature for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
