"""What a model is: `config.json` read into a frozen `ModelConfig`, every number in range.

Unknown keys are tolerated; an unknown value of a known key is refused by name, since ignoring it would
change the model. Nothing a folder brings (`auto_map`, custom code) is ever imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from spd.formats.block_config import (
    ExpertsConfig,
    LatentConfig,
    deepseek_v2_experts,
    deepseek_v3_experts,
    ernie_experts,
    qwen3_experts,
    read_fp8_block,
    read_latent,
)
from spd.formats.json_file import Fields, read_json_object, shown

FILE_NAME = "config.json"
# Caps stop an absurd number before anything is allocated; all lie well above any published model.
MAX_LAYERS, MAX_WIDTH, MAX_HEADS, MAX_HEAD_DIM = 1024, 1 << 20, 4096, 1024
MAX_VOCAB, MAX_POSITIONS = 1 << 24, 1 << 27

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the base and how its frequencies are stretched (Hugging Face `rope_type`)."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The facts of a decoder that its code needs; sizes count elements, `dtype` is a torch name."""

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    hidden_act: str
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    rotary_dim: int | None = None
    """The first dimensions of a head that rotate; None: all of them."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head, where a family leaves that to the checkpoint."""
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    fp8_block: tuple[int, int] | None = None
    """Rows and columns of the blocks that share a scale, where matrices are stored as FP8."""


@dataclass(frozen=True)
class _Family:
    model_type: str
    max_positions: int  # what Hugging Face assumes when the key is absent
    mlp_bias: str | None = None  # the key of the MLP's biases, where the family has one
    bias: str = "attention_bias"  # the key of the attention's biases
    partial: float | None = None  # the share of a head that rotates when the key is absent; None: no key
    latent: bool = False
    experts: Callable[[Fields, int], ExpertsConfig | None] | None = None
    theta: float = 10_000.0


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", 2048, "mlp_bias"),
    "Qwen3ForCausalLM": _Family("qwen3", 32768),
    "Qwen3MoeForCausalLM": _Family("qwen3_moe", 32768, experts=qwen3_experts),
    "DeepseekV2ForCausalLM": _Family("deepseek_v2", 2048, latent=True, experts=deepseek_v2_experts),
    "DeepseekV3ForCausalLM": _Family("deepseek_v3", 4096, latent=True, experts=deepseek_v3_experts),
    "Glm4MoeForCausalLM": _Family("glm4_moe", 131072, partial=0.5, experts=deepseek_v3_experts),
    "MiMoForCausalLM": _Family("mimo", 32768),
    "Ernie4_5ForCausalLM": _Family("ernie4_5", 131072, "use_bias", "use_bias", theta=500_000.0),
    "Ernie4_5_MoeForCausalLM": _Family(
        "ernie4_5_moe", 131072, bias="use_bias", experts=ernie_experts, theta=500_000.0
    ),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)

_REFUSED = {
    "DeepseekV32ForCausalLM": "its sparse-attention indexer is",
    "GlmMoeDsaForCausalLM": "its sparse-attention indexer is",
    "Glm4MoeLiteForCausalLM": "latent attention in this family is",
}
"""Architectures close to supported ones, and what of them is not supported."""

_ACTIVATIONS = {"silu": "silu", "swish": "silu"}
_DTYPES = {
    f"{prefix}{name}": name for prefix in ("", "torch.") for name in ("bfloat16", "float16", "float32")
}
_ROPE_KINDS = {name: name for name in ("default", "linear", "llama3", "yarn")}
_ROPE_KEYS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
        *("mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned"),
    )
)


def read_model_config(folder: Path) -> ModelConfig:
    """Read and check `config.json` of a model folder.

    Raises `CheckpointError` naming the file, the field and the accepted values.
    Source: `LlamaConfig` and `Qwen3Config` of Hugging Face transformers, versions 4 and 5.
    """
    path = folder / FILE_NAME
    return model_config_of(Fields(str(path), read_json_object(path)))


