"""Fills tensors from a checkpoint's files: threads read into buffers, the device copies out.

While one buffer is copied to the device on a stream of its own, the next ones are read, with the
interpreter's lock released. A buffer is read into again only after the event behind its copies. Buffers are
pinned where the destination is a CUDA device; a dtype is changed there too.
"""

from __future__ import annotations

import ctypes
import os
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spd.formats.checkpoint import TORCH_NAMES, Checkpoint, read_exactly

CHUNK_BYTES = 16 * 2**20
# so many buffers each: little pinned memory, and enough to fill the bus
THREADS = 6
BUFFERS = 2


@dataclass(frozen=True)
class Chunk:
    """Consecutive elements of one tensor: `nbytes` of `dtype` at `offset` of a file, for `target` [n]."""

    shard: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    target: Tensor


class Buffer:
    """Memory that chunks are read to, and the copies out of it: plain here, copied at once."""

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        # Not Tensor.numpy: torch may have been installed without NumPy.
        self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(self._bytes.data_ptr())).cast(
            "B"
        )

    def elements(self, chunk: Chunk) -> Tensor:
        """A chunk's elements after its bytes were read, [n]."""
        return self._bytes[: chunk.nbytes].view(chunk.dtype)

    def wait(self) -> None:
        """Return when what was copied has arrived, so that the buffer may be written again."""

    def copy(self, chunk: Chunk) -> None:
        """Start copying a chunk to where it belongs."""
        chunk.target.copy_(self.elements(chunk))


class PinnedBuffer(Buffer):
    """Pinned; casts by way of device memory. Copies begin after `ready`: destinations are allocated."""

    def __init__(
        self, nbytes: int, device: torch.device, ready: torch.cuda.Event, casts: bool
    ) -> None:
        super().__init__(nbytes, pinned=True)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(ready)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._staging = torch.empty(nbytes if casts else 0, dtype=torch.uint8, device=device)

    def wait(self) -> None:
        self._copied.synchronize()

    def copy(self, chunk: Chunk) -> None:
        with torch.cuda.stream(self._stream):
            source = self.elements(chunk)
            if chunk.dtype != chunk.target.dtype:  # else copy_ would cast on the host, and wait
                staged = self._staging[: chunk.nbytes].view(chunk.dtype)
                source = staged.copy_(source, non_blocking=True)
            chunk.target.copy_(source, non_blocking=True)
            self._copied.record(self._stream)


def plan_chunks(
    checkpoint: Checkpoint, destinations: Mapping[str, Tensor], chunk_bytes: int = CHUNK_BYTES
) -> list[Chunk]:
    """Cut what the destinations need into chunks, ordered by file and offset.

    A destination is a contiguous tensor of as many elements as its namesake, both in any float dtype.
    """
    chunks = []
    for name, view in destinations.items():
        meta = checkpoint.meta(name)
        dtype: torch.dtype = getattr(torch, TORCH_NAMES[meta.dtype])
        if meta.nbytes != view.numel() * dtype.itemsize or not view.is_contiguous():
            raise ValueError(f"{name}: {list(meta.shape)} cannot fill {list(view.shape)}")
        offset = meta.offset
        for part in torch.split(view.view(-1), max(1, chunk_bytes // dtype.itemsize)):
            nbytes = part.numel() * dtype.itemsize
            if nbytes:
                chunks.append(Chunk(meta.shard, offset, nbytes, dtype, part))
            offset += nbytes
    return sorted(chunks, key=lambda chunk: (chunk.shard, chunk.offset))


def read_tensors(
    checkpoint: Checkpoint,
    destinations: Mapping[str, Tensor],
    *,
    advance: Callable[[int], None] = lambda nbytes: None,
    threads: int = THREADS,
    chunk_bytes: int = CHUNK_BYTES,
    buffer: Callable[[int], Buffer] | None = None,
) -> None:
    """Fill every destination from its namesake; all on one device. Returns when the bytes are there.

    `advance` hears, in the caller's thread, of destination bytes as their chunks are read. `buffer` makes
    one. After a CheckpointError destinations are undefined, and nothing is copied any more.
    """
    chunks = plan_chunks(checkpoint, destinations, chunk_bytes)
    if not chunks:
        return
    device = chunks[0].target.device
    threads = min(threads, len(chunks))
    make = buffer or _buffer_for(device, chunks)
    size = max(chunk.nbytes for chunk in chunks)
    buffers = [make(size) for _ in range(threads * BUFFERS)]
    free = queue.SimpleQueue[Buffer]()
    for each in buffers:
        free.put(each)

    def read(chunk: Chunk) -> int:
        own = free.get()
        where = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        try:
            with torch.inference_mode(), where:
                own.wait()
                read_exactly(
                    files[chunk.shard], own.view[: chunk.nbytes], chunk.offset, chunk.shard
                )
                own.copy(chunk)
        finally:
            free.put(own)
        return chunk.target.nbytes

    files = {shard: checkpoint.open_shard(shard) for shard in {chunk.shard for chunk in chunks}}
    if hasattr(os, "posix_fadvise"):
        for descriptor in files.values():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    pool = ThreadPoolExecutor(threads, "spd-read")
    try:
        for nbytes in pool.map(read, chunks):
            advance(nbytes)
    finally:
        pool.shutdown(
            cancel_futures=True
        )  # also if the caller was interrupted: no thread outlives it
        for each in buffers:
            each.wait()
    checkpoint.check_unchanged()


def _buffer_for(device: torch.device, chunks: Sequence[Chunk]) -> Callable[[int], Buffer]:
    if device.type != "cuda":
        return Buffer
    casts = any(chunk.dtype != chunk.target.dtype for chunk in chunks)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(device))
    return lambda nbytes: PinnedBuffer(nbytes, device, ready, casts)
