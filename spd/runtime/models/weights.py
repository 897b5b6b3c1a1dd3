"""Names and shapes of the tensors that a decoder's checkpoint must hold. No torch here.

Tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), matrices [out, in].
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spd.formats.checkpoint import FLOAT_DTYPES, Checkpoint, check_tensors
from spd.formats.json_file import shown
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import is_mtp_tensor
from spd.formats.quantized import UNUSED
from spd.runtime.models.destinations import WHOLE, Cut, Destination, Part, Shape, Shard
from spd.runtime.models.layouts import AttentionLayout, GqaLayout, LayerLayout, RecurrentLayout

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelLayout:
    """What a family makes of a configuration: the two blocks of every layer, and what stands around them."""

    layers: tuple[LayerLayout, ...]
    centred_norm: bool = False
    """The scales of the last norm are stored as their distance from 1."""
    embedding_scale: float | None = None
    """What embeddings are multiplied by."""
    residual_scale: float = 1.0
    """What blocks add is multiplied by; the stream is kept divided by it, which norms do not see."""
    logit_scale: float = 1.0
    """What logits are multiplied by, with the scales of the last norm."""
    per_layer: tuple[int, int] | None = None
    """Of embeddings that every layer has: how many ids, and elements a layer."""
    centred_stream: bool = False
    """Norms subtract the mean: the stream is kept without one."""
    tables: Callable[[Shard], dict[str, Destination]] | None = None
    """What stands outside the layers, or a rank's part of it, where that is not a decoder's."""
    shard: Shard = WHOLE
    """The rank that has this part of the model."""
    prefix: str = "model.layers.{}."
    """What stands before the names of a layer's tensors, {} for its number."""
    shift: int = 0
    """Positions by which what a slot holds turns less than the slot's own; earlier slots hold nothing."""

    def sharded(self, shard: Shard) -> ModelLayout:
        """A rank's part. Raises IncompatibleError where there is none."""
        parts = {layer: layer.sharded(shard) for layer in dict.fromkeys(self.layers)}
        return replace(self, layers=tuple(parts[layer] for layer in self.layers), shard=shard)

    @property
    def attending(self) -> tuple[AttentionLayout, ...]:
        """The attention of every layer that has one; the sizes of heads are the same in all."""
        blocks = (layer.attention for layer in self.layers)
        return tuple(block for block in blocks if isinstance(block, AttentionLayout))

    @property
    def recurrent(self) -> tuple[RecurrentLayout, ...]:
        """What stands in place of attention in the other layers."""
        blocks = (layer.attention for layer in self.layers)
        return tuple(block for block in blocks if isinstance(block, RecurrentLayout))

    def windows(self, heads: tuple[int, int, int] | None = None) -> tuple[int | None, ...]:
        """Every sliding window of a layer, with heads of a shape or of any; None is a layer without one."""
        blocks = [block for block in self.attending if heads in (None, block.heads)]
        windows = (block.sliding if isinstance(block, GqaLayout) else None for block in blocks)
        return tuple(dict.fromkeys(windows))


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
PLAIN_NORM = "linear_attn.norm.weight"
"""Of a recurrent layer's heads: its scales are what they are, in models that store others around 1."""
FP8_DTYPE = "F8_E4M3"
"""The safetensors name of the dtype that block-scaled matrices are stored in."""


@dataclass(frozen=True)
class HeadRules:
    """What heads do differently from each other."""

    masked: int = -1
    """The slot with a zero embedding; -1 if there is none."""
    hidden_first: bool = False
    """Of token and state side by side, the state comes first."""
    recycles_normed: bool = False
    """What goes on is the layer's output after the final norm."""
    normed_residual: bool = False
    """Where attention reads both: what is added to its output is the normed state."""


@dataclass(frozen=True)
class SharedTable:
    """A table by ids that is the target's, unless the head's checkpoint holds another as `own`."""

    own: str
    rows: int
    order: Tensor | None = None
    """In which the checkpoint's rows are taken; then the table is never the target's."""


@dataclass(frozen=True)
class HeadPart:
    """One running part of a head beside its target: the layer, what surrounds it, and what it shares.

    The layout's tables are, by the names that `HeadModel` gives them, norms and matrices; `shared` are
    `embedding` and `head`, where they are not among them.
    """

    layout: ModelLayout
    rules: HeadRules
    shared: Mapping[str, SharedTable]
    ids: Tensor | None = None
    """The target's ids of the head's own, int64 and ascending; None: the same."""


def tell_unused(names: Sequence[str], folder: Path) -> None:
    """Warn of tensors that nothing reads."""
    if names:
        logger.warning("%d tensors of %s are not used, %s first", len(names), folder, shown(names[0]))


