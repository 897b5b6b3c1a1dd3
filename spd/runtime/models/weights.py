"""Names and shapes of the tensors that a decoder's checkpoint must hold. No torch here.

Tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), matrices [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spd.formats.model_config import ModelConfig
from spd.runtime.models.layouts import Destination, LayerLayout


@dataclass(frozen=True)
class ModelLayout:
    """What a family makes of a configuration: the two blocks of every layer."""

    layers: tuple[LayerLayout, ...]


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """The name under which a layer's tensors stand."""
    return f"model.layers.{layer}."


def table_destinations(config: ModelConfig) -> dict[str, Destination]:
    """What stands outside the layers, under its full names; a tied head is not among them."""
    table = (config.vocab_size, config.hidden_size)
    tables = {"embedding": Destination.of({EMBEDDING: table})}
    if not config.tie_embeddings:
        tables["head"] = Destination.of({HEAD: table})
    return {**tables, "final_norm": Destination.of({FINAL_NORM: table[1:]})}


def destinations(config: ModelConfig, layout: ModelLayout) -> Iterator[tuple[str, Destination]]:
    """Everything that is allocated for a model, each with the prefix of its parts' names."""
    for table in table_destinations(config).values():
        yield "", table
    for index, layer in enumerate(layout.layers):
        for destination in layer.destinations():
            yield layer_prefix(index), destination


def expected_tensors(config: ModelConfig, layout: ModelLayout) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor that must be there."""
    return {
        prefix + name: shape
        for prefix, destination in destinations(config, layout)
        for name, shape in destination.parts
    }


def is_ignorable(name: str) -> bool:
    """Tensors that older exporters wrote and nobody needs: rotary tables, a tied head's copy."""
    return name.endswith("rotary_emb.inv_freq") or name == HEAD
