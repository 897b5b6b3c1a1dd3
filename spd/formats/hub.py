"""From what a person types to a model folder: a path, an embedded demo, or `org/name` in the local cache.

Never touches the network. Follows the cache layout of huggingface_hub (`models--org--name/refs`,
`snapshots`); this is the only module of the room that reads the environment.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from spd.errors import CheckpointError, NotFoundError, SpdError, UsageError
from spd.formats.demo import DEMOS, demo_folder
from spd.formats.gguf.file_kind import is_gguf
from spd.formats.json_file import Fields, listed, names_in, read_text, shown
from spd.formats.names import CONFIG_FILE

ADAPTER = "adapter_config.json"
REF_LIMIT = 1000  # bytes of the file that says which snapshot a revision is
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
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


def resolve_model(reference: str) -> Path:
    """The folder that a reference means.

    A folder wins over a cached model of the same name, of which the revision `main` counts, or the only one.
    Raises `NotFoundError`, and `UsageError` for words that cannot be a model.
    """
    if not reference.strip() or "\0" in reference:
        known = f"a folder, org/name or {' or '.join(DEMOS)}"
        raise UsageError(f"{shown(reference)}: is not a model: give {known}")
    if address := _ADDRESS.fullmatch(reference):
        name = address[1] + (
            f" --revision {address[2]}" if address[2] not in (None, "main") else ""
        )
        why = f"{reference}: is an address; a model on the hub is named org/name"
        raise UsageError(why, fix=[f"spd pull {name}", f"-m {name}"])
    path = Path(os.path.expanduser(reference))
    is_demo = reference in DEMOS  # whatever lies in the working directory: ./demo is a folder
    if is_demo or os.path.lexists(path) or not _REPOSITORY.fullmatch(reference):
        folder = demo_folder(reference) if is_demo else path
        if is_gguf(folder):
            return folder
        if not os.path.lexists(folder) and folder.suffix.lower() != ".gguf":
            raise NotFoundError(f"{folder}: there is no such folder")
        if not (folder / CONFIG_FILE).exists() and (wrong := not_a_model(folder)):
            raise wrong
        return folder
    return _cached_snapshot(reference)


def not_a_model(path: Path) -> SpdError | None:
    """What a file, or a folder without weights, is in one line, and what to type instead; None: not known."""
    called = cached_name(path) or str(path)
    names = names_in(path) if path.is_dir() else []
    if ggufs := [name for name in names if name.lower().endswith(".gguf")]:
        why = f"{called}: holds GGUF files, one of which is to be named: {', '.join(listed(ggufs, 3))}"
        return CheckpointError(why, fix=[f"-m {path / name}" for name in ggufs[:3]])
    if path.suffix.lower() == ".gguf" and not os.path.lexists(path):
        return NotFoundError(f"{path}: there is no such file")
    if not path.is_dir():
        why = f"{path}: is a file; a model is the folder that holds config.json and safetensors"
        return CheckpointError(why, fix=[f"-m {path.parent}"])
    if ADAPTER in names:
        base = Fields.of(path / ADAPTER).get("base_model_name_or_path")
        why = f"{called}: is a LoRA adapter of {shown(base)}, to be merged into it (PEFT's merge_and_unload)"
        return CheckpointError(why, fix=[f"-m {base} runs it without the adapter"])
    if pickles := [name for name in names if name.lower().endswith(PICKLE_SUFFIXES)]:
        usual = [name for name in pickles if name.startswith("pytorch_model")]
        convert = shlex.join([sys.executable, "-I", "-m", "spd.cli.unpickle", str(path)])
        why = f"{called}/{(usual or pickles)[0]}: pickle formats are not supported, only safetensors is"
        return CheckpointError(why, fix=[convert if usual else "a repository with safetensors"])
    inside = sorted(path.glob("*/config.json")) or sorted(path.glob("*/*/config.json"))
    if not inside or CONFIG_FILE in names:
        return None
    fix = [f"-m {cached_name(config.parent) or config.parent}" for config in inside]
    return CheckpointError(
        f"{path}: is no model folder, but holds {len(inside)}", fix=listed(fix, 3)
    )


def incomplete(folder: Path, what: str) -> SpdError:
    """The error for files that a folder lacks; a snapshot of the hub's cache is a download to go on with."""
    if (name := cached_name(folder)) is None:
        return CheckpointError(f"{folder}: {what}")
    pull = [f"spd pull {name} --revision {folder.name}"]
    return NotFoundError(f"{name}: the copy in the local cache is incomplete: {what}", fix=pull)


