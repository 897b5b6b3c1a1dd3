"""Fills tensors from a checkpoint's files: threads read into buffers, from which the device copies.

While one buffer is copied to the device on its own stream, the next ones are read, with the
interpreter's lock released. A buffer is read into again only after the event that follows its
copies. Where the destination is a CUDA device buffers are pinned, and dtypes are converted there.
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
"""Bytes of a buffer."""
READ_THREADS = 6
"""Threads that read."""
BUFFERS_A_THREAD = 2
"""Buffers of each thread: little pinned memory, and enough to fill the bus."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive elements of one tensor: `nbytes` of `dtype` at `offset` of a file, for `target`
    [n].
    """

    shard: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    target: Tensor


class Buffer:
    """Memory that chunks are read into and copied from: here plain memory, copied synchronously."""

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        # Not Tensor.numpy: torch may have been installed without NumPy.
        array = (ctypes.c_ubyte * nbytes).from_address(self._bytes.data_ptr())
        self.view = memoryview(array).cast("B")

    def elements(self, chunk: Chunk) -> Tensor:
        """Return a chunk's elements [n], after its bytes were read."""
        return self._bytes[: chunk.nbytes].view(chunk.dtype)

    def wait_for_copies(self) -> None:
        """Wait until all copies have finished, so that the buffer may be written again."""

    def start_copy(self, chunk: Chunk) -> None:
        """Copy a chunk, which has been read into this buffer, to its target."""
        chunk.target.copy_(self.elements(chunk))


class PinnedBuffer(Buffer):
    """A pinned buffer, which casts in device memory.

    Copies begin after the event `ready`, when destinations are allocated.
    """

    def __init__(
        self, nbytes: int, device: torch.device, ready: torch.cuda.Event, casts: bool
    ) -> None:
        super().__init__(nbytes, pinned=True)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(ready)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._staging = torch.empty(nbytes if casts else 0, dtype=torch.uint8, device=device)

    def wait_for_copies(self) -> None:
        """Wait until all copies have finished."""
        self._copied.synchronize()

    def start_copy(self, chunk: Chunk) -> None:
        """Start copying a chunk to its target, on the buffer's stream; `wait_for_copies` waits."""
        with torch.cuda.stream(self._stream):
            source = self.elements(chunk)
            if chunk.dtype != chunk.target.dtype:
                # copy_ would cast on the host, and wait.
                staged = self._staging[: chunk.nbytes].view(chunk.dtype)
                source = staged.copy_(source, non_blocking=True)
            chunk.target.copy_(source, non_blocking=True)
            self._copied.record(self._stream)


def plan_chunks(
    checkpoint: Checkpoint, destinations: Mapping[str, Tensor], chunk_bytes: int = CHUNK_BYTES
) -> list[Chunk]:
    """Divide the bytes that the destinations need into chunks, ordered by file and offset.

    A destination is a contiguous tensor of as many elements as the tensor of its name, in any float
    dtype.
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
    threads: int = READ_THREADS,
    chunk_bytes: int = CHUNK_BYTES,
    buffer: Callable[[int], Buffer] | None = None,
) -> None:
    """Fill every destination, all on one device, from the checkpoint's tensor of its name; return
    when all copies have finished.

    advance: called in the caller's thread with a chunk's destination bytes, after it was read.
    buffer: makes a buffer of a size. After a CheckpointError destinations are undefined, and all
    copies have finished.
    """
    chunks = plan_chunks(checkpoint, destinations, chunk_bytes)
    if not chunks:
        return
    device = chunks[0].target.device
    threads = min(threads, len(chunks))
    make_buffer = buffer or _choose_buffer_maker(device, chunks)
    size = max(chunk.nbytes for chunk in chunks)
    buffers = [make_buffer(size) for _ in range(threads * BUFFERS_A_THREAD)]
    free = queue.SimpleQueue[Buffer]()
    for chunk_buffer in buffers:
        free.put(chunk_buffer)

    def read(chunk: Chunk) -> int:
        """Read a chunk into a free buffer, and start its copy; return the bytes of its target."""
        chunk_buffer = free.get()
        device_context = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        try:
            with torch.inference_mode(), device_context:
                chunk_buffer.wait_for_copies()
                view = chunk_buffer.view[: chunk.nbytes]
                read_exactly(files[chunk.shard], view, chunk.offset, chunk.shard)
                chunk_buffer.start_copy(chunk)
        finally:
            free.put(chunk_buffer)
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
        # No thread outlives the call, even if it was interrupted.
        pool.shutdown(cancel_futures=True)
        for chunk_buffer in buffers:
            chunk_buffer.wait_for_copies()
    checkpoint.check_unchanged()


def _choose_buffer_maker(device: torch.device, chunks: Sequence[Chunk]) -> Callable[[int], Buffer]:
    """Return the function that makes a buffer of a number of bytes for copies to a device."""
    if device.type != "cuda":
        return Buffer
    casts = any(chunk.dtype != chunk.target.dtype for chunk in chunks)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(device))
    return lambda nbytes: PinnedBuffer(nbytes, device, ready, casts)
