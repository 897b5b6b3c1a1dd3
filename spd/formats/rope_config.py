"""How positions turn: the rotary part of `config.json`, in both of Hugging Face's spellings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from spd.formats.block_config import ATTENTION_KINDS, MAX_POSITIONS
from spd.formats.json_file import Fields, display_text

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the base and how its frequencies are stretched (Hugging Face `rope_type`)."""

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
    rotated_share: float = (
        1.0  # proportional: of a head's pairs the first ones turn, the others stand still
    )
    rotary_dim: int | None = None  # the first dimensions of a head that turn; None: all of them
    short_factor: tuple[float, ...] = ()  # longrope: divides each angle, up to the original context


_FACTORS = ("beta_fast", "beta_slow", "attention_factor")
_NUMBERS: dict[RopeKind, dict[str, float]] = {
    "default": {},
    "linear": {"factor": 1.0},
    "llama3": {"factor": 1.0, "low_freq_factor": 1e-6, "high_freq_factor": 1e-6},
    "yarn": {"factor": 1.0, **dict.fromkeys(_FACTORS, 1e-6), "mscale": 0.0, "mscale_all_dim": 0.0},
    "longrope": {"factor": 1e-6, "attention_factor": 1e-6},
    "proportional": {},
}
"""The numbers that each kind reads, and the least of each; a million is the most."""
_OPTIONAL = {*_FACTORS, "mscale", "mscale_all_dim"}
_SHARE = "partial_rotary_factor"
_BESIDE = (
    "rope_theta",
    _SHARE,
    "original_max_position_embeddings",
)  # which may stand beside the others
ROTARY_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""How the three positions of an image's part are laid out: a token of text has one."""
_KNOWN_KEYS = {
    "rope_type",
    "type",
    "truncate",
    "finetuned",
    "short_factor",
    "long_factor",
    "alpha",
    *_BESIDE,
    "llama_4_scaling_beta",
    "max_position_embeddings",
    *ROTARY_OF_IMAGES,
    *(key for numbers in _NUMBERS.values() for key in numbers),
}


def rope_fields(fields: Fields, by_kind: bool) -> Fields:
    """How layers that see everything turn: `rope_parameters`, perhaps `by_kind`, or as version 4 says it."""
    found = fields.optional_nested("rope_parameters")
    old = fields.optional_nested("rope_scaling")
    if found is None or not found.values:
        found = old or Fields(fields.where, {})
    if by_kind and ATTENTION_KINDS[0] in found and set(found.values) <= set(ATTENTION_KINDS):
        found = found.nested(ATTENTION_KINDS[0])
    said = old.values if old else {}
    agrees = all(
        found.get(key) == value for key, value in said.items() if key not in ("type", "rope_type")
    )
    fields.require(agrees, "rope_scaling", "disagrees with rope_parameters")
    beside = {key: fields.get(key) for key in _BESIDE if key in fields and key not in found}
    return Fields(found.where, {**found.values, **beside})


def read_local_rope(
    fields: Fields, base: str, positions: int, head_dim: int, *, partly: bool
) -> RopeConfig:
    """How layers that slide turn, where they do so in another way; base: the key of theirs."""
    nested = fields.optional_nested("rope_parameters")
    part = nested.optional_nested(ATTENTION_KINDS[1]) if nested else None
    own = {"rope_theta": fields.get(base), **({_SHARE: fields.get(_SHARE)} if partly else {})}
    own |= part.values if part else {}
    found = Fields(part.where if part else fields.where, own)
    return read_rope(found, positions, head_dim, partly=partly)


