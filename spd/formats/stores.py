"""Models that other programs keep on this machine: Ollama, LM Studio, llama.cpp, and the hub's cache.

Everything is only read. What lies there is untrusted: names and sizes are bounded, digests are checked,
and a fault of one model hides no other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from spd.errors import CheckpointError
from spd.formats.gguf.file_sets import SUFFIX, FileSet, file_sets
from spd.formats.json_file import Fields, display_text, read_text
from spd.formats.names import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE

HUB = "Hugging Face"
LLAMA_CPP = "llama.cpp"
LM_STUDIO = "LM Studio"
OLLAMA = "Ollama"
MANIFEST_LIMIT = 1_000_000  # bytes; Ollama's have some thousand
MAX_ENTRIES = 20_000  # names of one store that are looked at
MAX_NAME = 300  # characters
_REGISTRY = "registry.ollama.ai"
_MODEL = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_PULLED = re.compile(r"manifest=([^=]+)=([^=]+)=([^=]+)\.json")
_REMOVED_BY = {
    OLLAMA: "ollama rm {}",
    LM_STUDIO: "remove it in LM Studio, or delete {}",
    LLAMA_CPP: "delete {}",
}


@dataclass(frozen=True)
class StoredModel:
    """One model that lies in a store."""

    name: str
    """What `-m` takes."""
    store: str
    path: Path
    """The file, the first one of splits, or the folder."""
    nbytes: int
    aliases: tuple[str, ...] = ()
    """Further names that mean it."""
    fault: str = ""
    """Why it cannot be opened."""

    def is_named_by(self, reference: str) -> bool:
        """True if a person's words mean this model."""
        lowered = reference.casefold()
        return any(name.casefold() == lowered for name in (self.name, *self.aliases))

    @property
    def removal_command(self) -> str:
        """Return how its store's own program removes it."""
        subject = self.name if self.store == OLLAMA else str(self.path)
        return _REMOVED_BY[self.store].format(subject)


@dataclass(frozen=True)
class Store:
    """A place where a program keeps models, and how it is read."""

    name: str
    root: Path
    iterate: Callable[[Path], Iterator[StoredModel]]

    def models(self) -> list[StoredModel]:
        """Return what it holds, by name; nothing where it cannot be read."""
        models: list[StoredModel] = []
        with suppress(OSError):
            models = [model for model in self.iterate(self.root) if len(model.name) <= MAX_NAME]
        return sorted(models, key=lambda model: model.name)


def iterate_hub_cache(root: Path, store: str = HUB) -> Iterator[StoredModel]:
    """Yield the GGUF models of a cache in the layout of huggingface_hub, of which llama.cpp has one, too."""
    for folder in islice(sorted(root.glob("models--*")), MAX_ENTRIES):
        snapshot = current_snapshot(folder)
        if snapshot is not None:
            name = folder.name.removeprefix("models--").replace("--", "/", 1)
            yield from _of_sets(name, store, snapshot, _sizes(snapshot))


def iterate_lm_studio(root: Path) -> Iterator[StoredModel]:
    """Yield the models of LM Studio: PUBLISHER/NAME, a folder that holds GGUF files or safetensors."""
    for folder in islice(sorted(root.glob("*/*")), MAX_ENTRIES):
        if not folder.is_dir():
            continue
        name = f"{folder.parent.name}/{folder.name}"
        yield from _of_sets(name, LM_STUDIO, folder, _sizes(folder))
        if (folder / CONFIG_FILE).is_file() and has_safetensors(folder):
            total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            yield StoredModel(name, LM_STUDIO, folder, total)


def iterate_llama_cpp(root: Path) -> Iterator[StoredModel]:
    """Yield what llama.cpp downloaded: into one folder, and lately in the layout of the hub's cache."""
    yield from iterate_hub_cache(root, LLAMA_CPP)
    sizes = _sizes(root, depth=1)
    called: dict[str, str] = {}
    for path in islice(sorted(root.glob("manifest=*.json")), MAX_ENTRIES):
        pulled = _PULLED.fullmatch(path.name)
        if pulled is not None and (remote := _pulled_file(path)):
            local = f"{pulled[1]}_{pulled[2]}_{remote}".replace("/", "_")
            called[local] = f"{pulled[1]}/{pulled[2]}"
    for file_set in file_sets(sizes):
        first = file_set.files[0]
        repository = called.get(first)
        name = f"{repository}:{file_set.tag}" if repository else file_set.stem
        aliases = (repository, file_set.stem) if repository else ()
        yield StoredModel(name, LLAMA_CPP, root / first, file_set.nbytes, aliases)


