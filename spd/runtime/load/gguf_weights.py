"""A GGUF file's tensors multiplied out, and what the converter did to them undone.

`spd.formats.gguf.changes` describes what it did. Values are float32, equal to ggml's reference; they are
rounded once, where they are written.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.formats.gguf.changes import Change, HeadPairs, Shifted
from spd.formats.gguf.container import GgufTensor
from spd.formats.gguf.model import GgufCheckpoint
from spd.formats.gguf.tensors import StoredTensor
from spd.runtime.load.gguf_blocks import VALUES
from spd.runtime.load.progress import LoadMeter
from spd.runtime.models.builder import Fill
from spd.runtime.models.destinations import Cuts

STRIP = 1 << 22
"""Elements that are multiplied out at a time: each takes some twenty bytes meanwhile."""


def gguf_fill(checkpoint: GgufCheckpoint, meter: LoadMeter, cuts: Cuts) -> Fill:
    """Fill tensors with their values, or of those in `cuts` a part."""

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            stored = checkpoint.stored[name]
            cut = cuts.get(name)
            if cut is not None:
                whole = meant(checkpoint, stored)
                view.copy_(torch.cat(cut.of(whole), cut.dim))
            elif stored.change is None:
                _multiply_out(checkpoint, stored.parts[0], view)
            else:
                view.copy_(meant(checkpoint, stored))
            meter.advance(view.nbytes)

    return fill


def read_values(checkpoint: Checkpoint, name: str, rows: tuple[int, int] | None = None) -> Tensor:
    """Return a tensor of a folder as it is stored, or one of a GGUF file in float32, or some of its rows."""
    if not isinstance(checkpoint, GgufCheckpoint):
        return checkpoint.read(name, rows)
    whole = meant(checkpoint, checkpoint.stored[checkpoint.meta(name).name])
    return whole if rows is None else whole[rows[0] : rows[1]]


def meant(checkpoint: GgufCheckpoint, stored: StoredTensor) -> Tensor:
    """Return the values that a tensor had before it was converted: float32, of its shape there."""
    parts = []
    for part in stored.parts:
        values = torch.empty(part.shape)
        _multiply_out(checkpoint, part, values)
        parts.append(values)
    return undone(stored.change, parts).reshape(stored.shape)


def undone(change: Change | None, parts: list[Tensor]) -> Tensor:
    """Return what the converter changed as it was before."""
    values = parts[0]
    if isinstance(change, HeadPairs):
        pairs = values.view(change.heads, -1, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)
    if isinstance(change, Shifted):
        return values - 1
    return values


def _multiply_out(checkpoint: GgufCheckpoint, part: GgufTensor, view: Tensor) -> None:
    """Write a part's values into a view of as many elements, some rows at a time."""
    columns = part.shape[-1]
    rows = view.view(-1, columns)
    step = max(1, STRIP // columns)
    for first in range(0, len(rows), step):
        strip = rows[first : first + step]
        stored = checkpoint.blocks(part, first, len(strip)).to(view.device)
        blocks = stored.view(-1, part.type.nbytes)
        strip.copy_(VALUES[part.type.name](blocks).view(len(strip), columns))
