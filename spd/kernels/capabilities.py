"""What each set of kernels requires of its callers. Imports no torch: the plan reads it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

KernelSetName = Literal["torch", "native", "triton"]
CodeKind = Literal["int4", "int8", "e2m1", "e4m3", "int5", "int6", "iq4", "mx4"]
"""The number formats of a weight in codes; see `linear.few_bits`."""
CODE_BITS: Mapping[CodeKind, int] = {
    "int4": 4,
    "int8": 8,
    "e2m1": 4,
    "e4m3": 8,
    "int5": 5,
    "int6": 6,
    "iq4": 4,
    "mx4": 4,
}
FLOAT_CODES: CodeKind = "e4m3"
"""The kind whose codes are not whole numbers times a scale."""
ROUNDING_GROUP = 32
"""Columns that share a scale where weights are rounded to four to six bits at load."""
SUPER_BLOCK = 256
"""Columns that share one float16 factor, where scales are bytes."""


class Capabilities(NamedTuple):
    """What callers must do for one set of kernels."""

    chunk: int
    """Positions of a full prompt chunk, which has a program of its own."""
    tail_rows: int
    """The maximum of rows in a pass over the end of a prompt that fills no chunk."""
    row_independent: bool = False
    """True if a row's bits never depend on the other rows of its pass, in chunks too."""
    probes_row_counts: bool = False
    """True if only a trial shows which numbers of rows give the same bits."""
    reads_no_lengths: bool = False
    """True if all launches are independent of the slots' lengths, which the host need not know."""
    folds_norms: bool = False
    """True if a product applies the norm before it by sums of squares, with its scales folded into
    W."""
    float32_rotary: bool = False
    """True if cosines and sines are float32, because a rotated head is rounded once."""
    gathers_rotary: bool = False
    """True if cosines and sines are gathered for the rows, instead of read by position."""
    rotates_in_attention: bool = False
    """True if windows are rotated, stored and attended by one kernel."""


CAPABILITIES: Mapping[str, Capabilities] = {
    "torch": Capabilities(chunk=64, tail_rows=32, probes_row_counts=True, gathers_rotary=True),
    "native": Capabilities(chunk=256, tail_rows=256, row_independent=True),
    "triton": Capabilities(
        chunk=256,
        tail_rows=64,
        reads_no_lengths=True,
        folds_norms=True,
        float32_rotary=True,
        rotates_in_attention=True,
    ),
}
