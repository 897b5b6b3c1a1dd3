"""MTP heads as folders: where a head is read from, what fits a target, and what is cut out of a checkpoint.

A head folder, which `docs/mtp.md` describes, holds a head by itself, for a target whose own checkpoint has
none. `plan_head` cuts one out of a checkpoint: names stay, and only the shards that hold it and the two
tables beside it are opened.
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
from spd.formats.json_file import Fields, display_text
from spd.formats.model_config import MAX_LAYERS, MTP_HEAD, ModelConfig, model_config_of, refuse_head
from spd.formats.mtp_layout import MtpLayout, find_mtp_layout, is_mtp_tensor
from spd.formats.names import EMBEDDING, FINAL_NORM, HEAD
from spd.formats.safetensors_header import TensorMeta

MODEL_TYPE = "mtp"
HOW_TO_ATTACH = (
    "--mtp HEAD with a folder that `spd convert-mtp ORIGINAL HEAD` made of the original checkpoint",
    "--spec ngram",
)
TABLES = (EMBEDDING, HEAD)
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of `config.json` that say how many modules a head has."""


@dataclass(frozen=True)
class MtpSource:
    """Where a target's MTP head is read from: the target's own folder, or a head folder."""

    folder: ModelFolder
    layout: MtpLayout
    config: ModelConfig  # the target's, whose layers the head's are like
    verifier: str = ""  # what a head folder was cut from; empty for a head in its own checkpoint
    verifier_sha256: str = ""


def declared_module_count(fields: Fields) -> int:
    """How many MTP modules `config.json` speaks of; 0 where it does not."""
    nested = fields.get("text_config")
    found = fields.with_values({**(nested if isinstance(nested, dict) else {}), **fields.values})
    return found.integer(
        next((key for key in COUNT_KEYS if key in found), COUNT_KEYS[0]), 0, MAX_LAYERS, 0
    )


def no_mtp_error(folder: Path, num_layers: int, declared: int) -> IncompatibleError:
    """The refusal of a checkpoint that has no MTP head, or lost the one that its configuration names."""
    reason = [
        f"no tensor such as model.layers.{num_layers}.eh_proj.weight, mtp.fc.weight or model.mtp_…"
    ]
    if declared:
        reason.append(
            f"config.json speaks of {declared}: quantized copies are often written without them"
        )
    return IncompatibleError(f"{folder}: holds no MTP layers", reason=reason, fix=HOW_TO_ATTACH)


def verifier_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 of a checkpoint's final norm as stored: small, and the same in quantized copies alone."""
    meta = checkpoint.meta(FINAL_NORM)
    data = b"".join(checkpoint.read_pieces(meta))
    return hashlib.sha256(f"{meta.dtype} {list(meta.shape)} ".encode() + data).hexdigest()


def make_head_config(
    verifier_config: Mapping[str, Any], verifier: str, sha256: str, modules: int, *, quantized: bool
) -> dict[str, Any]:
    """The `config.json` of a head folder; verifier_config is the target's, as read from its file."""
    kept = {
        key: value
        for key, value in verifier_config.items()
        if quantized or key != "quantization_config"
    }
    architectures = verifier_config.get("architectures")
    return {
        "architectures": [MTP_HEAD],
        "speculators_model_type": MODEL_TYPE,
        "num_nextn_predict_layers": modules,
        "transformer_layer_config": kept,
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": modules}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier,
                "architectures": architectures,
                "sha256": sha256,
            },
        },
    }


def read_head_folder(folder: ModelFolder) -> MtpSource:
    """Read what a head folder says, and find its modules; `check_source` checks its tensors."""
    fields = folder.fields
    layer = fields.optional_nested("transformer_layer_config")
    speculators = fields.optional_nested("speculators_config")
    kind = fields.get("speculators_model_type")
    if kind != MODEL_TYPE or layer is None or speculators is None:
        why = f"{fields.where}: speculators_model_type: {display_text(kind)}: "
        why += "this is no folder with an MTP head"
        fix = ["spd convert-mtp ORIGINAL HEAD makes one from a checkpoint with MTP layers"]
        raise CheckpointError(why, fix=fix)
    verifier = speculators.nested("verifier")
    config = model_config_of(layer)
    layout = find_mtp_layout(config.architecture, folder.checkpoint.tensors, config.num_layers)
    declared = fields.integer("num_nextn_predict_layers", 1, MAX_LAYERS)
    found = layout.modules if layout else 0
    if layout is None or found != declared:
        raise fields.field_error(
            "num_nextn_predict_layers", f"is {declared}, but {found} modules are there"
        )
    return MtpSource(folder, layout, config, verifier.text("name_or_path"), verifier.text("sha256"))


