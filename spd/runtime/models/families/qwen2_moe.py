"""Qwen1.5-MoE and Qwen2-MoE: biases as Qwen2's, routed experts beside a gated shared one."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Experts where the configuration says so; layers without them are as wide as an MLP."""
    return llama.layers(config, replace(llama.attention(config), output_bias=False))
