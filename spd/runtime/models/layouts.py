"""The blocks that layers are made of: which checkpoint tensors each one takes, and into which of its own.

A layer is an attention block and an MLP block. A family chooses and fills in these descriptions, a pair
for every layer; `decoder.BLOCKS` says what runs them. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from spd.formats.block_config import ExpertsConfig, LatentConfig
from spd.formats.rope_config import RotaryDims
from spd.kernels.linear.activation import SILU, Activation
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.destinations import (
    MLP_NORMS,
    WHOLE,
    BlockNorms,
    Cut,
    Destination,
    Shape,
    Shard,
    fused,
)
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
        hidden = self.hidden_size
        rank = self.latent.rank
        block = "self_attn"
        of = self.latent
        kept = {"kv_a_proj_with_mqa": rank + of.rope_dim}
        query_rank = of.query_rank
        query = self.shard.rows(self.query_rows)
        mixed = self.num_heads * of.value_dim
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
class MlpNames:
    """What the checkpoint calls the projections of an MLP."""

    block: str = "mlp"
    """What stands before their names."""
    is_fused: bool = False
    """True if gate and up are one tensor in the checkpoint too."""


@dataclass(frozen=True)
class MlpLayout:
    """The MLP: gate and up fused, or up alone, then down."""

    hidden_size: int
    intermediate_size: int
    act: Activation = SILU
    norms: BlockNorms = MLP_NORMS
    names: MlpNames = MlpNames()
    bias: bool = False
    centred_output: bool = False
    """True if the mean of what the block adds is removed, as `GqaLayout.centred_output`."""
    shard: Shard = WHOLE
    """The rank that has this part of the width."""

    def sharded(self, shard: Shard) -> MlpLayout:
        """Return a rank's width. The last matrix reads its own columns, and makes a part of the sum."""
        width = shard.share(self.intermediate_size, "elements of an MLP")
        return replace(self, intermediate_size=width, shard=shard)

    def destinations(self) -> dict[str, Destination]:
        """Return where the checkpoint's tensors go, by the names that `GatedMlp` reads."""
        return self.norms.destinations(self.hidden_size) | self.matrices()

    def matrices(self) -> dict[str, Destination]:
        """Return the destinations without norms."""
        inner = self.intermediate_size
        if self.names.is_fused:
            rows = {"gate_up_proj": self.shard.rows(inner, inner)}
        elif self.act.gated:
            rows = {"gate_proj": self.shard.rows(inner), "up_proj": self.shard.rows(inner)}
        else:
            rows = {"up_proj": self.shard.rows(inner)}
        block = self.names.block
        found = fused("gate_up", block, rows, self.hidden_size, biased=self.bias)
        return found | fused(
            "down",
            block,
            {"down_proj": self.hidden_size},
            inner,
            biased=self.bias,
            cut=self.shard.columns(inner),
        )

    @property
    def widest(self) -> int:
        """Return the elements a row of the intermediate results: gate, up, and their product."""
        return 3 * self.intermediate_size


