"""From what a person types to a model folder: a path, an embedded demo, or `org/name` in the local cache.

Never touches the network. Follows the cache layout of huggingface_hub (`models--org--name/refs`,
`snapshots`); this is the only module of the room that reads the environment.
"""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from pathlib import Path

from spd.errors import NotFoundError, SpdError, UsageError
from spd.formats.demo import DEMOS, demo_folder
from spd.formats.json_file import listed, shown

_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_REPOSITORY = re.compile(rf"(?!.*(?:\.\.|--|(?i:\.gguf)$))(?:{_WORD}/)?{_WORD}")
_REVISION = re.compile(rf"{_WORD}(?:/{_WORD})*")
_ADDRESS = re.compile(
    r"(?:https?://[^/]+|(?:huggingface|hf)\.co|hf:/)/([^/?#]+/[^/?#:]+)(?:/(?:tree|blob|resolve)/([^/?#]+))?.*"
)


def cache_folder() -> Path:
    """Where huggingface_hub keeps downloads: `HF_HUB_CACHE`, else `HF_HOME`/hub, else its default."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(os.environ.get("HF_HOME") or usual, "hub")
    return Path(os.environ.get("HF_HUB_CACHE") or hub).expanduser()


def own_cache() -> Path:
    """Where spd keeps what it can make again: never below the working folder, as kernels kept there run."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path("~/.cache").expanduser()) / "spd"


def resolve_model(reference: str, revision: str | None = None) -> Path:
    """The folder that a reference means.

    A folder wins over a cached model of the same name. `revision` picks a branch, tag or commit (or a
    unique beginning of one) of an `org/name`.
    Raises `NotFoundError` saying what was looked for, `UsageError` for words that cannot be a model,
    `CheckpointError` for what is something else.
    """
    if not reference.strip() or "\0" in reference:
        raise UsageError(
            f"{shown(reference)}: is not a model: give a folder, org/name or {' or '.join(DEMOS)}"
        )
    if address := _ADDRESS.fullmatch(reference):
        name = address[1] + (f" --revision {address[2]}" if address[2] not in (None, "main") else "")
        why = f"{reference}: is an address; a model on the hub is named org/name"
        raise UsageError(why, fix=[f"spd pull {name}", f"-m {name}"])
    path = Path(os.path.expanduser(reference))
    is_demo = reference in DEMOS  # whatever lies in the working directory: ./demo is a folder
    if is_demo or os.path.lexists(path) or not _REPOSITORY.fullmatch(reference):
        if revision is not None:
            raise UsageError(f"{reference}: a revision belongs to a model named org/name, not to a folder")
        folder = demo_folder(reference) if is_demo else path
        if not os.path.lexists(folder) and folder.suffix.lower() != ".gguf":
            raise NotFoundError(f"{folder}: there is no such folder")
        if not (folder / "config.json").exists():
            from spd.formats.checkpoint import not_a_model

            if wrong := not_a_model(folder):
                raise wrong
        return folder
    return _cached_snapshot(reference, revision)


def is_offline() -> bool:
    """Whether the hub must not be asked, as huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def is_repository_name(reference: str) -> bool:
    """Whether a reference can only mean a model on the hub: org/name, and no folder of that name."""
    return "/" in reference and bool(_REPOSITORY.fullmatch(reference)) and not os.path.lexists(reference)


def check_repository_name(name: str, revision: str | None = None) -> None:
    """Refuse an invalid model name on the hub, and an invalid branch, tag or commit.

    Raises `UsageError` and `CheckpointError`.
    """
    if _ADDRESS.fullmatch(name) or name.lower().endswith(".gguf"):
        resolve_model(name)  # which says what it is
    if name in DEMOS:
        raise UsageError(f"{name}: is built in: there is nothing to download or remove", fix=[f"-m {name}"])
    if not _REPOSITORY.fullmatch(name):
        raise UsageError(f"{shown(name)}: is not the name of a model on the hub", fix=["org/name"])
    if revision is not None and not _REVISION.fullmatch(revision):
        raise UsageError(f"{name}: revision {shown(revision)}: is not a branch, tag or commit")


def cached_folder(name: str) -> Path:
    """Where the cache keeps everything of a model."""
    return cache_folder() / f"models--{name.replace('/', '--')}"


def list_cached_models() -> list[str]:
    """The names in the local cache that have a snapshot, sorted; empty when there is no cache."""
    cache = cache_folder()
    names = [name for name in _names(cache) if name.startswith("models--")]
    kept = [name for name in names if _names(cache / name / "snapshots")]
    return sorted(name[8:].replace("--", "/", 1) for name in kept)


def assistant_of(folder: Path) -> Path | None:
    """Where the drafter published for a model is: NAME-assistant, beside its folder or in the cache."""
    beside = folder.parent / f"{folder.name}-assistant"
    if (beside / "config.json").is_file():
        return beside
    kept = folder.parent.parent.name  # of models--ORG--NAME/snapshots/COMMIT
    with suppress(SpdError):
        if kept.startswith("models--"):
            return _cached_snapshot(f"{kept[8:].replace('--', '/', 1)}-assistant", None)
    return None


def _cached_snapshot(name: str, revision: str | None) -> Path:
    check_repository_name(name, revision)
    more = f" --revision {revision}" if revision else ""
    folder = cached_folder(name)
    snapshots = _names(folder / "snapshots")
    if not snapshots:
        short = {model.rpartition("/")[2].lower(): model for model in [*list_cached_models(), *DEMOS]}
        near = difflib.get_close_matches(name.rpartition("/")[2].lower(), short, n=1, cutoff=0.6)
        close, full = short[near[0]] if near else None, name if "/" in name else f"ORG/{name}"
        why = "it is not in the local cache" if full == name else f"a model on the hub is named {full}"
        raise NotFoundError(
            f"{name}: there is no such folder, and {why}" + (f": did you mean {close}?" if close else ""),
            fix=[f"-m {close}" if close and full != name else f"spd pull {full}{more}"],
        )
    commit = _commit(folder, revision, snapshots)
    if commit is None:
        refs = folder / "refs"
        names = [str(path.relative_to(refs)) for path in sorted(refs.rglob("*")) if path.is_file()]
        there = listed([f"there is: {name}" for name in [*names, *snapshots]])
        raise NotFoundError(
            f"{name}: revision {shown(revision or 'main')} is not in the local cache",
            reason=[f"looked for: {refs / (revision or 'main')}", *there],
            fix=[f"spd pull {name}{more}"],
        )
    snapshot = folder / "snapshots" / commit
    if not (snapshot / "config.json").is_file():
        from spd.formats.checkpoint import incomplete, not_a_model

        raise not_a_model(snapshot) or incomplete(snapshot, "there is no config.json")
    return snapshot


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _commit(folder: Path, revision: str | None, snapshots: list[str]) -> str | None:
    """The snapshot of a revision; without one that of `main`, or the only one there is."""
    with suppress(OSError):
        commit = (folder / "refs" / (revision or "main")).read_text("utf-8", "replace").strip()
        if commit in snapshots:
            return commit
    if revision is None:
        return snapshots[0] if len(snapshots) == 1 else None
    matches = [commit for commit in snapshots if commit.startswith(revision)]
    return matches[0] if len(matches) == 1 and (len(revision) >= 7 or matches[0] == revision) else None
