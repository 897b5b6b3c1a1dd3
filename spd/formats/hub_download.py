"""Downloads from the Hugging Face hub into its cache: the files that `spd` reads, each hashed.

The only module that imports huggingface_hub. A finished file stays, whatever happens to the next
one.
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
from typing import Any, Protocol

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
from spd.formats.gguf.file_sets import FileSet, choose_one_set, file_sets, find_drafter
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
from spd.formats.quantized import QUANTIZATION_FILES

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
"""Names of the files besides weights that are downloaded of a model folder."""
FREE_SPACE_FACTOR = 1.05
"""Required free space, as a share of the download."""
_FREE_SPACE_FIX = "spd rm NAME for a model that is not needed"
"""The fix of errors for a full disk."""
_GGUF_NAME = re.compile(r"(?:\w[\w.+ -]*/)?\w[\w.+ -]*\.gguf", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r'(W/)?"?[A-Za-z0-9_-][A-Za-z0-9_=+.-]{0,199}"?')
"""Names from the hub that are safe in paths: of GGUF files, of commits and of contents."""


@dataclass(frozen=True)
class RemoteModel:
    """The files to download of one revision of a repository."""

    name: str
    revision: str | None
    commit: str
    files: tuple[RepoSibling, ...]
    missing_bytes: int
    """Bytes of the files that are not in the cache yet."""
    gguf: FileSet | None = None
    """The chosen files of a repository of GGUF files, without a drafter's."""


def look_up_model(
    name: str, revision: str | None = None, tag: str | None = None, free: int = 0
) -> RemoteModel:
    """Ask the hub for a model's files; download at most the index of the shards, into the cache.

    tag: of its GGUF files; where it has several, and no safetensors, a tag is required. free: free
    bytes of memory, for the message that says which of them fit. Raises UsageError for an invalid
    name or tag, NotFoundError, NetworkError, CheckpointError for a wrong index, and
    IncompatibleError without a supported model.
    """
    check_repository_name(name, revision)
    with _convert_hub_errors(name):
        info = HfApi(endpoint=constants.ENDPOINT).model_info(
            name, revision=revision, files_metadata=True
        )
        commit = str(info.sha)
        files = {file.rfilename: file for file in info.siblings or ()}
        if not _COMMIT.fullmatch(commit):
            raise ValueError("it names no commit")
        chosen = _choose_gguf(name, tag, files, free)
        if chosen is not None:
            selected = [files[file] for file in _with_drafter_files(chosen, files)]
        elif CONFIG_FILE not in files:
            raise IncompatibleError(
                f"{name}: the repository has no config.json, so it is no model folder"
            )
        else:
            selected = [file for file in files.values() if file.rfilename in SMALL_FILES]
            selected += _find_weights(name, commit, files)
        snapshot = cached_folder(name) / "snapshots" / commit
        missing = sum(
            int(file.size or 0) for file in selected if not (snapshot / file.rfilename).is_file()
        )
        return RemoteModel(
            name=name,
            revision=revision,
            commit=commit,
            files=tuple(selected),
            missing_bytes=missing,
            gguf=chosen,
        )


def _choose_gguf(
    name: str, tag: str | None, offered: Mapping[str, RepoSibling], free: int
) -> FileSet | None:
    """Return the GGUF files to download of a repository; None where it has safetensors instead.

    offered: the repository's files by name. free: free bytes of memory, for a message. Raises
    UsageError where a tag is missing or wrong, IncompatibleError where a split is missing.
    """
    if tag is None and (WEIGHTS_FILE in offered or INDEX_FILE in offered):
        return None
    sets = file_sets(_gguf_file_sizes(offered))
    if not sets and tag is None:
        return None
    chosen = choose_one_set(sets, name, tag, free)
    if len(chosen.files) != chosen.expected:
        files = f"{len(chosen.files)} of the {chosen.expected} files of {chosen.tag}"
        raise IncompatibleError(f"{name}: the repository has {files}")
    return chosen


def _gguf_file_sizes(offered: Mapping[str, RepoSibling]) -> dict[str, int]:
    """Return the bytes of a repository's GGUF files by name, without unsafe names."""
    return {
        name: int(file.size or 0) for name, file in offered.items() if _GGUF_NAME.fullmatch(name)
    }


def _with_drafter_files(chosen: FileSet, offered: Mapping[str, RepoSibling]) -> list[str]:
    """Return the names of a model's files, and of its MTP layers' where the repository has them."""
    drafter = find_drafter(_gguf_file_sizes(offered), chosen)
    return [*chosen.files, *(drafter.files if drafter else ())]


def download_model(model: RemoteModel, report: Callable[[int], None]) -> Path:
    """Download missing files into the cache, check their hashes, and return the snapshot's folder.

    Writes the reference of the branch or tag too. report: called with the number of new bytes as
    they arrive. Raises NetworkError, NotFoundError, and ResourceError when the disk is or would be
    full.
    """
    cache = cache_folder()
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < model.missing_bytes * FREE_SPACE_FACTOR:
        reason = f"{model.missing_bytes:,} bytes to come, {free:,} free in {cache}"
        fix = [_FREE_SPACE_FIX, "HF_HOME=/another/disk spd pull …"]
        raise ResourceError(f"not enough disk space for {model.name}: {reason}", fix=fix)
    with _convert_hub_errors(model.name):
        for file in model.files:
            _fetch_file(model.name, model.commit, file, report)
        ref = cached_folder(model.name) / "refs" / (model.revision or "main")
        if ref.name != model.commit:  # as huggingface_hub does; files were fetched by commit
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, model.commit)
    return cached_folder(model.name) / "snapshots" / model.commit


