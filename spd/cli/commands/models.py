"""`spd pull`, `spd ls`, `spd rm`: models on this machine, downloaded into the hub's cache on request only."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.options import (
    CommonOptions,
    JsonOptions,
    ModelArgument,
    RunOptions,
    argument,
    printed,
    same_as_argument,
    take_models,
)
from spd.cli.terminal.console import Session, tell, write_stderr
from spd.cli.terminal.plain_text import as_line
from spd.cli.terminal.progress import loading
from spd.cli.terminal.sink import Sink
from spd.cli.terminal.streams import is_terminal
from spd.cli.terminal.tables import table_lines
from spd.errors import NotFoundError, ResourceError, SpdError, UsageError
from spd.formats import hub
from spd.formats.stores import HUB
from spd.runtime.plan.config import format_size

if TYPE_CHECKING:
    from spd.formats.hub_download import RemoteModel
    from spd.formats.stores import StoredModel


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PullOptions(ModelArgument, JsonOptions):
    """Everything `spd pull` takes."""

    model_argument: str | None = argument(
        "MODEL", "org/name on the Hugging Face hub; of GGUF files org/name:Q4_K_M.", None
    )
    model: str = same_as_argument()
    revision: str | None = printed(None, "REV", "Branch, tag or commit.")
    dry_run: bool = printed(False, None, "List the files; download none of the weights.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RemoveOptions(CommonOptions):
    """Everything `spd rm` takes."""

    names: list[str] | None = argument("MODEL…", "org/name in the cache.", None)
    model: str = same_as_argument()
    yes: bool = printed(False, None, "Do not ask.", "-y")
    typed: frozenset[str] = frozenset()


def pull(session: Session, options: PullOptions) -> None:
    """Download a model into the Hugging Face cache: safetensors and what belongs to them, or a GGUF file.

    Examples:
      spd pull Qwen/Qwen3-8B --dry-run
      spd pull unsloth/Qwen3-8B-GGUF:Q4_K_M
    """
    sink = Sink.stdout()
    model = _look_up(session, options.model, options.revision)
    sizes = {file.rfilename: file.size or 0 for file in model.files}
    shown: dict[str, Any] = {"schema": "spd.pull/1", "model": model.name, "commit": model.commit}
    shown["files"] = [{"name": name, "size": size} for name, size in sizes.items()]
    shown |= {"bytes": sum(sizes.values()), "missing_bytes": model.missing_bytes}
    answer = ""
    if not options.dry_run:
        folder = _download(session, model)
        shown["folder"] = answer = str(folder)
        if model.gguf is not None:
            shown["file"] = answer = str(folder / model.gguf.files[0])
    lines = [f"{format_size(size):>12}  {name}" for name, size in sizes.items()]
    dry = [*lines, f"{format_size(model.missing_bytes)} to download"]
    sink.answer(options.json, shown, dry if options.dry_run else [answer])


def ensure_models(session: Session, options: RunOptions) -> None:
    """Download models that are named and not there, after --pull or a yes at a terminal; else raise."""
    can_ask = is_terminal(sys.stdin) and is_terminal(sys.stderr)
    for reference in (options.model, options.draft_model):
        if reference is None or not hub.is_repository_name(reference):
            continue
        try:
            hub.resolve_model(reference)
        except NotFoundError:
            asked = f"download {reference} from the hub?"  # which hears of it after the yes
            if hub.is_offline() or not (options.pull or (can_ask and _agrees(asked))):
                raise
            _download(session, _look_up(session, reference, None))


def _look_up(session: Session, name: str, revision: str | None) -> RemoteModel:
    from spd.runtime import machine_from_driver

    repository, tag = hub.split_tag(name)
    hub.check_repository_name(repository, revision)  # before anything says that the hub is asked
    with loading(f"asking the hub for {repository}", session.console):
        from spd.formats.hub_download import look_up_model

        return look_up_model(repository, revision, tag, machine_from_driver().free)


def _download(session: Session, model: RemoteModel) -> Path:
    from spd.formats.hub_download import download
    from spd.runtime import LoadProgress

    if model.missing_bytes:
        size = format_size(model.missing_bytes)
        session.console.note(
            f"{size} to download; finished files are kept, an interrupted one starts again"
        )
    with loading(f"downloading {model.name}", session.console) as display:
        done = 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            display(LoadProgress("download", done, max(model.missing_bytes, done)))

        return download(model, report)


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
        tell(
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
    sink.answer(options.json, {"schema": "spd.ls/1", "models": models}, lines)


def stored_facts(stored: StoredModel) -> dict[str, Any]:
    """Return what is known of one model, from headers only; a fault is its `reason`, never an error."""
    from spd.formats.folder import ModelFolder
    from spd.formats.mtp_layout import is_mtp_tensor
    from spd.runtime import unused_tensors

    size = stored.nbytes or _bytes_below(hub.cached_folder(stored.name))
    facts: dict[str, Any] = {"model": stored.name, "store": stored.store, "bytes": size}
    facts |= dict.fromkeys(("folder", "dtype", "architecture", "reason"))
    facts |= dict.fromkeys(("mtp", "head", "supported"), False)
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
        facts |= {"dtype": config.dtype, "architecture": config.architecture, "supported": True}
        facts["mtp"] = any(
            is_mtp_tensor(tensor, config.num_layers) for tensor in checkpoint.tensors
        )
        facts["head"] = config.head_kind is not None
    except SpdError as error:
        reason = error.message.replace(f"{facts['folder']}/", "").removeprefix(f"{stored.name}: ")
        facts["reason"] = reason.removeprefix(f"{facts['folder']}: ")
    return facts


def rm(session: Session, options: RemoveOptions) -> None:
    """Remove models from the Hugging Face cache, every revision of each, after asking.

    Examples:
      spd rm -y org/one org/two
    """
    folders: dict[str, Path] = {}
    # A model that a file of options names is for running, not for removal.
    model = options.model if "model" in options.typed else ""
    for name in dict.fromkeys(take_models(options.names, model)):
        _refuse_others(name)
        hub.check_repository_name(name)
        folder = folders[name] = hub.cached_folder(name)
        if not folder.is_dir():
            raise NotFoundError(
                f"{name} is not in the local cache", fix=["spd ls"], code="not_cached"
            )
    for name, folder in folders.items():
        tell(f"{format_size(_bytes_below(folder)):>12}  {name}")
    if not options.yes:
        if not is_terminal(sys.stdin):
            raise UsageError(
                "spd cannot ask: standard input is not a terminal", fix=["spd rm -y NAME"]
            )
        if not _agrees(f"remove {len(folders)} from {hub.cache_folder()}?"):
            tell("nothing was removed")
            return
    for name, folder in folders.items():
        locks = hub.cache_folder() / ".locks" / folder.name
        try:
            shutil.rmtree(folder)  # follows no link
            if locks.is_dir() and not locks.is_symlink():
                shutil.rmtree(locks)
        except OSError as error:
            words = f"cannot remove {error.filename or folder}: {error.strerror or error}"
            raise ResourceError(words, fix=["check who owns the cache"]) from None
        session.console.note(f"removed {name}")


def _refuse_others(name: str) -> None:
    """Raise where a name means one file of a repository, or what another program keeps."""
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


def _agrees(question: str) -> bool:
    """Ask a person; anything but yes is no."""
    write_stderr(f"{question} [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _bytes_below(folder: Path) -> int:
    """Bytes of the files below a folder, links not counted."""
    return sum(
        path.lstat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
