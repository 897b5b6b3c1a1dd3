"""Downloads from the Hugging Face hub into its own cache: the files that `spd` reads, each with its hash.

The only module that imports huggingface_hub. A finished file is kept whatever happens to the next one.
"""

from __future__ import annotations

import errno
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token, hf_hub_download, set_client_factory
from huggingface_hub import errors as hub_errors
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils._verification import compute_file_hash
from tqdm.std import tqdm

from spd import errors
from spd.errors import IncompatibleError, NetworkError, NotFoundError, ResourceError
from spd.formats.checkpoint import read_weight_map
from spd.formats.files import write_atomically
from spd.formats.gguf.file_sets import FileSet, choose_one, file_sets, find_drafter
from spd.formats.hub import cache_folder, cached_folder, check_repository_name
from spd.formats.json_file import display_text, one_line
from spd.formats.names import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
)
from spd.formats.quantized import FILES as QUANTIZATION_FILES

SMALL_FILES = {
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    INDEX_FILE,
}
SMALL_FILES |= {
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/default.jinja",
    "additional_chat_templates/tool_use.jinja",
}
SMALL_FILES |= {*QUANTIZATION_FILES}
SPARE_SHARE = 1.05  # free space wanted, as a share of what is to come
_MAKE_ROOM = "spd rm NAME for a model that is not needed"
_GGUF_NAME = re.compile(r"(?:\w[\w.+ -]*/)?\w[\w.+ -]*\.gguf", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r'(W/)?"?[A-Za-z0-9_-][A-Za-z0-9_=+.-]{0,199}"?')


@dataclass(frozen=True)
class RemoteModel:
    """What would be downloaded of one revision of a repository."""

    name: str
    revision: str | None
    commit: str
    files: tuple[RepoSibling, ...]
    missing_bytes: int  # of the files that are not in the cache yet
    gguf: FileSet | None = None  # what was chosen of a repository of GGUF files


def look_up_model(
    name: str, revision: str | None = None, tag: str | None = None, free: int = 0
) -> RemoteModel:
    """Look up what the hub has of a model, and what is to come; fetches the index of the shards at most.

    tag: which of its GGUF files; where it has several, and no safetensors, one has to be chosen. free: bytes
    of memory, by which is said what fits. Raises UsageError for what is no name or no choice, NotFoundError,
    NetworkError, IncompatibleError without a model that can be read.
    """
    check_repository_name(name, revision)
    with _in_words(name):
        info = HfApi(endpoint=constants.ENDPOINT).model_info(
            name, revision=revision, files_metadata=True
        )
        commit = str(info.sha)
        every = {file.rfilename: file for file in info.siblings or ()}
        if not _COMMIT.fullmatch(commit):
            raise ValueError("it names no commit")
        chosen = _chosen(name, tag, every, free)
        if chosen is not None:
            wanted = [every[file] for file in _with_drafter(chosen, every)]
        elif CONFIG_FILE not in every:
            raise IncompatibleError(
                f"{name}: the repository has no config.json, so it is no model folder"
            )
        else:
            wanted = [file for file in every.values() if file.rfilename in SMALL_FILES]
            wanted += _weights(name, commit, every)
        there = cached_folder(name) / "snapshots" / commit
        missing = sum(
            int(file.size or 0) for file in wanted if not (there / file.rfilename).is_file()
        )
        return RemoteModel(name, revision, commit, tuple(wanted), missing, chosen)


def _chosen(
    name: str, tag: str | None, offered: Mapping[str, RepoSibling], free: int
) -> FileSet | None:
    """Return the GGUF files that are meant of a repository; None where its safetensors are."""
    if tag is None and (WEIGHTS_FILE in offered or INDEX_FILE in offered):
        return None
    sets = file_sets(_gguf_sizes(offered))
    if not sets and tag is None:
        return None
    chosen = choose_one(sets, name, tag, free)
    if len(chosen.files) != chosen.expected:
        files = f"{len(chosen.files)} of the {chosen.expected} files of {chosen.tag}"
        raise IncompatibleError(f"{name}: the repository has {files}")
    return chosen


def _gguf_sizes(offered: Mapping[str, RepoSibling]) -> dict[str, int]:
    """Return the bytes of a repository's GGUF files by name, without names that could lead elsewhere."""
    return {
        name: int(file.size or 0) for name, file in offered.items() if _GGUF_NAME.fullmatch(name)
    }


def _with_drafter(chosen: FileSet, offered: Mapping[str, RepoSibling]) -> list[str]:
    """Return the files of a model, and of its MTP layers where they are beside it."""
    drafter = find_drafter(_gguf_sizes(offered), chosen)
    return [*chosen.files, *(drafter.files if drafter else ())]


def download(model: RemoteModel, report: Callable[[int], None]) -> Path:
    """Fetch what is missing and check it; returns the snapshot folder, which the branch or tag then means.

    `report` hears of bytes as they come. Raises NetworkError, and ResourceError when the disk is full.
    """
    cache = cache_folder()
    there = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < model.missing_bytes * SPARE_SHARE:
        why = f"{model.missing_bytes:,} bytes to come, {free:,} free in {cache}"
        fix = [_MAKE_ROOM, "HF_HOME=/another/disk spd pull …"]
        raise ResourceError(f"not enough disk space for {model.name}: {why}", fix=fix)
    with _in_words(model.name):
        for file in model.files:
            _fetch(model.name, model.commit, file, report)
        ref = cached_folder(model.name) / "refs" / (model.revision or "main")
        if ref.name != model.commit:  # as huggingface_hub does; files were fetched by commit
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, model.commit)
    return cached_folder(model.name) / "snapshots" / model.commit


