"""The header of a safetensors file: read and checked, without a map of the file and without torch.

Headers are accepted as the official reader does, except duplicate keys, of which that reader keeps
the last. Source: https://github.com/huggingface/safetensors#format and `safetensors/src/tensor.rs`.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import NamedTuple

from spd.errors import CheckpointError
from spd.formats.json_file import (
    Fields,
    FileIdentity,
    convert_os_errors,
    decode_utf8,
    display_text,
    file_identity,
    open_regular_file,
)

MAX_NUMBER = (1 << 64) - 1
MAX_HEADER_BYTES = 40_000_000
"""Bytes; 90 thousand tensors of one file take 12 million.

The official reader accepts 100 million.
"""
_DTYPES = "F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16"
_DTYPES += " BF16 I32 U32 F32 I64 U64 F64 C64"
"""Dtypes of the format but BOOL, each with its bits as the first number in its name."""
DTYPE_BITS = {"BOOL": 8, **{name: int(re.findall(r"\d+", name)[0]) for name in _DTYPES.split()}}
"""Bits of an element by dtype: the first number in its name."""


class TensorMeta(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    """The safetensors code."""
    shape: tuple[int, ...]
    shard: Path
    nbytes: int
    offset: int
    """Of its first byte, from the beginning of the file."""


def read_shard_header(path: Path) -> tuple[FileIdentity, list[TensorMeta]]:
    """Read and check the header of a safetensors file; return its identity and its tensors.

    Raises CheckpointError, also where the tensors do not fill the file without gaps.
    """
    with open_regular_file(path) as file, convert_os_errors(path):
        identity = file_identity(os.fstat(file.fileno()))
        size = identity[0]
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            reason = f"header too large: {length} bytes, at most {MAX_HEADER_BYTES} are allowed"
            raise CheckpointError(f"{path}: {reason}")
        data = file.read(length)
    data_start = 8 + length
    if size < data_start:
        reason = f"is truncated: {size} bytes, its header alone needs {data_start}"
        raise CheckpointError(f"{path}: {reason}")
    header = dict(Fields.parse(decode_utf8(data, f"{path}: header"), f"{path}: header").values)
    header.pop("__metadata__", None)
    tensors = [_read_tensor_entry(path, name, entry, data_start) for name, entry in header.items()]
    _check_extents(path, tensors, data_start, size)
    return identity, tensors


def _read_tensor_entry(path: Path, name: str, entry: object, data_start: int) -> TensorMeta:
    """Return the tensor of an entry; data_start: where the tensors' bytes begin in the file."""
    where = f"{path}: tensor {display_text(name)}"
    fields = Fields(where, entry if isinstance(entry, dict) else {})
    dtype = fields.choice("dtype", DTYPE_BITS)
    shape = fields.integers("shape", 0, MAX_NUMBER)
    begin, end = fields.integers("data_offsets", 0, MAX_NUMBER, 2)
    # In floats: a product of hostile whole numbers would grow without bound.
    needed = DTYPE_BITS[dtype] * math.prod(map(float, shape)) / 8
    reason = f"hold {end - begin} bytes, {dtype} {display_text(shape)} needs {needed:g}"
    fields.require(end - begin == needed, "data_offsets", reason)
    return TensorMeta(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        shard=path,
        nbytes=end - begin,
        offset=data_start + begin,
    )


def _check_extents(path: Path, tensors: list[TensorMeta], data_start: int, size: int) -> None:
    """Refuse tensors that overlap, leave gaps, or do not end where the file ends."""
    position = data_start
    for meta in sorted(tensors, key=lambda meta: (meta.offset, meta.nbytes, meta.name)):
        if meta.offset != position:
            reason = f"leaves a gap of {meta.offset - position} bytes"
            if meta.offset < position:
                reason = "overlaps the tensor before it"
            where = f"{path}: tensor {display_text(meta.name)}"
            raise CheckpointError(f"{where}: data_offsets: {reason}")
        position += meta.nbytes
    if position > size:
        reason = f"is truncated: {position - size} bytes of tensor data are missing"
        raise CheckpointError(f"{path}: {reason}")
    if position < size:
        raise CheckpointError(f"{path}: has {size - position} bytes after the last tensor")
