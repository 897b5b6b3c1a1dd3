"""What a model is: `config.json` read into a frozen `ModelConfig`, every number in range.

Unknown keys are tolerated; an unknown value of a known key is refused by name, since ignoring it would
change the model. Nothing a folder brings (`auto_map`, custom code) is ever imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats import block_config as blocks
from spd.formats.block_config import MAX_POSITIONS, SlidingRule
from spd.formats.eagle3 import ARCHITECTURE as EAGLE3
from spd.formats.eagle3 import Eagle3Config, read_eagle3
from spd.formats.json_file import Fields, names_in, shown
from spd.formats.quantized import Quantization, read_quantization
from spd.formats.rope_config import (
    GROWTH,
    RopeConfig,
    read_growth,
    read_local_rope,
    read_rope,
    read_rotary_dim,
    with_plain_base,
)

FILE_NAME, GENERATION = "config.json", "generation_config.json"
MTP_HEAD = "MTPSpeculator"
# Caps stop an absurd number before anything is allocated; all lie well above any published model.
MAX_LAYERS, MAX_WIDTH, MAX_HEADS, MAX_HEAD_DIM = 1024, 1 << 20, 4096, 1024
MAX_VOCAB = 1 << 24


@dataclass(frozen=True)
class ModelConfig:
    """The facts of a decoder that its code needs; sizes count elements, `dtype` is a torch name."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    rotary_dim: int | None = None  # the first dimensions of a head that rotate; None: all of them
    qk_norm: bool = False
    """Whether queries and keys are normalised per head, where a family leaves that to the checkpoint."""
    latent: blocks.LatentConfig | None = None
    experts: blocks.ExpertsConfig | None = None
    fp8_block: tuple[int, int] | None = None
    """Rows and columns of the blocks that share a scale, where matrices are stored as FP8."""
    quantization: Quantization | None = None
    """How matrices are stored in few bits in any other way."""
    sliding: tuple[int | None, ...] = ()
    """Each layer's sliding window, None where it sees everything; empty where no layer slides."""
    local_rope: RopeConfig | None = None  # of layers that slide, where they rotate in another way
    query_scalar: float | None = None
    """Scores are divided by its square root; None: by that of the head's size."""
    query_growth: tuple[float, int] | None = None  # see `read_growth`
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    still: tuple[bool, ...] = ()
    """Which layers know no positions; empty where every one turns."""
    scales: blocks.Scales = blocks.PLAIN
    gemma4: blocks.Gemma4Config | None = None
    delta: blocks.DeltaConfig | None = None  # of recurrent layers, which stand between those that attend
    eagle3: Eagle3Config | None = None
    """Of an EAGLE-3 head, which is no model by itself: how it reads its target."""


@dataclass(frozen=True)
class _Family:
    model_type: str
    max_positions: int  # what Hugging Face assumes when the key is absent
    mlp_bias: str | None = None  # the key of the MLP's biases, where the family has one
    bias: str | None = "attention_bias"  # the key of the attention's biases, where the family has one
    partial: float | None = None  # the share of a head that rotates when the key is absent; None: no key
    latent: bool = False
    experts: Callable[[Fields, int], blocks.ExpertsConfig | None] | None = None
    theta: float = 10_000.0
    sliding: SlidingRule | None = None  # None: a window is refused
    local_theta: float | None = None  # of layers that slide, where they rotate in another way
    longrope: bool = False
    caps: tuple[float | None, float | None] | None = None  # Gemma: of scores and logits, if no key says so
    epsilon: float = 1e-6  # of norms, when the key is absent
    interleaved: bool | None = None  # how recurrent layers' projections are stored; None: there are none
    biased: bool = False  # what an absent key of the attention's biases counts as
    tied: bool = False  # what an absent `tie_word_embeddings` counts as
    head_dim: int | None = None  # of an absent key; None: hidden_size divided among the heads
    epsilon_key: str = "rms_norm_eps"
    still: blocks.StillRule | None = None  # None: every layer turns
    scales: Callable[[Fields], blocks.Scales] | None = None
    ntk_alpha: bool = False  # whether "dynamic" with `alpha` is a larger base, the same at every length
    grows: bool = False  # whether queries grow with their position
    gemma4: bool = False  # whether layers have the keys of `read_gemma4`
    plain_local: bool = False  # layers that slide turn by the same base, never stretched