def read_rope(
    rope: Fields, max_positions: int, head_dim: int, *, partly: bool = False
) -> RopeConfig:
    """What `rope_fields` found, in range. partly: the first dimensions of a head may turn alone."""
    for key in rope.values:
        rope.require(key in _KNOWN_KEYS, display_text(key), "is not a known rope parameter")
    theta = rope.number("rope_theta", 1.0, 1e12)
    kind = _kind(rope)
    if kind == "dynamic":
        # A fixed `alpha` is a larger base. Source: `hunyuan_v1_dense` of Hugging Face transformers 5.
        theta *= rope.number("alpha", 1.0, 1e6) ** (head_dim / max(head_dim - 2, 1))
        return RopeConfig("default", theta)
    share = rope.number(_SHARE, 0.0, 1.0, 1.0)
    more = dict[str, Any]()
    if kind == "proportional":
        more["rotated_share"] = share
    elif partly:
        more["rotary_dim"] = rotated = int(head_dim * share)
        why = f"{share:g} of {head_dim} is no even number above 0"
        rope.require(rotated >= 2 and rotated % 2 == 0, _SHARE, why)
        head_dim = rotated
    else:
        rope.require(share == 1.0, _SHARE, "rotating a part of the head is not supported")
    key = "original_max_position_embeddings"
    default = None if kind == "llama3" else max_positions
    if kind in ("llama3", "yarn", "longrope"):
        more["original_max_positions"] = rope.integer(key, 1, MAX_POSITIONS, default)
    if kind == "longrope":
        more["factor"] = max_positions / more["original_max_positions"]
        for name in ("long_factor", "short_factor"):  # the long ones are checked, and not used
            more["short_factor"] = rope.numbers(name, head_dim // 2, 1e-3, 1e6)
    for key, least in _NUMBERS[kind].items():
        if key in rope or key not in _OPTIONAL:
            more[key] = rope.number(key, least, 1e6, more.get(key))
    if kind == "yarn":
        more["truncate"] = rope.boolean("truncate", True)
        rope.require(theta > 1.0, "rope_theta", "yarn needs a base above 1")
    found = RopeConfig(kind, theta, **more)
    for upper, lower in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
        high = getattr(found, upper)
        low = getattr(found, lower)
        rope.require(high > low, upper, f"{high:g} is not above {lower} {low:g}")
    return found


def _kind(rope: Fields) -> RopeKind | Literal["dynamic"]:
    """Under its new key or its old one; "su" was longrope's first name, "mrope" speaks of images alone."""
    names: dict[str, RopeKind | Literal["dynamic"]] = {name: name for name in _NUMBERS}
    names |= {"su": "longrope", "mrope": "default"}
    if "alpha" in rope:
        names["dynamic"] = "dynamic"
    scaled = any(key in rope for key in _KNOWN_KEYS.difference(_BESIDE, ROTARY_OF_IMAGES))
    key = "type" if "type" in rope and "rope_type" not in rope else "rope_type"
    return names[rope.choice(key, names, None if scaled else "default")]


def read_growth(rope: Fields) -> tuple[float, int] | None:
    """(b, n) where a query at position p counts 1 + b ln(1 + floor(p / n)) times; None where it does not."""
    if "llama_4_scaling_beta" not in rope:
        return None
    period = rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    return rope.number("llama_4_scaling_beta", 0.0, 1e3), period


@dataclass(frozen=True)
class RotaryDims:
    """How a head turns. The kernels know one form, all `width` dimensions, the first half against the second:
    weights are reordered for it when they are loaded, and what does not turn gets the angle 0."""

    width: int
    rotary_dim: int  # of its first dimensions
    interleaved: bool = False  # in pairs (2i, 2i + 1)

    @property
    def order(self) -> list[int] | None:
        """The old index of each dimension in the kernels' form; None where nothing moves."""
        turning = range(self.rotary_dim)
        rest = range(self.rotary_dim, self.width)
        half = self.rotary_dim // 2
        still = len(rest) // 2
        first = turning[:half]
        second = turning[half:]
        if self.interleaved:
            first = turning[0::2]
            second = turning[1::2]
        order = [*first, *rest[:still], *second, *rest[still:]]
        return None if order == list(range(self.width)) else order


def yarn_scale(factor: float, mscale: float) -> float:
    """How much YaRN raises the temperature of attention for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
