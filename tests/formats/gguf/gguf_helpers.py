"""Writers of small GGUF files, right ones and hostile ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spd.formats.gguf.block_types import TYPES_BY_NAME
from spd.formats.gguf.container import GgufFile, GgufValue

_CODES = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}


@dataclass(frozen=True)
class TypedValue:
    """A number, or a list of them, with its type as a code of `struct`."""

    code: str
    value: float | Sequence[float]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write: its type, its shape (rows first) and its bytes, or zeros."""

    type: str
    shape: Sequence[int]
    data: bytes | None = None

    @property
    def content(self) -> bytes:
        """Return the bytes."""
        block_type = TYPES_BY_NAME[self.type]
        nbytes = block_type.row_bytes(self.shape[-1])
        for size in self.shape[:-1]:
            nbytes *= size
        return bytes(nbytes) if self.data is None else self.data


Value = GgufValue | TypedValue | list[str] | list[int] | list[float] | list[list[int]]


def text_bytes(text: str | bytes) -> bytes:
    """Return a string as it is stored."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Value, *, typed: bool = True) -> bytes:
    """Return a value as it is stored, behind the number of its type."""
    if isinstance(value, list | tuple):
        items = [value_bytes(element) for element in value]
        inner = items[0][:4] if items else struct.pack("<I", 8)
        body = b"".join(item[4:] for item in items)
        kind = 9
        data = inner + struct.pack("<Q", len(items)) + body
    elif isinstance(value, TypedValue):
        is_list = isinstance(value.value, list | tuple)
        numbers = list(value.value) if isinstance(value.value, list | tuple) else [value.value]
        data = struct.pack(f"<{len(numbers)}{value.code}", *numbers)
        kind = _CODES[value.code]
        if is_list:
            data = struct.pack("<IQ", kind, len(numbers)) + data
            kind = 9
    elif isinstance(value, bool):
        kind = 7
        data = struct.pack("<?", value)
    elif isinstance(value, int):
        kind, data = (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    elif isinstance(value, float):
        kind = 6
        data = struct.pack("<f", value)
    else:
        kind = 8
        data = text_bytes(value)
    return (struct.pack("<I", kind) if typed else b"") + data


def header_bytes(
    metadata: Mapping[str, Value], tensors: Mapping[str, TensorSpec], alignment: int, version: int
) -> bytes:
    """Return the bytes before those of the tensors, without the padding."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [text_bytes(key), value_bytes(value)]
    offset = 0
    for name, tensor in tensors.items():
        sizes = list(reversed(tensor.shape))
        number = TYPES_BY_NAME[tensor.type].number
        parts.append(text_bytes(name))
        parts.append(struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, offset))
        offset += -(-len(tensor.content) // alignment) * alignment
    return b"".join(parts)


def gguf_bytes(
    metadata: Mapping[str, Value],
    tensors: Mapping[str, TensorSpec],
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """Return the bytes of a file."""
    content = header_bytes(metadata, tensors, alignment, version)
    for tensor in tensors.values():
        content += bytes(-len(content) % alignment) + tensor.content
    return content + bytes(-len(content) % alignment)


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, TensorSpec], version: int = 3
) -> Path:
    """Write a file and return its path."""
    path.write_bytes(gguf_bytes(metadata, tensors, version=version))
    return path


def open_bytes(path: Path, content: bytes) -> GgufFile:
    """Open bytes as a file."""
    path.write_bytes(content)
    return GgufFile.open(path)
