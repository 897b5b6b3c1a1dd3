"""The container: a GGUF file's metadata and the extents of its tensors, read and checked.

Layout (little endian): magic, version, counts of tensors and keys; the keys, each a name, a type and a value;
the tensors, each a name, dimensions (the innermost first), a type and an offset; then, aligned, their bytes.
A model may be split over files NAME-00001-of-0000N.gguf: the first one has the metadata.

Nothing is mapped: a map of a file that is cut short kills the process. Source: `docs/gguf.md` of ggml,
`gguf.cpp` and `llama-model-loader.cpp` of llama.cpp.
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
from spd.formats.gguf.block_types import BY_NUMBER, UNREADABLE_TYPES, BlockType
from spd.formats.gguf.file_kind import MAGIC, MAX_SPLITS
from spd.formats.json_file import (
    FileIdentity,
    convert_os_errors,
    display_text,
    file_identity,
    open_regular_file,
)

VERSIONS = (2, 3)
ALIGNMENT = 32
"""Bytes, where `general.alignment` says nothing else."""
MAX_ALIGNMENT = 1 << 16
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 4
MAX_SIZE = 1 << 48
"""Elements of a dimension, bytes of an offset."""
MAX_NAME = 4096
"""Bytes of a key's name or a tensor's."""
MAX_STRING = 1 << 24
"""Bytes of one string; the longest published ones are chat templates of some 20 thousand."""
MAX_ELEMENTS = 1 << 22
"""Elements of all arrays together; a vocabulary of 262 thousand with scores and merges has 1.3 million."""
MAX_HEADER = 1 << 28
"""Bytes of everything before the tensors'; published files have up to 20 million."""
PIECE = 4 << 20
"""Bytes of a header that are read at a time."""

GgufScalar = bool | int | float | str
GgufList = tuple[GgufScalar, ...]
GgufValue = GgufScalar | GgufList | tuple[GgufList, ...]
_STRING = 8
_ARRAY = 9
_BOOL = 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Numbers of the types of values, and how `struct` calls them."""
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


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
    """As it was given."""
    version: int
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]
    identities: Mapping[Path, FileIdentity]
    """Of each file when it was read, in order."""

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read and check a file's header, or those of all splits of which it is one.

        Raises CheckpointError for whatever is out of range, does not agree, or is not there.
        """
        named = _SPLIT_NAME.fullmatch(path.name)
        own = _read_part(path)
        count = _whole(own, "split.count", 1)
        if count == 1:
            return cls(path, own.version, own.metadata, own.tensors, {path: own.identity})
        if named is None or int(named[3]) != count:
            pattern = f"NAME-00001-of-{count:05d}.gguf"
            raise _refused(path, f"is one of {count} files, which must be named {pattern}")
        parts = []
        total = 0
        for number in range(1, count + 1):
            other = path.with_name(f"{named[1]}-{number:05d}-of-{named[3]}{named[4]}")
            parts.append(own if other == path else _read_part(other))
            total += len(parts[-1].tensors)
            if total > MAX_TENSORS:
                raise _too_many_tensors(other)
        return cls(path, own.version, parts[0].metadata, *_joined(parts))


@dataclass(frozen=True)
class _Part:
    """One file's header."""

    path: Path
    version: int
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, GgufTensor]
    identity: FileIdentity


def _joined(parts: Sequence[_Part]) -> tuple[dict[str, GgufTensor], dict[Path, FileIdentity]]:
    """Return the tensors and identities of splits, which must agree with each other."""
    tensors: dict[str, GgufTensor] = {}
    identities: dict[Path, FileIdentity] = {}
    for number, part in enumerate(parts):
        said = _whole(part, "split.no", -1), _whole(part, "split.count", 1)
        if said != (number, len(parts)):
            why = f"says that it is number {said[0]} of {said[1]}, not {number} of {len(parts)}"
            raise _refused(part.path, why)
        if part.version != parts[0].version:
            raise _refused(part.path, f"has version {part.version}, {parts[0].path.name} another")
        for name, tensor in part.tensors.items():
            if name in tensors:
                where = tensors[name].path.name
                raise _refused(part.path, f"tensor {display_text(name)}: is in {where} too")
            tensors[name] = tensor
        identities[part.path] = part.identity
    expected = _whole(parts[0], "split.tensors.count", len(tensors))
    if expected != len(tensors):
        why = f"split.tensors.count: is {expected}, but the files hold {len(tensors)} tensors"
        raise _refused(parts[0].path, why)
    return tensors, identities


