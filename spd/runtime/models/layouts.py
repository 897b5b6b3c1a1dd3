"""The descriptions of a layer's blocks: sizes, and the parameters that checkpoint tensors fill.

A layer is an attention block and an MLP block. A family chooses and fills in these descriptions,
two for every layer; `decoder_layer.BLOCK_CLASSES` has the class that runs each. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from spd.formats.block_config import ExpertsConfig, LatentConfig
from spd.formats.rope_config import RotaryDims
from spd.kernels.linear.activation import SILU, Activation
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.parameters import (
    MLP_NORMS,
    UNSHARDED,
    BlockNorms,
    Cut,
    ParameterSpec,
    Shape,
    Shard,
    fused_parameters,
)
from spd.runtime.models.recurrent_layouts import ConvLayout, DeltaLayout


@dataclass(frozen=True)
class LatentLayout:
    """Latent attention: the cache holds one normed vector and one rotated key of a position for all
    heads.

    It runs in the absorbed form: a query head is projected into the latent space by its part of the
    key matrix, and the attention's mix of latent vectors is projected to values afterwards.
    """

    hidden_size: int
    num_heads: int
    latent: LatentConfig
    scale: float
    shard: Shard = UNSHARDED
    """The rank that has these heads; every rank has the parameters that all heads share."""

    def sharded(self, shard: Shard) -> LatentLayout:
        """Return the layout of a rank's heads; ranks sum the results of their output columns."""
        return replace(
            self, num_heads=shard.count_per_rank(self.num_heads, "attention heads"), shard=shard
        )

    @property
    def rotary(self) -> RotaryDims:
        """Return the rotary dimensions of the rotated parts of queries and keys."""
        return RotaryDims(self.latent.rope_dim, self.latent.rope_dim, self.latent.interleaved)

    @property
    def query_rows(self) -> int:
        """Return the elements of all query heads."""
        return self.num_heads * (self.latent.nope_dim + self.latent.rope_dim)

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by the names that `LatentAttention` reads."""
        hidden = self.hidden_size
        rank = self.latent.rank
        block = "self_attn"
        latent = self.latent
        cached = {"kv_a_proj_with_mqa": rank + latent.rope_dim}
        query_rank = latent.query_rank
        query = self.shard.rows(self.query_rows)
        output_width = self.num_heads * latent.value_dim
        parameters = {"norm": ParameterSpec.from_shapes({"input_layernorm.weight": (hidden,)})}
        if query_rank is None:
            parameters |= fused_parameters("down", block, {"q_proj": query, **cached}, hidden)
        else:
            parameters |= fused_parameters(
                "down", block, {"q_a_proj": query_rank, **cached}, hidden
            )
            parameters["query_norm"] = ParameterSpec.from_shapes(
                {f"{block}.q_a_layernorm.weight": (query_rank,)}
            )
            parameters |= fused_parameters("query", block, {"q_b_proj": query}, query_rank)
        parameters["latent_norm"] = ParameterSpec.from_shapes(
            {f"{block}.kv_a_layernorm.weight": (rank,)}
        )
        up = {"kv_b_proj": self.shard.rows(self.num_heads * latent.nope_dim + output_width)}
        parameters["up"] = replace(
            fused_parameters("up", block, up, rank)["up"], is_unquantized=True
        )
        cut = self.shard.columns(output_width)
        return parameters | fused_parameters(
            "output", block, {"o_proj": hidden}, output_width, cut=cut
        )

    @property
    def cache(self) -> tuple[Shape, ...]:
        """Return the shape of a position's entry in the pool: the normed vector, then the rotated
        key.
        """
        return ((self.latent.rank + self.latent.rope_dim,),)

    @property
    def cache_scales(self) -> tuple[Shape, ...]:
        """Return the shape of a position's scales where entries have eight bits: one for each part."""
        return ((2,),)

    @property
    def sees_block(self) -> bool:
        """Return False: no block drafter has such layers."""
        return False

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return the numbers of query and key-value heads, and the elements of a head, as in
        `HeadShape`.
        """
        return self.num_heads, 1, self.latent.rank + self.latent.rope_dim

    @property
    def widest(self) -> int:
        """Return the elements of a row of the intermediate results: queries, before and in the
        latent space.
        """
        return 2 * self.query_rows + 2 * self.num_heads * (self.latent.rank + self.latent.rope_dim)


@dataclass(frozen=True)
class MlpNames:
    """The checkpoint's names of an MLP's projections."""

    block: str = "mlp"
    """The prefix of their names."""
    is_fused_in_checkpoint: bool = False
    """True if gate and up are one tensor in the checkpoint too."""


@dataclass(frozen=True)
class MlpLayout:
    """An MLP: gate and up fused, or up alone, then down."""

    hidden_size: int
    intermediate_size: int
    act: Activation = SILU
    norms: BlockNorms = MLP_NORMS
    names: MlpNames = MlpNames()
    bias: bool = False
    removes_mean: bool = False
    """True if the mean is removed from the block's result, as `GqaLayout.removes_mean`."""
    shard: Shard = UNSHARDED
    """The rank that has this part of the width."""

    def sharded(self, shard: Shard) -> MlpLayout:
        """Return the layout of a rank's part of the width.

        Ranks sum the results of their columns of the last matrix.
        """
        width = shard.count_per_rank(self.intermediate_size, "elements of an MLP")
        return replace(self, intermediate_size=width, shard=shard)

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by the names that `GatedMlp` reads."""
        return self.norms.parameters(self.hidden_size) | self.matrices()

    def matrices(self) -> dict[str, ParameterSpec]:
        """Return the parameters without norms."""
        inner = self.intermediate_size
        if self.names.is_fused_in_checkpoint:
            rows = {"gate_up_proj": self.shard.rows(inner, inner)}
        elif self.act.gated:
            rows = {"gate_proj": self.shard.rows(inner), "up_proj": self.shard.rows(inner)}
        else:
            rows = {"up_proj": self.shard.rows(inner)}
        block = self.names.block
        parameters = fused_parameters("gate_up", block, rows, self.hidden_size, biased=self.bias)
        return parameters | fused_parameters(
            "down",
            block,
            {"down_proj": self.hidden_size},
            inner,
            biased=self.bias,
            cut=self.shard.columns(inner),
        )

    @property
    def widest(self) -> int:
        """Return the elements of a row of the intermediate results: gate, up, and their product."""
        return 3 * self.intermediate_size


@dataclass(frozen=True)
class MoeLayout:
    """Routed experts, stacked in two tensors, and possibly a shared expert."""

    hidden_size: int
    experts: ExpertsConfig
    act: Activation = SILU
    """The activation of routed experts."""
    shared_act: Activation = SILU
    """The activation of the shared expert."""
    norms: BlockNorms = MLP_NORMS
    is_transposed: bool = True
    """True if matrices of experts with biases are [in, out], as `transformers` writes them."""
    shard: Shard = UNSHARDED
    """The rank that has this part of each expert's width."""

    def sharded(self, shard: Shard) -> MoeLayout:
        """Return the layout of a rank's part of each expert's width, the shared one's too.

        Each rank routes all rows.
        """
        width = shard.count_per_rank(self.experts.intermediate_size, "elements of an expert")
        shared = shard.count_per_rank(self.experts.shared_size, "elements of a shared expert")
        experts = replace(self.experts, intermediate_size=width, shared_size=shared)
        return replace(self, experts=experts, shard=shard)

    @property
    def shared(self) -> MlpLayout | None:
        """Return the expert that every row goes through, if there is one."""
        size = self.experts.shared_size
        name = self.experts.shared_name
        if not size:
            return None
        names = MlpNames(f"mlp.{name}", is_fused_in_checkpoint=name == "shared_mlp")
        return MlpLayout(self.hidden_size, size, act=self.shared_act, names=names, shard=self.shard)

    @property
    def has_biases(self) -> bool:
        """True if experts have biases; rows of gates and inputs then alternate in one matrix."""
        return self.experts.swiglu_clamp is not None

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by the names that `MoeMlp` reads."""
        hidden = self.hidden_size
        latent = self.experts.latent_width
        parameters = self.norms.parameters(hidden) | self._router_parameters() | self.matrices()
        if latent is not None:
            parameters |= fused_parameters("latent_in", "mlp", {"fc1_latent_proj": latent}, hidden)
            parameters |= fused_parameters("latent_out", "mlp", {"fc2_latent_proj": hidden}, latent)
        return parameters | (self.shared.matrices() if self.shared else {})

    def _router_parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters of the router, and of the shared expert's gate."""
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
            key: ParameterSpec.from_shapes({f"mlp.{name}": shape}, is_float32=True)
            for key, (name, shape) in shapes.items()
        }

    def matrices(self, block: str = "mlp.") -> dict[str, ParameterSpec]:
        """Return the parameters of the experts' matrices and biases.

        block: the prefix of their names.
        """
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
            # A checkpoint's packed tensor is presented as `gate` and `up`, each half of its rows.
            gate_up = {"gate": (hidden // 2, rows), "up": (hidden // 2, rows)}
            down = (width, hidden)
            gate_up_cut = self.shard.columns(rows)
            down_cut = self.shard.rows(width).cut
        parameters = {
            "experts_gate_up": self._stack_experts(block, gate_up, gate_up_cut),
            "experts_down": self._stack_experts(block, {"down": down}, down_cut),
        }
        if self.has_biases:
            count = self.experts.num_experts
            for name, size, cut in (
                ("gate_up", rows, self.shard.columns(rows)),
                ("down", hidden, None),
            ):
                bias = {f"{block}experts.{name}_proj_bias": (count, size)}
                parameters[f"experts_{name}_bias"] = ParameterSpec.from_shapes(
                    bias, is_float32=True, cut=cut
                )
        return parameters

    def _stack_experts(
        self, block: str, shapes: Mapping[str, Shape], cut: Cut | None
    ) -> ParameterSpec:
        """Return the parameter of all experts' matrices of these shapes, one expert after the
        other.
        """
        names = {
            f"{block}experts.{number}.{part}_proj.weight": shape
            for number in range(self.experts.num_experts)
            for part, shape in shapes.items()
        }
        return replace(ParameterSpec.from_shapes(names, cut=cut), is_stacked=True)

    @property
    def widest(self) -> int:
        """Return the elements of a row of the intermediate results of shared and chosen experts, in
        float32.
        """
        experts = self.experts
        width = 3 * experts.intermediate_size + 2 * self.hidden_size
        chosen = min(experts.num_experts, 4 * experts.router.per_token)
        return 3 * experts.shared_size + 2 * width * chosen


@dataclass(frozen=True)
class Gemma4MlpLayout:
    """Gemma 4's second block: MLP and experts of the same input, then the layer's embedding of the
    token.

    The stream after it is multiplied by a number.
    """

    mlp: MlpLayout
    experts: MoeLayout | None
    embedding_width: int
    """The elements of the layer's embedding; 0: there is none."""
    index: int
    """The index of the layer."""

    def sharded(self, shard: Shard) -> Gemma4MlpLayout:
        """Return the layout of a rank's part of MLP and experts.

        Every rank has the layer's full embedding.
        """
        return replace(
            self, mlp=self.mlp.sharded(shard), experts=self.experts and self.experts.sharded(shard)
        )

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by the names that `Gemma4Mlp` reads."""
        hidden = self.mlp.hidden_size
        parameters = self.mlp.parameters()
        parameters["scalar"] = ParameterSpec.from_shapes({"layer_scalar": (1,)}, is_float32=True)
        if self.embedding_width:
            shapes: dict[str, Shape] = {
                "per_layer_input_gate": (self.embedding_width, hidden),
                "per_layer_projection": (hidden, self.embedding_width),
            }
            for name, weight_shape in shapes.items():
                parameters[name] = ParameterSpec.from_shapes({f"{name}.weight": weight_shape})
            norm = {"post_per_layer_input_norm.weight": (hidden,)}
            parameters["embedding_norm"] = ParameterSpec.from_shapes(norm)
        if self.experts is None:
            return parameters
        parameters |= self.experts.matrices(block="")
        count = self.experts.experts.num_experts
        router: dict[str, tuple[str, Shape]] = {
            "router_scale": ("router.scale", (hidden,)),
            "router": ("router.proj.weight", (count, hidden)),
            "expert_scale": ("router.per_expert_scale", (count,)),
        }
        for key, (name, shape) in router.items():
            parameters[key] = ParameterSpec.from_shapes({name: shape}, is_float32=True)
        norms = {
            "experts_norm": "pre_feedforward_layernorm_2",
            "post_experts_norm": "post_feedforward_layernorm_2",
            "joint_norm": "post_feedforward_layernorm",
        }
        for key, name in norms.items():
            parameters[key] = ParameterSpec.from_shapes({f"{name}.weight": (hidden,)})
        return parameters

    @property
    def widest(self) -> int:
        """Return the elements of a row of the intermediate results."""
        experts = self.experts.widest if self.experts else 0
        return self.mlp.widest + experts + 3 * self.embedding_width


@dataclass(frozen=True)
class EmptyLayout:
    """The layout of an absent block: the stream passes unchanged."""

    cache: ClassVar[tuple[Shape, ...]] = ()
    widest: ClassVar[int] = 0

    def sharded(self, shard: Shard) -> EmptyLayout:
        """Return the layout itself."""
        return self

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return no parameters."""
        return {}


AttentionLayout = GqaLayout | LatentLayout
RecurrentLayout = DeltaLayout | ConvLayout
MixerLayout = AttentionLayout | RecurrentLayout | EmptyLayout
FeedForwardLayout = MlpLayout | MoeLayout | Gemma4MlpLayout | EmptyLayout


@dataclass(frozen=True)
class ConvolutionLayout:
    """Convolutions over the rows of a block drafter's block, around a block of a layer.

    A row's result is the sum of it and of the `kernel` - 1 rows before it, each element times a
    factor that is the sum of a constant and of one of the row's own for each `group` of elements.
    """

    hidden_size: int
    kernel: int
    group: int

    @property
    def num_factors(self) -> int:
        """Return the number of a row's own factors, of both convolutions."""
        return 2 * self.kernel * self.hidden_size // self.group

    def parameters(self, name: str) -> dict[str, ParameterSpec]:
        """Return the parameters by the names that `BlockConvolution` reads; name: that of the
        tensors.
        """
        base = (2, self.kernel, self.hidden_size)
        return {
            "conv_base": ParameterSpec.from_shapes({f"{name}.base_kernel": base}),
            **fused_parameters(
                "conv", name, {"kernel_projection": self.num_factors}, self.hidden_size
            ),
        }


@dataclass(frozen=True)
class LayerLayout:
    """One layer: two blocks, each with its norm before and its sum after."""

    attention: MixerLayout
    mlp: FeedForwardLayout
    is_parallel: bool = False
    """True if both blocks read the stream before the layer, by one norm."""
    convolutions: ConvolutionLayout | None = None
    """The convolutions around both blocks, where there are any."""

    def sharded(self, shard: Shard) -> LayerLayout:
        """Return the layout of a rank's part of both blocks.

        Raises IncompatibleError where they cannot be divided.
        """
        return replace(self, attention=self.attention.sharded(shard), mlp=self.mlp.sharded(shard))

    def block_parameters(self) -> tuple[dict[str, ParameterSpec], dict[str, ParameterSpec]]:
        """Return the parameters of both blocks by the names that their classes read."""
        attention = self.attention.parameters()
        mlp = self.mlp.parameters()
        if self.convolutions is not None:
            attention = attention | self.convolutions.parameters("attention_conv")
            mlp = mlp | self.convolutions.parameters("mlp_conv")
        return attention, mlp

    def parameters(self) -> Iterator[ParameterSpec]:
        """Yield all parameters of the layer."""
        for block in self.block_parameters():
            yield from block.values()

    def tensors(self) -> dict[str, Shape]:
        """Return names, inside the layer, and shapes of the checkpoint tensors that fill it."""
        return {
            source.name: source.shape
            for parameter in self.parameters()
            for source in parameter.sources
        }
