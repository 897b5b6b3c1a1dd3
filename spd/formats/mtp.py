"""MTP heads: which tensors a family's multi-token-prediction modules are made of, and folders of one.

A module m holds, for each slot t (the position of token t), the pair (token t, state at slot t - 1) and
predicts token t + 1. Its state stream is made of stream m: stream 0 is the target's hidden states after
the final norm, stream m + 1 what module m puts out. One decoder layer lies between:

    x = projection([norm(embedding of token t) ; norm(state at t - 1)])      either may come first
    y = layer(x)                     as the target's last layer; rotary position t - 1 - m
    logits = head(final norm(y))     what goes on is y before that norm, or after it

Heads are found by the names of their tensors: configurations of quantized copies often say otherwise.
Nothing is ever made up: a head is complete, or it is refused with the names of what is missing.

A head folder, which `docs/mtp.md` describes, holds a head by itself, for a target whose own checkpoint has
none. `plan_head` cuts one out of a checkpoint: names stay, and only the shards that hold it and the two
tables beside it are opened.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.checkpoint import FLOAT_DTYPES, Checkpoint, TensorMeta
from spd.formats.json_file import Fields, shown
from spd.formats.model_config import MAX_LAYERS, MTP_HEAD, ModelConfig, model_config_of, refuse_head
from spd.formats.names import EMBEDDING, FINAL_NORM, HEAD

if TYPE_CHECKING:
    from spd.formats.folder import ModelFolder

MODEL_TYPE = "mtp"
HOW_TO_ATTACH = (
    "--mtp HEAD with a folder that `spd convert-mtp ORIGINAL HEAD` made of the original checkpoint",
    "--spec ngram",
)
TABLES = (EMBEDDING, HEAD)
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of `config.json` that say how many modules a head has."""


@dataclass(frozen=True)
class MtpFamily:
    """One family's names and conventions. In names, {i} counts modules, {l} layers after the target's."""

    name: str
    architectures: tuple[str, ...]
    layer: str  # what stands before the decoder layer's own names
    glue: Mapping[str, str] = field(hash=False)
    """`token_norm`, `state_norm` [hidden], `projection` [hidden, 2 * hidden], and `final_norm`, without which
    the head reads the layer's output as it is."""
    tables: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The head's own copies of `embedding` and `head`, where the family writes them."""
    hidden_first: bool = False  # in the projection's columns; else the embedding comes first
    masks_first: bool = True  # the embedding is zero where the rotary position is 0
    recycles_normed: bool = True  # what goes on: after the final norm, or before it
    centred_norms: bool = False  # scales are stored as their distance from 1
    like_layer: int = -1  # which of the target's layers a module's layer is like
    slides: bool = False  # of those that slide, with a dense MLP, whatever the target's have there

    @property
    def numbers_layers(self) -> bool:
        """Whether modules are numbered on from the target's layers."""
        return "{l}" in self.layer


def _family(name: str, of: str, layer: str, glue: str, prefix: str = "", **own: Any) -> MtpFamily:
    """A family of classes, without ForCausalLM; prefix: of the glue's names, where it is not the layer's."""
    classes = tuple(f"{each}ForCausalLM" for each in of.split())
    names = (f"{prefix or layer}{each}.weight" for each in glue.split())
    keys = ("token_norm", "state_norm", "projection", "final_norm")
    return MtpFamily(name, classes, layer, dict(zip(keys, names, strict=False)), **own)


_NEXT, _NORMS = "model.layers.{l}.", "enorm hnorm eh_proj "
_COPIES = {"embedding": f"{_NEXT}embed_tokens.weight", "head": f"{_NEXT}shared_head.head.weight"}
_deepseek = partial(_family, layer=_NEXT, glue=_NORMS + "shared_head.norm", tables=_COPIES)
_OUTPUT = {"head": f"{_NEXT}transformer.shared_head.output.weight"}
_step3 = partial(_family, layer=_NEXT, glue=_NORMS + "transformer.shared_head.norm", tables=_OUTPUT)
_MIMO = "token_layernorm hidden_layernorm input_proj final_layernorm"
_ernie = partial(
    _family, glue="mtp_emb_norm.{i} mtp_hidden_norm.{i} mtp_linear_proj.{i}", prefix="model."
)
_NUMBERED, _OUTER = "mtp.layers.{i}.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"
_mtp = partial(_family, layer=_NUMBERED, glue=_OUTER, prefix="mtp.", masks_first=False)
_ends = partial(_family, glue=_NORMS + "final_layernorm", masks_first=False)