_SWITCHED = SlidingRule(4096, switched=True)
_GEMMA3 = SlidingRule(4096, period=6)
_ERNIE = _Family("ernie4_5", 131072, "use_bias", "use_bias", theta=500_000.0, epsilon=1e-5)
_QWEN35 = _Family("qwen3_5_text", 32768, partial=0.25, interleaved=False)
_HYBRID = blocks.hybrid_experts
_DEEPSEEK2, _DEEPSEEK3 = (partial(blocks.deepseek_experts, corrected=each) for each in (False, True))
_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", 2048, "mlp_bias"),
    "MistralForCausalLM": _Family("mistral", 131072, bias=None, sliding=SlidingRule(4096, listed=False)),
    "Phi3ForCausalLM": _Family(
        "phi3", 4096, bias=None, partial=1.0, sliding=SlidingRule(listed=False), longrope=True, epsilon=1e-5
    ),
    "Qwen2ForCausalLM": _Family("qwen2", 32768, bias=None, sliding=_SWITCHED),
    "Qwen3ForCausalLM": _Family("qwen3", 32768, sliding=_SWITCHED),
    "Qwen3MoeForCausalLM": _Family("qwen3_moe", 32768, experts=blocks.qwen3_experts),
    "Gemma2ForCausalLM": _Family("gemma2", 8192, sliding=SlidingRule(4096, period=2), caps=(50.0, 30.0)),
    "Gemma3ForCausalLM": _Family(
        "gemma3_text", 131072, theta=1e6, sliding=_GEMMA3, local_theta=1e4, caps=(None, None)
    ),
    "DeepseekV2ForCausalLM": _Family("deepseek_v2", 2048, latent=True, experts=_DEEPSEEK2),
    "DeepseekV3ForCausalLM": _Family("deepseek_v3", 4096, latent=True, experts=_DEEPSEEK3),
    "Glm4MoeForCausalLM": _Family("glm4_moe", 131072, partial=0.5, experts=_DEEPSEEK3, epsilon=1e-5),
    "MiMoForCausalLM": _Family("mimo", 32768),
    "Qwen3NextForCausalLM": _Family("qwen3_next", 32768, partial=0.25, interleaved=True, experts=_HYBRID),
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5MoeForCausalLM": replace(_QWEN35, model_type="qwen3_5_moe_text", experts=_HYBRID),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE, model_type="ernie4_5_moe", mlp_bias=None, experts=blocks.ernie_experts
    ),
}
_GRANITE = _Family("granite", 2048, "mlp_bias", scales=blocks.granite_scales)
_FAMILIES |= {
    "SmolLM3ForCausalLM": _Family(
        "smollm3", 32768, "mlp_bias", theta=2e6, tied=True, still=blocks.listed_still
    ),
    "Olmo3ForCausalLM": _Family(
        "olmo3", 2048, theta=5e5, sliding=SlidingRule(4096, period=4), plain_local=True, epsilon=1e-5
    ),
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": replace(
        _GRANITE, model_type="granitemoe", mlp_bias=None, experts=blocks.granite_experts
    ),
    "SeedOssForCausalLM": _Family("seed_oss", 524288, "mlp_bias", biased=True, head_dim=128),
    "Ministral3ForCausalLM": _Family(
        "ministral3",
        262144,
        bias=None,
        sliding=SlidingRule(listed=False),
        epsilon=1e-5,
        head_dim=128,
        grows=True,
    ),
    "Glm4ForCausalLM": _Family("glm4", 131072, biased=True, partial=0.5, epsilon=1.5625e-7, head_dim=128),
    "Exaone4ForCausalLM": _Family(
        "exaone4",
        2048,
        bias=None,
        sliding=SlidingRule(4096, period=4),
        epsilon=1e-5,
        still=blocks.global_still,
    ),
    "Cohere2ForCausalLM": _Family(
        "cohere2",
        8192,
        sliding=SlidingRule(4096, period=4),
        epsilon=1e-5,
        epsilon_key="layer_norm_eps",
        tied=True,
        still=blocks.global_still,
        scales=blocks.cohere_scales,
    ),
    "Gemma4ForCausalLM": _Family(
        "gemma4_text",
        131072,
        theta=1e6,
        sliding=SlidingRule(512, period=6),
        local_theta=1e4,
        caps=(None, None),
        experts=blocks.gemma4_experts,
        head_dim=256,
        gemma4=True,
    ),
    "GptOssForCausalLM": _Family(
        "gpt_oss",
        131072,
        biased=True,
        theta=150_000.0,
        sliding=SlidingRule(128, period=2),
        epsilon=1e-5,
        head_dim=64,
        experts=blocks.gpt_oss_experts,
    ),
    "HunYuanDenseV1ForCausalLM": _Family("hunyuan_v1_dense", 2048, epsilon=1e-5, ntk_alpha=True),
    "MixtralForCausalLM": _Family(
        "mixtral",
        131072,
        bias=None,
        theta=1e6,
        sliding=SlidingRule(listed=False),
        epsilon=1e-5,
        experts=blocks.mixtral_experts,
    ),
    "Qwen2MoeForCausalLM": _Family(
        "qwen2_moe", 32768, bias="qkv_bias", biased=True, sliding=_SWITCHED, experts=blocks.qwen2_experts
    ),
}
WRAPPERS = {
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    "Mistral3ForConditionalGeneration": ("mistral3", "Ministral3ForCausalLM"),
    "Gemma4ForConditionalGeneration": ("gemma4", "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", "Gemma4ForCausalLM"),
}
"""Architectures that see images too, their model types, and what their `text_config` is of."""
_OTHER_TEXTS = {("Mistral3ForConditionalGeneration", "mistral"): "MistralForCausalLM"}
"""What it is of where it has another model type."""
_UNIFIED = ("gemma4_unified_text",)
"""Model types of texts that are another's in all that counts here."""
_OUTSIDE = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
"""What holds for the text's part too where it stands beside it."""
MROPE = ("mrope_section", "mrope_interleaved")
"""How the three positions of an image's part are laid out: a token of text has one."""
SUPPORTED_ARCHITECTURES = (*_FAMILIES, *WRAPPERS)

