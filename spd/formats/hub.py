"""Resolution of a reference to a model: a path, an embedded demo, or a name in a local store.

Stores are the hub's cache, in the layout of huggingface_hub (`models--org--name/refs`,
`snapshots`), and those of other programs (`stores`). Never uses the network; this is the only
module of the package that reads the environment.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from spd.errors import CheckpointError, NotFoundError, SpdError, UsageError
from spd.formats.demo import DEMOS, demo_folder
from spd.formats.gguf.file_kind import is_gguf
from spd.formats.json_file import Fields, abbreviate, display_text, list_folder, read_text
from spd.formats.names import CONFIG_FILE
from spd.formats.snapshots import current_snapshot, has_safetensors

if TYPE_CHECKING:
    from spd.formats.stores import Store, StoredModel

ADAPTER_FILE = "adapter_config.json"
MAX_REF_BYTES = 1000
"""Size of a file that names the snapshot of a revision, or LM Studio's folder."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Endings of weights in pickle formats, which are refused."""
_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_REPOSITORY = re.compile(rf"(?!.*(?:\.\.|--|(?i:\.gguf)$))(?:{_WORD}/)?{_WORD}")
_TAGGED = re.compile(rf"((?:{_WORD}/)*{_WORD}):({_WORD})")
"""A name, and the tag of a repository's GGUF file or of Ollama's model."""
_OLLAMA_FOLDERS = (
    "~/.ollama/models",
    "/usr/share/ollama/.ollama/models",
    "/var/lib/ollama/models",
    "/var/lib/ollama/.ollama/models",
    "/var/snap/ollama/common/models",
)
"""Ollama's folders of models: started by a person, or as a service of several systems."""
_LM_STUDIO_POINTER = "~/.lmstudio-home-pointer"
"""The file with the path of LM Studio's folder, if it was moved."""
MODEL_FIX = "-m a folder with config.json and safetensors, or a GGUF file"
"""The fix of errors for a path that leads to no model."""
_REVISION = re.compile(rf"{_WORD}(?:/{_WORD})*")
"""A branch, tag or commit."""
_ADDRESS = re.compile(
    r"(?:https?://[^/]+|(?:huggingface|hf)\.co|hf:/)/([^/?#]+/[^/?#:]+)(?:/(?:tree|blob|resolve)/([^/?#]+))?.*"
)
"""The address of a model's page: the repository's name, and the revision if it names one."""


def cache_folder() -> Path:
    """Return the folder of huggingface_hub's cache, which need not exist.

    It is `HF_HUB_CACHE`, else `HF_HOME`/hub, else the library's default.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(os.environ.get("HF_HOME") or default, "hub")
    return Path(os.environ.get("HF_HUB_CACHE") or hub).expanduser()


def spd_cache_folder() -> Path:
    """Return the folder of spd's cache, which need not exist.

    It is never below the working folder, since compiled kernels in it are run.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path("~/.cache").expanduser()) / "spd"


def model_stores() -> list[Store]:
    """Return the places where programs store models on this machine, the hub's cache first.

    Only LM Studio's file with its folder is read; the places need not exist.
    """
    from spd.formats.stores import (  # slow to import, and few models need it
        HUB,
        LLAMA_CPP,
        LM_STUDIO,
        OLLAMA,
        Store,
        iterate_hub_cache,
        iterate_llama_cpp,
        iterate_lm_studio,
        iterate_ollama,
    )

    home = Path("~").expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    caches = home / "Library/Caches" if sys.platform == "darwin" else caches
    llama_cpp = Path(os.environ.get("LLAMA_CACHE") or caches / "llama.cpp").expanduser()
    lm_studio = [home / ".lmstudio/models", home / ".cache/lm-studio/models"]
    with suppress(SpdError):
        moved_folder = read_text(Path(_LM_STUDIO_POINTER).expanduser(), MAX_REF_BYTES).strip()
        lm_studio.insert(0, Path(moved_folder).expanduser() / "models")
    variable = os.environ.get("OLLAMA_MODELS")
    roots = (variable,) if variable else _OLLAMA_FOLDERS
    return [
        Store(HUB, cache_folder(), iterate_hub_cache),
        Store(LLAMA_CPP, llama_cpp, iterate_llama_cpp),
        *(Store(LM_STUDIO, root, iterate_lm_studio) for root in dict.fromkeys(lm_studio)),
        *(Store(OLLAMA, Path(root).expanduser(), iterate_ollama) for root in roots),
    ]


