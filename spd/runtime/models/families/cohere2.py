"""Command R7B and Command A (Cohere 2): both blocks read one norm, which subtracts the mean; scaled logits.

The stream is kept without a mean, so that this norm is a root-mean-square norm.
"""

from __future__ import annotations

from dataclasses import replace

from spd.formats.model_config import ModelConfig
from spd.formats.rope_config import RotaryDims
from spd.runtime.models.families import llama
from spd.runtime.models.weights import ModelLayout


def layout(config: ModelConfig) -> ModelLayout:
    """Layers that slide turn in interleaved pairs, those that see everything do not turn."""
    rotary = RotaryDims(config.head_dim, config.head_dim, interleaved=True)
    attention = replace(llama.attention(config), rotary=rotary, centred_output=True)
    mlp = replace(llama.mlp(config), pre_norm=None, centred_output=True)
    made = llama.layers(config, attention, mlp)
    layers = tuple(replace(layer, parallel=True) for layer in made.layers)
    return replace(made, layers=layers, centred_stream=True)