def read_head_file(file: ModelFolder, target: ModelFolder) -> MtpSource:
    """Find the head for a target in a GGUF file, which may hold nothing else. Raises IncompatibleError.

    The layers are like the target's: of their own configuration the file says only what such layers need.
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
    require_equal_properties("MTP", pairs, file.path, target.path, "--mtp")
    checkpoint = file.checkpoint
    layout = find_mtp_layout(config.architecture, checkpoint.tensors, config.num_layers)
    if layout is None:
        raise no_mtp_error(file.path, config.num_layers, declared_module_count(fields))
    known = FINAL_NORM in checkpoint.tensors and target.gguf is not None
    return MtpSource(
        file, layout, config, file.path.name, verifier_hash(checkpoint) if known else ""
    )


def find_mtp_source(target: ModelFolder, head: ModelFolder | None = None) -> MtpSource | None:
    """Return the MTP head to use with a target; None without one.

    head: a head folder made for the target, or a GGUF file with a head; None: the target's own. Raises
    IncompatibleError where the head was made for another model.
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
    words = ("architecture", "hidden size", "vocabulary size", "layers")
    facts = (
        (c.architecture, c.hidden_size, c.vocab_size, c.num_layers) for c in (head.config, target)
    )
    require_equal_properties(
        "MTP", zip(words, *facts, strict=True), head.folder.path, folder, "--mtp"
    )


def require_equal_properties(
    kind: str, pairs: Iterable[tuple[str, object, object]], head: Path, target: Path, flag: str
) -> None:
    """Raise IncompatibleError where a head was made for another target: (words, its fact, the target's)."""
    differing = [
        f"{words}: head {one}, target {other}" for words, one, other in pairs if one != other
    ]
    if differing:
        why = f"{head}: this {kind} head was made for another model than {target}"
        fix = [f"{flag} HEAD made for this model", "--spec ngram"]
        raise IncompatibleError(why, reason=differing, fix=fix)


@dataclass(frozen=True)
class HeadPlan:
    """What a conversion takes, made from headers alone; closed with its checkpoint."""

    checkpoint: Checkpoint
    head: MtpSource  # where it stands
    tensors: tuple[TensorMeta, ...]
    table_copies: tuple[tuple[TensorMeta, TensorMeta | None], ...]
    """The head's own tables, each with the target's, if at hand, that it may equal and is left out for."""
    unused_tensors: tuple[str, ...]  # of no use
    declared_modules: int  # see `declared_modules`

    @property
    def quantized(self) -> bool:
        """Whether matrices are stored in another form than floats."""
        return any(tensor.dtype not in FLOAT_DTYPES for tensor in self.tensors)


def plan_head(
    source: ModelFolder, name: str, check: Callable[[MtpSource, Checkpoint], Collection[str]]
) -> HeadPlan:
    """The head of a checkpoint, which the caller closes. check: names of what it needs, seen to be there."""
    config = source.config
    refuse_head(config, source.path)

    def wanted(shards: Mapping[str, str]) -> set[str]:
        tables = [
            table for table in TABLES if table in shards and (source.path / shards[table]).exists()
        ]
        return {
            FINAL_NORM,
            *tables,
            *(name for name in shards if is_mtp_tensor(name, config.num_layers)),
        }

    beside = partial(is_mtp_tensor, num_layers=config.num_layers)
    checkpoint = Checkpoint.open(source.path, wanted, beside)
    layout = find_mtp_layout(config.architecture, checkpoint.tensors, config.num_layers)
    if layout is None:
        raise no_mtp_error(source.path, config.num_layers, declared_module_count(source.fields))
    head = MtpSource(source, layout, config, name, verifier_hash(checkpoint))
    needed = check(head, checkpoint)
    # What a copy may equal: the target's embedding serves as head too where it is tied.
    embedding, output = (checkpoint.tensors.get(name) for name in TABLES)
    equals = {"embedding": embedding, "head": output or embedding}
    copies = layout.family.private_tables.items()
    tables = {
        layout.tensor_name(name, m): equals[key]
        for key, name in copies
        for m in range(layout.modules)
    }
    owned = {name: meta for name, meta in checkpoint.tensors.items() if layout.contains(meta.name)}
    kept = [meta for name, meta in owned.items() if name in needed]
    return HeadPlan(
        checkpoint,
        head,
        tuple(meta for meta in kept if meta.name not in tables),
        tuple((meta, tables[meta.name]) for meta in kept if meta.name in tables),
        tuple(meta.name for name, meta in owned.items() if name not in needed),
        declared_module_count(source.fields),
    )


def find_differing_copies(plan: HeadPlan) -> list[TensorMeta]:
    """The head's own tables that are not the target's bit for bit; reads both to the end."""
    known = ((copy, table.name) for copy, table in plan.table_copies if table is not None)
    held = plan.checkpoint
    return [copy for copy, table in known if not held.tensors_equal(copy.name, held, table)]