def model_config_of(fields: Fields) -> ModelConfig:
    """As `read_model_config`, from a configuration that stands inside another file."""
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    fp8_block = read_fp8_block(fields)
    if family.partial is None and fields.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise fields.refused("partial_rotary_factor", "rotating a part of the head is not supported")

    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS, family.max_positions)
    _refuse_sliding_window(fields, num_layers)
    latent = read_latent(fields) if family.latent else None
    head_dim = latent.nope_dim + latent.rope_dim if latent else _head_dim(fields, hidden_size, num_heads)
    return ModelConfig(
        architecture=architecture,
        model_type=family.model_type,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        vocab_size=vocab_size,
        max_positions=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
        hidden_act=fields.choice("hidden_act", _ACTIVATIONS, "silu"),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean(family.bias, False),
        mlp_bias=fields.boolean(family.mlp_bias, False) if family.mlp_bias else False,
        rope=_rope(fields, family, max_positions),
        dtype=_dtype(fields),
        bos_token_id=fields.optional_integer("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        rotary_dim=_rotary_dim(fields, family.partial, head_dim) if family.partial is not None else None,
        qk_norm=fields.boolean("use_qk_norm", False),
        latent=latent,
        experts=family.experts(fields, num_layers) if family.experts else None,
        fp8_block=fp8_block,
    )


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    supported = f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.refused("architectures", f"{shown(names)} does not name one architecture ({supported})")
    if names[0] in _REFUSED:
        raise fields.refused("architectures", f"{shown(names[0])}: {_REFUSED[names[0]]} not supported")
    if names[0] not in _FAMILIES:
        raise fields.refused("architectures", f"{shown(names[0])} is not supported ({supported})")
    expected = _FAMILIES[names[0]].model_type
    model_type = fields.text("model_type", expected)
    if model_type != expected:
        raise fields.refused(
            "model_type", f"{shown(model_type)} does not belong to {names[0]} ({expected} does)"
        )
    return names[0]


def _refuse_sliding_window(fields: Fields, num_layers: int) -> None:
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise fields.refused("layer_types", f"is not a list of {num_layers} names, one a layer")
        for name in layer_types:
            if name != "full_attention":
                raise fields.refused("layer_types", f"{shown(name)} is not supported (full_attention is)")
    # Without the switch a window counts as used: only Qwen writes windows that it then leaves off.
    window = fields.optional_integer("sliding_window", 0, MAX_POSITIONS)
    if fields.boolean("use_sliding_window", window is not None) and window is not None:
        raise fields.refused("sliding_window", f"{window}: sliding window attention is not supported")


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise fields.refused(
            "num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} attention heads"
        )
    return num_kv_heads


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if "head_dim" not in fields and hidden_size % num_heads:
        raise fields.refused("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, hidden_size // num_heads)
    if head_dim % 2:
        raise fields.refused("head_dim", f"{head_dim} is odd: rotary embedding needs pairs")
    return head_dim


def _dtype(fields: Fields) -> str:
    """The dtype under its new name (`dtype`) or its old one; float32 where neither is given, as upstream."""
    old, new = (fields.choice(key, _DTYPES) if key in fields else None for key in ("torch_dtype", "dtype"))
    if old and new and old != new:
        raise fields.refused("dtype", f"{new} disagrees with torch_dtype {old}")
    return new or old or "float32"


def _rotary_dim(fields: Fields, default: float, head_dim: int) -> int:
    """The dimensions of a head that rotate, from a share of it; both spellings as for `_rope`."""
    nested = fields.fields("rope_parameters")
    share = fields.number("partial_rotary_factor", 0.0, 1.0, default)
    if nested is not None:
        share = nested.number("partial_rotary_factor", 0.0, 1.0, share)
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        raise fields.refused("partial_rotary_factor", f"{share:g} of {head_dim} is no even number above 0")
    return rotated


def _rope(fields: Fields, family: _Family, max_positions: int) -> RopeConfig:
    """Both spellings: `rope_theta` with `rope_scaling` (version 4), `rope_parameters` (version 5)."""
    theta = fields.number("rope_theta", 1.0, 1e12, family.theta)
    old, new = fields.fields("rope_scaling"), fields.fields("rope_parameters")
    if new is not None and family.partial is not None:
        new = Fields(new.where, {k: v for k, v in new.values.items() if k != "partial_rotary_factor"})
    if new is None or not new.values:
        return _rope_of(old, theta, max_positions) if old and old.values else RopeConfig("default", theta)
    if "rope_theta" in fields and new.number("rope_theta", 1.0, 1e12, theta) != theta:
        raise new.refused("rope_theta", f"disagrees with rope_theta {theta:g} beside it")
    rope = _rope_of(new, new.number("rope_theta", 1.0, 1e12, theta), max_positions)
    if old and old.values and _rope_of(old, rope.theta, max_positions) != rope:
        raise fields.refused("rope_scaling", "disagrees with rope_parameters")
    return rope


def _rope_of(fields: Fields, theta: float, max_positions: int) -> RopeConfig:
    for key in fields.values:
        if key not in _ROPE_KEYS:
            raise fields.refused(shown(key), "is not a known rope parameter")
    if fields.number("rope_theta", 1.0, 1e12, theta) != theta:
        raise fields.refused("rope_theta", f"disagrees with rope_theta {theta:g}")
    if fields.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise fields.refused("partial_rotary_factor", "rotating a part of the head is not supported")
    key = "rope_type" if "rope_type" in fields or "type" not in fields else "type"
    kind = cast(RopeKind, fields.choice(key, _ROPE_KINDS))
    if "type" in fields and fields.text("type") != kind:
        raise fields.refused("type", f"{shown(fields.get('type'))} disagrees with rope_type {kind}")
    if kind == "default":
        return RopeConfig(kind, theta)
    factor = fields.number("factor", 1.0, 1e6)
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "llama3":
        return _llama3_rope(fields, theta, factor)
    return _yarn_rope(fields, theta, factor, max_positions)


def _llama3_rope(fields: Fields, theta: float, factor: float) -> RopeConfig:
    low = fields.number("low_freq_factor", 1e-6, 1e6)
    high = fields.number("high_freq_factor", 1e-6, 1e6)
    if high <= low:
        raise fields.refused("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}")
    original = fields.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn_rope(fields: Fields, theta: float, factor: float, max_positions: int) -> RopeConfig:
    if theta <= 1.0:
        raise fields.refused("rope_theta", "yarn needs a base above 1")
    rope = RopeConfig(
        "yarn",
        theta,
        factor,
        fields.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_positions),
        beta_fast=fields.number("beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=fields.number("beta_slow", 1e-6, 1e6, 1.0),
        attention_factor=fields.optional_number("attention_factor", 1e-6, 1e6),
        mscale=fields.optional_number("mscale", 0.0, 1e6),
        mscale_all_dim=fields.optional_number("mscale_all_dim", 0.0, 1e6),
        truncate=fields.boolean("truncate", True),
    )
    if rope.beta_fast <= rope.beta_slow:
        raise fields.refused("beta_fast", f"{rope.beta_fast:g} is not above beta_slow {rope.beta_slow:g}")
    return rope
