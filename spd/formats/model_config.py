"""What a model is: `config.json` read into a frozen `ModelConfig`, every number in range.

Unknown keys are tolerated; an unknown value of a known key is refused by name, since ignoring it would
change the model. Nothing a folder brings (`auto_map`, custom code) is ever imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats import block_config as blocks
from spd.formats.assistant import ARCHITECTURE as ASSISTANT
from spd.formats.assistant import AssistantConfig, read_assistant
from spd.formats.block_config import MAX_POSITIONS, MAX_WIDTH
from spd.formats.eagle3 import ARCHITECTURE as EAGLE3
from spd.formats.eagle3 import Eagle3Config, read_eagle3
from spd.formats.json_file import Fields, names_in, shown
from spd.formats.quantized import Quantization, read_quantization
from spd.formats.recurrent_config import (
    ConvConfig,
    granite_keys,
    lfm2_keys,
    nemotron_keys,
    read_conv,
    read_mamba,
)
from spd.formats.rope_config import (
    RopeConfig,
    read_growth,
    read_local_rope,
    read_rope,
    read_rotary_dim,
    rope_fields,
)

FILE_NAME, GENERATION = "config.json", "generation_config.json"
MTP_HEAD = "MTPSpeculator"
# Caps stop an absurd number before anything is allocated; all lie well above any published model.
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM = 1024, 4096, 1024
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
    recurrent: blocks.DeltaConfig | ConvConfig | None = None  # of layers between those that attend
    eagle3: Eagle3Config | None = None
    """Of an EAGLE-3 head, which is no model by itself: how it reads its target."""
    assistant: AssistantConfig | None = None
    """The same of an assistant."""

    @property
    def head_kind(self) -> str | None:
        """What it is where it drafts for another model only: the method that drafts with it."""
        kinds = {"eagle3": self.eagle3, "assistant": self.assistant}
        return next((kind for kind, facts in kinds.items() if facts is not None), None)


@dataclass(frozen=True)
class _Family:
    model_type: str
    absent: Mapping[str, object]
    """What an absent key counts as. A family that knows windows or the rotation of a part has its key."""
    bias: str | None = "attention_bias"  # the key of the attention's biases, where the family has one
    mlp_bias: str | None = None  # the key of the MLP's biases, where the family has one
    epsilon: str = "rms_norm_eps"  # the key of what norms add
    experts: blocks.ExpertKeys | None = None
    latent: bool = False
    recurrent: Callable[[Fields, int], blocks.DeltaConfig | ConvConfig] | None = None
    """What reads of recurrent layers, where there are some."""
    spelled: Callable[[Fields], Mapping[str, object]] | None = None  # what its own keys say, in the others'
    local_base: str | None = None  # the key of the base of layers that slide, where these turn in another way
    global_still: bool = False  # where layers slide, those that see everything do not turn
    gemma4: bool = False  # whether layers have the keys of `read_gemma4`
    also: tuple[str, ...] = ()  # other model types of the same text


_COMMON: dict[str, object] = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_LONG, _SHORT = {"max_position_embeddings": 131072}, {"max_position_embeddings": 2048}
_QWEN, _EPS = {"max_position_embeddings": 32768}, {"rms_norm_eps": 1e-5}
_SLIDES, _LOCAL = {"sliding_window": 4096}, "rope_local_base_freq"
_SWITCHED = {**_QWEN, **_SLIDES, "use_sliding_window": False, "max_window_layers": 28}
_FOURTH = {**_SLIDES, "sliding_window_pattern": 4}  # of so many layers the last one sees everything
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_UNCAPPED = {**_GEMMA, **dict.fromkeys(_CAPS)}
_GEMMA3 = {**_UNCAPPED, **_LONG, "rope_theta": 1e6, _LOCAL: 1e4, "sliding_window_pattern": 6}
_QUARTER = {**_QWEN, "partial_rotary_factor": 0.25}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GRANITE, _ERNIE = {**_SHORT, **dict.fromkeys(_MULTIPLIERS, 1.0)}, {**_LONG, **_EPS, "rope_theta": 5e5}
_PHI3 = {**_EPS, "max_position_embeddings": 4096, "partial_rotary_factor": 1.0, "sliding_window": None}
_DEEPSEEK3 = {"max_position_embeddings": 4096, "first_k_dense_replace": 3}
_STILL = {"no_rope_layers": None, "no_rope_layer_interval": 4}
_SMOLLM3 = {**_QWEN, **_STILL, "rope_theta": 2e6, "tie_word_embeddings": True}
_MIXTRAL = {**_LONG, **_EPS, "rope_theta": 1e6, "sliding_window": None}
_GLM4_MOE = {**_LONG, **_EPS, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1}
_GLM4_LITE = {**_EPS, "max_position_embeddings": 202752, "first_k_dense_replace": 1}
_GLM4_LITE["routed_scaling_factor"] = 1.8
_GLM4 = {**_GLM4_MOE, "rms_norm_eps": 1.5625e-7, "attention_bias": True, "head_dim": 128}
_LFM2: dict[str, object] = {"max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1e6}
_LFM2["tie_word_embeddings"] = True
_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", _SHORT, mlp_bias="mlp_bias"),
    "MistralForCausalLM": _Family("mistral", {**_LONG, **_SLIDES}, bias=None),
    "Phi3ForCausalLM": _Family("phi3", _PHI3, bias=None),
    "Qwen2ForCausalLM": _Family("qwen2", _SWITCHED, bias=None),
    "Qwen3ForCausalLM": _Family("qwen3", _SWITCHED),
    "Qwen3MoeForCausalLM": _Family("qwen3_moe", _QWEN, experts=blocks.QWEN3),
    "Gemma2ForCausalLM": _Family(
        "gemma2", {**_GEMMA, **_CAPS, **_SLIDES, "max_position_embeddings": 8192, "sliding_window_pattern": 2}
    ),
    "Gemma3ForCausalLM": _Family("gemma3_text", {**_GEMMA3, **_SLIDES}, local_base=_LOCAL),
    "DeepseekV2ForCausalLM": _Family("deepseek_v2", _SHORT, latent=True, experts=blocks.DEEPSEEK2),
    "DeepseekV3ForCausalLM": _Family("deepseek_v3", _DEEPSEEK3, latent=True, experts=blocks.DEEPSEEK3),
    "Glm4MoeForCausalLM": _Family("glm4_moe", _GLM4_MOE, experts=blocks.DEEPSEEK3),
    "Glm4MoeLiteForCausalLM": _Family("glm4_moe_lite", _GLM4_LITE, latent=True, experts=blocks.DEEPSEEK3),
    "MiMoForCausalLM": _Family("mimo", _QWEN),
    "Lfm2ForCausalLM": _Family(
        "lfm2",
        {**_LFM2, "block_auto_adjust_ff_dim": True},
        bias=None,
        epsilon="norm_eps",
        recurrent=read_conv,
        spelled=lfm2_keys,
    ),
    "Lfm2MoeForCausalLM": _Family(
        "lfm2_moe",
        _LFM2,
        bias=None,
        epsilon="norm_eps",
        recurrent=read_conv,
        spelled=lfm2_keys,
        experts=blocks.LFM2,
    ),
    "Qwen3NextForCausalLM": _Family(
        "qwen3_next", _QUARTER, experts=blocks.HYBRID, recurrent=partial(blocks.read_delta, interleaved=True)
    ),
    "Qwen3_5ForCausalLM": _Family("qwen3_5_text", _QUARTER, recurrent=blocks.read_delta),
    "Qwen3_5MoeForCausalLM": _Family(
        "qwen3_5_moe_text", _QUARTER, experts=blocks.HYBRID, recurrent=blocks.read_delta
    ),
    "Ernie4_5ForCausalLM": _Family("ernie4_5", _ERNIE, bias="use_bias", mlp_bias="use_bias"),
    "Ernie4_5_MoeForCausalLM": _Family("ernie4_5_moe", _ERNIE, bias="use_bias", experts=blocks.ERNIE),
    "SmolLM3ForCausalLM": _Family("smollm3", _SMOLLM3, mlp_bias="mlp_bias"),
    "Olmo3ForCausalLM": _Family(
        "olmo3", {**_SHORT, **_EPS, **_FOURTH, "rope_theta": 5e5}, local_base="rope_theta"
    ),
    "GraniteForCausalLM": _Family("granite", _GRANITE, mlp_bias="mlp_bias"),
    "GraniteMoeForCausalLM": _Family("granitemoe", _GRANITE, experts=blocks.MIXTRAL),
    "GraniteMoeHybridForCausalLM": _Family(
        "granitemoehybrid", _GRANITE, experts=blocks.GRANITE, recurrent=read_mamba, spelled=granite_keys
    ),
    "NemotronHForCausalLM": _Family(
        "nemotron_h",
        {"max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "head_dim": 128},
        epsilon="layer_norm_epsilon",
        experts=blocks.NEMOTRON,
        recurrent=partial(read_mamba, single=True),
        spelled=nemotron_keys,
    ),
    "SeedOssForCausalLM": _Family(
        "seed_oss",
        {"max_position_embeddings": 524288, "attention_bias": True, "head_dim": 128},
        mlp_bias="mlp_bias",
    ),
    "Ministral3ForCausalLM": _Family(
        "ministral3",
        {**_EPS, "max_position_embeddings": 262144, "sliding_window": None, "head_dim": 128},
        bias=None,
    ),
    "Glm4ForCausalLM": _Family("glm4", _GLM4),
    "Exaone4ForCausalLM": _Family("exaone4", {**_SHORT, **_EPS, **_FOURTH}, bias=None, global_still=True),
    "Cohere2ForCausalLM": _Family(
        "cohere2",
        {
            **{**_FOURTH, "max_position_embeddings": 8192, "tie_word_embeddings": True},
            **{"logit_scale": 0.0625, "layer_norm_eps": 1e-5},
        },
        epsilon="layer_norm_eps",
        global_still=True,
    ),
    "Gemma4ForCausalLM": _Family(
        "gemma4_text",
        {**_GEMMA3, "sliding_window": 512, "head_dim": 256},
        experts=blocks.GEMMA4,
        local_base=_LOCAL,
        gemma4=True,
        also=("gemma4_unified_text",),
    ),
    "GptOssForCausalLM": _Family(
        "gpt_oss",
        {
            **{**_LONG, **_EPS, "attention_bias": True, "rope_theta": 150_000.0, "head_dim": 64},
            **{"sliding_window": 128, "sliding_window_pattern": 2},
        },
        experts=blocks.GPT_OSS,
    ),
    "HunYuanDenseV1ForCausalLM": _Family("hunyuan_v1_dense", {**_SHORT, **_EPS, "alpha": None}),
    "MixtralForCausalLM": _Family("mixtral", _MIXTRAL, bias=None, experts=blocks.MIXTRAL),
    "Qwen2MoeForCausalLM": _Family(
        "qwen2_moe", {**_SWITCHED, "qkv_bias": True}, bias="qkv_bias", experts=blocks.QWEN2
    ),
}
_OWN = {*_GEMMA, *_CAPS, *_MULTIPLIERS, *_STILL, "logit_scale", "sliding_window_pattern", "max_window_layers"}
"""Keys that only the code of families reads in whose table they are."""
_NULL_IS_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Keys of which null says that there is none; elsewhere it counts as absent."""
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
_OUTSIDE = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
"""What holds for the text's part too where it stands beside it."""
SUPPORTED_ARCHITECTURES = (*_FAMILIES, *WRAPPERS)

