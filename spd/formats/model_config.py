"""A model's configuration: `config.json` as a frozen `ModelConfig`, every number in range.

Unknown keys are tolerated; an unknown value of a known key is refused by name, since ignoring it
would change the model. Nothing in a folder (`auto_map`, custom code) is ever imported. Source:
configurations of Hugging Face transformers, versions 4 and 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats.assistant import ASSISTANT_ARCHITECTURE, AssistantConfig, read_assistant
from spd.formats.block import BLOCK_ARCHITECTURE, BlockConfig, read_block
from spd.formats.block_config import (
    MAX_POSITIONS,
    MAX_WIDTH,
    SLIDING_HEAD_KEYS,
    ExpertsConfig,
    Gemma4Config,
    LatentConfig,
    RecurrentConfig,
    Scales,
)
from spd.formats.common_keys import KEY_ALIASES, canonical_fields, refuse_unsupported
from spd.formats.eagle3 import EAGLE3_ARCHITECTURE, Eagle3Config, read_eagle3
from spd.formats.experts_config import read_experts
from spd.formats.family_keys import CAUSAL, FamilyKeys
from spd.formats.json_file import Fields, display_text, json_key, list_folder
from spd.formats.layer_kinds import (
    read_gemma4,
    read_no_rope_layers,
    read_sliding_windows,
    read_swiglu_limits,
)
from spd.formats.names import GENERATION_FILE
from spd.formats.quantized import Quantization, read_quantization
from spd.formats.rope_config import (
    RopeConfig,
    read_local_rope,
    read_query_growth,
    read_rope,
    rope_fields,
)

MTP_HEAD = "MTPSpeculator"
"""The architecture in the `config.json` of a folder that holds an MTP head alone."""
# Caps stop an absurd number before anything is allocated; all lie well above any published model.
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 24


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a decoder; sizes count elements, `dtype` is a torch name."""

    architecture: str
    hidden_size: int = field(metadata=json_key("hidden_size", 1, MAX_WIDTH))
    intermediate_size: int
    num_layers: int = field(metadata=json_key("num_hidden_layers", 1, MAX_LAYERS))
    num_heads: int = field(metadata=json_key("num_attention_heads", 1, MAX_HEADS))
    num_kv_heads: int
    head_dim: int
    vocab_size: int = field(metadata=json_key("vocab_size", 1, MAX_VOCAB))
    max_positions: int
    rms_norm_eps: float = field(metadata=json_key("rms_norm_eps", 1e-12, 0.1))
    tie_embeddings: bool = field(metadata=json_key("tie_word_embeddings"))
    attention_bias: bool = field(metadata=json_key("attention_bias"))
    """True if attention's projections have biases, in families that leave it to the checkpoint."""
    mlp_bias: bool = field(metadata=json_key("mlp_bias"))
    rope: RopeConfig
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qk_norm: bool = field(default=False, metadata=json_key("use_qk_norm"))
    """True if queries and keys are normalised per head.

    It counts in families that leave it to the checkpoint.
    """
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    quantization: Quantization | None = None
    """Layouts of matrices in few bits."""
    sliding_windows: tuple[int | None, ...] = ()
    """Each layer's window, None for full attention; empty where no layer slides."""
    local_rope: RopeConfig | None = None
    """Rotation of sliding layers, where it differs."""
    local_heads: tuple[int, int] | None = None
    """Query and key heads of sliding layers, where they differ."""
    value_dim: int | None = None
    """Elements of a value head, where a key's has more."""
    swiglu_limits: tuple[tuple[float | None, float | None], ...] = ()
    """See `read_swiglu_limits`."""
    query_growth: tuple[float, int] | None = None
    """See `read_query_growth`."""
    post_norm_eps: float | None = field(
        default=None, metadata=json_key("post_norm_eps", 1e-12, 0.1)
    )
    """Epsilon of norms behind blocks, where it differs."""
    attention_softcap: float | None = field(
        default=None, metadata=json_key("attn_logit_softcapping", 1e-3, 1e6)
    )
    logit_softcap: float | None = field(
        default=None, metadata=json_key("final_logit_softcapping", 1e-3, 1e6)
    )
    no_rope: tuple[bool, ...] = ()
    """True for each layer that does not rotate; empty where all layers rotate."""
    scales: Scales = Scales()
    gemma4: Gemma4Config | None = None
    recurrent: RecurrentConfig | None = None
    """Recurrent layers between those of attention."""
    eagle3: Eagle3Config | None = None
    """How an EAGLE-3 head reads its target; such a head is no model by itself."""
    assistant: AssistantConfig | None = None
    """How an assistant reads its target; it is no model by itself."""
    block: BlockConfig | None = None
    """How a block drafter reads its target; it is no model by itself."""

    @property
    def head_kind(self) -> str | None:
        """Return the method that drafts with this head or assistant; None for a model."""
        if self.eagle3 is not None:
            return "eagle3"
        if self.block is not None:
            return "block"
        return "assistant" if self.assistant is not None else None

    @property
    def stream_reader(self) -> Eagle3Config | BlockConfig | None:
        """Return how a head reads the streams between its target's layers; None for others."""
        return self.eagle3 or self.block


