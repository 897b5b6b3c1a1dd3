"""Configurations and tensor lists of published checkpoints of other families; no weights, no `spd`.

Sizes are the defaults of the classes in Hugging Face transformers 5, which are those of a release,
or known from a release; names are the sources of the library's conversions. The lists were not
compared with the indices of the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.recipes.mtp_folders import GATED, Entry, attention, entries, gated, weights, write_hollow

Config = dict[str, Any]
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
MTP_NORMS = ("enorm", "hnorm")


def norms(stem: str, hidden: int, names: tuple[str, ...] = TWO_NORMS) -> Iterator[Entry]:
    """Yield vectors as long as the state."""
    return entries(stem, dict.fromkeys(names, hidden))


def fp8(stem: str, **shapes: tuple[int, int]) -> Iterator[Entry]:
    """Yield matrices in blocks of 128 x 128 with a scale each."""
    for name, shape in shapes.items():
        yield f"{stem}{name}.weight", "F8_E4M3", shape
        yield f"{stem}{name}.weight_scale_inv", "F32", (-(-shape[0] // 128), -(-shape[1] // 128))


def table_entries(c: Config, stem: str = "model.", norm: str = "norm") -> Iterator[Entry]:
    """Yield the embedding and the last norm; the output head where it is another matrix."""
    table = c["vocab_size"], c["hidden_size"]
    yield from weights(stem, embed_tokens=table, **{norm: c["hidden_size"]})
    if not c.get("tie_word_embeddings", True):
        yield from weights("", lm_head=table)


def head_sizes(c: Config) -> tuple[int, int, int, int]:
    """Return the state's width; the number of heads of queries and of keys, and their size."""
    heads = c["num_attention_heads"]
    size = c.get("head_dim") or c["hidden_size"] // heads
    return c["hidden_size"], heads, c["num_key_value_heads"], size


def mamba(
    stem: str, hidden: int, heads: int, size: int, groups: int, state: int
) -> Iterator[Entry]:
    """Yield one Mamba-2 layer."""
    inner = heads * size
    channels = heads * size + 2 * groups * state
    yield from weights(
        stem, in_proj=(inner + channels + heads, hidden), out_proj=(hidden, inner), norm=inner
    )
    yield from weights(stem, conv1d=(channels, 1, 4))
    yield from weights(stem, last="", conv1d__bias=channels, A_log=heads, D=heads, dt_bias=heads)


def nemotron(c: Config) -> Iterator[Entry]:
    """Yield Nemotron's tensors below `backbone.`, one block a layer.

    The MTP module is two more of them.
    """
    hidden = c["hidden_size"]
    table = (c["vocab_size"], c["hidden_size"])
    yield from weights("", backbone__embeddings=table, lm_head=table, backbone__norm_f=hidden)
    for layer, kind in enumerate(c["hybrid_override_pattern"]):
        yield from nemotron_block(c, f"backbone.layers.{layer}.", kind)
    if drafts := c.get("mtp_hybrid_override_pattern", ""):
        for layer, kind in enumerate(drafts):
            yield from nemotron_block(c, f"mtp.layers.{layer}.", kind)
        yield from norms("mtp.layers.0.", hidden, MTP_NORMS)
        yield from weights("mtp.layers.0.", eh_proj=(hidden, 2 * hidden))
        yield from weights(f"mtp.layers.{len(drafts) - 1}.", final_layernorm=hidden)


def nemotron_block(c: Config, stem: str, kind: str) -> Iterator[Entry]:
    """Yield a layer of a kind; routed experts may stand between two projections."""
    hidden, heads, keys, size = head_sizes(c)
    mixer = f"{stem}mixer."
    yield from weights(stem, norm=hidden)
    if kind == "M":
        num_heads = c["mamba_num_heads"]
        head_dim = c["mamba_head_dim"]
        yield from mamba(
            stem=mixer,
            hidden=hidden,
            heads=num_heads,
            size=head_dim,
            groups=c["n_groups"],
            state=c["ssm_state_size"],
        )
    elif kind == "*":
        yield from attention(mixer, hidden, heads, keys=keys, size=size)
    else:
        blocks: dict[str, tuple[int, int]] = {"": (c["intermediate_size"], hidden)}
        if kind == "E":
            count = c["n_routed_experts"]
            latent = c.get("moe_latent_size")
            yield from weights(mixer, gate=(count, hidden))
            yield f"{mixer}gate.e_score_correction_bias", "F32", (count,)
            expert = c["moe_intermediate_size"], latent or hidden
            blocks = {f"experts.{e}.": expert for e in range(count)}
            blocks["shared_experts."] = c["moe_shared_expert_intermediate_size"], hidden
            if latent:
                yield from weights(
                    mixer, fc1_latent_proj=(latent, hidden), fc2_latent_proj=(hidden, latent)
                )
        for block, (inner, wide) in blocks.items():
            yield from weights(mixer + block, up_proj=(inner, wide), down_proj=(wide, inner))