def is_offline() -> bool:
    """Whether the hub must not be asked, as huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def is_repository_name(reference: str) -> bool:
    """Whether a reference can only mean a model on the hub: org/name, and no folder of that name."""
    return (
        "/" in reference
        and bool(_REPOSITORY.fullmatch(reference))
        and not os.path.lexists(reference)
    )


def check_repository_name(name: str, revision: str | None = None) -> None:
    """Raise `UsageError` for an invalid model name on the hub, and an invalid branch, tag or commit."""
    if _ADDRESS.fullmatch(name) or name.lower().endswith(".gguf"):
        resolve_model(name)  # which says what it is
    if name in DEMOS:
        raise UsageError(
            f"{name}: is built in: there is nothing to download or remove", fix=[f"-m {name}"]
        )
    if not _REPOSITORY.fullmatch(name):
        raise UsageError(f"{shown(name)}: is not the name of a model on the hub", fix=["org/name"])
    if revision is not None and not _REVISION.fullmatch(revision):
        raise UsageError(f"{name}: revision {shown(revision)}: is not a branch, tag or commit")


def cached_folder(name: str) -> Path:
    """Where the cache keeps everything of a model."""
    return cache_folder() / f"models--{name.replace('/', '--')}"


def cached_name(snapshot: Path) -> str | None:
    """The model of which a folder is a snapshot in the hub's cache."""
    found = re.search(r"(?:^|/)models--([^/]+)/snapshots/[^/]+$", str(snapshot))
    return found[1].replace("--", "/", 1) if found else None


def list_cached_models() -> list[str]:
    """The names in the local cache that have a snapshot, sorted; empty when there is no cache."""
    snapshots = cache_folder().glob("models--*/snapshots/*")
    return sorted({name for each in snapshots if (name := cached_name(each))})


def assistant_of(folder: Path) -> Path | None:
    """Where the drafter published for a model is: NAME-assistant, beside its folder or in the cache."""
    beside = folder.parent / f"{folder.name}-assistant"
    if (beside / CONFIG_FILE).is_file():
        return beside
    with suppress(SpdError):
        if name := cached_name(folder):
            return _cached_snapshot(f"{name}-assistant")
    return None


def _cached_snapshot(name: str) -> Path:
    check_repository_name(name)
    folder = cached_folder(name)
    snapshots: list[str] = []
    with suppress(OSError):
        snapshots = sorted(os.listdir(folder / "snapshots"))
    if not snapshots:
        short = {
            model.rpartition("/")[2].lower(): model for model in [*list_cached_models(), *DEMOS]
        }
        near = difflib.get_close_matches(name.rpartition("/")[2].lower(), short, n=1, cutoff=0.6)
        close, full = short[near[0]] if near else None, name if "/" in name else f"ORG/{name}"
        why = (
            "it is not in the local cache"
            if full == name
            else f"a model on the hub is named {full}"
        )
        why += f": did you mean {close}?" if close else ""
        fix = [f"-m {close}" if close and full != name else f"spd pull {full}"]
        raise NotFoundError(f"{name}: there is no such folder, and {why}", fix=fix)
    main, commit = folder / "refs" / "main", snapshots[0] if len(snapshots) == 1 else None
    with suppress(CheckpointError):
        said = read_text(main, REF_LIMIT).strip()
        commit = said if said in snapshots else commit
    if commit is None:
        reason = [f"looked for: {main}", *listed([f"there is: {each}" for each in snapshots])]
        fix = [f"spd pull {name}", f"-m {folder / 'snapshots' / snapshots[0]}"]
        raise NotFoundError(
            f"{name}: revision 'main' is not in the local cache", reason=reason, fix=fix
        )
    snapshot = folder / "snapshots" / commit
    if not (snapshot / CONFIG_FILE).is_file():
        raise not_a_model(snapshot) or incomplete(snapshot, "there is no config.json")
    return snapshot
