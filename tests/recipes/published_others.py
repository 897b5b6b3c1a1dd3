"""Configurations and tensor lists of published checkpoints of other families; no weights, no `spd`.

Sizes are the defaults of the classes in Hugging Face transformers 5, which are a release's own, or known from
a release; names are what the library's conversions begin with. The lists were not compared with the indices
of the files themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.recipes.mtp_folders import write_hollow

Entry = tuple[str, str, tuple[int, ...]]
Config = dict[str, Any]


def entries(stem: str, **shapes: tuple[int, ...]) -> Iterator[Entry]:
    """Tensors in bfloat16 below a stem, by names in which __ stands for a point."""
    for name, shape in shapes.items():
        yield f"{stem}{name.replace('__', '.')}", "BF16", shape


def gated(stem: str, hidden: int, inner: int, names: str = "gate_proj up_proj down_proj") -> Iterator[Entry]:
    """A gated MLP's matrices."""
    gate, up, down = names.split()
    shapes = {f"{gate}__weight": (inner, hidden), f"{up}__weight": (inner, hidden)}
    return entries(stem, **shapes, **{f"{down}__weight": (hidden, inner)})


def glm_flash(c: Config) -> Iterator[Entry]:
    """With its MTP layer, which has the target's tables too."""
    hidden, vocab, heads = c["hidden_size"], c["vocab_size"], c["num_attention_heads"]
    query, rank, rope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    yield from entries("", model__embed_tokens__weight=(vocab, hidden), lm_head__weight=(vocab, hidden))
    yield from entries("model.", norm__weight=(hidden,))
    for layer in range(c["num_hidden_layers"] + 1):
        stem = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{stem}{name}.weight", "BF16", (hidden,)
        yield from entries(
            f"{stem}self_attn.",
            q_a_proj__weight=(query, hidden),
            q_a_layernorm__weight=(query,),
            q_b_proj__weight=(heads * (c["qk_nope_head_dim"] + rope), query),
            kv_a_proj_with_mqa__weight=(rank + rope, hidden),
            kv_a_layernorm__weight=(rank,),
            kv_b_proj__weight=(heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank),
            o_proj__weight=(hidden, heads * c["v_head_dim"]),
        )
        if layer < c["first_k_dense_replace"]:
            yield from gated(f"{stem}mlp.", hidden, c["intermediate_size"])
            continue
        yield from entries(f"{stem}mlp.gate.", weight=(c["n_routed_experts"], hidden))
        yield f"{stem}mlp.gate.e_score_correction_bias", "F32", (c["n_routed_experts"],)
        for block in (*(f"experts.{e}" for e in range(c["n_routed_experts"])), "shared_experts"):
            yield from gated(f"{stem}mlp.{block}.", hidden, c["moe_intermediate_size"])
        if layer == c["num_hidden_layers"]:
            yield from entries(
                stem,
                enorm__weight=(hidden,),
                hnorm__weight=(hidden,),
                eh_proj__weight=(hidden, 2 * hidden),
                embed_tokens__weight=(vocab, hidden),
                shared_head__norm__weight=(hidden,),
                shared_head__head__weight=(vocab, hidden),
            )


def lfm2(c: Config) -> Iterator[Entry]:
    """The head is the embedding."""
    hidden, size = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
    yield from entries(
        "model.", embed_tokens__weight=(c["vocab_size"], hidden), embedding_norm__weight=(hidden,)
    )
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        yield from entries(stem, operator_norm__weight=(hidden,), ffn_norm__weight=(hidden,))
        yield from gated(f"{stem}feed_forward.", hidden, 8192, "w1 w3 w2")
        if layer in c["full_attn_idxs"]:
            keys = c["num_key_value_heads"] * size
            for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("out", hidden)):
                yield f"{stem}self_attn.{name}_proj.weight", "BF16", (rows, hidden)
            yield from entries(f"{stem}self_attn.", q_layernorm__weight=(size,), k_layernorm__weight=(size,))
            continue
        shapes = {"in_proj": (3 * hidden, hidden), "conv": (hidden, 1, 3), "out_proj": (hidden, hidden)}
        for name, shape in shapes.items():
            yield f"{stem}conv.{name}.weight", "BF16", shape


