"""What `config.json` says of sliding windows, latent attention, routed experts, and weights in FP8 blocks.

Each family has its own keys for the same facts; `model_config` says what an absent one counts as. Source:
the configurations of `deepseek_v3`, `qwen3_moe`, `ernie4_5_moe` and others in Hugging Face transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial

from spd.formats.json_file import Fields

MAX_POSITIONS = 1 << 27
MAX_PERIOD, MAX_RANK, MAX_EXPERTS, MAX_WIDTH = 1024, 1 << 16, 1 << 14, 1 << 20
KINDS = ("full_attention", "sliding_attention")
LINEAR = "linear_attention"
MAX_TAPS, MAX_DELTA_DIM = 16, 256
"""What the C kernels have room for: inputs of a convolution, elements of a head."""


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
    """Gated DeltaNet layers, or Mamba-2's: sizes of heads, and which layers they are."""

    kernel: int  # inputs that the convolution sees
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    layers: tuple[bool, ...]
    interleaved: bool = False  # projections are fused, key head by key head (Qwen3-Next)
    corrects: bool = True  # else Mamba-2, whose heads share keys by groups
    conv_bias: bool = False
    single: tuple[str, ...] = ()
    """The kind of each layer's one block; empty where layers have two."""


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
    plain: bool = False  # no gates: down(relu(up(x)) ** 2)
    shared_gated: bool = False  # what the shared one gives is scaled by the sigmoid of a gate of its own


@dataclass(frozen=True)
class ExpertKeys:
    """Where a family's configuration says what of its experts."""

    count: tuple[str, ...]  # keys that say how many there are
    per_token: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared_count: str | None = None  # of shared experts, each as wide as a routed one
    shared_width: int | None = None  # what an absent width of one shared expert counts as
    shared_name: str = "shared_expert"  # its name where it has a width; a gate of its own has this one alone
    normalised: bool | None = None  # what an absent `norm_topk_prob` counts as; None: always normalised
    switch: str | None = None  # a key without which there are no experts
    sparse: Callable[[Fields, int], list[bool]] | None = None  # which layers have experts; None: all
    router: RouterConfig = RouterConfig(0, sigmoid=False, corrected=False, normalised=True)
    correction: str = ExpertsConfig.correction
    grouped: bool = False  # whether experts may be chosen by groups, as DeepSeek's are
    clamped: bool = False
    plain: bool = False


def read_sliding(fields: Fields, num_layers: int, known: Container[str]) -> tuple[int | None, ...]:
    """Each layer's window, None where it sees everything; empty where no layer slides.

    known: the family's keys; without a window's own it is refused. Raises CheckpointError for kinds of layers
    that are unknown, and for lists that contradict the rest.
    """
    slides = "sliding_window" in known
    listed = listed_kinds(fields, num_layers, KINDS if slides else KINDS[:1])
    switched = "use_sliding_window" in (known if slides else fields)
    window = fields.optional_integer("sliding_window", 0 if switched else 1, MAX_POSITIONS)
    if switched and not fields.boolean("use_sliding_window", False):
        window = None  # transformers writes 0 for a window that is switched off
    fields.require(slides or window is None, "sliding_window", f"{window}: sliding windows are not supported")
    if listed is None or not (switched or "sliding_window_pattern" in fields):
        first = fields.integer("max_window_layers", 0, MAX_PERIOD, 0)
        period = fields.optional_integer("sliding_window_pattern", 1, MAX_PERIOD) or num_layers + 1
        layers = range(1, num_layers + 1)
        usual = [bool(window) and layer > first and layer % period != 0 for layer in layers]
        fields.require(listed in (None, usual), "layer_types", "is not what this architecture does")
        listed = usual
    fields.require(
        bool(window) or not any(listed),
        "layer_types",
        "names sliding_attention, but there is no sliding_window",
    )
    return tuple(window if slide else None for slide in listed) if any(listed) else ()