NEMOTRON_SUPER: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "hybrid_override_pattern": "MEM*E",
    "num_hidden_layers": 5,
    "vocab_size": 131072,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_group": 1,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "topk_group": 1,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "n_shared_experts": 1,
    "routed_scaling_factor": 5.0,
    "norm_topk_prob": True,
    "mlp_hidden_act": "relu2",
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "intermediate_size": 2688,
}
"""NVIDIA-Nemotron-3-Super-120B-A12B's, as readers of several public loaders check it.

Of 88 layers five.
"""
NEMOTRON_ULTRA: Config = {
    **NEMOTRON_SUPER,
    "hybrid_override_pattern": "M" * 48 + "*" * 12 + "E" * 48,
    "num_hidden_layers": 108,
    "hidden_size": 8192,
    "moe_latent_size": 2048,
    "moe_intermediate_size": 5120,
    "moe_shared_expert_intermediate_size": 10240,
}
"""Nemotron-3-Ultra's numbers of layers of each kind, in another order."""


def routed_experts(
    stem: str, c: Config, inner: int, count: int, names: tuple[str, ...] = GATED
) -> Iterator[Entry]:
    """Yield a router and experts in FP8, below `gate.` and `experts.`."""
    yield from weights(stem, "F32", gate=(count, c["hidden_size"]))
    for e in range(count):
        yield from gated(f"{stem}experts.{e}.", c["hidden_size"], inner, names, make=fp8)


def minimax_m2(c: Config) -> Iterator[Entry]:
    """Yield the text model; the MTP layers in its configuration were never published."""
    hidden, heads, keys, size = head_sizes(c)
    count = c["num_local_experts"]
    yield from table_entries(c)
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        yield from norms(stem, hidden)
        yield from weights(f"{stem}self_attn.", q_norm=heads * size, k_norm=keys * size)
        yield from attention(f"{stem}self_attn.", hidden, heads, keys, size, fp8)
        block = f"{stem}block_sparse_moe."
        yield f"{block}e_score_correction_bias", "F32", (count,)
        yield from routed_experts(
            stem=block, c=c, inner=c["intermediate_size"], count=count, names=("w1", "w3", "w2")
        )


def mimo_v2(c: Config) -> Iterator[Entry]:
    """Yield a model with three MTP layers; attention's output projections are in bfloat16."""
    hidden, heads, _, size = head_sizes(c)
    layers = c["num_hidden_layers"]
    value = c["v_head_dim"]
    yield from table_entries(c)
    for layer in range(layers + 3):
        drafts = layer - layers
        stem = f"model.layers.{layer}." if drafts < 0 else f"model.mtp.layers.{drafts}."
        is_sliding = drafts >= 0 or c["hybrid_layer_pattern"][layer]
        keys = c["swa_num_key_value_heads" if is_sliding else "num_key_value_heads"]
        yield from norms(
            stem, hidden, TWO_NORMS if drafts < 0 else (TWO_NORMS[0], "pre_mlp_layernorm")
        )
        shapes = {"k_proj": (keys * size, hidden), "v_proj": (keys * value, hidden)}
        yield from fp8(f"{stem}self_attn.", q_proj=(heads * size, hidden), **shapes)
        yield from weights(f"{stem}self_attn.", o_proj=(hidden, heads * value))
        if is_sliding:
            yield f"{stem}self_attn.attention_sink_bias", "BF16", (heads,)
        if drafts < 0 and c["moe_layer_freq"][layer]:
            count = c["n_routed_experts"]
            yield f"{stem}mlp.gate.e_score_correction_bias", "F32", (count,)
            yield from routed_experts(f"{stem}mlp.", c, c["moe_intermediate_size"], count)
            continue
        yield from gated(f"{stem}mlp.", hidden, c["intermediate_size"], make=fp8)
        if drafts >= 0:
            yield from norms(stem, hidden, (*MTP_NORMS, "final_layernorm"))
            yield from weights(stem, eh_proj=(hidden, 2 * hidden))


