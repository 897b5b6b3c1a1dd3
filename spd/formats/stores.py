"""Models of other programs on this machine: Ollama, LM Studio, llama.cpp, the hub's cache.

Stores are only read. Their content is untrusted: names and sizes are bounded, digests are checked,
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
from spd.formats.gguf.file_sets import GGUF_SUFFIX, FileSet, file_sets
from spd.formats.json_file import Fields, display_text
from spd.formats.names import CONFIG_FILE
from spd.formats.snapshots import current_snapshot, has_safetensors

HUB = "Hugging Face"
LLAMA_CPP = "llama.cpp"
LM_STUDIO = "LM Studio"
OLLAMA = "Ollama"
"""Programs with stores, by their names for people."""
MAX_MANIFEST_BYTES = 1_000_000
"""Size of the file that names a stored model's files; Ollama's have some thousand bytes."""
MAX_STORE_ENTRIES = 20_000
"""Names in the folders of one store that are read."""
MAX_NAME_CHARACTERS = 300
"""Models with longer names are left out."""
_REGISTRY = "registry.ollama.ai"
"""Ollama's own host, which the names of its models leave out."""
_MODEL_MEDIA_TYPE = "application/vnd.ollama.image.model"
_ADAPTER_MEDIA_TYPE = "application/vnd.ollama.image.adapter"
"""Types of layers in a manifest: a GGUF file with a model, and one with a LoRA adapter."""
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
"""A layer's hash in a manifest, and the name of its file."""
_LLAMA_CPP_MANIFEST = re.compile(r"manifest=([^=]+)=([^=]+)=([^=]+)\.json")
"""The name of a manifest of llama.cpp: the organisation, the repository and the tag."""
_REMOVAL_COMMANDS = {
    OLLAMA: "ollama rm {}",
    LM_STUDIO: "remove it in LM Studio, or delete {}",
    LLAMA_CPP: "delete {}",
}
"""Fixes that remove a model, by store, with its name or path at {}."""


@dataclass(frozen=True)
class StoredModel:
    """One model that lies in a store."""

    name: str
    """The model's name for `-m`."""
    store: str
    path: Path
    """The file, the first one of a split model, or the folder."""
    nbytes: int
    aliases: tuple[str, ...] = ()
    """Further names of the model."""
    fault: str = ""
    """The reason why it cannot be opened; empty without one."""

    def is_named_by(self, reference: str) -> bool:
        """True if a reference is one of this model's names, in any case of letters."""
        lowered = reference.casefold()
        return any(name.casefold() == lowered for name in (self.name, *self.aliases))

    @property
    def removal_command(self) -> str:
        """The command or step that removes it from its store."""
        subject = self.name if self.store == OLLAMA else str(self.path)
        return _REMOVAL_COMMANDS[self.store].format(subject)


@dataclass(frozen=True)
class Store:
    """A folder where a program stores models, and the function that reads it."""

    name: str
    root: Path
    iterate: Callable[[Path], Iterator[StoredModel]]
    """Yields the models in a folder. Raises OSError where it cannot be read."""

    def read_models(self) -> list[StoredModel]:
        """Read the store and return its models, sorted by name; none where it cannot be read."""
        models: list[StoredModel] = []
        with suppress(OSError):
            models = [
                model for model in self.iterate(self.root) if len(model.name) <= MAX_NAME_CHARACTERS
            ]
        return sorted(models, key=lambda model: model.name)


def iterate_hub_cache(root: Path, store: str = HUB) -> Iterator[StoredModel]:
    """Yield the GGUF models of a cache in huggingface_hub's layout, which llama.cpp uses too."""
    for folder in islice(sorted(root.glob("models--*")), MAX_STORE_ENTRIES):
        snapshot = current_snapshot(folder)
        if snapshot is not None:
            name = folder.name.removeprefix("models--").replace("--", "/", 1)
            yield from _iterate_sets(name, store, snapshot, _gguf_file_sizes(snapshot))


def iterate_lm_studio(root: Path) -> Iterator[StoredModel]:
    """Yield the models of LM Studio: folders PUBLISHER/NAME of GGUF files or safetensors."""
    for folder in islice(sorted(root.glob("*/*")), MAX_STORE_ENTRIES):
        if not folder.is_dir():
            continue
        name = f"{folder.parent.name}/{folder.name}"
        yield from _iterate_sets(name, LM_STUDIO, folder, _gguf_file_sizes(folder))
        if (folder / CONFIG_FILE).is_file() and has_safetensors(folder):
            total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            yield StoredModel(name, LM_STUDIO, folder, total)


def iterate_llama_cpp(root: Path) -> Iterator[StoredModel]:
    """Yield llama.cpp's downloads: in one folder, or, newer ones, in the hub's layout."""
    yield from iterate_hub_cache(root, LLAMA_CPP)
    sizes = _gguf_file_sizes(root, depth=1)
    repositories: dict[str, str] = {}
    for path in islice(sorted(root.glob("manifest=*.json")), MAX_STORE_ENTRIES):
        match = _LLAMA_CPP_MANIFEST.fullmatch(path.name)
        if match is not None and (remote := _read_pulled_file(path)):
            local = f"{match[1]}_{match[2]}_{remote}".replace("/", "_")
            repositories[local] = f"{match[1]}/{match[2]}"
    for file_set in file_sets(sizes):
        first = file_set.files[0]
        repository = repositories.get(first)
        name = f"{repository}:{file_set.tag}" if repository else file_set.stem
        aliases = (repository, file_set.stem) if repository else ()
        yield StoredModel(
            name=name,
            store=LLAMA_CPP,
            path=root / first,
            nbytes=file_set.nbytes,
            aliases=aliases,
            fault=_find_fault(file_set),
        )


