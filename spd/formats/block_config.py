"""What `config.json` says of sliding windows, latent attention, recurrent layers and routed experts.

Families have keys of their own for the same facts; `model_config` says which, and what an absent one counts
as. Source: the configurations of `deepseek_v3`, `qwen3_moe`, `ernie4_5_moe`, `lfm2`, `granitemoehybrid`,
`nemotron_h` and others in Hugging Face transformers 5.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

from spd.formats.json_file import Fields, json_key

MAX_POSITIONS = 1 << 27
MAX_PERIOD = 1024
MAX_RANK = 1 << 16
MAX_EXPERTS = 1 << 14
MAX_WIDTH = 1 << 20
ATTENTION_KINDS = ("full_attention", "sliding_attention")
LINEAR = "linear_attention"
RECURRENT = (ATTENTION_KINDS[0], LINEAR)
CONVOLVING = (ATTENTION_KINDS[0], "conv")
SINGLE = (
    *RECURRENT,
    "mlp",
    "moe",
)  # kinds of layers: of those that recur, and of those with a single block
_OLDER = {
    "mamba": LINEAR,
    "attention": ATTENTION_KINDS[0],
    "M": LINEAR,
    "*": ATTENTION_KINDS[0],
    "-": "mlp",
    "E": "moe",
}
"""What kinds are called in older files, and the letters of Nemotron-H."""
MLPS = ("dense", "sparse")
SLIDING_HEADS = ("swa_num_attention_heads", "swa_num_key_value_heads")
"""Keys of the heads of layers that slide, where they have others."""
# the C kernels' room for inputs of a convolution, elements of a head
MAX_TAPS = 16
MAX_DELTA_DIM = 256


@dataclass(frozen=True)
class Scales:
    """What embeddings, the sums of blocks, scores (None: as the head's size says), values and logits are
    multiplied by; logits are also divided."""

    embedding: float = field(default=1.0, metadata=json_key("embedding_multiplier", 1e-6, 1e6))
    residual: float = field(default=1.0, metadata=json_key("residual_multiplier", 1e-6, 1e6))
    scores: float | None = field(default=None, metadata=json_key("attention_multiplier", 1e-6, 1e6))
    values: float = field(default=1.0, metadata=json_key("attention_value_scale", 1e-6, 1e6))
    logits: float = field(default=1.0, metadata=json_key("logit_scale", 1e-6, 1e6))


@dataclass(frozen=True)
class Gemma4Config:
    """What Gemma 4 has besides: of layers that see everything, of shared caches, of embeddings of layers."""

    head_dim: int  # of layers that see everything, and their key heads
    kv_heads: int
    num_shared_layers: int = field(metadata=json_key("num_kv_shared_layers", 0, MAX_PERIOD))
    """The last layers, which read the cache of an earlier one of their kind."""
    key_is_value: bool = field(default=False, metadata=json_key("attention_k_eq_v"))
    """Whether layers that see everything make values of what keys are made of."""
    double_wide: bool = field(default=False, metadata=json_key("use_double_wide_mlp"))
    """Whether the MLPs of the layers that share are twice as wide."""
    per_layer_width: int = field(
        default=256, metadata=json_key("hidden_size_per_layer_input", 0, MAX_RANK)
    )
    """Width of each layer's own embedding of a token; 0: there is none."""
    per_layer_vocab: int = field(
        default=262_144, metadata=json_key("vocab_size_per_layer_input", 1, 1 << 24)
    )


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention: keys and values are products of one small vector a token, which is what is kept."""

    query_rank: int | None = field(metadata=json_key("q_lora_rank", 1, MAX_RANK))
    """None: queries come straight from the hidden state."""
    rank: int = field(metadata=json_key("kv_lora_rank", 1, MAX_RANK))
    nope_dim: int = field(
        metadata=json_key("qk_nope_head_dim", 1, 1024)
    )  # of a head, without position
    rope_dim: int  # of a head, behind them, that rotate: of keys one part for all heads
    value_dim: int = field(metadata=json_key("v_head_dim", 1, 1024))
    interleaved: bool = field(default=True, metadata=json_key("rope_interleave"))


@dataclass(frozen=True)
class DeltaConfig:
    """Gated DeltaNet layers, or Mamba-2's: sizes of heads, and which layers they are."""

    kernel: int = field(
        metadata=json_key("linear_conv_kernel_dim", 2, MAX_TAPS)
    )  # inputs of the convolution
    key_heads: int = field(metadata=json_key("linear_num_key_heads", 1, MAX_RANK))
    value_heads: int = field(metadata=json_key("linear_num_value_heads", 1, MAX_RANK))
    key_dim: int = field(metadata=json_key("linear_key_head_dim", 1, MAX_DELTA_DIM))
    value_dim: int = field(metadata=json_key("linear_value_head_dim", 1, MAX_DELTA_DIM))
    layers: tuple[bool, ...]
    interleaved: bool = False  # projections are fused, key head by key head (Qwen3-Next)
    uses_delta_rule: bool = True  # else Mamba-2, whose heads share keys by groups
    conv_bias: bool = field(default=False, metadata=json_key("mamba_conv_bias"))
    block_kinds: tuple[
        str, ...
    ] = ()  # the kind of each layer's one block; empty where layers have two


@dataclass(frozen=True)
class ConvConfig:
    """Short convolutions between two gates, and which layers they are."""

    kernel: int = field(
        metadata=json_key("conv_L_cache", 2, MAX_TAPS)
    )  # inputs that the convolution sees
    layers: tuple[bool, ...]


RecurrentConfig = DeltaConfig | ConvConfig


@dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen and weighed.

    Scores are the sigmoid or the softmax of the router's logits. Experts are chosen by score plus a
    learned correction, if there is one, from the `top_groups` groups whose `experts_per_group_score`
    best experts have the largest sum. Their weights are the scores without the correction, divided by
    their sum plus `weight_epsilon` if `normalised`, times `scale`.
    """

    per_token: int
    sigmoid: bool
    has_correction: bool
    normalised: bool = field(metadata=json_key("norm_topk_prob"))
    scale: float = field(default=1.0, metadata=json_key("routed_scaling_factor", 0.0, 1e6))
    groups: int = 1
    top_groups: int = 1
    experts_per_group_score: int = 1
    weight_epsilon: float = 1e-20


@dataclass(frozen=True)
class ExpertsConfig:
    """The routed experts, the shared one beside them (width 0: none), and which layers have them."""

    num_experts: int
    intermediate_size: int
    shared_size: int
    sparse_layers: tuple[bool, ...]
    router: RouterConfig
    correction_name: str = "gate.e_score_correction_bias"  # the correction's name inside the MLP
    shared_name: str = "shared_experts"
    swiglu_clamp: tuple[float, float] | None = None
    """(limit, alpha) of gates that are clamped; such experts have biases, and so has their router."""
    is_ungated: bool = False  # no gates: down(relu(up(x)) ** 2)
    has_shared_gate: bool = (
        False  # what the shared one gives is scaled by the sigmoid of a gate of its own
    )
    is_transposed: bool = field(default=True, metadata=json_key("experts_are_transposed"))
    """True if matrices of experts with biases stand inputs before outputs, as `transformers` writes them.

    No file of a folder has the key: it is said of GGUF files.
    """
    latent_width: int | None = field(
        default=None, metadata=json_key("moe_latent_size", 1, MAX_WIDTH)
    )
    """Width that routed experts work in, between two projections; None: the stream's own."""


_SOFTMAX = RouterConfig(0, sigmoid=False, has_correction=False, normalised=True)
ROUTED = ExpertsConfig(0, 0, 0, (), _SOFTMAX)
"""What of experts no key says, by family. The softmax of the chosen logits alone is that of all, divided by
its sum, which is why Mixtral and Granite are among these."""
_SIGMOID_ROUTER = RouterConfig(
    0, sigmoid=True, has_correction=True, normalised=True, experts_per_group_score=2
)
SIGMOID = replace(ROUTED, router=_SIGMOID_ROUTER)
SHARED = replace(ROUTED, shared_name="shared_expert", has_shared_gate=True)
LFM2 = replace(
    SIGMOID, correction_name="expert_bias", router=replace(SIGMOID.router, weight_epsilon=1e-6)
)
MINIMAX = replace(SIGMOID, correction_name="e_score_correction_bias")
NEMOTRON = replace(SIGMOID, is_ungated=True)
GRANITE = replace(ROUTED, shared_name="shared_mlp")
SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702
"""What gpt-oss clamps gates and inputs to, and by what gates are scaled, where no key says so."""
GPT_OSS = replace(ROUTED, swiglu_clamp=(SWIGLU_LIMIT, SWIGLU_ALPHA))
ERNIE = replace(ROUTED, router=replace(_SOFTMAX, has_correction=True))
ERNIE = replace(ERNIE, correction_name="moe_statics.e_score_correction_bias")


def read_sliding(fields: Fields, num_layers: int, known: Container[str]) -> tuple[int | None, ...]:
    """Each layer's window, None where it sees everything; empty where none slides. known: a family's keys."""
    slides = "sliding_window" in known
    kinds = layer_kinds(fields, num_layers, ATTENTION_KINDS if slides else ATTENTION_KINDS[:1])
    slide = [kind == ATTENTION_KINDS[1] for kind in kinds or ()]
    switched = "use_sliding_window" in (known if slides else fields)
    window = fields.optional_integer("sliding_window", 0 if switched else 1, MAX_POSITIONS)
    if switched and not fields.boolean("use_sliding_window", False):
        window = None  # transformers writes 0 for a window that is switched off
    fields.require(
        slides or window is None, "sliding_window", f"{window}: sliding windows are not supported"
    )
    if kinds is None or not (switched or "sliding_window_pattern" in fields):
        first = fields.integer("max_window_layers", 0, MAX_PERIOD, 0)
        period = fields.optional_integer("sliding_window_pattern", 1, MAX_PERIOD) or num_layers + 1
        layers = range(1, num_layers + 1)
        usual = [bool(window) and layer > first and layer % period != 0 for layer in layers]
        fields.require(
            kinds is None or slide == usual, "layer_types", "is not what this architecture does"
        )
        slide = usual
    why = f"names {ATTENTION_KINDS[1]}, but there is no sliding_window"
    fields.require(bool(window) or not any(slide), "layer_types", why)
    return tuple(window if slides else None for slides in slide) if any(slide) else ()


def read_no_rope(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers do not rotate: as listed, 0 for such a layer, or every few layers one.

    Empty where all rotate.
    """
    if (key := "no_rope_layers") not in fields:
        every = fields.optional_integer("no_rope_layer_interval", 1, MAX_PERIOD)
        return tuple(layer % every == 0 for layer in range(1, num_layers + 1)) if every else ()
    turns = fields.integers(key, 0, 1)
    fields.require(len(turns) >= num_layers, key, f"is not a list of {num_layers}, one a layer")
    return tuple(not turn for turn in turns[:num_layers])


def layer_kinds(
    fields: Fields, num_layers: int | None, known: tuple[str, ...], key: str = "layer_types"
) -> list[str] | None:
    """Each layer's kind by name, letter or number, older names as newer ones; None without the key."""
    said = fields.get(key)
    if said is None:
        return None
    if isinstance(said, list) and all(type(each) is int for each in said):
        names = [known[number] for number in fields.integers(key, 0, len(known) - 1)]
    else:
        written = list(said) if isinstance(said, str) else fields.strings(key)
        names = [_OLDER[name] if _OLDER.get(name) in known else name for name in written]
    right = num_layers in (None, len(names))
    fields.require(right, key, f"is not a list of {num_layers} names, one a layer")
    for name in dict.fromkeys(names):
        fields.require_supported(key, name, known)
    return names


def read_recurrent(
    fields: Fields, num_layers: int, kinds: tuple[str, ...], **facts: Any
) -> RecurrentConfig:
    """Layers of the second of the `kinds`: by name, or all but some numbered ones, or but every few."""
    keys = ("layer_types", "full_attn_idxs", "full_attention_interval")
    key = next((key for key in keys if key in fields), keys[0])
    each = layer_kinds(fields, num_layers, kinds)
    layers = range(num_layers)
    if each is None and key == "full_attn_idxs":
        attending = fields.integers(key, 0, num_layers - 1)
        each = [kinds[layer not in attending] for layer in layers]
    elif each is None:
        every = fields.integer(key, 1, MAX_PERIOD)
        each = [kinds[bool((layer + 1) % every)] for layer in layers]
    for needed in kinds[:2]:
        fields.require(
            needed in each, key, f"no layer is {needed}: a model without is not supported"
        )
    recurs = tuple(kind == kinds[1] for kind in each)
    if kinds == CONVOLVING:
        return fields.read_dataclass(ConvConfig, layers=recurs)
    found = fields.read_dataclass(
        DeltaConfig, layers=recurs, block_kinds=tuple(each) if kinds == SINGLE else (), **facts
    )
    why = f"{found.key_heads} does not divide {found.value_heads} heads"
    fields.require(found.value_heads % found.key_heads == 0, "linear_num_key_heads", why)
    return found


def read_experts(fields: Fields, num_layers: int, made: ExpertsConfig) -> ExpertsConfig:
    """The experts of a family; made: what no key says of them."""
    count = fields.integer("num_experts", 1, MAX_EXPERTS)
    own = "moe_intermediate_size"
    width = fields.integer(own if own in fields else "intermediate_size", 1, MAX_WIDTH)
    shared = width * fields.integer("n_shared_experts", 0, 1024, 0)
    taken = fields.integer("num_experts_per_tok", 1, count)
    router = made.router
    methods = ("noaux_tc",) if router.sigmoid else ("greedy", "group_limited_greedy")
    scoring = "sigmoid" if router.sigmoid else "softmax"
    fields.refuse_unsupported_values({"scoring_func": (scoring,), "topk_method": methods})
    groups = kept = 1
    if fields.get("topk_method") != "greedy":  # else of all, whatever is said of groups
        groups = fields.integer("n_group", 1, count, 1)
        kept = fields.integer("topk_group", 1, groups, 1)
    size = count // groups
    fields.require(count % groups == 0, "n_group", f"{groups} does not divide {count} experts")
    fields.require(
        kept * size >= taken, "topk_group", f"{kept} groups hold fewer than {taken} experts"
    )
    why = f"{groups} groups of {count} experts hold {size} each, {router.experts_per_group_score} are needed"
    fields.require(size >= router.experts_per_group_score, "n_group", why)
    limits = (
        fields.number("swiglu_limit", 1e-3, 1e6, SWIGLU_LIMIT),
        fields.number("swiglu_alpha", 1e-3, 1e3, SWIGLU_ALPHA),
    )
    return fields.read_dataclass(
        ExpertsConfig,
        made,
        num_experts=count,
        intermediate_size=width,
        shared_size=fields.integer("shared_expert_intermediate_size", 0, MAX_WIDTH, shared),
        sparse_layers=tuple(_sparse_layers(fields, num_layers)),
        router=fields.read_dataclass(
            RouterConfig, router, per_token=taken, groups=groups, top_groups=kept
        ),
        swiglu_clamp=made.swiglu_clamp and limits,
    )


def _sparse_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers have experts: by name, or from one to another by steps, but for those listed."""
    keys = ("mlp_layer_types", "moe_layer_freq")
    key = next((key for key in keys if isinstance(fields.get(key), list)), keys[0])
    if (listed := layer_kinds(fields, num_layers, MLPS, key)) is not None:
        return [kind == "sparse" for kind in listed]
    first = fields.integer("first_k_dense_replace", 0, MAX_RANK, 0)
    last = fields.integer("moe_layer_end_index", -1, MAX_RANK, -1)
    every, step = (
        fields.integer(key, 1, MAX_RANK, 1) for key in ("moe_layer_freq", "decoder_sparse_step")
    )
    dense = fields.integers("mlp_only_layers", 0, MAX_RANK) if "mlp_only_layers" in fields else []
    layers = range(first, num_layers if last == -1 else last + 1)
    sparse = {layer for layer in layers if not layer % every and not (layer + 1) % step}.difference(
        dense
    )
    return [layer in sparse for layer in range(num_layers)]


def lfm2_keys(fields: Fields) -> dict[str, object]:
    """What `lfm2` says in keys of its own: a width of which the MLP is made, and tables that are one."""
    inner = fields.integer(
        "block_ff_dim" if "block_ff_dim" in fields else "intermediate_size", 1, MAX_WIDTH
    )
    if fields.boolean("block_auto_adjust_ff_dim", False):
        step = fields.integer("block_multiple_of", 1, MAX_WIDTH, 256)
        inner = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * int(2 * inner / 3))
        inner = -(-inner // step) * step
    tied = fields.boolean("tie_embedding", fields.boolean("tie_word_embeddings"))
    return {"intermediate_size": inner, "tie_word_embeddings": tied}


def granite_keys(fields: Fields) -> dict[str, object]:
    """What `granitemoehybrid` says in its own way: the width without experts, a head's, what turns."""
    found: dict[str, object] = {}
    if not fields.get("num_experts"):
        found["intermediate_size"] = fields.get("shared_expert_intermediate_size")
    if fields.get("linear_value_head_dim") in (None, "auto"):
        inner = fields.integer("mamba_expand", 1, 64, 2) * fields.integer(
            "hidden_size", 1, MAX_WIDTH
        )
        found["linear_value_head_dim"] = inner // fields.integer(
            "linear_num_value_heads", 1, MAX_RANK
        )
    if fields.choice("position_embedding_type", ("rope", "nope"), "nope") == "nope":
        found["no_rope_layers"] = [0] * fields.integer("num_hidden_layers", 1, MAX_PERIOD)
    return found


def minimax_keys(fields: Fields) -> dict[str, object]:
    """What `minimax_m2` says of rotation: how many dimensions of a head turn."""
    size = fields.even_integer("head_dim", 1024)
    turned = fields.optional_integer("rotary_dim", 2, 1024)
    return {} if turned is None else {"partial_rotary_factor": turned / size}


def hunyuan_keys(fields: Fields) -> dict[str, object]:
    """What `hunyuan_v1_moe` says layer by layer, the same of all; a shared expert is as wide as an MLP."""
    found: dict[str, object] = {}
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert"):
        each = fields.get(key)
        if isinstance(each, list) and each:
            fields.require(all(one == each[0] for one in each), key, "differs among layers")
            found[key] = each[0]
    one = fields.with_values(found)
    inner = one.integer("intermediate_size", 1, MAX_WIDTH)
    shared = one.integer("num_shared_expert", 0, 64, 1)
    return {**found, "shared_expert_intermediate_size": inner * shared}


def mimo_keys(fields: Fields) -> dict[str, object]:
    """What `mimo_v2_flash` says in its own way of layers that slide: their key heads and their window."""
    key_heads = fields.integer("num_key_value_heads", 1, MAX_RANK)
    found: dict[str, object] = {SLIDING_HEADS[1]: fields.get(SLIDING_HEADS[1]) or 2 * key_heads}
    for key, older in (
        ("layer_types", "hybrid_layer_pattern"),
        ("mlp_layer_types", "moe_layer_freq"),
    ):
        fields.require(key in fields or older in fields, older, "is missing")
    if "sliding_window_size" in fields:  # which counts the positions before a row's own
        found["sliding_window"] = 1 + fields.integer("sliding_window_size", 0, MAX_POSITIONS)
    return found


def step_keys(fields: Fields) -> dict[str, object]:
    """What `step3p5` says in its own way: layer by layer, with entries for MTP layers behind the others."""
    layers = fields.integer("num_hidden_layers", 1, MAX_PERIOD)
    found: dict[str, Any] = {
        k: each[:layers] for k, each in fields.values.items() if isinstance(each, list)
    }
    found |= {key: [limit or 0.0 for limit in found[key]] for key in LIMITS if key in found}
    cut = fields.with_values(found)
    key = "moe_layers_enum"
    thetas = "rope_theta"
    if "mlp_layer_types" not in cut:
        listed = (
            cut.integers(key, 0, MAX_RANK)
            if key in found
            else re.findall(r"\d+", cut.text(key, ""))
        )
        named = {int(number) for number in listed} or {*range(3, layers)}
        found["mlp_layer_types"] = [MLPS[layer in named] for layer in range(layers)]
    slid = cut.optional_nested("attention_other_setting") or Fields(cut.where, {})
    found[SLIDING_HEADS[0]] = cut.get("num_sliding_attention_heads") or slid.get(
        "num_attention_heads"
    )
    kinds = layer_kinds(cut, layers, ATTENTION_KINDS) or [ATTENTION_KINDS[0]] * layers
    shares = "partial_rotary_factors"
    if shares in found and thetas not in found and thetas in cut:
        found[thetas] = [cut.get(thetas)] * layers
        cut = fields.with_values(found)
    if thetas in found:
        bases = cut.numbers(thetas, layers, 1.0, 1e12)
        parts = cut.numbers(shares, layers, 0.0, 1.0) if shares in cut else (1.0,) * layers
        turning: dict[str, dict[str, Any]] = {}
        for kind, base, part in zip(kinds, bases, parts, strict=True):
            own = {thetas: base, "partial_rotary_factor": part}
            cut.require(
                turning.setdefault(kind, own) == own, thetas, "differs among layers of one kind"
            )
        turning.get(ATTENTION_KINDS[0], {}).update(
            scaling.values if (scaling := cut.optional_nested("rope_scaling")) else {}
        )
        found |= {"rope_parameters": turning, thetas: None, "rope_scaling": None}
    return {**found, "layer_types": kinds}


LIMITS = ("swiglu_limits", "swiglu_limits_shared")


def read_limits(fields: Fields, layers: int) -> tuple[tuple[float | None, float | None], ...]:
    """Where each layer's gated products are cut, of routed experts and of other MLPs; None: nowhere."""
    if not any(key in fields for key in LIMITS):
        return ()
    usual = (0.0,) * layers
    both = [fields.numbers(key, layers, 0.0, 1e6) if key in fields else usual for key in LIMITS]
    return tuple((routed or None, other or None) for routed, other in zip(*both, strict=True))


def muse_keys(fields: Fields) -> dict[str, object]:
    """What `muse_glimmer_text` says in its own way: of scores, and layer by layer of bases, 0 without."""
    layers = fields.integer("num_hidden_layers", 1, MAX_PERIOD)
    theta = "layer_rope_theta"
    slides = [bool((layers - 1 - layer) % 4) for layer in range(layers)]
    bases = fields.numbers(theta, layers, 0.0, 1e12) if theta in fields else slides
    alike = len({base for base in bases if base}) <= 1
    fields.require(alike, theta, "differs among layers that turn, which is not supported")
    scale = (
        fields.number("qk_scale_factor", 1e-6, 1e6, 3.87)
        * fields.even_integer("head_dim", 1024) ** -0.5
    )
    found = (
        {"layer_types": [ATTENTION_KINDS[slide] for slide in slides]}
        if "layer_types" not in fields
        else {}
    )
    return {
        **found,
        "attention_multiplier": scale,
        "no_rope_layers": [int(base > 0) for base in bases],
    }


def nemotron_keys(fields: Fields) -> dict[str, object]:
    """What `nemotron_h` leaves to its kinds of layers: how many; no experts without such ones; none turns."""
    kinds = layer_kinds(fields, None, SINGLE)
    if kinds is None:
        raise fields.field_error("layer_types", "is missing")
    experts = fields.integer("num_experts", 1, MAX_EXPERTS) if "moe" in kinds else None
    return {
        "num_hidden_layers": len(kinds),
        "no_rope_layers": [0] * len(kinds),
        "num_experts": experts,
    }


def read_gemma4(
    fields: Fields, layers: int, heads: int, sliding: tuple[int | None, ...]
) -> Gemma4Config:
    """Of `gemma4_text`."""
    kinds = sliding or (None,) * layers
    own = fields.integer("num_key_value_heads", 1, heads, heads)
    wide = _of_wide_layers(fields, kinds)
    found = fields.read_dataclass(
        Gemma4Config, head_dim=wide.even_integer("head_dim", 1024, 512), kv_heads=own
    )
    if found.key_is_value:
        found = replace(found, kv_heads=wide.integer("num_key_value_heads", 1, heads, own))
    wide.require(
        heads % found.kv_heads == 0, "num_key_value_heads", f"does not divide {heads} heads"
    )
    why = "a layer that shares has none of its kind before it"
    before = kinds[: max(0, layers - found.num_shared_layers)]
    fields.require(set(kinds) == set(before), "num_kv_shared_layers", why)
    fields.require(kinds[-1] is None, "layer_types", "the last layer is not full_attention")
    fields.require("rope_parameters" in fields, "rope_parameters", "is missing")
    return found


def _of_wide_layers(fields: Fields, kinds: tuple[int | None, ...]) -> Fields:
    """Heads of layers that see everything: under keys of their own, or layer by layer, in all alike."""
    each = fields.optional_nested("per_layer_config")
    if each is None:
        keys = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        return fields.with_values({key: fields.get(own) for key, own in keys.items()}, keys)
    wide = [str(layer) for layer, window in enumerate(kinds) if window is None]
    each = Fields(each.where, {key.lstrip("0") or "0": value for key, value in each.values.items()})
    alike = all(each.values.get(layer) == each.values.get(wide[0]) for layer in wide)
    why = "differs among layers of a kind, which is not supported"
    fields.require(alike and set(each.values) == set(wide), "per_layer_config", why)
    return each.nested(wide[0])
