"""The choice of the drafter: the method that is requested, or the best that a target brings along.

`auto` takes a draft model or head if one is given, else the checkpoint's own MTP head, else the
assistant that lies beside the model, else the demo's draft, else prompt lookup.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spd.errors import IncompatibleError, SpdError, UsageError
from spd.formats.assistant import ASSISTANT_ARCHITECTURE
from spd.formats.demo import DEMOS, demo_draft_folder, demo_eagle3_folder, demo_folder
from spd.formats.eagle3 import EMBEDDING
from spd.formats.folder import ModelFolder
from spd.formats.gguf.sidecars import find_sidecar
from spd.formats.hub import find_assistant, model_name_of_snapshot
from spd.formats.model_config import HEAD_DESCRIPTIONS, ModelConfig, refuse_head
from spd.formats.mtp import (
    MtpSource,
    declared_module_count,
    find_mtp_source,
    is_mtp_head,
    no_mtp_error,
    require_equal_properties,
    verifier_hash,
)
from spd.runtime.models import unused_tensors
from spd.runtime.models.mtp_weights import check_mtp_source
from spd.runtime.plan.config import METHODS, EngineConfig

NO_KNOWN_DRAFTER = "no draft model is known for this model"


@dataclass(frozen=True)
class Drafter:
    """The method that drafts, the reason for it, and its weights."""

    method: str
    reason: str
    folder: ModelFolder | None = None
    mtp: MtpSource | None = None
    head_holds_embedding: bool = (
        False  # True: an EAGLE-3 head holds embeddings, perhaps the target's
    )

    @property
    def draft_max(self) -> int:
        """Return the drafts of a round at most, unless another number is requested."""
        block = None if self.folder is None else self.folder.config.block
        return METHODS[self.method].draft_max if block is None else block.max_drafts

    def weights_source(self) -> tuple[ModelConfig, ModelFolder] | None:
        """Return the configuration and folder of the drafting weights, a head's or a model's; None
        where no weights draft.
        """
        if self.mtp is not None:
            return self.mtp.config, self.mtp.folder
        return None if self.folder is None else (self.folder.config, self.folder)


def choose_drafter(config: EngineConfig, target: ModelFolder) -> Drafter:
    """Return the drafter that a configuration asks for, or the best one for the target.

    Looks for drafters beside the target, and reads the headers of their files. Raises UsageError or
    IncompatibleError where a requested one is absent or does not fit.
    """
    method = config.method
    reason = NO_KNOWN_DRAFTER
    refuse_head(target.config, target.path)
    if not config.allows_drafter_weights:
        return Drafter(method, "asked for")
    if config.draft_model is not None:
        return _drafter_from_folder(config, target, ModelFolder.from_path(config.draft_model))
    if method == "mtp":
        return _drafter_with_mtp(config, target)
    if method == "auto":
        mtp = _find_mtp_drafter(config, target)
        if isinstance(mtp, Drafter):
            return mtp
        reason = mtp
    if (
        method in ("auto", "assistant")
        and (assistant_folder := _find_assistant(target)) is not None
    ):
        try:
            return _drafter_with_head(config, target, ModelFolder(assistant_folder))
        except SpdError as error:
            if method == "assistant":
                raise
            reason = f"{assistant_folder.name} cannot be used: {error.message}"
    if method != "assistant" and target.path in map(demo_folder, DEMOS):
        demo_draft = demo_eagle3_folder() if method == "eagle3" else demo_draft_folder()
        if demo_draft.exists() and (method != "eagle3" or target.path == demo_draft.parent):
            return _drafter_from_folder(config, target, ModelFolder(demo_draft))
    if method in HEAD_DESCRIPTIONS:
        kind = HEAD_DESCRIPTIONS[method]
        raise UsageError(f"--spec {method} needs {kind}", fix=[f"--draft-model FOLDER of {kind}"])
    if method == "draft":
        raise UsageError(
            "--spec draft needs a draft model", fix=["--draft-model FOLDER", "--spec ngram"]
        )
    return Drafter("ngram", reason)


def takes_draft_model(method: str, draft: ModelFolder) -> bool:
    """True if --draft-model is for `method`, where several methods run with one --draft-model.

    Any method with weights takes it; MTP has the target's own head, and takes an MTP head only.
    """
    return METHODS[method].has_weights and (method != "mtp" or is_mtp_head(draft))


def _drafting_method_of(draft: ModelFolder) -> str | None:
    """Return the method that drafts with a folder's head or assistant; None for a plain model."""
    return "mtp" if is_mtp_head(draft) else draft.config.head_kind


