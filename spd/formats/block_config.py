"""Configurations of a decoder's parts: latent attention, recurrent layers, experts, scales.

The limits of their numbers stand here too. `layer_kinds` and `experts_config` read them from
`config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spd.formats.json_file import json_key

MAX_POSITIONS = 1 << 27
MAX_PERIOD = 1024
MAX_RANK = 1 << 16
MAX_EXPERTS = 1 << 14
MAX_WIDTH = 1 << 20
"""Greatest numbers in a file: of positions, layers, heads and ranks, experts, and elements."""
MAX_TAPS = 16
"""Inputs of a convolution that the C kernels have room for."""
MAX_DELTA_DIM = 256
"""Elements of a recurrent layer's head that the C kernels have room for."""
ATTENTION_KINDS = ("full_attention", "sliding_attention")
LINEAR_KIND = "linear_attention"
RECURRENT_KINDS = (ATTENTION_KINDS[0], LINEAR_KIND)
CONV_KINDS = (ATTENTION_KINDS[0], "conv")
SINGLE_BLOCK_KINDS = (*RECURRENT_KINDS, "mlp", "moe")
"""Kinds of layers in models whose layers have a single block each."""
MLP_KINDS = ("dense", "sparse")
SLIDING_HEAD_KEYS = ("swa_num_attention_heads", "swa_num_key_value_heads")
"""Keys of the heads of sliding layers, in families where they have other heads."""


@dataclass(frozen=True)
class Scales:
    """Factors of embeddings, of sums of blocks, of scores, values and logits.

    scores: None for one over the root of the head's size. Logits are also divided.
    """

    embedding: float = field(default=1.0, metadata=json_key("embedding_multiplier", 1e-6, 1e6))
    residual: float = field(default=1.0, metadata=json_key("residual_multiplier", 1e-6, 1e6))
    scores: float | None = field(default=None, metadata=json_key("attention_multiplier", 1e-6, 1e6))
    values: float = field(default=1.0, metadata=json_key("attention_value_scale", 1e-6, 1e6))
    logits: float = field(default=1.0, metadata=json_key("logit_scale", 1e-6, 1e6))


@dataclass(frozen=True)
class Gemma4Config:
    """Gemma 4's additions: heads of full attention, shared caches, per-layer embeddings."""

    head_dim: int
    """Elements of a head of full attention."""
    kv_heads: int
    """Key heads of full attention."""
    num_shared_layers: int = field(metadata=json_key("num_kv_shared_layers", 0, MAX_PERIOD))
    """The last layers, which read the cache of an earlier layer of their kind."""
    key_is_value: bool = field(default=False, metadata=json_key("attention_k_eq_v"))
    """True if layers of full attention make values from the projection of keys."""
    double_wide: bool = field(default=False, metadata=json_key("use_double_wide_mlp"))
    """True if the MLPs of layers with a shared cache are twice as wide."""
    per_layer_width: int = field(
        default=256, metadata=json_key("hidden_size_per_layer_input", 0, MAX_RANK)
    )
    """Width of the embedding that each layer has of a token; 0: there is none."""
    per_layer_vocab: int = field(
        default=262_144, metadata=json_key("vocab_size_per_layer_input", 1, 1 << 24)
    )


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention: keys and values are projections of one small cached vector a token."""

    query_rank: int | None = field(metadata=json_key("q_lora_rank", 1, MAX_RANK))
    """None: queries are projected from the hidden state directly."""
    rank: int = field(metadata=json_key("kv_lora_rank", 1, MAX_RANK))
    nope_dim: int = field(metadata=json_key("qk_nope_head_dim", 1, 1024))
    """Elements of a head without position."""
    rope_dim: int
    """Elements of a head behind them that rotate; of keys one part serves all heads."""
    value_dim: int = field(metadata=json_key("v_head_dim", 1, 1024))
    interleaved: bool = field(default=True, metadata=json_key("rope_interleave"))
    """True if elements rotate in pairs (2i, 2i + 1)."""


@dataclass(frozen=True)
class DeltaConfig:
    """Layers of gated DeltaNet or Mamba-2: sizes of heads, and which layers they are."""

    kernel: int = field(metadata=json_key("linear_conv_kernel_dim", 2, MAX_TAPS))
    """Inputs of the convolution."""
    key_heads: int = field(metadata=json_key("linear_num_key_heads", 1, MAX_RANK))
    value_heads: int = field(metadata=json_key("linear_num_value_heads", 1, MAX_RANK))
    key_dim: int = field(metadata=json_key("linear_key_head_dim", 1, MAX_DELTA_DIM))
    value_dim: int = field(metadata=json_key("linear_value_head_dim", 1, MAX_DELTA_DIM))
    layers: tuple[bool, ...]
    """True for each layer of the model that is one of these."""
    interleaved: bool = False
    """True if projections are fused, key head by key head (Qwen3-Next)."""
    uses_delta_rule: bool = True
    """False for Mamba-2, whose heads share keys by groups."""
    conv_bias: bool = field(default=False, metadata=json_key("mamba_conv_bias"))
    block_kinds: tuple[str, ...] = ()
    """The kind of each layer's only block; empty where layers have two blocks."""


@dataclass(frozen=True)
class ConvConfig:
    """Short convolutions between two gates, and which layers they are."""

    kernel: int = field(metadata=json_key("conv_L_cache", 2, MAX_TAPS))
    """Inputs of the convolution."""
    layers: tuple[bool, ...]
    """True for each layer of the model that is one of these."""


RecurrentConfig = DeltaConfig | ConvConfig
"""The layers of a model that keep a state instead of keys and values."""


@dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen and weighed.

    Scores are the sigmoid or the softmax of the router's logits. Experts are chosen by score plus a
    learned correction, if there is one, from the `top_groups` groups whose
    `experts_per_group_score` best experts have the largest sum. Their weights are the scores
    without the correction, divided by their sum plus `weight_epsilon` if `normalised`, times
    `scale`.
    """

    per_token: int
    """Experts that run for a token."""
    sigmoid: bool
    """True: scores are the sigmoid; False: the softmax."""
    has_correction: bool
    normalised: bool = field(metadata=json_key("norm_topk_prob"))
    scale: float = field(default=1.0, metadata=json_key("routed_scaling_factor", 0.0, 1e6))
    groups: int = 1
    top_groups: int = 1
    experts_per_group_score: int = 1
    weight_epsilon: float = 1e-20


@dataclass(frozen=True)
class ExpertsConfig:
    """The routed experts, the shared one (width 0: none), and which layers have them."""

    num_experts: int
    intermediate_size: int
    shared_size: int
    sparse_layers: tuple[bool, ...]
    router: RouterConfig
    correction_name: str = "gate.e_score_correction_bias"
    """The correction's name inside the MLP."""
    shared_name: str = "shared_experts"
    swiglu_clamp: tuple[float, float] | None = None
    """(limit, alpha) of gates that are clamped.

    Such experts have biases, and so has their router.
    """
    is_ungated: bool = False
    """True if experts have no gates: down(relu(up(x)) ** 2)."""
    has_shared_gate: bool = False
    """True if the shared expert's output is scaled by the sigmoid of a gate of its own."""
    is_transposed: bool = field(default=True, metadata=json_key("experts_are_transposed"))
    """True if matrices of experts with biases are [inputs, outputs], as `transformers` writes them.

    No file of a folder has the key: the reader of GGUF files sets it.
    """
    latent_width: int | None = field(
        default=None, metadata=json_key("moe_latent_size", 1, MAX_WIDTH)
    )
    """Width that routed experts work in, between two projections; None: the hidden size."""
