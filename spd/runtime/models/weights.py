"""Names and shapes of the tensors that a decoder's checkpoint must hold, and the form they are kept in.

Tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), matrices [out, in]. No torch here.
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
from spd.kernels.capabilities import CODE_BITS, INT4_GROUP, SUPER_BLOCK, CodeKind
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.destinations import WHOLE, Cut, Destination, Part, Shape, Shard
from spd.runtime.models.layouts import AttentionLayout, LayerLayout, RecurrentLayout

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelLayout:
    """What a family makes of a configuration: the two blocks of every layer, and what stands around them."""

    layers: tuple[LayerLayout, ...]
    centred_norm: bool = False  # the scales of the last norm are stored as their distance from 1
    plain_norm: str = (
        "linear_attn.norm.weight"  # scales whose name ends so are what they are even then
    )
    normed_embedding: bool = False  # embeddings are normalised, without scales
    embedding_scale: float | None = None  # what embeddings are multiplied by
    residual_scale: float = (
        1.0  # of what blocks add; the stream is divided by it, which norms do not see
    )
    logit_scale: float = 1.0  # what logits are multiplied by, with the scales of the last norm
    per_layer: tuple[int, int] | None = (
        None  # of layers' own embeddings: how many ids, and elements a layer
    )
    centred_stream: bool = False  # norms subtract the mean: the stream is kept without one
    tables: Callable[[Shard], dict[str, Destination]] | None = None
    """What stands outside the layers, or a rank's part of it, where that is not a decoder's."""
    shard: Shard = WHOLE  # the rank that has this part of the model
    prefix: str = (
        "model.layers.{}."  # what stands before the names of a layer's tensors, {} for its number
    )
    shift: int = (
        0  # what a slot holds turns so many positions less than its own; earlier slots hold nothing
    )

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
        windows = (
            block.scores.sliding if isinstance(block, GqaLayout) else None for block in blocks
        )
        return tuple(dict.fromkeys(windows))


@dataclass(frozen=True)
class HeadRules:
    """What heads do differently from each other."""

    masked: int = -1  # the slot with a zero embedding; -1 if there is none
    hidden_first: bool = False  # of token and state side by side, the state comes first
    recycles_normed: bool = False  # what goes on is the layer's output after the final norm
    normed_residual: bool = (
        False  # where attention reads both: the normed state is added to its output
    )
    never: tuple[int, ...] = ()  # ids that an assistant does not draft


@dataclass(frozen=True)
class SharedTable:
    """A table by ids that is the target's, unless the head's checkpoint holds another as `own`."""

    own: str
    rows: int
    order: Tensor | None = (
        None  # in which the checkpoint's rows are taken; it is not the target's table then
    )


@dataclass(frozen=True)
class HeadPart:
    """One running part of a head beside its target: the layer, what surrounds it, and what it shares.

    The layout's tables are, by the names that `HeadModel` gives them, norms and matrices; `shared` are
    `embedding` and `head`, where they are not among them.
    """

    layout: ModelLayout
    rules: HeadRules
    shared: Mapping[str, SharedTable]
    ids: Tensor | None = (
        None  # the target's ids of the head's own, int64 and ascending; None: the same
    )


def tell_unused(names: Sequence[str], folder: Path) -> None:
    """Warn of tensors that nothing reads."""
    if names:
        logger.warning(
            "%d tensors of %s are not used, %s first", len(names), folder, display_text(names[0])
        )


def tell_notes(checkpoint: Checkpoint) -> None:
    """Warn of files and tensors that an index contradicts or does not name."""
    for note in abbreviate([*checkpoint.notes], 3):
        logger.warning("%s: %s", checkpoint.folder, note)


def table_destinations(config: ModelConfig, layout: ModelLayout) -> dict[str, Destination]:
    """What stands outside the layers, under its full names; a tied head is not among them."""
    if layout.tables is not None:
        return layout.tables(layout.shard)
    rows = config.vocab_size
    hidden = config.hidden_size
    exact = layout.centred_norm or layout.logit_scale != 1.0
    tables = {"embedding": table_of_ids(EMBEDDING, rows, hidden, layout.shard)}
    if not config.tie_embeddings:
        tables["head"] = table_of_ids(HEAD, rows, hidden, layout.shard)
    if layout.per_layer is not None:
        ids, width = layout.per_layer
        every = len(layout.layers) * width
        shapes = {
            "embed_tokens_per_layer": (ids, every),
            "per_layer_model_projection": (every, hidden),
        }
        for key, shape in {**shapes, "per_layer_projection_norm": (width,)}.items():
            tables[key] = Destination.of({f"model.{key}.weight": shape})
    return {**tables, "final_norm": Destination.of({FINAL_NORM: (hidden,)}, exact=exact)}


def table_of_ids(name: str, rows: int, columns: int, shard: Shard) -> Destination:
    """A table by ids, of which each rank has its own."""
    first, end = shard.ids(rows)
    cut = None if shard.size == 1 else Cut(0, ((first, end),))
    return Destination.of({name: (end - first, columns)}, cut=cut)


def destinations(config: ModelConfig, layout: ModelLayout) -> Iterator[tuple[str, Destination]]:
    """Everything that is allocated for a model, each with the prefix of its parts' names."""
    for table in table_destinations(config, layout).values():
        yield "", table
    for index, layer in enumerate(layout.layers):
        for destination in layer.destinations():
            yield layout.prefix.format(index), destination