def iterate_ollama(root: Path) -> Iterator[StoredModel]:
    """Yield the models of Ollama: a tag's manifest names a blob, which is a GGUF file."""
    manifests = root / "manifests"
    for path in islice(sorted(manifests.glob("*/*/*/*")), MAX_STORE_ENTRIES):
        parts = path.relative_to(manifests).parts
        if path.is_file():
            yield _read_ollama_model(root, path, parts)


def _gguf_file_sizes(folder: Path, depth: int = 2) -> dict[str, int]:
    """Return the bytes of the GGUF files in a folder, by their paths below it.

    depth: 1 looks into the folder alone, 2 into those in it too.
    """
    sizes: dict[str, int] = {}
    patterns = ["*", "*/*"][:depth]
    paths = (path for pattern in patterns for path in folder.glob(pattern))
    for path in islice(paths, MAX_STORE_ENTRIES):
        if path.name.casefold().endswith(GGUF_SUFFIX) and path.is_file():
            with suppress(OSError):
                sizes[str(path.relative_to(folder))] = path.stat().st_size
    return sizes


def _iterate_sets(
    name: str, store: str, folder: Path, sizes: Mapping[str, int]
) -> Iterator[StoredModel]:
    """Yield a repository's models, the largest file set first, by NAME:TAG with NAME as an alias.

    Companions of models, such as MTP sidecars and importance matrices, are no models. A set that
    lacks files has a `fault`.
    """
    for file_set in file_sets(sizes):
        aliases = (f"{name}:{file_set.stem}", *_shorter_aliases(name, file_set), name)
        path = folder / file_set.files[0]
        yield StoredModel(
            name=f"{name}:{file_set.tag}",
            store=store,
            path=path,
            nbytes=file_set.nbytes,
            aliases=aliases,
            fault=_find_fault(file_set),
        )


def _shorter_aliases(name: str, file_set: FileSet) -> tuple[str, ...]:
    """Return the name of a set without its maker's prefix of the quantization.

    Empty without a prefix.
    """
    short_tag = file_set.quantization.removeprefix("UD-")
    return () if short_tag in ("", file_set.quantization) else (f"{name}:{short_tag}",)


def _find_fault(file_set: FileSet) -> str:
    """Return the fault of a set of which files are missing; empty without one."""
    if len(file_set.files) == file_set.expected:
        return ""
    return f"{file_set.files[0]}: {len(file_set.files)} of {file_set.expected} files are there"


def _read_pulled_file(manifest: Path) -> str:
    """Return the name of the file that llama.cpp's manifest of a download holds.

    Empty without one.
    """
    with suppress(CheckpointError):
        file = Fields.read(manifest, MAX_MANIFEST_BYTES).optional_nested("ggufFile")
        return "" if file is None else file.text("rfilename", "")
    return ""


def _read_ollama_model(root: Path, manifest: Path, parts: tuple[str, ...]) -> StoredModel:
    """Return the model of a manifest, with its fault where it cannot be opened."""
    host, owner, name, tag = parts
    full_name = f"{host}/{owner}/{name}:{tag}"
    short_name = full_name.removeprefix(f"{_REGISTRY}/").removeprefix("library/")
    aliases = (full_name, short_name.removesuffix(":latest"))
    try:
        path, nbytes = _find_ollama_blob(root, manifest)
    except CheckpointError as error:
        return StoredModel(
            name=short_name,
            store=OLLAMA,
            path=manifest,
            nbytes=0,
            aliases=aliases,
            fault=error.message,
        )
    return StoredModel(name=short_name, store=OLLAMA, path=path, nbytes=nbytes, aliases=aliases)


def _find_ollama_blob(root: Path, manifest: Path) -> tuple[Path, int]:
    """Return the path and the bytes of a manifest's weights. Raises CheckpointError."""
    layers = Fields.read(manifest, MAX_MANIFEST_BYTES).get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise CheckpointError(f"{manifest}: layers: is not a list of objects")
    media_types = [layer.get("mediaType") for layer in layers]
    if _ADAPTER_MEDIA_TYPE in media_types:
        raise CheckpointError(f"{manifest}: has a LoRA adapter, which is not supported")
    if media_types.count(_MODEL_MEDIA_TYPE) != 1:
        raise CheckpointError(
            f"{manifest}: names {media_types.count(_MODEL_MEDIA_TYPE)} GGUF files, not one"
        )
    stored_digest = layers[media_types.index(_MODEL_MEDIA_TYPE)].get("digest")
    digest = _DIGEST.fullmatch(stored_digest) if isinstance(stored_digest, str) else None
    if digest is None:
        raise CheckpointError(f"{manifest}: digest: {display_text(stored_digest)} is no SHA-256")
    for separator in "-:":
        path = root / "blobs" / f"sha256{separator}{digest[1]}"
        if path.is_file():
            return path, os.stat(path).st_size
    raise CheckpointError(f"{manifest}: the blob that it names is not there")