def _drafter_from_folder(config: EngineConfig, target: ModelFolder, draft: ModelFolder) -> Drafter:
    """Return a drafter with the model, head or assistant of a folder or file.

    Raises IncompatibleError where it does not fit the method or the target.
    """
    kind = _drafting_method_of(draft)
    if config.method == "mtp" and kind is None and draft.gguf is not None:
        kind = "mtp"  # MTP layers may stand behind those of the file's own model
    if kind == "mtp" and config.method in ("auto", "mtp"):
        return _drafter_with_mtp(config, target, draft)
    if config.method in HEAD_DESCRIPTIONS or kind is not None:
        return _drafter_with_head(config, target, draft)
    if config.load != "dummy":
        draft.checkpoint.close()  # refuses a folder without a model before tokenizers are compared
    _require_same_vocabulary(target, draft)
    return Drafter("draft", "asked for" if config.draft_model else "the model's own draft", draft)


def _drafter_with_mtp(
    config: EngineConfig, target: ModelFolder, head: ModelFolder | None = None
) -> Drafter:
    """Return a drafter with an MTP head: the target's own, or `head` in another folder or file.

    Raises the error of a head that is missing or cannot be used.
    """
    source = find_mtp_source(target, head)
    if source is None:
        raise no_mtp_error(target.path, target.config, declared_module_count(target.fields))
    check_mtp_source(source, source.folder.checkpoint)
    reason = "asked for"
    made_for = source.verifier_sha256
    if head is not None and made_for and verifier_hash(target.checkpoint) != made_for:
        reason += "; the head was cut from another checkpoint: expect fewer accepted drafts"
    return Drafter("mtp", reason + _reuse_note(config, source), mtp=source)


def _is_assistant(path: Path) -> bool:
    """True if a GGUF file holds an assistant. Raises SpdError where it cannot be read."""
    return ModelFolder(path).fields.get("architectures") == [ASSISTANT_ARCHITECTURE]


def _find_assistant(target: ModelFolder) -> Path | None:
    """Return the path of a target's assistant, found by its folder's name or beside a GGUF file;
    None where there is none.
    """
    assistant = find_assistant(target.path)
    if assistant is None and target.gguf is not None:
        with suppress(SpdError):
            sidecar = find_sidecar(target.path)
            assistant = sidecar if sidecar is not None and _is_assistant(sidecar) else None
    return assistant


def _find_mtp_drafter(config: EngineConfig, target: ModelFolder) -> Drafter | str:
    """Return a drafter with the MTP head of the target's checkpoint or of the file beside it, or a
    text that says why there is none.
    """
    sidecar: Path | None = None
    try:
        source = find_mtp_source(target)
        if source is None and target.gguf is not None:
            sidecar = find_sidecar(target.path)
            if sidecar is not None and _is_assistant(sidecar):
                sidecar = None
    except SpdError:  # a folder without weights is not refused for its head
        return NO_KNOWN_DRAFTER
    try:
        if sidecar is not None:
            source = find_mtp_source(target, ModelFolder(sidecar))
    except SpdError as error:
        return f"{sidecar} cannot be used: {error.message}"
    if source is None:
        missing = declared_module_count(target.fields)
        return (
            f"{NO_KNOWN_DRAFTER}, and its MTP layers are missing" if missing else NO_KNOWN_DRAFTER
        )
    try:
        check_mtp_source(source, source.folder.checkpoint)
    except SpdError as error:
        return f"the MTP head cannot be used: {error.message}"
    reason = "the checkpoint's own MTP head"
    if sidecar is not None:
        reason = f"the MTP head beside it, {sidecar.name}"
    return Drafter("mtp", reason + _reuse_note(config, source), mtp=source)


