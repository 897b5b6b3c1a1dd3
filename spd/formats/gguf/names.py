"""Names of tensors in GGUF files, and Hugging Face's names in spd's text models.

Names stand behind `blk.N.` and `model.layers.N.`; with their ending (`.weight`, `.bias`) where it
changes. Source: `tensor_mapping.py` of gguf-py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spd.formats.gguf.changes import ChangeName

Names = Mapping[str, str | tuple[str, ...]]
"""Hugging Face's name, or several, by the file's.

Several are matrices whose rows follow each other in one of the file. {e} is the number of an
expert.
"""
EXPERT = "mlp.experts.{e}"
"""The beginning of the names of an expert."""

OUTER_NAMES: Names = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""Tensors outside the layers, without a prefix."""
LAYER_NAMES: Names = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": f"{EXPERT}.gate_proj",
    "ffn_up_exps": f"{EXPERT}.up_proj",
    "ffn_down_exps": f"{EXPERT}.down_proj",
    "ffn_gate_up_exps": (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj"),
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""Tensors of a layer in most architectures."""
MAMBA_NAMES: Names = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
"""Tensors of Mamba-2."""
DELTA_NAMES: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""Tensors of gated DeltaNet layers, and of the layers between them."""
CONV_NAMES: Names = {
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
"""Tensors of short convolutions, and of the layers between them."""
SHARED_EXPERT_NAMES: Names = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
"""Tensors of a shared expert with a gate."""
LATENT_NAMES: Names = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
"""Tensors of latent attention."""
POST_NORM_NAMES: Names = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms before and behind both blocks of a layer."""
GEMMA4_NAMES: Names = {
    **POST_NORM_NAMES,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_exps": "experts.{e}.gate_proj",
    "ffn_up_exps": "experts.{e}.up_proj",
    "ffn_down_exps": "experts.{e}.down_proj",
    "ffn_gate_up_exps": ("experts.{e}.gate_proj", "experts.{e}.up_proj"),
}
"""Tensors of Gemma 4: norms, experts next to the MLP, and per-layer embeddings."""


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor that the converter splits; all names with their endings."""

    name: str
    """Hugging Face's name."""
    parts: tuple[str, ...]
    """The names in the file, in order."""
    change: ChangeName
    """How the parts form the tensor."""


@dataclass(frozen=True)
class MtpNames:
    """Names of an MTP head's tensors, which GGUF numbers as layers behind the model's.

    {i} is the number of a layer in the head, {l} that behind the model's layers.
    """

    layer: str
    """The prefix of a layer's names."""
    outer: Mapping[str, str]
    """Names of tensors around the layer."""


_MTP_INPUT_NAMES = {"nextn.enorm": "enorm", "nextn.hnorm": "hnorm", "nextn.eh_proj": "eh_proj"}


def _numbered_mtp(
    head: str,
    norm: str,
    layer: str = "model.layers.{l}.",
    norm_name: str = "nextn.shared_head_norm",
) -> MtpNames:
    """Return the names of a head whose layers have all tensors.

    norm_name: the file's name of its last norm.
    """
    outer = {gguf_name: f"{layer}{name}" for gguf_name, name in _MTP_INPUT_NAMES.items()}
    outer[norm_name] = f"{layer}{norm}"
    outer["nextn.shared_head_head"] = f"{layer}{head}"
    outer["nextn.embed_tokens"] = f"{layer}embed_tokens"
    return MtpNames(layer, outer)


NUMBERED_MTP = _numbered_mtp("shared_head.head", "shared_head.norm")
STEP_MTP = _numbered_mtp("transformer.shared_head.output", "transformer.shared_head.norm")
NEMOTRON_MTP = _numbered_mtp("head", "final_layernorm", "mtp.layers.{i}.")
MIMO_MTP = _numbered_mtp("head", "final_layernorm", "model.mtp.layers.{i}.", "layer_output_norm")
QWEN_MTP = MtpNames(
    "mtp.layers.{i}.",
    {
        "nextn.eh_proj": "mtp.fc",
        "nextn.enorm": "mtp.pre_fc_norm_embedding",
        "nextn.hnorm": "mtp.pre_fc_norm_hidden",
        "nextn.shared_head_norm": "mtp.norm",
    },
)
"""Names by families of heads; `mtp_layout.MTP_FAMILIES` has the same families."""
