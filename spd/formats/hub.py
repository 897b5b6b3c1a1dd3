"""From what a person types to a model folder: a path, `demo`, or `org/name` in the local cache.

Never touches the network. Follows the cache layout of huggingface_hub (`models--org--name/refs`,
`snapshots`); this is the only module of the room that reads the environment.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from spd.errors import IncompatibleError, NotFoundError, UsageError
from spd.formats.demo import demo_folder
from spd.formats.json_file import listed, shown

DEMO = "demo"
_REPOSITORY = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


def cache_folder() -> Path:
    """Where huggingface_hub keeps downloads: `HF_HUB_CACHE`, else `HF_HOME`/hub, else its default."""
    if hub_cache := os.environ.get("HF_HUB_CACHE"):
        return Path(hub_cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def own_cache() -> Path:
    """Where spd keeps what it can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spd"


def resolve_model(reference: str, revision: str | None = None) -> Path:
    """The folder that a reference means.

    A folder wins over a cached model of the same name. `revision` picks a branch, tag or commit (or a
    unique beginning of one) of an `org/name`.
    Raises `NotFoundError` saying what was looked for, `UsageError` for words that cannot be a model,
    `IncompatibleError` for a file where a folder is needed.
    """
    if not reference.strip() or "\0" in reference:
        raise UsageError(f"{shown(reference)}: is not a model: give a folder, org/name or {DEMO}")
    path = Path(os.path.expanduser(reference))
    is_demo = reference == DEMO  # whatever lies in the working directory: ./demo is a folder
    could_be_cached = _REPOSITORY.fullmatch(reference) and ".." not in reference and "--" not in reference
    if is_demo or os.path.isdir(path) or not could_be_cached:
        if revision is not None:
            raise UsageError(f"{reference}: a revision belongs to a model named org/name, not to a folder")
        return _embedded_demo() if is_demo else _local_folder(path)
    return _cached_snapshot(reference, revision)


def is_offline() -> bool:
    """Whether the hub must not be asked, as huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def is_repository_name(reference: str) -> bool:
    """Whether a reference can only mean a model on the hub: org/name, and no folder of that name."""
    return (
        "/" in reference
        and _REPOSITORY.fullmatch(reference) is not None
        and ".." not in reference
        and "--" not in reference
        and not os.path.lexists(reference)
    )


def check_repository_name(name: str) -> None:
    """Refuse what is no name of a model on the hub. Raises `UsageError`."""
    if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name:
        raise UsageError(f"{shown(name)}: is not the name of a model on the hub", fix=["org/name"])


def cached_folder(name: str) -> Path:
    """Where the cache keeps everything of a model."""
    return cache_folder() / f"models--{name.replace('/', '--')}"


def list_cached_models() -> list[str]:
    """The names in the local cache that have a snapshot, sorted; empty when there is no cache."""
    cache = cache_folder()
    try:
        with os.scandir(cache) as entries:
            names = [entry.name for entry in entries if entry.name.startswith("models--")]
    except OSError:
        return []
    return sorted(name[8:].replace("--", "/", 1) for name in names if _snapshots(cache / name))


def _embedded_demo() -> Path:
    folder = demo_folder()
    if not (folder / "config.json").is_file():
        raise NotFoundError(f"{DEMO}: this installation of spd lacks its embedded model ({folder})")
    return folder


def _local_folder(path: Path) -> Path:
    if os.path.isdir(path):
        return path
    if os.path.lexists(path):
        if path.suffix == ".gguf":
            raise IncompatibleError(f"{path}: GGUF is not supported: give a Hugging Face folder")
        raise IncompatibleError(f"{path}: is not a folder: give the folder that holds config.json")
    raise NotFoundError(f"{path}: there is no such folder")


def _cached_snapshot(name: str, revision: str | None) -> Path:
    if revision is not None and not _REVISION.fullmatch(revision):
        raise UsageError(f"{name}: revision {shown(revision)}: is not a branch, tag or commit")
    download = f"spd pull {name}" + (f" --revision {revision}" if revision else "")
    folder = cached_folder(name)
    snapshots = _snapshots(folder)
    if not snapshots:
        raise NotFoundError(
            f"{name}: there is no such folder, and it is not in the local cache",
            reason=[f"looked for: {Path(name)}", f"looked for: {folder}", *_similar(name)],
            fix=[download],
        )
    commit = _commit(folder, revision, snapshots)
    if commit is None:
        raise NotFoundError(
            f"{name}: revision {shown(revision or 'main')} is not in the local cache",
            reason=[
                f"looked for: {folder / 'refs' / (revision or 'main')}",
                *listed(_revisions(folder, snapshots)),
            ],
            fix=[download],
        )
    snapshot = folder / "snapshots" / commit
    if not (snapshot / "config.json").is_file():
        raise NotFoundError(
            f"{name}: the copy in the local cache is incomplete: there is no config.json",
            reason=[f"looked for: {snapshot / 'config.json'}"],
            fix=[download],
        )
    return snapshot


def _snapshots(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder / "snapshots"))
    except OSError:
        return []


def _commit(folder: Path, revision: str | None, snapshots: list[str]) -> str | None:
    """The snapshot of a revision; without one that of `main`, or the only one there is."""
    try:
        with open(folder / "refs" / (revision or "main"), encoding="utf-8") as file:
            commit = file.read(200).strip()
        if commit in snapshots:
            return commit
    except (OSError, UnicodeDecodeError):
        pass
    if revision is None:
        return snapshots[0] if len(snapshots) == 1 else None
    matches = [commit for commit in snapshots if commit.startswith(revision)]
    return matches[0] if len(matches) == 1 and (len(revision) >= 7 or matches[0] == revision) else None


def _revisions(folder: Path, snapshots: list[str]) -> list[str]:
    refs = folder / "refs"
    names = [str(path.relative_to(refs)) for path in sorted(refs.rglob("*")) if path.is_file()]
    return [f"there is: {name}" for name in [*names, *snapshots]]


def _similar(name: str) -> list[str]:
    models = list_cached_models()
    short = {model.rpartition("/")[2].lower(): model for model in models}
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), short, n=3, cutoff=0.6)
    return [f"in the cache: {short[match]}" for match in close]
