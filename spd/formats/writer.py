"""Writing a folder that is whole or not there: staged beside its name, renamed at the very end.

`.NAME.partial`, where only its owner writes, holds what is not finished, locked against a second writer. A
killed run leaves it behind; the next run of the same job goes on after the last tensor whose bytes are as
written. Errors of the disk take it away. Sources: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spd.errors import ResourceError, UsageError
from spd.formats.checkpoint import DTYPE_BITS, PIECE
from spd.formats.files import lock, sync, sync_folder

MARGIN = 0.05
"""Space that must be free beside what is written, as a share of it."""
JOURNAL, NEW, OLD = "journal", "new", "old"
"""What `.NAME.partial` holds: tensors that are whole, the folder to be, and the one that it replaces."""

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
        return DTYPE_BITS[self.dtype] * math.prod(self.shape) // 8


@dataclass(frozen=True)
class Stage:
    """The folder that is being written; `open_stage` makes one and disposes of it."""

    folder: Path

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
        opening = _line({"job": job, "header": hashlib.sha256(header).hexdigest()})
        with _open_kept(self.folder / name) as file, _open_kept(self.folder.parent / JOURNAL) as journal:
            digests = _finished(journal, opening, file, header, ordered)
            if not digests:
                for stale in (file, journal):
                    stale.seek(0)
                    stale.truncate()
                file.write(header)
                _note(journal, opening)
            done = len(header) + sum(tensor.nbytes for tensor in ordered if tensor.name in digests)
            file.seek(done)
            for tensor in ordered[len(digests) :]:
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
                _note(journal, _line({"tensor": tensor.name, "sha256": digests[tensor.name]}))
            file.truncate(total)
            sync(file)
        return digests

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        with _open_kept(self.folder / name) as file:
            file.truncate()
            file.write((json.dumps(value, indent=1) + "\n").encode())
            sync(file)

    def _require_space(self, size: int) -> None:
        there = sum(path.stat().st_size for path in self.folder.iterdir())
        free = shutil.disk_usage(self.folder).free + there
        if size * (1 + MARGIN) > free:
            raise ResourceError(
                f"{self.folder.parent.parent}: {size:,} bytes are to be written, {free:,} are free",
                fix=["free some space, or name a destination on another disk"],
                code="disk_full",
            )


@contextmanager
def open_stage(destination: Path, *, replaces: bool) -> Iterator[Stage]:
    """A stage that becomes `destination` when the block ends well; `replaces` an existing folder.

    A failure takes the stage away, an interruption leaves it. Raises UsageError while another process
    writes the same destination, ResourceError for what the disk refuses.
    """
    partial = destination.parent / f".{destination.name}.partial"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        found = partial.is_symlink() or partial.exists()
        if not found:
            partial.mkdir(mode=0o700)
        descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _disk_error(partial, error) from error
    try:
        status = os.fstat(descriptor)
        if found and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
            raise UsageError(f"{partial}: others may write to it", fix=["remove it, or name another folder"])
        lock(descriptor, destination)
        try:
            (partial / NEW).mkdir(exist_ok=True)
            if (partial / NEW).is_symlink():
                raise UsageError(f"{partial}: holds a link", fix=["remove it, or name another folder"])
            yield Stage(partial / NEW)
            sync_folder(partial / NEW)
            _move(partial, destination, replaces=replaces)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise _disk_error(destination, error) from error
            raise
    finally:
        os.close(descriptor)


def _move(partial: Path, destination: Path, *, replaces: bool) -> None:
    """Rename the stage; what it replaces steps aside first and goes last, so that no mixture is ever seen."""
    if replaces and destination.exists():
        shutil.rmtree(partial / OLD, ignore_errors=True)
        os.rename(destination, partial / OLD)
    try:
        os.rename(partial / NEW, destination)
    except OSError:
        with suppress(OSError):
            os.rename(partial / OLD, destination)
        raise
    sync_folder(destination.parent)
    shutil.rmtree(partial, ignore_errors=True)


def _header(tensors: Sequence[OutputTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        where = {"shape": list(tensor.shape), "data_offsets": [position, end]}
        entries[tensor.name] = {"dtype": tensor.dtype, **where}
        position = end
    data = json.dumps(entries, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def _finished(
    journal: BinaryIO, opening: bytes, file: BinaryIO, header: bytes, tensors: Sequence[OutputTensor]
) -> dict[str, str]:
    """Names and digests of the leading tensors that an earlier run of the same job wrote, read again."""
    finished: dict[str, str] = {}
    lines = journal.read().splitlines(keepends=True)
    if not lines or lines[0] != opening or file.read(len(header)) != header:
        return finished
    kept = len(lines[0])
    for line, tensor in zip(lines[1:], tensors, strict=False):
        state, left = hashlib.sha256(), tensor.nbytes
        while left and (piece := file.read(min(left, PIECE))):
            state.update(piece)
            left -= len(piece)
        if line != _line({"tensor": tensor.name, "sha256": state.hexdigest()}) or left:
            break
        finished[tensor.name] = state.hexdigest()
        kept += len(line)
    journal.seek(kept)
    journal.truncate()
    return finished


def _line(value: Mapping[str, str]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _note(journal: BinaryIO, line: bytes) -> None:
    journal.write(line)
    journal.flush()


def _open_kept(path: Path) -> BinaryIO:
    """A file for reading and writing, with what it holds."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")


def _disk_error(path: Path, error: OSError) -> ResourceError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return ResourceError(
        f"{path}: cannot be written: {error.strerror}",
        reason=["nothing of it is left"],
        fix=["free some space, or name a destination on another disk" if full else "name another folder"],
        code="disk_full" if full else "write_failed",
    )