def _fetch(name: str, commit: str, file: RepoSibling, report: Callable[[int], None]) -> Path:
    """Where a file lies in the cache; what was not there is downloaded and checked."""
    path = cached_folder(name) / "snapshots" / commit / file.rfilename
    if not path.is_file():
        at = cache_folder()
        meter = _meter(report)
        hub = constants.ENDPOINT
        hf_hub_download(
            name, file.rfilename, revision=commit, cache_dir=at, endpoint=hub, tqdm_class=meter
        )
        _check_hash(name, file, path)
    return path


def _weights(name: str, commit: str, every: Mapping[str, RepoSibling]) -> list[RepoSibling]:
    """The weights that loading would read: the single file, else the shards that the index names."""
    if WEIGHTS_FILE in every:
        return [every[WEIGHTS_FILE]]
    if INDEX_FILE in every:
        index = _fetch(name, commit, every[INDEX_FILE], lambda _: None)
        shards = sorted(set(read_weight_map(index).values()))
        if absent := [shard for shard in shards if shard not in every]:
            why = f"{INDEX_FILE} names {display_text(absent[0])}, which the hub does not have"
            raise errors.CheckpointError(f"{name}: {why}")
        return [every[shard] for shard in shards]
    found = sorted(
        {Path(file).suffix for file in every} & {".bin", ".pt", ".pth", ".gguf", ".safetensors"}
    )
    why = f"{name} has no {WEIGHTS_FILE} and no {INDEX_FILE}"
    why += f", but {', '.join(found)} files, which spd does not read" if found else ""
    raise IncompatibleError(why, fix=["a repository with safetensors weights"])


def _check_hash(name: str, file: RepoSibling, path: Path) -> None:
    """Compare a new file with the listing; what differs is removed from the cache, so that it is not read."""
    wanted = file.lfs.sha256 if file.lfs else file.blob_id  # a small file's hash is git's
    found = compute_file_hash(path, "sha256" if file.lfs else "git-sha1")
    if wanted in (None, found):
        return
    blob = path.resolve()
    path.unlink()
    if blob.parent.name == "blobs":  # wherever else it lies, it is not the cache's
        blob.unlink()
    why = f"{name}: {file.rfilename} is not the file that the hub lists; it was removed"
    hashes = [f"hash wanted {wanted}", f"hash found  {found}"]
    raise NetworkError(why, reason=hashes, fix=[f"spd pull {name}"])


def _meter(report: Callable[[int], None]) -> Any:
    class Meter(tqdm):  # type: ignore[misc]
        """Hands on how many bytes came, and draws nothing."""

        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            report(int(n or 0))

    return Meter


def _check_names(response: Any) -> None:
    """Refuse an ETag or a commit that is no name: the library makes paths of them as they are."""
    headers = response.headers
    etag = headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG) or headers.get("ETag", "0")
    commit = headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT, "0" * 40)
    if response.request.method == "HEAD" and not (
        _ETAG.fullmatch(etag) and _COMMIT.fullmatch(commit)
    ):
        raise ValueError(
            f"no name to go by: ETag {display_text(etag)}, commit {display_text(commit)}"
        )


def _checked_client() -> Any:
    client = default_client_factory()
    client.event_hooks = {**client.event_hooks, "response": [_check_names]}
    return client


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """Whatever the hub's library raises, as one refusal that says what to do."""
    set_client_factory(_checked_client)
    try:
        yield
    except errors.SpdError:
        raise
    except Exception as error:
        raise _refusal(name, error) from error


def _refusal(name: str, error: Exception) -> errors.SpdError:
    """What an error of the library means for a download."""
    token = "no token is set (HF_TOKEN)"
    if get_token():
        token = "this token (HF_TOKEN, hf auth login) has no access"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return NotFoundError(f"{name}: the hub has no such revision", fix=["leave --revision out"])
    gated = isinstance(error, hub_errors.GatedRepoError)
    if isinstance(error, hub_errors.RepositoryNotFoundError) and not gated:
        fix = ["check the name, ORG/NAME; for a private model: hf auth login"]
        return NotFoundError(
            f"{name}: the hub has no such model, or it is private and {token}", fix=fix
        )
    if status in (401, 403):
        fix = [f"accept the licence at {constants.ENDPOINT}/{name}, then: hf auth login"]
        return NetworkError(f"{name} is gated, and {token}", fix=fix)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"the disk is full while downloading {name}", fix=[_MAKE_ROOM])
    why = one_line(error) or type(error).__name__
    if _is_lookup_failure(error):
        why = "no network: the hub's host name cannot be looked up"
    elif isinstance(error, hub_errors.HfHubHTTPError):
        why = f"the hub answered {status}"
    elif isinstance(error, (AttributeError, LookupError, RecursionError, TypeError, ValueError)):
        why = f"the hub gave a wrong answer: {why}"
    reason = [f"The hub is {constants.ENDPOINT}. Finished files are kept; the next pull continues."]
    fix = ["check the network, HTTPS_PROXY and HF_ENDPOINT", f"spd pull {name}"]
    return NetworkError(f"cannot download {name}: {why}", reason=reason, fix=fix)


def _is_lookup_failure(error: BaseException) -> bool:
    """True if a host name had no address, which is how a machine without a network fails."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, socket.gaierror):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
