"""What `config.json` says of layers that keep a state or the latest inputs, beside those of `block_config`.

Source: the configurations of `lfm2` and `lfm2_moe` in Hugging Face transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from spd.formats.block_config import KINDS, MAX_TAPS, MAX_WIDTH, listed_kinds
from spd.formats.json_file import Fields


@dataclass(frozen=True)
class ConvConfig:
    """Short convolutions between two gates, and which layers they are."""

    kernel: int  # inputs that the convolution sees
    layers: tuple[bool, ...]


def lfm2_keys(fields: Fields) -> dict[str, object]:
    """What `lfm2` says in keys of its own: a width of which the MLP is made, and tables that are one."""
    key = "block_ff_dim" if "block_ff_dim" in fields else "intermediate_size"
    inner = fields.integer(key, 1, MAX_WIDTH)
    if fields.boolean("block_auto_adjust_ff_dim", False):
        step = fields.integer("block_multiple_of", 1, MAX_WIDTH, 256)
        inner = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * int(2 * inner / 3))
        inner = -(-inner // step) * step
    tied = fields.boolean("tie_embedding", fields.boolean("tie_word_embeddings", True))
    return {"intermediate_size": inner, "tie_word_embeddings": tied}


def read_conv(fields: Fields, num_layers: int) -> ConvConfig:
    """Of `lfm2`: the layers' kinds, or the numbers of those that attend."""
    key, known = "layer_types", (KINDS[0], "conv")
    layers = listed_kinds(fields, num_layers, known, key)
    if layers is None:
        key = "full_attn_idxs"
        attending = fields.integers(key, 0, num_layers - 1)
        layers = [layer not in attending for layer in range(num_layers)]
    fields.require(not all(layers), key, f"no layer is {KINDS[0]}: convolutions alone are not supported")
    fields.require(not fields.boolean("conv_bias", False), "conv_bias", "true is not supported")
    return ConvConfig(fields.integer("conv_L_cache", 2, MAX_TAPS, 3), tuple(layers))
