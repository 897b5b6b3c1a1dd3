"""What a model is: `config.json` read into a frozen `ModelConfig`, every number in range.

Unknown keys are tolerated; an unknown value of a known key is refused by name, since ignoring it would
change the model. Nothing a folder brings (`auto_map`, custom code) is ever imported. Source: configurations
of Hugging Face transformers, versions 4 and 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import inf
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats import block_config as blocks
from spd.formats.assistant import ARCHITECTURE as ASSISTANT
from spd.formats.assistant import AssistantConfig, read_assistant
from spd.formats.block_config import MAX_POSITIONS, MAX_WIDTH
from spd.formats.eagle3 import ARCHITECTURE as EAGLE3
from spd.formats.eagle3 import Eagle3Config, read_eagle3
from spd.formats.family_keys import CAUSAL, FamilyKeys
from spd.formats.json_file import Fields, display_text, json_key, list_folder
from spd.formats.names import GENERATION_FILE
from spd.formats.quantized import Quantization, read_quantization
from spd.formats.rope_config import RopeConfig, read_growth, read_local_rope, read_rope, rope_fields

MTP_HEAD = "MTPSpeculator"
# Caps stop an absurd number before anything is allocated; all lie well above any published model.
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 24


@dataclass(frozen=True)
class ModelConfig:
    """The facts of a decoder that its code needs; sizes count elements, `dtype` is a torch name."""

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
    mlp_bias: bool = field(metadata=json_key("mlp_bias"))
    rope: RopeConfig
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qk_norm: bool = field(default=False, metadata=json_key("use_qk_norm"))
    """Whether queries and keys are normalised per head, where a family leaves that to the checkpoint."""
    latent: blocks.LatentConfig | None = None
    experts: blocks.ExpertsConfig | None = None
    quantization: Quantization | None = None  # how matrices are stored in few bits
    sliding_windows: tuple[
        int | None, ...
    ] = ()  # each layer's window, None without one; empty where none slides
    local_rope: RopeConfig | None = None  # of layers that slide, where they rotate in another way
    local_heads: tuple[int, int] | None = None  # their query and key heads, where they have others
    value_dim: int | None = None  # of a value head, where a key's is wider
    swiglu_limits: tuple[tuple[float | None, float | None], ...] = ()  # see `read_limits`
    query_growth: tuple[float, int] | None = None  # see `read_growth`
    post_norm_eps: float | None = field(
        default=None, metadata=json_key("post_norm_eps", 1e-12, 0.1)
    )
    """Of norms behind blocks, where it is another."""
    attention_softcap: float | None = field(
        default=None, metadata=json_key("attn_logit_softcapping", 1e-3, 1e6)
    )
    logit_softcap: float | None = field(
        default=None, metadata=json_key("final_logit_softcapping", 1e-3, 1e6)
    )
    no_rope: tuple[bool, ...] = ()
    """True of layers that know no positions; empty where all layers rotate."""
    scales: blocks.Scales = blocks.Scales()
    gemma4: blocks.Gemma4Config | None = None
    recurrent: blocks.RecurrentConfig | None = None  # of layers between those that attend
    eagle3: Eagle3Config | None = (
        None  # of an EAGLE-3 head, no model by itself: how it reads its target
    )
    assistant: AssistantConfig | None = None  # the same of an assistant

    @property
    def head_kind(self) -> str | None:
        """What it is where it drafts for another model only: the method that drafts with it."""
        return (
            "eagle3"
            if self.eagle3 is not None
            else "assistant"
            if self.assistant is not None
            else None
        )


_COMMON: Mapping[str, object] = {
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
"""What an absent key counts as in every family whose row says nothing else."""
_FAMILIES = {f"{name}ForCausalLM": family for name, family in CAUSAL.items()}
_ROW_KEYS = frozenset(
    [
        "attention_multiplier",
        "attention_value_scale",
        "attn_logit_softcapping",
        "embedding_multiplier",
        "final_logit_softcapping",
        "first_k_dense_replace",
        "hidden_activation",
        "logit_scale",
        "logits_scaling",
        "max_window_layers",
        "n_group",
        "no_rope_layer_interval",
        "no_rope_layers",
        "norm_topk_prob",
        "query_pre_attn_scalar",
        "residual_multiplier",
        "routed_scaling_factor",
        "shared_expert_intermediate_size",
        "sliding_window_pattern",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
        "swiglu_limits",
        "swiglu_limits_shared",
        "topk_group",
    ]
)
"""Keys that only the code of families reads in whose rows they are."""
_OTHER_NAMES = {
    "rms_norm_eps": ("norm_eps", "layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon"),
    "num_key_value_heads": ("num_attention_groups",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("top_k_experts", "moe_k", "moe_top_k", "moe_topk"),
    "routed_scaling_factor": ("moe_router_scaling_factor",),
    "n_shared_experts": ("moe_num_shared_experts",),
    "shared_expert_intermediate_size": (
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
    ),
    "first_k_dense_replace": ("num_dense_layers", "moe_layer_start_index"),
    "decoder_sparse_step": ("moe_layer_interval",),
    "linear_conv_kernel_dim": ("mamba_d_conv", "conv_kernel"),
    "linear_num_key_heads": ("mamba_n_groups", "n_groups"),
    "linear_num_value_heads": ("mamba_n_heads", "mamba_num_heads"),
    "linear_key_head_dim": ("mamba_d_state", "ssm_state_size"),
    "linear_value_head_dim": ("mamba_d_head", "mamba_head_dim"),
    "mamba_conv_bias": ("use_conv_bias",),
    "layer_types": ("layers_block_type", "hybrid_override_pattern", "hybrid_layer_pattern"),
    "logit_scale": ("output_multiplier",),
    "dtype": ("torch_dtype",),
}
"""What families call a key that is read here; two of its names may not disagree."""
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "use_bidirectional_attention": (False, "vision"),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "output_gate_type": ("silu", "swish"),
    "time_step_limit": ([0.0, inf], [0.0, {"__float__": "Infinity"}]),
    "moe_layer_num_skipped": (0,),
    "moe_router_activation": ("sigmoid",),
    "qk_norm_type": ("per_layer",),
    "att_impl_type": ("GQA",),
    "yarn_only_types": ([blocks.ATTENTION_KINDS[0]],),
    **dict.fromkeys(
        ("attn_output_gate", "add_swa_attention_sink_bias", "use_expert_bias"), (True,)
    ),
    **dict.fromkeys(
        ("use_head_wise_attn_gate", "use_moe", "use_mixed_mlp_moe", "zero_centered"), (True,)
    ),
    **dict.fromkeys(("use_routing_bias", "use_moe_router_bias", "norm_expert_weight"), (True,)),
    **dict.fromkeys(("attention_out_bias", "conv_bias", "mamba_proj_bias", "use_bias"), (False,)),
    **dict.fromkeys(("add_full_attention_sink_bias", "sink", "use_cla"), (False,)),
    **dict.fromkeys(("compression_config", "mamba_dt_limit"), ()),
}
"""What keys that change the forward pass may say, whatever the family is."""
_NULL_IS_NONE = (
    "sliding_window",
    "attention_value_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Keys of which null says that there is none; elsewhere it counts as absent."""
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
"""Architectures that see images too, their model types, and what their `text_config` is of where its own
model type says nothing else."""
_TEXTS = {
    kind: each
    for each, own in reversed(_FAMILIES.items())
    for kind in (own.model_type, *own.other_types)
}
"""Architectures by the model types of texts."""
_FLAT = ("qwen2_5_vl",)  # those that were published with the text's keys beside the others
_OUTSIDE = (
    "tie_word_embeddings",
    "quantization_config",
    "dtype",
)  # may stand beside the text's part
SUPPORTED_ARCHITECTURES = (*_FAMILIES, *WRAPPERS)