FAMILIES = (
    _deepseek("deepseek", "DeepseekV3"),
    _deepseek("glm4", "Glm4Moe Glm4MoeLite", recycles_normed=False),
    _family("mimo", "MiMo", "model.mtp_layers.{i}.", _MIMO, hidden_first=True),
    _ends("mimo_v2", "MiMoV2Flash", "model.mtp.layers.{i}.", slides=True),
    _step3("step3", "Step3p5", masks_first=False, centred_norms=True, slides=True),
    _ernie(
        "ernie",
        "Ernie4_5_Moe Ernie4_5_",
        "model.mtp_block.{i}.",
        recycles_normed=False,
        like_layer=0,
    ),
    _mtp("mtp", ""),
    _mtp("qwen3_next", "Qwen3Next Qwen3_5 Qwen3_5Moe", centred_norms=True),
    _ends("nemotron_h", "NemotronH", _NUMBERED),
)
"""Families that write the same names differ in conventions: the target's architecture decides among them,
and the first one stands for architectures that none lists. Source: the published checkpoints' indices and
the forward passes of vLLM and SGLang."""

_MODULE = re.compile(r"(?:language_model\.|model\.)*(?:mtp\.|mtp_[a-z_]+\.)")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")


@dataclass(frozen=True)
class MtpLayout:
    """An MTP head as it stands in one checkpoint: its family, how many modules, and where they begin."""

    family: MtpFamily
    modules: int
    first_layer: int  # the {l} of module 0; of use where the family numbers layers

    def named(self, template: str, module: int) -> str:
        return template.format(i=module, l=self.first_layer + module)

    def layer_prefix(self, module: int) -> str:
        """What stands before the names of a module's decoder layer."""
        return self.named(self.family.layer, module)

    def owns(self, name: str) -> bool:
        """Whether a tensor lies inside this head, known or not."""
        if self.family.numbers_layers:
            return is_mtp_tensor(name, self.first_layer)
        return _MODULE.match(name) is not None

    def words(self) -> str:
        modules = f"{self.modules} module" + ("s" if self.modules > 1 else "")
        return f"{self.family.name} layout, {modules} at {self.layer_prefix(0)}*"


@dataclass(frozen=True)
class MtpSource:
    """Where a target's MTP head is read from: the target's own folder, or a head folder."""

    folder: ModelFolder
    layout: MtpLayout
    config: ModelConfig  # the target's, whose layers the head's are like
    verifier: str = ""  # what a head folder was cut from; empty for a head in its own checkpoint
    verifier_sha256: str = ""


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """Whether a tensor beside a target's `num_layers` layers belongs to an MTP head."""
    layer = _LAYER.match(name)
    return int(layer[1]) >= num_layers if layer else _MODULE.match(name) is not None


def find_mtp(architecture: str, names: Collection[str], num_layers: int) -> MtpLayout | None:
    """The MTP head among tensors beside a target's `num_layers`, complete or not; None: no trace of one."""
    own = [family for family in FAMILIES if architecture in family.architectures]
    by_names: dict[str, MtpFamily] = {}
    for family in (*own, *FAMILIES):
        by_names.setdefault(family.glue["projection"], family)
    for family in by_names.values():
        stems = (*family.glue.values(), family.layer)
        pattern = re.compile(
            "|".join(re.sub(r"\\\{[il]\\\}", r"([0-9]{1,9})", re.escape(stem)) for stem in stems)
        )
        matches = [match for name in names if (match := pattern.match(name))]
        numbers = {int(match[match.lastindex]) if match.lastindex else 0 for match in matches}
        first = num_layers if family.numbers_layers else 0
        if found := {number for number in numbers if first <= number < MAX_LAYERS}:
            return MtpLayout(family, max(found) - first + 1, first)
    return None


