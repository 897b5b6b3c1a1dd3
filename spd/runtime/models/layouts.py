"""The blocks that layers are made of: which checkpoint tensors each one takes, and into which of its own.

A layer is an attention block and an MLP block. A family chooses and fills in these descriptions, a pair
for every layer; `decoder.BLOCKS` says what runs them. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from spd.formats.block_config import ExpertsConfig, LatentConfig
from spd.formats.rope_config import RotaryDims
from spd.kernels.linear.activation import SILU, Activation
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.destinations import WHOLE, Destination, Shape, Shard, block_norms, fused
from spd.runtime.models.recurrent_layouts import ConvLayout, DeltaLayout


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
    shard: Shard = WHOLE  # the rank that has these heads; what all heads share is on every rank

    def sharded(self, shard: Shard) -> LatentLayout:
        """A rank's heads. The output reads its own columns, and makes a part of the sum."""
        return replace(self, num_heads=shard.share(self.num_heads, "attention heads"), shard=shard)

    @property
    def rotary(self) -> RotaryDims:
        """Of the parts of queries and keys that turn."""
        return RotaryDims(self.latent.rope_dim, self.latent.rope_dim, self.latent.interleaved)

    @property
    def query_rows(self) -> int:
        """Elements of all query heads."""
        return self.num_heads * (self.latent.nope_dim + self.latent.rope_dim)

    def destinations(self) -> dict[str, Destination]:
        hidden, rank, block, of = self.hidden_size, self.latent.rank, "self_attn", self.latent
        kept, query_rank = {"kv_a_proj_with_mqa": rank + of.rope_dim}, of.query_rank
        query, mixed = self.shard.rows(self.query_rows), self.num_heads * of.value_dim
        found = {"norm": Destination.of({"input_layernorm.weight": (hidden,)})}
        if query_rank is None:
            found |= fused("down", block, {"q_proj": query, **kept}, hidden)
        else:
            found |= fused("down", block, {"q_a_proj": query_rank, **kept}, hidden)
            found["query_norm"] = Destination.of({f"{block}.q_a_layernorm.weight": (query_rank,)})
            found |= fused("query", block, {"q_b_proj": query}, query_rank)
        found["latent_norm"] = Destination.of({f"{block}.kv_a_layernorm.weight": (rank,)})
        up = {"kv_b_proj": self.shard.rows(self.num_heads * of.nope_dim + mixed)}
        found["up"] = replace(fused("up", block, up, rank)["up"], wide=True)
        return found | fused(
            "output", block, {"o_proj": hidden}, mixed, cut=self.shard.columns(mixed)
        )

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
    """The MLP: gate and up fused, or up alone, then down."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    block: str = "mlp"  # what stands before the projections' names
    act: Activation = SILU
    centred_norms: bool = False  # scales of norms are stored as their distance from 1
    pre_norm: str | None = (
        "post_attention_layernorm"  # None: there is none, or attention's serves both
    )
    post_norm: str | None = None  # a norm behind the block, before the sum
    post_epsilon: float | None = None  # this and the next as of `GqaLayout`
    centred_output: bool = False
    fused_gate_up: bool = False  # gate and up are one tensor in the checkpoint too
    shard: Shard = WHOLE  # the rank that has this part of the width

    def sharded(self, shard: Shard) -> MlpLayout:
        """A rank's width. The last matrix reads its own columns, and makes a part of the sum."""
        own = shard.share(self.intermediate_size, "elements of an MLP")
        return replace(self, intermediate_size=own, shard=shard)

    def destinations(self) -> dict[str, Destination]:
        norms = block_norms(self.pre_norm, self.post_norm, self.hidden_size, self.centred_norms)
        return norms | self.matrices()

    def matrices(self) -> dict[str, Destination]:
        """The destinations without the norm before them."""
        block, hidden, inner, of = self.block, self.hidden_size, self.intermediate_size, self.shard
        rows = dict.fromkeys(
            ("gate_proj", "up_proj") if self.act.gated else ("up_proj",), of.rows(inner)
        )
        if self.fused_gate_up:
            rows = {"gate_up_proj": of.rows(inner, inner)}
        found = fused("gate_up", block, rows, hidden, biased=self.bias)
        down = {"down_proj": hidden}
        return found | fused("down", block, down, inner, biased=self.bias, cut=of.columns(inner))

    @property
    def widest(self) -> int:
        """Elements a row of the intermediate results: gate, up, and their product."""
        return 3 * self.intermediate_size


