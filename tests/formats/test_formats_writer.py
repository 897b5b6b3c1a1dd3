"""A written folder is whole or not there: after kills at any call, refusals of the disk, a second writer."""

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
from typing import Any
from unittest.mock import Mock

import pytest

from spd.errors import ResourceError
from spd.formats import writer
from spd.formats.checkpoint import Checkpoint
from spd.formats.writer import OutputTensor, open_stage, write_json, write_tensors

SIZES = {
    "b": ("BF16", (300, 7)),
    "a": ("F32", (5,)),
    "c": ("F8_E4M3", (1000, 3)),
    "empty": ("BF16", (0, 4)),
}
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
DISK_CALLS = ("fsync", "rename", "open", "replace")


def content(name: str) -> bytes:
    dtype, shape = SIZES[name]
    return random.Random(name).randbytes(BYTES[dtype] * math.prod(shape))


def tensors() -> list[OutputTensor]:
    def pieces(name: str) -> Iterator[bytes]:
        data = content(name)
        yield from (data[i : i + 700] for i in range(0, len(data), 700))

    return [OutputTensor(name, *how, partial(pieces, name)) for name, how in SIZES.items()]


def write(destination: Path, job: str = "one") -> None:
    with open_stage(destination) as stage:
        write_tensors(stage / "model.safetensors", tensors())
        write_json(stage / "manifest.json", {"job": job})


def check(destination: Path) -> None:
    """The folder is complete, byte for byte, and nothing else is beside it."""
    with Checkpoint.open(destination) as checkpoint:
        assert set(checkpoint.tensors) == set(SIZES)
        for name, meta in checkpoint.tensors.items():
            assert (meta.dtype, meta.shape) == SIZES[name]
            with open(meta.shard, "rb") as file:
                file.seek(meta.offset)
                assert file.read(meta.nbytes) == content(name)
            assert meta.offset % BYTES[meta.dtype] == 0
    assert sorted(os.listdir(destination)) == ["manifest.json", "model.safetensors"]
    assert [name for name in os.listdir(destination.parent) if name[:5] != ".spd-"] == [
        destination.name
    ]


def test_what_is_written_is_read_by_the_official_library(tmp_path: Path) -> None:
    from safetensors import safe_open

    write(tmp_path / "out" / "head")
    check(tmp_path / "out" / "head")
    with safe_open(tmp_path / "out" / "head" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(SIZES) and file.metadata() == {"format": "pt"}


def killed_at(call: int, work: Callable[[], None]) -> bool:
    """Run in a child that kills itself at its n-th call to the disk; whether it came so far."""
    child = os.fork()
    if child == 0:
        left = call

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **named)

            return run

        calls = [*((os, name) for name in DISK_CALLS), (shutil, "rmtree"), (writer, "sync")]
        for owner, name in calls:
            setattr(owner, name, counted(getattr(owner, name)))
        globals()["content"] = counted(content)  # a moment between any two tensors
        work()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_a_kill_at_any_moment_leaves_all_or_nothing(tmp_path: Path) -> None:
    """Every call to the disk in turn, then once more to the end; the destination is never a mixture."""
    call = 0
    outcomes = set()
    killed = True
    while killed:
        call += 1
        destination = tmp_path / str(call) / "head"
        destination.parent.mkdir()
        killed = killed_at(call, partial(write, destination))
        there = destination.exists()
        outcomes.add(there)
        if not there:
            write(destination)
        check(destination)
    assert call > 15 and outcomes == {True, False}


def test_an_interrupted_run_is_begun_anew(tmp_path: Path) -> None:
    destination = tmp_path / "head"

    def dies() -> Iterator[bytes]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_stage(destination) as stage:
        write_tensors(
            stage / "model.safetensors", [*tensors()[:2], OutputTensor("c", *SIZES["c"], dies)]
        )
    assert os.listdir(tmp_path) == []
    write(destination)
    check(destination)


def test_a_full_disk_is_an_error_in_words_and_leaves_nothing(
    tmp_path: Path, monkeypatch: Any
) -> None:
    destination = tmp_path / "head"
    child = os.fork()
    if child == 0:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (4096, 4096)
        )  # the kernel itself refuses the write
        status = 1
        try:
            write(destination)
        except ResourceError:
            status = 2 if os.listdir(tmp_path) else 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for call in ("fsync", "rename"):
        monkeypatch.setattr(os, call, Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(ResourceError, match="Input/output error"):
            write(destination)
        assert os.listdir(tmp_path) == []
        monkeypatch.undo()


def test_a_tensor_of_another_size_than_announced_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="announced"), open_stage(tmp_path / "head") as stage:
        write_tensors(
            stage / "x.safetensors", [OutputTensor("a", "F32", (5,), lambda: iter([b"x"]))]
        )
    assert os.listdir(tmp_path) == []


def test_two_writers_of_one_destination(tmp_path: Path) -> None:
    """The one that ends last is refused; neither writes into the other's stage."""
    with pytest.raises(ResourceError, match="not empty"), open_stage(tmp_path / "head") as stage:
        write_json(stage / "manifest.json", {"job": "first"})
        write(tmp_path / "head", "second")
    check(tmp_path / "head")
    assert json.loads((tmp_path / "head" / "manifest.json").read_text()) == {"job": "second"}