REFUSED_ARCHITECTURES = {
    "DeepseekV32ForCausalLM": "its sparse-attention indexer is not supported",
    "GlmMoeDsaForCausalLM": "its sparse-attention indexer is not supported",
    "Glm4MoeLiteForCausalLM": "latent attention in this family is not supported",
    "Gemma3ForConditionalGeneration": "images are not supported; a text-only Gemma3ForCausalLM is",
}
"""Architectures close to supported ones, and why they are not."""

_DTYPES = [prefix + name for prefix in ("", "torch.") for name in ("bfloat16", "float16", "float32")]


def refuse_head(config: ModelConfig, folder: Path) -> None:
    """Raise CheckpointError for an EAGLE-3 head where a model is wanted."""
    if config.eagle3 is not None:
        raise _drafts_only("an EAGLE-3 head", folder, "--draft-model")


def _drafts_only(what: str, folder: Path, option: str) -> CheckpointError:
    why = f"{folder}: {what} drafts for another model and writes no text by itself"
    return CheckpointError(why, fix=[f"-m TARGET {option} {folder}"], code="not_a_model")


def model_config_of(fields: Fields) -> ModelConfig:
    """What `config.json` says, or a configuration inside another file; text's part of what sees images too.

    Raises `CheckpointError` naming the file, the field and the accepted values.
    Source: `LlamaConfig` and `Qwen3Config` of Hugging Face transformers, versions 4 and 5.
    """
    if head := read_eagle3(fields):
        return replace(_decoder_config(head[1]), architecture=EAGLE3, eagle3=head[0])
    names = fields.get("architectures")
    outer = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    wrapper = WRAPPERS.get(outer)
    if wrapper is not None:
        fields.choice("model_type", wrapper[:1], wrapper[0])
        inner = fields.nested("text_config")
        around = {key: fields.values[key] for key in _OUTSIDE if key in fields}
        text = _OTHER_TEXTS.get((outer, str(inner.get("model_type"))), wrapper[1])
        named = {"model_type": _FAMILIES[text].model_type} if inner.get("model_type") in _UNIFIED else {}
        fields = Fields(inner.where, {**inner.values, **around, **named, "architectures": [text]})
    return _decoder_config(fields)