@dataclass(frozen=True)
class MoeLayout:
    """Routed experts, all of them below each other in two tensors, and perhaps a shared one beside them."""

    hidden_size: int
    experts: ExpertsConfig
    act: Activation = SILU
    """What routed experts apply."""
    shared_act: Activation = SILU
    """What the shared expert applies."""
    norms: BlockNorms = MLP_NORMS
    is_transposed: bool = True
    """True if experts with biases stand inputs before outputs, as `transformers` writes them."""
    shard: Shard = WHOLE
    """The rank that has this part of every expert's width."""

    def sharded(self, shard: Shard) -> MoeLayout:
        """Return a rank's width of every expert, the shared one too; each rank routes all rows by itself."""
        width = shard.share(self.experts.intermediate_size, "elements of an expert")
        shared = shard.share(self.experts.shared_size, "elements of a shared expert")
        experts = replace(self.experts, intermediate_size=width, shared_size=shared)
        return replace(self, experts=experts, shard=shard)

    @property
    def shared(self) -> MlpLayout | None:
        """Return the expert that every row goes through, if there is one."""
        size = self.experts.shared_size
        name = self.experts.shared_name
        if not size:
            return None
        names = MlpNames(f"mlp.{name}", is_fused=name == "shared_mlp")
        return MlpLayout(self.hidden_size, size, act=self.shared_act, names=names, shard=self.shard)

    @property
    def has_biases(self) -> bool:
        """True if experts have biases; gates and inputs then stand in one matrix, in turn."""
        return self.experts.swiglu_clamp is not None

    def destinations(self) -> dict[str, Destination]:
        """Return where the checkpoint's tensors go, by the names that `MoeMlp` reads."""
        hidden = self.hidden_size
        latent = self.experts.latent_width
        found = self.norms.destinations(hidden) | self._router() | self.matrices()
        if latent is not None:
            found |= fused("latent_in", "mlp", {"fc1_latent_proj": latent}, hidden)
            found |= fused("latent_out", "mlp", {"fc2_latent_proj": hidden}, latent)
        return found | (self.shared.matrices() if self.shared else {})

    def _router(self) -> dict[str, Destination]:
        """Return the destinations of what chooses experts and weighs the shared one."""
        experts = self.experts
        count = experts.num_experts
        shapes: dict[str, tuple[str, Shape]] = {
            "router": ("gate.weight", (count, self.hidden_size))
        }
        if self.has_biases:
            shapes["router_bias"] = ("gate.bias", (count,))
        if experts.router.has_correction:
            is_row = experts.correction_name.startswith("moe_statics")
            shapes["correction"] = (experts.correction_name, (1, count) if is_row else (count,))
        if experts.has_shared_gate and experts.shared_size:
            shapes["shared_gate"] = (f"{experts.shared_name}_gate.weight", (1, self.hidden_size))
        return {
            key: Destination.of({f"mlp.{name}": shape}, exact=True)
            for key, (name, shape) in shapes.items()
        }

    def matrices(self, block: str = "mlp.") -> dict[str, Destination]:
        """Return the destinations of the experts' matrices and biases; block stands before their names."""
        hidden = self.hidden_size
        width = self.experts.intermediate_size
        columns = self.experts.latent_width or hidden
        rows = 2 * width if self.has_biases else width
        gate_up: dict[str, Shape] = {"up": (rows, columns)}
        if self.has_biases:
            gate_up = {"gate_up": (rows, columns)}
        elif self.act.gated:
            gate_up = {"gate": (rows, columns), "up": (rows, columns)}
        down: Shape = (columns, width)
        gate_up_cut = self.shard.rows(rows).cut
        down_cut = self.shard.columns(width)
        if self.has_biases and self.is_transposed:
            # What a checkpoint packs is named as if it were gate and up: here halves of the rows.
            gate_up = {"gate": (hidden // 2, rows), "up": (hidden // 2, rows)}
            down = (width, hidden)
            gate_up_cut = self.shard.columns(rows)
            down_cut = self.shard.rows(width).cut
        found = {
            "experts_gate_up": self._stacked(block, gate_up, gate_up_cut),
            "experts_down": self._stacked(block, {"down": down}, down_cut),
        }
        if self.has_biases:
            count = self.experts.num_experts
            for name, size, cut in (
                ("gate_up", rows, self.shard.columns(rows)),
                ("down", hidden, None),
            ):
                bias = {f"{block}experts.{name}_proj_bias": (count, size)}
                found[f"experts_{name}_bias"] = Destination.of(bias, exact=True, cut=cut)
        return found

    def _stacked(self, block: str, shapes: Mapping[str, Shape], cut: Cut | None) -> Destination:
        """Return the destination of all experts' matrices of these shapes, one expert after the other."""
        names = {
            f"{block}experts.{number}.{part}_proj.weight": shape
            for number in range(self.experts.num_experts)
            for part, shape in shapes.items()
        }
        return Destination.of(names, cut=cut)

    @property
    def widest(self) -> int:
        """Return the elements a row of the intermediate results: of shared and chosen experts, in float32."""
        experts = self.experts
        width = 3 * experts.intermediate_size + 2 * self.hidden_size
        chosen = min(experts.num_experts, 4 * experts.router.per_token)
        return 3 * experts.shared_size + 2 * width * chosen


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
        hidden = self.mlp.hidden_size
        found = self.mlp.destinations()
        found["scalar"] = Destination.of({"layer_scalar": (1,)}, exact=True)
        if self.per_layer:
            shapes = {"per_layer_input_gate": (self.per_layer, hidden)}
            shapes |= {"per_layer_projection": (hidden, self.per_layer)}
            for name, shape in shapes.items():
                found[name] = Destination.of({f"{name}.weight": shape})
            found["side_norm"] = Destination.of({"post_per_layer_input_norm.weight": (hidden,)})
        if self.experts is None:
            return found
        found |= self.experts.matrices(block="")
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