def declared_modules(fields: Fields) -> int:
    """How many MTP modules `config.json` speaks of; 0 where it does not."""
    nested = fields.get("text_config")
    found = fields.having({**(nested if isinstance(nested, dict) else {}), **fields.values})
    return found.integer(
        next((key for key in COUNT_KEYS if key in found), COUNT_KEYS[0]), 0, MAX_LAYERS, 0
    )


def no_mtp(folder: Path, num_layers: int, declared: int) -> IncompatibleError:
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
    data = b"".join(checkpoint.pieces(meta))
    return hashlib.sha256(f"{meta.dtype} {list(meta.shape)} ".encode() + data).hexdigest()


def head_config(
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
    layer, speculators = (
        fields.fields("transformer_layer_config"),
        fields.fields("speculators_config"),
    )
    kind = fields.get("speculators_model_type")
    if kind != MODEL_TYPE or layer is None or speculators is None:
        why = f"{fields.where}: speculators_model_type: {shown(kind)}: this is no folder with an MTP head"
        fix = ["spd convert-mtp ORIGINAL HEAD makes one from a checkpoint with MTP layers"]
        raise CheckpointError(why, fix=fix)
    verifier = speculators.nested("verifier")
    config = model_config_of(layer)
    layout = find_mtp(config.architecture, folder.checkpoint.tensors, config.num_layers)
    declared = fields.integer("num_nextn_predict_layers", 1, MAX_LAYERS)
    found = layout.modules if layout else 0
    if layout is None or found != declared:
        raise fields.refused(
            "num_nextn_predict_layers", f"is {declared}, but {found} modules are there"
        )
    return MtpSource(folder, layout, config, verifier.text("name_or_path"), verifier.text("sha256"))


def check_fits(head: MtpSource, target: ModelConfig, folder: Path) -> None:
    """Raise IncompatibleError where a head cannot run with a target, naming what differs."""
    words = ("architecture", "hidden size", "vocabulary size", "layers")
    facts = (
        (c.architecture, c.hidden_size, c.vocab_size, c.num_layers) for c in (head.config, target)
    )
    require_equal("MTP", zip(words, *facts, strict=True), head.folder.path, folder, "--mtp")


def require_equal(
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
    copies: tuple[tuple[TensorMeta, TensorMeta | None], ...]
    """The head's own tables, each with the target's, if at hand, that it may equal and is left out for."""
    ignored: tuple[str, ...]  # of no use
    declared: int  # see `declared_modules`

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
    layout = find_mtp(config.architecture, checkpoint.tensors, config.num_layers)
    if layout is None:
        raise no_mtp(source.path, config.num_layers, declared_modules(source.fields))
    head = MtpSource(source, layout, config, name, verifier_hash(checkpoint))
    needed = check(head, checkpoint)
    # What a copy may equal: the target's embedding serves as head too where it is tied.
    embedding, output = (checkpoint.tensors.get(name) for name in TABLES)
    equals = {"embedding": embedding, "head": output or embedding}
    copies = layout.family.tables.items()
    tables = {
        layout.named(name, m): equals[key] for key, name in copies for m in range(layout.modules)
    }
    owned = {name: meta for name, meta in checkpoint.tensors.items() if layout.owns(meta.name)}
    kept = [meta for name, meta in owned.items() if name in needed]
    return HeadPlan(
        checkpoint,
        head,
        tuple(meta for meta in kept if meta.name not in tables),
        tuple((meta, tables[meta.name]) for meta in kept if meta.name in tables),
        tuple(meta.name for name, meta in owned.items() if name not in needed),
        declared_modules(source.fields),
    )


def differing_copies(plan: HeadPlan) -> list[TensorMeta]:
    """The head's own tables that are not the target's bit for bit; reads both to the end."""
    known = ((copy, table.name) for copy, table in plan.copies if table is not None)
    held = plan.checkpoint
    return [copy for copy, table in known if not held.equal(copy.name, held, table)]
