"""A GGUF file's tensors by Hugging Face's names: the bytes of each, and the converter's changes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spd.errors import CheckpointError
from spd.formats.block_config import MAX_EXPERTS
from spd.formats.gguf.architectures import GgufArchitecture
from spd.formats.gguf.changes import (
    Change,
    Concatenated,
    Interleaved,
    KeyHeadMajor,
    LatentHeads,
    NegatedExp,
    PermutedHeads,
    ShiftedNorm,
    TiledHeads,
)
from spd.formats.gguf.container import GgufFile, GgufTensor
from spd.formats.gguf.names import LAYER_NAMES, OUTER_NAMES, JoinedTensor, Names
from spd.formats.json_file import Fields, display_text

Shape = tuple[int, ...]
_FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
"""Tensors that are several in one; the converter changes each as if it were alone."""
_BLOCK = re.compile(r"blk\.([0-9]{1,4})\.(.+)")
"""The file's name of a layer's tensor: the layer's number, and the name behind it."""
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the configuration."""
_MULTIMODAL_PREFIXES = ("v.", "mm.", "a.")
"""Prefixes of the tensors of images and sound, which Ollama stores in the model's file."""
MAX_MODEL_MATRICES = 1 << 20
"""Tensors of a model by Hugging Face's names, where each expert has its own."""


@dataclass(frozen=True)
class StoredTensor:
    """The parts of a file's tensors that form a tensor, and the converter's changes to them."""

    parts: tuple[GgufTensor, ...]
    shape: Shape
    """The shape of the tensor that the parts form."""
    changes: tuple[Change, ...] = ()
    """Changes to undo in order; the first one joins several parts."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


def stored_tensors(
    file: GgufFile, architecture: GgufArchitecture, fields: Fields
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors by Hugging Face's names, and the file's names of those that no text needs.

    fields: the configuration, by which rows are split. Raises CheckpointError for an unknown
    tensor: models of several classes have one architecture's name.
    """
    reader = _TensorReader(architecture, _Sizes.of(fields.optional_nested("text_config") or fields))
    tensors: dict[str, StoredTensor] = {}
    unused: list[str] = []
    for tensor in file.tensors.values():
        parts = [*reader.read_parts(tensor, file.tensors)]
        if not parts and tensor.name not in _IGNORED and not reader.is_joined(tensor.name):
            if not reader.is_outside_text(tensor.name):
                where = f"{tensor.path}: tensor {display_text(tensor.name)}"
                name = display_text(file.metadata.get("general.architecture"))
                raise CheckpointError(f"{where}: is not known in {name}")
            unused.append(tensor.name)
        for name, stored in parts:
            if name in tensors:
                where = f"{tensor.path}: tensor {display_text(tensor.name)}"
                raise CheckpointError(f"{where}: is there under another name too")
            tensors[name] = stored
        if len(tensors) > MAX_MODEL_MATRICES:
            raise CheckpointError(f"{file.path}: holds more than {MAX_MODEL_MATRICES:,} matrices")
    return tensors, unused


@dataclass(frozen=True)
class _Sizes:
    """The numbers by which rows of tensors are split; 0 where the file does not have them."""

    layers: int
    heads: int
    """Query heads of attention."""
    key_heads: int
    """Key heads of attention."""
    head_dim: int
    delta_keys: int
    """Key heads of DeltaNet layers."""
    delta_values: int
    """Value heads of DeltaNet layers."""
    key_dim: int
    """Rows of a key head of DeltaNet layers."""
    value_dim: int
    """Rows of a value head of DeltaNet layers."""

    @classmethod
    def of(cls, fields: Fields) -> _Sizes:
        """Return the numbers in a configuration."""

        def positive_integer(key: str, default: int = 0) -> int:
            """Return the value of a key if it is a whole number above 0, else the default."""
            value = fields.get(key)
            return value if type(value) is int and value > 0 else default

        heads = positive_integer("num_attention_heads")
        width = positive_integer("hidden_size") // heads if heads else 0
        return cls(
            layers=positive_integer("num_hidden_layers"),
            heads=heads,
            key_heads=positive_integer("num_key_value_heads", heads),
            head_dim=positive_integer("head_dim", width),
            delta_keys=positive_integer("linear_num_key_heads"),
            delta_values=positive_integer("linear_num_value_heads"),
            key_dim=positive_integer("linear_key_head_dim"),
            value_dim=positive_integer("linear_value_head_dim"),
        )

    @property
    def attention_rows(self) -> Sequence[int]:
        """Return the numbers of rows of queries, keys and values."""
        keys = self.key_heads * self.head_dim
        return self.heads * self.head_dim, keys, keys

    def tiled(self, width: int, *, behind_keys: bool = False, dim: int = 0) -> TiledHeads | None:
        """Return the change that tiles value heads of `width` rows; None where key heads have one.

        behind_keys: the heads follow the rows of queries and keys. dim: the tensor's dimension in
        which the heads lie.
        """
        keys = self.delta_keys
        if not keys or self.delta_values in (0, keys):
            return None
        first = 2 * keys * self.key_dim if behind_keys else 0
        return TiledHeads(
            keys=keys, per_key=self.delta_values // keys, width=width, first=first, dim=dim
        )


