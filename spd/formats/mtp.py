"""MTP heads as folders: their sources, checks against a target, and extraction.

A head folder, which `docs/mtp.md` describes, holds a head by itself, for a target whose checkpoint
has none. `plan_head` extracts one of a checkpoint: names stay, and only the shards with the head
and with the target's embedding and output head are opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.checkpoint import FLOAT_DTYPES, Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.gguf.file_kind import is_gguf
from spd.formats.json_file import Fields, display_text
from spd.formats.model_config import MAX_LAYERS, MTP_HEAD, ModelConfig, model_config_of, refuse_head
from spd.formats.mtp_layout import MTP_FAMILIES, MtpLayout, find_mtp_layout, is_mtp_tensor
from spd.formats.names import EMBEDDING, FINAL_NORM, HEAD
from spd.formats.safetensors_header import TensorMeta

SPECULATORS_TYPE = "mtp"
"""The `speculators_model_type` in the `config.json` of a head folder."""
HEAD_FIXES = (
    "--draft-model HEAD with a folder that `spd convert-mtp ORIGINAL HEAD` made of the original checkpoint",
    "--spec ngram",
)
"""Fixes of errors for a checkpoint without a complete head."""
TABLE_NAMES = (EMBEDDING, HEAD)
"""The target's tables of which a head may have copies."""
MODULE_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of `config.json` for the number of a head's modules."""


@dataclass(frozen=True)
class MtpSource:
    """The source of a target's MTP head: the target's own folder, or a head folder."""

    folder: ModelFolder
    layout: MtpLayout
    config: ModelConfig
    """The target's configuration: the head's layers are like the target's."""
    verifier: str = ""
    """The model that a head folder was extracted from.

    Empty for a head in the target's checkpoint.
    """
    verifier_sha256: str = ""


def declared_module_count(fields: Fields) -> int:
    """Return the number of MTP modules that `config.json` names; 0 where it names none.

    Raises CheckpointError for a value that is no number of modules.
    """
    nested = fields.get("text_config")
    merged = fields.with_values({**(nested if isinstance(nested, dict) else {}), **fields.values})
    return merged.integer(
        next((key for key in MODULE_COUNT_KEYS if key in merged), MODULE_COUNT_KEYS[0]),
        0,
        MAX_LAYERS,
        0,
    )


def no_mtp_error(path: Path, config: ModelConfig, declared: int) -> IncompatibleError:
    """Return the error for a checkpoint without tensors of an MTP head.

    declared: the number of modules in its `config.json`.
    """
    name = f"model.layers.{config.num_layers}.eh_proj.weight"
    message = f"{path}: holds no MTP layers"
    reason = [f"no tensor such as {name}, mtp.fc.weight or model.mtp_…"]
    if is_gguf(path):
        reason = [f"no tensor such as blk.{config.num_layers}.nextn.eh_proj.weight"]
        if any(config.architecture in family.architectures for family in MTP_FAMILIES):
            message += ", which a converter may have left out"
    if declared:
        reason.append(
            f"config.json speaks of {declared}: quantized copies are often written without them"
        )
    return IncompatibleError(message, reason=reason, fix=HEAD_FIXES)


def verifier_hash(checkpoint: Checkpoint) -> str:
    """Read a checkpoint's final norm and return the SHA-256 of its dtype, shape and stored bytes.

    It stands for the checkpoint: the norm is small, and equal only in quantized copies of it.
    """
    meta = checkpoint.meta(FINAL_NORM)
    data = b"".join(checkpoint.read_pieces(meta))
    return hashlib.sha256(f"{meta.dtype} {list(meta.shape)} ".encode() + data).hexdigest()


def make_head_config(
    verifier_config: Mapping[str, object],
    verifier: str,
    sha256: str,
    modules: int,
    *,
    quantized: bool,
) -> dict[str, Any]:
    """Return the `config.json` of a head folder.

    verifier_config: the target's `config.json`. verifier: the target's name or path. sha256: see
    `verifier_hash`. modules: their number. quantized: keep the target's quantization.
    """
    layer_config = {
        key: value
        for key, value in verifier_config.items()
        if quantized or key != "quantization_config"
    }
    architectures = verifier_config.get("architectures")
    return {
        "architectures": [MTP_HEAD],
        "speculators_model_type": SPECULATORS_TYPE,
        "num_nextn_predict_layers": modules,
        "transformer_layer_config": layer_config,
        "speculators_config": {
            "algorithm": SPECULATORS_TYPE,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": modules}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier,
                "architectures": architectures,
                "sha256": sha256,
            },
        },
    }


