"""Names and shapes of the tensors that a decoder's checkpoint must have, and the form of matrices
in memory.

Tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), matrices [out, in]. No
torch here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.json_file import abbreviate, display_text
from spd.formats.model_config import ModelConfig
from spd.formats.mtp_layout import is_mtp_tensor
from spd.formats.names import EMBEDDING, FINAL_NORM, HEAD
from spd.formats.quantized import UNUSED_SUFFIXES
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.layouts import AttentionLayout, LayerLayout, RecurrentLayout
from spd.runtime.models.parameters import (
    UNSHARDED,
    Cut,
    ParameterSpec,
    Shape,
    Shard,
    SourceTensor,
)
from spd.runtime.models.weight_forms import WeightForm

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelLayout:
    """The layout of a model: the two blocks of every layer, and the parameters outside the layers."""

    layers: tuple[LayerLayout, ...]
    centred_norm: bool = False
    """True if the scales of the final norm are stored minus 1."""
    plain_norm: str = "linear_attn.norm.weight"
    """The suffix of norms whose scales are stored unchanged even then."""
    normed_embedding: bool = False
    """True if embeddings are normalised, without scales."""
    embedding_scale: float | None = None
    """The factor of embeddings."""
    residual_scale: float = 1.0
    """The factor of what blocks add.

    Here the stream is divided by it instead, which norms cancel.
    """
    logit_scale: float = 1.0
    """The factor of logits, applied to the scales of the final norm."""
    per_layer: tuple[int, int] | None = None
    """The ids of layers' own embeddings, and their elements in a layer.

    None without such embeddings.
    """
    centred_stream: bool = False
    """True if norms subtract the mean: the stream is stored with a mean of 0."""
    tables: Callable[[Shard], dict[str, ParameterSpec]] | None = None
    """The parameters outside the layers of a rank's shard, where they are not a decoder's."""
    shard: Shard = UNSHARDED
    """The rank that has this part of the model."""
    prefix: str = "model.layers.{}."
    """The prefix of the names of a layer's tensors, {} for its index."""
    shift: int = 0
    """The entry of a slot rotates by `shift` positions less than the slot's.

    Earlier slots are empty.
    """

    def sharded(self, shard: Shard) -> ModelLayout:
        """Return the layout of a rank's part.

        Raises IncompatibleError where it cannot be divided.
        """
        parts = {layer: layer.sharded(shard) for layer in dict.fromkeys(self.layers)}
        return replace(self, layers=tuple(parts[layer] for layer in self.layers), shard=shard)

    @property
    def attention_blocks(self) -> tuple[AttentionLayout, ...]:
        """Return the attention of every layer that has one.

        The sizes of heads are the same in all.
        """
        blocks = (layer.attention for layer in self.layers)
        return tuple(block for block in blocks if isinstance(block, AttentionLayout))

    @property
    def recurrent_blocks(self) -> tuple[RecurrentLayout, ...]:
        """Return the recurrent block of every layer that has one."""
        blocks = (layer.attention for layer in self.layers)
        return tuple(block for block in blocks if isinstance(block, RecurrentLayout))

    def windows(
        self, heads: tuple[int, int, int] | None = None, sees_block: bool | None = None
    ) -> tuple[int | None, ...]:
        """Return the distinct sliding windows of layers, None for layers without one.

        heads: only those of layers with this shape of heads. sees_block: only those of layers whose
        rows attend to all rows of their block, or to earlier ones.
        """
        blocks = [
            block
            for block in self.attention_blocks
            if heads in (None, block.heads) and sees_block in (None, block.sees_block)
        ]
        windows = (
            block.scores.sliding if isinstance(block, GqaLayout) else None for block in blocks
        )
        return tuple(dict.fromkeys(windows))


@dataclass(frozen=True)
class HeadRules:
    """The differences between the forward passes of heads."""

    masked_slot: int = -1
    """The slot with a zero embedding; -1 if there is none."""
    hidden_first: bool = False
    """True if the state precedes the token's embedding in their concatenation."""
    recycles_normed: bool = False
    """True if the next input state is the layer's output after the final norm."""
    normed_residual: bool = False
    """True if the normed state is added to the output of attention that reads token and state."""
    suppressed_ids: tuple[int, ...] = ()
    """The ids that an assistant does not draft."""


@dataclass(frozen=True)
class SharedTable:
    """A table by ids: the target's, unless the head's checkpoint has another as `checkpoint_name`."""

    checkpoint_name: str
    rows: int
    order: Tensor | None = None
    """The order of the checkpoint's rows; with one the table is never the target's."""
    target_ids: Tensor | None = None
    """The ids whose rows of the target's table are the table's, which the checkpoint lacks."""


@dataclass(frozen=True)
class HeadPart:
    """One part of a head: its layer, the parameters outside it, and the tables that it shares.

    The layout's tables are norms and matrices by the names that `HeadModel` reads; `shared` has
    `embedding` and `head`, where they are not among the tables. For a decoder, its layout.
    """

    layout: ModelLayout
    rules: HeadRules
    shared: Mapping[str, SharedTable]
    ids: Tensor | None = None
    """The target's id of each of the head's, int64 and ascending; None: they are the same."""