_FAMILIES = {f"{name}ForCausalLM": family for name, family in CAUSAL.items()}
WRAPPERS = {
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "Qwen3ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "Qwen2ForCausalLM"),
    "InternVLForConditionalGeneration": ("internvl", "Qwen2ForCausalLM"),
    "Mistral3ForConditionalGeneration": ("mistral3", "Ministral3ForCausalLM"),
    "Step3p7ForConditionalGeneration": ("step3p7", "Step3p5ForCausalLM"),
    "MuseGlimmerForConditionalGeneration": ("muse_glimmer", "MuseGlimmerForCausalLM"),
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3ForCausalLM"),
    "Gemma4ForConditionalGeneration": ("gemma4", "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", "Gemma4ForCausalLM"),
}
"""Architectures that see images too: their model types, and their text's architectures.

The latter count where the text's own model type is not known.
"""
_TEXT_ARCHITECTURES = {
    model_type: architecture
    for architecture, family in reversed(_FAMILIES.items())
    for model_type in (family.model_type, *family.other_model_types)
}
"""Architectures by the model types of text models."""
_FLAT_WRAPPERS = ("qwen2_5_vl",)
"""Model types that were published with the text's keys on the outer level."""
_OUTER_KEYS = ("tie_word_embeddings", "quantization_config", "dtype")
"""Keys of the text that may stand on the outer level."""
SUPPORTED_ARCHITECTURES = (*_FAMILIES, *WRAPPERS)
"""Classes in `architectures` that are read, those of models of images among them."""

_UNSUPPORTED_PARTS = {
    **dict.fromkeys(("vision_config", "audio_config"), ("images and sound", "Llama")),
    "is_encoder_decoder": ("an encoder", "Llama"),
    **dict.fromkeys(("n_embd", "n_positions", "alibi"), ("positions that do not rotate", "Llama")),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts"), ("its experts", "Mixtral")
    ),
    **dict.fromkeys(
        ("state_size", "ssm_state_size", "mamba_d_state"), ("its recurrence", "NemotronH")
    ),
    **dict.fromkeys(("hc_mult", "hc_count"), ("several residual streams", "DeepseekV3")),
    **dict.fromkeys(("kv_lora_rank", "linear_attn_config"), ("its attention", "DeepseekV3")),
    "index_topk": ("the indexer of sparse attention", "DeepseekV3"),
}
"""Keys of unknown architectures.

Values are the part that a key configures, and the nearest class with such a part.
"""

_DTYPES = [
    prefix + name for prefix in ("", "torch.") for name in ("bfloat16", "float16", "float32")
]
HEAD_DESCRIPTIONS = {
    "mtp": "an MTP head",
    "eagle3": "an EAGLE-3 head",
    "assistant": "an assistant",
    "block": "a block drafter",
}
"""What drafts for a model and is none itself, in words, by its method."""


def refuse_head(config: ModelConfig, folder: Path) -> None:
    """Raise CheckpointError for an EAGLE-3 head, an assistant or a block drafter: no model."""
    if config.head_kind is not None:
        raise _drafter_error(config.head_kind, folder)


