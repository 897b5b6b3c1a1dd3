"""A GGUF file's tensors by Hugging Face's names: the bytes of each, and what the converter did to them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spd.errors import CheckpointError
from spd.formats.block_config import MAX_EXPERTS
from spd.formats.gguf import changes as to
from spd.formats.gguf.architectures import GgufArchitecture
from spd.formats.gguf.container import GgufFile, GgufTensor
from spd.formats.gguf.names import LAYER, OUTER, Joined, Names
from spd.formats.json_file import Fields, display_text

Shape = tuple[int, ...]
_FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
"""Tensors that stand for several, to each of which the converter did what it does to one of its own."""
_BLOCK = re.compile(r"blk\.([0-9]{1,4})\.(.+)")
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the configuration was made of."""
_SENSES = ("v.", "mm.", "a.")
"""What stands before the names of tensors that see or hear, which Ollama keeps in the model's file."""
MAX_PARTS = 1 << 20
"""Tensors of a model by Hugging Face's names, each expert's matrix counted."""


@dataclass(frozen=True)
class StoredTensor:
    """What a tensor is made of: parts of a file's tensors, and what the converter did to them."""

    parts: tuple[GgufTensor, ...]
    shape: Shape
    """Of the tensor that is meant."""
    changes: tuple[to.Change, ...] = ()
    """To be undone in order; the first one makes one tensor of several parts."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


def stored_tensors(
    file: GgufFile, row: GgufArchitecture, fields: Fields
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors by Hugging Face's names, and the file's own of those that no text needs.

    Raises CheckpointError for an unknown one: one architecture's name covers models of several classes.
    """
    reader = _Reader(row, _Sizes.of(fields.optional_nested("text_config") or fields))
    found: dict[str, StoredTensor] = {}
    unknown: list[str] = []
    for tensor in file.tensors.values():
        named = [*reader.named(tensor, file.tensors)]
        if not named and tensor.name not in _IGNORED and not reader.is_joined(tensor.name):
            if not reader.is_beside(tensor.name):
                why = f"is not known in {display_text(file.metadata.get('general.architecture'))}"
                raise CheckpointError(f"{tensor.path}: tensor {display_text(tensor.name)}: {why}")
            unknown.append(tensor.name)
        for name, stored in named:
            if name in found:
                where = f"{tensor.path}: tensor {display_text(tensor.name)}"
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
    delta_keys: int
    delta_values: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, fields: Fields) -> _Sizes:
        """Return what a configuration says."""

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
            whole("linear_num_key_heads"),
            whole("linear_num_value_heads"),
            whole("linear_key_head_dim"),
            whole("linear_value_head_dim"),
        )

    @property
    def attention_rows(self) -> Sequence[int]:
        """Return the rows of queries, keys and values."""
        keys = self.key_heads * self.head_dim
        return self.heads * self.head_dim, keys, keys

    def tiled(self, width: int, *, behind_keys: bool = False, dim: int = 0) -> to.TiledHeads | None:
        """Return how value heads of `width` rows are tiled; None where each key has one."""
        keys = self.delta_keys
        if not keys or self.delta_values in (0, keys):
            return None
        first = 2 * keys * self.key_dim if behind_keys else 0
        return to.TiledHeads(keys, self.delta_values // keys, width, first, dim)


@dataclass(frozen=True)
class _Reader:
    """Names and changes of one architecture in a model's sizes."""

    row: GgufArchitecture
    sizes: _Sizes

    def named(
        self, tensor: GgufTensor, tensors: Mapping[str, GgufTensor]
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the names that a tensor, or each of its parts, has in Hugging Face's checkpoint."""
        prefix, own = self._place(tensor.name)
        if prefix is None:
            return
        joined = self._joined(tensor.name)
        if joined is not None:
            stem = tensor.name.removesuffix(joined.parts[0])
            others = [tensors.get(f"{stem}{part}") for part in joined.parts]
            parts = [each for each in others if each is not None]
            if tensor.name.endswith(joined.parts[0]) and len(parts) == len(joined.parts):
                yield from self._whole(prefix, joined, parts)
            return
        target, suffix = self._target(tensor.name, own)
        if target is None:
            return
        targets = (target,) if isinstance(target, str) else target
        alike = _FUSED.get(own.removesuffix(suffix)) if len(targets) > 1 else None
        owns = [f"{stem}{suffix}" for stem in alike] if alike else [own] * len(targets)
        cut = zip(targets, owns, self._cut(tensor, targets), strict=True)
        for each, own_name, part in cut:
            changes = self._changes(own_name)
            name = f"{prefix}{each}{suffix}"
            shape = _RESHAPED.get(own, _same)(part.shape)
            if "{e}" not in each:
                yield name, StoredTensor((part,), shape, changes)
                continue
            for number in range(_experts(tensor)):
                expert = _expert(part, number)
                yield name.format(e=number), StoredTensor((expert,), expert.shape, changes)

    def is_beside(self, name: str) -> bool:
        """True if a tensor is of what sees or hears, or of layers behind the model's own."""
        block = _BLOCK.fullmatch(name)
        behind = block is not None and int(block[1]) >= self.sizes.layers
        return behind or name.startswith(_SENSES)

    def is_joined(self, name: str) -> bool:
        """True if a tensor is a part of one that the converter cut."""
        return self._joined(name) is not None

    def _joined(self, name: str) -> Joined | None:
        block = _BLOCK.fullmatch(name)
        if block is None:
            return None
        return next((each for each in self.row.joined if block[2] in each.parts), None)

    def _place(self, name: str) -> tuple[str | None, str]:
        """Return what stands before a tensor's name there, None where that is not known, and its own here."""
        block = _BLOCK.fullmatch(name)
        if block is None:
            return "", name
        layer = int(block[1])
        behind = layer - self.sizes.layers
        if behind < 0:
            return f"model.layers.{layer}.", block[2]
        if self.row.mtp is None:
            return None, block[2]
        stem = block[2].rpartition(".")[0]
        if stem in self.row.mtp.outer:
            return "", block[2]
        return self.row.mtp.layer.format(i=behind, l=layer), block[2]

    def _target(self, name: str, own: str) -> tuple[str | tuple[str, ...] | None, str]:
        """Return a tensor's name there, or names, and the ending behind it."""
        stem, _, ending = own.rpartition(".")
        names = {**OUTER, **self.row.outer}
        if (block := _BLOCK.fullmatch(name)) is not None:
            names = {**LAYER, **self.row.names}
            behind = int(block[1]) - self.sizes.layers
            if behind >= 0 and self.row.mtp is not None and stem in self.row.mtp.outer:
                outer = self.row.mtp.outer[stem].format(i=behind, l=int(block[1]))
                return outer, f".{ending}"
        return _looked_up(names, own, stem, ending)

    def _changes(self, own: str) -> tuple[to.Change, ...]:
        """Return what the converter did to a tensor, in this model's sizes."""
        sizes = self.sizes
        found: list[to.Change | None] = []
        if own.endswith("norm.weight") and self.row.centred and own != "ssm_norm.weight":
            found.append(to.ShiftedNorm())
        name = self.row.changes.get(own.removesuffix(".weight").removesuffix(".bias"))
        if name == "query_pairs":
            found.append(to.PermutedHeads(sizes.heads))
        elif name == "key_pairs":
            found.append(to.PermutedHeads(sizes.key_heads))
        elif name == "decay":
            found.append(to.NegatedExp())
        elif name == "tiled_decay":
            found += [to.NegatedExp(), sizes.tiled(1)]
        elif name == "tiled_heads":
            found.append(sizes.tiled(1))
        elif name == "tiled_values":
            found.append(sizes.tiled(sizes.value_dim))
        elif name == "tiled_channels":
            found.append(sizes.tiled(sizes.value_dim, behind_keys=True))
        elif name == "tiled_columns":
            found.append(sizes.tiled(sizes.value_dim, dim=1))
        return tuple(each for each in found if each is not None)

    def _cut(self, tensor: GgufTensor, targets: Sequence[str]) -> Iterator[GgufTensor]:
        """Yield the parts of a tensor that was made of several matrices below each other."""
        if len(targets) == 1:
            yield tensor
            return
        stacked = "{e}" in targets[0] and len(tensor.shape) == 3
        rows = tensor.shape[1 if stacked else 0]
        counts = self.sizes.attention_rows
        if stacked:
            counts = [rows // len(targets)] * len(targets)
        if sum(counts) != rows:
            why = f"{rows} rows are not {' + '.join(map(str, counts))}"
            raise CheckpointError(f"{tensor.path}: tensor {display_text(tensor.name)}: {why}")
        first = 0
        for count in counts:
            yield _inner_rows(tensor, first, count) if stacked else _rows(tensor, first, count)
            first += count

    def _whole(
        self, prefix: str, joined: Joined, parts: Sequence[GgufTensor]
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Yield a tensor that the converter cut into parts, or those of all experts."""
        name = f"{prefix}{joined.name}"
        if "{e}" not in name:
            yield name, self._made(joined, parts)
            return
        for number in range(min(map(_experts, parts))):
            own = [_expert(part, number) for part in parts]
            yield name.format(e=number), self._made(joined, own)

    def _made(self, joined: Joined, parts: Sequence[GgufTensor]) -> StoredTensor:
        """Return a tensor of its parts. Raises CheckpointError where they do not fit each other."""
        first = parts[0].shape
        sizes = self.sizes
        _check_fit(joined, parts)
        if joined.change == "below":
            rows = sum(part.shape[0] for part in parts)
            return StoredTensor(tuple(parts), (rows, *first[1:]), (to.Concatenated(),))
        if joined.change == "interleaved":
            dim = 0 if joined.name.endswith("weight") else len(first) - 1
            shape = (*first[:dim], 2 * first[dim], *first[dim + 1 :])
            return StoredTensor(tuple(parts), shape, (to.Interleaved(dim + 1),))
        if joined.change == "latent_heads":
            heads, rank, nope = first
            rows = heads * (nope + parts[1].shape[-2])
            return StoredTensor(tuple(parts), (rows, rank), (to.LatentHeads(),))
        keys = sizes.delta_keys
        values = first[0] - 2 * keys * sizes.key_dim
        if not keys or values <= 0 or values % keys or parts[1].shape[0] != values:
            why = f"{first[0]} rows are not those of {keys} key heads and of their values"
            raise CheckpointError(f"{parts[0].path}: tensor {display_text(parts[0].name)}: {why}")
        rows = first[0] + values
        change = to.KeyHeadMajor(sizes.delta_keys, sizes.key_dim)
        return StoredTensor(tuple(parts), (rows, *first[1:]), (change,))


def _check_fit(joined: Joined, parts: Sequence[GgufTensor]) -> None:
    """Refuse parts of one tensor whose shapes are not such parts'."""
    shapes = [part.shape for part in parts]
    first, second = shapes
    fits = len(first) == len(second) > 1 and first[1:] == second[1:]
    if joined.change == "interleaved":
        fits = first == second
    elif joined.change == "latent_heads":
        fits = len(first) == len(second) == 3 and (first[0], first[1]) == (second[0], second[2])
    if not fits:
        why = f"{list(first)} does not fit {list(second)} of {display_text(parts[1].name)}"
        raise CheckpointError(f"{parts[0].path}: tensor {display_text(parts[0].name)}: shape {why}")


def _experts(tensor: GgufTensor) -> int:
    """Return how many experts a tensor stacks. Raises CheckpointError for one that stacks none."""
    count = tensor.shape[0]
    if len(tensor.shape) < 2 or count > MAX_EXPERTS:
        why = f"shape {list(tensor.shape)} does not stack up to {MAX_EXPERTS:,} experts"
        raise CheckpointError(f"{tensor.path}: tensor {display_text(tensor.name)}: {why}")
    return count


def _looked_up(
    names: Names, own: str, stem: str, ending: str
) -> tuple[str | tuple[str, ...] | None, str]:
    """Return the name that stands for a tensor's own, whole or without its ending, and what is behind it."""
    if own in names:
        return names[own], ""
    if stem in names and ending in ("weight", "bias"):
        return names[stem], f".{ending}"
    return None, ""


def _rows(tensor: GgufTensor, first: int, count: int) -> GgufTensor:
    """Return some of a tensor's rows, the outermost dimension counted."""
    nbytes = tensor.nbytes // tensor.shape[0]
    offset = tensor.offset + first * nbytes
    return replace(tensor, shape=(count, *tensor.shape[1:]), offset=offset, nbytes=count * nbytes)


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


def _same(shape: Shape) -> Shape:
    return shape


def _flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def _row(shape: Shape) -> Shape:
    return (1, math.prod(shape))


def _middle(shape: Shape) -> Shape:
    return (shape[0], 1, *shape[1:])


_RESHAPED: Mapping[str, Callable[[Shape], Shape]] = {
    "ssm_conv1d.weight": _middle,
    "shortconv.conv.weight": _middle,
    "ssm_a": _flat,
    "ssm_d": _flat,
    "ssm_norm.weight": _flat,
    "ffn_gate_inp_shexp.weight": _row,
}
"""Shapes that the converter made other ones of, by names."""
