"""Writing a folder that is whole or not there: staged beside its name, renamed at the very end.

A stage `.NAME.partial` holds what is not finished, locked against a second writer. Whoever is killed leaves
it behind; the next run of the same job goes on after the last tensor whose bytes are found as written.
Errors of the disk take it away. Sources: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spd.errors import ResourceError, UsageError
from spd.formats.safetensors_header import DTYPE_BITS

PIECE = 8 << 20
"""Bytes that are in memory at a time."""
MARGIN = 0.05
"""Space that must be free beside what is written, as a share of it."""
JOURNAL = "journal"

Report = Callable[[int, int, str], None]
"""Hears of (bytes written, bytes in all, tensor)."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write: `pieces` yields its bytes in order, `nbytes` of them, row after row."""

    name: str
    dtype: str  # the safetensors code
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[bytes]]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        bits = DTYPE_BITS[self.dtype]
        for size in self.shape:
            bits *= size
        return bits // 8


class Stage:
    """The folder that is being written; `open_stage` makes one and disposes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_tensors(
        self,
        name: str,
        tensors: Sequence[OutputTensor],
        job: str,
        report: Report = lambda done, total, tensor: None,
    ) -> dict[str, str]:
        """Write a safetensors file, a piece at a time; returns the SHA-256 of each tensor's bytes.

        job: what the bytes are made from, so that a file begun for anything else is not gone on with.
        """
        ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BITS[tensor.dtype], tensor.name))
        header = _header(ordered)
        total = len(header) + sum(tensor.nbytes for tensor in ordered)
        self._require_space(total)
        opening = {"job": job, "header": hashlib.sha256(header).hexdigest()}
        digests: dict[str, str] = {}
        with _open_kept(self.folder / name) as file, _open_kept(self.folder / JOURNAL) as journal:
            finished = _finished(journal, opening, file, header, ordered)
            if not finished:
                for stale in (file, journal):
                    stale.seek(0)
                    stale.truncate()
                file.write(header)
                _note(journal, opening)
            for tensor in ordered[: len(finished)]:
                digests[tensor.name] = finished[tensor.name]
            done = len(header) + sum(tensor.nbytes for tensor in ordered[: len(finished)])
            file.seek(done)
            for tensor in ordered[len(finished) :]:
                state, size = hashlib.sha256(), 0
                for piece in tensor.pieces():
                    file.write(piece)
                    state.update(piece)
                    size += len(piece)
                    report(done + size, total, tensor.name)
                if size != tensor.nbytes:
                    raise ValueError(f"{tensor.name}: {size} bytes came, {tensor.nbytes} were announced")
                file.flush()
                done += size
                digests[tensor.name] = state.hexdigest()
                _note(journal, {"tensor": tensor.name, "sha256": digests[tensor.name]})
            file.truncate(total)
            _sync(file)
        return digests

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small file of JSON."""
        with open(self.folder / name, "wb") as file:
            file.write((json.dumps(value, indent=1) + "\n").encode())
            _sync(file)

    def _require_space(self, size: int) -> None:
        there = sum(path.stat().st_size for path in self.folder.iterdir())
        free = shutil.disk_usage(self.folder).free + there
        if size * (1 + MARGIN) > free:
            raise ResourceError(
                f"{self.folder.parent}: {size:,} bytes are to be written, {free:,} are free",
                fix=["free some space, or name a destination on another disk"],
                code="disk_full",
            )


@contextmanager
def open_stage(destination: Path, *, replaces: bool) -> Iterator[Stage]:
    """A stage that becomes `destination` when the block ends well; `replaces` an existing folder.

    A failure takes the stage away, an interruption leaves it. Raises UsageError while another process
    writes the same destination, ResourceError for what the disk refuses.
    """
    stage = destination.parent / f".{destination.name}.partial"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir(exist_ok=True)
        lock = os.open(stage, os.O_RDONLY)
    except OSError as error:
        raise _disk_error(stage, error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"{destination}: another process is writing it", fix=["wait for it, or name another folder"]
            ) from None
        try:
            yield Stage(stage)
            (stage / JOURNAL).unlink(missing_ok=True)
            _sync_folder(stage)
            _move(stage, destination, replaces=replaces)
        except OSError as error:
            shutil.rmtree(stage, ignore_errors=True)
            raise _disk_error(destination, error) from error
        except Exception:
            shutil.rmtree(stage, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _move(stage: Path, destination: Path, *, replaces: bool) -> None:
    """Rename the stage; what it replaces steps aside first and goes last, so that no mixture is ever seen."""
    aside = destination.parent / f".{destination.name}.replaced"
    if replaces and destination.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(destination, aside)
    os.rename(stage, destination)
    _sync_folder(destination.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _header(tensors: Sequence[OutputTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    data = json.dumps(entries, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def _finished(
    journal: BinaryIO,
    opening: Mapping[str, str],
    file: BinaryIO,
    header: bytes,
    tensors: Sequence[OutputTensor],
) -> dict[str, str]:
    """Names and digests of the leading tensors that an earlier run of the same job wrote, read again."""
    finished: dict[str, str] = {}
    lines = journal.read().splitlines(keepends=True)
    if not lines or _parsed(lines[0]) != opening or file.read(len(header)) != header:
        return finished
    kept = len(lines[0])
    for line, tensor in zip(lines[1:], tensors, strict=False):
        state, left = hashlib.sha256(), tensor.nbytes
        while left and (piece := file.read(min(left, PIECE))):
            state.update(piece)
            left -= len(piece)
        if _parsed(line) != {"tensor": tensor.name, "sha256": state.hexdigest()} or left:
            break
        finished[tensor.name] = state.hexdigest()
        kept += len(line)
    journal.seek(kept)
    journal.truncate()
    return finished


def _parsed(line: bytes) -> object:
    with suppress(ValueError):
        return json.loads(line)
    return None


def _note(journal: BinaryIO, value: Mapping[str, str]) -> None:
    journal.write(json.dumps(value).encode() + b"\n")
    journal.flush()


def _open_kept(path: Path) -> BinaryIO:
    """A file for reading and writing, with what it holds."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_error(path: Path, error: OSError) -> ResourceError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return ResourceError(
        f"{path}: cannot be written: {error.strerror}",
        reason=["nothing of it is left"],
        fix=["free some space, or name a destination on another disk" if full else "name another folder"],
        code="disk_full" if full else "write_failed",
    )