def _whole(part: _Part, key: str, default: int) -> int:
    """Return a key's whole number, which says something of splits."""
    value = part.metadata.get(key, default)
    if type(value) is not int or not -1 <= value <= max(MAX_SPLITS, MAX_TENSORS):
        raise _refused(part.path, f"{key}: {display_text(value)} is not a count")
    if key == "split.count" and not 0 < value <= MAX_SPLITS:
        raise _refused(part.path, f"{key}: {value} is not a number from 1 to {MAX_SPLITS}")
    return value


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: {why}")


def _too_many_tensors(path: Path) -> CheckpointError:
    return _refused(path, f"holds more than {MAX_TENSORS:,} tensors")


class _Header:
    """The bytes of a file from its beginning, read as they are needed, and a position in them."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self.position = 0
        self.elements = 0
        self._file = file
        self._data = bytearray()

    def refused(self, why: str) -> CheckpointError:
        return _refused(self.path, why)

    def need(self, count: int) -> None:
        """Have `count` bytes behind the position in memory."""
        end = self.position + count
        while end > len(self._data):
            if end > MAX_HEADER:
                raise self.refused(f"its header needs more than {MAX_HEADER:,} bytes")
            piece = self._file.read(max(PIECE, end - len(self._data)))
            if not piece:
                raise self.refused(
                    f"is truncated: it ends in its header, at byte {len(self._data)}"
                )
            self._data += piece

    def numbers(self, code: str, count: int = 1) -> tuple[int | float, ...]:
        """Return numbers of one type."""
        layout = struct.Struct(f"<{count}{code}")
        self.need(layout.size)
        values = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return values

    def integer(self, code: str, what: str, most: int) -> int:
        """Return an unsigned number of at most `most`."""
        value = int(self.numbers(code)[0])
        if value > most:
            raise self.refused(f"{what}: {value} is more than {most}")
        return value

    def text(self, what: str, most: int = MAX_STRING) -> str:
        """Return a string of at most so many bytes."""
        length = self.integer("Q", f"{what}: its length", most)
        self.need(length)
        start = self.position
        self.position += length
        try:
            return self._data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise self.refused(f"{what}: is not UTF-8 at byte {start + error.start}") from None

    def value(self, what: str) -> GgufValue:
        """Return a typed value; an array may hold arrays, which hold none."""
        kind = self._kind(what)
        if kind != _ARRAY:
            return self._values(kind, what, 1)[0]
        inner, count = self._start_array(what)
        if inner != _ARRAY:
            return self._values(inner, what, count)
        return tuple(self._values(*self._start_inner(what)) for _ in range(count))

    def _kind(self, what: str) -> int:
        return self.integer("I", f"{what}: its type", MAX_SIZE)

    def _start_array(self, what: str) -> tuple[int, int]:
        """Return the type of an array's elements, and how many there are."""
        inner = self._kind(what)
        count = self.integer("Q", f"{what}: its length", MAX_ELEMENTS)
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise self.refused(f"its arrays hold more than {MAX_ELEMENTS:,} elements")
        return inner, count

    def _start_inner(self, what: str) -> tuple[int, str, int]:
        """Return the same of an array in an array."""
        inner, count = self._start_array(what)
        if inner == _ARRAY:
            raise self.refused(f"{what}: arrays are nested more than 2 deep")
        return inner, what, count

    def _values(self, kind: int, what: str, count: int) -> GgufList:
        """Return so many values of one type, which is no array."""
        if kind == _STRING:
            return self._texts(what, count)
        if kind == _BOOL:
            return self._booleans(what, count)
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], count)
        raise self.refused(f"{what}: {kind} is not the type of a value")

    def _booleans(self, what: str, count: int) -> tuple[bool, ...]:
        values = self.numbers("B", count)
        if any(value > 1 for value in values):
            raise self.refused(f"{what}: a truth value is neither 0 nor 1")
        return tuple(value == 1 for value in values)

    def _texts(self, what: str, count: int) -> tuple[str, ...]:
        """Return many strings, as `text` reads one: a vocabulary has hundreds of thousands."""
        found: list[str] = []
        length_at = struct.Struct("<Q").unpack_from
        while len(found) < count:
            found.append(self.text(what))  # which has read what follows it, up to some size
            data = self._data
            position = self.position
            last = len(data) - 8
            while len(found) < count and position <= last:
                end = position + 8 + length_at(data, position)[0]
                if end > len(data):
                    break
                try:
                    found.append(data[position + 8 : end].decode())
                except UnicodeDecodeError:
                    break
                position = end
            self.position = position
        return tuple(found)


