"""Architectures of GGUF files: which class of Hugging Face each one is, and in what its files differ.

Keys are those behind `ARCHITECTURE.`; names those behind `blk.N.`, without their endings where these stay the
same. Source: `convert_hf_to_gguf.py`, `gguf-py` and `llama-arch.cpp` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
"""Keys of most architectures, and Hugging Face's."""

Names = Mapping[str, str | tuple[str, ...]]
EXPERT = "mlp.experts.{e}"
NAMES: Names = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"{EXPERT}.gate_proj",
    "ffn_up_exps": f"{EXPERT}.up_proj",
    "ffn_down_exps": f"{EXPERT}.down_proj",
    "ffn_gate_up_exps": (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj"),
}
"""Names of a layer's tensors in most architectures; several below each other are one in the file."""
OUTER: Names = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""Names outside the layers."""

ChangeName = Literal["query_pairs", "key_pairs"]
TURNED: Mapping[str, ChangeName] = {"attn_q": "query_pairs", "attn_k": "key_pairs"}
"""Changes of tensors whose rows the converter orders by what turns together."""


@dataclass(frozen=True)
class GgufArchitecture:
    """How one architecture's files are read."""

    model: str
    """Its class of Hugging Face, without ForCausalLM."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys besides the usual ones, or with another meaning."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """What Hugging Face's configuration says of every such model, and no key does."""
    names: Names = field(default_factory=dict)
    """Names besides the usual ones, or with another meaning."""
    changes: Mapping[str, ChangeName] = field(default_factory=dict)
    """What the converter does to tensors, by their names without ending."""
    centred: bool = False
    """True if scales of norms are stored larger by 1 than Hugging Face's."""


_AFTER: Names = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms before and behind both blocks."""

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("Llama", changes=TURNED),
    "qwen2": GgufArchitecture("Qwen2"),
    "qwen3": GgufArchitecture("Qwen3"),
    "gemma": GgufArchitecture("Gemma", centred=True),
    "gemma2": GgufArchitecture("Gemma2", names=_AFTER, centred=True),
    "gemma3": GgufArchitecture(
        "Gemma3",
        keys={"rope.freq_base_swa": "rope_local_base_freq"},
        names=_AFTER,
        centred=True,
    ),
}