def attention(stem: str, hidden: int, heads: int, keys: int, size: int) -> Iterator[Entry]:
    """Queries, keys, values and the output, without biases."""
    for name, shape in (
        *(("q", (heads * size, hidden)), ("k", (keys * size, hidden)), ("v", (keys * size, hidden))),
        ("o", (hidden, heads * size)),
    ):
        yield f"{stem}{name}_proj.weight", "BF16", shape


def mamba(stem: str, hidden: int, heads: int, size: int, groups: int, state: int) -> Iterator[Entry]:
    """One Mamba-2 layer."""
    inner, channels = heads * size, heads * size + 2 * groups * state
    yield from entries(
        stem,
        in_proj__weight=(inner + channels + heads, hidden),
        conv1d__weight=(channels, 1, 4),
        conv1d__bias=(channels,),
        **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
        norm__weight=(inner,),
        out_proj__weight=(hidden, inner),
    )


def granite(c: Config) -> Iterator[Entry]:
    """The head is the embedding; experts are packed."""
    hidden, count = c["hidden_size"], c["num_local_experts"]
    inner, shared = c["intermediate_size"], c["shared_intermediate_size"]
    yield from entries("model.", embed_tokens__weight=(c["vocab_size"], hidden), norm__weight=(hidden,))
    for layer, kind in enumerate(c["layer_types"]):
        stem = f"model.layers.{layer}."
        yield from entries(
            stem,
            input_layernorm__weight=(hidden,),
            post_attention_layernorm__weight=(hidden,),
            block_sparse_moe__input_linear__weight=(count, 2 * inner, hidden),
            block_sparse_moe__output_linear__weight=(count, hidden, inner),
            block_sparse_moe__router__layer__weight=(count, hidden),
            shared_mlp__input_linear__weight=(2 * shared, hidden),
            shared_mlp__output_linear__weight=(hidden, shared),
        )
        if kind == "mamba":
            sizes = (c["mamba_n_heads"], c["mamba_d_head"], c["mamba_n_groups"], c["mamba_d_state"])
            yield from mamba(f"{stem}mamba.", hidden, *sizes)
        else:
            heads, keys = c["num_attention_heads"], c["num_key_value_heads"]
            yield from attention(f"{stem}self_attn.", hidden, heads, keys, hidden // heads)


def nemotron(c: Config) -> Iterator[Entry]:
    """Below `backbone.`, one block a layer; the MTP module is two more of them."""
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    yield from entries("", backbone__embeddings__weight=(vocab, hidden), lm_head__weight=(vocab, hidden))
    yield from entries("backbone.", norm_f__weight=(hidden,))
    for layer, kind in enumerate(c["hybrid_override_pattern"]):
        yield from nemotron_block(c, f"backbone.layers.{layer}.", kind)
    if drafts := c.get("mtp_hybrid_override_pattern", ""):
        for layer, kind in enumerate(drafts):
            yield from nemotron_block(c, f"mtp.layers.{layer}.", kind)
        shapes = {"enorm__weight": (hidden,), "hnorm__weight": (hidden,)}
        yield from entries("mtp.layers.0.", **shapes, eh_proj__weight=(hidden, 2 * hidden))
        yield f"mtp.layers.{len(drafts) - 1}.final_layernorm.weight", "BF16", (hidden,)


def nemotron_block(c: Config, stem: str, kind: str) -> Iterator[Entry]:
    """A layer of a kind; routed experts may stand between two projections."""
    hidden, own = c["hidden_size"], f"{stem}mixer."
    yield f"{stem}norm.weight", "BF16", (hidden,)
    if kind == "M":
        sizes = (c["mamba_num_heads"], c["mamba_head_dim"], c["n_groups"], c["ssm_state_size"])
        yield from mamba(own, hidden, *sizes)
    elif kind == "*":
        heads, keys = c["num_attention_heads"], c["num_key_value_heads"]
        yield from attention(own, hidden, heads, keys, c["head_dim"])
    else:
        blocks = {"": (c["intermediate_size"], hidden)}
        if kind == "E":
            count, latent = c["n_routed_experts"], c.get("moe_latent_size")
            yield f"{own}gate.weight", "BF16", (count, hidden)
            yield f"{own}gate.e_score_correction_bias", "F32", (count,)
            sizes = c["moe_intermediate_size"], latent or hidden
            blocks = {f"experts.{e}.": sizes for e in range(count)}
            blocks["shared_experts."] = c["moe_shared_expert_intermediate_size"], hidden
            if latent:
                shapes = {"fc1_latent_proj__weight": (latent, hidden)}
                yield from entries(own, **shapes, fc2_latent_proj__weight=(hidden, latent))
        for block, (inner, wide) in blocks.items():
            yield from entries(own + block, up_proj__weight=(inner, wide), down_proj__weight=(wide, inner))


NEMOTRON_SUPER: Config = {
    **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096},
    **{"hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5, "vocab_size": 131072, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 128, "mamba_head_dim": 64},
    **{"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "use_conv_bias": True, "n_group": 1},
    **{"n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "topk_group": 1},
    **{"moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376, "n_shared_experts": 1},
    **{"routed_scaling_factor": 5.0, "norm_topk_prob": True, "mlp_hidden_act": "relu2", "use_bias": False},
    **{"layer_norm_epsilon": 1e-5, "max_position_embeddings": 262144, "tie_word_embeddings": False},
    **{"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "intermediate_size": 2688},
}
"""NVIDIA-Nemotron-3-Super-120B-A12B's, as readers of several public loaders check it; of 88 layers five."""
NEMOTRON_ULTRA: Config = {
    **{**NEMOTRON_SUPER, "hybrid_override_pattern": "M" * 48 + "*" * 12 + "E" * 48, "num_hidden_layers": 108},
    **{"hidden_size": 8192, "moe_latent_size": 2048, "moe_intermediate_size": 5120},
    "moe_shared_expert_intermediate_size": 10240,
}
"""Nemotron-3-Ultra's numbers of layers of each kind, in another order."""


def hunyuan(c: Config) -> Iterator[Entry]:
    """The head is the embedding; every layer has a shared expert."""
    hidden, heads, keys, size = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], 128
    yield from entries("model.", embed_tokens__weight=(c["vocab_size"], hidden), norm__weight=(hidden,))
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{stem}{name}.weight", "BF16", (hidden,)
        yield from attention(f"{stem}self_attn.", hidden, heads, keys, size)
        yield from entries(
            f"{stem}self_attn.", query_layernorm__weight=(size,), key_layernorm__weight=(size,)
        )
        yield f"{stem}mlp.gate.wg.weight", "F32", (c["num_experts"], hidden)
        for block in (*(f"experts.{e}" for e in range(c["num_experts"])), "shared_mlp"):
            yield from gated(f"{stem}mlp.{block}.", hidden, c["intermediate_size"])


HUNYUAN: Config = {
    **{"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "hidden_size": 4096},
    **{"num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    **{"attention_head_dim": 128, "intermediate_size": 3072, "vocab_size": 128167, "num_experts": 64},
    **{"moe_intermediate_size": [3072] * 2, "moe_topk": [8] * 2, "num_shared_expert": [1] * 2},
    **{"use_mixed_mlp_moe": True, "use_qk_norm": True, "use_cla": False, "moe_layer_num_skipped": 0},
    **{"rope_theta": 10000.0, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
    **{"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    "rope_scaling": {
        **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0},
        **{"mscale_all_dim": 1.0, "type": "dynamic"},
    },
}
"""Hunyuan-A13B-Instruct's; of 32 layers two."""


def muse_glimmer(config: Config) -> Iterator[Entry]:
    """The text inside of what sees images, with one tensor of that."""
    c = config["text_config"]
    hidden, size = c["hidden_size"], c["head_dim"]
    heads, keys, stem = c["num_attention_heads"], c["num_key_value_heads"], "model.language_model."
    yield from entries(stem, embed_tokens__weight=(c["vocab_size"], hidden), norm__weight=(hidden,))
    yield "lm_head.weight", "BF16", (c["vocab_size"], hidden)
    yield "model.vision_tower.ln_pre.weight", "BF16", (1536,)
    for layer in range(c["num_hidden_layers"]):
        own = f"{stem}layers.{layer}."
        norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
        for name in (*norms, "post_feedforward_layernorm"):
            yield f"{own}{name}.weight", "BF16", (hidden,)
        yield from attention(f"{own}self_attn.", hidden, heads, keys, size)
        yield f"{own}self_attn.gate_proj.weight", "BF16", (heads * size, hidden)
        yield from gated(f"{own}mlp.", hidden, c["intermediate_size"])


MUSE: Config = {
    **{"architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer"},
    **{"image_token_id": 200092, "tie_word_embeddings": False, "vision_config": {"hidden_size": 1536}},
    "text_config": {
        **{"model_type": "muse_glimmer_text", "hidden_size": 6656, "intermediate_size": 19968},
        **{"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
        **{"vocab_size": 202048, "hidden_activation": "silu", "max_position_embeddings": 131072},
        **{"rms_norm_eps": 1e-5, "sliding_window": 2048, "final_logit_softcapping": 20.0},
        **{"qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8},
        **{"layer_types": [*["sliding_attention"] * 3, "full_attention"], "attention_bias": False},
        **{"layer_rope_theta": [500000.0] * 3 + [0], "tie_word_embeddings": False},
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}
"""Muse-Glimmer-30B's; of 52 layers four."""


def fp8(stem: str, **shapes: tuple[int, int]) -> Iterator[Entry]:
    """Matrices in blocks of 128 x 128 with a scale each."""
    for name, shape in shapes.items():
        yield f"{stem}{name}.weight", "F8_E4M3", shape
        yield f"{stem}{name}.weight_scale_inv", "F32", (-(-shape[0] // 128), -(-shape[1] // 128))


def outside(c: Config) -> Iterator[Entry]:
    """Tables and the last norm."""
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    yield from entries("", model__embed_tokens__weight=(vocab, hidden), lm_head__weight=(vocab, hidden))
    yield from entries("model.", norm__weight=(hidden,))


def routed(stem: str, c: Config, inner: int, count: int, names: str) -> Iterator[Entry]:
    """A router and experts in FP8, below `gate.` and `experts.`."""
    hidden, (gate, up, down) = c["hidden_size"], names.split()
    yield f"{stem}gate.weight", "F32", (count, hidden)
    for e in range(count):
        shapes = {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
        yield from fp8(f"{stem}experts.{e}.", **shapes)


def minimax_m2(c: Config) -> Iterator[Entry]:
    """The layers for MTP that its configuration speaks of were never published."""
    hidden, size, count = c["hidden_size"], c["head_dim"], c["num_local_experts"]
    query, key = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    yield from outside(c)
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        yield from entries(
            stem,
            input_layernorm__weight=(hidden,),
            post_attention_layernorm__weight=(hidden,),
            self_attn__q_norm__weight=(query,),
            self_attn__k_norm__weight=(key,),
        )
        shapes = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden)}
        yield from fp8(f"{stem}self_attn.", **shapes, o_proj=(hidden, query))
        block = f"{stem}block_sparse_moe."
        yield f"{block}e_score_correction_bias", "F32", (count,)
        yield from routed(block, c, c["intermediate_size"], count, "w1 w3 w2")


def mimo_v2(c: Config) -> Iterator[Entry]:
    """With three layers for MTP; what makes attention's outputs is in bfloat16."""
    hidden, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    size, value, inner = c["head_dim"], c["v_head_dim"], c["intermediate_size"]
    yield from outside(c)
    for layer in range(layers + 3):
        drafts = layer - layers
        stem = f"model.layers.{layer}." if drafts < 0 else f"model.mtp.layers.{drafts}."
        slides = drafts >= 0 or c["hybrid_layer_pattern"][layer]
        keys = c["swa_num_key_value_heads" if slides else "num_key_value_heads"]
        yield from entries(stem, input_layernorm__weight=(hidden,))
        norm = "post_attention_layernorm" if drafts < 0 else "pre_mlp_layernorm"
        yield f"{stem}{norm}.weight", "BF16", (hidden,)
        shapes = {"k_proj": (keys * size, hidden), "v_proj": (keys * value, hidden)}
        yield from fp8(f"{stem}self_attn.", q_proj=(heads * size, hidden), **shapes)
        yield f"{stem}self_attn.o_proj.weight", "BF16", (hidden, heads * value)
        if slides:
            yield f"{stem}self_attn.attention_sink_bias", "BF16", (heads,)
        if drafts < 0 and c["moe_layer_freq"][layer]:
            block, count = f"{stem}mlp.", c["n_routed_experts"]
            yield f"{block}gate.e_score_correction_bias", "F32", (count,)
            yield from routed(block, c, c["moe_intermediate_size"], count, "gate_proj up_proj down_proj")
            continue
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        yield from fp8(f"{stem}mlp.", **shapes)
        if drafts >= 0:
            for name in ("enorm", "hnorm", "final_layernorm"):
                yield f"{stem}{name}.weight", "BF16", (hidden,)
            yield f"{stem}eh_proj.weight", "BF16", (hidden, 2 * hidden)


def step3(config: Config) -> Iterator[Entry]:
    """With three layers for MTP, each with a head of its own, and one tensor of what sees images.

    Experts are packed by layers, their scales too, where they are in few bits.
    """
    c, method = config["text_config"], config.get("quantization_config", {}).get("quant_method")
    hidden, layers, size, vocab = c["hidden_size"], c["num_hidden_layers"], c["head_dim"], c["vocab_size"]
    yield from outside(c)
    yield "vision_model.conv1.weight", "BF16", (1536, 3, 14, 14)
    for layer in range(layers + 3):
        stem, full = f"model.layers.{layer}.", c["layer_types"][layer] == "full_attention"
        heads = c["num_attention_heads"] if full else c["attention_other_setting"]["num_attention_heads"]
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{stem}{name}.weight", "BF16", (hidden,)
        own = f"{stem}self_attn."
        yield from attention(own, hidden, heads, c["num_attention_groups"], size)
        yield from entries(
            own, q_norm__weight=(size,), k_norm__weight=(size,), g_proj__weight=(heads, hidden)
        )
        if str(layer) in c["moe_layers_enum"].split(","):
            count, inner, block = c["moe_num_experts"], c["moe_intermediate_size"], f"{stem}moe."
            yield from entries(block, gate__weight=(count, hidden))
            for name, rows, columns in (
                ("gate", inner, hidden),
                ("up", inner, hidden),
                ("down", hidden, inner),
            ):
                own = f"{block}{name}_proj."
                if method is None:
                    yield f"{own}weight", "BF16", (count, rows, columns)
                elif method == "fp8":
                    yield f"{own}weight", "F8_E4M3", (count, rows, columns)
                    yield f"{own}weight_scale_inv", "F32", (count, rows // 128, columns // 128)
                else:
                    yield f"{own}weight", "U8", (count, rows, columns // 2)
                    yield f"{own}weight_scale", "F8_E4M3", (count, rows, columns // 16)
                    yield from (
                        (f"{own}{last}", "F32", (count,)) for last in ("weight_scale_2", "input_scale")
                    )
            yield f"{block}router_bias", "F32", (count,)
            yield from gated(f"{stem}share_expert.", hidden, c["share_expert_dim"])
        else:
            yield from gated(f"{stem}mlp.", hidden, c["intermediate_size"])
        if layer >= layers:
            shapes = {"enorm__weight": (hidden,), "hnorm__weight": (hidden,)}
            yield from entries(stem, **shapes, eh_proj__weight=(hidden, 2 * hidden))
            head = {"norm__weight": (hidden,), "output__weight": (vocab, hidden)}
            yield from entries(f"{stem}transformer.shared_head.", **head)


STEP3: Config = {
    **{"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7"},
    "text_config": {
        **{"model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264, "vocab_size": 128896},
        **{"num_hidden_layers": 5, "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128},
        **{"attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8}},
        **{"layer_types": [("full", *["sliding"] * 3)[i % 4] + "_attention" for i in range(8)]},
        **{"moe_layers_enum": "3,4", "moe_num_experts": 288, "moe_top_k": 8, "sliding_window": 512},
        **{"moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_router_scaling_factor": 3.0},
        **{"rope_theta": [(5e6, 1e4, 1e4, 1e4)[i % 4] for i in range(8)], "num_nextn_predict_layers": 3},
        **{"partial_rotary_factors": [(0.5, 1.0, 1.0, 1.0)[i % 4] for i in range(8)]},
        **{"swiglu_limits": [0.0] * 4 + [7.0] + [0.0] * 3, "rms_norm_eps": 1e-5},
        **{"swiglu_limits_shared": [0.0] * 4 + [16.0] + [0.0] * 3, "max_position_embeddings": 262144},
        **{"use_head_wise_attn_gate": True, "use_moe_router_bias": True, "tie_word_embeddings": False},
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0},
            "original_max_position_embeddings": 131072,
        },
    },
}
"""Of 45 layers five, the last of which cuts its gates as the last two of all do."""
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
STEP3_FP8: Config = {**STEP3, "quantization_config": BLOCKS}
STEP3_NVFP4: Config = {**STEP3, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
_DEEP = STEP3["text_config"] | {"num_hidden_layers": 45}
_DEEP |= {"layer_types": [("full", *["sliding"] * 3)[i % 4] + "_attention" for i in range(48)]}
STEP3_WHOLE: Config = {
    **STEP3_FP8,
    "text_config": _DEEP | {"moe_layers_enum": ",".join(map(str, range(3, 45)))},
}
"""Step-3.7-Flash-FP8 at b3d7916, of whose headers the numbers of tensors were reported."""
MINIMAX_M2: Config = {
    **{"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072},
    **{"head_dim": 128, "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8},
    **{"num_hidden_layers": 2, "num_local_experts": 256, "num_experts_per_tok": 8, "vocab_size": 200064},
    **{"rotary_dim": 64, "rope_theta": 5000000, "max_position_embeddings": 196608, "rms_norm_eps": 1e-6},
    **{"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_mtp": True},
    **{"num_mtp_modules": 3, "use_routing_bias": True, "shared_intermediate_size": 0},
    **{"attn_type_list": [1, 1], "tie_word_embeddings": False, "quantization_config": BLOCKS},
}
"""Of 62 layers the first two."""
MIMO_V2: Config = {
    **{"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "hidden_size": 4096},
    **{"num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 4, "vocab_size": 152576},
    **{"head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8},
    **{"swa_head_dim": 192, "swa_v_head_dim": 128, "partial_rotary_factor": 0.334, "rope_theta": 5000000},
    **{"swa_rope_theta": 10000, "sliding_window": 128, "sliding_window_size": 128},
    **{"hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "intermediate_size": 16384},
    **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_group": 1},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "topk_group": 1},
    **{"routed_scaling_factor": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    **{"norm_topk_prob": True, "layernorm_epsilon": 1e-5, "attention_value_scale": 0.707},
    **{"max_position_embeddings": 262144, "tie_word_embeddings": False, "quantization_config": BLOCKS},
}
"""Of 48 layers the first three."""


def gpt_oss(c: Config) -> Iterator[Entry]:
    """Experts in MXFP4, everything else in bfloat16."""
    hidden, inner, count = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    heads, keys, size, vocab = (
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        c["vocab_size"],
    )
    yield from entries("", model__embed_tokens__weight=(vocab, hidden), lm_head__weight=(vocab, hidden))
    yield from entries("model.", norm__weight=(hidden,))
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        yield from entries(
            stem,
            input_layernorm__weight=(hidden,),
            post_attention_layernorm__weight=(hidden,),
            mlp__router__weight=(count, hidden),
            mlp__router__bias=(count,),
            mlp__experts__gate_up_proj_bias=(count, 2 * inner),
            mlp__experts__down_proj_bias=(count, hidden),
            self_attn__sinks=(heads,),
        )
        yield from attention(f"{stem}self_attn.", hidden, heads, keys, size)
        for name, rows in (("q", heads * size), ("k", keys * size), ("v", keys * size), ("o", hidden)):
            yield f"{stem}self_attn.{name}_proj.bias", "BF16", (rows,)
        for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            yield f"{stem}mlp.experts.{name}_proj_blocks", "U8", (count, rows, columns // 32, 16)
            yield f"{stem}mlp.experts.{name}_proj_scales", "U8", (count, rows, columns // 32)


GPT_OSS: Config = {
    **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True},
    **{"head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64},
    **{"num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32},
    **{"rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0},
    **{"max_position_embeddings": 131072, "tie_word_embeddings": False, "vocab_size": 201088},
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False},
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
}
GPT_OSS_120B = {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}
GPT_OSS_120B["layer_types"] = ["sliding_attention", "full_attention"] * 18


def gemma4(c: Config) -> Iterator[Entry]:
    """Layers that share another's cache are published with keys and values of their own."""
    hidden, per, inside = c["hidden_size"], c["hidden_size_per_layer_input"], "model.language_model."
    layers, vocab, kinds = c["num_hidden_layers"], c["vocab_size"], c["layer_types"]
    yield from entries(inside, embed_tokens__weight=(vocab, hidden), norm__weight=(hidden,))
    if per:
        yield from entries(
            inside,
            embed_tokens_per_layer__weight=(vocab, layers * per),
            per_layer_model_projection__weight=(layers * per, hidden),
            per_layer_projection_norm__weight=(per,),
        )
    for layer in range(layers):
        stem, wide = f"{inside}layers.{layer}.", kinds[layer] == "full_attention"
        size, keys = (c["global_head_dim"] if wide else c["head_dim"]), c["num_key_value_heads"]
        keys, alike = (c["num_global_key_value_heads"] or keys if wide else keys), c["attention_k_eq_v"]
        for name, tensor, shape in attention(
            f"{stem}self_attn.", hidden, c["num_attention_heads"], keys, size
        ):
            if not (wide and alike and "v_proj" in name):
                yield name, tensor, shape
        yield from entries(f"{stem}self_attn.", q_norm__weight=(size,), k_norm__weight=(size,))
        doubled = c.get("use_double_wide_mlp") and layer >= layers - c["num_kv_shared_layers"]
        yield from gated(f"{stem}mlp.", hidden, c["intermediate_size"] * (2 if doubled else 1))
        norms = (
            "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm"
        )
        if c["enable_moe_block"]:
            count, width = c["num_experts"], c["moe_intermediate_size"]
            norms += " pre_feedforward_layernorm_2 post_feedforward_layernorm_1 post_feedforward_layernorm_2"
            yield from entries(stem, router__scale=(hidden,), router__proj__weight=(count, hidden))
            yield from entries(stem, router__per_expert_scale=(count,))
            yield from entries(stem, experts__gate_up_proj=(count, 2 * width, hidden))
            yield from entries(stem, experts__down_proj=(count, hidden, width))
        yield from entries(
            stem, **{f"{name}__weight": (hidden,) for name in norms.split()}, layer_scalar=(1,)
        )
        if per:
            yield from entries(
                stem,
                per_layer_input_gate__weight=(per, hidden),
                per_layer_projection__weight=(hidden, per),
                post_per_layer_input_norm__weight=(hidden,),
            )


def write_release(folder: Path, config: Config, tensors: Callable[[Config], Iterator[Entry]]) -> Path:
    """A folder whose one file is a header; returns it."""
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    write_hollow(folder / "model.safetensors", list(tensors(config)))
    return folder
