"""Names and shapes of the tensors that a decoder's checkpoint must have, and the form of matrices
in memory.

Tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), matrices [out, in]. No
torch here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.json_file import abbreviate, display_text
from spd.formats.model_config import ModelConfig
from spd.formats.mtp_layout import is_mtp_tensor
from spd.formats.names import EMBEDDING, FINAL_NORM, HEAD
from spd.formats.quantized import UNUSED_SUFFIXES
from spd.kernels.capabilities import CODE_BITS, FLOAT_CODES, INT4_GROUP, SUPER_BLOCK, CodeKind
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.layouts import AttentionLayout, LayerLayout, RecurrentLayout
from spd.runtime.models.parameters import (
    UNSHARDED,
    Cut,
    HeadTile,
    ParameterSpec,
    Shape,
    Shard,
    SourceTensor,
)

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


DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element, by its dtype."""
FOUR_BIT_STEP = 128
"""Most columns of four bits that kernels read at a time."""
ScaleKind = Literal["float32", "bfloat16", "float16", "exponents", "factored"]
"""The storage of scales: numbers, exponents in a byte, or bytes with a factor of `SUPER_BLOCK`
columns.
"""
SCALE_BYTES: Mapping[ScaleKind, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "exponents": 1,
    "factored": 1,
}
"""Bytes of a scale, by its storage."""
FACTOR_BYTES = 2
"""Bytes of a factor of scales or minima."""


def part_name(name: str, part: str) -> str:
    """Return the name of a matrix's quantization parameter; no tensor of a file has such a name."""
    return f"{name}#{part}"


