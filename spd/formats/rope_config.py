"""How positions turn: the rotary part of `config.json`, in both of Hugging Face's spellings."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from spd.formats.block_config import KINDS, MAX_POSITIONS
from spd.formats.json_file import Fields, shown

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
    share: float = (
        1.0  # proportional: of the pairs of a head that turn, the first ones; the others stand still
    )
    short_factor: tuple[float, ...] = ()  # longrope: divides each angle, up to the original context

    @property
    def max_positions(self) -> int | None:
        """The last position whose angles are known: longrope turns every earlier one anew beyond it."""
        return self.original_max_positions if self.kind == "longrope" else None


_NUMBERS: dict[RopeKind, dict[str, float]] = {
    "default": {},
    "linear": {"factor": 1.0},
    "llama3": {"factor": 1.0, "low_freq_factor": 1e-6, "high_freq_factor": 1e-6},
    "yarn": {
        **{"factor": 1.0, "beta_fast": 1e-6, "beta_slow": 1e-6},
        **{"attention_factor": 1e-6, "mscale": 0.0, "mscale_all_dim": 0.0},
    },
    "longrope": {"factor": 1e-6, "attention_factor": 1e-6},
    "proportional": {},
}
"""The numbers that each kind reads, and the least of each; a million is the most."""
_OPTIONAL = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}
_KNOWN_KEYS = {
    *("rope_type", "type", "rope_theta", "original_max_position_embeddings", "truncate"),
    *("partial_rotary_factor", "finetuned", "short_factor", "long_factor"),
    *(key for numbers in _NUMBERS.values() for key in numbers),
}


def read_rotary_dim(fields: Fields, default: float, head_dim: int) -> int:
    """The dimensions of a head that rotate, from a share of it; both spellings as for `read_rope`."""
    share = fields.number("partial_rotary_factor", 0.0, 1.0, default)
    if nested := fields.fields("rope_parameters"):
        share = nested.number("partial_rotary_factor", 0.0, 1.0, share)
    rotated = int(head_dim * share)
    even = rotated >= 2 and rotated % 2 == 0
    fields.require(even, "partial_rotary_factor", f"{share:g} of {head_dim} is no even number above 0")
    return rotated


def read_rope(
    fields: Fields,
    theta: float,
    max_positions: int,
    *,
    ignored: Collection[str] = (),
    long_dim: int | None = None,
    by_kind: bool = False,
) -> RopeConfig:
    """Both spellings: `rope_theta` with `rope_scaling` (version 4), `rope_parameters` (version 5).

    theta: of an absent key; ignored: keys of the new spelling that change nothing here; long_dim: how many
    dimensions turn in a family that knows longrope, whose factors are half as many; by_kind: whether the
    new spelling may be written for each kind of layers.
    """
    theta = _theta(fields, theta)
    old, new = fields.fields("rope_scaling"), fields.fields("rope_parameters")
    if by_kind:
        new = _by_kind(fields, KINDS[0]) or new
    original = fields.integer("original_max_position_embeddings", 2, MAX_POSITIONS, max_positions)
    long = None if long_dim is None else (long_dim, original)
    kept = {key: value for key, value in new.values.items() if key not in ignored} if new else {}
    if new is None or not kept:
        return _rope_of(old, theta, max_positions, long)
    new = Fields(new.where, kept)
    agrees = "rope_theta" not in fields or _theta(new, theta) == theta
    new.require(agrees, "rope_theta", f"disagrees with rope_theta {theta:g} beside it")
    rope = _rope_of(new, _theta(new, theta), max_positions, long)
    if old and old.values and _rope_of(old, rope.theta, max_positions, long) != rope:
        raise fields.refused("rope_scaling", "disagrees with rope_parameters")
    return rope


GROWTH = ("llama_4_scaling_beta", "max_position_embeddings")
"""What stands in `rope_parameters` of a family whose queries grow, and is not about turning."""


def read_growth(fields: Fields) -> tuple[float, int] | None:
    """(b, n) where a query at position p counts 1 + b ln(1 + floor(p / n)) times; None where it does not."""
    nested = fields.fields("rope_parameters")
    if nested is None or "llama_4_scaling_beta" not in nested:
        return None
    period = nested.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    return nested.number("llama_4_scaling_beta", 0.0, 1e3), period


def with_plain_base(fields: Fields, theta: float, head_dim: int) -> Fields:
    """The same configuration with "dynamic" and a fixed `alpha` written as the base that they stand for.

    Source: `hunyuan_v1_dense` of Hugging Face transformers 5.
    """
    changed = dict(fields.values)
    for key in ("rope_scaling", "rope_parameters"):
        nested = fields.fields(key)
        if nested is None or "alpha" not in nested:
            continue
        fields.require(
            "dynamic" in (nested.get("type"), nested.get("rope_type")), key, "alpha without dynamic"
        )
        alpha = nested.number("alpha", 1.0, 1e6)
        base = nested.number("rope_theta", 1.0, 1e12, _theta(fields, theta))
        changed |= {"rope_theta": base * alpha ** (head_dim / max(head_dim - 2, 1)), key: None}
    return Fields(fields.where, changed)


def read_local_rope(fields: Fields, theta: float, max_positions: int) -> RopeConfig:
    """How layers that slide turn, where they do so by a base of their own; theta: of an absent key."""
    theta = fields.number("rope_local_base_freq", 1.0, 1e12, theta)
    part = _by_kind(fields, KINDS[1])
    return _rope_of(part, _theta(part, theta) if part else theta, max_positions)


def _theta(fields: Fields, default: float) -> float:
    return fields.number("rope_theta", 1.0, 1e12, default)


def _by_kind(fields: Fields, kind: str) -> Fields | None:
    """`rope_parameters` of one kind of layers, where they are written for each kind."""
    nested = fields.fields("rope_parameters")
    return nested.fields(kind) if nested is not None and set(nested.values) <= set(KINDS) else None


def _rope_of(
    fields: Fields | None, theta: float, max_positions: int, long: tuple[int, int] | None = None
) -> RopeConfig:
    """One object; long: turning dimensions and original positions of a family that knows longrope."""
    if fields is None or not fields.values:
        return RopeConfig("default", theta)
    for key in fields.values:
        fields.require(key in _KNOWN_KEYS, shown(key), "is not a known rope parameter")
    fields.require(_theta(fields, theta) == theta, "rope_theta", f"disagrees with rope_theta {theta:g}")
    kind, share = _kind(fields, long is not None), fields.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    whole = share == 1.0 or kind == "proportional"
    fields.require(whole, "partial_rotary_factor", "rotating a part of the head is not supported")
    more: dict[str, Any] = {"share": share}
    key, default = "original_max_position_embeddings", max_positions if kind == "yarn" else None
    if kind == "longrope" and long is not None:
        more["original_max_positions"] = original = fields.integer(key, 2, MAX_POSITIONS, long[1])
        more |= {"short_factor": _short_factors(fields, long[0] // 2), "factor": max_positions / original}
    elif kind in ("llama3", "yarn"):
        more["original_max_positions"] = fields.integer(key, 1, MAX_POSITIONS, default)
    for key, least in _NUMBERS[kind].items():
        if key in fields or key not in _OPTIONAL:
            more[key] = fields.number(key, least, 1e6, more.get(key))
    if kind == "yarn":
        more["truncate"] = fields.boolean("truncate", True)
        fields.require(theta > 1.0, "rope_theta", "yarn needs a base above 1")
    rope = RopeConfig(kind, theta, **more)
    for upper, lower in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
        high, low = getattr(rope, upper), getattr(rope, lower)
        fields.require(high > low, upper, f"{high:g} is not above {lower} {low:g}")
    return rope


def _kind(fields: Fields, knows_long: bool) -> RopeKind:
    """Under its new key (`rope_type`) or its old one; "su" is what longrope was called first."""
    names: dict[str, RopeKind] = {name: name for name in _NUMBERS if knows_long or name != "longrope"}
    names |= {"su": "longrope"} if knows_long else {}
    key = "rope_type" if "rope_type" in fields or "type" not in fields else "type"
    kind = names[fields.choice(key, names)]
    old = fields.get("type")
    agrees = old is None or names.get(fields.text("type")) == kind
    fields.require(agrees, "type", f"{shown(old)} disagrees with rope_type {kind}")
    return kind


def _short_factors(fields: Fields, count: int) -> tuple[float, ...]:
    factors: list[object] = []
    for key in ("long_factor", "short_factor"):
        values = fields.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise fields.refused(key, f"is not a list of {count} numbers")
        factors = values
    each = [Fields(fields.where, {"short_factor": value}) for value in factors]
    return tuple(factor.number("short_factor", 1e-3, 1e6) for factor in each)


@dataclass(frozen=True)
class RotaryDims:
    """How a head turns: `rotated` of its first dimensions, in pairs (2i, 2i + 1) where `interleaved`, else
    first half against second half. The kernels know one form, all `width` dimensions in halves: weights
    are reordered for it when they are loaded, and what does not turn gets the angle 0.
    """

    width: int
    rotated: int
    interleaved: bool = False

    @property
    def order(self) -> list[int] | None:
        """The old index of each dimension in the kernels' form; None where nothing moves."""
        turning, rest = range(self.rotated), range(self.rotated, self.width)
        half, still = self.rotated // 2, len(rest) // 2
        first, second = turning[:half], turning[half:]
        if self.interleaved:
            first, second = turning[0::2], turning[1::2]
        order = [*first, *rest[:still], *second, *rest[still:]]
        return None if order == list(range(self.width)) else order


def yarn_scale(factor: float, mscale: float) -> float:
    """How much YaRN raises the temperature of attention for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
