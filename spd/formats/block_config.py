"""What `config.json` says of sliding windows, latent attention, routed experts, and weights in FP8 blocks.

Each family has its own keys for the same facts. Source: the configurations of `deepseek_v2`, `deepseek_v3`,
`glm4_moe`, `qwen3_moe`, `ernie4_5_moe` and others in Hugging Face transformers 5, and the published files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spd.formats.json_file import Fields, shown

MAX_POSITIONS = 1 << 27
MAX_PERIOD, MAX_RANK, MAX_EXPERTS, MAX_BLOCK = 1024, 1 << 16, 1 << 14, 1 << 16
KINDS = ("full_attention", "sliding_attention")
LINEAR = "linear_attention"
MAX_TAPS, MAX_DELTA_DIM = 16, 256
"""What the C kernels have room for: inputs of a convolution, elements of a head."""


@dataclass(frozen=True)
class SlidingRule:
    """How a family's code chooses the layers that slide."""

    window: int | None = None  # what an absent `sliding_window` counts as; null is no window
    switched: bool = False  # whether `use_sliding_window` turns it on, from layer `max_window_layers` on
    period: int | None = None
    """Of so many layers the last sees everything; None: all slide. `sliding_window_pattern` overrides it."""
    listed: bool = True  # whether the code follows `layer_types`, or they may only say what it does anyway


@dataclass(frozen=True)
class Scales:
    """What embeddings, the sums of blocks, scores (None: as the head's size says) and logits are
    multiplied by."""

    embedding: float = 1.0
    residual: float = 1.0
    scores: float | None = None
    logits: float = 1.0


PLAIN = Scales()


@dataclass(frozen=True)
class Gemma4Config:
    """What Gemma 4 has besides: of layers that see everything, of shared caches, of embeddings of layers."""

    head_dim: int  # of layers that see everything, and their key heads
    kv_heads: int
    key_is_value: bool  # there values are made of what keys are made of
    shared: int  # the last layers, which read the cache of an earlier one of their kind
    double_wide: bool  # the MLPs of these are twice as wide
    per_layer: int  # width of each layer's own embedding of a token; 0: there is none
    per_layer_vocab: int


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention: keys and values are products of one small vector a token, which is what is kept.

    A query and key head is `nope_dim` dimensions without position and `rope_dim` that rotate; the rotated
    part of a key is one for all heads.
    """

    query_rank: int | None  # None: queries come straight from the hidden state
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True)
class DeltaConfig:
    """Gated DeltaNet layers: sizes of heads, and which layers they are."""

    kernel: int  # inputs that the convolution sees
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    layers: tuple[bool, ...]
    interleaved: bool  # projections are fused, key head by key head (Qwen3-Next)


@dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen and weighed.

    Scores are the sigmoid or the softmax of the router's logits. Experts are chosen by scores plus a learned
    correction, if there is one, from the `groups_kept` groups whose `group_best` best ones sum highest; they
    are weighed by their scores alone, which `normalised` divides by their sum, times `scale`.
    """

    per_token: int
    sigmoid: bool
    corrected: bool
    normalised: bool
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 1


@dataclass(frozen=True)
class ExpertsConfig:
    """The routed experts, the shared one beside them (width 0: none), and which layers have them."""

    num_experts: int
    intermediate_size: int
    shared_size: int
    sparse_layers: tuple[bool, ...]
    router: RouterConfig
    correction: str = "gate.e_score_correction_bias"  # the correction's name inside the MLP
    shared_name: str = "shared_experts"
    clamped: tuple[float, float] | None = None
    """(limit, alpha) of gates that are clamped; such experts have biases, and so has their router."""
    shared_gated: bool = False  # what the shared one gives is scaled by the sigmoid of a gate of its own


