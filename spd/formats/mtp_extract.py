"""Cutting an MTP head out of a checkpoint: which tensors, under which names, from which bytes.

Opens the shards that hold the head and the two tables beside it, no others; reads a piece at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import eq
from typing import Any, Literal

from spd.errors import CheckpointError, IncompatibleError
from spd.formats import mtp
from spd.formats.checkpoint import FLOAT_DTYPES, Checkpoint, TensorMeta
from spd.formats.folder import ModelFolder
from spd.formats.json_file import listed
from spd.formats.model_config import MAX_LAYERS, ModelConfig, refuse_head
from spd.formats.writer import OutputTensor

FP8_DTYPES = ("F8_E4M3", "F8_E8M0")
SCALE_SUFFIX = "_scale_inv"
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
NEXTN = "NextN"

Layout = Literal["spd", "nextn"]
LayerTensors = Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]
Cast = Callable[[Checkpoint, TensorMeta], Iterator[bytes]]


@dataclass(frozen=True)
class HeadTensor:
    """One tensor of the head: where it stands, what it is called where it goes, and its dtype there."""

    source: TensorMeta
    name: str
    dtype: str


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
    modules: int
    tensors: tuple[HeadTensor, ...]
    copies: tuple[tuple[TensorMeta, TensorMeta | None], ...]
    ignored: tuple[str, ...]

    @property
    def quantized(self) -> bool:
        """Whether tensors are stored with scales beside them."""
        return any(tensor.name.endswith(SCALE_SUFFIX) for tensor in self.tensors)


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
        layout.modules,
        tuple(HeadTensor(meta, meta.name, meta.dtype) for meta in kept if meta.name not in tables),
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
    heads = {layout.named(layout.family.head, m) for m in range(layout.modules) if layout.family.head}
    embedding, head = (checkpoint.tensors.get(name) for name in TABLES)
    return (head or embedding) if copy.name in heads else embedding


def cast_plan(plan: HeadPlan, dtype: str) -> HeadPlan:
    """The plan with its tensors in another dtype, scales used up; vectors of float32 stay as they are."""
    tensors = []
    for tensor in plan.tensors:
        stays = tensor.source.dtype == "F32" and len(tensor.source.shape) == 1
        if not tensor.name.endswith(SCALE_SUFFIX):
            tensors.append(tensor if stays else replace(tensor, dtype=dtype))
    return replace(plan, tensors=tuple(tensors))


def repeat_plan(plan: HeadPlan, modules: int) -> HeadPlan:
    """The plan of a head of `modules` modules that are all alike. Raises IncompatibleError for several."""
    if plan.modules != 1:
        why = f"--repeat: the head has {plan.modules} modules, of which none stands for all"
        raise IncompatibleError(why, fix=["leave --repeat out"])
    family, layout = plan.head.layout.family, plan.head.layout
    if layout.first_layer + modules > MAX_LAYERS:
        raise IncompatibleError(f"--repeat {modules}: more than {MAX_LAYERS} layers")
    glue = (family.token_norm, family.hidden_norm, family.projection, family.final_norm)
    tensors = {}
    for tensor in plan.tensors:
        template = next((t for t in glue if t is not None and tensor.name == layout.named(t, 0)), None)
        for module in range(modules):
            inner = tensor.name.removeprefix(layout.layer_prefix(0))
            name = layout.named(template, module) if template else layout.layer_prefix(module) + inner
            tensors[name] = replace(tensor, name=name)
    return replace(plan, tensors=tuple(tensors.values()), modules=modules)


def nextn_plan(plan: HeadPlan) -> HeadPlan:
    """The plan of a one-layer model as SGLang loads it. Raises IncompatibleError for other families.

    Source: `scripts/export_deepseek_nextn.py` of SGLang.
    """
    if not plan.head.layout.family.numbers_layers or plan.modules != 1:
        why = f"--layout nextn holds one module numbered as a layer, not {plan.head.layout.words()}"
        raise IncompatibleError(why, fix=["--layout spd"])
    prefix, new = plan.head.layout.layer_prefix(0), "model.layers.0."
    renamed = (replace(tensor, name=new + tensor.name.removeprefix(prefix)) for tensor in plan.tensors)
    return replace(plan, tensors=tuple(renamed))


def config_to_write(plan: HeadPlan, layout: Layout) -> dict[str, Any]:
    if layout == "spd":
        of, sha256, modules = plan.head.verifier, plan.head.verifier_sha256, plan.modules
        return mtp.head_config(plan.raw_config, of, sha256, modules, quantized=plan.quantized)
    drop = {"auto_map", *(() if plan.quantized else ("quantization_config",))}
    kept = {key: value for key, value in plan.raw_config.items() if key not in drop}
    return {**kept, "architectures": [plan.head.config.architecture + NEXTN], "num_hidden_layers": 1}


def differing_copies(plan: HeadPlan, layout: Layout) -> list[HeadTensor]:
    """The head's own tables that are not the target's bit for bit; reads both to the end."""
    if layout == "nextn":
        return []
    return [
        HeadTensor(copy, copy.name, copy.dtype)
        for copy, table in plan.copies
        if table is not None and not _same_bytes(plan.checkpoint, copy, table)
    ]


def _same_bytes(checkpoint: Checkpoint, one: TensorMeta, other: TensorMeta) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and all(map(eq, checkpoint.pieces(one), checkpoint.pieces(other)))


def outputs(plan: HeadPlan, tensors: list[HeadTensor], cast: Cast | None) -> list[OutputTensor]:
    """What the writer writes: bytes as they are stored, or through `cast` where the dtype is another."""

    def pieces(tensor: HeadTensor) -> Callable[[], Iterator[bytes]]:
        if tensor.dtype == tensor.source.dtype:
            return lambda: plan.checkpoint.pieces(tensor.source)
        assert cast is not None
        return lambda: cast(plan.checkpoint, tensor.source)

    return [OutputTensor(t.name, t.dtype, t.source.shape, pieces(t)) for t in tensors]


def job_of(plan: HeadPlan, tensors: list[HeadTensor]) -> str:
    """What the bytes are made from, in one hash: each tensor's place, its file's identity, its new dtype."""
    facts = []
    for tensor in tensors:
        meta = tensor.source
        status = meta.shard.stat()
        identity = (str(meta.shard), status.st_size, status.st_mtime_ns)
        facts.append((tensor.name, tensor.dtype, meta.name, meta.dtype, meta.offset, *identity))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
