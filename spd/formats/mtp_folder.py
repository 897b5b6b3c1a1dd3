"""A head folder: an MTP head by itself, for a target whose own checkpoint has none.

    HEAD/config.json          in the style of `speculators`
    HEAD/model.safetensors    the head's tensors with their original names and dtypes; or shards and an index

config.json holds

    architectures               ["MTPSpeculator"]
    speculators_model_type      "mtp"
    num_nextn_predict_layers    the number of modules
    transformer_layer_config    the verifier's own config.json: shapes, rotary embedding, num_hidden_layers;
                                its quantization_config only if the head's tensors are quantized by it
    speculators_config
        algorithm               "mtp"
        proposal_methods        [{"proposal_type": "greedy", "speculative_tokens": N}]
        default_proposal_method "greedy"
        verifier
            name_or_path        where the head was cut from
            architectures       the verifier's
            sha256              see `verifier_hash`

Tensor names are those of `spd.formats.mtp`, so that a head can be cut out of a checkpoint and read again
unchanged; families that number modules on from the target's layers may begin at any layer. Embedding and
head of the family's names (`embed_tokens`, `shared_head.head`) are there only where they differ from the
verifier's. The verifier is known by what a head cannot do without: a head runs with a target of the same
architecture, layers, hidden size and vocabulary, and is as good as it was made where the hash agrees too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.checkpoint import Checkpoint
from spd.formats.json_file import Fields, read_json_object, shown
from spd.formats.model_config import FILE_NAME, ModelConfig, model_config_of
from spd.formats.mtp import MtpLayout, find_mtp

ARCHITECTURE = "MTPSpeculator"
MODEL_TYPE = "mtp"
FINAL_NORM = "model.norm.weight"
_MUST_AGREE = {
    "architecture": "architecture",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary size",
    "num_layers": "layers",
}


@dataclass(frozen=True)
class HeadFolder:
    """What a head folder says of itself; `config` describes the verifier, and so the head's layers."""

    folder: Path
    layout: MtpLayout
    config: ModelConfig
    verifier: str
    verifier_sha256: str


@dataclass(frozen=True)
class MtpSource:
    """Where a target's MTP head is read from: `folder` is the target's own, or a head folder."""

    folder: Path
    layout: MtpLayout
    config: ModelConfig
    verifier_sha256: str | None = None
    """Of the checkpoint that a head folder was cut from; None for a head in its own checkpoint."""


def find_source(folder: Path, config: ModelConfig, head: Path | None) -> MtpSource | None:
    """The head to use with a target: of the head folder if one is given, else of the target's checkpoint.

    None where the target has none. Reads headers only. Raises what `read_head_folder` and `check_fits` do.
    """
    if head is not None:
        return head_source(head, config, folder)
    with Checkpoint.open(folder) as checkpoint:
        return own_source(checkpoint, config)


def head_source(head: Path, config: ModelConfig, folder: Path) -> MtpSource:
    """The head of a head folder, for the target of a folder. Raises as `find_source` does."""
    found = read_head_folder(head)
    check_fits(found, config, folder)
    return MtpSource(head, found.layout, found.config, found.verifier_sha256)


def own_source(checkpoint: Checkpoint, config: ModelConfig) -> MtpSource | None:
    """The head in a target's own checkpoint; None where it has none."""
    layout = find_mtp(config.architecture, checkpoint.tensors, config.num_layers)
    return None if layout is None else MtpSource(checkpoint.folder, layout, config)


def verifier_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 of a checkpoint's final norm as stored: its dtype, shape and bytes.

    Small, different in every trained model, and kept as it is by those who quantize. Reads nothing else.
    """
    meta = checkpoint.tensors.get(FINAL_NORM)
    if meta is None:
        raise CheckpointError(f"{checkpoint.folder}: tensor {FINAL_NORM}: is missing")
    with checkpoint.open_shard(meta.shard) as file:
        file.seek(meta.offset)
        data = file.read(meta.nbytes)
    return hashlib.sha256(f"{meta.dtype} {list(meta.shape)} ".encode() + data).hexdigest()


def head_config(
    verifier_config: Mapping[str, Any], verifier: str, sha256: str, modules: int, *, quantized: bool
) -> dict[str, Any]:
    """The `config.json` of a head folder; verifier_config is the target's, as read from its file."""
    kept = {key: value for key, value in verifier_config.items() if quantized or key != "quantization_config"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": modules}
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": MODEL_TYPE,
        "num_nextn_predict_layers": modules,
        "transformer_layer_config": kept,
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier,
                "architectures": verifier_config.get("architectures"),
                "sha256": sha256,
            },
        },
    }


def is_head_folder(folder: Path) -> bool:
    """Whether a folder says that it holds an MTP head by itself."""
    path = folder / FILE_NAME
    return path.is_file() and read_json_object(path).get("speculators_model_type") == MODEL_TYPE


def read_head_folder(folder: Path) -> HeadFolder:
    """Read what a head folder says, and find its modules; tensors are checked by `check_mtp`.

    Raises `CheckpointError` naming the file and the field, and for a folder that is no head.
    """
    path = folder / FILE_NAME
    fields = Fields(str(path), read_json_object(path))
    layer, speculators = fields.fields("transformer_layer_config"), fields.fields("speculators_config")
    kind = fields.get("speculators_model_type")
    if kind != MODEL_TYPE or layer is None or speculators is None:
        raise CheckpointError(
            f"{path}: speculators_model_type: {shown(kind)}: this is no folder with an MTP head",
            fix=["spd convert-mtp ORIGINAL HEAD makes one from a checkpoint with MTP layers"],
        )
    verifier = speculators.fields("verifier")
    if verifier is None:
        raise speculators.refused("verifier", "is missing")
    config = model_config_of(layer)
    with Checkpoint.open(folder) as checkpoint:
        layout = find_mtp(config.architecture, checkpoint.tensors, None)
    declared = fields.integer("num_nextn_predict_layers", 1, 1024)
    if layout is None or layout.modules != declared:
        found = layout.modules if layout else 0
        raise fields.refused("num_nextn_predict_layers", f"is {declared}, but {found} modules are there")
    return HeadFolder(folder, layout, config, verifier.text("name_or_path"), verifier.text("sha256"))


def check_fits(head: HeadFolder, target: ModelConfig, folder: Path) -> None:
    """Raise IncompatibleError where a head cannot run with a target, naming what differs."""
    differing = [
        f"{words}: head {getattr(head.config, field)}, target {getattr(target, field)}"
        for field, words in _MUST_AGREE.items()
        if getattr(head.config, field) != getattr(target, field)
    ]
    if differing:
        raise IncompatibleError(
            f"{head.folder}: this MTP head was made for another model than {folder}",
            reason=[*differing, f"it was cut from {head.verifier}"],
            fix=["--mtp HEAD made from the same model", "--spec ngram"],
            code="mtp_mismatch",
        )
