"""What drafts: the method that is asked for, or the best that a target brings along.

`auto` takes a draft model or head if one is given, else the checkpoint's own MTP head, else the
assistant that lies beside the model, else the demo's draft, else prompt lookup.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd.errors import IncompatibleError, SpdError, UsageError
from spd.formats.assistant import ARCHITECTURE as ASSISTANT
from spd.formats.demo import DEMOS, demo_draft_folder, demo_eagle3_folder, demo_folder
from spd.formats.eagle3 import EMBEDDING
from spd.formats.folder import ModelFolder
from spd.formats.gguf.sidecars import sidecar_of
from spd.formats.hub import find_assistant, model_name_of_snapshot
from spd.formats.model_config import HEADS, ModelConfig, refuse_head
from spd.formats.mtp import (
    MtpSource,
    declared_module_count,
    find_mtp_source,
    no_mtp_error,
    require_equal_properties,
    verifier_hash,
)
from spd.runtime.models import unused_tensors
from spd.runtime.models.mtp_weights import check_source
from spd.runtime.plan.config import METHODS, EngineConfig

UNKNOWN = "no draft model is known for this model"


@dataclass(frozen=True)
class Drafter:
    """The speculation that will be done, and why."""

    method: str
    reason: str
    folder: ModelFolder | None = None
    mtp: MtpSource | None = None
    head_embedding: bool = False  # whether an EAGLE-3 head holds embeddings, perhaps the target's

    def source(self) -> tuple[ModelConfig, ModelFolder] | None:
        """Whose weights draft and where they are: the head's, or the draft model's."""
        if self.mtp is not None:
            return self.mtp.config, self.mtp.folder
        return None if self.folder is None else (self.folder.config, self.folder)


def choose_drafter(config: EngineConfig, target: ModelFolder) -> Drafter:
    """Return the drafter for a configuration. Raises the error of whatever cannot be honoured."""
    method = config.method
    why = UNKNOWN
    refuse_head(target.config, target.path)
    if method == "mtp" or config.mtp is not None:
        return _asked_mtp(config, target)
    if not config.weights:
        return Drafter(method, "asked for")
    if config.draft_model is not None:
        return _asked_draft(config, target, ModelFolder.from_path(config.draft_model))
    if method == "auto":
        found = _own_mtp(config, target)
        if isinstance(found, Drafter):
            return found
        why = found
    if method in ("auto", "assistant") and (path := _assistant(target)) is not None:
        try:
            return _asked_head(config, target, ModelFolder(path))
        except SpdError as error:
            if method == "assistant":
                raise
            why = f"{path.name} cannot be used: {error.message}"
    if method != "assistant" and target.path in map(demo_folder, DEMOS):
        own = demo_eagle3_folder() if method == "eagle3" else demo_draft_folder()
        if own.exists() and (method != "eagle3" or target.path == own.parent):
            return _asked_draft(config, target, ModelFolder(own))
    if method in HEADS:
        kind = HEADS[method]
        raise UsageError(f"--spec {method} needs {kind}", fix=[f"--draft-model FOLDER of {kind}"])
    if method == "draft":
        raise UsageError(
            "--spec draft needs a draft model", fix=["--draft-model FOLDER", "--spec ngram"]
        )
    return Drafter("ngram", why)


def _asked_draft(config: EngineConfig, target: ModelFolder, draft: ModelFolder) -> Drafter:
    if config.method in HEADS or draft.config.head_kind is not None:
        return _asked_head(config, target, draft)
    if config.load != "dummy":
        draft.checkpoint.close()  # what holds no model says so before its tokenizer is compared
    _require_same_vocabulary(target, draft)
    return Drafter("draft", "asked for" if config.draft_model else "the model's own draft", draft)


def _asked_mtp(config: EngineConfig, target: ModelFolder) -> Drafter:
    source = find_mtp_source(
        target, None if config.mtp is None else ModelFolder.from_path(config.mtp)
    )
    if source is None:
        raise no_mtp_error(
            target.path, target.config.num_layers, declared_module_count(target.fields)
        )
    check_source(source, source.folder.checkpoint)
    reason = "asked for"
    made_for = source.verifier_sha256
    if config.mtp is not None and made_for and verifier_hash(target.checkpoint) != made_for:
        reason += "; the head was cut from another checkpoint: expect fewer accepted drafts"
    return Drafter("mtp", reason + _reuse(config, source), mtp=source)


def _is_assistant(path: Path) -> bool:
    """True if a GGUF file holds an assistant. Raises SpdError where it cannot be read."""
    return ModelFolder(path).fields.get("architectures") == [ASSISTANT]


def _assistant(target: ModelFolder) -> Path | None:
    """Where a target's assistant is: a folder by its name, or the head's file beside a GGUF file."""
    found = find_assistant(target.path)
    if found is None and target.gguf is not None:
        with suppress(SpdError):
            beside = sidecar_of(target.path)
            found = beside if beside is not None and _is_assistant(beside) else None
    return found


def _own_mtp(config: EngineConfig, target: ModelFolder) -> Drafter | str:
    """Drafting with the MTP head that the target's checkpoint holds; why not, where it cannot be."""
    beside: Path | None = None
    try:
        source = find_mtp_source(target)
        if source is None and target.gguf is not None:
            beside = sidecar_of(target.path)
            if beside is not None and _is_assistant(beside):
                beside = None
    except SpdError:  # a folder without weights is not refused for its head
        return UNKNOWN
    try:
        if beside is not None:
            source = find_mtp_source(target, ModelFolder(beside))
    except SpdError as error:
        return f"{beside} cannot be used: {error.message}"
    if source is None:
        missing = declared_module_count(target.fields)
        return f"{UNKNOWN}, and its MTP layers are missing" if missing else UNKNOWN
    try:
        check_source(source, source.folder.checkpoint)
    except SpdError as error:
        return f"the MTP head cannot be used: {error.message}"
    reason = "the checkpoint's own MTP head"
    if beside is not None:
        reason = f"the MTP head beside it, {beside.name}"
    return Drafter("mtp", reason + _reuse(config, source), mtp=source)


