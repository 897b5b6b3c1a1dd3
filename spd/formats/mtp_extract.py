"""Cutting an MTP head out of a checkpoint: which tensors, under which names, from which bytes.

Opens the shards that hold the head and the two tables beside it, no others; reads a piece at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.checkpoint import FLOAT_DTYPES, Checkpoint, shards_by_tensor
from spd.formats.json_file import Fields, listed, read_json_object
from spd.formats.model_config import FILE_NAME, MAX_LAYERS, ModelConfig, model_config_of
from spd.formats.mtp import MtpLayout, check_mtp, declared_modules, find_mtp, no_mtp
from spd.formats.mtp_folder import FINAL_NORM, head_config, is_head_folder, read_head_folder, verifier_hash
from spd.formats.safetensors_header import TensorMeta
from spd.formats.writer import PIECE, OutputTensor

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

    `copies` are the head's own embedding and output tables, each with the target's table that it may equal
    and is then left out for; None where the target's is not at hand. `ignored` is of no use to anybody.
    """

    checkpoint: Checkpoint
    layout: MtpLayout
    config: ModelConfig
    raw_config: Mapping[str, Any]
    verifier: str
    verifier_sha256: str
    declared: int
    modules: int
    tensors: tuple[HeadTensor, ...]
    copies: tuple[tuple[TensorMeta, TensorMeta | None], ...]
    ignored: tuple[str, ...]

    @property
    def quantized(self) -> bool:
        """Whether tensors are stored with scales beside them."""
        return any(tensor.name.endswith(SCALE_SUFFIX) for tensor in self.tensors)


def plan_head(source: Path, name: str, layer_tensors: LayerTensors) -> HeadPlan:
    """Find and check the head of a checkpoint or of a head folder; the caller closes `plan.checkpoint`.

    layer_tensors: shapes of the target's last decoder layer by the names inside it. Raises
    IncompatibleError where there is no head, CheckpointError for one that is not whole, each with names.
    """
    raw = read_json_object(source / FILE_NAME)
    head = read_head_folder(source) if is_head_folder(source) else None
    if head is not None:
        inner = raw["transformer_layer_config"]
        assert isinstance(inner, dict)
        config, raw, layout = head.config, inner, head.layout
    else:
        config = model_config_of(Fields(str(source / FILE_NAME), raw))
        found = find_mtp(config.architecture, shards_by_tensor(source), config.num_layers)
        if found is None:
            raise no_mtp(source, config.num_layers, declared_modules(source))
        layout = found
    checkpoint = _open_parts(source, layout)
    try:
        needed = check_mtp(
            checkpoint,
            layout,
            config.hidden_size,
            config.vocab_size,
            layer_tensors(config),
            (*FLOAT_DTYPES, *FP8_DTYPES),
        )
        _check_scales(checkpoint, needed)
        tables = set[str]().union(
            *(layout.copies(m, config.vocab_size, config.hidden_size) for m in range(layout.modules))
        )
        metas = [meta for meta in checkpoint.tensors.values() if layout.owns(meta.name)]
        kept = [meta for meta in metas if meta.name.removesuffix(SCALE_SUFFIX) in needed]
        return HeadPlan(
            checkpoint,
            layout,
            config,
            raw,
            head.verifier if head else name,
            head.verifier_sha256 if head else verifier_hash(checkpoint),
            layout.modules if head else declared_modules(source),
            layout.modules,
            tuple(HeadTensor(meta, meta.name, meta.dtype) for meta in kept if meta.name not in tables),
            tuple((meta, _table(checkpoint, layout, meta)) for meta in kept if meta.name in tables),
            tuple(meta.name for meta in metas if meta not in kept),
        )
    except BaseException:
        checkpoint.close()
        raise


def _open_parts(source: Path, layout: MtpLayout) -> Checkpoint:
    """The shards of the head and the final norm, and those of the tables as far as they are there."""
    shards = shards_by_tensor(source)
    tables = {name for name in TABLES if name in shards and (source / shards[name]).exists()}
    return Checkpoint.open(
        source, wanted=lambda name: layout.owns(name) or name == FINAL_NORM or name in tables
    )