@dataclass(frozen=True)
class PackedSpec:
    """The storage of a matrix in codes."""

    kind: CodeKind
    group: int | None
    """The columns that share a scale; None: all columns of a row."""
    zeros: bool = False
    """True if there are zero points; the sources of one parameter may differ in this."""
    scales: ScaleKind = "float32"
    minima: bool = False
    """True if groups have minima, stored as scales are."""
    tile: HeadTile | None = None
    """The order of columns where it is not that of the input's heads."""

    @property
    def is_paired(self) -> bool:
        """True if a byte has two codes."""
        return CODE_BITS[self.kind] == 4

    @property
    def is_blocked(self) -> bool:
        """True if it is stored as GGUF's blocks are."""
        return self.scales not in ("float32", "bfloat16")

    @property
    def columns_per_parameter(self) -> dict[str, int]:
        """Return the quantization parameters, and the columns that each number covers.

        0: a group.
        """
        columns = {"scales": 0}
        if self.zeros:
            columns["zeros"] = 0
        if self.minima:
            columns["minima"] = 0
        if self.scales == "factored":
            columns["factors"] = SUPER_BLOCK
            if self.minima:
                columns["minimum_factors"] = SUPER_BLOCK
        return columns

    def count_bytes(self, shape: Shape) -> int:
        """Return the planned bytes of a matrix of a shape (rows, columns).

        Rows that the tiles of a CPU add are not counted. Codes of four bits may be stored in full
        steps of two groups, at most `FOUR_BIT_STEP` columns; GGUF's blocks always in steps of so many
        columns.
        """
        rows, columns = shape
        if self.is_blocked:
            columns = -(-columns // FOUR_BIT_STEP) * FOUR_BIT_STEP
        groups = -(-columns // (self.group or columns))
        parameters = rows * groups * (SCALE_BYTES[self.scales] * (1 + self.minima) + self.zeros)
        if self.scales == "factored":
            parameters += rows * columns // SUPER_BLOCK * FACTOR_BYTES * (1 + self.minima)
        step = min(FOUR_BIT_STEP, 2 * (self.group or columns))
        padded_columns = -(-columns // step) * step if self.is_paired else columns
        return rows * padded_columns * CODE_BITS[self.kind] // 8 + parameters

    def has_same_codes(self, other: PackedSpec) -> bool:
        """True if one matrix can hold the codes of both: scales and zeros may differ."""
        return (self.kind, self.group, self.minima, self.scales == "factored") == (
            other.kind,
            other.group,
            other.minima,
            other.scales == "factored",
        )

    def can_cut(self, cut: Cut | None) -> bool:
        """True if a rank's cut of columns consists of complete groups."""
        if cut is None or cut.dim == 0:
            return True
        unit = SUPER_BLOCK if self.scales == "factored" else self.group or 2
        if self.tile is not None:
            unit *= self.tile.per_key
        return all(edge % unit == 0 for span in cut.ranges for edge in span)


@dataclass(frozen=True)
class WeightForm:
    """The storage of the matrices of a model's layers.

    Embeddings, heads, routers and vectors never change.

    wide: the run's dtype. int8: rounded at load, with a scale a row; int4: with a scale for
    `INT4_GROUP` columns. widened: rounded values are stored in the run's dtype nevertheless.
    packed: the matrices named in `packed` are stored in codes.
    """

    kind: Literal["wide", "int8", "int4", "packed"] = "wide"
    widened: bool = False
    packed: Mapping[str, PackedSpec] = field(default_factory=dict, hash=False)
    packs_tables: bool = False
    """True if the embedding and the head may be among the packed matrices."""
    rounds_rows: bool = False
    """True if rows are rounded to eight bits before products with integer codes."""

    @property
    def main_kind(self) -> str:
        """Return the storage of most matrices."""
        dtypes = [spec.kind for spec in self.packed.values()]
        return max(dict.fromkeys(dtypes), key=dtypes.count, default=self.kind)

    @property
    def has_integer_codes(self) -> bool:
        """True if a matrix is stored in codes that stand for whole numbers times a scale."""
        if self.kind == "packed":
            return any(spec.kind != FLOAT_CODES for spec in self.packed.values())
        return self.kind != "wide" and not self.widened

    def find_packed_spec(self, parameter: ParameterSpec, prefix: str) -> PackedSpec | None:
        """Return the storage of a parameter in codes, None where it has none.

        prefix: of its sources' names.

        All sources must have the same codes and groups. A rank's columns must be complete groups.
        """
        if self.kind != "packed" or not parameter.is_quantizable or not parameter.sources:
            return None
        specs = [
            spec
            for spec in (self.packed.get(prefix + source.name) for source in parameter.sources)
            if spec is not None
        ]
        if len(specs) < len(parameter.sources):
            return None
        first = specs[0]
        if first.is_paired and parameter.shape[1] % 2:
            return None
        for spec, source in zip(specs, parameter.sources, strict=True):
            if not spec.has_same_codes(first) or not spec.can_cut(source.cut):
                return None
        largest = max((spec.scales for spec in specs), key=lambda kind: SCALE_BYTES[kind])
        return replace(first, zeros=any(spec.zeros for spec in specs), scales=largest)

    def split_by_spec(
        self, parameter: ParameterSpec, prefix: str
    ) -> list[tuple[ParameterSpec, PackedSpec]]:
        """Return the pieces of a parameter whose sources have different codes, in order, or no
        pieces.

        Backends that pack tables multiply such pieces one by one.
        """
        pieces: list[tuple[ParameterSpec, PackedSpec]] = []
        if not self.packs_tables or not parameter.is_quantizable or parameter.is_stacked:
            return pieces
        for source in parameter.sources:
            piece = replace(parameter, sources=(source,))
            spec = self.find_packed_spec(piece, prefix)
            if spec is None:
                return []
            if pieces and pieces[-1][1] == spec:
                sources = (*pieces.pop()[0].sources, source)
                piece = replace(parameter, sources=sources)
            pieces.append((piece, spec))
        return pieces

    def count_bytes(
        self, parameter: ParameterSpec, prefix: str, dtype: str, *, is_table: bool = False
    ) -> int:
        """Return the bytes of a parameter, scales included; is_table: it is outside the layers."""
        rows, *columns = parameter.shape
        size = parameter.size
        if not is_table or self.packs_tables:
            spec = self.find_packed_spec(parameter, prefix)
            if spec is not None:
                return spec.count_bytes(parameter.shape)
            if pieces := self.split_by_spec(parameter, prefix):
                return sum(spec.count_bytes(piece.shape) for piece, spec in pieces)
        if not is_table and parameter.is_quantizable and not self.widened:
            if self.kind == "int4" and columns[0] % INT4_GROUP == 0:
                int4 = PackedSpec("int4", INT4_GROUP, scales="bfloat16")
                return int4.count_bytes(parameter.shape)
            if self.kind == "int8":
                return size + 4 * rows
        return size * (4 if parameter.is_float32 else DTYPE_BYTES[dtype])


WIDE = WeightForm()
"""All matrices in the run's dtype."""


def int4_form(kernels: str, dtype: str) -> WeightForm:
    """Return the form of int4 groups: widened where float16 could overflow before the norm's
    scales.
    """
    return WeightForm("int4", widened=kernels == "triton" and dtype == "float16")