def is_mtp_head(folder: ModelFolder) -> bool:
    """True if a folder or GGUF file holds an MTP head without a model. Raises CheckpointError."""
    if folder.gguf is not None:
        return folder.gguf.is_mtp_head
    fields = folder.fields
    return (
        fields.get("architectures") == [MTP_HEAD]
        or fields.get("speculators_model_type") == SPECULATORS_TYPE
    )


def read_head_folder(folder: ModelFolder) -> MtpSource:
    """Read a head folder's configuration and find its modules by the names of its tensors.

    Raises CheckpointError where it is no such folder or has another number of modules. The tensors
    are checked later, by `check_mtp_source`.
    """
    fields = folder.fields
    layer = fields.optional_nested("transformer_layer_config")
    speculators = fields.optional_nested("speculators_config")
    kind = fields.get("speculators_model_type")
    if kind != SPECULATORS_TYPE or layer is None or speculators is None:
        message = f"{fields.where}: speculators_model_type: {display_text(kind)}: "
        message += "this is no folder with an MTP head"
        fix = ["spd convert-mtp ORIGINAL HEAD makes one from a checkpoint with MTP layers"]
        raise CheckpointError(message, fix=fix)
    verifier = speculators.nested("verifier")
    config = model_config_of(layer)
    layout = find_mtp_layout(config.architecture, folder.checkpoint.tensors, config.num_layers)
    declared = fields.integer("num_nextn_predict_layers", 1, MAX_LAYERS)
    modules = layout.modules if layout else 0
    if layout is None or modules != declared:
        raise fields.field_error(
            "num_nextn_predict_layers", f"is {declared}, but {modules} modules are there"
        )
    return MtpSource(
        folder=folder,
        layout=layout,
        config=config,
        verifier=verifier.text("name_or_path"),
        verifier_sha256=verifier.text("sha256"),
    )


def read_head_file(file: ModelFolder, target: ModelFolder) -> MtpSource:
    """Find the head for a target in a GGUF file, with or without a model of its own.

    The layers' configuration is the target's: the file has only the fields that such layers need.
    Hashes the file's final norm. Raises IncompatibleError without a head, or for another model's.
    """
    fields = file.fields
    config = target.config
    names = fields.get("architectures")
    pairs = [
        ("architecture", names, [config.architecture]),
        ("hidden size", fields.get("hidden_size"), config.hidden_size),
        ("vocabulary size", fields.get("vocab_size"), config.vocab_size),
        ("layers", fields.get("num_hidden_layers"), config.num_layers),
    ]
    require_equal_properties(kind="MTP", properties=pairs, head=file.path, target=target.path)
    checkpoint = file.checkpoint
    layout = find_mtp_layout(config.architecture, checkpoint.tensors, config.num_layers)
    if layout is None:
        raise no_mtp_error(file.path, config, declared_module_count(fields))
    has_verifier_norm = FINAL_NORM in checkpoint.tensors and target.gguf is not None
    return MtpSource(
        folder=file,
        layout=layout,
        config=config,
        verifier=file.path.name,
        verifier_sha256=verifier_hash(checkpoint) if has_verifier_norm else "",
    )


def find_mtp_source(target: ModelFolder, head: ModelFolder | None = None) -> MtpSource | None:
    """Return the source of the MTP head for a target; None without one.

    head: a head folder made for the target, or a GGUF file with a head; None: the target's own.
    Raises IncompatibleError where the head was made for another model.
    """
    config = target.config
    if head is not None and head.gguf is not None:
        return read_head_file(head, target)
    if head is not None:
        source = read_head_folder(head)
        check_head_fits(source, config, target.path)
        return source
    layout = find_mtp_layout(config.architecture, target.checkpoint.tensors, config.num_layers)
    return None if layout is None else MtpSource(target, layout, config)


def check_head_fits(head: MtpSource, target: ModelConfig, folder: Path) -> None:
    """Raise IncompatibleError where a head cannot run with a target, naming what differs."""
    config = head.config
    properties = [
        ("architecture", config.architecture, target.architecture),
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary size", config.vocab_size, target.vocab_size),
        ("layers", config.num_layers, target.num_layers),
    ]
    require_equal_properties(
        kind="MTP", properties=properties, head=head.folder.path, target=folder
    )


