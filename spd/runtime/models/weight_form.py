"""In which form a model's matrices are kept, and how many bytes that takes. No torch here."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from spd.runtime.models.destinations import Destination

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BLOCK = 128
"""Rows and columns of the FP8 blocks that kernels know."""
GROUP = 16
"""Rows that share a scale in memory: a block repeats its own."""
VECTOR = 32
"""Columns that torch's int8 product reads at a time."""


@dataclass(frozen=True)
class WeightForm:
    """How the matrices of a model's layers are kept; embeddings, heads, routers and vectors never change.

    int8: rounded at load, with a scale a row; `widened` says that their values are kept in the run's dtype
    nevertheless, `vectors` that only rows of whole vectors are not. fp8: as the checkpoint stores the tensors
    named in `stored` (None: every one), with a scale a block.
    """

    kind: Literal["wide", "int8", "fp8"] = "wide"
    widened: bool = False
    vectors: bool = False
    stored: Set[str] | None = None

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

    def stays_int8(self, destination: Destination) -> bool:
        """Whether a layer's destination is kept as int8."""
        if self.kind != "int8" or self.widened or not destination.multiplied:
            return False
        return not self.vectors or destination.shape[1] % VECTOR == 0

    def bytes_of(self, destination: Destination, prefix: str, dtype: str, *, table: bool = False) -> int:
        """Bytes that a destination is kept in, scales included; table: it stands outside the layers."""
        if not table and self.stays_fp8(destination, prefix):
            groups = sum(-(-part.shape[0] // GROUP) for part in destination.parts)
            return destination.size + 4 * groups * -(-destination.shape[1] // BLOCK)
        if not table and self.stays_int8(destination):
            return destination.size + 4 * destination.shape[0]
        return destination.size * (4 if destination.exact else DTYPE_BYTES[dtype])


WIDE = WeightForm()
"""Every matrix in the run's dtype."""


def int8_form(kernels: str, on_cpu: bool, dtype: str) -> WeightForm | None:
    """How int8 rows are kept by the kernels of a form; None where they multiply wide weights only."""
    if kernels == "triton":
        return WeightForm("int8")
    return WeightForm("int8", vectors=True) if on_cpu and dtype == "bfloat16" else None
