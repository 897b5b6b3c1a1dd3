"""The header of one safetensors file, checked with the standard library before anything is allocated.

Accepts what the official reader accepts, except duplicate keys, of which that reader keeps the last.
Source: https://github.com/huggingface/safetensors#format and `safetensors/src/tensor.rs`.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spd.errors import CheckpointError
from spd.formats.json_file import decode_utf8, open_regular_file, parse_json, shown

HEADER_LIMIT = 100_000_000  # bytes, as in the official reader
MAX_NUMBER = (1 << 64) - 1

DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


class TensorMeta(NamedTuple):
    """One tensor of a checkpoint: `dtype` is the safetensors code, `nbytes` its size in `shard`.

    `offset` is its first byte, counted from the beginning of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    nbytes: int
    offset: int


@dataclass(frozen=True)
class FileIdentity:
    """What must stay equal for a file to be the one whose header was read."""

    size: int
    modified_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The identity in a stat result."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


@dataclass(frozen=True)
class ShardHeader:
    """The checked header of one file."""

    path: Path
    identity: FileIdentity
    tensors: tuple[TensorMeta, ...]


def read_shard_header(path: Path) -> ShardHeader:
    """Read and check the header of one safetensors file; no tensor data is touched.

    Raises `CheckpointError` naming the file and the tensor.
    """
    with open_regular_file(path) as file:
        identity = FileIdentity.of(os.fstat(file.fileno()))
        try:
            prefix = file.read(8)
            length = _header_length(path, prefix, identity.size)
            data = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if len(data) < length:
        raise CheckpointError(f"{path}: was truncated while its header was read")
    if data.startswith(codecs.BOM_UTF8):
        raise CheckpointError(f"{path}: header: starts with a byte order mark")
    header = parse_json(decode_utf8(data, f"{path}: header"), f"{path}: header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header: is not a JSON object")
    _check_metadata(path, header.pop("__metadata__", None))
    spans: list[tuple[int, int, str]] = []
    tensors = tuple(_tensor(path, name, entry, spans, 8 + length) for name, entry in header.items())
    _check_layout(path, sorted(spans), identity.size - 8 - length)
    return ShardHeader(path, identity, tensors)


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if size < 8 or len(prefix) < 8:
        raise CheckpointError(f"{path}: header too small: the file has {size} bytes and needs at least 8")
    length = int.from_bytes(prefix, "little")
    if length > HEADER_LIMIT:
        raise CheckpointError(f"{path}: header too large: {length} bytes, at most {HEADER_LIMIT} are allowed")
    if length > size - 8:
        raise CheckpointError(f"{path}: is truncated: its header alone lacks {length - (size - 8)} bytes")
    return length


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__: is not an object of strings")


def _tensor(path: Path, name: str, entry: object, spans: list[tuple[int, int, str]], data: int) -> TensorMeta:
    """One entry of the header; `data` is where the tensors' bytes begin in the file."""

    def where() -> str:
        return f"{path}: tensor {shown(name)}"

    if not isinstance(entry, dict):
        raise CheckpointError(f"{where()}: is not an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where()}: dtype: {shown(dtype)} is unknown")
    if not isinstance(shape, list) or not _are_sizes(shape):
        raise CheckpointError(f"{where()}: shape: {shown(shape)} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(offsets):
        raise CheckpointError(f"{where()}: data_offsets: {shown(offsets)} is not a pair of offsets")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{where()}: data_offsets: {begin} is behind {end}")
    bits = _checked_product([*shape, DTYPE_BITS[dtype]], where)
    if bits % 8 or bits // 8 != end - begin:
        raise CheckpointError(
            f"{where()}: data_offsets: hold {end - begin} bytes, {dtype} {shown(shape)} needs {bits / 8:g}"
        )
    spans.append((begin, end, name))
    return TensorMeta(name, dtype, tuple(shape), path, end - begin, data + begin)


def _are_sizes(values: list[object]) -> bool:
    # No generator: there are hundreds of thousands of short lists, and starting one is most of the time.
    for value in values:  # noqa: SIM110
        if type(value) is not int or not 0 <= value <= MAX_NUMBER:
            return False
    return True


def _checked_product(sizes: list[int], where: Callable[[], str]) -> int:
    product = 1
    for size in sizes:
        product *= size
        if product > MAX_NUMBER:
            raise CheckpointError(
                f"{where()}: shape: overflow, {shown(sizes[:-1])} has more than 2**64 - 1 bits"
            )
    return product


def _check_layout(path: Path, spans: list[tuple[int, int, str]], available: int) -> None:
    """The data of all tensors must fill the rest of the file: no overlap, no gap, no remainder."""
    position = 0
    for begin, end, name in spans:
        if begin != position:
            what = (
                "overlaps the tensor before it"
                if begin < position
                else f"leaves a gap of {begin - position} bytes"
            )
            raise CheckpointError(f"{path}: tensor {shown(name)}: data_offsets: {what}")
        position = end
    if position > available:
        raise CheckpointError(
            f"{path}: is truncated: {position - available} bytes of tensor data are missing"
        )
    if position < available:
        raise CheckpointError(f"{path}: has {available - position} bytes after the last tensor")