def _decoder_config(fields: Fields) -> ModelConfig:
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    fp8_block, quantization = blocks.read_fp8_block(fields), read_quantization(fields)
    _refuse_unsupported(fields, family)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS, family.max_positions)
    mixed = family.interleaved
    delta = None if mixed is None else blocks.read_delta(fields, num_layers, interleaved=mixed)
    sliding = () if delta else blocks.read_sliding(fields, num_layers, family.sliding)
    latent = blocks.read_latent(fields) if family.latent else None
    experts = family.experts(fields, num_layers) if family.experts else None
    inner = experts.intermediate_size if experts else None  # where every layer has experts
    head_dim = family.head_dim or hidden_size // num_heads
    head_dim = latent.nope_dim + latent.rope_dim if latent else _head_dim(fields, num_heads, head_dim)
    rotary_dim = read_rotary_dim(fields, family.partial, head_dim) if family.partial is not None else None
    local_theta, caps = _local_theta(fields, family), family.caps or (None, None)
    ignored = (*(("partial_rotary_factor",) if rotary_dim else ()), *(MROPE if delta else ()))
    rope = read_rope(
        with_plain_base(fields, family.theta, head_dim) if family.ntk_alpha else fields,
        family.theta,
        max_positions,
        ignored=(*ignored, *(GROWTH if family.grows else ())),
        long_dim=rotary_dim if family.longrope else None,
        by_kind=local_theta is not None,
    )
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, num_heads)
    why = f"{num_kv_heads} does not divide {num_heads} attention heads"
    fields.require(num_heads % num_kv_heads == 0, "num_key_value_heads", why)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH, inner),
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        vocab_size=vocab_size,
        max_positions=min(max_positions, rope.max_positions or max_positions),
        rms_norm_eps=fields.number(family.epsilon_key, 1e-12, 0.1, family.epsilon),
        tie_embeddings=fields.boolean("tie_word_embeddings", family.tied or family.caps is not None),
        attention_bias=fields.boolean(family.bias, family.biased) if family.bias else False,
        mlp_bias=fields.boolean(family.mlp_bias, False) if family.mlp_bias else False,
        rope=rope,
        dtype=_dtype(fields),
        bos_token_id=fields.optional_integer("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        rotary_dim=rotary_dim,
        qk_norm=fields.boolean("use_qk_norm", False),
        latent=latent,
        delta=delta,
        experts=experts,
        fp8_block=fp8_block,
        quantization=quantization,
        sliding=sliding,
        local_rope=read_local_rope(fields, local_theta, max_positions) if local_theta else None,
        query_growth=read_growth(fields) if family.grows else None,
        still=family.still(fields, num_layers, sliding) if family.still else (),
        gemma4=blocks.read_gemma4(fields, num_layers, num_heads, sliding) if family.gemma4 else None,
        scales=family.scales(fields) if family.scales else blocks.PLAIN,
        query_scalar=fields.number("query_pre_attn_scalar", 1e-6, 1e9, 256) if family.caps else None,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", caps[0]) if family.caps else None,
        logit_softcap=_softcap(fields, "final_logit_softcapping", caps[1]) if family.caps else None,
    )


def _architecture(fields: Fields) -> str:
    names, key = fields.get("architectures"), "architectures"
    if names == [MTP_HEAD]:
        raise _drafts_only("an MTP head", Path(fields.where).parent, "--mtp")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise _unknown(fields, f"{shown(names)} does not name one architecture")
    name, refusal = shown(names[0]), REFUSED_ARCHITECTURES.get(names[0])
    fields.require(refusal is None, key, f"{name}: {refusal}")
    if names[0] not in _FAMILIES:
        prospect = _prospect(fields)
        raise _unknown(fields, f"{name} is not supported" + (f" ({prospect})" if prospect else ""))
    expected = _FAMILIES[names[0]].model_type
    model_type = fields.text("model_type", expected)
    why = f"{shown(model_type)} does not belong to {names[0]} ({expected} does)"
    fields.require(model_type == expected, "model_type", why)
    return names[0]


_PIECES = {
    **dict.fromkeys(("mamba_num_heads", "mamba_d_state", "ssm_state_size", "state_size"), "Mamba layers"),
    **dict.fromkeys(("conv_L_cache", "conv_dim"), "short convolutions"),
    **dict.fromkeys(("index_topk", "index_n_heads", "indexer_types"), "a sparse-attention indexer"),
    **dict.fromkeys(("hc_mult", "hc_count"), "hyper-connections"),
    **dict.fromkeys(
        ("linear_attn_config", "wkv_version", "head_size_a"), "another recurrence than DeltaNet's"
    ),
    **dict.fromkeys(("is_encoder_decoder", "encoder_layers"), "an encoder"),
}
"""Keys that speak of what no supported architecture has, and what that is."""


