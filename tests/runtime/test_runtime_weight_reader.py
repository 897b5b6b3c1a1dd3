"""The threaded reader against plain reads: dtypes, odd offsets, chunks, faults, reuse of buffers."""

import errno
import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from spd.errors import CheckpointError
from spd.formats.checkpoint import TORCH_NAMES, Checkpoint
from spd.runtime.load.weight_reader import (
    BUFFERS_A_THREAD,
    Buffer,
    Chunk,
    plan_chunks,
    read_tensors,
)
from tests.helpers import Patch

CODES = {getattr(torch, name): code for code, name in TORCH_NAMES.items()}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Tensors = dict[str, Tensor]
preadv = os.preadv


def write_shard(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file in the order of `tensors`, unaligned: the header's length is odd."""
    header = {}
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.itemsize
        where = {"shape": list(tensor.shape), "data_offsets": [end, end + size]}
        header[name] = {"dtype": CODES[tensor.dtype], **where}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    data = [
        tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values() if tensor.numel()
    ]
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


MIXED = {"a": random(3, dtype=torch.bfloat16), "b": random(5, 7, seed=1)}
MIXED |= {
    "c": random(1, dtype=torch.float16, seed=2),
    "unused": random(3, dtype=torch.bfloat16, seed=3),
}
MIXED |= {"d": random(11, 3, dtype=torch.float64, seed=4), "empty": torch.empty(0, 4)}
MIXED |= {"e": random(1000, dtype=torch.bfloat16, seed=5)}


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Checkpoint]:
    """Yield a checkpoint of two files and several dtypes."""
    write_shard(tmp_path / "model-1.safetensors", MIXED)
    write_shard(tmp_path / "model-2.safetensors", {"f": random(40, 10, seed=6)})
    weight_map = dict.fromkeys(MIXED, "model-1.safetensors") | {"f": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with Checkpoint.open(tmp_path) as checkpoint:
        yield checkpoint


def destinations(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensors:
    """Return memory filled with NaN for all tensors but `unused`."""
    shapes = {name: meta.shape for name, meta in checkpoint.tensors.items() if name != "unused"}
    return {
        name: torch.full(shape, torch.nan, dtype=dtype, device=device)
        for name, shape in shapes.items()
    }


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("spd-read")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_bytes", [64, 100, 1000, 2**20])
@pytest.mark.parametrize("dtype", [dtype for dtype in CODES if dtype.is_floating_point], ids=str)
def test_every_dtype_arrives_as_cast(
    mixed: Checkpoint, dtype: Any, chunk_bytes: int, device: str
) -> None:
    views = destinations(mixed, dtype, device)
    read_tensors(mixed, views, threads=3, chunk_bytes=chunk_bytes)
    for name, view in views.items():
        assert torch.equal(view.cpu(), mixed.read(name).to(dtype)), name


@pytest.mark.parametrize("device", DEVICES)
def test_parts_land_in_the_rows_of_a_fused_matrix(tmp_path: Path, device: str) -> None:
    parts = {name: random(rows, 33, seed=rows) for name, rows in (("k", 5), ("q", 64), ("v", 1))}
    fused = torch.full((70, 33), float("nan"), dtype=torch.bfloat16, device=device)
    write_shard(tmp_path / "model.safetensors", parts)
    with Checkpoint.open(tmp_path) as checkpoint:
        read_tensors(
            checkpoint, {"q": fused[:64], "k": fused[64:69], "v": fused[69:]}, chunk_bytes=1024
        )
    expected = torch.cat((parts["q"], parts["k"], parts["v"])).to(torch.bfloat16)
    assert torch.equal(fused.cpu(), expected)


@pytest.mark.parametrize("chunk_bytes", [8, 72, 333, 2**16])
def test_chunks_cover_every_element_once_in_order(mixed: Checkpoint, chunk_bytes: int) -> None:
    views = destinations(mixed)
    chunks = plan_chunks(mixed, views, chunk_bytes)
    places = [(chunk.shard, chunk.offset) for chunk in chunks]
    assert places == sorted(places) and len(set(places)) == len(places)
    for view in views.values():
        view.fill_(0)
    for chunk in chunks:
        assert 0 < chunk.nbytes == chunk.target.numel() * chunk.dtype.itemsize <= chunk_bytes
        chunk.target.add_(1)
        following = [
            other for other in chunks if other.shard == chunk.shard and other.offset > chunk.offset
        ]
        assert not following or chunk.offset + chunk.nbytes <= min(
            other.offset for other in following
        )
    assert all(bool((view == 1).all()) for view in views.values())


class LateBuffer(Buffer):
    """A buffer that copies as late as allowed: reading into it too early would change the result."""

    due: Chunk | None = None
    was_used = False

    def wait_for_copies(self) -> None:
        if self.due is not None:
            super().start_copy(self.due)
        self.due = None

    def start_copy(self, chunk: Chunk) -> None:
        """Keep the chunk until the buffer is waited for."""
        assert self.due is None
        self.due = chunk
        self.was_used = True


@pytest.mark.parametrize("threads", [1, 4])
def test_a_buffer_is_reused_only_after_its_copies(mixed: Checkpoint, threads: int) -> None:
    views = destinations(mixed)
    buffers = list[LateBuffer]()

    def make(nbytes: int) -> LateBuffer:
        buffers.append(LateBuffer(nbytes))
        return buffers[-1]

    read_tensors(mixed, views, threads=threads, chunk_bytes=128, buffer=make)
    assert all(torch.equal(view, mixed.read(name).float()) for name, view in views.items())
    assert [buffer.was_used for buffer in buffers] == [True] * (threads * BUFFERS_A_THREAD)


def test_short_reads_are_continued(mixed: Checkpoint, monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        os, "preadv", lambda file, views, offset: preadv(file, [views[0][:7]], offset)
    )
    views = destinations(mixed)
    read_tensors(mixed, views, chunk_bytes=512)
    assert all(torch.equal(view, mixed.read(name).float()) for name, view in views.items())


@pytest.mark.parametrize(("threads", "failing"), [(1, 1), (1, 5), (3, 1)])
def test_an_error_of_the_disk_names_the_file(
    mixed: Checkpoint, monkeypatch: Patch, threads: int, failing: int
) -> None:
    """The error names the file, and all threads stop."""
    calls = []

    def read(file: int, views: Any, offset: int) -> int:
        """Read as `preadv` does; fail at one of the calls."""
        calls.append((file, views, offset))
        if len(calls) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.02)
        return preadv(file, views, offset)

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(CheckpointError, match=r"model-\d\.safetensors: Input/output error"):
        read_tensors(mixed, destinations(mixed), threads=threads, chunk_bytes=64)
    chunks = plan_chunks(mixed, destinations(mixed), 64)
    assert not reading_threads() and len(calls) < len(chunks) / 2


@pytest.mark.parametrize("disturbance", ["truncate", "replace", "touch"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    mixed: Checkpoint, monkeypatch: Patch, disturbance: str
) -> None:
    shard = mixed.shards[0]

    def disturb() -> None:
        if disturbance == "truncate":
            os.truncate(shard, os.stat(shard).st_size - 500)
        elif disturbance == "replace":
            write_shard(shard.with_name("new"), MIXED)
            os.replace(shard.with_name("new"), shard)
        else:
            os.utime(shard, (1, 1))

    first = iter([disturb])
    monkeypatch.setattr(
        os,
        "preadv",
        lambda file, views, offset: next(first, lambda: None)() or preadv(file, views, offset),
    )
    words = (
        "was truncated while it was read" if disturbance == "truncate" else "changed while in use"
    )
    with pytest.raises(CheckpointError, match=words) as caught:
        read_tensors(mixed, destinations(mixed), threads=2, chunk_bytes=256)
    assert str(shard) in caught.value.message and not reading_threads()


def test_a_file_that_changed_since_its_header_was_read_is_refused(
    mixed: Checkpoint, monkeypatch: Patch
) -> None:
    os.utime(mixed.shards[1], (1, 1))
    monkeypatch.delattr(os, "preadv")  # nothing is read of it
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: changed while in use"):
        read_tensors(mixed, destinations(mixed))


@pytest.mark.parametrize("at", ["advance", "buffer"])
def test_no_thread_outlives_an_interrupt_or_a_buffer_without_memory(
    mixed: Checkpoint, at: str
) -> None:
    arguments: dict[str, Any] = {
        at: Mock(side_effect=KeyboardInterrupt if at == "advance" else MemoryError)
    }
    with pytest.raises((KeyboardInterrupt, MemoryError)):
        read_tensors(mixed, destinations(mixed), threads=3, chunk_bytes=64, **arguments)
    assert not reading_threads()


def test_wrong_destinations_are_refused(mixed: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        read_tensors(mixed, {"missing": torch.empty(1)})
    for wrong in (torch.empty(4), torch.empty(7, 5).t()):
        with pytest.raises(ValueError, match="cannot fill"):
            read_tensors(mixed, {"b" if wrong.dim() == 2 else "a": wrong})
