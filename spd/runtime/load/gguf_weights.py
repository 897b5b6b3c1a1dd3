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
from spd.kernels.linear.few_bits import QUANT_PARAMETERS, pack_nibbles
from spd.runtime.load.gguf_blocks import VALUES
from spd.runtime.load.gguf_codes import PARTS
from spd.runtime.load.progress import LoadMeter
from spd.runtime.models.builder import Fill
from spd.runtime.models.destinations import Cut, Cuts
from spd.runtime.models.weights import part_name

STRIP = 1 << 22
"""Elements that are multiplied out at a time: each takes some twenty bytes meanwhile."""


def gguf_fill(checkpoint: GgufCheckpoint, meter: LoadMeter, cuts: Cuts) -> Fill:
    """Fill tensors with their values, or of those in `cuts` a part."""

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            owner, _, part = name.partition("#")
            if part:  # written with the codes
                continue
            stored = checkpoint.stored[owner]
            cut = cuts.get(name)
            if view.dtype == torch.uint8:
                beside = {each: views.get(part_name(name, each)) for each in QUANT_PARAMETERS}
                _write_codes(checkpoint, stored, view, beside, cut)
            elif cut is not None:
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
    if isinstance(change, did.PermutedHeads):
        pairs = values.view(change.heads, -1, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)
    if isinstance(change, did.ShiftedNorm):
        return values - 1
    if isinstance(change, did.NegatedExp):
        return (-values.double()).log().float()
    if isinstance(change, did.TiledHeads):
        return _by_keys(change, values)
    if isinstance(change, did.Concatenated):
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


def _write_codes(
    checkpoint: GgufCheckpoint,
    stored: StoredTensor,
    view: Tensor,
    beside: Mapping[str, Tensor | None],
    cut: Cut | None,
) -> None:
    """Write a matrix as codes into a view, and what stands beside them into others, or a rank's part of it.

    Where the converter moved rows, they are moved back.
    """
    order = None
    if stored.changes:
        order = _row_order(stored)
    elif cut is not None and cut.dim == 0:
        order = torch.cat([torch.arange(*pair) for pair in cut.ranges])
    if stored.changes and cut is not None and cut.dim == 0:
        order = torch.cat(cut.of(order))
    columns = None
    if cut is not None and cut.dim == 1:
        columns = cut
    whole = {name: torch.cat(parts) for name, parts in _taken_apart(checkpoint, stored).items()}
    width = whole["codes"].shape[1]
    for name, part in whole.items():
        target = view if name == "codes" else beside[name]
        assert target is not None
        rows = part if order is None else part[order]
        if columns is not None:
            each = width // part.shape[1]
            ranges = tuple((first // each, end // each) for first, end in columns.ranges)
            rows = torch.cat(Cut(1, ranges).of(rows), dim=1)
        is_paired = name == "codes" and target.shape[1] != rows.shape[1]
        target.copy_(pack_nibbles(rows) if is_paired else rows)


def _row_order(stored: StoredTensor) -> Tensor:
    """Return which row of the file's parts, counted together, each row of a matrix is: int64 [rows]."""
    first = 0
    parts = []
    for part in stored.parts:
        parts.append(torch.arange(first, first + part.shape[0]).view(-1, 1))
        first += part.shape[0]
    for change in stored.changes:
        parts = [undone(change, parts)]
    return parts[0].flatten()


def _taken_apart(checkpoint: GgufCheckpoint, stored: StoredTensor) -> dict[str, list[Tensor]]:
    """Return strips of codes [rows, K], and of what stands beside them, of all parts of a matrix."""
    found: dict[str, list[Tensor]] = {}
    for part in stored.parts:
        rows, columns = part.shape
        step = max(1, STRIP // columns)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            blocks = checkpoint.read_rows(part, first, count).view(-1, part.type.nbytes)
            for name, numbers in PARTS[part.type.name](blocks).items():
                found.setdefault(name, []).append(numbers.reshape(count, -1))
    return found


def _multiply_out(checkpoint: GgufCheckpoint, part: GgufTensor, view: Tensor) -> None:
    """Write a part's values into a view of as many elements, some rows at a time."""
    columns = part.shape[-1]
    rows = view.view(-1, columns)
    step = max(1, STRIP // columns)
    for first in range(0, len(rows), step):
        strip = rows[first : first + step]
        stored = checkpoint.read_rows(part, first, len(strip)).to(view.device)
        blocks = stored.view(-1, part.type.nbytes)
        strip.copy_(VALUES[part.type.name](blocks).view(len(strip), columns))
