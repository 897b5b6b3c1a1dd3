"""A GGUF file's tensors multiplied out, and what the converter did to them undone.

`spd.formats.gguf.changes` describes what it did. Values are float32, equal to ggml's reference; they are
rounded once, where they are written.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.formats.gguf import changes as did
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
            elif not stored.changes:
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
    for change in stored.changes:
        parts = [undone(change, parts)]
    return parts[0].reshape(stored.shape)


def undone(change: did.Change, parts: list[Tensor]) -> Tensor:
    """Return what the converter changed as it was before; parts: what it made of one tensor."""
    values = parts[0]
    if isinstance(change, did.HeadPairs):
        pairs = values.view(change.heads, -1, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)
    if isinstance(change, did.Shifted):
        return values - 1
    if isinstance(change, did.Decay):
        return (-values.double()).log().float()
    if isinstance(change, did.TiledHeads):
        return _by_keys(change, values)
    if isinstance(change, did.Below):
        return torch.cat(parts)
    if isinstance(change, did.Interleaved):
        return torch.stack(parts, dim=change.dim)
    if isinstance(change, did.LatentHeads):
        return torch.cat((values.transpose(1, 2), parts[1]), dim=1)
    return _key_head_major(change, *parts)


def _by_keys(change: did.TiledHeads, values: Tensor) -> Tensor:
    """Return value heads key by key, which stand tiled along a dimension behind `first`."""
    tiled = values.transpose(0, change.dim)
    kept = tiled[: change.first]
    moved = tiled[change.first :]
    heads = moved.reshape(change.per_key, change.keys, change.width, *moved.shape[1:])
    found = torch.cat((kept, heads.transpose(0, 1).reshape(moved.shape)))
    return found.transpose(0, change.dim)


def _key_head_major(change: did.KeyHeadMajor, mixed: Tensor, gates: Tensor) -> Tensor:
    """Return queries, keys, values and gates [rows, hidden] of each key head below each other."""
    keys = change.keys * change.key_dim
    pieces = (mixed[:keys], mixed[keys : 2 * keys], mixed[2 * keys :], gates)
    per_head = [each.reshape(change.keys, -1, mixed.shape[1]) for each in pieces]
    return torch.cat(per_head, dim=1)


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
