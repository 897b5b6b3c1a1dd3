"""The container of a GGUF file: its metadata and the extents of its tensors, read and checked.

Layout (little endian): magic, version, counts of tensors and keys; the keys, each a name, a type
and a value; the tensors, each a name, dimensions (the innermost first), a type and an offset; then,
aligned, their bytes. A model may be split over files NAME-00001-of-0000N.gguf: the first one has
the metadata.

Nothing is mapped: a map of a file that is cut short kills the process. Source: `docs/gguf.md` of
ggml, `gguf.cpp` and `llama-model-loader.cpp` of llama.cpp.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from spd.errors import CheckpointError
from spd.formats.gguf.block_types import TYPES_BY_NUMBER, UNREADABLE_TYPES, BlockType
from spd.formats.gguf.file_kind import MAGIC, MAX_SPLITS
from spd.formats.json_file import (
    FileIdentity,
    convert_os_errors,
    display_text,
    file_identity,
    open_regular_file,
)

SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
"""Bytes, in a file without `general.alignment`."""
MAX_ALIGNMENT = 1 << 16
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 4
"""Limits of a file: bytes of its alignment, keys, tensors, dimensions of a tensor."""
MAX_SIZE = 1 << 48
"""Elements of a dimension, bytes of an offset."""
MAX_NAME_BYTES = 4096
"""Bytes of a key's name or a tensor's."""
MAX_STRING_BYTES = 1 << 24
"""Bytes of one string; the longest published ones are chat templates of some 20 thousand."""
MAX_ELEMENTS = 1 << 22
"""Elements of all arrays together.

