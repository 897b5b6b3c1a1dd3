"""Dequantizes a GGUF file's tensors, and undoes the changes of its converter.

`spd.formats.gguf.changes` describes the changes. Values are float32, equal to ggml's reference;
they are rounded once, where they are written.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.formats.gguf import changes
from spd.formats.gguf.container import GgufTensor
from spd.formats.gguf.model import GgufCheckpoint
from spd.formats.gguf.tensors import StoredTensor
from spd.kernels.linear.few_bits import QUANT_PARAMETERS, pack_nibbles
from spd.runtime.load.gguf_blocks import DEQUANTIZERS
from spd.runtime.load.gguf_codes import SPLITTERS
from spd.runtime.load.progress import LoadMeter
from spd.runtime.models.allocator import TensorFiller
from spd.runtime.models.gguf_forms import find_tile
from spd.runtime.models.parameters import Cut, Cuts
from spd.runtime.models.weight_forms import part_name

STRIP_ELEMENTS = 1 << 22
"""Elements that are dequantized at a time: each takes about twenty bytes of temporary memory."""


def make_gguf_filler(checkpoint: GgufCheckpoint, meter: LoadMeter, cuts: Cuts) -> TensorFiller:
    """Return a function that fills views with a GGUF file's tensors, or with the parts in `cuts`.

    Views of uint8 get codes, others values. Each tensor is reported to `meter`.
    """

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            tensor_name, _, part = name.partition("#")
            if part:
                # Quantization parameters are written with the codes.
                continue
            stored = checkpoint.stored[tensor_name]
            cut = cuts.get(name)
            if view.dtype == torch.uint8:
                parameters = {part: views.get(part_name(name, part)) for part in QUANT_PARAMETERS}
                _write_codes(
                    checkpoint=checkpoint, stored=stored, view=view, parameters=parameters, cut=cut
                )
            elif cut is not None:
                values = read_original_values(checkpoint, stored)
                view.copy_(torch.cat(cut.slices(values), cut.dim))
            elif not stored.changes:
                _dequantize_into(checkpoint, stored.parts[0], view)
            else:
                view.copy_(read_original_values(checkpoint, stored))
            meter.advance(view.nbytes)

    return fill


def read_values(checkpoint: Checkpoint, name: str, rows: tuple[int, int] | None = None) -> Tensor:
    """Read a tensor of a checkpoint as it is stored, or of a GGUF file dequantized to float32.

    rows: the first row and the end of those that are returned; None: all.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        return checkpoint.read(name, rows)
    values = read_original_values(checkpoint, checkpoint.stored[checkpoint.meta(name).name])
    return values if rows is None else values[rows[0] : rows[1]]


def read_original_values(checkpoint: GgufCheckpoint, stored: StoredTensor) -> Tensor:
    """Read a tensor of a GGUF file, dequantize it and undo its conversion: float32, in the original
    shape.
    """
    parts = []
    for part in stored.parts:
        values = torch.empty(part.shape)
        _dequantize_into(checkpoint, part, values)
        parts.append(values)
    for change in stored.changes:
        parts = [undo_change(change, parts)]
    return parts[0].reshape(stored.shape)


def undo_change(change: changes.Change, parts: list[Tensor]) -> Tensor:
    """Return a tensor as it was before a change of the converter.

    parts: the tensors that the change gave.
    """
    values = parts[0]
    if isinstance(change, changes.PermutedHeads):
        pairs = values.view(change.heads, -1, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)
    if isinstance(change, changes.ShiftedNorm):
        return values - 1
    if isinstance(change, changes.NegatedExp):
        return (-values.double()).log().float()
    if isinstance(change, changes.TiledHeads):
        return _untile_heads(change, values)
    if isinstance(change, changes.Concatenated):
        return torch.cat(parts)
    if isinstance(change, changes.Interleaved):
        return torch.stack(parts, dim=change.dim)
    if isinstance(change, changes.LatentHeads):
        return torch.cat((values.transpose(1, 2), parts[1]), dim=1)
    return _join_key_heads(change, values, parts[1])