def read_sliding(fields: Fields, num_layers: int, rule: SlidingRule | None) -> tuple[int | None, ...]:
    """Each layer's window, None where it sees everything; empty where no layer slides.

    rule: None refuses windows. Raises CheckpointError for kinds of layers that are unknown, and for lists
    that contradict the rest.
    """
    slides = _listed(fields, num_layers, KINDS if rule else KINDS[:1])
    least = 1 if rule and not rule.switched else 0  # transformers writes 0 for a window that is switched off
    window = fields.optional_integer("sliding_window", least, MAX_POSITIONS)
    if rule is None:
        # Without the switch a window counts as used: only Qwen writes windows that it then leaves off.
        used = fields.boolean("use_sliding_window", window is not None) and window is not None
        fields.require(not used, "sliding_window", f"{window}: sliding window attention is not supported")
        return ()
    if "sliding_window" not in fields.values:
        window = rule.window
    if rule.switched and not (window and fields.boolean("use_sliding_window", False)):
        window = None
    first, period = 0, 0
    if rule.switched and window is not None:
        first = fields.integer("max_window_layers", 0, MAX_PERIOD, 28)
    elif rule.period is not None and window is not None and slides is None:
        period = fields.integer("sliding_window_pattern", 1, MAX_PERIOD, rule.period)
    layers = range(1, num_layers + 1)
    usual = [
        window is not None and layer > first and not (period and layer % period == 0) for layer in layers
    ]
    agrees = rule.listed or slides in (None, usual)
    fields.require(agrees, "layer_types", "is not what this architecture does with its sliding_window")
    slides = usual if slides is None else slides
    known = window is not None or not any(slides)
    fields.require(known, "layer_types", "names sliding_attention, but there is no sliding_window")
    return tuple(window if slide else None for slide in slides) if any(slides) else ()


StillRule = Callable[[Fields, int, tuple[int | None, ...]], tuple[bool, ...]]
"""Which layers know no positions, of their number and sliding windows."""