REFUSED_ARCHITECTURES = {
    "DeepseekV32ForCausalLM": "its sparse-attention indexer is not supported",
    "GlmMoeDsaForCausalLM": "its sparse-attention indexer is not supported",
    "Gemma3ForConditionalGeneration": "images are not supported; a text-only Gemma3ForCausalLM is",
}
"""Architectures close to supported ones, and why they are not."""

_DTYPES = [prefix + name for prefix in ("", "torch.") for name in ("bfloat16", "float16", "float32")]


HEADS = {"eagle3": "an EAGLE-3 head", "assistant": "an assistant"}


def refuse_head(config: ModelConfig, folder: Path) -> None:
    """Raise CheckpointError for an EAGLE-3 head or an assistant where a model is wanted."""
    if config.head_kind is not None:
        raise _drafts_only(HEADS[config.head_kind], folder, "--draft-model")


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
    if own := read_assistant(fields):
        config = _decoder_config(own[1])
        assert config.gemma4 is not None
        gemma4 = replace(config.gemma4, shared=config.num_layers)
        return replace(config, architecture=ASSISTANT, assistant=own[0], gemma4=gemma4)
    names = fields.get("architectures")
    outer = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    wrapper = WRAPPERS.get(outer)
    if wrapper is not None:
        fields.choice("model_type", wrapper[:1], wrapper[0])
        inner = fields.nested("text_config")
        around = {key: fields.values[key] for key in _OUTSIDE if key in fields}
        text = _OTHER_TEXTS.get((outer, str(inner.get("model_type"))), wrapper[1])
        fields = Fields(inner.where, {**inner.values, **around, "architectures": [text]})
    return _decoder_config(fields)


