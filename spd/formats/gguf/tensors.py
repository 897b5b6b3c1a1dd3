"""A GGUF file's tensors by Hugging Face's names: the bytes of each, and what the converter did to them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spd.errors import CheckpointError
from spd.formats.gguf.architectures import NAMES, OUTER, ChangeName, GgufArchitecture
from spd.formats.gguf.changes import Change, HeadPairs, Shifted
from spd.formats.gguf.container import GgufFile, GgufTensor
from spd.formats.json_file import Fields, shown

Shape = tuple[int, ...]
_BLOCK = re.compile(r"blk\.([0-9]{1,4})\.(.+)")
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the configuration was made of."""
MAX_PARTS = 1 << 20
"""Tensors of a model by Hugging Face's names, each expert's matrix counted."""


@dataclass(frozen=True)
class StoredTensor:
    """What a tensor is made of: parts of a file's tensors, and what the converter did to them."""

    parts: tuple[GgufTensor, ...]
    shape: Shape
    """Of the tensor that is meant."""
    change: Change | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


def rows_of(tensor: GgufTensor, first: int, count: int) -> GgufTensor:
    """Return some of a tensor's rows, the outermost dimension counted."""
    nbytes = tensor.nbytes // tensor.shape[0]
    return replace(
        tensor,
        shape=(count, *tensor.shape[1:]),
        offset=tensor.offset + first * nbytes,
        nbytes=count * nbytes,
    )


def stored_tensors(
    file: GgufFile, row: GgufArchitecture, fields: Fields
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors by Hugging Face's names, and the file's names that stand for nothing known."""
    sizes = _Sizes.of(fields)
    found: dict[str, StoredTensor] = {}
    unknown: list[str] = []
    for tensor in file.tensors.values():
        named = [*_named(tensor, row, sizes)]
        if not named and tensor.name not in _IGNORED:
            unknown.append(tensor.name)
        for name, stored in named:
            if name in found:
                where = f"{tensor.path}: tensor {shown(tensor.name)}"
                raise CheckpointError(f"{where}: is there under another name too")
            found[name] = stored
        if len(found) > MAX_PARTS:
            raise CheckpointError(f"{file.path}: holds more than {MAX_PARTS:,} matrices")
    return found, unknown


@dataclass(frozen=True)
class _Sizes:
    """The numbers that rows of tensors are cut by, 0 where the file does not say them."""

    layers: int
    heads: int
    key_heads: int
    head_dim: int

    @classmethod
    def of(cls, fields: Fields) -> _Sizes:
        def whole(key: str, default: int = 0) -> int:
            value = fields.get(key)
            return value if type(value) is int and value > 0 else default

        heads = whole("num_attention_heads")
        width = whole("hidden_size") // heads if heads else 0
        return cls(
            whole("num_hidden_layers"),
            heads,
            whole("num_key_value_heads", heads),
            whole("head_dim", width),
        )

    @property
    def attention_rows(self) -> Sequence[int]:
        """Return the rows of queries, keys and values."""
        keys = self.key_heads * self.head_dim
        return self.heads * self.head_dim, keys, keys


def _named(
    tensor: GgufTensor, row: GgufArchitecture, sizes: _Sizes
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the names that a tensor, or each of its parts, has in Hugging Face's checkpoint."""
    block = _BLOCK.fullmatch(tensor.name)
    own = block[2] if block else tensor.name
    names = {**NAMES, **row.names} if block else OUTER
    stem, _, ending = own.rpartition(".")
    known = names.get(own)
    suffix = ""
    if known is None and ending in ("weight", "bias"):
        known = names.get(stem)
        suffix = f".{ending}"
    if known is None:
        return
    prefix = f"model.layers.{block[1]}." if block else ""
    change = _change(row.changes.get(stem), own, row, sizes)
    targets = (known,) if isinstance(known, str) else known
    for target, part in zip(targets, _cut(tensor, targets, sizes), strict=True):
        shape = _RESHAPED.get(own, _same)(part.shape)
        if "{e}" not in target:
            yield f"{prefix}{target}{suffix}", StoredTensor((part,), shape, change)
            continue
        for number in range(tensor.shape[0]):
            expert = _expert(part, number)
            name = f"{prefix}{target.format(e=number)}{suffix}"
            yield name, StoredTensor((expert,), expert.shape, change)


def _cut(tensor: GgufTensor, targets: Sequence[str], sizes: _Sizes) -> Iterator[GgufTensor]:
    """Yield the parts of a tensor that several matrices below each other were made one of."""
    if len(targets) == 1:
        yield tensor
        return
    stacked = "{e}" in targets[0]
    rows = tensor.shape[1] if stacked and len(tensor.shape) == 3 else tensor.shape[0]
    counts = [rows // len(targets)] * len(targets) if stacked else sizes.attention_rows
    if sum(counts) != rows:
        why = f"{rows} rows are not {' + '.join(map(str, counts))}"
        raise CheckpointError(f"{tensor.path}: tensor {shown(tensor.name)}: {why}")
    first = 0
    for count in counts:
        yield _inner_rows(tensor, first, count) if stacked else rows_of(tensor, first, count)
        first += count


def _inner_rows(tensor: GgufTensor, first: int, count: int) -> GgufTensor:
    """Return the same rows of every expert, which stand apart: only `_expert` may read them.

    Offset and bytes are those of the first expert; the shape's first number counts experts.
    """
    per_row = tensor.nbytes // math.prod(tensor.shape[:2])
    offset = tensor.offset + first * per_row
    return replace(tensor, shape=(tensor.shape[0], count, tensor.shape[2]), offset=offset)


def _expert(part: GgufTensor, number: int) -> GgufTensor:
    """Return one expert's matrix of what holds all of them, or of their equal rows."""
    step = part.nbytes // part.shape[0]
    nbytes = part.type.row_bytes(part.shape[-1]) * math.prod(part.shape[1:-1])
    return replace(part, shape=part.shape[1:], offset=part.offset + number * step, nbytes=nbytes)


def _change(
    name: ChangeName | None, own: str, row: GgufArchitecture, sizes: _Sizes
) -> Change | None:
    """Return what the converter did to a tensor, in this model's sizes."""
    if name == "query_pairs":
        return HeadPairs(sizes.heads)
    if name == "key_pairs":
        return HeadPairs(sizes.key_heads)
    if row.centred and own.endswith("norm.weight"):
        return Shifted()
    return None


def _same(shape: Shape) -> Shape:
    return shape


_RESHAPED: Mapping[str, Callable[[Shape], Shape]] = {}
"""Shapes that the converter made other ones of, by names."""
