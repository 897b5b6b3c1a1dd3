"""Phi-3, Phi-3.5 and Phi-4 (dense): projections fused in the checkpoint too; a part of a head may turn."""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Every layer alike."""
    attention = replace(llama.attention(config), fused_qkv=True)
    return llama.layers(config, attention, replace(llama.mlp(config), fused_gate_up=True))