_PIECES = {
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
"""Keys of unknown architectures, the piece that each speaks of, and which class comes near that one."""

_DTYPES = [
    prefix + name for prefix in ("", "torch.") for name in ("bfloat16", "float16", "float32")
]
HEADS = {"eagle3": "an EAGLE-3 head", "assistant": "an assistant"}


def refuse_head(config: ModelConfig, folder: Path) -> None:
    """Refuse an EAGLE-3 head or an assistant where a model is wanted."""
    if config.head_kind is not None:
        raise _drafts_only(HEADS[config.head_kind], folder, "--draft-model")


def _drafts_only(what: str, folder: Path, option: str) -> CheckpointError:
    why = f"{folder}: {what} drafts for another model and writes no text by itself"
    return CheckpointError(why, fix=[f"-m TARGET {option} {folder}"])


def model_config_of(fields: Fields) -> ModelConfig:
    """What `config.json` says, or a configuration inside another file; of what sees images, the text's."""
    if head := read_eagle3(fields):
        return replace(_decoder_config(head[1]), architecture=EAGLE3, eagle3=head[0])
    if own := read_assistant(fields):
        config = _decoder_config(own[1])
        assert config.gemma4 is not None
        gemma4 = replace(config.gemma4, num_shared_layers=config.num_layers)
        return replace(config, architecture=ASSISTANT, assistant=own[0], gemma4=gemma4)
    names = fields.get("architectures")
    outer = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    wrapper = WRAPPERS.get(outer)
    if wrapper is not None:
        fields.choice("model_type", wrapper[:1], wrapper[0])
        flat = wrapper[0] in _FLAT and "text_config" not in fields
        inner = (fields if flat else fields.nested("text_config")).with_canonical_keys(_OTHER_NAMES)
        fields = fields.with_canonical_keys(_OTHER_NAMES)
        around = {key: fields.values[key] for key in _OUTSIDE if key in fields}
        if "tie_word_embeddings" in inner:  # the text's part knows
            around.pop("tie_word_embeddings", None)
        text = _TEXTS.get(str(inner.get("model_type")), wrapper[1])
        fields = inner.with_values({**around, "architectures": [text]})
    return _decoder_config(fields)


def _decoder_config(fields: Fields) -> ModelConfig:
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    fields = _spelled(fields, family)
    theirs = (
        {"hidden_act"} if "hidden_activation" in fields else set()
    )  # which Gemma's code leaves alone
    supported = {**_SUPPORTED, **{key: (only,) for key, only in family.only.items()}}
    fields.refuse_unsupported_values(
        {key: each for key, each in supported.items() if key not in theirs}
    )
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    recurrent = family.recurrent(fields, num_layers) if family.recurrent else None
    sliding = () if recurrent else blocks.read_sliding(fields, num_layers, family.absent)
    latent = experts = None
    if family.latent:
        latent = fields.read_dataclass(
            blocks.LatentConfig, rope_dim=fields.even_integer("qk_rope_head_dim", 1024)
        )
    if family.experts and (family.switch is None or fields.get(family.switch)):
        experts = blocks.read_experts(fields, num_layers, family.experts)
    inner = experts.intermediate_size if experts else None  # where every layer has experts
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    divides = latent is not None or "head_dim" in fields or hidden_size % num_heads == 0
    fields.require(
        divides, "num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}"
    )
    head_dim = latent and latent.nope_dim + latent.rope_dim
    head_dim = head_dim or fields.even_integer("head_dim", MAX_HEAD_DIM, hidden_size // num_heads)
    base = family.local_base
    partly = "partial_rotary_factor" in family.absent
    turning = rope_fields(fields, by_kind=base is not None)
    fixed = "alpha" not in turning or "alpha" in family.absent
    turning.require(fixed, "'alpha'", "is not a known rope parameter")
    rope = read_rope(turning, max_positions, latent.rope_dim if latent else head_dim, partly=partly)
    known = (
        rope.original_max_positions if rope.kind == "longrope" else None
    )  # beyond, every angle is another
    num_kv_heads = _key_heads(fields, "num_key_value_heads", num_heads, num_heads)
    others = None
    if sliding and blocks.SLIDING_HEADS[0] in family.absent:
        local = fields.integer(blocks.SLIDING_HEADS[0], 1, MAX_HEADS, num_heads)
        key = blocks.SLIDING_HEADS[1]
        others = local, _key_heads(fields, key, local, num_kv_heads)
    no_rope = tuple(window is None for window in sliding) if family.global_no_rope else ()
    scales = fields.read_dataclass(blocks.Scales)
    if "query_pre_attn_scalar" in fields:
        scales = replace(scales, scores=fields.number("query_pre_attn_scalar", 1e-6, 1e9) ** -0.5)
    return fields.read_dataclass(
        ModelConfig,
        architecture=architecture,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH, inner),
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        max_positions=min(max_positions, known or max_positions),
        rope=rope,
        dtype=fields.choice("dtype", _DTYPES, "float32").removeprefix("torch."),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        latent=latent,
        recurrent=recurrent,
        experts=experts,
        quantization=read_quantization(fields),
        sliding_windows=sliding,
        local_rope=read_local_rope(fields, base, max_positions, head_dim, partly=partly)
        if base
        else None,
        local_heads=others,
        swiglu_limits=blocks.read_limits(fields, num_layers),
        value_dim=fields.integer("v_head_dim", 1, head_dim)
        if "v_head_dim" in family.absent
        else None,
        query_growth=read_growth(turning),
        no_rope=no_rope or blocks.read_no_rope(fields, num_layers),
        gemma4=blocks.read_gemma4(fields, num_layers, num_heads, sliding)
        if "num_kv_shared_layers" in family.absent
        else None,
        scales=replace(
            scales, logits=scales.logits / fields.number("logits_scaling", 1e-6, 1e6, 1.0)
        ),
    )


def _spelled(fields: Fields, family: FamilyKeys) -> Fields:
    """What a configuration says, in the keys that are read here, with what absent ones count as."""
    fields = fields.with_canonical_keys(_OTHER_NAMES)
    read = fields.values.keys() - (_ROW_KEYS - family.absent.keys())
    said = {key: fields.get(key) for key in read if key in fields or key in _NULL_IS_NONE}
    fields = Fields(fields.where, {**_COMMON, **family.absent, **said}, fields.file_keys)
    return fields.with_values(family.spelled(fields)) if family.spelled else fields


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    key = "architectures"
    if names == [MTP_HEAD]:
        raise _drafts_only("an MTP head", Path(fields.where).parent, "--mtp")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str):
        raise fields.field_error(key, f"{display_text(names)} does not name one architecture")
    if name not in _FAMILIES:
        error = fields.field_error(key, f"{display_text(name)} is not supported")
        error.reason = tuple(_lacks(fields, name))
        raise error
    family = _FAMILIES[name]
    fields.choice("model_type", (family.model_type, *family.other_types), family.model_type)
    return name


