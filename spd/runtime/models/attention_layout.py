"""Grouped-query attention as a description: sizes, and what families vary, in groups. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from spd.formats.rope_config import RotaryDims
from spd.runtime.models.destinations import (
    ATTENTION_NORMS,
    WHOLE,
    BlockNorms,
    Destination,
    Rows,
    Shape,
    Shard,
    fused,
)


@dataclass(frozen=True)
class RotationLayout:
    """How queries and keys are rotated."""

    dims: RotaryDims
    is_local: bool = False
    """True if the layer rotates as the model's sliding layers do, where those have angles of their own."""
    is_absent: bool = False
    """True if nothing is rotated: the layer knows no positions."""
    query_growth: tuple[float, int] | None = None
    """(b, n): a query at position p is multiplied by 1 + b ln(1 + floor(p / n))."""


@dataclass(frozen=True)
class ScoreLayout:
    """What becomes of the products of queries and keys."""

    scale: float | None = None
    """None: one over the square root of the head's size."""
    softcap: float | None = None
    sliding: int | None = None
    """The window of positions that a row sees; None: all up to its own."""
    has_sinks: bool = False
    """True if each head has a score that every row sees and whose value is nothing."""


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of queries and keys.

    "each": of each head, before the rotation. "unscaled": the same without scales. "rotated": of each head,
    after the rotation. "joint": one over all query heads and one over all key heads, before the rotation.
    """

    kind: Literal["each", "unscaled", "rotated", "joint"]
    names: tuple[str, str] = ("q_norm", "k_norm")
    """The checkpoint's names of the scales of queries and of keys."""


@dataclass(frozen=True)
class ValueLayout:
    """How value heads differ from key heads."""

    dim: int | None = None
    """Elements of a value head where keys are wider: the cache has zeros behind them."""
    scale: float = 1.0
    is_normed: bool = False
    """True if each value head has an RMS norm without scales."""
    is_key: bool = False
    """True if values are the keys before their norm, with no projection of their own."""


OutputGate = Literal["beside_queries", "own_matrix", "per_head"]
"""What the result is multiplied by, through a sigmoid: gates that stand beside each head's queries in one
matrix, gates of a matrix of their own, or one gate for each whole head, of a matrix of its own."""


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
    is_fused: bool = False
    """True if queries, keys and values are one tensor in the checkpoint too."""
    centred_output: bool = False
    """True if the mean of what the block adds is removed: later norms subtract the stream's anyway."""
    reads: int | None = None
    """The number of the layer whose keys and values this one reads: it makes none itself."""
    reads_pairs: bool = False
    """True if it reads a token and a state side by side, each with a norm of its own (EAGLE-3)."""
    shard: Shard = WHOLE
    """The rank that has these heads."""
    key_shard: Shard = WHOLE
    """The rank's part of all key heads."""

    def sharded(self, shard: Shard) -> GqaLayout:
        """Return a rank's heads. The output reads its own columns, and makes a part of the sum."""
        key_shard = shard.of_keys(self.num_kv_heads)
        return replace(
            self,
            num_heads=shard.share(self.num_heads, "attention heads"),
            num_kv_heads=key_shard.share(self.num_kv_heads, "key and value heads"),
            shard=shard,
            key_shard=key_shard,
        )

    @property
    def rotary(self) -> RotaryDims:
        """Return the elements of a head that are rotated."""
        return self.rotation.dims

    @property
    def value_size(self) -> int:
        """Return the elements of a value head, as the checkpoint has it."""
        return self.values.dim or self.head_dim

    def destinations(self) -> dict[str, Destination]:
        """Return where the checkpoint's tensors go, by the names that `Attention` reads."""
        found = self.norms.destinations(self.hidden_size)
        width = self.hidden_size
        if self.reads_pairs:
            found["state_norm"] = Destination.of({"hidden_norm.weight": (width,)})
            width = 2 * width
        found |= fused("qkv", "self_attn", self._projections(), width, biased=self.qkv_bias)
        if self.gate == "per_head":
            rows = {"g_proj": self.shard.rows(self.num_heads)}
            found |= fused("gates", "self_attn", rows, self.hidden_size)
        mixed = self.num_heads * self.value_size
        found |= fused(
            "output",
            "self_attn",
            {"o_proj": self.hidden_size},
            mixed,
            biased=self.output_bias,
            cut=self.shard.columns(mixed),
        )
        if self.scores.has_sinks:
            cut = self.shard.rows(self.num_heads).cut
            sinks = {"self_attn.sinks": (self.num_heads,)}
            found["sinks"] = Destination.of(sinks, exact=True, cut=cut)
        return found | self._head_norm_destinations()

    def _projections(self) -> dict[str, Rows]:
        """Return the rows of the fused matrix: queries, keys, values, gates, as far as it has them."""
        query_rows = self.num_heads * self.head_dim
        if self.gate == "beside_queries":
            rows = {"q_proj": self.shard.rows(2 * query_rows)}
        else:
            rows = {"q_proj": self.shard.rows(query_rows)}
        if self.reads is None:
            rows["k_proj"] = self.key_shard.rows(self.num_kv_heads * self.head_dim)
            if not self.values.is_key:
                rows["v_proj"] = self.key_shard.rows(self.num_kv_heads * self.value_size)
        if self.gate == "own_matrix":
            rows["gate_proj"] = self.shard.rows(query_rows)
        if self.is_fused:
            return {"qkv_proj": Rows.below(*rows.values())}
        return rows

    def _head_norm_destinations(self) -> dict[str, Destination]:
        """Return where the scales of the norms of queries and keys go."""
        norms = self.head_norms
        if norms is None or norms.kind == "unscaled":
            return {}
        query_name, key_name = (f"self_attn.{name}.weight" for name in norms.names)
        if norms.kind == "joint":
            query = self.shard.rows(self.num_heads * self.head_dim)
            key = self.key_shard.rows(self.num_kv_heads * self.head_dim)
            return {
                "q_norm": Destination.of({query_name: (query.taken,)}, cut=query.cut),
                "k_norm": Destination.of({key_name: (key.taken,)}, cut=key.cut),
            }
        exact = self.norms.are_centred
        found = {"q_norm": Destination.of({query_name: (self.head_dim,)}, exact=exact)}
        if self.reads is None:
            found["k_norm"] = Destination.of({key_name: (self.head_dim,)}, exact=exact)
        return found

    @property
    def cache(self) -> tuple[Shape, ...]:
        """Return what one position holds in each pool: keys and values, or nothing of the layer's own."""
        if self.reads is not None:
            return ()
        return ((self.num_kv_heads, self.head_dim),) * 2

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return query heads, heads in the cache, and their size, as attention sees them."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def widest(self) -> int:
        """Return the elements a row of the widest intermediate result: queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