A vocabulary of 262 thousand with scores and merges has 1.3 million.
"""
MAX_HEADER_BYTES = 1 << 28
"""Bytes before those of the tensors; published files have up to 20 million."""
PIECE_BYTES = 4 << 20
"""Bytes of a header that are read at a time."""

GgufScalar = bool | int | float | str
GgufList = tuple[GgufScalar, ...]
GgufValue = GgufScalar | GgufList | tuple[GgufList, ...]
_STRING_TYPE = 8
_ARRAY_TYPE = 9
_BOOL_TYPE = 7
_NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Numbers of the types of values, and the codes of `struct`."""
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
"""The name of one file of several: the model's, the file's number, their count, the ending."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    """The outermost dimension first, as in torch: rows, then columns."""
    path: Path
    offset: int
    """Of the first byte, from the beginning of the file."""
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A model's file, or its splits: metadata and tensors by name."""

    path: Path
    """The path that was opened: of the file or of any of its splits."""
    version: int
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]
    identities: Mapping[Path, FileIdentity]
    """The identity of each file when it was read, in order."""

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read and check a file's header, or those of all splits if it is one of several.

        Raises CheckpointError for values that are out of range, disagree, or are missing.
        """
        split_name = _SPLIT_NAME.fullmatch(path.name)
        header = _read_file_header(path)
        count = _split_number(header, "split.count", 1)
        if count == 1:
            identities = {path: header.identity}
            return cls(path, header.version, header.metadata, header.tensors, identities)
        if split_name is None or int(split_name[3]) != count:
            pattern = f"NAME-00001-of-{count:05d}.gguf"
            raise _file_error(path, f"is one of {count} files, which must be named {pattern}")
        headers = []
        tensor_count = 0
        for number in range(1, count + 1):
            split_path = path.with_name(
                f"{split_name[1]}-{number:05d}-of-{split_name[3]}{split_name[4]}"
            )
            if not split_path.exists():
                raise _file_error(split_path, f"is missing: the model is in {count} files")
            headers.append(header if split_path == path else _read_file_header(split_path))
            tensor_count += len(headers[-1].tensors)
            if tensor_count > MAX_TENSORS:
                raise _too_many_error(split_path)
        tensors, identities = _merge_splits(headers)
        return cls(path, header.version, headers[0].metadata, tensors, identities)


@dataclass(frozen=True)
class _FileHeader:
    """The header of one file."""

    path: Path
    version: int
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]
    identity: FileIdentity


def _merge_splits(
    headers: Sequence[_FileHeader],
) -> tuple[dict[str, GgufTensor], dict[Path, FileIdentity]]:
    """Return the tensors and identities of splits. Raises CheckpointError where they disagree."""
    tensors: dict[str, GgufTensor] = {}
    identities: dict[Path, FileIdentity] = {}
    for number, header in enumerate(headers):
        file_number = _split_number(header, "split.no", -1)
        file_count = _split_number(header, "split.count", 1)
        if (file_number, file_count) != (number, len(headers)):
            claim = f"says that it is number {file_number} of {file_count}"
            raise _file_error(header.path, f"{claim}, not {number} of {len(headers)}")
        if header.version != headers[0].version:
            reason = f"has version {header.version}, {headers[0].path.name} another"
            raise _file_error(header.path, reason)
        for name, tensor in header.tensors.items():
            if name in tensors:
                other_name = tensors[name].path.name
                reason = f"tensor {display_text(name)}: is in {other_name} too"
                raise _file_error(header.path, reason)
            tensors[name] = tensor
        identities[header.path] = header.identity
    expected = _split_number(headers[0], "split.tensors.count", len(tensors))
    if expected != len(tensors):
        reason = f"split.tensors.count: is {expected}, but the files hold {len(tensors)} tensors"
        raise _file_error(headers[0].path, reason)
    return tensors, identities


def _split_number(header: _FileHeader, key: str, default: int) -> int:
    """Return the whole number of a key about splits."""
    value = header.metadata.get(key, default)
    if type(value) is not int or not -1 <= value <= max(MAX_SPLITS, MAX_TENSORS):
        raise _file_error(header.path, f"{key}: {display_text(value)} is not a count")
    if key == "split.count" and not 0 < value <= MAX_SPLITS:
        raise _file_error(header.path, f"{key}: {value} is not a number from 1 to {MAX_SPLITS}")
    return value


def _file_error(path: Path, reason: str) -> CheckpointError:
    """Return the error of a file for a reason."""
    return CheckpointError(f"{path}: {reason}")


def _too_many_error(path: Path) -> CheckpointError:
    """Return the error of a file with which there are too many tensors."""
    return _file_error(path, f"holds more than {MAX_TENSORS:,} tensors")


class _HeaderReader:
    """Reads the header of a file from its beginning, in pieces, at a position that moves on."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self.position = 0
        self.elements = 0
        self._file = file
        self._data = bytearray()

    def error(self, reason: str) -> CheckpointError:
        """Return the error of the file for a reason."""
        return _file_error(self.path, reason)

    def ensure_bytes(self, count: int) -> None:
        """Read on until `count` bytes behind the position are in memory."""
        end = self.position + count
        while end > len(self._data):
            if end > MAX_HEADER_BYTES:
                raise self.error(f"its header needs more than {MAX_HEADER_BYTES:,} bytes")
            piece = self._file.read(max(PIECE_BYTES, end - len(self._data)))
            if not piece:
                raise self.error(f"is truncated: it ends in its header, at byte {len(self._data)}")
            self._data += piece

    def read_numbers(self, code: str, count: int = 1) -> tuple[int | float, ...]:
        """Return the next numbers of one type; code: that of `struct`."""
        layout = struct.Struct(f"<{count}{code}")
        self.ensure_bytes(layout.size)
        values = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return values

    def read_integer(self, code: str, subject: str, limit: int) -> int:
        """Return the next unsigned number, of at most `limit`; subject: for messages."""
        value = int(self.read_numbers(code)[0])
        if value > limit:
            raise self.error(f"{subject}: {value} is more than {limit}")
        return value

    def read_text(self, subject: str, limit: int = MAX_STRING_BYTES) -> str:
        """Return the next string, of at most `limit` bytes."""
        length = self.read_integer("Q", f"{subject}: its length", limit)
        self.ensure_bytes(length)
        start = self.position
        self.position += length
        try:
            return self._data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{subject}: is not UTF-8 at byte {start + error.start}") from None

    def read_value(self, subject: str) -> GgufValue:
        """Return the next typed value; arrays are nested at most 2 deep."""
        value_type = self._read_type(subject)
        if value_type != _ARRAY_TYPE:
            return self._read_values(value_type, subject, 1)[0]
        inner, count = self._read_array_start(subject)
        if inner != _ARRAY_TYPE:
            return self._read_values(inner, subject, count)
        return tuple(self._read_inner_array(subject) for _ in range(count))

    def _read_type(self, subject: str) -> int:
        """Return the number of the next value's type."""
        return self.read_integer("I", f"{subject}: its type", MAX_SIZE)

    def _read_array_start(self, subject: str) -> tuple[int, int]:
        """Return the type of the next array's elements, and their number."""
        inner = self._read_type(subject)
        count = self.read_integer("Q", f"{subject}: its length", MAX_ELEMENTS)
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise self.error(f"its arrays hold more than {MAX_ELEMENTS:,} elements")
        return inner, count

    def _read_inner_array(self, subject: str) -> GgufList:
        """Return the next array in an array."""
        inner, count = self._read_array_start(subject)
        if inner == _ARRAY_TYPE:
            raise self.error(f"{subject}: arrays are nested more than 2 deep")
        return self._read_values(inner, subject, count)

    def _read_values(self, value_type: int, subject: str, count: int) -> GgufList:
        """Return the next values of one type, which is no array."""
        if value_type == _STRING_TYPE:
            return self._read_texts(subject, count)
        if value_type == _BOOL_TYPE:
            return self._read_booleans(subject, count)
        if value_type in _NUMBER_CODES:
            return self.read_numbers(_NUMBER_CODES[value_type], count)
        raise self.error(f"{subject}: {value_type} is not the type of a value")

    def _read_booleans(self, subject: str, count: int) -> tuple[bool, ...]:
        """Return the next truth values, a byte each; refuse a byte that is neither 0 nor 1."""
        values = self.read_numbers("B", count)
        if any(value > 1 for value in values):
            raise self.error(f"{subject}: a truth value is neither 0 nor 1")
        return tuple(value == 1 for value in values)

    def _read_texts(self, subject: str, count: int) -> tuple[str, ...]:
        """Return the next strings, as `read_text` reads one, but fast.

        A vocabulary has hundreds of thousands of them.
        """
        texts: list[str] = []
        unpack_length = struct.Struct("<Q").unpack_from
        while len(texts) < count:
            texts.append(self.read_text(subject))  # some of the bytes that follow are read too
            data = self._data
            position = self.position
            last = len(data) - 8
            while len(texts) < count and position <= last:
                end = position + 8 + unpack_length(data, position)[0]
                if end > len(data):
                    break
                try:
                    texts.append(data[position + 8 : end].decode())
                except UnicodeDecodeError:
                    break
                position = end
            self.position = position
        return tuple(texts)