def _asked_head(config: EngineConfig, target: ModelFolder, draft: ModelFolder) -> Drafter:
    """Drafting with a head, of EAGLE-3 or an assistant. Raises IncompatibleError where it does not fit."""
    head = draft.config
    kind = draft.config.head_kind
    if kind is None or config.method not in ("auto", kind):
        asked = HEADS.get(config.method, "a model")
        is_a = HEADS.get(kind or "", "a model")
        fix = [
            f"--spec {kind or 'draft'} --draft-model {draft}",
            f"--draft-model FOLDER of {asked}",
        ]
        raise IncompatibleError(
            f"{draft}: is {is_a}, not {asked}", fix=fix, code=f"no_{config.method}"
        )
    check_target(head, draft.path, target.config, target.path)
    holds_embedding = False
    if config.load != "dummy":
        unused_tensors(head, draft.checkpoint)
        holds_embedding = kind == "eagle3" and EMBEDDING in draft.checkpoint.tensors
    if draft.tokenizer is not None:
        _require_same_vocabulary(target, draft)
    own = (
        "head"
        if kind == "eagle3"
        else f"{kind}, {model_name_of_snapshot(draft.path) or draft.path.name}"
    )
    why = "asked for" if config.draft_model else f"the model's own {own}"
    return Drafter(kind, why, draft, head_embedding=holds_embedding)


def check_target(head: ModelConfig, draft: Path, target: ModelConfig, folder: Path) -> None:
    """Raise IncompatibleError where a head was made for another target than this one."""
    facts = head.eagle3 or head.assistant
    assert facts is not None
    pairs = [("hidden size", facts.target_hidden_size, target.hidden_size)]
    pairs += [("vocabulary size", head.vocab_size, target.vocab_size)]
    if head.assistant is not None:
        own, other = (_cache_facts(config) for config in (head, target))
        pairs += [(name, own[name], other[name]) for name in own]
    kind = "EAGLE-3" if head.eagle3 is not None else "assistant"
    require_equal_properties(kind, pairs, draft, folder, "--draft-model")
    if head.eagle3 is not None:
        head.eagle3.aux_layers(target.num_layers)


def _cache_facts(config: ModelConfig) -> dict[str, Any]:
    """What a cache looks like that an assistant reads, by what it is called."""
    facts = config.gemma4
    wide = (0, 0) if facts is None else (facts.head_dim, facts.kv_heads)
    found = {"head size": config.head_dim, "key heads": config.num_kv_heads}
    found |= {
        f"{name} of layers that see everything": size
        for name, size in zip(found, wide, strict=True)
    }
    return {
        **found,
        "sliding window": next((each for each in config.sliding_windows if each is not None), 0),
    }


def _reuse(config: EngineConfig, source: MtpSource) -> str:
    """What is said once where there are more drafts than modules."""
    modules = source.layout.modules
    if (METHODS["mtp"].draft_max if config.draft_max is None else config.draft_max) <= modules:
        return ""
    first = "first" if modules == 1 else f"first {modules}"
    return f"; drafts beyond the {first} use the last module again"


def _require_same_vocabulary(target: ModelFolder, draft: ModelFolder) -> None:
    """The tokenizers agree on every id, or there is none on either side."""
    if target.tokenizer is not None and target.tokenizer.is_same_file(draft.path):
        return  # opening a large one takes half a second
    own, other = (folder.tokenizer and folder.tokenizer.fingerprint for folder in (target, draft))
    if own != other:
        why = "the draft model does not share the target's vocabulary"
        reason = [
            f"target {target}",
            f"draft  {draft}",
            "Accepted tokens would be other text than proposed.",
        ]
        fix = ["--spec ngram", "--draft-model FOLDER with the same tokenizer.json"]
        raise IncompatibleError(why, reason=reason, fix=fix, code="vocab_mismatch")
