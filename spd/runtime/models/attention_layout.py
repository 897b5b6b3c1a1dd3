"""The description of a grouped-query attention block: sizes, and the variations of families.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from spd.formats.rope_config import RotaryDims
from spd.runtime.models.parameters import (
    ATTENTION_NORMS,
    UNSHARDED,
    BlockNorms,
    ParameterSpec,
    Rows,
    Shape,
    Shard,
    fused_parameters,
)


@dataclass(frozen=True)
class RotationLayout:
    """The rotation of queries and keys."""

    dims: RotaryDims
    is_local: bool = False
    """True if the layer has the angles of the model's sliding layers, where those differ."""
    is_absent: bool = False
    """True if nothing is rotated: the layer has no positions."""
    query_growth: tuple[float, int] | None = None
    """(b, n): a query at position p is multiplied by 1 + b ln(1 + floor(p / n))."""


@dataclass(frozen=True)
class ScoreLayout:
    """The steps between the products of queries and keys and their softmax."""

    scale: float | None = None
    """The factor of the products; None: one over the square root of the head's size."""
    softcap: float | None = None
    sliding: int | None = None
    """The window of positions that a row attends to; None: all up to its own."""
    sees_block: bool = False
    """True if rows of a block attend to all rows of it, not only to earlier ones."""
    has_sinks: bool = False
    """True if each head has a sink: a score in every row's softmax, without a value."""


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of queries and keys.

    "each": a norm of each head, before the rotation. "unscaled": the same without scales.
    "rotated": a norm of each head, after the rotation. "joint": one norm over all query heads and
    one over all key heads, before the rotation.
    """

    kind: Literal["each", "unscaled", "rotated", "joint"]
    names: tuple[str, str] = ("q_norm", "k_norm")
    """The checkpoint's names of the norms of queries and of keys."""
    has_other_readers: bool = False
    """True if queries of other norms read the keys too: those of later layers, or an assistant's."""


@dataclass(frozen=True)
class ValueLayout:
    """The differences between value heads and key heads."""

    dim: int | None = None
    """Elements of a value head where keys are wider: the cache has zeros after them."""
    scale: float = 1.0
    is_normed: bool = False
    """True if each value head has an RMS norm without scales."""
    is_key: bool = False
    """True if values are the keys before their norm, with no projection of their own."""


OutputGate = Literal["after_queries", "separate_matrix", "per_head"]
"""Gates whose sigmoid multiplies the attention's result.

"after_queries": gates follow each head's queries in one matrix. "separate_matrix": they have a separate
matrix. "per_head": one gate for each head, of a separate matrix.
"""