def table_destinations(config: ModelConfig, layout: ModelLayout) -> dict[str, Destination]:
    """What stands outside the layers, under its full names; a tied head is not among them."""
    if layout.tables is not None:
        return layout.tables(layout.shard)
    rows, hidden = config.vocab_size, config.hidden_size
    exact = layout.centred_norm or layout.logit_scale != 1.0
    tables = {"embedding": table_of_ids(EMBEDDING, rows, hidden, layout.shard)}
    if not config.tie_embeddings:
        tables["head"] = table_of_ids(HEAD, rows, hidden, layout.shard)
    if layout.per_layer is not None:
        ids, width = layout.per_layer
        every = len(layout.layers) * width
        shapes = {"embed_tokens_per_layer": (ids, every), "per_layer_model_projection": (every, hidden)}
        for key, shape in {**shapes, "per_layer_projection_norm": (width,)}.items():
            tables[key] = Destination.of({f"model.{key}.weight": shape})
    return {**tables, "final_norm": Destination.of({FINAL_NORM: (hidden,)}, exact=exact)}


def table_of_ids(name: str, rows: int, columns: int, shard: Shard) -> Destination:
    """A table by ids, of which each rank has its own."""
    first, end = shard.ids(rows)
    cut = None if shard.size == 1 else Cut(0, ((first, end),))
    return Destination.of({name: (end - first, columns)}, cut=cut)


def streamed_tables(config: ModelConfig, layout: ModelLayout) -> tuple[Destination, Destination]:
    """What every pass reads outside the layers: the table that makes logits, and the norm before it.

    Or a rank's part of them; the table is the embedding's where they are tied.
    """
    tables = table_destinations(config, layout)
    return tables["head"] if "head" in tables else tables["embedding"], tables["final_norm"]


def destinations(config: ModelConfig, layout: ModelLayout) -> Iterator[tuple[str, Destination]]:
    """Everything that is allocated for a model, each with the prefix of its parts' names."""
    for table in table_destinations(config, layout).values():
        yield "", table
    for index, layer in enumerate(layout.layers):
        for destination in layer.destinations():
            yield layout.prefix.format(index), destination


def parts_of(config: ModelConfig, layout: ModelLayout) -> dict[str, Part]:
    """What a model, or a rank's part of it, takes of each tensor that must be there, by its full name."""
    found = destinations(config, layout)
    return {prefix + part.name: part for prefix, destination in found for part in destination.parts}


def cuts_of(config: ModelConfig, layout: ModelLayout) -> dict[str, Cut]:
    """What a rank takes of tensors that it does not take whole."""
    return {name: part.cut for name, part in parts_of(config, layout).items() if part.cut is not None}


def expected_tensors(config: ModelConfig, layout: ModelLayout) -> dict[str, Shape]:
    """Shapes of every tensor that must be there."""
    return {name: part.shape for name, part in parts_of(config, layout).items()}


def check_weights(checkpoint: Checkpoint, config: ModelConfig, layout: ModelLayout) -> list[str]:
    """Names that the model does not use, an MTP head's left out.

    Raises one CheckpointError for everything missing, mis-shaped or stored in a dtype that cannot be read.
    """
    expected, dtypes = expected_tensors(config, layout), list(FLOAT_DTYPES)
    if config.fp8_block is not None:
        expected |= stored_scales(checkpoint, expected, config.fp8_block)
        dtypes += [FP8_DTYPE, "F8_E8M0"]
    how, kinds = config.quantization, dict[str, tuple[str, ...]]()
    if how is not None:
        expected, kinds = how.stored(expected, checkpoint.tensors)
    unexpected = check_tensors(checkpoint, expected, ignorable=is_ignorable, dtypes=dtypes, kinds=kinds)
    if how is not None:
        unexpected = [name for name in unexpected if not name.endswith(UNUSED)]
    return [name for name in unexpected if not is_mtp_tensor(name, config.num_layers)]


def is_ignorable(name: str) -> bool:
    """Tensors that older exporters wrote and no model needs: rotary tables, a tied head's copy."""
    return name.endswith("rotary_emb.inv_freq") or name == HEAD


def scale_name(name: str) -> str:
    """Where the scales of a tensor that is stored as FP8 stand."""
    return f"{name}_scale_inv"


def scale_shape(shape: Sequence[int], block: tuple[int, int]) -> Shape:
    """Scales of a matrix in blocks of (rows, columns), of which the last ones may be partial."""
    return tuple(-(-size // per) for size, per in zip(shape, block, strict=False))


def stored_scales(
    checkpoint: Checkpoint, expected: Mapping[str, Shape], block: tuple[int, int]
) -> dict[str, Shape]:
    """Names and shapes of the scales that expected tensors need which are stored as FP8."""
    return {
        scale_name(name): scale_shape(shape, block)
        for name, shape in expected.items()
        if name in checkpoint.tensors and checkpoint.tensors[name].dtype == FP8_DTYPE
    }