def step3(config: Config) -> Iterator[Entry]:
    """Yield a model with three MTP layers with heads, and one tensor of the vision tower.

    Experts are packed by layers, their scales too, where they are in few bits.
    """
    c = config["text_config"]
    method = config.get("quantization_config", {}).get("quant_method")
    hidden = c["hidden_size"]
    layers = c["num_hidden_layers"]
    size = c["head_dim"]
    yield from table_entries(c)
    yield from weights("vision_model.", conv1=(1536, 3, 14, 14))
    for layer in range(layers + 3):
        stem = f"model.layers.{layer}."
        full = c["layer_types"][layer] == "full_attention"
        heads = (c if full else c["attention_other_setting"])["num_attention_heads"]
        attention_stem = f"{stem}self_attn."
        yield from norms(stem, hidden)
        yield from attention(attention_stem, hidden, heads, c["num_attention_groups"], size)
        yield from weights(attention_stem, q_norm=size, k_norm=size, g_proj=(heads, hidden))
        if str(layer) in c["moe_layers_enum"].split(","):
            count = c["moe_num_experts"]
            block = f"{stem}moe."
            yield from weights(block, gate=(count, hidden))
            for name, _, shape in gated(block, hidden, c["moe_intermediate_size"]):
                yield from stored_experts(name, (count, *shape), method)
            yield f"{block}router_bias", "F32", (count,)
            yield from gated(f"{stem}share_expert.", hidden, c["share_expert_dim"])
        else:
            yield from gated(f"{stem}mlp.", hidden, c["intermediate_size"])
        if layer >= layers:
            yield from norms(stem, hidden, (*MTP_NORMS, "transformer.shared_head.norm"))
            yield from weights(stem, eh_proj=(hidden, 2 * hidden))
            yield from weights(f"{stem}transformer.shared_head.", output=(c["vocab_size"], hidden))