@dataclass(frozen=True)
class _TensorReader:
    """Names and changes of one architecture's tensors, for a model's sizes."""

    architecture: GgufArchitecture
    sizes: _Sizes

    def read_parts(
        self, tensor: GgufTensor, tensors: Mapping[str, GgufTensor]
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Yield Hugging Face's names of a tensor or of its parts, with what is stored of each.

        Nothing for an unknown tensor. A tensor that the converter split is yielded for its first
        part. Raises CheckpointError for shapes that do not fit.
        """
        prefix, gguf_name = self._split_name(tensor.name)
        if prefix is None:
            return
        joined = self._find_joined(tensor.name)
        if joined is not None:
            stem = tensor.name.removesuffix(joined.parts[0])
            candidates = [tensors.get(f"{stem}{part}") for part in joined.parts]
            parts = [candidate for candidate in candidates if candidate is not None]
            if tensor.name.endswith(joined.parts[0]) and len(parts) == len(joined.parts):
                yield from self._join_all(prefix, joined, parts)
            return
        names, suffix = self._target_names(tensor.name, gguf_name)
        if names is None:
            return
        targets = (names,) if isinstance(names, str) else names
        gguf_names = [gguf_name] * len(targets)
        fused_names = _FUSED.get(gguf_name.removesuffix(suffix))
        if fused_names is not None and len(targets) > 1:
            gguf_names = [f"{stem}{suffix}" for stem in fused_names]
        matrices = self._split_rows(tensor, targets)
        for target, part_name, part in zip(targets, gguf_names, matrices, strict=True):
            changes = self._changes_to(part_name)
            name = f"{prefix}{target}{suffix}"
            reshape = _SHAPES_BY_TARGET.get(target) or _HUGGING_FACE_SHAPES.get(gguf_name)
            shape = part.shape if reshape is None else reshape(part.shape)
            if "{e}" not in target:
                yield name, StoredTensor((part,), shape, changes)
                continue
            for number in range(_count_experts(tensor)):
                expert = _select_expert(part, number)
                yield name.format(e=number), StoredTensor((expert,), expert.shape, changes)

    def is_outside_text(self, name: str) -> bool:
        """True if a tensor is of images or sound, or of layers behind the model's."""
        block = _BLOCK.fullmatch(name)
        behind = block is not None and int(block[1]) >= self.sizes.layers
        return behind or name.startswith(_MULTIMODAL_PREFIXES)

    def is_joined(self, name: str) -> bool:
        """True if a tensor is a part of one that the converter split."""
        return self._find_joined(name) is not None

    def _find_joined(self, name: str) -> JoinedTensor | None:
        """Return the split tensor that a tensor of the file is a part of; None without one."""
        block = _BLOCK.fullmatch(name)
        if block is None:
            return None
        for joined in self.architecture.joined_tensors:
            if block[2] in joined.parts:
                return joined
        return None

    def _split_name(self, name: str) -> tuple[str | None, str]:
        """Return the prefix of Hugging Face's name, and the rest of the file's name.

        A prefix of None means that the tensor is not known.
        """
        block = _BLOCK.fullmatch(name)
        if block is None:
            return "", name
        layer = int(block[1])
        mtp_layer = layer - self.sizes.layers
        mtp = self.architecture.mtp
        if mtp_layer < 0:
            return f"model.layers.{layer}.", block[2]
        if mtp is None:
            return None, block[2]
        stem = block[2].rpartition(".")[0]
        if stem in mtp.outer:
            return "", block[2]
        return mtp.layer.format(i=mtp_layer, l=layer), block[2]

    def _target_names(self, name: str, gguf_name: str) -> tuple[str | tuple[str, ...] | None, str]:
        """Return a tensor's name in Hugging Face, or names, and the ending behind it."""
        stem, _, ending = gguf_name.rpartition(".")
        names = {**OUTER_NAMES, **self.architecture.outer_names}
        block = _BLOCK.fullmatch(name)
        if block is not None:
            names = {**LAYER_NAMES, **self.architecture.names}
            layer = int(block[1])
            mtp_layer = layer - self.sizes.layers
            mtp = self.architecture.mtp
            if mtp_layer >= 0 and mtp is not None and stem in mtp.outer:
                return mtp.outer[stem].format(i=mtp_layer, l=layer), f".{ending}"
        return _look_up_name(names, gguf_name, stem, ending)

    def _changes_to(self, gguf_name: str) -> tuple[Change, ...]:
        """Return the converter's changes to the tensor of a name, for this model's sizes."""
        sizes = self.sizes
        changes: list[Change | None] = []
        is_norm = gguf_name.endswith("norm.weight") and gguf_name != "ssm_norm.weight"
        if is_norm and self.architecture.norms_plus_one:
            changes.append(ShiftedNorm())
        stem = gguf_name.removesuffix(".weight").removesuffix(".bias")
        name = self.architecture.changes.get(stem)
        if name == "query_pairs":
            changes.append(PermutedHeads(sizes.heads))
        elif name == "key_pairs":
            changes.append(PermutedHeads(sizes.key_heads))
        elif name == "decay":
            changes.append(NegatedExp())
        elif name == "tiled_decay":
            changes += [NegatedExp(), sizes.tiled(1)]
        elif name == "tiled_heads":
            changes.append(sizes.tiled(1))
        elif name == "tiled_values":
            changes.append(sizes.tiled(sizes.value_dim))
        elif name == "tiled_channels":
            changes.append(sizes.tiled(sizes.value_dim, behind_keys=True))
        elif name == "tiled_columns":
            changes.append(sizes.tiled(sizes.value_dim, dim=1))
        return tuple(change for change in changes if change is not None)

    def _split_rows(self, tensor: GgufTensor, targets: Sequence[str]) -> Iterator[GgufTensor]:
        """Yield a tensor's part for each target: rows of several matrices that follow each other.

        Raises CheckpointError where the tensor has another number of rows.
        """
        if len(targets) == 1:
            yield tensor
            return
        stacked = "{e}" in targets[0] and len(tensor.shape) == 3
        rows = tensor.shape[1 if stacked else 0]
        counts = self.sizes.attention_rows
        if stacked:
            counts = [rows // len(targets)] * len(targets)
        if sum(counts) != rows:
            reason = f"{rows} rows are not {' + '.join(map(str, counts))}"
            raise CheckpointError(f"{tensor.path}: tensor {display_text(tensor.name)}: {reason}")
        select = _select_expert_rows if stacked else _select_rows
        first = 0
        for count in counts:
            yield select(tensor, first, count)
            first += count

    def _join_all(
        self, prefix: str, joined: JoinedTensor, parts: Sequence[GgufTensor]
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Yield a tensor that the converter split, or those of all experts."""
        name = f"{prefix}{joined.name}"
        if "{e}" not in name:
            yield name, self._joined_tensor(joined, parts)
            return
        for number in range(min(map(_count_experts, parts))):
            expert_parts = [_select_expert(part, number) for part in parts]
            yield name.format(e=number), self._joined_tensor(joined, expert_parts)

    def _joined_tensor(self, joined: JoinedTensor, parts: Sequence[GgufTensor]) -> StoredTensor:
        """Return the tensor that parts form.

        Raises CheckpointError where they do not fit each other.
        """
        first = parts[0].shape
        sizes = self.sizes
        _check_fit(joined, parts)
        if joined.change == "below":
            rows = sum(part.shape[0] for part in parts)
            return StoredTensor(tuple(parts), (rows, *first[1:]), (Concatenated(),))
        if joined.change == "interleaved":
            dim = 0 if joined.name.endswith("weight") else len(first) - 1
            shape = (*first[:dim], 2 * first[dim], *first[dim + 1 :])
            return StoredTensor(tuple(parts), shape, (Interleaved(dim + 1),))
        if joined.change == "latent_heads":
            heads, rank, nope = first
            rows = heads * (nope + parts[1].shape[-2])
            return StoredTensor(tuple(parts), (rows, rank), (LatentHeads(),))
        keys = sizes.delta_keys
        values = first[0] - 2 * keys * sizes.key_dim
        if not keys or values <= 0 or values % keys or parts[1].shape[0] != values:
            reason = f"{first[0]} rows are not those of {keys} key heads and of their values"
            where = f"{parts[0].path}: tensor {display_text(parts[0].name)}"
            raise CheckpointError(f"{where}: {reason}")
        rows = first[0] + values
        change = KeyHeadMajor(sizes.delta_keys, sizes.key_dim)
        return StoredTensor(tuple(parts), (rows, *first[1:]), (change,))


def _check_fit(joined: JoinedTensor, parts: Sequence[GgufTensor]) -> None:
    """Refuse parts of one tensor whose shapes do not fit each other."""
    shapes = [part.shape for part in parts]
    first, second = shapes
    fits = len(first) == len(second) > 1 and first[1:] == second[1:]
    if joined.change == "interleaved":
        fits = first == second
    elif joined.change == "latent_heads":
        fits = len(first) == len(second) == 3 and (first[0], first[1]) == (second[0], second[2])
    if not fits:
        reason = f"{list(first)} does not fit {list(second)} of {display_text(parts[1].name)}"
        raise CheckpointError(
            f"{parts[0].path}: tensor {display_text(parts[0].name)}: shape {reason}"
        )


def _count_experts(tensor: GgufTensor) -> int:
    """Return the number of experts in a tensor. Raises CheckpointError for a tensor of none."""
    count = tensor.shape[0]
    if len(tensor.shape) < 2 or count > MAX_EXPERTS:
        reason = f"shape {list(tensor.shape)} does not stack up to {MAX_EXPERTS:,} experts"
        raise CheckpointError(f"{tensor.path}: tensor {display_text(tensor.name)}: {reason}")
    return count


def _look_up_name(
    names: Names, gguf_name: str, stem: str, ending: str
) -> tuple[str | tuple[str, ...] | None, str]:
    """Return the name, or names, for a tensor's in the file, and the ending to put behind it.

    The table may have the file's name with its ending, and nothing is put behind, or without it.
    None where it has neither.
    """
    if gguf_name in names:
        return names[gguf_name], ""
    if stem in names and ending in ("weight", "bias"):
        return names[stem], f".{ending}"
    return None, ""


def _select_rows(tensor: GgufTensor, first: int, count: int) -> GgufTensor:
    """Return `count` entries of a tensor's outermost dimension, from the index `first` on."""
    nbytes = tensor.nbytes // tensor.shape[0]
    offset = tensor.offset + first * nbytes
    return replace(tensor, shape=(count, *tensor.shape[1:]), offset=offset, nbytes=count * nbytes)


def _select_expert_rows(tensor: GgufTensor, first: int, count: int) -> GgufTensor:
    """Return the same rows of every expert, which are not neighbours.

    Only `_select_expert` may read them.

    The offset is that of the first expert's rows; the bytes are those of all experts.
    """
    per_row = tensor.nbytes // math.prod(tensor.shape[:2])
    offset = tensor.offset + first * per_row
    return replace(tensor, shape=(tensor.shape[0], count, tensor.shape[2]), offset=offset)


def _select_expert(part: GgufTensor, number: int) -> GgufTensor:
    """Return one expert's matrix in a tensor of all experts, or in the same rows of all."""
    step = part.nbytes // part.shape[0]
    nbytes = part.type.row_bytes(part.shape[-1]) * math.prod(part.shape[1:-1])
    return replace(part, shape=part.shape[1:], offset=part.offset + number * step, nbytes=nbytes)


def _as_vector(shape: Shape) -> Shape:
    """Return the shape of the same elements in one dimension."""
    return (math.prod(shape),)


def _as_row(shape: Shape) -> Shape:
    """Return the shape of the same elements in a matrix of one row."""
    return (1, math.prod(shape))


def _with_middle_dim(shape: Shape) -> Shape:
    """Return a shape with a dimension of 1 behind the first."""
    return (shape[0], 1, *shape[1:])


_HUGGING_FACE_SHAPES: Mapping[str, Callable[[Shape], Shape]] = {
    "ssm_conv1d.weight": _with_middle_dim,
    "shortconv.conv.weight": _with_middle_dim,
    "ssm_a": _as_vector,
    "ssm_d": _as_vector,
    "ssm_norm.weight": _as_vector,
    "ffn_gate_inp_shexp.weight": _as_row,
}
"""Functions from shapes in the file to Hugging Face's, by names."""
_SHAPES_BY_TARGET: Mapping[str, Callable[[Shape], Shape]] = {
    "mlp.moe_statics.e_score_correction_bias": _as_row,
}
"""The same by Hugging Face's names, where only one architecture has the shape.

The converter writes a row; llama-quantize writes a vector.
"""
