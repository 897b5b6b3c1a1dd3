"""Families whose layers are Llama's but for a few facts: a function each."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.block_config import DeltaConfig
from spd.formats.model_config import ModelConfig
from spd.formats.rope_config import RotaryDims
from spd.runtime.models.families import llama
from spd.runtime.models.layouts import LayerLayout, MoeLayout, NoLayout
from spd.runtime.models.recurrent_layouts import ScanLayout
from spd.runtime.models.weights import ModelLayout


def qwen2(config: ModelConfig) -> ModelLayout:
    """Qwen2, Qwen2.5, dense or with routed experts, and MiMo-7B: queries, keys and values have a bias."""
    return llama.layers(config, replace(llama.attention(config), qkv_bias=True, output_bias=False))


def qwen3(config: ModelConfig) -> ModelLayout:
    """Qwen3, dense or with routed experts: queries and keys are normalised per head, then rotated."""
    return llama.layers(config, replace(llama.attention(config), qk_norm=True))


def glm4_moe(config: ModelConfig) -> ModelLayout:
    """GLM-4.5, 4.6, with experts as DeepSeek-V3's, and Seed-OSS: the output has no bias."""
    attention = replace(llama.attention(config), output_bias=False, qk_norm=config.qk_norm)
    return llama.layers(config, attention)


def qwen3_5(config: ModelConfig) -> ModelLayout:
    """Qwen3-Next, Qwen3.5, 3.6, 3.8: gated DeltaNet layers, and every few layers attention with gated output.

    Source: `qwen3_next` and `qwen3_5` of Hugging Face transformers 5, and the published checkpoints.
    """
    attention = replace(llama.attention(config), qk_norm=True, centred_norms=True, gated=True)
    mlp = replace(llama.mlp(config), centred_norms=True)
    return replace(llama.layers(config, attention, mlp), centred_norm=True)


def lfm2(config: ModelConfig) -> ModelLayout:
    """LFM2 and 2.5, dense or with routed experts: short convolutions, and between them attention."""
    names = ("q_layernorm", "k_layernorm")
    return llama.layers(config, replace(llama.attention(config), qk_norm=True, head_norms=names))


def granite_hybrid(config: ModelConfig) -> ModelLayout:
    """Granite 4 hybrids, dense or with routed experts: Mamba-2 layers, and every few layers attention."""
    mlp = replace(llama.mlp(config), block="mlp.shared_mlp", fused_gate_up=True)
    return llama.layers(config, llama.attention(config), mlp)


def nemotron_h(config: ModelConfig) -> ModelLayout:
    """Nemotron-H and Nano 2 and 3: a block a layer, Mamba-2, attention without positions, MLP or experts."""
    facts, hidden, nothing = config.recurrent, config.hidden_size, NoLayout()
    assert isinstance(facts, DeltaConfig)
    scan = ScanLayout(hidden, facts, config.rms_norm_eps, pre_norm="norm")
    attention = replace(llama.attention(config), still=True, pre_norm="norm")
    made = {
        "linear_attention": LayerLayout(scan, nothing),
        "full_attention": LayerLayout(attention, nothing),
        "mlp": LayerLayout(nothing, replace(llama.mlp(config), plain=True, pre_norm="norm")),
    }
    if config.experts is not None:
        made["moe"] = LayerLayout(nothing, MoeLayout(hidden, config.experts, pre_norm="norm"))
    return ModelLayout(tuple(made[kind] for kind in facts.single))


def gpt_oss(config: ModelConfig) -> ModelLayout:
    """gpt-oss: heads with sinks, every other layer slides, routed experts with biases and clamped gates."""
    return llama.layers(config, replace(llama.attention(config), sinks=True))


def ernie4_5(config: ModelConfig) -> ModelLayout:
    """ERNIE-4.5, dense or with routed experts: elements 2i and 2i + 1 of a head turn together."""
    return llama.layers(config, replace(llama.attention(config), rotary=_interleaved(config)))


def _interleaved(config: ModelConfig) -> RotaryDims:
    return RotaryDims(config.head_dim, config.rotary_dim or config.head_dim, interleaved=True)


def hunyuan(config: ModelConfig) -> ModelLayout:
    """Hunyuan dense (0.5B to 7B): queries and keys are normalised per head after they are rotated."""
    names = ("query_layernorm", "key_layernorm")
    attention = replace(llama.attention(config), qk_norm=True, late_norms=True, head_norms=names)
    return llama.layers(config, attention)


def phi3(config: ModelConfig) -> ModelLayout:
    """Phi-3, Phi-3.5 and Phi-4 (dense): projections are fused in the checkpoint too."""
    attention = replace(llama.attention(config), fused_qkv=True)
    return llama.layers(config, attention, replace(llama.mlp(config), fused_gate_up=True))


def olmo3(config: ModelConfig) -> ModelLayout:
    """Olmo 3 and EXAONE 4: norms behind the blocks only; one over all heads together, or one a head."""
    whole = config.architecture == "Olmo3ForCausalLM"
    attention = replace(llama.attention(config), whole_norms=whole, qk_norm=not whole)
    attention = replace(attention, pre_norm=None, post_norm="post_attention_layernorm")
    mlp = replace(llama.mlp(config), pre_norm=None, post_norm="post_feedforward_layernorm")
    return llama.layers(config, attention, mlp)


def glm4(config: ModelConfig) -> ModelLayout:
    """GLM-4 (0414, dense): half of each head rotates in interleaved pairs, norms behind the blocks too."""
    norm = "post_self_attn_layernorm"
    attention = replace(
        llama.attention(config), rotary=_interleaved(config), output_bias=False, post_norm=norm
    )
    mlp = replace(llama.mlp(config), fused_gate_up=True, post_norm="post_mlp_layernorm")
    return llama.layers(config, attention, mlp)


def cohere2(config: ModelConfig) -> ModelLayout:
    """Command R7B and Command A (Cohere 2): both blocks read one norm, which subtracts the mean.

    The stream is kept without a mean, so that this is a root-mean-square norm. Layers that slide turn in
    interleaved pairs, those that see everything do not turn.
    """
    attention = replace(llama.attention(config), rotary=_interleaved(config), centred_output=True)
    mlp = replace(llama.mlp(config), pre_norm=None, centred_output=True)
    made = llama.layers(config, attention, mlp)
    layers = tuple(replace(layer, parallel=True) for layer in made.layers)
    return replace(made, layers=layers, centred_stream=True)
