"""`spd pull`, `spd ls`, `spd rm`: download, list and remove models; downloads need consent."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from spd.cli.options import (
    CommonOptions,
    JsonOptions,
    ModelArgument,
    RunOptions,
    argument,
    merge_model_arguments,
    output_option,
    same_as_argument,
)
from spd.cli.terminal.console import Session, write_stderr, write_stderr_line
from spd.cli.terminal.plain_text import as_line
from spd.cli.terminal.progress import loading
from spd.cli.terminal.sink import Sink
from spd.cli.terminal.streams import is_terminal
from spd.cli.terminal.tables import table_lines
from spd.errors import NotFoundError, ResourceError, SpdError, UsageError
from spd.formats import hub
from spd.formats.private_texts import find_text_files
from spd.formats.stores import HUB
from spd.runtime.plan.config import format_size

if TYPE_CHECKING:
    from spd.formats.hub_download import RemoteModel
    from spd.formats.stores import StoredModel


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PullOptions(ModelArgument, JsonOptions):
    """The options of `spd pull`."""

    model_argument: str | None = argument(
        "MODEL", "org/name on the Hugging Face hub; of GGUF files org/name:Q4_K_M.", None
    )
    model: str = same_as_argument()
    revision: str | None = output_option(None, "REV", "Branch, tag or commit.")
    dry_run: bool = output_option(False, None, "List the files; download none of the weights.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RemoveOptions(CommonOptions):
    """The options of `spd rm`."""

    names: list[str] | None = argument(
        "MODEL…", "org/name in the cache, or a DIR of --lookup.", None
    )
    model: str = same_as_argument()
    yes: bool = output_option(False, None, "Do not ask.", "-y")
    typed: frozenset[str] = frozenset()


def pull(session: Session, options: PullOptions) -> None:
    """Download a model into the Hugging Face cache: safetensors and what belongs to them, or a GGUF file.

    Examples:
      spd pull Qwen/Qwen3-8B --dry-run
      spd pull unsloth/Qwen3-8B-GGUF:Q4_K_M
    """
    sink = Sink.stdout()
    model = _look_up_remote_model(session, options.model, options.revision)
    sizes = {file.rfilename: file.size or 0 for file in model.files}
    result: dict[str, object] = {
        "schema": "spd.pull/1",
        "model": model.name,
        "commit": model.commit,
    }
    result["files"] = [{"name": name, "size": size} for name, size in sizes.items()]
    result |= {"bytes": sum(sizes.values()), "missing_bytes": model.missing_bytes}
    location = ""
    if not options.dry_run:
        folder = _download_model(session, model)
        result["folder"] = location = str(folder)
        if model.gguf is not None:
            result["file"] = location = str(folder / model.gguf.files[0])
    lines = [f"{format_size(size):>12}  {name}" for name, size in sizes.items()]
    dry_run_lines = [*lines, f"{format_size(model.missing_bytes)} to download"]
    sink.write_result(options.json, result, dry_run_lines if options.dry_run else [location])


def offer_downloads(session: Session, options: RunOptions) -> None:
    """Download the model and the draft model, after a yes, where they are hub names not stored here.

    Other references are not checked. Raises NotFoundError without a yes, and what `hub.resolve_model`
    and downloading raise.
    """
    can_ask = is_terminal(sys.stdin) and is_terminal(sys.stderr)
    for reference in (options.model, options.draft_model):
        if reference is None or not hub.is_repository_name(reference):
            continue
        try:
            hub.resolve_model(reference)
        except NotFoundError:
            # The hub gets no request before the yes.
            question = f"download {reference} from the hub?"
            if hub.is_offline() or not (can_ask and _ask_yes(question)):
                raise
            _download_model(session, _look_up_remote_model(session, reference, None))


def _look_up_remote_model(session: Session, name: str, revision: str | None) -> RemoteModel:
    """Ask the hub for a model and return its description; show progress.

    revision: branch, tag or commit; None is the default one. Raises what the hub raises.
    """
    from spd.runtime import machine_from_driver

    repository, tag = hub.split_tag(name)
    hub.check_repository_name(repository, revision)  # before the message about the hub
    with loading(f"asking the hub for {repository}", session.console):
        from spd.formats.hub_download import look_up_model

        return look_up_model(repository, revision, tag, machine_from_driver().free_bytes)


def _download_model(session: Session, model: RemoteModel) -> Path:
    """Download the missing files of a model with progress; return its folder in the cache."""
    from spd.formats.hub_download import download_model
    from spd.runtime import LoadProgress

    if model.missing_bytes:
        size = format_size(model.missing_bytes)
        session.console.note(
            f"{size} to download; finished files are kept, an interrupted one starts again"
        )
    with loading(f"downloading {model.name}", session.console) as display:
        done = 0

        def report(count: int) -> None:
            """Add downloaded bytes to the progress."""
            nonlocal done
            done += count
            display(LoadProgress("download", done, max(model.missing_bytes, done)))

        return download_model(model, report)


def ls(session: Session, options: JsonOptions) -> None:
    """List the models on this machine: size, type, architecture, who keeps them, whether they run.

    Examples:
      spd ls
    """
    sink = Sink.stdout()
    stored = hub.list_models()
    if session.console.quiet:
        names = dict.fromkeys(model.name for model in stored)
        sink.write("".join(f"{as_line(name)}\n" for name in names))
        return
    models = [stored_facts(model) for model in stored]
    if not models and not options.json:
        write_stderr_line(
            "no model is in the cache; spd pull org/name downloads one, demo and demo-hybrid are built in"
        )
        return
    rows = []
    for model in models:
        runs = "yes" if model["supported"] else f"no: {model['reason']}"
        runs = "as a head: --draft-model" if model["head"] else runs
        facts = (
            model["dtype"] or "?",
            model["architecture"] or "?",
            "yes" if model["mtp"] else "no",
            model["store"],
        )
        rows.append((model["model"], format_size(model["bytes"]), *facts, runs))
    titles = ("MODEL", "SIZE", "DTYPE", "ARCHITECTURE", "MTP", "STORE", "RUNS")
    lines = table_lines(titles, rows)
    sink.write_result(options.json, {"schema": "spd.ls/1", "models": models}, lines)


class StoredFacts(TypedDict):
    """An entry of `spd ls --json`."""

    model: str
    store: str
    bytes: int
    folder: str | None
    dtype: str | None
    architecture: str | None
    reason: str | None
    mtp: bool
    head: bool
    supported: bool


def stored_facts(stored: StoredModel) -> StoredFacts:
    """Read the headers of a stored model and return its facts.

    A fault is its `reason`, not an error.
    """
    from spd.formats.folder import ModelFolder
    from spd.formats.mtp_layout import is_mtp_tensor
    from spd.runtime import unused_tensors

    size = stored.nbytes or _folder_bytes(hub.cached_folder(stored.name))
    facts: StoredFacts = {
        "model": stored.name,
        "store": stored.store,
        "bytes": size,
        "folder": None,
        "dtype": None,
        "architecture": None,
        "reason": None,
        "mtp": False,
        "head": False,
        "supported": False,
    }
    if stored.fault:
        facts["reason"] = stored.fault
        return facts
    try:
        is_folder = stored.store == HUB and not stored.nbytes
        folder = ModelFolder.resolve(stored.name) if is_folder else ModelFolder(stored.path)
        facts["folder"] = str(folder)
        config = folder.config
        checkpoint = folder.checkpoint
        unused_tensors(config, checkpoint)
        facts["dtype"] = config.dtype
        facts["architecture"] = config.architecture
        facts["supported"] = True
        facts["mtp"] = any(
            is_mtp_tensor(tensor, config.num_layers) for tensor in checkpoint.tensors
        )
        facts["head"] = config.head_kind is not None
    except SpdError as error:
        reason = error.message.replace(f"{facts['folder']}/", "").removeprefix(f"{stored.name}: ")
        facts["reason"] = reason.removeprefix(f"{facts['folder']}: ")
    return facts


def rm(session: Session, options: RemoveOptions) -> None:
    """Remove models from the Hugging Face cache, every revision of each, or texts of --lookup, after asking.

    Examples:
      spd rm -y org/one org/two
    """
    folders: dict[str, Path] = {}
    texts: dict[str, list[Path]] = {}
    # The model of a file of options is meant for running, not for removal.
    model = options.model if "model" in options.typed else ""
    for name in dict.fromkeys(merge_model_arguments(options.names, model)):
        if files := find_text_files(Path(name)):
            texts[name] = files
            continue
        _refuse_unremovable(name)
        hub.check_repository_name(name)
        folder = folders[name] = hub.cached_folder(name)
        if not folder.is_dir():
            raise NotFoundError(
                f"{name} is not in the local cache", fix=["spd ls"], code="not_cached"
            )
    for name, folder in folders.items():
        write_stderr_line(f"{format_size(_folder_bytes(folder)):>12}  {name}")
    for name, files in texts.items():
        size = sum(file.lstat().st_size for file in files)
        write_stderr_line(f"{format_size(size):>12}  {name}: texts of earlier sessions")
    if not options.yes:
        if not is_terminal(sys.stdin):
            raise UsageError(
                "spd cannot ask: standard input is not a terminal", fix=["spd rm -y NAME"]
            )
        where = f"from {hub.cache_folder()}" if folders else "folders of texts"
        if not _ask_yes(f"remove {len(folders) + len(texts)} {where}?"):
            write_stderr_line("nothing was removed")
            return
    _remove_texts(session, texts)
    for name, folder in folders.items():
        locks = hub.cache_folder() / ".locks" / folder.name
        try:
            shutil.rmtree(folder)  # follows no link
            if locks.is_dir() and not locks.is_symlink():
                shutil.rmtree(locks)
        except OSError as error:
            message = f"cannot remove {error.filename or folder}: {error.strerror or error}"
            raise ResourceError(message, fix=["check who owns the cache"]) from None
        session.console.note(f"removed {name}")


def _remove_texts(session: Session, texts: Mapping[str, Sequence[Path]]) -> None:
    """Remove files of texts and print a note for each folder. Raises ResourceError.

    texts: the files in each folder, by the folder's name.
    """
    for name, files in texts.items():
        try:
            for file in files:
                file.unlink()
        except OSError as error:
            message = f"cannot remove {error.filename}: {error.strerror}"
            raise ResourceError(message, fix=["check who owns the folder"]) from None
        session.console.note(f"removed the texts in {name}")


def _refuse_unremovable(name: str) -> None:
    """Raise UsageError for a name of one file of a repository, or of another program's model."""
    if hub.cached_folder(name).is_dir():
        return
    stored = next((model for model in hub.list_models() if model.is_named_by(name)), None)
    if stored is None:
        return
    if stored.store == HUB:
        repository, _ = hub.split_tag(stored.name)
        message = f"{stored.name}: is one of the files of {repository}, which are removed together"
        raise UsageError(message, fix=[f"spd rm {repository}"])
    message = f"{stored.name}: is kept by {stored.store}; spd removes nothing of another program's"
    raise UsageError(message, fix=[stored.removal_command], code="not_ours")


def _ask_yes(question: str) -> bool:
    """Print a question and read the answer; True for yes, False for all else."""
    write_stderr(f"{question} [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; links count nothing."""
    return sum(
        path.lstat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
