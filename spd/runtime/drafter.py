"""Who drafts: the method that is asked for, or the best that a target brings along.

`auto` takes a draft model or EAGLE-3 head if one is given, else the checkpoint's own MTP head, else the
demo's draft, else prompt lookup.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from spd.errors import IncompatibleError, SpdError, UsageError
from spd.formats.checkpoint import Checkpoint
from spd.formats.demo import demo_draft_folder, demo_eagle3_folder, demo_folder
from spd.formats.eagle3 import EMBEDDING, is_eagle3
from spd.formats.json_file import Fields, read_json_object
from spd.formats.model_config import FILE_NAME, ModelConfig, read_model_config
from spd.formats.mtp import declared_modules, no_mtp
from spd.formats.mtp_folder import MtpSource, head_source, own_source, verifier_hash
from spd.formats.tokenizer import Tokenizer
from spd.runtime.config import EngineConfig
from spd.runtime.memory import DEFAULT_DRAFT_MAX
from spd.runtime.models.eagle3 import check_eagle3
from spd.runtime.models.mtp_weights import check_source

UNKNOWN = "no draft model is known for this model"


@dataclass(frozen=True)
class Drafter:
    """The speculation that will be done, and why."""

    method: str
    reason: str
    folder: Path | None = None
    mtp: MtpSource | None = None
    head_embedding: bool = False
    """Whether an EAGLE-3 head holds embeddings, perhaps the target's."""

    @property
    def head(self) -> tuple[MtpSource | None, bool]:
        """What the memory of a head follows from."""
        return self.mtp, self.head_embedding

    def source(self, draft: ModelConfig | None) -> tuple[ModelConfig, Path] | None:
        """Whose weights draft and where they are: the head's, or the draft model's (given)."""
        if self.mtp is not None:
            return self.mtp.config, self.mtp.folder
        return None if draft is None or self.folder is None else (draft, self.folder)


def choose_drafter(config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint | None = None) -> Drafter:
    """The speculation that a wish comes to. Raises the error of whatever cannot be honoured.

    checkpoint: the model's own where it is open already, so that its headers are not read again.
    """
    draft, why = config.draft_model, UNKNOWN
    refuse_head(model, config.model)
    if config.method == "mtp" or config.mtp is not None:
        return _asked_mtp(config, model, checkpoint)
    if config.method == "auto" and draft is None:
        found = _own_mtp(config, model, checkpoint)
        if isinstance(found, Drafter):
            return found
        why = found
    if config.method == "eagle3" and draft is None and config.model == demo_folder():
        draft = demo_eagle3_folder() if demo_eagle3_folder().exists() else None
    if config.method == "eagle3" and draft is None:
        raise UsageError("--spec eagle3 needs a head", fix=["--draft-model FOLDER of an EAGLE-3 head"])
    if draft is None and config.method in ("auto", "draft") and config.model == demo_folder():
        draft = demo_draft_folder() if demo_draft_folder().exists() else None
    if config.method in ("off", "ngram"):
        return Drafter(config.method, "asked for")
    if config.method == "draft" and draft is None:
        raise UsageError("--spec draft needs a draft model", fix=["--draft-model FOLDER", "--spec ngram"])
    if draft is not None and (config.method == "eagle3" or _is_eagle3(draft)):
        return _asked_eagle3(config, model, draft)
    if draft is not None:
        _require_same_vocabulary(config.model, draft)
        return Drafter("draft", "asked for" if config.draft_model else "the model's own draft", draft)
    return Drafter("ngram", why)


def refuse_head(model: ModelConfig, folder: Path) -> None:
    """Raise IncompatibleError for an EAGLE-3 head where a model is wanted."""
    if model.eagle3 is not None:
        raise IncompatibleError(
            f"{folder}: an EAGLE-3 head drafts for another model and writes no text by itself",
            fix=[f"-m TARGET --draft-model {folder}"],
            code="not_a_model",
        )


def _opened(folder: Path, checkpoint: Checkpoint | None) -> AbstractContextManager[Checkpoint]:
    """A checkpoint for a while: the one given, which stays open, or one that is opened for it."""
    return Checkpoint.open(folder) if checkpoint is None else nullcontext(checkpoint)


