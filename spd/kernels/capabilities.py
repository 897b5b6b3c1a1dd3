"""What the three sets of kernels ask of models and rounds. Imports no torch: the plan reads it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

KernelSetName = Literal["torch", "native", "triton"]
CodeKind = Literal["int4", "int8", "e2m1", "e4m3", "int5", "int6", "iq4", "mx4"]
"""How the numbers of a weight are coded; see `linear.few_bits`."""
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
INT4_GROUP = 64  # columns that share a scale where weights are rounded to four bits at load
SUPER_BLOCK = 256
"""Columns that share a factor of scales in bytes."""


class Capabilities(NamedTuple):
    """How one set of kernels differs from the others in what its callers must do for it."""

    chunk: int
    """Positions of a whole chunk of a prompt, which is a program of its own."""
    tail_rows: int
    """The most rows of one pass over a prompt where it makes no whole chunk."""
    row_independent: bool = False
    """True if a row's bits never depend on the rows beside it, in chunks too."""
    probes_row_counts: bool = False
    """True if only a trial shows which numbers of rows give the same bits."""
    reads_no_lengths: bool = False
    """True if everything is launched without the host's knowledge of the slots' lengths."""
    folds_norms: bool = False
    """True if products take the norm before them as sums of squares, its scales folded into W."""
    float32_rotary: bool = False
    """True if cosines and sines are float32, because a rotated head is rounded once."""
    gathers_rotary: bool = False
    """True if cosines and sines are gathered for the rows, instead of read by position."""


CAPABILITIES: Mapping[str, Capabilities] = {
    "torch": Capabilities(chunk=64, tail_rows=32, probes_row_counts=True, gathers_rotary=True),
    "native": Capabilities(chunk=256, tail_rows=256, row_independent=True),
    "triton": Capabilities(
        chunk=256, tail_rows=64, reads_no_lengths=True, folds_norms=True, float32_rotary=True
    ),
}