def _read_file_header(path: Path) -> _FileHeader:
    """Read and check one file's header."""
    with open_regular_file(path) as file, convert_os_errors(path):
        identity = file_identity(os.fstat(file.fileno()))
        header = _HeaderReader(file, path)
        version, tensor_count, key_count = _read_start(header)
        metadata: dict[str, GgufValue] = {}
        for _ in range(key_count):
            key = header.read_text("the name of a key", MAX_NAME_BYTES)
            if key in metadata:
                raise header.error(f"{display_text(key)}: the key is there twice")
            metadata[key] = header.read_value(display_text(key))
        alignment = _read_alignment(header, metadata)
        infos = [_read_tensor_info(header) for _ in range(tensor_count)]
    begin = _aligned(header.position, alignment)
    tensors = _place_tensors(
        path=path, infos=infos, begin=begin, alignment=alignment, file_size=identity[0]
    )
    return _FileHeader(
        path=path,
        version=version,
        metadata=MappingProxyType(metadata),
        tensors=MappingProxyType(tensors),
        identity=identity,
    )


def _read_start(header: _HeaderReader) -> tuple[int, int, int]:
    """Read and check a header's beginning: return version, number of tensors, number of keys."""
    magic = bytes(int(byte) for byte in header.read_numbers("B", 4))
    if magic != MAGIC:
        raise header.error(f"is not a GGUF file: it begins with {display_text(magic)}")
    version = int(header.read_numbers("I")[0])
    if version and version & 0xFFFF == 0:
        raise header.error("is big-endian, only little-endian GGUF files are supported")
    if version not in SUPPORTED_VERSIONS:
        raise header.error(f"GGUF version {version} is not supported (2 and 3 are)")
    tensors = int(header.read_numbers("Q")[0])
    if tensors > MAX_TENSORS:
        raise _too_many_error(header.path)
    return version, tensors, header.read_integer("Q", "the count of its keys", MAX_KEYS)


