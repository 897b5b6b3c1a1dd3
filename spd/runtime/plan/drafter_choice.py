"""What drafts: the method that is asked for, or the best that a target brings along.

`auto` takes a draft model or EAGLE-3 head if one is given, else the checkpoint's own MTP head, else the
demo's draft, else prompt lookup.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spd.errors import IncompatibleError, SpdError, UsageError
from spd.formats.demo import DEMOS, demo_draft_folder, demo_eagle3_folder, demo_folder
from spd.formats.eagle3 import EMBEDDING
from spd.formats.folder import ModelFolder
from spd.formats.model_config import ModelConfig, refuse_head
from spd.formats.mtp import MtpSource, declared_modules, no_mtp, require_equal, verifier_hash
from spd.runtime.models.eagle3 import check_eagle3
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
    head_embedding: bool = False
    """Whether an EAGLE-3 head holds embeddings, perhaps the target's."""

    def source(self) -> tuple[ModelConfig, ModelFolder] | None:
        """Whose weights draft and where they are: the head's, or the draft model's."""
        if self.mtp is not None:
            return self.mtp.config, self.mtp.folder
        return None if self.folder is None else (self.folder.config, self.folder)


def choose_drafter(config: EngineConfig, target: ModelFolder) -> Drafter:
    """The speculation that a wish comes to. Raises the error of whatever cannot be honoured."""
    method, why = config.method, UNKNOWN
    refuse_head(target.config, target.path)
    if method == "mtp" or config.mtp is not None:
        return _asked_mtp(config, target)
    if not config.weights:
        return Drafter(method, "asked for")
    draft = None if config.draft_model is None else ModelFolder.of(config.draft_model)
    if draft is None and method == "auto":
        found = _own_mtp(config, target)
        if isinstance(found, Drafter):
            return found
        why = found
    if draft is None and target.path in map(demo_folder, DEMOS):
        own = demo_eagle3_folder() if method == "eagle3" else demo_draft_folder()
        fits = own.exists() and (method != "eagle3" or target.path == own.parent)
        draft = ModelFolder(own) if fits else None
    if draft is None:
        if method == "eagle3":
            raise UsageError("--spec eagle3 needs a head", fix=["--draft-model FOLDER of an EAGLE-3 head"])
        if method == "draft":
            raise UsageError("--spec draft needs a draft model", fix=["--draft-model FOLDER", "--spec ngram"])
        return Drafter("ngram", why)
    if method == "eagle3" or draft.config.eagle3 is not None:
        return _asked_eagle3(config, target, draft)
    if config.load != "dummy":
        draft.checkpoint.close()  # what holds no model says so before its tokenizer is compared
    _require_same_vocabulary(target, draft)
    return Drafter("draft", "asked for" if config.draft_model else "the model's own draft", draft)


def _asked_mtp(config: EngineConfig, target: ModelFolder) -> Drafter:
    source = target.mtp_source(None if config.mtp is None else ModelFolder.of(config.mtp))
    if source is None:
        raise no_mtp(target.path, target.config.num_layers, declared_modules(target.fields))
    check_source(source, source.folder.checkpoint)
    reason = "asked for"
    if config.mtp is not None and verifier_hash(target.checkpoint) != source.verifier_sha256:
        reason += "; the head was cut from another checkpoint: expect fewer accepted drafts"
    return Drafter("mtp", reason + _reuse(config, source), mtp=source)


def _own_mtp(config: EngineConfig, target: ModelFolder) -> Drafter | str:
    """Drafting with the MTP head that the target's checkpoint holds; why not, where it cannot be."""
    try:
        source = target.mtp_source()
    except SpdError:  # a folder without weights is not refused for its head
        return UNKNOWN
    if source is None:
        missing = declared_modules(target.fields)
        return f"{UNKNOWN}, and its MTP layers are missing" if missing else UNKNOWN
    try:
        check_source(source, target.checkpoint)
    except SpdError as error:
        return f"the MTP head cannot be used: {error.message}"
    return Drafter("mtp", "the checkpoint's own MTP head" + _reuse(config, source), mtp=source)


def _asked_eagle3(config: EngineConfig, target: ModelFolder, draft: ModelFolder) -> Drafter:
    head = draft.config
    if head.eagle3 is None:
        raise IncompatibleError(
            f"{draft}: is a model, not an EAGLE-3 head",
            fix=[f"--spec draft --draft-model {draft}", "--draft-model FOLDER of an EAGLE-3 head"],
            code="no_eagle3",
        )
    if config.method == "draft":
        raise IncompatibleError(
            f"{draft}: is an EAGLE-3 head, not a model",
            fix=[f"--spec eagle3 --draft-model {draft}"],
            code="no_draft",
        )
    check_target(head, draft.path, target.config, target.path)
    holds_embedding = False
    if config.load != "dummy":
        check_eagle3(head, draft.checkpoint)
        holds_embedding = EMBEDDING in draft.checkpoint.tensors
    if draft.tokenizer is not None:
        _require_same_vocabulary(target, draft)
    why = "asked for" if config.draft_model else "the model's own head"
    return Drafter("eagle3", why, draft, head_embedding=holds_embedding)


def check_target(head: ModelConfig, draft: Path, target: ModelConfig, folder: Path) -> None:
    """Raise IncompatibleError where an EAGLE-3 head was made for another target than this one."""
    assert head.eagle3 is not None
    pairs = (
        ("hidden size", head.eagle3.target_hidden_size, target.hidden_size),
        ("vocabulary size", head.vocab_size, target.vocab_size),
    )
    require_equal("EAGLE-3", pairs, draft, folder, "--draft-model", "eagle3_mismatch")
    head.eagle3.aux_layers(target.num_layers)


def _reuse(config: EngineConfig, source: MtpSource) -> str:
    """What is said once where there are more drafts than modules."""
    modules = source.layout.modules
    if (METHODS["mtp"].draft_max if config.draft_max is None else config.draft_max) <= modules:
        return ""
    first = "first" if modules == 1 else f"first {modules}"
    return f"; drafts beyond the {first} use the last module again"


def _require_same_vocabulary(target: ModelFolder, draft: ModelFolder) -> None:
    """The tokenizers agree on every id, or there is none on either side."""
    own, other = (folder.tokenizer and folder.tokenizer.fingerprint() for folder in (target, draft))
    if own != other:
        raise IncompatibleError(
            "the draft model does not share the target's vocabulary",
            reason=[
                f"target {target}",
                f"draft  {draft}",
                "Accepted tokens would be other text than proposed.",
            ],
            fix=["--spec ngram", "--draft-model FOLDER with the same tokenizer.json"],
            code="vocab_mismatch",
        )