def _check_scales(checkpoint: Checkpoint, needed: Mapping[str, tuple[int, ...]]) -> None:
    """Every FP8 matrix has its scales. Raises CheckpointError that names those without."""
    bare = [
        name
        for name in needed
        if checkpoint.tensors[name].dtype == FP8_DTYPES[0] and name + SCALE_SUFFIX not in checkpoint.tensors
    ]
    if bare:
        raise CheckpointError(
            f"{checkpoint.folder}: {len(bare)} FP8 tensors of the MTP head have no scales; first: {bare[0]}",
            reason=listed([name + SCALE_SUFFIX for name in bare]),
        )


def _table(checkpoint: Checkpoint, layout: MtpLayout, copy: TensorMeta) -> TensorMeta | None:
    """The target's table that a copy may equal: the embedding serves as head too where it is tied."""
    heads = {layout.named(layout.family.head, m) for m in range(layout.modules) if layout.family.head}
    embedding, head = (checkpoint.tensors.get(name) for name in TABLES)
    return (head or embedding) if copy.name in heads else embedding


def cast_plan(plan: HeadPlan, dtype: str) -> HeadPlan:
    """The plan with its tensors in another dtype, scales used up; vectors of float32 stay as they are."""
    tensors = [
        replace(tensor, dtype=tensor.dtype if _stays(tensor.source) else dtype)
        for tensor in plan.tensors
        if not tensor.name.endswith(SCALE_SUFFIX)
    ]
    return replace(plan, tensors=tuple(tensors))


def _stays(meta: TensorMeta) -> bool:
    return meta.dtype == "F32" and len(meta.shape) == 1


def repeat_plan(plan: HeadPlan, modules: int) -> HeadPlan:
    """The plan of a head of `modules` modules that are all alike. Raises IncompatibleError for several."""
    if plan.modules != 1:
        raise IncompatibleError(
            f"--repeat: the head has {plan.modules} modules, of which none stands for all",
            fix=["leave --repeat out"],
        )
    if plan.layout.first_layer + modules > MAX_LAYERS:
        raise IncompatibleError(f"--repeat {modules}: more than {MAX_LAYERS} layers")
    family, layout = plan.layout.family, plan.layout
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
    if not plan.layout.family.numbers_layers or plan.modules != 1:
        raise IncompatibleError(
            f"--layout nextn holds one module numbered as a layer, not {plan.layout.words()}",
            fix=["--layout spd"],
        )
    prefix = plan.layout.layer_prefix(0)
    tensors = [
        replace(tensor, name="model.layers.0." + tensor.name.removeprefix(prefix)) for tensor in plan.tensors
    ]
    return replace(plan, tensors=tuple(tensors))


def config_to_write(plan: HeadPlan, layout: Layout) -> dict[str, Any]:
    """The `config.json` of what the plan makes."""
    if layout == "spd":
        return head_config(
            plan.raw_config, plan.verifier, plan.verifier_sha256, plan.modules, quantized=plan.quantized
        )
    drop = {"auto_map", *(() if plan.quantized else ("quantization_config",))}
    kept = {key: value for key, value in plan.raw_config.items() if key not in drop}
    return {**kept, "architectures": [plan.config.architecture + NEXTN], "num_hidden_layers": 1}


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
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(tensor_pieces(checkpoint, one), tensor_pieces(checkpoint, other), strict=True)
    return all(left == right for left, right in pairs)


def tensor_pieces(checkpoint: Checkpoint, meta: TensorMeta) -> Iterator[bytes]:
    """A tensor's bytes as they are stored. Raises CheckpointError when the file ends or changes."""
    with checkpoint.open_shard(meta.shard) as file:
        file.seek(meta.offset)
        left = meta.nbytes
        while left:
            try:
                piece = file.read(min(left, PIECE))
            except OSError as error:
                raise CheckpointError(f"{meta.shard}: cannot be read: {error.strerror}") from None
            if not piece:
                raise CheckpointError(f"{meta.shard}: changed while in use: it ends early")
            left -= len(piece)
            yield piece


def outputs(plan: HeadPlan, tensors: list[HeadTensor], cast: Cast | None) -> list[OutputTensor]:
    """What the writer writes: bytes as they are stored, or through `cast` where the dtype is another."""

    def pieces(tensor: HeadTensor) -> Callable[[], Iterator[bytes]]:
        if tensor.dtype == tensor.source.dtype:
            return lambda: tensor_pieces(plan.checkpoint, tensor.source)
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
