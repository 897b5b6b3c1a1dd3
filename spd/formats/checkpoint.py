"""The weights of a model folder: one `model.safetensors`, or shards listed in an index.

Opening reads and checks headers only (no torch); tensors are read after making sure that the file is still
the one whose header was checked. Nothing is mapped: a map of a file that is cut short kills the process.
Headers are what the official reader accepts, except duplicate keys, of which that reader keeps the last.
Source: https://github.com/huggingface/safetensors#format and `safetensors/src/tensor.rs`.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import eq
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from spd.errors import CheckpointError
from spd.formats.hub import PICKLE_SUFFIXES, incomplete_error, not_a_model_error
from spd.formats.json_file import (
    Fields,
    FileIdentity,
    abbreviate,
    convert_os_errors,
    decode_utf8,
    display_text,
    file_identity,
    list_folder,
    open_regular_file,
)
from spd.formats.names import INDEX_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from torch import Tensor

MAX_TENSORS = 1 << 20
MAX_NUMBER = (1 << 64) - 1
INDEX_LIMIT = (
    40_000_000  # bytes; the largest published ones, of 140 thousand tensors, have 20 million
)
HEADER_LIMIT = (
    40_000_000  # bytes; 90 thousand tensors of one file take 12 million, the official reader 100
)
PIECE = 8 << 20  # bytes of a tensor that are in memory at a time, where it goes from file to file
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
"""What torch calls the dtypes of a checkpoint that it can hold."""
_CODES = "F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16"
_CODES += " I32 U32 F32 I64 U64 F64 C64"
DTYPE_BITS = {"BOOL": 8, **{code: int(re.findall(r"\d+", code)[0]) for code in _CODES.split()}}
"""Bits of an element, which each code says first."""

SHARD_NAME = re.compile(
    r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)\.)[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors"
)
"""Of a file that stays in its folder, under POSIX and Windows rules."""


class TensorMeta(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    dtype: str  # the safetensors code
    shape: tuple[int, ...]
    shard: Path
    nbytes: int
    offset: int  # of its first byte, from the beginning of the file


Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
AllowedDtypes = Mapping[str, Sequence[str]]  # dtypes of tensors that are no floats
FLOATS_ONLY: AllowedDtypes = MappingProxyType({})
Metas = Mapping[str, TensorMeta]
_WRAPPED = {"model.language_model.": "model.", "language_model.model.": "model."}
_WRAPPED |= {"language_model.lm_head.": "lm_head.", "backbone.": "model.", "layers.0.": "midlayer."}
"""What stands before the names of a text model's tensors inside one that sees images too, and without it;
and before those of an EAGLE-3 head's layer, in vLLM's layout and in its authors'."""
_PARTS = ("gate", "up", "down")
_SCALES = ("", "_scale", "_scale_2")
_RENAMED = {
    "block_sparse_moe": "mlp",
    "router.layer": "gate",
    "mlp.router": "mlp.gate",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
    **{f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
    **{
        f"mixer.{name}": f"mamba.{name}"
        for name in ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm")
    },
    "mixer.out_proj": "mamba.out_proj",
    "mixer": "mlp",
    "embeddings": "embed_tokens",
    "norm_f": "norm",
    "shared_mlp.input_linear": "mlp.shared_mlp.gate_up_proj",
    "shared_mlp.output_linear": "mlp.shared_mlp.down_proj",
    "weight_scale_inv": "weight_scale",
    **{
        f"moe.{name}_proj.weight{of}": f"mlp.experts.{name}_proj{of}"
        for name in _PARTS
        for of in _SCALES
    },
    **{f"moe.{name}_proj.weight_scale_inv": f"mlp.experts.{name}_proj_scale" for name in _PARTS},
    "moe.router_bias": "mlp.gate.e_score_correction_bias",
    "moe": "mlp",
    "gate.wg": "gate",
    "share_expert": "mlp.shared_experts",
    "mlp.shared_mlp": "mlp.shared_experts",
    "attention_sink_bias": "sinks",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
"""Parts of names in checkpoints of several families, and what others call the same."""
_SECOND = {"norm": "post_attention_layernorm", "mixer": "mlp", "final_layernorm": "final_layernorm"}
_SECOND_BLOCK = re.compile(rf"^mtp\.layers\.1\.({'|'.join(_SECOND)})(?=\.)")
"""Nemotron's MTP layer has its blocks in two layers: parts of the second one's names, and the same in one."""
_RENAMED_PART = re.compile(rf"\.({'|'.join(map(re.escape, _RENAMED))})(?=\.|$)")


def text_name(name: str) -> str:
    """A tensor's name as a checkpoint of the text model alone has it."""
    wrapped = next(filter(name.startswith, _WRAPPED), "")
    name = _WRAPPED.get(wrapped, "") + name.removeprefix(wrapped)
    name = _SECOND_BLOCK.sub(lambda found: f"mtp.layers.0.{_SECOND[found[1]]}", name)
    return _RENAMED_PART.sub(lambda found: f".{_RENAMED[found[1]]}", name)


def unpack_experts(name: str, meta: TensorMeta) -> Iterator[tuple[str, TensorMeta]]:
    """A tensor, or what it packs: all experts' matrices [E, N, K], gate rows before up rows, or their scales.

    Or, as gpt-oss publishes them in MXFP4, codes [E, N, K / 32, 16] and scales [E, N, K / 32].
    """
    stem, _, last = name.rpartition(".")
    dims, ending = _ENDINGS.get(last.partition("_proj")[2], (0, ""))
    parts = _PACKED.get(last) if stem.endswith(".experts") and len(meta.shape) == dims else None
    if parts is None or math.prod(meta.shape[1:2]) % len(parts) or not meta.nbytes:
        yield name, meta
        return
    experts, *inner = meta.shape
    shape = (inner[0] // len(parts), math.prod(inner[1:])) if inner else ()
    nbytes = meta.nbytes // (experts * len(parts))
    for number in range(experts * len(parts)):
        own = f"{stem}.{number // len(parts)}.{parts[number % len(parts)]}.{ending}"
        yield own, meta._replace(shape=shape, nbytes=nbytes, offset=meta.offset + number * nbytes)


_ENDINGS = {of: (1 if of == "_scale_2" else 3, f"weight{of}") for of in _SCALES}
_ENDINGS |= {"_blocks": (4, "weight_packed"), "_scales": (3, "weight_scale")}
"""Dimensions of what packs experts, by the ends of names, and what is called so of one expert."""
_PACKED = {f"{name}_proj{of}": [f"{name}_proj"] for name in ("gate_up", *_PARTS) for of in _ENDINGS}
_PACKED["gate_up_proj"] = ["gate_proj", "up_proj"]


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """The tensors of a model folder by name; a context manager that closes its files."""

    dtypes: tuple[str, ...] = FLOAT_DTYPES
    """What tensors may be stored in where nothing else is said of them."""

    refuses_unused: bool = False
    """True if a tensor that the model does not use says that it is another model."""

    def __init__(
        self,
        folder: Path,
        tensors: Metas,
        identities: Mapping[Path, FileIdentity],
        notes: Sequence[str] = (),
    ) -> None:
        """Hold what was read of headers; identities: of each file when its header was checked."""
        self.folder = folder
        self._identities = dict(identities)
        self.tensors: Metas = MappingProxyType(dict(tensors))
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
        """Read and check the headers of shards.

        weight_map: the shard of each tensor by an index, which decides where two shards hold one.
        """
        identities: dict[Path, FileIdentity] = {}
        tensors: dict[str, TensorMeta] = {}
        placed: set[str] = set()  # names, where the index says
        spare: dict[str, TensorMeta] = {}  # tensors elsewhere
        count = 0
        for shard in shards:  # read one by one: many links to one large header end soon
            identities[folder / shard], metas = read_shard_header(folder / shard)
            count += len(metas)
            if count > MAX_TENSORS:
                raise _too_many(folder / shard)
            for meta in metas:
                name = text_name(meta.name)
                if weight_map.get(name, shard) == shard:
                    placed.add(name)
                    cls._add(tensors, unpack_experts(name, meta))
                else:
                    spare.setdefault(name, meta)
        stale: list[str] = []
        for name, meta in spare.items():
            owner = weight_map[name]
            if name in placed or folder / owner not in identities:
                stale.append(
                    f"{display_text(meta.name)} in {meta.shard.name}: the index says {owner}"
                )
            else:  # the index is wrong, and nothing else can be meant
                cls._add(tensors, unpack_experts(name, meta))
        unused = [f"not used: {each}" for each in abbreviate(stale)]
        return cls(folder, tensors, identities, (*notes, *unused))

    @staticmethod
    def _add(tensors: dict[str, TensorMeta], parts: Iterable[tuple[str, TensorMeta]]) -> None:
        for name, part in parts:
            if name in tensors:
                where = tensors[name].shard.name
                raise CheckpointError(
                    f"{part.shard}: tensor {display_text(name)}: is in {where} too"
                )
            tensors[name] = part
            if len(tensors) > MAX_TENSORS:
                raise _too_many(part.shard)

    @classmethod
    def open(
        cls,
        folder: Path,
        select: Callable[[Mapping[str, str]], Container[str]] | None = None,
        is_extra: Callable[[str], bool] = lambda name: False,
    ) -> Checkpoint:
        """Read and check the headers of all shards; `model.safetensors` wins over an index beside it.

        `wanted` picks tensors from an index, the shard of each by its name; shards that hold none of
        them are not opened, and may be missing. A file that no index names is read too where each of
        its tensors is one by `beside`.
        """
        names = list_folder(folder)
        weight_map: Mapping[str, str] = {}
        notes: list[str] = []
        if WEIGHTS_FILE in names:
            shards = [WEIGHTS_FILE]
            known = {WEIGHTS_FILE}
        elif INDEX_FILE in names:
            weight_map = read_weight_map(folder / INDEX_FILE)
            picked = weight_map if select is None else select(weight_map)
            shards = sorted({shard for tensor, shard in weight_map.items() if tensor in picked})
            if missing := [shard for shard in shards if shard not in names]:
                words = f"{len(missing)} of {len(shards)} shards are missing: "
                words += ", ".join(abbreviate(missing))
                raise incomplete_error(folder, f"{INDEX_FILE}: {words}")
            known = set(weight_map.values())
        else:
            raise not_a_model_error(folder) or incomplete_error(
                folder, f"there is no {WEIGHTS_FILE} and no {INDEX_FILE}"
            )
        for name in names:
            if not name.endswith(".safetensors") or name in known:
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
        """What the header says of a tensor."""
        if name not in self.tensors:
            raise self.tensor_error(name, "is not in this checkpoint")
        return self.tensors[name]

    def tensor_error(self, name: str, why: str) -> CheckpointError:
        """The error for a tensor: its file, its name, the reason."""
        where = self.tensors[name].shard if name in self.tensors else self.folder
        return CheckpointError(f"{where}: tensor {display_text(name)}: {why}")

    def read(
        self, name: str, rows: tuple[int, int] | None = None, into: Tensor | None = None
    ) -> Tensor:
        """One tensor, or its rows [first, end), as stored and on the CPU, or in `into` if it is given."""
        import torch

        meta = self.meta(name)
        first = 0
        shape = list(meta.shape)
        if rows is not None:
            first = rows[0]
            shape[0] = rows[1] - rows[0]
        tensor = torch.empty(
            shape, dtype=getattr(torch, TORCH_NAMES[meta.dtype])
        )  # free until touched
        if into is not None and into.is_contiguous() and into.device == tensor.device:
            tensor = into if (into.dtype, into.shape) == (tensor.dtype, tensor.shape) else tensor
        offset = first * (tensor.nbytes // max(1, len(tensor))) if first else 0
        if offset + tensor.nbytes > meta.nbytes:
            raise ValueError(f"{name}: {list(meta.shape)} has no rows {rows}")
        if tensor.nbytes:
            memory = memoryview(
                (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
            ).cast("B")
            self._fill(memory, meta, offset)
        return tensor if into is None or into is tensor else into.copy_(tensor)

    def read_pieces(self, meta: TensorMeta) -> Iterator[bytes]:
        """A tensor's bytes as they are stored."""
        for first in range(0, meta.nbytes, PIECE):
            piece = bytearray(min(PIECE, meta.nbytes - first))
            self._fill(memoryview(piece), meta, first)
            yield bytes(piece)

    def tensors_equal(self, name: str, other: Checkpoint, its_name: str) -> bool:
        """Whether two stored tensors are the same bytes of one dtype and shape; reads both in pieces."""
        one = self.meta(name)
        its = other.meta(its_name)
        same = (one.dtype, one.shape) == (its.dtype, its.shape)
        return same and all(map(eq, self.read_pieces(one), other.read_pieces(its)))

    def _fill(self, memory: memoryview, meta: TensorMeta, offset: int) -> None:
        """Read a tensor's bytes from `offset` on; a file that was replaced or cut meanwhile is refused."""
        read_exactly(self.open_shard(meta.shard), memory, meta.offset + offset, meta.shard)
        self._check_identity(meta.shard)

    def open_shard(self, shard: Path) -> int:
        """A descriptor for reading until `close`, of a file that is still the one that was checked."""
        self._check_identity(shard)
        if shard not in self._files:
            self._files[shard] = open_regular_file(shard)
        return self._files[shard].fileno()

    def check_unchanged(self) -> None:
        """Refuse a shard that is no longer the file that was opened; long readers ask at the end."""
        for shard in self.shards:
            self._check_identity(shard)

    def close(self) -> None:
        """Close the files; tensors already read stay valid, and others can be read again."""
        while self._files:
            self._files.popitem()[1].close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_identity(self, shard: Path) -> None:
        with convert_os_errors(shard):
            if file_identity(os.stat(shard)) != self._identities[shard]:
                raise CheckpointError(f"{shard}: changed while in use")


def _too_many(shard: Path) -> CheckpointError:
    return CheckpointError(f"{shard}: holds more than {MAX_TENSORS:,} tensors")


def _holds_only(path: Path, wanted: Callable[[str], bool]) -> bool:
    """True if a file can be read and each of its tensors is wanted, by its name in a text model."""
    if SHARD_NAME.fullmatch(path.name) is None:
        return False
    try:
        _, metas = read_shard_header(path)
    except CheckpointError:
        return False
    return bool(metas) and all(wanted(text_name(meta.name)) for meta in metas)


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
    """The shard of every tensor, the shards' names seen to be harmless."""
    fields = Fields.read(path, INDEX_LIMIT)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fields.field_error(
            "weight_map", "is not an object that names a shard for each tensor"
        )
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise fields.field_error(
                "weight_map", f"{display_text(tensor)}: {display_text(shard)} is not a string"
            )
    for shard in sorted(set(weight_map.values())):
        pickles = (
            ", pickle formats are not supported" if shard.lower().endswith(PICKLE_SUFFIXES) else ""
        )
        why = f"{display_text(shard)} is not the plain name of a safetensors file{pickles}"
        fields.require(SHARD_NAME.fullmatch(shard) is not None, "weight_map", why)
    return {text_name(tensor): shard for tensor, shard in weight_map.items()}


def check_tensors(
    checkpoint: Checkpoint,
    expected: Shapes,
    dtypes: AllowedDtypes = FLOATS_ONLY,
    description: str = "tensors",
    fix: Sequence[str] = (),
) -> list[str]:
    """Compare names, shapes and dtypes with what the model needs; returns unexpected names.

    Rotary tables, which older exporters wrote and no model needs, are not among them.
    One error lists all that are missing, mis-shaped or wrongly typed; `what` it calls the expected ones.
    """
    faults: dict[str, list[str]] = {
        "missing": [],
        "of another shape": [],
        "of an unsupported dtype": [],
    }
    missing, shapes, types = faults.values()
    for name, shape in expected.items():
        meta = checkpoint.tensors.get(name)
        if meta is None:
            missing.append(f"{display_text(name)}: is missing")
            continue
        where = f"{display_text(name)} in {meta.shard.name}"
        if meta.shape != tuple(shape):
            shapes.append(f"{where}: shape is {list(meta.shape)}, expected {list(shape)}")
        if meta.dtype not in (own := dtypes.get(name, checkpoint.dtypes)):
            types.append(
                f"{where}: dtype {meta.dtype} is not supported here ({', '.join(own)} are)"
            )
    if problems := missing + shapes + types:
        counts = ", ".join(f"{len(found)} {words}" for words, found in faults.items() if found)
        why = f"{checkpoint.folder}: {len(expected)} {description} are needed: {counts}; first: {problems[0]}"
        raise CheckpointError(why, reason=abbreviate(problems), fix=fix)
    others = (name for name in checkpoint.tensors if name not in expected)
    return [name for name in others if not name.endswith("rotary_emb.inv_freq")]


def read_shard_header(path: Path) -> tuple[FileIdentity, list[TensorMeta]]:
    """Read and check the header of one safetensors file; its tensors must fill it, with no gap or overlap."""
    with open_regular_file(path) as file, convert_os_errors(path):
        identity = file_identity(os.fstat(file.fileno()))
        size = identity[0]
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_LIMIT:
            why = f"header too large: {length} bytes, at most {HEADER_LIMIT} are allowed"
            raise CheckpointError(f"{path}: {why}")
        data = file.read(length)
    if size < 8 + length:
        raise CheckpointError(
            f"{path}: is truncated: {size} bytes, its header alone needs {8 + length}"
        )
    header = dict(Fields.parse(decode_utf8(data, f"{path}: header"), f"{path}: header").values)
    header.pop("__metadata__", None)
    position = 8 + length
    tensors = [_tensor(path, name, entry, position) for name, entry in header.items()]
    for meta in sorted(tensors, key=lambda meta: (meta.offset, meta.nbytes, meta.name)):
        if meta.offset != position:
            gap = f"leaves a gap of {meta.offset - position} bytes"
            what = "overlaps the tensor before it" if meta.offset < position else gap
            raise CheckpointError(f"{path}: tensor {display_text(meta.name)}: data_offsets: {what}")
        position += meta.nbytes
    if position > size:
        raise CheckpointError(
            f"{path}: is truncated: {position - size} bytes of tensor data are missing"
        )
    if position < size:
        raise CheckpointError(f"{path}: has {size - position} bytes after the last tensor")
    return identity, tensors


def _tensor(path: Path, name: str, entry: object, data: int) -> TensorMeta:
    """One entry of the header; `data` is where the tensors' bytes begin in the file."""
    fields = Fields(
        f"{path}: tensor {display_text(name)}", entry if isinstance(entry, dict) else {}
    )
    dtype = fields.choice("dtype", DTYPE_BITS)
    shape = fields.integers("shape", 0, MAX_NUMBER)
    begin, end = fields.integers("data_offsets", 0, MAX_NUMBER, 2)
    needed = (
        DTYPE_BITS[dtype] * math.prod(map(float, shape)) / 8
    )  # infinite where whole numbers grow on
    why = f"hold {end - begin} bytes, {dtype} {display_text(shape)} needs {needed:g}"
    fields.require(end - begin == needed, "data_offsets", why)
    return TensorMeta(name, dtype, tuple(shape), path, end - begin, data + begin)
