"""The packed storage of a GGUF file's matrices, by the type of its blocks. No torch here.

Nothing is rounded again: codes, scales and minima are the file's, in another order in memory;
scales of six bits take a byte each. Types below four bits are dequantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spd.formats.gguf.changes import (
    Change,
    Concatenated,
    Interleaved,
    KeyHeadMajor,
    PermutedHeads,
    TiledHeads,
)
from spd.formats.gguf.tensors import StoredTensor
from spd.runtime.models.parameters import HeadTile
from spd.runtime.models.weight_forms import PackedSpec

FORMS: Mapping[str, PackedSpec] = {
    "Q4_0": PackedSpec("int4", 32, scales="float16"),
    "Q4_1": PackedSpec("int4", 32, scales="float16", minima=True),
    "Q5_0": PackedSpec("int5", 32, scales="float16"),
    "Q5_1": PackedSpec("int5", 32, scales="float16", minima=True),
    "Q8_0": PackedSpec("int8", 32, scales="float16"),
    "Q4_K": PackedSpec("int4", 32, scales="factored", minima=True),
    "Q5_K": PackedSpec("int5", 32, scales="factored", minima=True),
    "Q6_K": PackedSpec("int6", 16, scales="factored"),
    "IQ4_NL": PackedSpec("iq4", 32, scales="float16"),
    "IQ4_XS": PackedSpec("iq4", 32, scales="factored"),
    "MXFP4": PackedSpec("mx4", 32, scales="exponents"),
}
"""The storage of each type of block."""


def find_packed_specs(stored: Mapping[str, StoredTensor]) -> dict[str, PackedSpec]:
    """Return the storage of each matrix that can be stored packed, by its name."""
    specs_by_name = {}
    for name, tensor in stored.items():
        types = {part.type.name for part in tensor.parts}
        spec = FORMS.get(next(iter(types))) if len(types) == 1 else None
        if spec is None or len(tensor.shape) != 2:
            continue
        tile = find_tile(tensor)
        if tile is not None or all(map(_only_moves_rows, tensor.changes)):
            specs_by_name[name] = replace(spec, tile=tile)
    return specs_by_name


def find_tile(tensor: StoredTensor) -> HeadTile | None:
    """Return the order of columns that the converter moved, and nothing else; None for any other
    tensor.

    Columns of packed codes stay where they are: the input is permuted.
    """
    if len(tensor.changes) != 1:
        return None
    (change,) = tensor.changes
    if not isinstance(change, TiledHeads) or change.dim != 1:
        return None
    return HeadTile(change.per_key, change.width)


def _only_moves_rows(change: Change) -> bool:
    """True if a change of the converter moved whole rows, and nothing else."""
    if isinstance(change, TiledHeads):
        return change.dim == 0
    if isinstance(change, Interleaved):
        return change.dim == 1
    return isinstance(change, PermutedHeads | Concatenated | KeyHeadMajor)