def _decoder_config(fields: Fields) -> ModelConfig:
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    known = fields.values.keys() - (_OWN - family.absent.keys() - _COMMON.keys())
    said = {key: fields.get(key) for key in known if key in fields or key in _NULL_IS_NONE}
    fields = Fields(fields.where, {**_COMMON, **family.absent, **said})
    if family.spelled is not None:
        fields = Fields(fields.where, {**fields.values, **family.spelled(fields)})
    fp8_block, quantization = blocks.read_fp8_block(fields), read_quantization(fields)
    _refuse_unsupported(fields)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    recurrent = family.recurrent(fields, num_layers) if family.recurrent else None
    sliding = () if recurrent else blocks.read_sliding(fields, num_layers, family.absent)
    latent = blocks.read_latent(fields) if family.latent else None
    experts = blocks.read_experts(fields, num_layers, family.experts) if family.experts else None
    inner = experts.intermediate_size if experts else None  # where every layer has experts
    head_dim = latent.nope_dim + latent.rope_dim if latent else _head_dim(fields, num_heads)
    base, partly = family.local_base, "partial_rotary_factor" in family.absent
    turning = rope_fields(fields, by_kind=base is not None)
    fixed = "alpha" not in turning or "alpha" in family.absent
    turning.require(fixed, "'alpha'", "is not a known rope parameter")
    rotary_dim = read_rotary_dim(turning, head_dim) if partly else None
    dims = rotary_dim or (latent.rope_dim if latent else head_dim)
    rope = read_rope(turning, max_positions, dims, partly=partly)
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, num_heads)
    why = f"{num_kv_heads} does not divide {num_heads} attention heads"
    fields.require(num_heads % num_kv_heads == 0, "num_key_value_heads", why)
    still = tuple(window is None for window in sliding) if family.global_still else ()
    return ModelConfig(
        architecture=architecture,
        hidden_size=fields.integer("hidden_size", 1, MAX_WIDTH),
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH, inner),
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        vocab_size=vocab_size,
        max_positions=min(max_positions, rope.max_positions or max_positions),
        rms_norm_eps=fields.number(family.epsilon, 1e-12, 0.1),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean(family.bias, False) if family.bias else False,
        mlp_bias=fields.boolean(family.mlp_bias, False) if family.mlp_bias else False,
        rope=rope,
        dtype=_dtype(fields),
        bos_token_id=fields.optional_integer("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        rotary_dim=rotary_dim,
        qk_norm=fields.boolean("use_qk_norm", False),
        latent=latent,
        recurrent=recurrent,
        experts=experts,
        fp8_block=fp8_block,
        quantization=quantization,
        sliding=sliding,
        local_rope=read_local_rope(fields, base, max_positions, head_dim) if base else None,
        query_growth=read_growth(turning),
        still=still or blocks.read_still(fields, num_layers),
        gemma4=blocks.read_gemma4(fields, num_layers, num_heads, sliding) if family.gemma4 else None,
        scales=blocks.read_scales(fields),
        query_scalar=fields.optional_number("query_pre_attn_scalar", 1e-6, 1e9),
        attention_softcap=fields.optional_number("attn_logit_softcapping", 1e-3, 1e6),
        logit_softcap=fields.optional_number("final_logit_softcapping", 1e-3, 1e6),
    )