@dataclass(frozen=True)
class GqaLayout:
    """Grouped-query attention: fused queries, keys and values, then the output."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotation: RotationLayout
    scores: ScoreLayout = field(default_factory=ScoreLayout)
    values: ValueLayout = field(default_factory=ValueLayout)
    norms: BlockNorms = ATTENTION_NORMS
    head_norms: HeadNorms | None = None
    gate: OutputGate | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    is_fused_in_checkpoint: bool = False
    """True if queries, keys and values are one tensor in the checkpoint too."""
    removes_mean: bool = False
    """True if the mean is removed from the block's result: later norms subtract the stream's mean
    anyway.
    """
    cache_source: int | None = None
    """The index of the layer whose keys and values this one reads, where it has none of its own."""
    has_paired_input: bool = False
    """True if its input is a token's embedding and a hidden state, concatenated after a norm each
    (EAGLE-3).
    """
    shard: Shard = UNSHARDED
    """The rank that has these heads."""
    key_shard: Shard = UNSHARDED
    """The rank's part of all key heads."""

    def sharded(self, shard: Shard) -> GqaLayout:
        """Return the layout of a rank's heads; ranks sum the results of their output columns."""
        key_shard = shard.shard_of_keys(self.num_kv_heads)
        return replace(
            self,
            num_heads=shard.count_per_rank(self.num_heads, "attention heads"),
            num_kv_heads=key_shard.count_per_rank(self.num_kv_heads, "key and value heads"),
            shard=shard,
            key_shard=key_shard,
        )

    @property
    def rotary(self) -> RotaryDims:
        """Return the elements of a head that are rotated."""
        return self.rotation.dims

    @property
    def sees_block(self) -> bool:
        """True if rows of a block attend to all rows of it."""
        return self.scores.sees_block

    @property
    def value_size(self) -> int:
        """Return the elements of a value head, as the checkpoint has it."""
        return self.values.dim or self.head_dim

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by the names that `Attention` reads."""
        parameters = self.norms.parameters(self.hidden_size)
        width = self.hidden_size
        if self.has_paired_input:
            parameters["state_norm"] = ParameterSpec.from_shapes({"hidden_norm.weight": (width,)})
            width = 2 * width
        parameters |= fused_parameters(
            "qkv", "self_attn", self._projections(), width, biased=self.qkv_bias
        )
        if self.gate == "per_head":
            rows = {"g_proj": self.shard.rows(self.num_heads)}
            parameters |= fused_parameters("gates", "self_attn", rows, self.hidden_size)
        output_width = self.num_heads * self.value_size
        parameters |= fused_parameters(
            "output",
            "self_attn",
            {"o_proj": self.hidden_size},
            output_width,
            biased=self.output_bias,
            cut=self.shard.columns(output_width),
        )
        if self.scores.has_sinks:
            cut = self.shard.rows(self.num_heads).cut
            sinks = {"self_attn.sinks": (self.num_heads,)}
            parameters["sinks"] = ParameterSpec.from_shapes(sinks, is_float32=True, cut=cut)
        return parameters | self._head_norm_parameters()

    def _projections(self) -> dict[str, Rows]:
        """Return the rows of the fused matrix: queries, keys, values, gates, where the layer has
        them.
        """
        query_rows = self.num_heads * self.head_dim
        if self.gate == "after_queries":
            rows = {"q_proj": self.shard.rows(2 * query_rows)}
        else:
            rows = {"q_proj": self.shard.rows(query_rows)}
        if self.cache_source is None:
            rows["k_proj"] = self.key_shard.rows(self.num_kv_heads * self.head_dim)
            if not self.values.is_key:
                rows["v_proj"] = self.key_shard.rows(self.num_kv_heads * self.value_size)
        if self.gate == "separate_matrix":
            rows["gate_proj"] = self.shard.rows(query_rows)
        if self.is_fused_in_checkpoint:
            return {"qkv_proj": Rows.concatenate(rows.values())}
        return rows

    def _head_norm_parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters of the norms of queries and keys."""
        norms = self.head_norms
        if norms is None or norms.kind == "unscaled":
            return {}
        query_name, key_name = (f"self_attn.{name}.weight" for name in norms.names)
        if norms.kind == "joint":
            query = self.shard.rows(self.num_heads * self.head_dim)
            key = self.key_shard.rows(self.num_kv_heads * self.head_dim)
            return {
                "q_norm": ParameterSpec.from_shapes({query_name: (query.num_rows,)}, cut=query.cut),
                "k_norm": ParameterSpec.from_shapes({key_name: (key.num_rows,)}, cut=key.cut),
            }
        exact = self.norms.are_centred
        parameters = {
            "q_norm": ParameterSpec.from_shapes({query_name: (self.head_dim,)}, is_float32=exact)
        }
        if self.cache_source is None:
            parameters["k_norm"] = ParameterSpec.from_shapes(
                {key_name: (self.head_dim,)}, is_float32=exact
            )
        return parameters

    @property
    def cache(self) -> tuple[Shape, ...]:
        """Return the shape of a position's entry in each pool: keys and values, or no pools."""
        if self.cache_source is not None:
            return ()
        return ((self.num_kv_heads, self.head_dim),) * 2

    @property
    def cache_scales(self) -> tuple[Shape, ...]:
        """Return the shape of a position's scales of each pool where entries have eight bits."""
        return tuple((heads,) for heads, _ in self.cache)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return the numbers of query and key-value heads, and the elements of a head, as in
        `HeadShape`.
        """
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def widest(self) -> int:
        """Return the elements of a row of the fused projection: queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