@dataclass(frozen=True)
class MoeLayout:
    """Routed experts, all of them below each other in two tensors, and perhaps a shared one beside them."""

    hidden_size: int
    experts: ExpertsConfig
    centred_norms: bool = False  # scales of norms are stored as their distance from 1
    pre_norm: str = "post_attention_layernorm"
    act: Activation = SILU  # of routed experts
    shared_act: Activation = SILU
    turned: bool = (
        True  # experts with biases stand inputs before outputs, as `transformers` writes them
    )
    shard: Shard = WHOLE  # the rank that has this part of every expert's width

    def sharded(self, shard: Shard) -> MoeLayout:
        """A rank's width of every expert, the shared one too; every rank routes all rows by itself."""
        own = shard.share(self.experts.intermediate_size, "elements of an expert")
        shared = shard.share(self.experts.shared_size, "elements of a shared expert")
        experts = replace(self.experts, intermediate_size=own, shared_size=shared)
        return replace(self, experts=experts, shard=shard)

    @property
    def shared(self) -> MlpLayout | None:
        """The expert that every row goes through."""
        size, name = self.experts.shared_size, self.experts.shared_name
        if not size:
            return None
        made = MlpLayout(
            self.hidden_size, size, block=f"mlp.{name}", fused_gate_up=name == "shared_mlp"
        )
        return replace(made, act=self.shared_act, shard=self.shard)

    def destinations(self) -> dict[str, Destination]:
        hidden, inner, experts = self.hidden_size, self.experts.intermediate_size, self.experts
        count, biased, read = (
            experts.num_experts,
            experts.clamped is not None,
            experts.latent or hidden,
        )
        parts = ("up",) if not self.act.gated else ("gate_up",) if biased else ("gate", "up")
        rows = 2 * inner if biased else inner
        shapes: dict[str, Shape] = {**dict.fromkeys(parts, (rows, read)), "down": (read, inner)}
        cuts = {"gate_up": self.shard.rows(rows).cut, "down": self.shard.columns(inner)}
        turned = biased and self.turned
        if (
            turned
        ):  # what a checkpoint packs is named as if it were gate and up: here halves of the rows
            shapes = {
                "gate": (hidden // 2, rows),
                "up": (hidden // 2, rows),
                "down": (inner, hidden),
            }
            cuts = {"gate_up": self.shard.columns(rows), "down": self.shard.rows(inner).cut}
        exact: dict[str, tuple[str, Shape]] = {"router": ("gate.weight", (count, hidden))}
        if biased:
            exact["router_bias"] = ("gate.bias", (count,))
        if experts.router.corrected:
            shape = (1, count) if experts.correction.startswith("moe_statics") else (count,)
            exact["correction"] = (experts.correction, shape)
        if experts.shared_gated and experts.shared_size:
            exact["shared_gate"] = (f"{experts.shared_name}_gate.weight", (1, hidden))
        found = block_norms(self.pre_norm, None, hidden, self.centred_norms)
        found |= {
            key: Destination.of({f"mlp.{name}": own}, exact=True)
            for key, (name, own) in exact.items()
        }
        stems = [f"mlp.experts.{number}." for number in range(count)]
        for name, width in (("gate_up", rows), ("down", hidden)):
            own = {
                part: shape
                for part, shape in shapes.items()
                if (part == "down") == (name == "down")
            }
            names = {
                f"{stem}{part}_proj.weight": shape for stem in stems for part, shape in own.items()
            }
            found[f"experts_{name}"] = Destination.of(names, cut=cuts.get(name))
            if biased:
                cut = self.shard.columns(width) if name == "gate_up" else None
                bias = {f"mlp.experts.{name}_proj_bias": (count, width)}
                found[f"experts_{name}_bias"] = Destination.of(bias, exact=True, cut=cut)
        if experts.latent is not None:
            found |= fused("latent_in", "mlp", {"fc1_latent_proj": read}, hidden)
            found |= fused("latent_out", "mlp", {"fc2_latent_proj": hidden}, read)
        return found | (self.shared.matrices() if self.shared else {})

    @property
    def widest(self) -> int:
        """Elements a row of the intermediate results: of the shared and of chosen experts, in float32."""
        experts = self.experts
        each = 3 * experts.intermediate_size + 2 * self.hidden_size
        return 3 * experts.shared_size + 2 * each * min(
            experts.num_experts, 4 * experts.router.per_token
        )


@dataclass(frozen=True)
class SideLayout:
    """Gemma 4's second block: the gated MLP, experts beside it, then the layer's own embedding of the token.

    The stream behind it is multiplied by a number.
    """

    mlp: MlpLayout
    experts: MoeLayout | None
    per_layer: int  # elements of that embedding; 0: there is none
    index: int  # the layer's number

    def sharded(self, shard: Shard) -> SideLayout:
        """A rank's width of MLP and experts; the layer's embedding is there whole."""
        return replace(
            self, mlp=self.mlp.sharded(shard), experts=self.experts and self.experts.sharded(shard)
        )

    def destinations(self) -> dict[str, Destination]:
        hidden, found = self.mlp.hidden_size, self.mlp.destinations()
        found["scalar"] = Destination.of({"layer_scalar": (1,)}, exact=True)
        if self.per_layer:
            shapes = {"per_layer_input_gate": (self.per_layer, hidden)}
            shapes |= {"per_layer_projection": (hidden, self.per_layer)}
            for name, shape in shapes.items():
                found[name] = Destination.of({f"{name}.weight": shape})
            found["side_norm"] = Destination.of({"post_per_layer_input_norm.weight": (hidden,)})
        if self.experts is None:
            return found
        routed = self.experts.destinations()
        for name in ("experts_gate_up", "experts_down"):
            parts = [
                part._replace(name=part.name.removeprefix("mlp.")) for part in routed[name].parts
            ]
            found[name] = replace(routed[name], parts=tuple(parts))
        count = self.experts.experts.num_experts
        exact: dict[str, tuple[str, Shape]] = {
            "router_scale": ("router.scale", (hidden,)),
            "router": ("router.proj.weight", (count, hidden)),
            "expert_scale": ("router.per_expert_scale", (count,)),
        }
        for key, (name, own) in exact.items():
            found[key] = Destination.of({name: own}, exact=True)
        norms = {"before": "pre_feedforward_layernorm_2", "behind": "post_feedforward_layernorm_2"}
        for key, name in {**norms, "joined": "post_feedforward_layernorm"}.items():
            found[f"{key}_norm"] = Destination.of({f"{name}.weight": (hidden,)})
        return found

    @property
    def widest(self) -> int:
        """Elements a row of the intermediate results."""
        return self.mlp.widest + (self.experts.widest if self.experts else 0) + 3 * self.per_layer


@dataclass(frozen=True)
class NoLayout:
    """No block: the stream goes on as it is."""

    cache: ClassVar[tuple[Shape, ...]] = ()
    widest: ClassVar[int] = 0

    def sharded(self, shard: Shard) -> NoLayout:
        return self

    def destinations(self) -> dict[str, Destination]:
        return {}


AttentionLayout = GqaLayout | LatentLayout
RecurrentLayout = DeltaLayout | ConvLayout
MixerLayout = AttentionLayout | RecurrentLayout | NoLayout
FeedForwardLayout = MlpLayout | MoeLayout | SideLayout | NoLayout


@dataclass(frozen=True)
class LayerLayout:
    """One layer: two blocks, each with its norm before and its sum after."""

    attention: MixerLayout
    mlp: FeedForwardLayout
    parallel: bool = False  # both blocks read the stream before the layer, by one norm

    def sharded(self, shard: Shard) -> LayerLayout:
        """A rank's part of both blocks. Raises IncompatibleError where there is none."""
        return replace(self, attention=self.attention.sharded(shard), mlp=self.mlp.sharded(shard))

    def destinations(self) -> Iterator[Destination]:
        """Everything that is allocated for the layer."""
        yield from self.attention.destinations().values()
        yield from self.mlp.destinations().values()

    def tensors(self) -> dict[str, Shape]:
        """Names, inside the layer, and shapes of what it takes of a checkpoint."""
        return {part.name: part.shape for each in self.destinations() for part in each.parts}