def _read_part(path: Path) -> _Part:
    """Read one file's header."""
    with open_regular_file(path) as file, convert_os_errors(path):
        identity = file_identity(os.fstat(file.fileno()))
        header = _Header(file, path)
        version, tensor_count, key_count = _read_start(header)
        metadata: dict[str, GgufValue] = {}
        for _ in range(key_count):
            key = header.text("the name of a key", MAX_NAME)
            if key in metadata:
                raise header.refused(f"{display_text(key)}: the key is there twice")
            metadata[key] = header.value(display_text(key))
        alignment = _alignment(header, metadata)
        infos = [_read_tensor(header) for _ in range(tensor_count)]
    begin = _aligned(header.position, alignment)
    tensors = _placed(path, infos, begin, alignment, identity[0])
    return _Part(path, version, MappingProxyType(metadata), MappingProxyType(tensors), identity)


def _read_start(header: _Header) -> tuple[int, int, int]:
    """Return version, count of tensors, count of keys."""
    magic = bytes(int(byte) for byte in header.numbers("B", 4))
    if magic != MAGIC:
        raise header.refused(f"is not a GGUF file: it begins with {display_text(magic)}")
    version = int(header.numbers("I")[0])
    if version and version & 0xFFFF == 0:
        raise header.refused("is big-endian, only little-endian GGUF files are supported")
    if version not in VERSIONS:
        raise header.refused(f"GGUF version {version} is not supported (2 and 3 are)")
    tensors = int(header.numbers("Q")[0])
    if tensors > MAX_TENSORS:
        raise _too_many_tensors(header.path)
    return version, tensors, header.integer("Q", "the count of its keys", MAX_KEYS)


def _alignment(header: _Header, metadata: Mapping[str, GgufValue]) -> int:
    value = metadata.get("general.alignment", ALIGNMENT)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        why = f"{display_text(value)} is not a power of two from 1 to {MAX_ALIGNMENT}"
        raise header.refused(f"general.alignment: {why}")
    return value


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


@dataclass(frozen=True)
class _Info:
    """A tensor as the header describes it; offset: from where the tensors' bytes begin."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int


def _read_tensor(header: _Header) -> _Info:
    name = header.text("the name of a tensor", MAX_NAME)
    what = f"tensor {display_text(name)}"
    dimensions = int(header.numbers("I")[0])
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise header.refused(f"{what}: {dimensions} dimensions are not from 1 to {MAX_DIMENSIONS}")
    sizes = [header.integer("Q", f"{what}: a dimension", MAX_SIZE) for _ in range(dimensions)]
    number = int(header.numbers("I")[0])
    kind = BY_NUMBER.get(number)
    if kind is None:
        known = UNREADABLE_TYPES.get(number, "which is not known")
        raise header.refused(f"{what}: is of type {number}, {known}")
    offset = header.integer("Q", f"{what}: its offset", MAX_SIZE)
    if 0 in sizes:
        raise header.refused(f"{what}: shape {sizes[::-1]} has no elements")
    if sizes[0] % kind.elements:
        why = f"{sizes[0]} columns are not whole blocks of {kind.elements}, as {kind.name} needs"
        raise header.refused(f"{what}: {why}")
    return _Info(name, kind, tuple(reversed(sizes)), offset)


def _placed(
    path: Path, infos: Sequence[_Info], begin: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """Return tensors by name, each seen to follow the one before it, up to the alignment, in the file.

    begin: where their bytes begin. size: of the file.
    """
    tensors: dict[str, GgufTensor] = {}
    position = begin
    for info in sorted(infos, key=lambda each: each.offset):
        what = f"tensor {display_text(info.name)}"
        offset = begin + info.offset
        if offset != position:
            gap = f"leaves a gap of {offset - position} bytes"
            why = "overlaps the tensor before it, or is not aligned" if offset < position else gap
            raise _refused(path, f"{what}: its offset {info.offset}: {why}")
        nbytes = info.type.row_bytes(info.shape[-1]) * math.prod(info.shape[:-1])
        if offset + nbytes > size:
            missing = offset + nbytes - size
            raise _refused(path, f"is truncated: {what} ends {missing} bytes behind its end")
        if info.name in tensors:
            raise _refused(path, f"{what}: the name is there twice")
        tensors[info.name] = GgufTensor(info.name, info.type, info.shape, path, offset, nbytes)
        position = _aligned(offset + nbytes, alignment)
    return {info.name: tensors[info.name] for info in infos}