def iterate_ollama(root: Path) -> Iterator[StoredModel]:
    """Yield the models of Ollama: a manifest a tag, which names a blob that is a GGUF file."""
    manifests = root / "manifests"
    for path in islice(sorted(manifests.glob("*/*/*/*")), MAX_ENTRIES):
        parts = path.relative_to(manifests).parts
        if path.is_file():
            yield _ollama_model(root, path, parts)


def current_snapshot(folder: Path) -> Path | None:
    """Return the snapshot of a model's folder in the hub's cache that is used; None without one.

    That of `main`, else the only one.
    """
    main = ""
    with suppress(CheckpointError):
        main = read_text(folder / "refs" / "main", 1000).strip()
    with suppress(OSError):
        snapshots = sorted((folder / "snapshots").iterdir())
        chosen = [snapshot for snapshot in snapshots if snapshot.name == main] or snapshots
        return chosen[0] if len(chosen) == 1 else None
    return None


def has_safetensors(folder: Path) -> bool:
    """True if a folder has weights in the files that a model folder has them in."""
    return (folder / WEIGHTS_FILE).is_file() or (folder / INDEX_FILE).is_file()


def _sizes(folder: Path, depth: int = 2) -> dict[str, int]:
    """Return the bytes of the GGUF files in a folder, by their paths below it."""
    sizes: dict[str, int] = {}
    patterns = ["*", "*/*"][:depth]
    paths = (path for pattern in patterns for path in folder.glob(pattern))
    for path in islice(paths, MAX_ENTRIES):
        if path.name.casefold().endswith(SUFFIX) and path.is_file():
            with suppress(OSError):
                sizes[str(path.relative_to(folder))] = path.stat().st_size
    return sizes


def _of_sets(
    name: str, store: str, folder: Path, sizes: Mapping[str, int]
) -> Iterator[StoredModel]:
    """Yield the models among a repository's files: called NAME:TAG each, or NAME where there is one."""
    for file_set in file_sets(sizes):
        aliases = (f"{name}:{file_set.stem}", *_shorter(name, file_set), name)
        fault = "" if len(file_set.files) == file_set.expected else _incomplete(file_set)
        path = folder / file_set.files[0]
        yield StoredModel(f"{name}:{file_set.tag}", store, path, file_set.nbytes, aliases, fault)


def _shorter(name: str, file_set: FileSet) -> tuple[str, ...]:
    """Return the name of a set without what its maker writes before a quantization."""
    plain = file_set.quantization.removeprefix("UD-")
    return () if plain in ("", file_set.quantization) else (f"{name}:{plain}",)


def _incomplete(file_set: FileSet) -> str:
    return f"{file_set.files[0]}: {len(file_set.files)} of {file_set.expected} files are there"


def _pulled_file(manifest: Path) -> str:
    """Return the file that llama.cpp's note of a download names; empty without one."""
    with suppress(CheckpointError):
        named = Fields.read(manifest, MANIFEST_LIMIT).optional_nested("ggufFile")
        return "" if named is None else named.text("rfilename", "")
    return ""


def _ollama_model(root: Path, manifest: Path, parts: tuple[str, ...]) -> StoredModel:
    """Return the model of a manifest, with its fault where it is none that can be opened."""
    host, owner, name, tag = parts
    full = f"{host}/{owner}/{name}:{tag}"
    called = full.removeprefix(f"{_REGISTRY}/").removeprefix("library/")
    aliases = (full, called.removesuffix(":latest"))
    try:
        path, nbytes = _ollama_blob(root, manifest)
    except CheckpointError as error:
        return StoredModel(called, OLLAMA, manifest, 0, aliases, error.message)
    return StoredModel(called, OLLAMA, path, nbytes, aliases)


def _ollama_blob(root: Path, manifest: Path) -> tuple[Path, int]:
    """Return where the weights of a manifest are, and their bytes. Raises CheckpointError."""
    layers = Fields.read(manifest, MANIFEST_LIMIT).get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise CheckpointError(f"{manifest}: layers: is not a list of objects")
    kinds = [layer.get("mediaType") for layer in layers]
    if _ADAPTER in kinds:
        raise CheckpointError(f"{manifest}: has a LoRA adapter, which is not supported")
    if kinds.count(_MODEL) != 1:
        raise CheckpointError(f"{manifest}: names {kinds.count(_MODEL)} GGUF files, not one")
    stated = layers[kinds.index(_MODEL)].get("digest")
    digest = _DIGEST.fullmatch(stated) if isinstance(stated, str) else None
    if digest is None:
        raise CheckpointError(f"{manifest}: digest: {display_text(stated)} is no SHA-256")
    for separator in "-:":
        path = root / "blobs" / f"sha256{separator}{digest[1]}"
        if path.is_file():
            return path, os.stat(path).st_size
    raise CheckpointError(f"{manifest}: the blob that it names is not there")