def _untile_heads(change: changes.TiledHeads, values: Tensor) -> Tensor:
    """Return value heads grouped by key head.

    They are stored tiled along a dimension, from `first` on.
    """
    tiled = values.transpose(0, change.dim)
    unchanged = tiled[: change.first]
    moved = tiled[change.first :]
    heads = moved.reshape(change.per_key, change.keys, change.width, *moved.shape[1:])
    grouped = torch.cat((unchanged, heads.transpose(0, 1).reshape(moved.shape)))
    return grouped.transpose(0, change.dim)


def _join_key_heads(change: changes.KeyHeadMajor, mixed: Tensor, gates: Tensor) -> Tensor:
    """Return queries, keys, values and gates [rows, hidden], key head by key head."""
    keys = change.keys * change.key_dim
    pieces = (mixed[:keys], mixed[keys : 2 * keys], mixed[2 * keys :], gates)
    per_head = [piece.reshape(change.keys, -1, mixed.shape[1]) for piece in pieces]
    return torch.cat(per_head, dim=1)


def _write_codes(
    checkpoint: GgufCheckpoint,
    stored: StoredTensor,
    view: Tensor,
    parameters: Mapping[str, Tensor | None],
    cut: Cut | None,
) -> None:
    """Write a matrix, or a rank's part of it, as codes into a view, and its quantization
    parameters.

    Rows that the converter moved are moved back, columns are not.
    """
    tile = find_tile(stored)
    order = _original_row_order(stored) if stored.changes and tile is None else None
    columns = None
    if cut is not None and cut.dim == 1:
        columns = cut if tile is None else tile.stored_cut(cut, stored.shape[1])
    elif cut is not None and order is not None:
        order = torch.cat(cut.slices(order))
    elif cut is not None:
        order = torch.cat([torch.arange(first, end) for first, end in cut.ranges])
    tensors = {
        name: torch.cat(strips) for name, strips in _read_code_strips(checkpoint, stored).items()
    }
    width = tensors["codes"].shape[1]
    for name, tensor in tensors.items():
        target = view if name == "codes" else parameters[name]
        assert target is not None
        rows = tensor if order is None else tensor[order]
        if columns is not None:
            span = width // tensor.shape[1]
            ranges = tuple((first // span, end // span) for first, end in columns.ranges)
            rows = torch.cat(Cut(1, ranges).slices(rows), dim=1)
        is_paired = name == "codes" and target.shape[1] != rows.shape[1]
        target.copy_(pack_nibbles(rows) if is_paired else rows)


def _original_row_order(stored: StoredTensor) -> Tensor:
    """Return, for each row of the original matrix, its row in the file's concatenated parts: int64
    [rows].
    """
    first = 0
    parts = []
    for part in stored.parts:
        parts.append(torch.arange(first, first + part.shape[0]).view(-1, 1))
        first += part.shape[0]
    for change in stored.changes:
        parts = [undo_change(change, parts)]
    return parts[0].flatten()


def _read_code_strips(checkpoint: GgufCheckpoint, stored: StoredTensor) -> dict[str, list[Tensor]]:
    """Read all parts of a matrix as strips of codes [rows, K] and of quantization parameters, by
    name.
    """
    strips: dict[str, list[Tensor]] = {}
    for part in stored.parts:
        rows, columns = part.shape
        step = max(1, STRIP_ELEMENTS // columns)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            blocks = checkpoint.read_rows(part, first, count).view(-1, part.type.nbytes)
            for name, numbers in SPLITTERS[part.type.name](blocks).items():
                strips.setdefault(name, []).append(numbers.reshape(count, -1))
    return strips


def _dequantize_into(checkpoint: GgufCheckpoint, part: GgufTensor, view: Tensor) -> None:
    """Read and dequantize a part, and write its values into a view of as many elements, by rows."""
    columns = part.shape[-1]
    rows = view.view(-1, columns)
    step = max(1, STRIP_ELEMENTS // columns)
    for first in range(0, len(rows), step):
        strip = rows[first : first + step]
        stored = checkpoint.read_rows(part, first, len(strip)).to(view.device)
        blocks = stored.view(-1, part.type.nbytes)
        strip.copy_(DEQUANTIZERS[part.type.name](blocks).view(len(strip), columns))