def layout_bytes(config: ModelConfig, layout: ModelLayout, dtype: str, form: WeightForm) -> int:
    """Bytes of everything that is allocated for a model, in a form."""
    found = destinations(config, layout)
    return sum(form.bytes_of(each, prefix, dtype, table=not prefix) for prefix, each in found)


def parts_of(config: ModelConfig, layout: ModelLayout) -> dict[str, Part]:
    """What a model, or a rank's part of it, takes of each tensor that must be there, by its full name."""
    found = destinations(config, layout)
    return {prefix + part.name: part for prefix, destination in found for part in destination.parts}


def expected_tensors(config: ModelConfig, layout: ModelLayout) -> dict[str, Shape]:
    """Shapes of every tensor that must be there."""
    return {name: part.shape for name, part in parts_of(config, layout).items()}


def check_weights(checkpoint: Checkpoint, config: ModelConfig, layout: ModelLayout) -> list[str]:
    """Names that the model does not use, an MTP head's left out.

    Raises one CheckpointError for everything missing, mis-shaped or stored in a dtype that cannot be read.
    """
    expected = expected_tensors(config, layout)
    how = config.quantization
    kinds = dict[str, tuple[str, ...]]()
    if how is not None:
        expected, kinds = how.stored_tensors(expected, checkpoint.tensors)
    unexpected = check_tensors(checkpoint, expected, dtypes=kinds)
    if (
        config.tie_embeddings
    ):  # a head that is stored nevertheless is a copy: see `ModelFolder.config`
        unexpected = [name for name in unexpected if name != HEAD]
    if how is not None:
        unexpected = [name for name in unexpected if not name.endswith(UNUSED_SUFFIXES)]
    unused = [name for name in unexpected if not is_mtp_tensor(name, config.num_layers)]
    if unused and checkpoint.refuses_unused:
        raise checkpoint.tensor_error(unused[0], f"is not known in {config.architecture}")
    return unused


DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
STEP = 128  # columns of four bits that kernels read at a time, at most
ScaleKind = Literal["float32", "bfloat16", "float16", "exponents", "factored"]
"""What scales are kept as: numbers, exponents in a byte, or bytes with a factor of `SUPER_BLOCK` columns."""
SCALE_BYTES: Mapping[ScaleKind, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "exponents": 1,
    "factored": 1,
}
FACTOR_BYTES = 2


def part_name(name: str, part: str) -> str:
    """Of scales or zeros of a checkpoint's matrix: no tensor of a file is called so."""
    return f"{name}#{part}"