def resolve_model(reference: str) -> Path:
    """Find the folder or GGUF file of a reference on this machine.

    A model at a path wins over a stored one of the same name; of a cached one the revision `main`
    is taken, or the only one. Raises `NotFoundError`, `UsageError` for a text that cannot be a
    model or that fits several, and `CheckpointError` for a path or a stored model that is none.
    """
    if not reference.strip() or "\0" in reference:
        alternatives = f"a folder, a GGUF file, org/name or {' or '.join(DEMOS)}"
        raise UsageError(f"{display_text(reference)}: is not a model: give {alternatives}")
    path = Path(os.path.expanduser(reference))
    if reference in DEMOS:  # also where the working directory has such a folder: that one is ./demo
        return _model_at(demo_folder(reference))
    if os.path.lexists(path):
        return _model_at(path)
    if _REPOSITORY.fullmatch(reference):
        return _model_named(reference)
    if _TAGGED.fullmatch(reference) and (stored := find_stored_model(reference)):
        return stored.path
    if address := _ADDRESS.fullmatch(reference):
        name = address[1] + (
            f" --revision {address[2]}" if address[2] not in (None, "main") else ""
        )
        message = f"{reference}: is an address; a model on the hub is named org/name"
        raise UsageError(message, fix=[f"spd pull {name}", f"-m {name}"])
    if tagged := _TAGGED.fullmatch(reference):
        raise _not_stored_error(reference, tagged[1])
    return _model_at(path)


def is_hub_address(reference: str) -> bool:
    """True if a reference is the web address of a page on the hub."""
    return re.match(r"https?://(www\.)?(huggingface|hf)\.co/", reference) is not None


def _model_at(path: Path) -> Path:
    """Return a path that leads to a model.

    Raises an error with the reason where it leads to none.
    """
    if is_gguf(path):
        return path
    if not os.path.lexists(path) and path.suffix.lower() != ".gguf":
        raise NotFoundError(f"{path}: there is no such folder or file")
    if not (path / CONFIG_FILE).exists() and (wrong := not_a_model_error(path)):
        raise wrong
    return path


def _model_named(name: str) -> Path:
    """Find the model of a repository's name: a folder in the hub's cache, else one of a store.

    Raises NotFoundError without one, and what the searches raise.
    """
    snapshot = current_snapshot(cached_folder(name))
    if snapshot is None or not has_safetensors(snapshot):
        check_repository_name(name)
        if stored := find_stored_model(name):
            return stored.path
    return _require_cached_snapshot(name)


def find_stored_model(reference: str) -> StoredModel | None:
    """Read all stores and return the model of a name, or of a name and a tag; None without one.

    Raises UsageError where the name fits several, CheckpointError where the model cannot be opened.
    """
    answering = [
        model
        for store in model_stores()
        for model in store.read_models()
        if model.is_named_by(reference)
    ]
    lowered = reference.casefold()
    exact = [model for model in answering if model.name.casefold() == lowered]
    models = exact or answering
    names = list(dict.fromkeys(model.name for model in models))
    if len(names) > 1:
        message = f"{reference}: names {len(names)} models on this machine"
        fix = abbreviate([f"-m {name}" for name in names], 20)
        raise UsageError(message, fix=fix, code="choose_file")
    for model in models:
        if not model.fault:
            return model
    if models:
        raise CheckpointError(f"{names[0]}: {models[0].fault}")
    return None


def _not_stored_error(reference: str, name: str) -> NotFoundError:
    """Return the error for a reference with a tag that no store has, with the closest stored name.

    name: the reference without the tag.
    """
    from difflib import get_close_matches

    matches = get_close_matches(reference, [model.name for model in list_models()], n=1)
    message = f"{reference}: no store on this machine has it"
    message += f": did you mean {matches[0]}?" if matches else ""
    pull = [f"spd pull {reference}"] if name.count("/") == 1 else []
    return NotFoundError(message, fix=[*(f"-m {match}" for match in matches), *pull, "spd ls"])