def _drafter_error(kind: str, folder: Path) -> CheckpointError:
    """Return the error for a folder with a drafter of a kind where a model is needed."""
    reason = (
        f"{folder}: {HEAD_DESCRIPTIONS[kind]} drafts for another model and writes no text by itself"
    )
    return CheckpointError(reason, fix=[f"-m TARGET --draft-model {folder}"])


def model_config_of(fields: Fields) -> ModelConfig:
    """Return the configuration in a file's keys; of a model of images, the text's."""
    if eagle3 := read_eagle3(fields):
        return replace(
            _decoder_config(eagle3[1]), architecture=EAGLE3_ARCHITECTURE, eagle3=eagle3[0]
        )
    if block := read_block(fields):
        config = _decoder_config(block[1])
        return replace(
            config,
            architecture=BLOCK_ARCHITECTURE,
            block=block[0],
            logit_softcap=block[0].logit_softcap,
            scales=Scales(embedding=block[0].embedding_scale, logits=block[0].logit_scale),
        )
    if assistant := read_assistant(fields):
        config = _decoder_config(assistant[1])
        assert config.gemma4 is not None
        gemma4 = replace(config.gemma4, num_shared_layers=config.num_layers)
        return replace(
            config, architecture=ASSISTANT_ARCHITECTURE, assistant=assistant[0], gemma4=gemma4
        )
    return _decoder_config(_text_fields(fields))


def _text_fields(fields: Fields) -> Fields:
    """Return the text model's keys of a model of images; the same keys for any other model."""
    names = fields.get("architectures")
    outer = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    wrapper = WRAPPERS.get(outer)
    if wrapper is None:
        return fields
    fields.choice("model_type", wrapper[:1], wrapper[0])
    is_flat = wrapper[0] in _FLAT_WRAPPERS and "text_config" not in fields
    text = fields if is_flat else fields.nested("text_config")
    text = text.with_canonical_keys(KEY_ALIASES)
    fields = fields.with_canonical_keys(KEY_ALIASES)
    outer_values = {key: fields.values[key] for key in _OUTER_KEYS if key in fields}
    if "tie_word_embeddings" in text:  # the text's own value counts
        outer_values.pop("tie_word_embeddings", None)
    architecture = _TEXT_ARCHITECTURES.get(str(text.get("model_type")), wrapper[1])
    return text.with_values({**outer_values, "architectures": [architecture]})


def _decoder_config(fields: Fields) -> ModelConfig:
    """Return the configuration of a text model."""
    architecture = _read_architecture(fields)
    family = _FAMILIES[architecture]
    fields = canonical_fields(fields, family)
    refuse_unsupported(fields, family)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    blocks = _read_blocks(fields, family, num_layers)
    sliding_windows = blocks.sliding_windows
    latent = blocks.latent
    head_dim = _read_head_dim(fields, num_heads, latent)
    rotation = _read_rotation(
        fields=fields, family=family, max_positions=max_positions, head_dim=head_dim, latent=latent
    )
    num_kv_heads = _read_kv_heads(fields, "num_key_value_heads", num_heads, num_heads)
    local_heads = None
    if sliding_windows and SLIDING_HEAD_KEYS[0] in family.defaults:
        local_heads = _read_local_heads(fields, num_heads, num_kv_heads)
    no_rope = tuple(window is None for window in sliding_windows) if family.global_no_rope else ()
    scales = _read_scales(fields)
    # Where every layer has experts, files may leave out the width of MLPs.
    expert_width = blocks.experts.intermediate_size if blocks.experts else None
    has_value_dim = "v_head_dim" in family.defaults
    is_gemma4 = "num_kv_shared_layers" in family.defaults
    return fields.read_dataclass(
        ModelConfig,
        architecture=architecture,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH, expert_width),
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        max_positions=_usable_positions(rotation.rope, max_positions),
        rope=rotation.rope,
        dtype=fields.choice("dtype", _DTYPES, "float32").removeprefix("torch."),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        latent=latent,
        recurrent=blocks.recurrent,
        experts=blocks.experts,
        quantization=read_quantization(fields),
        sliding_windows=sliding_windows,
        local_rope=rotation.local_rope,
        local_heads=local_heads,
        swiglu_limits=read_swiglu_limits(fields, num_layers),
        value_dim=fields.integer("v_head_dim", 1, head_dim) if has_value_dim else None,
        query_growth=rotation.query_growth,
        no_rope=no_rope or read_no_rope_layers(fields, num_layers),
        gemma4=read_gemma4(fields, num_layers, num_heads, sliding_windows) if is_gemma4 else None,
        scales=scales,
    )