def _architecture(fields: Fields) -> str:
    names, key = fields.get("architectures"), "architectures"
    if names == [MTP_HEAD]:
        raise _drafts_only("an MTP head", Path(fields.where).parent, "--mtp")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    refusal = REFUSED_ARCHITECTURES.get(str(name))
    fields.require(refusal is None, key, f"{shown(name)}: {refusal}")
    if not isinstance(name, str) or name not in _FAMILIES:
        why = "is not supported" if isinstance(name, str) else "does not name one architecture"
        error = fields.refused(key, f"{shown(name or names)} {why}")
        error.reason = (f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}",)
        raise error
    family = _FAMILIES[name]
    fields.choice("model_type", (family.model_type, *family.also), family.model_type)
    return name


def _refuse_unsupported(fields: Fields) -> None:
    both_ways = fields.get("use_bidirectional_attention") not in (None, False, "vision")
    fields.require(not both_ways, "use_bidirectional_attention", "attending to later tokens is not supported")
    if "hidden_activation" in fields:  # Gemma's code reads a key of its own and leaves the usual one alone
        fields.choice("hidden_activation", ("gelu_pytorch_tanh",))
    else:
        fields.choice("hidden_act", ("silu", "swish"), "silu")
    for key in ("attention_out_bias", "use_cla"):
        fields.require(not fields.boolean(key, False), key, "true is not supported")


def _head_dim(fields: Fields, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    divides = "head_dim" in fields or hidden_size % num_heads == 0
    fields.require(divides, "num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, hidden_size // num_heads)
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
    suppress_tokens: tuple[int, ...] = ()


def read_generation_config(folder: Path, *, vocab_size: int = MAX_VOCAB) -> GenerationConfig:
    """Read `generation_config.json`, all defaults when there is none; other keys of it are ignored.

    `vocab_size` bounds the end-of-sequence ids. Raises `CheckpointError` naming file and field.
    """
    if GENERATION not in names_in(folder):
        return GenerationConfig()
    fields = Fields.of(folder / GENERATION)
    return GenerationConfig(
        fields.token_ids("eos_token_id", vocab_size),
        fields.optional_number("temperature", 0.0, 1e4),
        fields.optional_number("top_p", 1e-9, 1.0),
        fields.optional_number("min_p", 0.0, 1.0),
        fields.optional_number("repetition_penalty", 1e-6, 1e4),
        fields.optional_integer("top_k", 0, 1 << 31),
        fields.boolean("do_sample", False) if "do_sample" in fields else None,
        fields.token_ids("suppress_tokens", vocab_size),
    )
