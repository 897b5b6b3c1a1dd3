"""The blocks that layers are made of: which checkpoint tensors each one takes, and into which of its own.

A layer is an attention block and an MLP block. A family chooses and fills in these descriptions, a pair
for every layer; `layer_builder` makes the running blocks of them. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from spd.formats.block_config import ExpertsConfig, LatentConfig

Shape = tuple[int, ...]


def yarn_scale(factor: float, mscale: float) -> float:
    """How much YaRN raises the temperature of attention for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Destination:
    """One tensor to allocate: the named checkpoint tensors below each other, rows counted together.

    Names stand inside the layer (`self_attn.q_proj.weight`). With `exact` it is float32 whatever the rest
    of the model is. `wide` matrices have the run's dtype whatever other matrices are kept in: who reads them
    knows no other weights.
    """

    parts: tuple[tuple[str, Shape], ...]
    exact: bool = False
    wide: bool = False

    @classmethod
    def of(cls, parts: Mapping[str, Shape], *, exact: bool = False) -> Destination:
        """From names and shapes in order."""
        return cls(tuple(parts.items()), exact)

    @property
    def shape(self) -> Shape:
        """Of the whole."""
        shapes = [shape for _, shape in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def size(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def multiplied(self) -> bool:
        """Whether it is a matrix that may be kept in eight bits, as far as its readers are concerned."""
        return len(self.shape) == 2 and not self.exact and not self.wide


def fused(block: str, rows: Mapping[str, int], columns: int, *, biased: bool = False) -> list[Destination]:
    """A fused matrix of projections with the given numbers of rows, and its fused bias if there is one."""
    weight = Destination.of({f"{block}.{name}.weight": (count, columns) for name, count in rows.items()})
    if not biased:
        return [weight]
    return [weight, Destination.of({f"{block}.{name}.bias": (count,) for name, count in rows.items()})]


def _named(name: str, matrix: list[Destination]) -> dict[str, Destination]:
    """A matrix under its name, its bias under NAME_bias."""
    return dict(zip((name, f"{name}_bias"), matrix, strict=False))


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
        turning, half = range(self.rotated), self.rotated // 2
        first, second = (
            (turning[0::2], turning[1::2]) if self.interleaved else (turning[:half], turning[half:])
        )
        rest = range(self.rotated, self.width)
        still = len(rest) // 2
        order = [*first, *rest[:still], *second, *rest[still:]]
        return None if order == list(range(self.width)) else order


@dataclass(frozen=True)
class GqaLayout:
    """Grouped-query attention: fused queries, keys and values, then the output."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotaryDims
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before it is rotated."""
    scale: float | None = None
    """Of the scores; None: one over the square root of head_dim."""
    softcap: float | None = None
    """Where scores are capped."""
    sliding: int | None = None
    """The window of positions that a row sees; None: all up to its own."""
    local_rope: bool = False
    """Whether it turns as the model's sliding layers do, where they turn in another way."""
    centred_norms: bool = False
    """Scales of norms are stored as their distance from 1."""
    post_norm: bool = False
    """A norm behind the block, before the sum."""
    fused_qkv: bool = False
    """Queries, keys and values are one tensor in the checkpoint too."""

    def destinations(self) -> dict[str, Destination]:
        """See `BlockLayout`."""
        size, hidden = self.head_dim, self.hidden_size
        query, key = self.num_heads * size, self.num_kv_heads * size
        block, qkv = "self_attn", {"q_proj": query, "k_proj": key, "v_proj": key}
        if self.fused_qkv:
            qkv = {"qkv_proj": query + 2 * key}
        exact = self.centred_norms
        found = {"norm": Destination.of({"input_layernorm.weight": (hidden,)}, exact=exact)}
        if self.post_norm:
            found["post_norm"] = Destination.of({"post_attention_layernorm.weight": (hidden,)}, exact=exact)
        found |= _named("qkv", fused(block, qkv, hidden, biased=self.qkv_bias))
        found |= _named("output", fused(block, {"o_proj": hidden}, query, biased=self.output_bias))
        if self.qk_norm:
            for name in ("q_norm", "k_norm"):
                found[name] = Destination.of({f"{block}.{name}.weight": (size,)}, exact=exact)
        return found

    @property
    def cache(self) -> tuple[Shape, ...]:
        """What one position holds in each of the layer's pools: keys and values."""
        return ((self.num_kv_heads, self.head_dim),) * 2

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, heads in the cache, and their size, as attention sees them."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def widest(self) -> int:
        """Elements a row of the widest intermediate result: queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class LatentLayout:
    """Latent attention: what is kept of a position is one normed vector and one rotated key for all heads.

    In the absorbed form: a query head is taken into the latent space by its part of the key matrix, and
    what attention makes of the latent vectors becomes values afterwards.
    """

    hidden_size: int
    num_heads: int
    latent: LatentConfig
    scale: float
    bias: bool = False

    @property
    def rotary(self) -> RotaryDims:
        """Of the parts of queries and keys that turn."""
        return RotaryDims(self.latent.rope_dim, self.latent.rope_dim, self.latent.interleaved)

    @property
    def query_rows(self) -> int:
        """Elements of all query heads."""
        return self.num_heads * (self.latent.nope_dim + self.latent.rope_dim)

    def destinations(self) -> dict[str, Destination]:
        """See `BlockLayout`."""
        hidden, rank, block, of = self.hidden_size, self.latent.rank, "self_attn", self.latent
        kept, query_rank = {"kv_a_proj_with_mqa": rank + of.rope_dim}, of.query_rank
        found = {"norm": Destination.of({"input_layernorm.weight": (hidden,)})}
        if query_rank is None:
            if self.bias:  # q_proj has none, so that the two share no matrix
                found["query"] = fused(block, {"q_proj": self.query_rows}, hidden)[0]
                found |= _named("down", fused(block, kept, hidden, biased=True))
            else:
                found["down"] = fused(block, {"q_proj": self.query_rows, **kept}, hidden)[0]
        else:
            down = {"q_a_proj": query_rank, **kept}
            found |= _named("down", fused(block, down, hidden, biased=self.bias))
            found["query_norm"] = Destination.of({f"{block}.q_a_layernorm.weight": (query_rank,)})
            found["query"] = fused(block, {"q_b_proj": self.query_rows}, query_rank)[0]
        found["latent_norm"] = Destination.of({f"{block}.kv_a_layernorm.weight": (rank,)})
        up = self.num_heads * (of.nope_dim + of.value_dim)
        found["up"] = replace(fused(block, {"kv_b_proj": up}, rank)[0], wide=True)
        mixed = self.num_heads * of.value_dim
        return found | _named("output", fused(block, {"o_proj": hidden}, mixed, biased=self.bias))

    @property
    def cache(self) -> tuple[Shape, ...]:
        """What one position holds in the layer's pool: the normed vector, then the rotated key."""
        return ((self.latent.rank + self.latent.rope_dim,),)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, heads in the cache, and their size, as attention sees them."""
        return self.num_heads, 1, self.latent.rank + self.latent.rope_dim

    @property
    def widest(self) -> int:
        """Elements a row of the intermediate results: queries, in their own and in the latent space."""
        return 2 * self.query_rows + 2 * self.num_heads * (self.latent.rank + self.latent.rope_dim)


@dataclass(frozen=True)
class MlpLayout:
    """The gated MLP: gate and up fused, then down."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    block: str = "mlp"
    """What stands before the projections' names."""
    gelu: bool = False
    """gelu in its form with tanh in the gate, not silu."""
    centred_norms: bool = False
    """Scales of norms are stored as their distance from 1."""
    post_norm: bool = False
    """A norm behind the block, before the sum; the one before it then has another name."""
    fused_gate_up: bool = False
    """Gate and up are one tensor in the checkpoint too."""

    def destinations(self) -> dict[str, Destination]:
        """See `BlockLayout`."""
        shape, exact = (self.hidden_size,), self.centred_norms
        before = "pre_feedforward_layernorm" if self.post_norm else "post_attention_layernorm"
        found = {"norm": Destination.of({f"{before}.weight": shape}, exact=exact)}
        if self.post_norm:
            found["post_norm"] = Destination.of({"post_feedforward_layernorm.weight": shape}, exact=exact)
        return found | self.matrices()

    def matrices(self) -> dict[str, Destination]:
        """The destinations without the norm before them."""
        hidden, inner = self.hidden_size, self.intermediate_size
        gate_up = (
            {"gate_up_proj": 2 * inner} if self.fused_gate_up else {"gate_proj": inner, "up_proj": inner}
        )
        found = _named("gate_up", fused(self.block, gate_up, hidden, biased=self.bias))
        return found | _named("down", fused(self.block, {"down_proj": hidden}, inner, biased=self.bias))

    @property
    def widest(self) -> int:
        """Elements a row of the intermediate results: gate, up, and their product."""
        return 3 * self.intermediate_size


@dataclass(frozen=True)
class MoeLayout:
    """Routed experts, all of them below each other in two tensors, and perhaps a shared one beside them."""

    hidden_size: int
    experts: ExpertsConfig

    @property
    def shared(self) -> MlpLayout | None:
        """The expert that every row goes through."""
        size = self.experts.shared_size
        return MlpLayout(self.hidden_size, size, block="mlp.shared_experts") if size else None

    def destinations(self) -> dict[str, Destination]:
        """See `BlockLayout`."""
        hidden, inner, experts = self.hidden_size, self.experts.intermediate_size, self.experts
        count = experts.num_experts
        found = {
            "norm": Destination.of({"post_attention_layernorm.weight": (hidden,)}),
            "router": Destination.of({"mlp.gate.weight": (count, hidden)}, exact=True),
        }
        if experts.router.corrected:
            shape = (1, count) if experts.correction.startswith("moe_statics") else (count,)
            found["correction"] = Destination.of({f"mlp.{experts.correction}": shape}, exact=True)
        found["experts_gate_up"] = Destination.of(
            {
                f"mlp.experts.{expert}.{name}_proj.weight": (inner, hidden)
                for expert in range(count)
                for name in ("gate", "up")
            }
        )
        found["experts_down"] = Destination.of(
            {f"mlp.experts.{expert}.down_proj.weight": (hidden, inner) for expert in range(count)}
        )
        return found | (self.shared.matrices() if self.shared else {})

    @property
    def widest(self) -> int:
        """Elements a row of the intermediate results: of the shared and of every chosen expert, in float32.

        Few small experts are all computed: see `spd.kernels.moe`.
        """
        experts = self.experts
        each = 3 * experts.intermediate_size + 2 * self.hidden_size
        return 3 * experts.shared_size + 2 * each * min(experts.num_experts, 4 * experts.router.per_token)


AttentionLayout = GqaLayout | LatentLayout
FeedForwardLayout = MlpLayout | MoeLayout


@dataclass(frozen=True)
class LayerLayout:
    """One layer: two blocks, each with its norm before and its sum after."""

    attention: AttentionLayout
    mlp: FeedForwardLayout

    def destinations(self) -> Iterator[Destination]:
        """Everything that is allocated for the layer."""
        yield from self.attention.destinations().values()
        yield from self.mlp.destinations().values()