def _prospect(fields: Fields) -> str:
    """What would help, as far as a configuration of an unknown architecture tells: parts of a sentence."""
    name = str(fields.get("architectures")).strip("[]'")
    inner = fields.get("text_config")
    text = inner if isinstance(inner, dict) else fields.values
    found = dict.fromkeys(piece for key, piece in _PIECES.items() if text.get(key))
    words = [f"missing: {', '.join(found)}"] if found else []
    stems = {known.split("For")[0]: known for known in SUPPORTED_ARCHITECTURES}
    close = difflib.get_close_matches(name.split("For")[0], stems, 1, 0.5)
    words += [f"nearest: {stems[each]}" for each in close]
    kinds = {family.model_type: known for known, family in _FAMILIES.items()}
    if isinstance(inner, dict):
        known = kinds.get(str(inner.get("model_type")))
        part = f"is that of {known}, which runs without images" if known else "is of no supported type either"
        words.append(f"its text_config {part}")
    return "; ".join(words)


def _unknown(fields: Fields, why: str) -> CheckpointError:
    """The error for an architecture that is none of those supported, with all of these behind it."""
    error = fields.refused("architectures", why)
    error.reason = (f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}",)
    return error


def _refuse_unsupported(fields: Fields, family: _Family) -> None:
    whole = family.partial is not None or fields.number("partial_rotary_factor", 0.0, 1.0, 1.0) == 1.0
    fields.require(whole, "partial_rotary_factor", "rotating a part of the head is not supported")
    both_ways = fields.get("use_bidirectional_attention") not in (None, False, "vision")
    fields.require(not both_ways, "use_bidirectional_attention", "attending to later tokens is not supported")
    if family.caps is not None:  # Gemma's code reads a key of its own and leaves the usual one alone
        fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    else:
        fields.choice("hidden_act", ("silu", "swish"), "silu")
    for key in ("attention_out_bias", "use_cla"):
        fields.require(not fields.boolean(key, False), key, "true is not supported")


def _local_theta(fields: Fields, family: _Family) -> float | None:
    """The base of layers that slide, where they turn in another way."""
    return fields.number("rope_theta", 1.0, 1e12, family.theta) if family.plain_local else family.local_theta


def _softcap(fields: Fields, key: str, default: float | None) -> float | None:
    """A cap of scores or logits; an absent key is the family's default, null is no cap."""
    return fields.optional_number(key, 1e-3, 1e6) if key in fields.values else default


def _head_dim(fields: Fields, num_heads: int, default: int) -> int:
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    divides = "head_dim" in fields or hidden_size % num_heads == 0
    fields.require(divides, "num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, default)
    fields.require(head_dim % 2 == 0, "head_dim", f"{head_dim} is odd: rotary embedding needs pairs")
    return head_dim


def _dtype(fields: Fields) -> str:
    """The dtype under its new name (`dtype`) or its old one; float32 where neither is given, as upstream."""
    keys = [key for key in ("dtype", "torch_dtype") if key in fields]
    names = [fields.choice(key, _DTYPES).removeprefix("torch.") for key in keys] or ["float32"]
    fields.require(names[0] == names[-1], "dtype", f"{names[0]} disagrees with torch_dtype {names[-1]}")
    return names[0]


@dataclass(frozen=True)
class GenerationConfig:
    """How a model wants to be sampled by default; `None` means that the file is silent."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    do_sample: bool | None = None


def read_generation_config(folder: Path, *, vocab_size: int = MAX_VOCAB) -> GenerationConfig:
    """Read `generation_config.json`, all defaults when there is none; other keys of it are ignored.

    `vocab_size` bounds the end-of-sequence ids. Raises `CheckpointError` naming file and field.
    """
    if GENERATION not in names_in(folder):
        return GenerationConfig()
    fields = Fields.of(folder / GENERATION)
    return GenerationConfig(
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        temperature=fields.optional_number("temperature", 0.0, 1e4),
        top_p=fields.optional_number("top_p", 1e-9, 1.0),
        min_p=fields.optional_number("min_p", 0.0, 1.0),
        repetition_penalty=fields.optional_number("repetition_penalty", 1e-6, 1e4),
        top_k=fields.optional_integer("top_k", 0, 1 << 31),
        do_sample=fields.boolean("do_sample", False) if "do_sample" in fields else None,
    )
