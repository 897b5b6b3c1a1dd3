"""Writing of a folder completely or not at all: under a temporary name that is replaced at the end.

The stage has an unpredictable name, and only its owner writes there. It is removed whatever ends a
run, except a kill, which leaves a folder `.spd-*`. Source:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from spd.errors import ResourceError
from spd.formats.checkpoint import Checkpoint
from spd.formats.files import sync_file, sync_folder, write_atomically
from spd.formats.safetensors_header import DTYPE_BITS, TensorMeta

ReportProgress = Callable[[int, int], None]
"""Called with the bytes written, and the bytes in all."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write."""

    name: str
    dtype: str
    """The safetensors code."""
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[bytes]]
    """Yields its bytes in order, row after row, `nbytes` in all."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor, by its dtype and shape."""
        return DTYPE_BITS[self.dtype] * math.prod(self.shape) // 8


def output_tensors(checkpoint: Checkpoint, tensors: Sequence[TensorMeta]) -> list[OutputTensor]:
    """Return tensors of a checkpoint for writing, with their bytes as they are stored."""
    return [
        OutputTensor(t.name, t.dtype, t.shape, partial(checkpoint.read_pieces, t)) for t in tensors
    ]


def write_tensors(
    path: Path, tensors: Sequence[OutputTensor], report: ReportProgress = lambda *_: None
) -> None:
    """Write a new safetensors file, a piece at a time, and wait until the disk has it.

    Raises OSError, also if the file exists, and ValueError for a tensor of another size.
    """
    ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BITS[tensor.dtype], tensor.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in ordered:
        shape = list(tensor.shape)
        offsets = [position, position + tensor.nbytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": offsets}
        position += tensor.nbytes
    data = json.dumps(entries, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    header = len(data).to_bytes(8, "little") + data
    written = len(header)
    total = len(header) + position
    with open(path, "xb") as file:
        file.write(header)
        for tensor in ordered:
            begin = written
            for piece in tensor.pieces():
                file.write(piece)
                written += len(piece)
                report(written, total)
            if written - begin != tensor.nbytes:
                raise ValueError(
                    f"{tensor.name}: {written - begin} bytes came, {tensor.nbytes} were announced"
                )
        sync_file(file)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON file, which is always the old or the new one."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def open_stage(destination: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `destination` when the block ends without an error.

    Raises ResourceError where it cannot be written.
    """
    try:
        parent = destination.parent
        parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".spd-", dir=parent, ignore_cleanup_errors=True) as partial:
            new = Path(partial, "new")
            new.mkdir()
            yield new
            sync_folder(new)
            os.rename(new, destination)
            sync_folder(parent)
    except OSError as error:
        reason = f"{destination}: cannot be written: {error.strerror}; nothing of it is left"
        raise ResourceError(reason, fix=["free some space, or name another folder"]) from error
