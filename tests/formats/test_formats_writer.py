"""A written folder is complete or absent: after kills, errors of the disk, a second writer."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest.mock import Mock

import pytest

from spd.errors import ResourceError
from spd.formats import writer
from spd.formats.checkpoint import Checkpoint
from spd.formats.writer import OutputTensor, open_stage, write_json, write_tensors

P = ParamSpec("P")
R = TypeVar("R")
SIZES = {
    "b": ("BF16", (300, 7)),
    "a": ("F32", (5,)),
    "c": ("F8_E4M3", (1000, 3)),
    "empty": ("BF16", (0, 4)),
}
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
DISK_CALLS = ("fsync", "rename", "open", "replace")


def tensor_content(name: str) -> bytes:
    dtype, shape = SIZES[name]
    return random.Random(name).randbytes(BYTES[dtype] * math.prod(shape))


def output_tensors() -> list[OutputTensor]:
    def pieces(name: str) -> Iterator[bytes]:
        data = tensor_content(name)
        yield from (data[i : i + 700] for i in range(0, len(data), 700))

    return [
        OutputTensor(name, dtype, shape, partial(pieces, name))
        for name, (dtype, shape) in SIZES.items()
    ]


def write_folder(destination: Path, job: str = "one") -> None:
    with open_stage(destination) as stage:
        write_tensors(stage / "model.safetensors", output_tensors())
        write_json(stage / "manifest.json", {"job": job})


def check_folder(destination: Path) -> None:
    """Assert that a folder is complete, byte for byte, without another folder next to it."""
    with Checkpoint.open(destination) as checkpoint:
        assert set(checkpoint.tensors) == set(SIZES)
        for name, meta in checkpoint.tensors.items():
            assert (meta.dtype, meta.shape) == SIZES[name]
            with open(meta.shard, "rb") as file:
                file.seek(meta.offset)
                assert file.read(meta.nbytes) == tensor_content(name)
            assert meta.offset % BYTES[meta.dtype] == 0
    assert sorted(os.listdir(destination)) == ["manifest.json", "model.safetensors"]
    assert [name for name in os.listdir(destination.parent) if name[:5] != ".spd-"] == [
        destination.name
    ]


def test_what_is_written_is_read_by_the_official_library(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_folder(tmp_path / "out" / "head")
    check_folder(tmp_path / "out" / "head")
    with safe_open(tmp_path / "out" / "head" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(SIZES) and file.metadata() == {"format": "pt"}


def count_disk_calls(last: int) -> None:
    """Let this process kill itself at its `last` call to the disk."""
    remaining = last

    def counted(function: Callable[P, R]) -> Callable[P, R]:
        def run(*arguments: P.args, **keywords: P.kwargs) -> R:
            nonlocal remaining
            remaining -= 1
            if remaining <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return run

    calls = [*((os, name) for name in DISK_CALLS), (shutil, "rmtree"), (writer, "sync_file")]
    for owner, name in calls:
        setattr(owner, name, counted(getattr(owner, name)))
    globals()["tensor_content"] = counted(tensor_content)  # also between any two tensors


def is_killed_at(call: int, work: Callable[[], None]) -> bool:
    """Run work in a child that kills itself at its n-th call to the disk; True if it did."""
    child = os.fork()
    if child == 0:
        status = 1  # of work that raises, so that the child never goes on with the tests
        try:
            count_disk_calls(call)
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_a_kill_at_any_moment_leaves_all_or_nothing(tmp_path: Path) -> None:
    """A child is killed at each call to the disk in turn; the destination is never a mixture."""
    call = 0
    outcomes = set()
    killed = True
    while killed:
        call += 1
        destination = tmp_path / str(call) / "head"
        destination.parent.mkdir()
        killed = is_killed_at(call, partial(write_folder, destination))
        is_complete = destination.exists()
        outcomes.add(is_complete)
        if not is_complete:
            write_folder(destination)
        check_folder(destination)
    assert call > 15 and outcomes == {True, False}


def test_an_interrupted_run_is_begun_anew(tmp_path: Path) -> None:
    destination = tmp_path / "head"

    def interrupt() -> Iterator[bytes]:
        raise KeyboardInterrupt

    dtype, shape = SIZES["c"]
    with pytest.raises(KeyboardInterrupt), open_stage(destination) as stage:
        write_tensors(
            stage / "model.safetensors",
            [*output_tensors()[:2], OutputTensor("c", dtype, shape, interrupt)],
        )
    assert os.listdir(tmp_path) == []
    write_folder(destination)
    check_folder(destination)


def test_a_full_disk_is_an_error_in_words_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = tmp_path / "head"
    child = os.fork()
    if child == 0:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (4096, 4096)
        )  # the kernel itself refuses the write
        status = 1
        try:
            write_folder(destination)
        except ResourceError:
            status = 2 if os.listdir(tmp_path) else 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for call in ("fsync", "rename"):
        monkeypatch.setattr(os, call, Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(ResourceError, match="Input/output error"):
            write_folder(destination)
        assert os.listdir(tmp_path) == []
        monkeypatch.undo()


def test_a_tensor_of_another_size_than_announced_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="announced"), open_stage(tmp_path / "head") as stage:
        write_tensors(
            stage / "x.safetensors", [OutputTensor("a", "F32", (5,), lambda: iter([b"x"]))]
        )
    assert os.listdir(tmp_path) == []


def test_the_second_writer_of_a_destination_is_refused(tmp_path: Path) -> None:
    """The writer that ends last is refused; neither writes into the other's stage."""
    with pytest.raises(ResourceError, match="not empty"), open_stage(tmp_path / "head") as stage:
        write_json(stage / "manifest.json", {"job": "first"})
        write_folder(tmp_path / "head", "second")
    check_folder(tmp_path / "head")
    assert json.loads((tmp_path / "head" / "manifest.json").read_text()) == {"job": "second"}
