"""Where chunks of a checkpoint land on their way to the device: rings of buffers and the copies out.

A ring belongs to one thread. On CUDA its buffers are pinned and its copies run on a stream of its own,
with one event a buffer; a buffer is free again after its event.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BUFFERS = 2
"""Buffers a ring: one is read into while the other one is copied."""


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one tensor: `nbytes` of `dtype` at `begin` of a buffer, for `target` [n]."""

    begin: int
    nbytes: int
    dtype: torch.dtype
    target: Tensor


@dataclass(frozen=True)
class Chunk:
    """Consecutive bytes of one file, scattered over one buffer."""

    shard: Path
    offset: int
    pieces: tuple[Piece, ...]

    @property
    def end(self) -> int:
        """Bytes of the buffer that it needs."""
        return self.pieces[-1].begin + self.pieces[-1].nbytes


class Lane:
    """One thread's ring of buffers, and the copies out of them: plain memory here, copied at once."""

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.buffers = [
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS if nbytes else 0)
        ]
        # Not Tensor.numpy: torch may have been installed without NumPy.
        self._views = [
            memoryview((ctypes.c_ubyte * nbytes).from_address(buffer.data_ptr())).cast("B")
            for buffer in self.buffers
        ]

    def view(self, index: int, piece: Piece) -> memoryview:
        """Where a piece's bytes are read to."""
        return self._views[index][piece.begin : piece.begin + piece.nbytes]

    def source(self, index: int, piece: Piece) -> Tensor:
        """A piece's elements in a buffer, [n]."""
        return self.buffers[index][piece.begin : piece.begin + piece.nbytes].view(piece.dtype)

    def wait(self, index: int) -> None:
        """Return when a buffer may be written again."""

    def copy(self, index: int, pieces: Sequence[Piece]) -> None:
        """Start copying what a buffer holds to where it belongs."""
        for piece in pieces:
            piece.target.copy_(self.source(index, piece))

    def finish(self) -> None:
        """Return when everything has been copied."""


class CudaLane(Lane):
    """Pinned buffers, a stream of its own, and one event a buffer; casts by way of device memory.

    The copies begin after `ready`, which stands behind the allocation of the destinations.
    """

    def __init__(self, nbytes: int, device: torch.device, ready: torch.cuda.Event, casts: bool) -> None:
        super().__init__(nbytes, pinned=True)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(ready)
        self._copied = [torch.cuda.Event() for _ in self.buffers]  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._staging = torch.empty(nbytes if casts else 0, dtype=torch.uint8, device=device)

    def wait(self, index: int) -> None:
        """See `Lane`."""
        self._copied[index].synchronize()

    def copy(self, index: int, pieces: Sequence[Piece]) -> None:
        """See `Lane`."""
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                source = self.source(index, piece)
                if piece.dtype != piece.target.dtype:  # else copy_ would cast on the host, and wait
                    staged = self._staging[piece.begin : piece.begin + piece.nbytes].view(piece.dtype)
                    source = staged.copy_(source, non_blocking=True)
                piece.target.copy_(source, non_blocking=True)
            self._copied[index].record(self._stream)

    def finish(self) -> None:
        """See `Lane`."""
        self._stream.synchronize()