def _read_alignment(header: _HeaderReader, metadata: Mapping[str, GgufValue]) -> int:
    """Return the alignment of tensors' bytes; refuse one that is no power of two."""
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        reason = f"{display_text(value)} is not a power of two from 1 to {MAX_ALIGNMENT}"
        raise header.error(f"general.alignment: {reason}")
    return value


def _aligned(position: int, alignment: int) -> int:
    """Return the first aligned position that is not before another."""
    return -(-position // alignment) * alignment


@dataclass(frozen=True)
class _TensorInfo:
    """A tensor in the header; offset: from the beginning of the tensors' bytes."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int


def _read_tensor_info(header: _HeaderReader) -> _TensorInfo:
    """Read and check the next tensor's entry in the header."""
    name = header.read_text("the name of a tensor", MAX_NAME_BYTES)
    subject = f"tensor {display_text(name)}"
    dimensions = int(header.read_numbers("I")[0])
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise header.error(f"{subject}: {dimensions} dimensions are not from 1 to {MAX_DIMENSIONS}")
    sizes = [
        header.read_integer("Q", f"{subject}: a dimension", MAX_SIZE) for _ in range(dimensions)
    ]
    number = int(header.read_numbers("I")[0])
    block_type = TYPES_BY_NUMBER.get(number)
    if block_type is None:
        reason = UNREADABLE_TYPES.get(number, "which is not known")
        raise header.error(f"{subject}: is of type {number}, {reason}")
    offset = header.read_integer("Q", f"{subject}: its offset", MAX_SIZE)
    if 0 in sizes:
        raise header.error(f"{subject}: shape {sizes[::-1]} has no elements")
    if sizes[0] % block_type.elements:
        blocks = f"whole blocks of {block_type.elements}, as {block_type.name} needs"
        raise header.error(f"{subject}: {sizes[0]} columns are not {blocks}")
    return _TensorInfo(name, block_type, tuple(reversed(sizes)), offset)


def _place_tensors(
    path: Path, infos: Sequence[_TensorInfo], begin: int, alignment: int, file_size: int
) -> dict[str, GgufTensor]:
    """Return tensors by name; refuse gaps between them, overlaps, and tensors beyond the file.

    begin: the offset of the first tensor's bytes in the file.
    """
    tensors: dict[str, GgufTensor] = {}
    position = begin
    for info in sorted(infos, key=lambda info: info.offset):
        subject = f"tensor {display_text(info.name)}"
        offset = begin + info.offset
        if offset != position:
            reason = f"leaves a gap of {offset - position} bytes"
            if offset < position:
                reason = "overlaps the tensor before it, or is not aligned"
            raise _file_error(path, f"{subject}: its offset {info.offset}: {reason}")
        nbytes = info.type.row_bytes(info.shape[-1]) * math.prod(info.shape[:-1])
        if offset + nbytes > file_size:
            missing = offset + nbytes - file_size
            raise _file_error(path, f"is truncated: {subject} ends {missing} bytes behind its end")
        if info.name in tensors:
            raise _file_error(path, f"{subject}: the name is there twice")
        tensors[info.name] = GgufTensor(
            name=info.name,
            type=info.type,
            shape=info.shape,
            path=path,
            offset=offset,
            nbytes=nbytes,
        )
        position = _aligned(offset + nbytes, alignment)
    return {info.name: tensors[info.name] for info in infos}