def _lacks(fields: Fields, name: str) -> Iterator[str]:
    """Of an unknown architecture the nearest one that is known, and what it has besides."""
    inner = fields.optional_nested("text_config") or fields
    text = _TEXTS.get(str(inner.get("model_type")))
    found = dict(piece for key, piece in _PIECES.items() if fields.get(key) or inner.get(key))
    causal = re.sub(r"For[A-Z].*|$", "ForCausalLM", name, count=1)
    alike = list[str]()
    for stem in (re.findall(r"^\D*\d?", name)[0], re.split(r"For|\d", name)[0] or name):
        alike += get_close_matches(
            causal, [each for each in _FAMILIES if each.startswith(stem)], 1, 0
        )
    near = text or [*alike, f"{['Llama', *found.values()][-1]}ForCausalLM"][0]
    yield f"nearest supported: {near}; missing: {', '.join(found) or 'blocks of its own'}"
    if inner is not fields:
        can = (
            f"can be read: a copy of it saved as {text} opens" if text else "cannot be read either"
        )
        yield f"its text alone {can}"


def _key_heads(fields: Fields, key: str, num_heads: int, usual: int) -> int:
    found = fields.integer(key, 1, MAX_HEADS, usual)
    fields.require(
        num_heads % found == 0, key, f"{found} does not divide {num_heads} attention heads"
    )
    return found


@dataclass(frozen=True)
class GenerationConfig:
    """How a model wants to be sampled by default; `None` means that the file is silent."""

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
    """Read `generation_config.json`, all defaults when there is none; other keys of it are ignored."""
    if GENERATION_FILE not in list_folder(folder):
        return GenerationConfig()
    fields = Fields.read(folder / GENERATION_FILE)
    return fields.read_dataclass(
        GenerationConfig, eos_token_ids=fields.token_ids("eos_token_id", vocab_size)
    )
