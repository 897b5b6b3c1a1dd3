"""The weights of a model folder: one `model.safetensors`, or shards listed in an index.

Opening reads and checks headers only (no torch); tensors are read after a check that the file is
the one whose header was read. Nothing is mapped: a map of a file that is cut short kills the
process.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import eq
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO

from spd.errors import CheckpointError
from spd.formats.hub import PICKLE_SUFFIXES, incomplete_error, not_a_model_error
from spd.formats.json_file import (
    Fields,
    FileIdentity,
    abbreviate,
    convert_os_errors,
    display_text,
    file_identity,
    list_folder,
    open_regular_file,
)
from spd.formats.names import INDEX_FILE, WEIGHTS_FILE
from spd.formats.safetensors_header import TensorMeta, read_shard_header
from spd.formats.tensor_names import text_name, unpack_experts

if TYPE_CHECKING:
    from torch import Tensor

MAX_TENSORS = 1 << 20
"""Tensors of a checkpoint, experts counted one by one."""
MAX_INDEX_BYTES = 40_000_000
"""Bytes; the largest published indices, of 140 thousand tensors, have 20 million."""
PIECE_BYTES = 8 << 20
"""Bytes of a tensor that are in memory at a time, where it is copied from file to file."""
FLOAT_DTYPES = ("BF16", "F16", "F32")
TORCH_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Torch's names of the dtypes that it has."""
SHARD_NAME = re.compile(
    r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)\.)[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors"
)
"""Names of files that cannot leave their folder, under POSIX and Windows rules."""

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
AllowedDtypes = Mapping[str, Sequence[str]]
"""Dtypes of tensors that are not stored as floats."""
FLOATS_ONLY: AllowedDtypes = MappingProxyType({})
"""No tensor has another dtype than a float's."""
TensorMetas = Mapping[str, TensorMeta]
"""Tensors by name."""


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """The tensors of a model folder by name; a context manager that closes its files."""

    dtypes: tuple[str, ...] = FLOAT_DTYPES
    """Dtypes of tensors that have no others in `AllowedDtypes`."""

    refuses_unused: bool = False
    """True if a tensor that the model does not use means that the file is of another model."""

    def __init__(
        self,
        folder: Path,
        tensors: TensorMetas,
        identities: Mapping[Path, FileIdentity],
        notes: Sequence[str] = (),
    ) -> None:
        """Store tensors of headers; identities: of each file when its header was checked."""
        self.folder = folder
        self._identities = dict(identities)
        self.tensors: TensorMetas = MappingProxyType(dict(tensors))
        self.shards = tuple(self._identities)
        self.total_bytes = sum(meta.nbytes for meta in tensors.values())
        self.notes = tuple(notes)
        self._files: dict[Path, BinaryIO] = {}

    @classmethod
    def of_shards(
        cls,
        folder: Path,
        shards: Iterable[str],
        notes: Sequence[str] = (),
        weight_map: Mapping[str, str] = MappingProxyType({}),
    ) -> Checkpoint:
        """Read and check the headers of shards; return their checkpoint.

        weight_map: the shard of each tensor by an index, which decides where two shards hold one.
        """
        identities: dict[Path, FileIdentity] = {}
        tensors: dict[str, TensorMeta] = {}
        indexed: set[str] = set()  # names of tensors in the shard that the index names
        misplaced: dict[str, TensorMeta] = {}  # tensors in another shard
        count = 0
        for shard in shards:  # counted one by one: many links may lead to one large header
            identities[folder / shard], metas = read_shard_header(folder / shard)
            count += len(metas)
            if count > MAX_TENSORS:
                raise _too_many_error(folder / shard)
            for meta in metas:
                name = text_name(meta.name)
                if weight_map.get(name, shard) == shard:
                    indexed.add(name)
                    cls._add_parts(tensors, unpack_experts(name, meta))
                else:
                    misplaced.setdefault(name, meta)
        stale: list[str] = []
        for name, meta in misplaced.items():
            owner = weight_map[name]
            if name in indexed or folder / owner not in identities:
                where = f"{display_text(meta.name)} in {meta.shard.name}"
                stale.append(f"{where}: the index says {owner}")
            else:  # the index is wrong, and there is no other tensor of this name
                cls._add_parts(tensors, unpack_experts(name, meta))
        unused = [f"not used: {description}" for description in abbreviate(stale)]
        return cls(folder, tensors, identities, (*notes, *unused))

    @staticmethod
    def _add_parts(tensors: dict[str, TensorMeta], parts: Iterable[tuple[str, TensorMeta]]) -> None:
        """Add the parts of a tensor to `tensors`.

        Refuse a name that is there, or too many tensors.
        """
        for name, part in parts:
            if name in tensors:
                other = tensors[name].shard.name
                reason = f"tensor {display_text(name)}: is in {other} too"
                raise CheckpointError(f"{part.shard}: {reason}")
            tensors[name] = part
            if len(tensors) > MAX_TENSORS:
                raise _too_many_error(part.shard)

    @classmethod
    def open(
        cls,
        folder: Path,
        select: Callable[[Mapping[str, str]], Container[str]] | None = None,
        is_extra: Callable[[str], bool] = lambda name: False,
    ) -> Checkpoint:
        """Read and check the headers of all shards; `model.safetensors` counts before an index.

        `select` picks tensors from an index, the shard of each by its name; shards that hold none
        of them are not opened, and may be missing. A file that no index names is read too if
        `is_extra` is true of the name of each of its tensors.
        """
        names = list_folder(folder)
        weight_map: Mapping[str, str] = {}
        notes: list[str] = []
        if WEIGHTS_FILE in names:
            shards = [WEIGHTS_FILE]
            known_files = {WEIGHTS_FILE}
        elif INDEX_FILE in names:
            weight_map = read_weight_map(folder / INDEX_FILE)
            selected = weight_map if select is None else select(weight_map)
            shards = sorted({shard for tensor, shard in weight_map.items() if tensor in selected})
            if missing := [shard for shard in shards if shard not in names]:
                missing_names = ", ".join(abbreviate(missing))
                reason = f"{len(missing)} of {len(shards)} shards are missing: {missing_names}"
                raise incomplete_error(folder, f"{INDEX_FILE}: {reason}")
            known_files = set(weight_map.values())
        else:
            reason = f"there is no {WEIGHTS_FILE} and no {INDEX_FILE}"
            raise not_a_model_error(folder) or incomplete_error(folder, reason)
        for name in names:
            if not name.endswith(".safetensors") or name in known_files:
                continue
            if _holds_only(folder / name, is_extra):
                shards.append(name)
                notes.append(f"not in the index, read for its MTP layers: {display_text(name)}")
            elif weight_map:
                notes.append(f"not in the index, ignored: {display_text(name)}")
        checkpoint = cls.of_shards(folder, shards, notes, weight_map)
        if not checkpoint.tensors:
            raise CheckpointError(f"{checkpoint.shards[0]}: holds no tensors")
        return checkpoint

    def meta(self, name: str) -> TensorMeta:
        """Return a tensor's entry in the header. Raises CheckpointError if there is none."""
        if name not in self.tensors:
            raise self.tensor_error(name, "is not in this checkpoint")
        return self.tensors[name]

    def tensor_error(self, name: str, reason: str) -> CheckpointError:
        """Return the error for a tensor: its file, its name, the reason."""
        where = self.tensors[name].shard if name in self.tensors else self.folder
        return CheckpointError(f"{where}: tensor {display_text(name)}: {reason}")

    def read(
        self, name: str, rows: tuple[int, int] | None = None, into: Tensor | None = None
    ) -> Tensor:
        """Read a tensor, or its rows [first, end), as stored.

        Returns a new tensor on the CPU, or `into` if it is given, with its values converted.
        """
        import torch

        meta = self.meta(name)
        first = 0
        shape = list(meta.shape)
        if rows is not None:
            first = rows[0]
            shape[0] = rows[1] - rows[0]
        dtype = getattr(torch, TORCH_NAMES[meta.dtype])
        tensor = torch.empty(shape, dtype=dtype)  # takes no memory until it is written
        if into is not None and into.is_contiguous() and into.device == tensor.device:
            tensor = into if (into.dtype, into.shape) == (tensor.dtype, tensor.shape) else tensor
        offset = first * (tensor.nbytes // max(1, len(tensor))) if first else 0
        if offset + tensor.nbytes > meta.nbytes:
            raise ValueError(f"{name}: {list(meta.shape)} has no rows {rows}")
        if tensor.nbytes:
            data = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
            self._fill_memory(memoryview(data).cast("B"), meta, offset)
        return tensor if into is None or into is tensor else into.copy_(tensor)

    def read_pieces(self, meta: TensorMeta) -> Iterator[bytes]:
        """Read a tensor's bytes as they are stored, and yield them in pieces."""
        for first in range(0, meta.nbytes, PIECE_BYTES):
            piece = bytearray(min(PIECE_BYTES, meta.nbytes - first))
            self._fill_memory(memoryview(piece), meta, first)
            yield bytes(piece)

    def tensors_equal(self, name: str, other: Checkpoint, other_name: str) -> bool:
        """True if two stored tensors have the same bytes, dtype and shape; reads them in pieces."""
        meta = self.meta(name)
        other_meta = other.meta(other_name)
        if (meta.dtype, meta.shape) != (other_meta.dtype, other_meta.shape):
            return False
        return all(map(eq, self.read_pieces(meta), other.read_pieces(other_meta)))

    def _fill_memory(self, memory: memoryview, meta: TensorMeta, offset: int) -> None:
        """Fill a memory with a tensor's bytes from `offset` on; refuse a file that has changed."""
        read_exactly(self.open_shard(meta.shard), memory, meta.offset + offset, meta.shard)
        self._check_identity(meta.shard)

    def open_shard(self, shard: Path) -> int:
        """Return a descriptor, valid until `close`, of a file that is the one that was checked."""
        self._check_identity(shard)
        if shard not in self._files:
            self._files[shard] = open_regular_file(shard)
        return self._files[shard].fileno()

    def check_unchanged(self) -> None:
        """Refuse a shard that is no longer the file that was opened; for the end of long reads."""
        for shard in self.shards:
            self._check_identity(shard)

    def close(self) -> None:
        """Close the files; tensors already read stay valid, and others can be read again."""
        while self._files:
            self._files.popitem()[1].close()

    def __exit__(self, *exception: object) -> None:
        """Close the files."""
        self.close()

    def _check_identity(self, shard: Path) -> None:
        """Refuse a shard that is no longer the file whose header was checked."""
        with convert_os_errors(shard):
            if file_identity(os.stat(shard)) != self._identities[shard]:
                raise CheckpointError(f"{shard}: changed while in use")


def _too_many_error(shard: Path) -> CheckpointError:
    """Return the error for a shard with which there are too many tensors."""
    return CheckpointError(f"{shard}: holds more than {MAX_TENSORS:,} tensors")


def _holds_only(path: Path, is_extra: Callable[[str], bool]) -> bool:
    """True if a shard with a usual name has tensors, and `is_extra` is true of the names of all.

    Names are compared without the prefix of a model that also reads images. A file whose header
    cannot be read gives False.
    """
    if SHARD_NAME.fullmatch(path.name) is None:
        return False
    try:
        _, metas = read_shard_header(path)
    except CheckpointError:
        return False
    return bool(metas) and all(is_extra(text_name(meta.name)) for meta in metas)


def read_exactly(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill a view from a file's bytes at `offset`; `path` is for messages."""
    while view:
        with convert_os_errors(path):
            count = os.preadv(descriptor, [view], offset)
        if not count:
            raise CheckpointError(f"{path}: was truncated while it was read")
        offset = offset + count
        view = view[count:]


def read_weight_map(path: Path) -> dict[str, str]:
    """Read an index: the shard of every tensor; refuse shards that could leave their folder."""
    fields = Fields.read(path, MAX_INDEX_BYTES)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        reason = "is not an object that names a shard for each tensor"
        raise fields.field_error("weight_map", reason)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            reason = f"{display_text(tensor)}: {display_text(shard)} is not a string"
            raise fields.field_error("weight_map", reason)
    for shard in sorted(set(weight_map.values())):
        reason = f"{display_text(shard)} is not the plain name of a safetensors file"
        if shard.lower().endswith(PICKLE_SUFFIXES):
            reason += ", pickle formats are not supported"
        fields.require(SHARD_NAME.fullmatch(shard) is not None, "weight_map", reason)
    return {text_name(tensor): shard for tensor, shard in weight_map.items()}


def check_tensors(
    checkpoint: Checkpoint,
    expected: Shapes,
    dtypes: AllowedDtypes = FLOATS_ONLY,
    description: str = "tensors",
    fix: Sequence[str] = (),
) -> list[str]:
    """Compare names, shapes and dtypes with those that the model needs; return unexpected names.

    Rotary tables, which older exporters wrote and no model needs, are not among them. One error
    lists all tensors that are missing, mis-shaped or wrongly typed; `description` names the
    expected ones.
    """
    missing: list[str] = []
    misshaped: list[str] = []
    mistyped: list[str] = []
    for name, shape in expected.items():
        meta = checkpoint.tensors.get(name)
        if meta is None:
            missing.append(f"{display_text(name)}: is missing")
            continue
        where = f"{display_text(name)} in {meta.shard.name}"
        if meta.shape != tuple(shape):
            misshaped.append(f"{where}: shape is {list(meta.shape)}, expected {list(shape)}")
        supported = dtypes.get(name, checkpoint.dtypes)
        if meta.dtype not in supported:
            reason = f"is not supported here ({', '.join(supported)} are)"
            mistyped.append(f"{where}: dtype {meta.dtype} {reason}")
    problems = missing + misshaped + mistyped
    if problems:
        groups = {
            "missing": missing,
            "of another shape": misshaped,
            "of an unsupported dtype": mistyped,
        }
        counts = ", ".join(f"{len(group)} {label}" for label, group in groups.items() if group)
        needed = f"{len(expected)} {description} are needed"
        message = f"{checkpoint.folder}: {needed}: {counts}; first: {problems[0]}"
        raise CheckpointError(message, reason=abbreviate(problems), fix=fix)
    unexpected = (name for name in checkpoint.tensors if name not in expected)
    return [name for name in unexpected if not name.endswith("rotary_emb.inv_freq")]