def _asked_mtp(config: EngineConfig, model: ModelConfig, target: Checkpoint | None) -> Drafter:
    with _opened(config.model, target) as own:
        if config.mtp is None:
            source = own_source(own, model)
            if source is None:
                raise no_mtp(config.model, model.num_layers, declared_modules(config.model))
            check_source(source, own)
            return Drafter("mtp", "asked for" + _reuse(config, source), mtp=source)
        source = head_source(config.mtp, model, config.model)
        with Checkpoint.open(source.folder) as head:
            check_source(source, head)
        reason = "asked for"
        if verifier_hash(own) != source.verifier_sha256:
            reason += "; the head was cut from another checkpoint: expect fewer accepted drafts"
    return Drafter("mtp", reason + _reuse(config, source), mtp=source)


def _own_mtp(config: EngineConfig, model: ModelConfig, target: Checkpoint | None) -> Drafter | str:
    """Drafting with the MTP head that the target's checkpoint holds; why not, where it cannot be."""
    try:
        opened = _opened(config.model, target)
    except SpdError:  # nothing is said of weights that nobody may want to read
        return UNKNOWN
    with opened as checkpoint:
        source = own_source(checkpoint, model)
        if source is None:
            declared = declared_modules(config.model)
            return f"{UNKNOWN}, and its MTP layers are missing" if declared else UNKNOWN
        try:
            check_source(source, checkpoint)
        except SpdError as error:
            return f"the MTP head cannot be used: {error.message}"
    return Drafter("mtp", "the checkpoint's own MTP head" + _reuse(config, source), mtp=source)


def _is_eagle3(draft: Path) -> bool:
    """Whether a folder says that it holds an EAGLE-3 head; what is wrong with it is said where it is read."""
    path = draft / FILE_NAME
    return path.is_file() and is_eagle3(Fields(str(path), read_json_object(path)))


def _asked_eagle3(config: EngineConfig, model: ModelConfig, draft: Path) -> Drafter:
    head = read_model_config(draft)
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
    check_target(head, draft, model, config.model)
    holds_embedding = False
    if config.load != "dummy":
        with Checkpoint.open(draft) as checkpoint:
            check_eagle3(head, checkpoint)
            holds_embedding = EMBEDDING in checkpoint.tensors
    if (draft / "tokenizer.json").exists():
        _require_same_vocabulary(config.model, draft)
    why = "asked for" if config.draft_model else "the model's own head"
    return Drafter("eagle3", why, draft, head_embedding=holds_embedding)


def check_target(head: ModelConfig, draft: Path, target: ModelConfig, folder: Path) -> None:
    """Raise IncompatibleError where an EAGLE-3 head was made for another target than this one."""
    assert head.eagle3 is not None
    pairs = (
        ("hidden size", head.eagle3.target_hidden_size, target.hidden_size),
        ("vocabulary size", head.vocab_size, target.vocab_size),
    )
    differing = [f"{words}: head {theirs:,}, target {own:,}" for words, theirs, own in pairs if theirs != own]
    if differing:
        raise IncompatibleError(
            f"{draft}: this EAGLE-3 head was made for another model than {folder}",
            reason=differing,
            fix=["--draft-model HEAD made for this model", "--spec ngram"],
            code="eagle3_mismatch",
        )
    head.eagle3.aux_layers(target.num_layers)


def _reuse(config: EngineConfig, source: MtpSource) -> str:
    """What is said once where there are more drafts than modules."""
    modules = source.layout.modules
    if (DEFAULT_DRAFT_MAX["mtp"] if config.draft_max is None else config.draft_max) <= modules:
        return ""
    first = "first" if modules == 1 else f"first {modules}"
    return f"; drafts beyond the {first} use the last module again"


def same_vocabulary(target: Path, draft: Path) -> bool:
    """Whether two folders' tokenizers agree on every id; True where neither has a tokenizer."""
    files = [folder / "tokenizer.json" for folder in (target, draft)]
    if not any(file.exists() for file in files):
        return True
    if not all(file.exists() for file in files):
        return False
    return Tokenizer.open(target).fingerprint() == Tokenizer.open(draft).fingerprint()


def _require_same_vocabulary(target: Path, draft: Path) -> None:
    if not same_vocabulary(target, draft):
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