def stored_experts(name: str, shape: tuple[int, int, int], method: str | None) -> Iterator[Entry]:
    """Yield the experts of one tensor as a quantization method stores them."""
    count, rows, columns = shape
    if method is None:
        yield name, "BF16", shape
    elif method == "fp8":
        yield name, "F8_E4M3", shape
        yield f"{name}_scale_inv", "F32", (count, rows // 128, columns // 128)
    else:
        yield name, "U8", (count, rows, columns // 2)
        yield f"{name}_scale", "F8_E4M3", (count, rows, columns // 16)
        yield f"{name}_scale_2", "F32", (count,)
        yield f"{name.removesuffix('weight')}input_scale", "F32", (count,)


STEP3: Config = {
    "architectures": ["Step3p7ForConditionalGeneration"],
    "model_type": "step3p7",
    "text_config": {
        "model_type": "step3p5",
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "vocab_size": 128896,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "head_dim": 128,
        "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
        "layer_types": [("full", *["sliding"] * 3)[i % 4] + "_attention" for i in range(8)],
        "moe_layers_enum": "3,4",
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "sliding_window": 512,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_router_scaling_factor": 3.0,
        "rope_theta": [(5e6, 1e4, 1e4, 1e4)[i % 4] for i in range(8)],
        "num_nextn_predict_layers": 3,
        "partial_rotary_factors": [(0.5, 1.0, 1.0, 1.0)[i % 4] for i in range(8)],
        "swiglu_limits": [0.0] * 4 + [7.0] + [0.0] * 3,
        "rms_norm_eps": 1e-5,
        "swiglu_limits_shared": [0.0] * 4 + [16.0] + [0.0] * 3,
        "max_position_embeddings": 262144,
        "use_head_wise_attn_gate": True,
        "use_moe_router_bias": True,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 131072,
        },
    },
}
"""Of 45 layers five, the last of which cuts its gates as the last two of all do."""
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
STEP3_FP8: Config = {**STEP3, "quantization_config": BLOCKS}
STEP3_NVFP4: Config = {
    **STEP3,
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
_DEEP = STEP3["text_config"] | {"num_hidden_layers": 45}
_DEEP |= {"layer_types": [("full", *["sliding"] * 3)[i % 4] + "_attention" for i in range(48)]}
STEP3_FULL: Config = {
    **STEP3_FP8,
    "text_config": _DEEP | {"moe_layers_enum": ",".join(map(str, range(3, 45)))},
}
"""Step-3.7-Flash-FP8 at b3d7916, of whose headers the numbers of tensors were reported."""
MINIMAX_M2: Config = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "hidden_size": 3072,
    "head_dim": 128,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 200064,
    "rotary_dim": 64,
    "rope_theta": 5000000,
    "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_mtp": True,
    "num_mtp_modules": 3,
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "attn_type_list": [1, 1],
    "tie_word_embeddings": False,
    "quantization_config": BLOCKS,
}
"""Of 62 layers the first two."""
MIMO_V2: Config = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "hidden_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "vocab_size": 152576,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "intermediate_size": 16384,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "n_group": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "topk_group": 1,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "layernorm_epsilon": 1e-5,
    "attention_value_scale": 0.707,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "quantization_config": BLOCKS,
}
"""Of 48 layers the first three."""


def gpt_oss(c: Config) -> Iterator[Entry]:
    """Yield experts in MXFP4, everything else in bfloat16."""
    hidden, heads, keys, size = head_sizes(c)
    inner = c["intermediate_size"]
    count = c["num_local_experts"]
    yield from table_entries(c)
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        experts = f"model.layers.{layer}.mlp.experts."
        yield from norms(stem, hidden)
        yield from weights(stem, mlp__router=(count, hidden))
        yield from weights(stem, last="", self_attn__sinks=heads, mlp__router__bias=count)
        projections = attention(f"{stem}self_attn.", hidden, heads, keys=keys, size=size)
        for name, dtype, shape in projections:
            yield name, dtype, shape
            yield name.replace(".weight", ".bias"), dtype, shape[:1]
        for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            yield f"{experts}{name}_proj_bias", "BF16", (count, rows)
            yield f"{experts}{name}_proj_blocks", "U8", (count, rows, columns // 32, 16)
            yield f"{experts}{name}_proj_scales", "U8", (count, rows, columns // 32)


GPT_OSS: Config = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "rope_type": "yarn",
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
}
GPT_OSS_120B = {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}
GPT_OSS_120B["layer_types"] = ["sliding_attention", "full_attention"] * 18


def gemma4(c: Config) -> Iterator[Entry]:
    """Yield a model.

    Layers that share another's cache are published with their keys and values too.
    """
    hidden = c["hidden_size"]
    layer_width = c["hidden_size_per_layer_input"]
    prefix = "model.language_model."
    layers = c["num_hidden_layers"]
    table = (c["vocab_size"], c["hidden_size"])
    yield from weights(prefix, embed_tokens=table, norm=hidden)
    if layer_width:
        yield from weights(prefix, embed_tokens_per_layer=(c["vocab_size"], layers * layer_width))
        yield from weights(prefix, per_layer_model_projection=(layers * layer_width, hidden))
        yield from weights(prefix, per_layer_projection_norm=layer_width)
    for layer in range(layers):
        stem = f"{prefix}layers.{layer}."
        is_full = c["layer_types"][layer] == "full_attention"
        size = c["global_head_dim" if is_full else "head_dim"]
        keys = c["num_key_value_heads"]
        keys = c["num_global_key_value_heads"] or keys if is_full else keys
        for entry in attention(f"{stem}self_attn.", hidden, c["num_attention_heads"], keys, size):
            if not (is_full and c["attention_k_eq_v"] and "v_proj" in entry[0]):
                yield entry
        yield from weights(f"{stem}self_attn.", q_norm=size, k_norm=size)
        doubled = c.get("use_double_wide_mlp") and layer >= layers - c["num_kv_shared_layers"]
        yield from gated(f"{stem}mlp.", hidden, c["intermediate_size"] * (2 if doubled else 1))
        yield from norms(stem, hidden, FOUR_NORMS)
        yield f"{stem}layer_scalar", "BF16", (1,)
        if c["enable_moe_block"]:
            count = c["num_experts"]
            width = c["moe_intermediate_size"]
            yield from norms(
                stem, hidden, (f"{FOUR_NORMS[2]}_2", f"{FOUR_NORMS[3]}_1", f"{FOUR_NORMS[3]}_2")
            )
            yield from weights(stem, router__proj=(count, hidden))
            yield from weights(stem, last="", router__scale=hidden, router__per_expert_scale=count)
            yield from weights(stem, last="", experts__gate_up_proj=(count, 2 * width, hidden))
            yield from weights(stem, last="", experts__down_proj=(count, hidden, width))
        if layer_width:
            yield from weights(
                stem,
                per_layer_input_gate=(layer_width, hidden),
                per_layer_projection=(hidden, layer_width),
            )
            yield from weights(stem, post_per_layer_input_norm=hidden)


def write_release(
    folder: Path, config: Config, tensors: Callable[[Config], Iterator[Entry]]
) -> Path:
    """Write a folder whose one file is a header; return it."""
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    write_hollow(folder / "model.safetensors", list(tensors(config)))
    return folder