def listed_still(fields: Fields, num_layers: int, sliding: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Of `smollm3`: a list, 0 for a layer that does not turn, or every few layers one."""
    turns, key = fields.get("no_rope_layers"), "no_rope_layers"
    if turns is None:
        every = fields.integer("no_rope_layer_interval", 1, MAX_PERIOD, 4)
        turns = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(turns, list) or len(turns) < num_layers or any(turn not in (0, 1) for turn in turns):
        raise fields.refused(key, f"is not a list of {num_layers} zeros and ones, one a layer")
    return tuple(not turn for turn in turns[:num_layers])


def global_still(fields: Fields, num_layers: int, sliding: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Of `exaone4` and `cohere2`: where layers slide those that see everything do not turn."""
    return tuple(window is None for window in sliding)


def granite_scales(fields: Fields) -> Scales:
    """Of `granite` and `granitemoe`: logits are divided, the rest is multiplied."""
    number = partial(fields.number, low=1e-6, high=1e6, default=1.0)
    embedding, residual = number("embedding_multiplier"), number("residual_multiplier")
    return Scales(embedding, residual, number("attention_multiplier"), 1 / number("logits_scaling"))


def cohere_scales(fields: Fields) -> Scales:
    """Of `cohere2`."""
    return Scales(logits=fields.number("logit_scale", 1e-6, 1e6, 0.0625))


def _listed(
    fields: Fields, num_layers: int, kinds: tuple[str, ...], key: str = "layer_types"
) -> list[bool] | None:
    """Whether each layer's kind is another than the first; None where the key is absent."""
    names = fields.get(key)
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != num_layers:
        raise fields.refused(key, f"is not a list of {num_layers} names, one a layer")
    known = f"{', '.join(kinds)} {'are' if len(kinds) > 1 else 'is'}"
    for name in names:
        fields.require(name in kinds, key, f"{shown(name)} is not supported ({known})")
    return [name != KINDS[0] for name in names]


def read_latent(fields: Fields) -> LatentConfig:
    """Of `deepseek_v2` and `deepseek_v3`. Raises `CheckpointError` naming the field."""
    rope_dim = fields.integer("qk_rope_head_dim", 2, 1024)
    fields.require(rope_dim % 2 == 0, "qk_rope_head_dim", f"{rope_dim} is odd: rotary embedding needs pairs")
    return LatentConfig(
        fields.optional_integer("q_lora_rank", 1, MAX_RANK),
        fields.integer("kv_lora_rank", 1, MAX_RANK),
        fields.integer("qk_nope_head_dim", 1, 1024),
        rope_dim,
        fields.integer("v_head_dim", 1, 1024),
        fields.boolean("rope_interleave", True),
    )


def read_delta(fields: Fields, num_layers: int, *, interleaved: bool) -> DeltaConfig:
    """Of `qwen3_next` and `qwen3_5`, in both spellings of the list of layers."""
    fields.choice("output_gate_type", ("silu", "swish"), "silu")
    gated = fields.boolean("attn_output_gate", True)
    fields.require(gated, "attn_output_gate", "false: attention without gates is not supported here")
    key = next((key for key in ("layer_types", "layers_block_type") if key in fields), "layer_types")
    linear = _listed(fields, num_layers, (KINDS[0], LINEAR), key)
    if linear is None:
        interval = fields.integer("full_attention_interval", 1, MAX_PERIOD, 4)
        linear = [bool((layer + 1) % interval) for layer in range(num_layers)]
    why = f"no layer is {KINDS[0]}: a model of recurrent layers alone is not supported"
    fields.require(not all(linear), key, why)
    key_heads = fields.integer("linear_num_key_heads", 1, MAX_RANK, 16)
    value_heads = fields.integer("linear_num_value_heads", 1, MAX_RANK, 32)
    why = f"{key_heads} does not divide {value_heads} value heads"
    fields.require(value_heads % key_heads == 0, "linear_num_key_heads", why)
    return DeltaConfig(
        fields.integer("linear_conv_kernel_dim", 2, MAX_TAPS, 4),
        key_heads,
        value_heads,
        fields.integer("linear_key_head_dim", 1, MAX_DELTA_DIM, 128),
        fields.integer("linear_value_head_dim", 1, MAX_DELTA_DIM, 128),
        tuple(linear),
        interleaved,
    )


def _counted(fields: Fields, experts: str, per_token: str, other: str = "") -> tuple[int, int]:
    """Experts, under either of two keys, and how many a token takes."""
    renamed = fields.optional_integer(other, 1, MAX_EXPERTS)
    count = fields.integer(experts, 1, MAX_EXPERTS, renamed)
    fields.require(renamed in (None, count), other, f"{renamed} disagrees with {experts} {count}")
    return count, fields.integer(per_token, 1, count)


def _experts(
    fields: Fields, count: int, sparse: Iterable[bool], router: RouterConfig, shared: str, **names: Any
) -> ExpertsConfig:
    """shared: the key that counts the shared experts, each as wide as a routed one."""
    inner = fields.integer("moe_intermediate_size", 1, 1 << 20)
    beside = inner * fields.integer(shared, 0, 1024, 0)
    return ExpertsConfig(count, inner, beside, tuple(sparse), router, **names)


def deepseek_experts(fields: Fields, num_layers: int, *, corrected: bool) -> ExpertsConfig | None:
    """Softmax scores; the best experts of all, or of the groups with the best single expert (DeepSeek-V2).

    corrected: sigmoid scores with a learned correction, the groups with the best two experts (DeepSeek-V3).
    """
    if not corrected and "n_routed_experts" not in fields:
        return None
    scoring, methods = "sigmoid" if corrected else "softmax", ["greedy", "group_limited_greedy"]
    if corrected:
        methods = ["noaux_tc"]
    fields.choice("scoring_func", (scoring,), scoring)
    count, per_token = _counted(fields, "n_routed_experts", "num_experts_per_tok")
    groups = kept = 1
    if fields.choice("topk_method", methods, methods[0]) != "greedy":
        groups = fields.integer("n_group", 1, count, 1)
        kept = fields.integer("topk_group", 1, groups, 1)
        fields.require(count % groups == 0, "n_group", f"{groups} does not divide {count} experts")
        enough = kept * (count // groups) >= per_token
        fields.require(enough, "topk_group", f"{kept} groups hold fewer than {per_token} experts")
    why = f"{groups} groups of {count} experts hold one each, two are needed"
    fields.require(not corrected or count // groups >= 2, "n_group", why)
    normalised = fields.boolean("norm_topk_prob", corrected)
    why = "true: no DeepSeek-V2 divides by the sum, and codes disagree"
    fields.require(corrected or not normalised, "norm_topk_prob", why)
    scale = fields.number("routed_scaling_factor", 0.0, 1e6, 1.0)
    best = 2 if corrected else 1
    router = RouterConfig(per_token, corrected, corrected, normalised, scale, groups, kept, best)
    default = 0 if not corrected else 3 if fields.get("model_type") == "deepseek_v3" else 1
    first = fields.integer("first_k_dense_replace", 0, 1 << 16, default)
    every = fields.integer("moe_layer_freq", 1, 1 << 16, 1)
    sparse = [layer >= first and layer % every == 0 for layer in range(num_layers)]
    return _experts(fields, count, sparse, router, "n_shared_experts")


def qwen3_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Softmax scores of all experts; transformers 5 writes their number as num_local_experts."""
    count, per_token = _counted(fields, "num_experts", "num_experts_per_tok", "num_local_experts")
    step = fields.integer("decoder_sparse_step", 1, 1 << 16, 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.refused("mlp_only_layers", f"{shown(dense)} is not a list of layers")
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    router = RouterConfig(per_token, False, False, fields.boolean("norm_topk_prob", False))
    return ExpertsConfig(count, fields.integer("moe_intermediate_size", 1, 1 << 20), 0, sparse, router)


def qwen2_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Of `qwen2_moe`: as Qwen3's, with a gated shared expert."""
    shared = fields.integer("shared_expert_intermediate_size", 0, 1 << 20, 5632)
    names: dict[str, Any] = {"shared_name": "shared_expert", "shared_gated": True}
    return replace(qwen3_experts(fields, num_layers), shared_size=shared, **names)


def mixtral_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Every layer's are as wide as an MLP, their weights sum to 1."""
    count, per_token = _counted(fields, "num_local_experts", "num_experts_per_tok", "num_experts")
    router = RouterConfig(per_token, False, False, True)
    inner = fields.integer("intermediate_size", 1, 1 << 20)
    return ExpertsConfig(count, inner, 0, (True,) * num_layers, router)


def read_gemma4(fields: Fields, layers: int, heads: int, sliding: tuple[int | None, ...]) -> Gemma4Config:
    """Of `gemma4_text`. Raises CheckpointError, also where a shared layer has none to read from."""
    kinds = sliding or (None,) * layers
    key_is_value = fields.boolean("attention_k_eq_v", False)
    own = fields.integer("num_key_value_heads", 1, heads, heads)
    wide = _of_wide_layers(fields, kinds)
    kv_heads = wide.integer("num_key_value_heads", 1, heads, own) if key_is_value else own
    fields.require(heads % kv_heads == 0, "num_global_key_value_heads", f"does not divide {heads} heads")
    size = wide.integer("head_dim", 2, 1024, 512)
    fields.require(size % 2 == 0, "global_head_dim", f"{size} is odd: rotary embedding needs pairs")
    shared = fields.integer("num_kv_shared_layers", 0, layers - 1, 0)
    why = "a layer that shares has none of its kind before it"
    fields.require(set(kinds) == set(kinds[: layers - shared]), "num_kv_shared_layers", why)
    fields.require(kinds[-1] is None, "layer_types", "the last layer is not full_attention")
    fields.require("rope_parameters" in fields, "rope_parameters", "is missing")
    return Gemma4Config(
        size,
        kv_heads,
        key_is_value,
        shared,
        fields.boolean("use_double_wide_mlp", False),
        fields.integer("hidden_size_per_layer_input", 0, 1 << 16, 256),
        fields.integer("vocab_size_per_layer_input", 1, 1 << 24, 262_144),
    )


def _of_wide_layers(fields: Fields, kinds: tuple[int | None, ...]) -> Fields:
    """Heads of layers that see everything: under keys of their own, or layer by layer, in all alike."""
    each = fields.fields("per_layer_config")
    if each is None:
        keys = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        return Fields(fields.where, {key: fields.get(old) for key, old in keys.items()})
    wide = [str(layer) for layer, window in enumerate(kinds) if window is None]
    alike = all(each.values.get(layer) == each.values.get(wide[0]) for layer in wide)
    why = "differs among layers of a kind, which is not supported"
    fields.require(alike and set(each.values) == set(wide), "per_layer_config", why)
    return each.nested(wide[0])


def gemma4_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    """Softmax scores of all experts, whose weights sum to 1 before each is scaled."""
    if not fields.boolean("enable_moe_block", False):
        return None
    count, per_token = _counted(fields, "num_experts", "top_k_experts")
    router = RouterConfig(per_token, False, False, True)
    return _experts(fields, count, (True,) * num_layers, router, "n_shared_experts")


def gpt_oss_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """As Mixtral's, clamped."""
    limits = fields.number("swiglu_limit", 1e-3, 1e6, 7.0), fields.number("swiglu_alpha", 1e-3, 1e3, 1.702)
    even = fields.integer("hidden_size", 1, 1 << 20) % 2 == 0
    fields.require(even, "hidden_size", "is odd")
    return replace(mixtral_experts(fields, num_layers), clamped=limits)


granite_experts = mixtral_experts
"""Of `granitemoe`: the softmax of the chosen logits alone is that of all, divided by its sum."""


def hybrid_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Of `qwen3_next` and `qwen3_5_moe`: as Qwen3's, but weights sum to 1, and the shared one is gated."""
    plain = qwen3_experts(fields, num_layers)
    router = replace(plain.router, normalised=fields.boolean("norm_topk_prob", True))
    shared = fields.integer("shared_expert_intermediate_size", 0, 1 << 20, 512)
    return replace(plain, router=router, shared_size=shared, shared_name="shared_expert", shared_gated=True)


def ernie_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Softmax scores with a learned correction."""
    count, per_token = _counted(fields, "moe_num_experts", "moe_k")
    biased = fields.boolean("use_bias", False)
    fields.require(not biased, "use_bias", "true: biases of experts are not supported")
    first = fields.integer("moe_layer_start_index", 0, 1 << 16, 1)
    last = fields.integer("moe_layer_end_index", -1, 1 << 16, -1)
    every = fields.integer("moe_layer_interval", 1, 1 << 16, 1)
    layers = range(first, num_layers if last == -1 else last + 1)
    sparse = [layer in layers and (layer + 1) % every == 0 for layer in range(num_layers)]
    router, correction = RouterConfig(per_token, False, True, True), "moe_statics.e_score_correction_bias"
    return _experts(fields, count, sparse, router, "moe_num_shared_experts", correction=correction)


_FP8 = {"fmt": ("e4m3", "float8_e4m3fn"), "activation_scheme": ("dynamic",), "scale_fmt": ("float", "ue8m0")}
"""What else is said of FP8 blocks, the first where nothing is."""


def is_fp8_blocks(quantization: Fields) -> bool:
    """Whether a `quantization_config` speaks of FP8 blocks as DeepSeek stores them."""
    return quantization.get("quant_method") == "fp8" and "weight_block_size" in quantization


def read_fp8_block(fields: Fields) -> tuple[int, int] | None:
    """Rows and columns of the blocks that share a scale; None where weights are not stored so."""
    old = "compression_config"
    fields.require(old not in fields, old, "quantized weights are not supported in this form")
    inner = fields.fields("quantization_config")
    if inner is None or not is_fp8_blocks(inner):
        return None
    for key, known in _FP8.items():
        inner.choice(key, known, known[0])
    block = inner.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        raise inner.refused("weight_block_size", f"{shown(block)} is not a list of rows and columns")
    rows, columns = (Fields(inner.where, {"weight_block_size": size}) for size in block)
    return rows.integer("weight_block_size", 1, MAX_BLOCK), columns.integer("weight_block_size", 1, MAX_BLOCK)
