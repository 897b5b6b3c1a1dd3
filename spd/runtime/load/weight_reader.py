"""Fills tensors from a checkpoint's files: threads read into rings of buffers, the device copies out.

Each thread owns a ring: while one buffer is copied to the device on the thread's own stream, the next
is read, with the interpreter's lock released. A buffer is read into again only after the event behind
its copies. Buffers are pinned where the destination is a CUDA device; a dtype is changed there too.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spd.errors import CheckpointError
from spd.formats.checkpoint import TORCH_NAMES, Checkpoint, TensorMeta, read_exactly
from spd.formats.json_file import shown

BUFFERS = 2
"""Buffers a ring: one is read into while the other one is copied."""
CHUNK_BYTES = 16 * 2**20
THREADS = 6
"""6 threads x 2 buffers x 16 MiB are pinned: little enough not to be felt, enough to fill the bus."""
DTYPES = {
    code: dtype for code, name in TORCH_NAMES.items() if (dtype := getattr(torch, name)).is_floating_point
}


@dataclass(frozen=True)
class Chunk:
    """Consecutive elements of one tensor: `nbytes` of `dtype` at `offset` of a file, for `target` [n]."""

    shard: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    target: Tensor


class Lane:
    """One thread's ring of buffers, and the copies out of them: plain memory here, copied at once."""

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)]
        # Not Tensor.numpy: torch may have been installed without NumPy.
        self._views = [
            memoryview((ctypes.c_ubyte * nbytes).from_address(buffer.data_ptr())).cast("B")
            for buffer in self.buffers
        ]

    def view(self, index: int, chunk: Chunk) -> memoryview:
        """Where a chunk's bytes are read to."""
        return self._views[index][: chunk.nbytes]

    def source(self, index: int, chunk: Chunk) -> Tensor:
        """A chunk's elements in a buffer, [n]."""
        return self.buffers[index][: chunk.nbytes].view(chunk.dtype)

    def wait(self, index: int) -> None:
        """Return when a buffer may be written again."""

    def copy(self, index: int, chunk: Chunk) -> None:
        """Start copying what a buffer holds to where it belongs."""
        chunk.target.copy_(self.source(index, chunk))

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
        self._copied[index].synchronize()

    def copy(self, index: int, chunk: Chunk) -> None:
        with torch.cuda.stream(self._stream):
            source = self.source(index, chunk)
            if chunk.dtype != chunk.target.dtype:  # else copy_ would cast on the host, and wait
                staged = self._staging[: chunk.nbytes].view(chunk.dtype)
                source = staged.copy_(source, non_blocking=True)
            chunk.target.copy_(source, non_blocking=True)
            self._copied[index].record(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()


def plan_chunks(
    tensors: Mapping[str, TensorMeta], destinations: Mapping[str, Tensor], chunk_bytes: int = CHUNK_BYTES
) -> list[Chunk]:
    """Cut what the destinations need into chunks, ordered by file and offset.

    A destination is a contiguous tensor of as many elements as its namesake in the checkpoint, in any
    float dtype. Empty tensors need no chunk. Raises CheckpointError for what is not there or no float.
    """
    chunks = []
    for name, view in destinations.items():
        if (meta := tensors.get(name)) is None:
            raise CheckpointError(f"tensor {shown(name)}: is not in this checkpoint")
        if (dtype := DTYPES.get(meta.dtype)) is None:
            why = f"dtype {meta.dtype} is not supported here"
            raise CheckpointError(f"{meta.shard}: tensor {shown(name)}: {why}")
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
    advance: Callable[[int], None] | None = None,
    threads: int = THREADS,
    chunk_bytes: int = CHUNK_BYTES,
    lane: Callable[[int], Lane] | None = None,
) -> None:
    """Fill every destination from its namesake; all on one device. Returns when the bytes are there.

    `advance` hears, in the caller's thread, of destination bytes as their chunks are read. `lane` makes a
    thread's ring. Raises CheckpointError naming the file for whatever goes wrong with it, a change while
    it was read included; destinations are then undefined, and nothing is copied any more.
    """
    chunks = deque(plan_chunks(checkpoint.tensors, destinations, chunk_bytes))
    if not chunks:
        return
    device = chunks[0].target.device
    make = lane or _lane_for(device, chunks)
    size, count = max(chunk.nbytes for chunk in chunks), min(threads, len(chunks))
    files: dict[Path, int] = {}
    stopping, news = threading.Event(), queue.SimpleQueue[int | None]()  # bytes of a chunk; None is an end

    def read() -> None:
        where = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        try:
            with torch.inference_mode(), where:
                _read_chunks(chunks, files, make(size), stopping, news.put)
        except BaseException:
            stopping.set()  # the other threads are of no use now
            raise
        finally:
            news.put(None)

    with ExitStack() as opened, ThreadPoolExecutor(count, "spd-read") as pool:
        for shard in dict.fromkeys(chunk.shard for chunk in chunks):
            files[shard] = opened.enter_context(checkpoint.open_shard(shard)).fileno()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(files[shard], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        try:
            readers = [pool.submit(read) for _ in range(count)]
            for _ in readers:
                for nbytes in iter(news.get, None):
                    if advance is not None:
                        advance(nbytes)
        finally:
            stopping.set()  # also if the caller was interrupted: every thread ends with this call
        for reader in readers:
            reader.result()
    checkpoint.check_unchanged()


def _read_chunks(
    chunks: deque[Chunk],
    files: Mapping[Path, int],
    lane: Lane,
    stopping: threading.Event,
    tell: Callable[[int], None],
) -> None:
    """Read chunks through a lane until none is left, or until `stopping`; `tell` hears their bytes."""
    index = 0
    try:
        while not stopping.is_set():
            try:
                chunk = chunks.popleft()
            except IndexError:
                break
            lane.wait(index)
            read_exactly(files[chunk.shard], [lane.view(index, chunk)], chunk.offset, chunk.shard)
            lane.copy(index, chunk)
            tell(chunk.target.nbytes)
            index = (index + 1) % BUFFERS
    finally:
        lane.finish()  # before the buffers, or after an error the destinations, are given back


def _lane_for(device: torch.device, chunks: Sequence[Chunk]) -> Callable[[int], Lane]:
    if device.type != "cuda":
        return Lane
    casts = any(chunk.dtype != chunk.target.dtype for chunk in chunks)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(device))
    return lambda nbytes: CudaLane(nbytes, device, ready, casts)