def require_equal_properties(
    kind: str, properties: Iterable[tuple[str, object, object]], head: Path, target: Path
) -> None:
    """Raise IncompatibleError if a property (name, head's value, target's value) differs.

    kind, head, target: of the head, and the paths of both, for the message.
    """
    differing = [
        f"{property_name}: head {head_value}, target {target_value}"
        for property_name, head_value, target_value in properties
        if head_value != target_value
    ]
    if differing:
        message = f"{head}: this {kind} head was made for another model than {target}"
        fix = ["--draft-model HEAD made for this model", "--spec ngram"]
        raise IncompatibleError(message, reason=differing, fix=fix)


@dataclass(frozen=True)
class HeadPlan:
    """The tensors that a conversion copies, chosen by headers alone; closed with its checkpoint."""

    checkpoint: Checkpoint
    """The opened source: the head's tensors, the final norm and the tables."""
    head: MtpSource
    tensors: tuple[TensorMeta, ...]
    """The head's tensors without its copies of tables."""
    table_copies: tuple[tuple[TensorMeta, TensorMeta | None], ...]
    """The head's copies of tables, each with the target's table, or None where that is in no opened
    shard. An equal copy is left out."""
    unused_tensors: tuple[str, ...]
    """Names of the head's tensors that no module reads."""
    declared_modules: int
    """See `declared_module_count`."""

    @property
    def is_quantized(self) -> bool:
        """True if some tensors are not stored as floats."""
        return any(tensor.dtype not in FLOAT_DTYPES for tensor in self.tensors)


def plan_head(
    source: ModelFolder,
    name: str,
    required_names: Callable[[MtpSource, Checkpoint], Collection[str]],
) -> HeadPlan:
    """Open a checkpoint and plan its head's extraction; the caller closes the plan's checkpoint.

    name: of the source, for the head's configuration. required_names: returns the names of the
    tensors that the head's modules read, and raises CheckpointError where some are missing. Raises
    IncompatibleError without a head.
    """
    config = source.config
    refuse_head(config, source.path)
    is_extra_tensor = partial(is_mtp_tensor, num_layers=config.num_layers)

    def select_tensors(shards: Mapping[str, str]) -> set[str]:
        """Return the names of the head's tensors and of tables in shards that exist."""
        tables = [
            table
            for table in TABLE_NAMES
            if table in shards and (source.path / shards[table]).exists()
        ]
        return {FINAL_NORM, *tables, *filter(is_extra_tensor, shards)}

    checkpoint = Checkpoint.open(source.path, select_tensors, is_extra_tensor)
    layout = find_mtp_layout(config.architecture, checkpoint.tensors, config.num_layers)
    if layout is None:
        raise no_mtp_error(source.path, config, declared_module_count(source.fields))
    head = MtpSource(
        folder=source,
        layout=layout,
        config=config,
        verifier=name,
        verifier_sha256=verifier_hash(checkpoint),
    )
    needed = required_names(head, checkpoint)
    # A copy of the output head may equal the target's embedding, where that one is tied.
    embedding, output = (checkpoint.tensors.get(name) for name in TABLE_NAMES)
    target_tables = {"embedding": embedding, "head": output or embedding}
    tables = {
        layout.tensor_name(template, module): target_tables[role]
        for role, template in layout.family.private_tables.items()
        for module in range(layout.modules)
    }
    head_tensors = {
        name: meta for name, meta in checkpoint.tensors.items() if layout.contains(meta.name)
    }
    needed_tensors = [meta for name, meta in head_tensors.items() if name in needed]
    return HeadPlan(
        checkpoint=checkpoint,
        head=head,
        tensors=tuple(meta for meta in needed_tensors if meta.name not in tables),
        table_copies=tuple(
            (meta, tables[meta.name]) for meta in needed_tensors if meta.name in tables
        ),
        unused_tensors=tuple(
            meta.name for name, meta in head_tensors.items() if name not in needed
        ),
        declared_modules=declared_module_count(source.fields),
    )


def find_differing_copies(plan: HeadPlan) -> list[TensorMeta]:
    """Read the head's copies of tables and the target's; return the copies that differ in a bit.

    Copies whose table is in no opened shard are left out.
    """
    pairs = ((copy, table.name) for copy, table in plan.table_copies if table is not None)
    checkpoint = plan.checkpoint
    return [
        copy for copy, table in pairs if not checkpoint.tensors_equal(copy.name, checkpoint, table)
    ]
