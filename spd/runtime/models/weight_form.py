"""In which form a model's matrices are kept, and how many bytes that takes. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from spd.runtime.models.destinations import Destination

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BLOCK = 128
"""Rows and columns of the FP8 blocks that kernels know."""
GROUP = 16
"""Rows that share a scale in memory: a block repeats its own."""
INT4_GROUP = 64
"""Columns that share a scale where weights are rounded to four bits at load."""
STEP = 128
"""Columns of four bits that kernels read at a time, at most."""
VECTOR = 32
"""Columns that torch's int8 product reads at a time."""


PARTS = ("scales", "zeros")
"""What stands beside the codes of a matrix in few bits."""


def part_name(name: str, part: str) -> str:
    """Of scales or zeros of a checkpoint's matrix: no tensor of a file is called so."""
    return f"{name}#{part}"


@dataclass(frozen=True)
class PackedSpec:
    """How one stored matrix is kept in codes; group: columns that share a scale, None for a whole row."""

    kind: Literal["int4", "int8", "e2m1", "e4m3"]
    group: int | None
    zeros: bool = False
    """Whether there are zero points; matrices below each other need not agree."""
    wide_scales: bool = True
    """Scales take float32; bfloat16 holds them else."""

    @property
    def paired(self) -> bool:
        """Whether two codes are in a byte."""
        return self.kind in ("int4", "e2m1")

    def bytes_of(self, rows: int, columns: int) -> int:
        """Of a matrix; codes of four bits may be kept in whole steps: two groups or `STEP` columns each."""
        groups = -(-columns // (self.group or columns))
        beside = rows * groups * ((4 if self.wide_scales else 2) + self.zeros)
        step = min(STEP, 2 * (self.group or columns))
        return (rows * -(-columns // step) * step // 2 if self.paired else rows * columns) + beside


@dataclass(frozen=True)
class WeightForm:
    """How the matrices of a model's layers are kept; embeddings, heads, routers and vectors never change.

    int8: rounded at load, with a scale a row; int4: with a scale for `INT4_GROUP` columns. `widened` says
    that their values are kept in the run's dtype nevertheless, `vectors` that only whole vectors are not.
    fp8: as the checkpoint stores the tensors named in `stored` (None: every one), with a scale a block.
    packed: the matrices named in `packed` as codes.
    """

    kind: Literal["wide", "int8", "int4", "fp8", "packed"] = "wide"
    widened: bool = False
    vectors: bool = False
    stored: Set[str] | None = None
    packed: Mapping[str, PackedSpec] = field(default_factory=dict, hash=False)

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
        first, columns = specs[0], destination.shape[1]
        if first is None or (first.paired and columns % 2):
            return None
        for spec, part in zip(specs, destination.parts, strict=True):
            if spec is None or (spec.kind, spec.group) != (first.kind, first.group):
                return None
            edges = (edge for pair in part.cut.ranges for edge in pair) if part.cut and part.cut.dim else ()
            if any(edge % (spec.group or 2) for edge in edges):
                return None
        found = [spec for spec in specs if spec is not None]
        zeros, wide = any(spec.zeros for spec in found), any(spec.wide_scales for spec in found)
        return PackedSpec(first.kind, first.group, zeros, wide)

    def stays_fp8(self, destination: Destination, prefix: str) -> bool:
        """Whether a destination, its parts' names below `prefix`, is kept as FP8 blocks.

        All of its parts must be stored so, and each but the last end on a whole group of rows.
        """
        if self.kind != "fp8" or not destination.multiplied:
            return False
        rows = [part.shape[0] for part in destination.parts]
        if any(count % GROUP for count in rows[:-1]):
            return False
        return self.stored is None or all(prefix + part.name in self.stored for part in destination.parts)

    def bytes_of(self, destination: Destination, prefix: str, dtype: str, *, table: bool = False) -> int:
        """Bytes that a destination is kept in, scales included; table: it stands outside the layers."""
        (rows, *columns), size = destination.shape, destination.size
        if not table and self.stays_fp8(destination, prefix):
            groups = sum(-(-part.shape[0] // GROUP) for part in destination.parts)
            return size + 4 * groups * -(-columns[0] // BLOCK)
        if not table and (spec := self.stays_packed(destination, prefix)) is not None:
            return spec.bytes_of(*destination.shape)
        if not table and destination.multiplied and not self.widened:
            if self.kind == "int4" and columns[0] % INT4_GROUP == 0:
                return PackedSpec("int4", INT4_GROUP, wide_scales=False).bytes_of(*destination.shape)
            if self.kind == "int8" and (columns[0] % VECTOR == 0 or not self.vectors):
                return size + 4 * rows
        return size * (4 if destination.exact else DTYPE_BYTES[dtype])


WIDE = WeightForm()
"""Every matrix in the run's dtype."""


def int4_form(kernels: str, dtype: str) -> WeightForm:
    """How int4 groups are kept: wide where float16 could overflow before the norm's scales."""
    return WeightForm("int4", widened=kernels == "triton" and dtype == "float16")


def int8_form(kernels: str, on_cpu: bool, dtype: str) -> WeightForm:
    """How int8 rows are kept by the kernels of a form: some multiply wide weights only."""
    narrow = kernels == "triton" or (on_cpu and dtype == "bfloat16")
    return WeightForm("int8", widened=not narrow, vectors=narrow and kernels != "triton")