def _fetch_file(name: str, commit: str, file: RepoSibling, report: Callable[[int], None]) -> Path:
    """Return the path of a file in the cache; download it where it is missing, and check its hash.

    report: called with the number of new bytes as they arrive.
    """
    path = cached_folder(name) / "snapshots" / commit / file.rfilename
    if not path.is_file():
        cache = cache_folder()
        progress_class = _make_progress_class(report)
        endpoint = constants.ENDPOINT
        hf_hub_download(
            name,
            file.rfilename,
            revision=commit,
            cache_dir=cache,
            endpoint=endpoint,
            tqdm_class=progress_class,
        )
        _check_hash(name, file, path)
    return path


def _find_weights(name: str, commit: str, files: Mapping[str, RepoSibling]) -> list[RepoSibling]:
    """Return the weights to download: the single file, else the shards that the index names.

    Downloads that index. Raises CheckpointError where it names other files than the repository has,
    IncompatibleError without supported weights.
    """
    if WEIGHTS_FILE in files:
        return [files[WEIGHTS_FILE]]
    if INDEX_FILE in files:
        index = _fetch_file(name, commit, files[INDEX_FILE], lambda _: None)
        shards = sorted(set(read_weight_map(index).values()))
        if absent := [shard for shard in shards if shard not in files]:
            reason = f"{INDEX_FILE} names {display_text(absent[0])}, which the hub does not have"
            raise errors.CheckpointError(f"{name}: {reason}")
        return [files[shard] for shard in shards]
    suffixes = sorted(
        {Path(file).suffix for file in files} & {".bin", ".pt", ".pth", ".gguf", ".safetensors"}
    )
    reason = f"{name} has no {WEIGHTS_FILE} and no {INDEX_FILE}"
    reason += f", but {', '.join(suffixes)} files, which spd does not read" if suffixes else ""
    raise IncompatibleError(reason, fix=["a repository with safetensors weights"])


def _check_hash(name: str, file: RepoSibling, path: Path) -> None:
    """Compare a new file's hash with the hub's.

    Remove a file that differs and raise NetworkError.
    """
    expected = file.lfs.sha256 if file.lfs else file.blob_id  # a small file's hash is git's
    actual = compute_file_hash(path, "sha256" if file.lfs else "git-sha1")
    if expected in (None, actual):
        return
    blob = path.resolve()
    path.unlink()
    if blob.parent.name == "blobs":  # elsewhere it is not the cache's
        blob.unlink()
    reason = f"{name}: {file.rfilename} is not the file that the hub lists; it was removed"
    hashes = [f"hash wanted {expected}", f"hash found  {actual}"]
    raise NetworkError(reason, reason=hashes, fix=[f"spd pull {name}"])


def _make_progress_class(report: Callable[[int], None]) -> type[tqdm]:
    """Return a class for the library's progress bars that calls `report` with new bytes."""

    class ProgressReporter(tqdm):  # type: ignore[misc]
        """A progress bar that reports the number of new bytes, and draws nothing."""

        def __init__(self, *args: object, name: str | None = None, **options: object) -> None:
            """Begin a bar that is not shown; the library passes a name that tqdm does not take."""
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            """Report `n` new bytes."""
            report(int(n or 0))

    return ProgressReporter


class _Request(Protocol):
    """A request of the library's HTTP client."""

    method: str


class _Response(Protocol):
    """A response of the library's HTTP client, whose package depends on the library's version."""

    headers: Mapping[str, str]
    request: _Request


def _check_response_names(response: _Response) -> None:
    """Raise ValueError for an ETag or a commit of which the library makes an unsafe path."""
    headers = response.headers
    etag = headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG) or headers.get("ETag", "0")
    commit = headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT, "0" * 40)
    are_names = _ETAG.fullmatch(etag) and _COMMIT.fullmatch(commit)
    if response.request.method == "HEAD" and not are_names:
        raise ValueError(
            f"no name to go by: ETag {display_text(etag)}, commit {display_text(commit)}"
        )


def _make_checked_client() -> Any:
    """Return a client of the library's kind that checks each response for unsafe names of files."""
    client = default_client_factory()
    client.event_hooks = {**client.event_hooks, "response": [_check_response_names]}
    return client


@contextmanager
def _convert_hub_errors(name: str) -> Iterator[None]:
    """Turn any exception of the block but SpdError into an error with a fix, by `_hub_error`.

    From here on the library uses clients that check each response.
    """
    set_client_factory(_make_checked_client)
    try:
        yield
    except errors.SpdError:
        raise
    except Exception as error:
        raise _hub_error(name, error) from error


def _hub_error(name: str, error: Exception) -> errors.SpdError:
    """Return the error with fixes for an exception of the library while it uses the hub."""
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
        return ResourceError(f"the disk is full while downloading {name}", fix=[_FREE_SPACE_FIX])
    cause = one_line(error) or type(error).__name__
    if _is_lookup_failure(error):
        cause = "no network: the hub's host name cannot be looked up"
    elif isinstance(error, hub_errors.HfHubHTTPError):
        cause = f"the hub answered {status}"
    elif isinstance(error, (AttributeError, LookupError, RecursionError, TypeError, ValueError)):
        cause = f"the hub gave a wrong answer: {cause}"
    reason = [f"The hub is {constants.ENDPOINT}. Finished files are kept; the next pull continues."]
    fix = ["check the network, HTTPS_PROXY and HF_ENDPOINT", f"spd pull {name}"]
    return NetworkError(f"cannot download {name}: {cause}", reason=reason, fix=fix)


def _is_lookup_failure(error: BaseException) -> bool:
    """True if an error or one of its causes is that a host name has no address.

    That is how a machine without a network fails.
    """
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, socket.gaierror):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