@dataclass(frozen=True)
class PackedSpec:
    """How one stored matrix is kept in codes; group: columns that share a scale, None for a whole row."""

    kind: CodeKind
    group: int | None
    zeros: bool = False  # whether there are zero points; matrices below each other need not agree
    scales: ScaleKind = "float32"
    minima: bool = False  # whether groups have minima, kept as scales are

    @property
    def paired(self) -> bool:
        """Whether two codes are in a byte."""
        return CODE_BITS[self.kind] == 4

    @property
    def beside(self) -> dict[str, int]:
        """Return what stands beside the codes, and of how many columns each number is; 0: of a group."""
        found = {"scales": 0}
        if self.zeros:
            found["zeros"] = 0
        if self.minima:
            found["minima"] = 0
        if self.scales == "factored":
            found["factors"] = SUPER_BLOCK
            if self.minima:
                found["minimum_factors"] = SUPER_BLOCK
        return found

    def bytes_of(self, rows: int, columns: int) -> int:
        """Of a matrix; codes of four bits may be kept in whole steps: two groups or `STEP` columns each."""
        groups = -(-columns // (self.group or columns))
        beside = rows * groups * (SCALE_BYTES[self.scales] * (1 + self.minima) + self.zeros)
        if self.scales == "factored":
            beside += rows * columns // SUPER_BLOCK * FACTOR_BYTES * (1 + self.minima)
        step = min(STEP, 2 * (self.group or columns))
        whole = -(-columns // step) * step if self.paired else columns
        return rows * whole * CODE_BITS[self.kind] // 8 + beside


@dataclass(frozen=True)
class WeightForm:
    """How the matrices of a model's layers are kept; embeddings, heads, routers and vectors never change.

    int8: rounded at load, with a scale a row; int4: with a scale for `INT4_GROUP` columns. widened: their
    values are kept in the run's dtype nevertheless. packed: the matrices named in `packed` as codes.
    """

    kind: Literal["wide", "int8", "int4", "packed"] = "wide"
    widened: bool = False
    packed: Mapping[str, PackedSpec] = field(default_factory=dict, hash=False)
    packs_tables: bool = False
    """Whether the embedding and the head may be among them."""

    @property
    def words(self) -> str:
        """What most of the matrices are kept in."""
        kinds = [spec.kind for spec in self.packed.values()]
        return max(dict.fromkeys(kinds), key=kinds.count, default=self.kind)

    def stays_packed(self, destination: Destination, prefix: str) -> PackedSpec | None:
        """How a destination, its parts' names below `prefix`, is kept as codes; None where it is not.

        All of its parts must be stored in the same codes and groups. A rank's columns are whole groups.
        """
        if self.kind != "packed" or not destination.multiplied or not destination.parts:
            return None
        specs = [self.packed.get(prefix + part.name) for part in destination.parts]
        first = specs[0]
        columns = destination.shape[1]
        if first is None or (first.paired and columns % 2):
            return None
        for spec, part in zip(specs, destination.parts, strict=True):
            if spec is None or (spec.kind, spec.group) != (first.kind, first.group):
                return None
            if (spec.minima, spec.scales == "factored") != (
                first.minima,
                first.scales == "factored",
            ):
                return None
            edges = (
                (edge for pair in part.cut.ranges for edge in pair)
                if part.cut and part.cut.dim
                else ()
            )
            unit = SUPER_BLOCK if spec.scales == "factored" else spec.group or 2
            if any(edge % unit for edge in edges):
                return None
        found = [spec for spec in specs if spec is not None]
        widest = max((spec.scales for spec in found), key=lambda kind: SCALE_BYTES[kind])
        return replace(first, zeros=any(spec.zeros for spec in found), scales=widest)

    def stacked(
        self, destination: Destination, prefix: str
    ) -> list[tuple[Destination, PackedSpec]]:
        """Return the pieces of a destination whose parts are kept in different codes, in order; else nothing.

        Kernels that keep tables packed multiply such pieces one by one.
        """
        found: list[tuple[Destination, PackedSpec]] = []
        if not self.packs_tables or not destination.multiplied:
            return found
        for part in destination.parts:
            spec = self.stays_packed(replace(destination, parts=(part,)), prefix)
            if spec is None:
                return []
            if found and found[-1][1] == spec:
                spec_parts = (*found.pop()[0].parts, part)
                found.append((replace(destination, parts=spec_parts), spec))
            else:
                found.append((replace(destination, parts=(part,)), spec))
        return found

    def bytes_of(
        self, destination: Destination, prefix: str, dtype: str, *, table: bool = False
    ) -> int:
        """Bytes that a destination is kept in, scales included; table: it stands outside the layers."""
        rows, *columns = destination.shape
        size = destination.size
        if not table or self.packs_tables:
            spec = self.stays_packed(destination, prefix)
            if spec is not None:
                return spec.bytes_of(*destination.shape)
            if pieces := self.stacked(destination, prefix):
                return sum(each.bytes_of(*piece.shape) for piece, each in pieces)
        if not table and destination.multiplied and not self.widened:
            if self.kind == "int4" and columns[0] % INT4_GROUP == 0:
                return PackedSpec("int4", INT4_GROUP, scales="bfloat16").bytes_of(
                    *destination.shape
                )
            if self.kind == "int8":
                return size + 4 * rows
        return size * (4 if destination.exact else DTYPE_BYTES[dtype])


WIDE = WeightForm()  # every matrix in the run's dtype


def int4_form(kernels: str, dtype: str) -> WeightForm:
    """How int4 groups are kept: wide where float16 could overflow before the norm's scales."""
    return WeightForm("int4", widened=kernels == "triton" and dtype == "float16")