def list_models() -> list[StoredModel]:
    """Read the stores of this machine and return every model, folders in the hub's cache first."""
    from spd.formats.stores import HUB, StoredModel

    stored = [model for store in model_stores() for model in store.read_models()]
    as_gguf = {alias for model in stored if model.store == HUB for alias in model.aliases}
    folders: list[StoredModel] = []
    for name in list_cached_models():
        snapshot = current_snapshot(cached_folder(name))
        if name not in as_gguf or (snapshot is not None and has_safetensors(snapshot)):
            folders.append(StoredModel(name, HUB, snapshot or cached_folder(name), 0))
    return [*folders, *stored]


def not_a_model_error(path: Path) -> SpdError | None:
    """Return the error, with fixes, for a file or folder that is no model; None for no known cause.

    Causes are GGUF files or models inside a folder, a LoRA adapter, pickled weights, another file.
    """
    name_or_path = model_name_of_snapshot(path) or str(path)
    names = list_folder(path) if path.is_dir() else []
    if ggufs := [name for name in names if name.lower().endswith(".gguf")]:
        names_text = ", ".join(abbreviate(ggufs, 3))
        message = f"{name_or_path}: holds GGUF files, one of which is to be named: {names_text}"
        return CheckpointError(message, fix=[f"-m {path / name}" for name in ggufs[:3]])
    if path.suffix.lower() == ".gguf" and not os.path.lexists(path):
        return NotFoundError(f"{path}: there is no such file")
    if not path.is_dir():
        message = f"{path}: is a file, and not a GGUF file, so it is no model"
        in_model = CONFIG_FILE in list_folder(path.parent)
        return CheckpointError(message, fix=[f"-m {path.parent}" if in_model else MODEL_FIX])
    if ADAPTER_FILE in names:
        base = Fields.read(path / ADAPTER_FILE).get("base_model_name_or_path")
        message = f"{name_or_path}: is a LoRA adapter of {display_text(base)}, "
        message += "to be merged into it (PEFT's merge_and_unload)"
        return CheckpointError(message, fix=[f"-m {base} runs it without the adapter"])
    if pickles := [name for name in names if name.lower().endswith(PICKLE_SUFFIXES)]:
        torch_files = [name for name in pickles if name.startswith("pytorch_model")]
        convert = shlex.join([sys.executable, "-I", "-m", "spd.cli.unpickle", str(path)])
        file = (torch_files or pickles)[0]
        message = f"{name_or_path}/{file}: pickle formats are not supported, only safetensors is"
        return CheckpointError(
            message, fix=[convert if torch_files else "a repository with safetensors"]
        )
    inside = sorted(path.glob("*/config.json")) or sorted(path.glob("*/*/config.json"))
    if not inside or CONFIG_FILE in names:
        return None
    fix = [f"-m {model_name_of_snapshot(config.parent) or config.parent}" for config in inside]
    return CheckpointError(
        f"{path}: is no model folder, but holds {len(inside)}", fix=abbreviate(fix, 3)
    )


def incomplete_error(folder: Path, reason: str) -> SpdError:
    """Return the error for a model folder in which something is missing.

    reason: what is missing. The fix for a snapshot in the hub's cache is to continue a download.
    """
    if (name := model_name_of_snapshot(folder)) is None:
        return CheckpointError(f"{folder}: {reason}")
    pull = [f"spd pull {name} --revision {folder.name}"]
    return NotFoundError(f"{name}: the copy in the local cache is incomplete: {reason}", fix=pull)


def is_offline() -> bool:
    """True if the hub must not be used, by huggingface_hub's variable."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def is_repository_name(reference: str) -> bool:
    """True if a reference can only be a model on the hub: org/name or org/name:TAG, no path."""
    name, _ = split_tag(reference)
    return (
        name.count("/") == 1
        and bool(_REPOSITORY.fullmatch(name))
        and not os.path.lexists(reference)
    )


def split_tag(reference: str) -> tuple[str, str | None]:
    """Return a repository's name and the tag of its GGUF file; None without a tag."""
    tagged = _TAGGED.fullmatch(reference)
    return (tagged[1], tagged[2]) if tagged else (reference, None)


