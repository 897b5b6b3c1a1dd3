"""Cutting an MTP head out of a checkpoint: which tensors, from which bytes; names stay.

Opens the shards that hold the head and the two tables beside it, no others; reads a piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import eq
from typing import Any

from spd.errors import CheckpointError
from spd.formats import mtp
from spd.formats.checkpoint import FLOAT_DTYPES, Checkpoint, TensorMeta
from spd.formats.folder import ModelFolder
from spd.formats.json_file import listed
from spd.formats.model_config import ModelConfig, refuse_head
from spd.formats.writer import OutputTensor

FP8_DTYPES = ("F8_E4M3", "F8_E8M0")
SCALE_SUFFIX = "_scale_inv"
TABLES = ("model.embed_tokens.weight", "lm_head.weight")

LayerTensors = Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]
Cast = Callable[[Checkpoint, TensorMeta], Iterator[bytes]]


@dataclass(frozen=True)
class HeadPlan:
    """What a conversion takes, made from headers alone; closed with its checkpoint.

    `head` is where it stands, `raw_config` the verifier's. `copies` are the head's own embedding and output
    tables, each with the target's that it may equal and is then left out for; None where that is
    not at hand. `ignored` is of no use.
    """

    checkpoint: Checkpoint
    head: mtp.MtpSource
    raw_config: Mapping[str, Any]
    declared: int
    tensors: tuple[TensorMeta, ...]
    copies: tuple[tuple[TensorMeta, TensorMeta | None], ...]
    ignored: tuple[str, ...]
    dtype: str | None = None
    """The safetensors code of what is written; None: as stored."""

    @property
    def quantized(self) -> bool:
        """Whether tensors are stored with scales beside them."""
        return any(tensor.name.endswith(SCALE_SUFFIX) for tensor in self.tensors)

    def cast(self, dtype: str) -> HeadPlan:
        """The plan with its tensors in another dtype, scales used up."""
        kept = (tensor for tensor in self.tensors if not tensor.name.endswith(SCALE_SUFFIX))
        return replace(self, dtype=dtype, tensors=tuple(kept))

    def dtype_of(self, tensor: TensorMeta) -> str:
        """What a tensor is written as: vectors of float32, and the head's own tables, as they are."""
        vector = tensor.dtype == "F32" and len(tensor.shape) == 1
        stays = vector or any(tensor == copy for copy, _ in self.copies)
        return tensor.dtype if self.dtype is None or stays else self.dtype


def plan_head(source: ModelFolder, name: str, layer_tensors: LayerTensors) -> HeadPlan:
    """Find and check the head of a checkpoint or of a head folder; the caller closes `plan.checkpoint`.

    layer_tensors: shapes of the target's last decoder layer by the names inside it. Raises
    IncompatibleError where there is no head, CheckpointError for one that is not whole, each with names.
    """
    fields, is_head = source.fields, mtp.is_head_folder(source)
    inner = fields.fields("transformer_layer_config") if is_head else None
    head, checkpoint = (source.head, source.checkpoint) if is_head else _own_head(source, name)
    config, layout = head.config, head.layout
    hidden, vocab, dtypes = config.hidden_size, config.vocab_size, (*FLOAT_DTYPES, *FP8_DTYPES)
    needed = mtp.check_mtp(checkpoint, layout, hidden, vocab, layer_tensors(config), dtypes)
    _check_scales(checkpoint, needed)
    tables = {name for m in range(layout.modules) for name in layout.copies(m, vocab, hidden)}
    metas = [meta for meta in checkpoint.tensors.values() if layout.owns(meta.name)]
    kept = [meta for meta in metas if meta.name.removesuffix(SCALE_SUFFIX) in needed]
    return HeadPlan(
        checkpoint,
        head if is_head else replace(head, verifier_sha256=mtp.verifier_hash(checkpoint)),
        (inner or fields).values,
        layout.modules if is_head else mtp.declared_modules(fields),
        tuple(meta for meta in kept if meta.name not in tables),
        tuple((meta, _table(checkpoint, layout, meta)) for meta in kept if meta.name in tables),
        tuple(meta.name for meta in metas if meta not in kept),
    )


def _own_head(source: ModelFolder, name: str) -> tuple[mtp.MtpSource, Checkpoint]:
    """The head in a checkpoint of that name; the shards of it, the final norm, and tables that are there."""
    config = source.config
    refuse_head(config, source.path)

    def find(names: Collection[str]) -> mtp.MtpLayout:
        layout = mtp.find_mtp(config.architecture, names, config.num_layers)
        if layout is None:
            raise mtp.no_mtp(source.path, config.num_layers, mtp.declared_modules(source.fields))
        return layout

    def wanted(shards: Mapping[str, str]) -> set[str]:
        tables = [table for table in TABLES if table in shards and (source.path / shards[table]).exists()]
        return {mtp.FINAL_NORM, *tables, *filter(find(shards).owns, shards)}

    checkpoint = Checkpoint.open(source.path, wanted)
    return mtp.MtpSource(source, find(checkpoint.tensors), config, name), checkpoint


def _check_scales(checkpoint: Checkpoint, needed: Mapping[str, tuple[int, ...]]) -> None:
    """Every FP8 matrix has its scales. Raises CheckpointError that names those without."""
    tensors = checkpoint.tensors
    fp8 = [name for name in needed if tensors[name].dtype == FP8_DTYPES[0]]
    bare = [name for name in fp8 if name + SCALE_SUFFIX not in tensors]
    if bare:
        raise CheckpointError(
            f"{checkpoint.folder}: {len(bare)} FP8 tensors of the MTP head have no scales; first: {bare[0]}",
            reason=listed([name + SCALE_SUFFIX for name in bare]),
        )


def _table(checkpoint: Checkpoint, layout: mtp.MtpLayout, copy: TensorMeta) -> TensorMeta | None:
    """The target's table that a copy may equal: the embedding serves as head too where it is tied."""
    heads = {layout.named(layout.family.tables["head"], m) for m in range(layout.modules)}
    embedding, head = (checkpoint.tensors.get(name) for name in TABLES)
    return (head or embedding) if copy.name in heads else embedding


def config_to_write(plan: HeadPlan) -> dict[str, Any]:
    head, modules = plan.head, plan.head.layout.modules
    return mtp.head_config(
        plan.raw_config, head.verifier, head.verifier_sha256, modules, quantized=plan.quantized
    )


def differing_copies(plan: HeadPlan) -> list[TensorMeta]:
    """The head's own tables that are not the target's bit for bit; reads both to the end."""
    return [
        copy
        for copy, table in plan.copies
        if table is not None and not _same_bytes(plan.checkpoint, copy, table)
    ]


def _same_bytes(checkpoint: Checkpoint, one: TensorMeta, other: TensorMeta) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and all(map(eq, checkpoint.pieces(one), checkpoint.pieces(other)))


def outputs(plan: HeadPlan, tensors: Sequence[TensorMeta], cast: Cast | None) -> list[OutputTensor]:
    """What the writer writes: bytes as they are stored, or through `cast` where the dtype is another."""
    found = []
    for meta in tensors:
        dtype = plan.dtype_of(meta)
        read = (
            plan.checkpoint.pieces if cast is None or dtype == meta.dtype else partial(cast, plan.checkpoint)
        )
        found.append(OutputTensor(meta.name, dtype, meta.shape, partial(read, meta)))
    return found