def warn_unused_tensors(names: Sequence[str], folder: Path) -> None:
    """Log a warning of tensors of a folder that no model reads; nothing where there are none."""
    if names:
        logger.warning(
            "%d tensors of %s are not used, %s first", len(names), folder, display_text(names[0])
        )


def warn_index_notes(checkpoint: Checkpoint) -> None:
    """Log a warning of files and tensors that a checkpoint's index contradicts or does not name."""
    for note in abbreviate([*checkpoint.notes], 3):
        logger.warning("%s: %s", checkpoint.folder, note)


def table_destinations(config: ModelConfig, layout: ModelLayout) -> dict[str, ParameterSpec]:
    """Return the parameters outside the layers.

    Sources have full names, and a tied head is left out.
    """
    if layout.tables is not None:
        return layout.tables(layout.shard)
    rows = config.vocab_size
    hidden = config.hidden_size

    tables = {"embedding": vocabulary_table(EMBEDDING, rows, hidden, layout.shard)}
    if not config.tie_embeddings:
        tables["head"] = vocabulary_table(HEAD, rows, hidden, layout.shard)
    if layout.per_layer is not None:
        ids, width = layout.per_layer
        total_width = len(layout.layers) * width
        shapes: dict[str, Shape] = {
            "embed_tokens_per_layer": (ids, total_width),
            "per_layer_model_projection": (total_width, hidden),
            "per_layer_projection_norm": (width,),
        }
        for key, shape in shapes.items():
            tables[key] = ParameterSpec.from_shapes({f"model.{key}.weight": shape})
    is_float32 = layout.centred_norm or layout.logit_scale != 1.0
    final_norm = ParameterSpec.from_shapes({FINAL_NORM: (hidden,)}, is_float32=is_float32)
    return {**tables, "final_norm": final_norm}


def vocabulary_table(name: str, rows: int, columns: int, shard: Shard) -> ParameterSpec:
    """Return the parameter of a table by ids; each rank has the rows of its ids."""
    first, end = shard.id_range(rows)
    cut = None if shard.size == 1 else Cut(0, ((first, end),))
    return ParameterSpec.from_shapes({name: (end - first, columns)}, cut=cut)


def iterate_parameters(
    config: ModelConfig, layout: ModelLayout
) -> Iterator[tuple[str, ParameterSpec]]:
    """Yield all parameters of a model, each with the prefix of its sources' names."""
    for table in table_destinations(config, layout).values():
        yield "", table
    for index, layer in enumerate(layout.layers):
        for parameter in layer.parameters():
            yield layout.prefix.format(index), parameter


def count_layout_bytes(
    config: ModelConfig, layout: ModelLayout, dtype: str, form: WeightForm
) -> int:
    """Return the bytes of all parameters of a model in a form."""
    return sum(
        form.count_bytes(parameter, prefix, dtype, is_table=not prefix)
        for prefix, parameter in iterate_parameters(config, layout)
    )


def source_tensors(config: ModelConfig, layout: ModelLayout) -> dict[str, SourceTensor]:
    """Return the checkpoint tensors that a model, or a rank's part of it, needs, by their full
    names.
    """
    return {
        prefix + source.name: source
        for prefix, parameter in iterate_parameters(config, layout)
        for source in parameter.sources
    }


def expected_tensors(config: ModelConfig, layout: ModelLayout) -> dict[str, Shape]:
    """Return the shapes of all checkpoint tensors that a model, or a rank's part of it, needs."""
    return {name: source.shape for name, source in source_tensors(config, layout).items()}


def check_weights(checkpoint: Checkpoint, config: ModelConfig, layout: ModelLayout) -> list[str]:
    """Check a checkpoint against a layout; return the names that it does not use, an MTP head's
    left out.

    Raises one CheckpointError for everything missing, mis-shaped or stored in a dtype that cannot
    be read.
    """
    expected = expected_tensors(config, layout)
    quantization = config.quantization
    dtypes = dict[str, tuple[str, ...]]()
    if quantization is not None:
        expected, dtypes = quantization.stored_tensors(expected, checkpoint.tensors)
    unexpected = check_tensors(checkpoint, expected, dtypes=dtypes)
    if config.tie_embeddings:
        # A head that is stored nevertheless is a copy: see `ModelFolder.config`.
        unexpected = [name for name in unexpected if name != HEAD]
    if quantization is not None:
        unexpected = [name for name in unexpected if not name.endswith(UNUSED_SUFFIXES)]
    unused = [name for name in unexpected if not is_mtp_tensor(name, config.num_layers)]
    if unused and checkpoint.refuses_unused:
        raise checkpoint.tensor_error(unused[0], f"is not known in {config.architecture}")
    return unused