def read_still(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers do not turn: a list, 0 for such a layer, or every few layers one; empty where all turn."""
    turns, key = fields.get("no_rope_layers"), "no_rope_layers"
    if turns is None:
        every = fields.optional_integer("no_rope_layer_interval", 1, MAX_PERIOD)
        return tuple(layer % every == 0 for layer in range(1, num_layers + 1)) if every else ()
    if not isinstance(turns, list) or len(turns) < num_layers or any(turn not in (0, 1) for turn in turns):
        raise fields.refused(key, f"is not a list of {num_layers} zeros and ones, one a layer")
    return tuple(not turn for turn in turns[:num_layers])


def read_scales(fields: Fields) -> Scales:
    """In the keys of `granite`, which divides its logits, and of `cohere2`, which multiplies them."""
    number = partial(fields.number, low=1e-6, high=1e6, default=1.0)
    return Scales(
        number("embedding_multiplier"),
        number("residual_multiplier"),
        fields.optional_number("attention_multiplier", 1e-6, 1e6),
        number("logit_scale") / number("logits_scaling"),
    )


def listed_kinds(
    fields: Fields, num_layers: int, kinds: tuple[str, ...], key: str = "layer_types"
) -> list[bool] | None:
    """Whether each layer's kind is another than the first; None where the key is absent."""
    names = fields.get(key)
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != num_layers:
        raise fields.refused(key, f"is not a list of {num_layers} names, one a layer")
    each = (Fields(fields.where, {key: name}) for name in names)
    return [kind.choice(key, kinds) != kinds[0] for kind in each]


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


def read_delta(fields: Fields, num_layers: int, *, interleaved: bool = False) -> DeltaConfig:
    """Of `qwen3_next` and `qwen3_5`, in both spellings of the list of layers."""
    fields.choice("output_gate_type", ("silu", "swish"), "silu")
    gated = fields.boolean("attn_output_gate", True)
    fields.require(gated, "attn_output_gate", "false: attention without gates is not supported here")
    key = next((key for key in ("layer_types", "layers_block_type") if key in fields), "layer_types")
    linear = listed_kinds(fields, num_layers, (KINDS[0], LINEAR), key)
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


def read_experts(fields: Fields, num_layers: int, keys: ExpertKeys) -> ExpertsConfig | None:
    """The experts of a family; None where the configuration has none. Raises CheckpointError."""
    if keys.switch is not None and not fields.get(keys.switch):
        return None
    named = [key for key in keys.count if key in fields] or [keys.count[0]]
    count, other = (fields.integer(key, 1, MAX_EXPERTS) for key in (named[0], named[-1]))
    fields.require(other == count, named[-1], f"{other} disagrees with {named[0]} {count}")
    width, shared = fields.integer(keys.width, 1, MAX_WIDTH), 0
    if keys.shared_count is not None:
        shared = width * fields.integer(keys.shared_count, 0, 1024, 0)
    elif keys.shared_width is not None:
        shared = fields.integer("shared_expert_intermediate_size", 0, MAX_WIDTH, keys.shared_width)
    router = replace(keys.router, per_token=fields.integer(keys.per_token, 1, count))
    if keys.normalised is not None:
        router = replace(router, normalised=fields.boolean("norm_topk_prob", keys.normalised))
    if keys.grouped:
        router = _deepseek_router(fields, count, router)
    limits = fields.number("swiglu_limit", 1e-3, 1e6, 7.0), fields.number("swiglu_alpha", 1e-3, 1e3, 1.702)
    alone = None if keys.shared_width is None else keys.shared_name
    return ExpertsConfig(
        count,
        width,
        shared,
        tuple(keys.sparse(fields, num_layers) if keys.sparse else [True] * num_layers),
        router,
        keys.correction,
        alone or "shared_experts",
        limits if keys.clamped else None,
        keys.plain,
        alone == "shared_expert",
    )


def _deepseek_router(fields: Fields, count: int, router: RouterConfig) -> RouterConfig:
    """Experts are chosen of all, or of the groups with the best one (DeepSeek-V2) or two experts (V3)."""
    scoring, methods = "softmax", ["greedy", "group_limited_greedy"]
    if router.corrected:
        scoring, methods = "sigmoid", ["noaux_tc"]
    fields.choice("scoring_func", (scoring,), scoring)
    groups = kept = 1
    if fields.choice("topk_method", methods, methods[0]) != "greedy":
        groups = fields.integer("n_group", 1, count, 1)
        kept = fields.integer("topk_group", 1, groups, 1)
        fields.require(count % groups == 0, "n_group", f"{groups} does not divide {count} experts")
        enough = kept * (count // groups) >= router.per_token
        fields.require(enough, "topk_group", f"{kept} groups hold fewer than {router.per_token} experts")
    why = f"{groups} groups of {count} experts hold one each, two are needed"
    fields.require(not router.corrected or count // groups >= 2, "n_group", why)
    why = "true: no DeepSeek-V2 divides by the sum, and codes disagree"
    fields.require(router.corrected or not router.normalised, "norm_topk_prob", why)
    scale = fields.number("routed_scaling_factor", 0.0, 1e6, 1.0)
    return replace(router, scale=scale, groups=groups, groups_kept=kept)


def _deepseek_sparse(fields: Fields, num_layers: int) -> list[bool]:
    if (listed := listed_kinds(fields, num_layers, ("dense", "sparse"), "mlp_layer_types")) is not None:
        return listed
    first = fields.integer("first_k_dense_replace", 0, 1 << 16, 0)
    every = fields.integer("moe_layer_freq", 1, 1 << 16, 1)
    return [layer >= first and layer % every == 0 for layer in range(num_layers)]


def _qwen_sparse(fields: Fields, num_layers: int) -> list[bool]:
    step, key = fields.integer("decoder_sparse_step", 1, 1 << 16, 1), "mlp_only_layers"
    dense = fields.integers(key, 0, 1 << 16) if key in fields else []
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def _lfm2_sparse(fields: Fields, num_layers: int) -> list[bool]:
    corrected = fields.boolean("use_expert_bias", True)
    fields.require(corrected, "use_expert_bias", "false is not supported")
    first = fields.integer("num_dense_layers", 0, 1 << 16, 2)
    return [layer >= first for layer in range(num_layers)]


def _ernie_sparse(fields: Fields, num_layers: int) -> list[bool]:
    fields.require(not fields.boolean("use_bias", False), "use_bias", "true: experts have no biases here")
    first = fields.integer("moe_layer_start_index", 0, 1 << 16, 1)
    last = fields.integer("moe_layer_end_index", -1, 1 << 16, -1)
    every = fields.integer("moe_layer_interval", 1, 1 << 16, 1)
    layers = range(first, num_layers if last == -1 else last + 1)
    return [layer in layers and (layer + 1) % every == 0 for layer in range(num_layers)]


_ROUTED = "n_routed_experts"
DEEPSEEK2 = ExpertKeys(
    (_ROUTED,),
    shared_count="n_shared_experts",
    normalised=False,
    switch=_ROUTED,
    sparse=_deepseek_sparse,
    grouped=True,
)
_SIGMOID = RouterConfig(0, sigmoid=True, corrected=True, normalised=True, group_best=2)
DEEPSEEK3 = replace(DEEPSEEK2, normalised=True, switch=None, router=_SIGMOID)
QWEN3 = ExpertKeys(("num_experts", "num_local_experts"), normalised=False, sparse=_qwen_sparse)
QWEN2 = replace(QWEN3, shared_width=5632)
HYBRID = replace(QWEN3, shared_width=512, normalised=True)
MIXTRAL = ExpertKeys(("num_local_experts", "num_experts"), width="intermediate_size")
"""Of `granitemoe`, too: the softmax of the chosen logits alone is that of all, divided by its sum."""
LFM2 = ExpertKeys(
    ("num_experts",),
    normalised=True,
    sparse=_lfm2_sparse,
    router=_SIGMOID,
    correction="expert_bias",
    grouped=True,
)
NEMOTRON = replace(
    DEEPSEEK3,
    shared_count=None,
    shared_width=7688,
    shared_name="shared_experts",
    switch=_ROUTED,
    sparse=lambda fields, num_layers: [True] * num_layers,
    plain=True,
)
GRANITE = replace(MIXTRAL, switch="num_local_experts", shared_width=1024, shared_name="shared_mlp")
GPT_OSS = replace(MIXTRAL, clamped=True)
GEMMA4 = ExpertKeys(("num_experts",), "top_k_experts", switch="enable_moe_block")
ERNIE = ExpertKeys(
    ("moe_num_experts",),
    "moe_k",
    shared_count="moe_num_shared_experts",
    sparse=_ernie_sparse,
    router=RouterConfig(0, sigmoid=False, corrected=True, normalised=True),
    correction="moe_statics.e_score_correction_bias",
)


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
    rows, columns = inner.integers("weight_block_size", 1, MAX_RANK, 2)
    return rows, columns