def check_repository_name(name: str, revision: str | None = None) -> None:
    """Raise `UsageError` for an invalid name of a model on the hub, or an invalid revision.

    A revision is a branch, tag or commit.
    """
    if _ADDRESS.fullmatch(name):
        resolve_model(name)  # raises the error for an address
    if name.lower().endswith(".gguf"):
        message = f"{name}: is a file; a repository's is named by what follows its name"
        raise UsageError(message, fix=["org/name:Q4_K_M"])
    if name in DEMOS:
        raise UsageError(
            f"{name}: is built in: there is nothing to download or remove", fix=[f"-m {name}"]
        )
    if not _REPOSITORY.fullmatch(name):
        raise UsageError(
            f"{display_text(name)}: is not the name of a model on the hub", fix=["org/name"]
        )
    if revision is not None and not _REVISION.fullmatch(revision):
        raise UsageError(
            f"{name}: revision {display_text(revision)}: is not a branch, tag or commit"
        )


def cached_folder(name: str) -> Path:
    """Return the folder of a model in the hub's cache, which need not exist."""
    return cache_folder() / f"models--{name.replace('/', '--')}"


def model_name_of_snapshot(snapshot: Path) -> str | None:
    """Return the model's name of a snapshot folder in the hub's cache; None for another folder."""
    match = re.search(r"(?:^|/)models--([^/]+)/snapshots/[^/]+$", str(snapshot))
    return match[1].replace("--", "/", 1) if match else None


def list_cached_models() -> list[str]:
    """Return the sorted names of models with a snapshot in the hub's cache.

    Empty without a cache.
    """
    snapshots = cache_folder().glob("models--*/snapshots/*")
    return sorted({name for snapshot in snapshots if (name := model_name_of_snapshot(snapshot))})


def find_assistant(folder: Path) -> Path | None:
    """Find the folder NAME-assistant of a model's drafter; None without one.

    It lies beside the model's own, or is in the hub's cache.
    """
    neighbour = folder.parent / f"{folder.name}-assistant"
    if (neighbour / CONFIG_FILE).is_file():
        return neighbour
    with suppress(SpdError):
        if name := model_name_of_snapshot(folder):
            return _require_cached_snapshot(f"{name}-assistant")
    return None


def _require_cached_snapshot(name: str) -> Path:
    """Find the snapshot of a model's revision `main`, or its only one, in the hub's cache.

    Raises UsageError for an invalid name, NotFoundError or CheckpointError without a snapshot that
    has a config.json; the fixes name the closest stored model.
    """
    check_repository_name(name)
    folder = cached_folder(name)
    snapshots: list[str] = []
    with suppress(OSError):
        snapshots = sorted(os.listdir(folder / "snapshots"))
    if not snapshots:
        from difflib import get_close_matches

        full_names = [*(model.name for model in list_models()), *DEMOS]
        short = {
            full_name.rpartition("/")[2].partition(":")[0].lower(): full_name
            for full_name in full_names
        }
        matches = get_close_matches(name.rpartition("/")[2].lower(), short, n=1, cutoff=0.6)
        closest = short[matches[0]] if matches else None
        full_name = name if "/" in name else f"ORG/{name}"
        message = (
            "it is not in the local cache"
            if full_name == name
            else f"a model on the hub is named {full_name}"
        )
        message += f": did you mean {closest}?" if closest else ""
        fix = [f"-m {closest}" if closest and full_name != name else f"spd pull {full_name}"]
        raise NotFoundError(f"{name}: there is no such folder, and {message}", fix=fix)
    main = folder / "refs" / "main"
    commit = snapshots[0] if len(snapshots) == 1 else None
    with suppress(CheckpointError):
        revision = read_text(main, MAX_REF_BYTES).strip()
        commit = revision if revision in snapshots else commit
    if commit is None:
        reason = [
            f"looked for: {main}",
            *abbreviate([f"in the cache: {commit_name}" for commit_name in snapshots]),
        ]
        fix = [f"spd pull {name}", f"-m {folder / 'snapshots' / snapshots[0]}"]
        raise NotFoundError(
            f"{name}: revision 'main' is not in the local cache", reason=reason, fix=fix
        )
    snapshot = folder / "snapshots" / commit
    if not (snapshot / CONFIG_FILE).is_file():
        raise not_a_model_error(snapshot) or incomplete_error(snapshot, "there is no config.json")
    return snapshot
