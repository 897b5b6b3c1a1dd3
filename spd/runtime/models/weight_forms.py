"""The form of matrices in memory: the run's dtype, or codes that are stored or made at load.

No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from spd.formats.model_config import ModelConfig
from spd.formats.names import EMBEDDING, HEAD
from spd.kernels.capabilities import CODE_BITS, FLOAT_CODES, ROUNDING_GROUP, SUPER_BLOCK, CodeKind
from spd.runtime.models.parameters import Cut, HeadTile, ParameterSpec, Shape, SourceTensor

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


def rounded_kinds(config: ModelConfig) -> dict[str, CodeKind]:
    """Return the codes to which `--quantize int4` rounds matrices, by the ends of their names; ""
    stands for all others.

    Those whose rounding changes a text most for their bytes have more bits. So have all matrices
    of narrow models, as llama.cpp's mixtures have where its blocks do not divide rows.
    """
    is_narrow = config.hidden_size % SUPER_BLOCK > 0
    most: CodeKind = "int5" if is_narrow else "iq4"
    kinds: dict[str, CodeKind] = {
        "down_proj.weight": "int6" if is_narrow else "int5",
        "v_proj.weight": "int6",
        "kv_b_proj.weight": "int8",
        EMBEDDING: "int6" if config.tie_embeddings else most,
        HEAD: "int6",
    }
    if is_narrow:  # one form in their matrix, for a product by two of them takes twice the calls
        kinds |= {"q_proj.weight": "int6", "k_proj.weight": "int6"}
    return kinds | {"": most}


def rounded_spec(columns: int, kind: CodeKind) -> PackedSpec | None:
    """Return the storage of a matrix that is rounded at load, None where groups do not divide its
    rows."""
    if columns % ROUNDING_GROUP:
        return None
    return PackedSpec(kind, ROUNDING_GROUP, scales="float16")


@dataclass(frozen=True)
class WeightForm:
    """The storage of the matrices of a model's layers.

    Routers and vectors never change.

    wide: the run's dtype. int8: matrices of layers are rounded at load, with a scale a row; int4:
    those and the tables, to the codes in `rounded`. widened: rounded values are stored in the run's
    dtype nevertheless. packed: the matrices named in `packed` are stored in codes.
    """

    kind: Literal["wide", "int8", "int4", "packed"] = "wide"
    widened: bool = False
    packed: Mapping[str, PackedSpec] = field(default_factory=dict, hash=False)
    rounded: Mapping[str, CodeKind] = field(default_factory=dict, hash=False)
    """See `rounded_kinds`."""
    packs_tables: bool = False
    """True if the embedding and the head may be stored in codes."""
    stacks_pieces: bool = False
    """True if a matrix may be a stack of pieces whose codes differ."""
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

    def packs_embedding(self, config: ModelConfig) -> bool:
        """True if a model's embedding is stored in codes."""
        is_rounded = bool(self.rounded) and config.hidden_size % ROUNDING_GROUP == 0
        is_packed = EMBEDDING in self.packed or (is_rounded and not self.widened)
        return self.packs_tables and is_packed

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

    def find_rounded_specs(
        self, parameter: ParameterSpec, *, is_table: bool = False
    ) -> list[tuple[SourceTensor, PackedSpec]]:
        """Return the sources of a parameter that `--quantize int4` rounds, with their storage; none
        where it rounds none.

        is_table: it is outside the layers.
        """
        if not self.rounded or len(parameter.shape) != 2 or parameter.is_float32:
            return []
        if is_table and not parameter.is_vocabulary:
            return []
        specs = []
        for source in parameter.sources:
            ends = (end for end in self.rounded if source.name.endswith(end))
            spec = rounded_spec(parameter.shape[1], self.rounded[next(ends)])
            if spec is not None:
                specs.append((source, spec))
        return specs

    def rounds_to_codes(self, parameter: ParameterSpec, *, is_table: bool = False) -> bool:
        """True if a parameter that is rounded at load is stored in codes."""
        is_possible = parameter.is_quantizable and not self.widened
        return is_possible and (self.packs_tables or not is_table)

    def split_by_spec(
        self, parameter: ParameterSpec, prefix: str
    ) -> list[tuple[ParameterSpec, PackedSpec]]:
        """Return the pieces of a parameter whose sources have different codes, in order, or no
        pieces.

        Kernels other than torch's multiply such pieces one by one.
        """
        pieces: list[tuple[ParameterSpec, PackedSpec]] = []
        if not self.stacks_pieces or not parameter.is_quantizable or parameter.is_stacked:
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
        size = parameter.size
        if not is_table or self.packs_tables:
            spec = self.find_packed_spec(parameter, prefix)
            if spec is not None:
                return spec.count_bytes(parameter.shape)
            if pieces := self.split_by_spec(parameter, prefix):
                return sum(spec.count_bytes(piece.shape) for piece, spec in pieces)
        rounded = self.find_rounded_specs(parameter, is_table=is_table)
        if rounded and self.rounds_to_codes(parameter, is_table=is_table):
            return sum(spec.count_bytes(source.shape) for source, spec in rounded)
        if self.kind == "int8" and not is_table and parameter.is_quantizable:
            return size + 4 * parameter.shape[0]
        return size * (4 if parameter.is_float32 else DTYPE_BYTES[dtype])


WIDE = WeightForm()
"""All matrices in the run's dtype."""


def int4_form(config: ModelConfig, kernels: str, dtype: str, tp: int) -> WeightForm:
    """Return the form of a model's weights that `--quantize int4` rounds.

    They are widened where float16 could overflow before the norm's scales.
    """
    form = codes_form("int4", kernels, tp)
    widened = kernels == "triton" and dtype == "float16"
    return replace(form, widened=widened, rounded=rounded_kinds(config))


def codes_form(kind: Literal["int4", "packed"], kernels: str, tp: int) -> WeightForm:
    """Return a form of codes.

    Torch's kernels multiply one form in a matrix, and read no rows of tables in codes, which ranks
    do not divide.
    """
    stacks = kernels != "torch"
    return WeightForm(kind, packs_tables=stacks and tp == 1, stacks_pieces=stacks)