def _drafter_with_head(config: EngineConfig, target: ModelFolder, draft: ModelFolder) -> Drafter:
    """Return a drafter with an EAGLE-3 head, an assistant or a block drafter.

    Raises IncompatibleError where it is something else, or does not fit the target.
    """
    kind = _drafting_method_of(draft)
    if kind is None or config.method not in ("auto", kind):
        requested_kind = HEAD_DESCRIPTIONS.get(config.method, "a model")
        actual_kind = HEAD_DESCRIPTIONS.get(kind or "", "a model")
        fix = [
            f"--spec {kind or 'draft'} --draft-model {draft}",
            f"--draft-model FOLDER of {requested_kind}",
        ]
        if config.method == "mtp":
            fix.append("spd convert-mtp ORIGINAL HEAD makes one from a checkpoint with MTP layers")
        raise IncompatibleError(
            f"{draft}: is {actual_kind}, not {requested_kind}", fix=fix, code=f"no_{config.method}"
        )
    head = draft.config
    require_matching_target(head, draft.path, target.config, target.path)
    holds_embedding = False
    if config.load != "dummy":
        unused_tensors(head, draft.checkpoint)
        holds_embedding = kind == "eagle3" and EMBEDDING in draft.checkpoint.tensors
    if draft.tokenizer is not None:
        _require_same_vocabulary(target, draft)
    head_description = (
        "head"
        if kind == "eagle3"
        else f"{kind}, {model_name_of_snapshot(draft.path) or draft.path.name}"
    )
    reason = "asked for" if config.draft_model else f"the model's own {head_description}"
    return Drafter(kind, reason, draft, head_holds_embedding=holds_embedding)


def require_matching_target(
    head: ModelConfig, draft: Path, target: ModelConfig, folder: Path
) -> None:
    """Raise IncompatibleError where a head was made for another target than this one."""
    reader = head.stream_reader
    head_config = reader or head.assistant
    assert head_config is not None
    pairs = [("hidden size", head_config.target_hidden_size, target.hidden_size)]
    pairs += [("vocabulary size", head.vocab_size, target.vocab_size)]
    if head.assistant is not None:
        head_cache = _cache_dimensions(head)
        target_cache = _cache_dimensions(target)
        pairs += [(name, head_cache[name], target_cache[name]) for name in head_cache]
    if head.block is not None and head.block.target_layers is not None:
        pairs += [("number of layers", head.block.target_layers, target.num_layers)]
    kind = "EAGLE-3" if head.eagle3 is not None else "assistant"
    if head.block is not None:
        kind = head.block.name
    require_equal_properties(kind=kind, properties=pairs, head=draft, target=folder)
    if reader is not None:
        reader.aux_layers(target.num_layers)


def _cache_dimensions(config: ModelConfig) -> dict[str, int]:
    """Return the sizes that an assistant's and its target's cache must share, by names for
    messages.
    """
    gemma4 = config.gemma4
    full_attention = (0, 0) if gemma4 is None else (gemma4.head_dim, gemma4.kv_heads)
    dimensions = {"head size": config.head_dim, "key heads": config.num_kv_heads}
    dimensions |= {
        f"{name} of layers that see everything": size
        for name, size in zip(dimensions, full_attention, strict=True)
    }
    return {
        **dimensions,
        "sliding window": next(
            (window for window in config.sliding_windows if window is not None), 0
        ),
    }


def _reuse_note(config: EngineConfig, source: MtpSource) -> str:
    """Return a text on drafts beyond an MTP head's modules, for the reason; empty without any."""
    modules = source.layout.modules
    if (METHODS["mtp"].draft_max if config.draft_max is None else config.draft_max) <= modules:
        return ""
    first = "first" if modules == 1 else f"first {modules}"
    return f"; drafts beyond the {first} use the last module again"


def _require_same_vocabulary(target: ModelFolder, draft: ModelFolder) -> None:
    """Raise IncompatibleError unless the tokenizers agree on every id; either may be absent."""
    if target.tokenizer is not None and target.tokenizer.is_same_file(draft.path):
        return  # opening a large one takes half a second
    target_fingerprint, draft_fingerprint = (
        folder.tokenizer and folder.tokenizer.fingerprint for folder in (target, draft)
    )
    if target_fingerprint != draft_fingerprint:
        message = "the draft model does not share the target's vocabulary"
        reason = [
            f"target {target}",
            f"draft  {draft}",
            "Accepted tokens would be other text than proposed.",
        ]
        fix = ["--spec ngram", "--draft-model FOLDER with the same tokenizer.json"]
        raise IncompatibleError(message, reason=reason, fix=fix, code="vocab_mismatch")
