"""What a family changes in the layouts of Llama's blocks, with the types of their fields.

A group of fields, such as the norms of a block, is changed field by field. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict, TypeVar

from spd.formats.rope_config import RotaryDims
from spd.kernels.linear.activation import Activation
from spd.runtime.models.attention_layout import GqaLayout, HeadNorms, OutputGate
from spd.runtime.models.layouts import MlpLayout, MoeLayout


class NormChanges(TypedDict, total=False):
    """Fields of `BlockNorms`."""

    before: str | None
    after: str | None
    are_centred: bool


class RotationChanges(TypedDict, total=False):
    """Fields of `RotationLayout`."""

    dims: RotaryDims
    is_local: bool
    is_absent: bool


class ScoreChanges(TypedDict, total=False):
    """Fields of `ScoreLayout`."""

    scale: float | None
    sliding: int | None
    has_sinks: bool


class ValueChanges(TypedDict, total=False):
    """Fields of `ValueLayout`."""

    is_normed: bool
    is_key: bool


class AttentionChanges(TypedDict, total=False):
    """Fields of `GqaLayout`."""

    num_kv_heads: int
    head_dim: int
    rotation: RotationChanges
    scores: ScoreChanges
    values: ValueChanges
    norms: NormChanges
    head_norms: HeadNorms | None
    gate: OutputGate | None
    qkv_bias: bool
    output_bias: bool
    is_fused_in_checkpoint: bool
    removes_mean: bool


class MlpNameChanges(TypedDict, total=False):
    """Fields of `MlpNames`."""

    block: str
    is_fused_in_checkpoint: bool


class MlpChanges(TypedDict, total=False):
    """Fields of `MlpLayout`."""

    act: Activation
    norms: NormChanges
    names: MlpNameChanges
    removes_mean: bool


def change_attention(layout: GqaLayout, changes: AttentionChanges) -> GqaLayout:
    """Return a layout of attention with changed fields."""
    return _change_fields(layout, changes)


def change_mlp(layout: MlpLayout, changes: MlpChanges) -> MlpLayout:
    """Return a layout of an MLP with changed fields."""
    return _change_fields(layout, changes)


Block = TypeVar("Block", GqaLayout, MlpLayout, MoeLayout)


def change_norms(layout: Block, changes: NormChanges) -> Block:
    """Return a block's layout with changed norms."""
    return replace(layout, norms=replace(layout.norms, **changes))


def _change_fields(layout: Block, changes: Mapping[str, Any]) -> Block:
    """Return a copy of a layout with changed fields; a mapping changes the fields of a group."""
    values = {
        name: replace(getattr(layout, name), **value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return replace(layout, **values)
