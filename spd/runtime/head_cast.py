"""A checkpoint's tensor in another dtype, as bytes; block-scaled FP8 is multiplied out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from spd.formats.checkpoint import Checkpoint
from spd.formats.safetensors_header import TensorMeta
from spd.runtime.fp8_blocks import scale_blocks
from spd.runtime.models.weights import FP8_DTYPE, scale_name

PIECE_ROWS_BYTES = 64 << 20


def cast_pieces(
    checkpoint: Checkpoint, meta: TensorMeta, dtype: torch.dtype, block: tuple[int, int] | None
) -> Iterator[bytes]:
    """The bytes of one tensor in `dtype`, whole rows of blocks at a time. Raises CheckpointError."""
    stored = checkpoint.read(meta.name)
    scales = None
    if meta.dtype == FP8_DTYPE:
        assert block is not None
        scales = checkpoint.read(scale_name(meta.name)).float()
    width = max(1, stored.numel() // max(1, stored.shape[0])) if stored.dim() else 1
    step = max(1, PIECE_ROWS_BYTES // (4 * width))
    if block is not None:
        step = max(1, step // block[0]) * block[0]
    for first in range(0, stored.shape[0], step):
        rows = stored[first : first + step].to(torch.float32, copy=True)
        if scales is not None and block is not None:
            own = scales[first // block[0] : -(-(first + len(rows)) // block[0])]
            scale_blocks(rows, own, block)
        cast = rows.to(dtype).contiguous()
        yield ctypes.string_at(cast.data_ptr(), cast.numel() * cast.element_size())