@dataclass(frozen=True)
class _Blocks:
    """The kinds of layers and of their blocks; fields as in `ModelConfig`."""

    recurrent: RecurrentConfig | None
    sliding_windows: tuple[int | None, ...]
    latent: LatentConfig | None
    experts: ExpertsConfig | None


def _read_blocks(fields: Fields, family: FamilyKeys, num_layers: int) -> _Blocks:
    """Return the recurrent and sliding layers, latent attention and experts of a model."""
    recurrent = family.read_recurrent(fields, num_layers) if family.read_recurrent else None
    sliding_windows: tuple[int | None, ...] = ()
    if recurrent is None:
        sliding_windows = read_sliding_windows(fields, num_layers, family.defaults)
    latent = None
    if family.is_latent:
        rope_dim = fields.even_integer("qk_rope_head_dim", 1024)
        latent = fields.read_dataclass(LatentConfig, rope_dim=rope_dim)
    experts = None
    if family.experts and (family.experts_key is None or fields.get(family.experts_key)):
        experts = read_experts(fields, num_layers, family.experts)
    return _Blocks(recurrent, sliding_windows, latent, experts)


def _read_head_dim(fields: Fields, num_heads: int, latent: LatentConfig | None) -> int:
    """Return the elements of a query's and a key's head."""
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    divides = latent is not None or "head_dim" in fields or hidden_size % num_heads == 0
    reason = f"{num_heads} does not divide hidden_size {hidden_size}"
    fields.require(divides, "num_attention_heads", reason)
    if latent is not None:
        return latent.nope_dim + latent.rope_dim
    return fields.even_integer("head_dim", MAX_HEAD_DIM, hidden_size // num_heads)


@dataclass(frozen=True)
class _Rotation:
    """The rotary part of a configuration; fields as in `ModelConfig`."""

    rope: RopeConfig
    local_rope: RopeConfig | None
    query_growth: tuple[float, int] | None


def _read_rotation(
    fields: Fields,
    family: FamilyKeys,
    max_positions: int,
    head_dim: int,
    latent: LatentConfig | None,
) -> _Rotation:
    """Return how the layers of full attention and the sliding layers rotate."""
    local_key = family.local_theta_key
    is_partial = "partial_rotary_factor" in family.defaults
    rope = rope_fields(fields, by_kind=local_key is not None)
    allows_alpha = "alpha" not in rope or "alpha" in family.defaults
    rope.require(allows_alpha, "'alpha'", "is not a known rope parameter")
    rotated = latent.rope_dim if latent else head_dim
    full_rope = read_rope(rope, max_positions, rotated, is_partial=is_partial)
    local_rope = None
    if local_key is not None:
        local_rope = read_local_rope(
            fields, local_key, max_positions, head_dim, is_partial=is_partial
        )
    return _Rotation(full_rope, local_rope, read_query_growth(rope))


def _usable_positions(rope: RopeConfig, max_positions: int) -> int:
    """Return the positions up to which angles are those of the original context."""
    if rope.kind == "longrope" and rope.original_max_positions:
        return min(max_positions, rope.original_max_positions)  # beyond, longrope has other angles
    return max_positions


def _read_local_heads(fields: Fields, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Return the query and key heads of sliding layers; they default to those of the others."""
    query_key, kv_key = SLIDING_HEAD_KEYS
    local_heads = fields.integer(query_key, 1, MAX_HEADS, num_heads)
    return local_heads, _read_kv_heads(fields, kv_key, local_heads, num_kv_heads)


def _read_scales(fields: Fields) -> Scales:
    """Return the factors of embeddings, scores and logits."""
    scales = fields.read_dataclass(Scales)
    if "query_pre_attn_scalar" in fields:
        divisor = fields.number("query_pre_attn_scalar", 1e-6, 1e9)
        scales = replace(scales, scores=divisor**-0.5)
    divisor = fields.number("logits_scaling", 1e-6, 1e6, 1.0)
    return replace(scales, logits=scales.logits / divisor)


def _read_architecture(fields: Fields) -> str:
    """Return the architecture's name.

    Raises CheckpointError for an unknown one, and for a model type of another.
    """
    names = fields.get("architectures")
    key = "architectures"
    if names == [MTP_HEAD]:
        raise _drafter_error("mtp", Path(fields.where).parent)
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str):
        raise fields.field_error(key, f"{display_text(names)} does not name one architecture")
    if name not in _FAMILIES:
        error = fields.field_error(key, f"{display_text(name)} is not supported")
        error.reason = tuple(_explain_unknown(fields, name))
        raise error
    family = _FAMILIES[name]
    model_types = (family.model_type, *family.other_model_types)
    fields.choice("model_type", model_types, family.model_type)
    return name


def _explain_unknown(fields: Fields, name: str) -> Iterator[str]:
    """Yield the nearest supported architecture and the missing parts.

    For a model of images, yield too whether its text alone can be read.
    """
    inner = fields.optional_nested("text_config") or fields
    text = _TEXT_ARCHITECTURES.get(str(inner.get("model_type")))
    parts = dict(
        part for key, part in _UNSUPPORTED_PARTS.items() if fields.get(key) or inner.get(key)
    )
    causal = re.sub(r"For[A-Z].*|$", "ForCausalLM", name, count=1)
    similar = list[str]()
    for stem in (re.findall(r"^\D*\d?", name)[0], re.split(r"For|\d", name)[0] or name):
        candidates = [architecture for architecture in _FAMILIES if architecture.startswith(stem)]
        similar += get_close_matches(causal, candidates, 1, 0)
    nearest_by_part = ["Llama", *parts.values()][-1]
    nearest = text or [*similar, f"{nearest_by_part}ForCausalLM"][0]
    yield f"nearest supported: {nearest}; missing: {', '.join(parts) or 'blocks of its own'}"
    if inner is not fields:
        can_be_read = f"can be read: a copy of it saved as {text} opens"
        yield f"its text alone {can_be_read if text else 'cannot be read either'}"


def _read_kv_heads(fields: Fields, key: str, num_heads: int, default: int) -> int:
    """Return a number of key heads, which must divide the query heads."""
    kv_heads = fields.integer(key, 1, MAX_HEADS, default)
    reason = f"{kv_heads} does not divide {num_heads} attention heads"
    fields.require(num_heads % kv_heads == 0, key, reason)
    return kv_heads


@dataclass(frozen=True)
class GenerationConfig:
    """A model's default sampling parameters; `None` where the file has none."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = field(default=None, metadata=json_key("temperature", 0.0, 1e4))
    top_p: float | None = field(default=None, metadata=json_key("top_p", 1e-9, 1.0))
    min_p: float | None = field(default=None, metadata=json_key("min_p", 0.0, 1.0))
    repetition_penalty: float | None = field(
        default=None, metadata=json_key("repetition_penalty", 1e-6, 1e4)
    )
    top_k: int | None = field(default=None, metadata=json_key("top_k", 0, 1 << 31))
    do_sample: bool | None = field(default=None, metadata=json_key("do_sample"))


def read_generation_config(folder: Path, *, vocab_size: int = MAX_VOCAB) -> GenerationConfig:
    """Read `generation_config.json`; without the file every value is None.

    Unknown keys are ignored, and end ids from `vocab_size` on are dropped with a warning. Raises
    CheckpointError for a value out of range.
    """
    if GENERATION_FILE not in list_folder(folder):
        return GenerationConfig()
    fields = Fields.read(folder / GENERATION_FILE)
    return fields.read_dataclass(
        GenerationConfig, eos_token_ids=fields.token_ids("eos_token_id", vocab_size)
    )
