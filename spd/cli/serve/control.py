"""Servers from outside: start one in the background, tell what runs, stop it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.serve.local import runtime_folder, statuses
from spd.cli.text.output import Sink, tell
from spd.cli.text.progress import clock, loading
from spd.errors import EngineError, NotFoundError
from spd.formats.folder import ModelFolder

if TYPE_CHECKING:
    from spd.cli.commands.serve import ServeOptions
    from spd.cli.options import Session

STOP_SECONDS = 60.0
LOG_LIMIT = 4096


def _model(options: ServeOptions) -> ModelFolder | None:
    """The model that was named, None where none was."""
    named = not {"model", "model_argument"}.isdisjoint(options.typed)
    return ModelFolder.named(options.model) if named else None


def show_status(session: Session, options: ServeOptions) -> int:
    """A line for each server that runs. Raises NotFoundError where none does."""
    folder, sink = runtime_folder(session.runtime_folder), Sink.stdout()
    found = [] if folder is None else [said for _, said in statuses(folder, _model(options))]
    if not found:
        raise NotFoundError("no server runs", fix=["spd serve --detach"], code="no_server")
    sink.write_lines(map(_status_line, found))
    return 0


def _status_line(said: dict[str, Any]) -> str:
    from spd.runtime.plan.memory import show_size

    state = f"{said['running']} running" if said["running"] else f"idle {clock(said['idle_seconds'])}"
    parts = [said["model"], said["url"], f"pid {said['pid']}", show_size(said["memory_bytes"])]
    return " · ".join([*parts, f"{said['requests']:,} requests", state, f"drafts {said['spec']}"])


def stop(session: Session, options: ServeOptions) -> int:
    """Have servers end when their replies have. Raises NotFoundError where none runs."""
    folder, asked = runtime_folder(session.runtime_folder), 0
    if folder is not None:
        for line, said in statuses(folder, _model(options)):
            line.send({"do": "stop"})
            line.receive(STOP_SECONDS)
            asked += 1
            tell(f"stopping {said['model']} at {said['url']}")
            ends = time.monotonic() + STOP_SECONDS
            while _runs(said["pid"]) and time.monotonic() < ends:
                session.guard.check()
                time.sleep(0.05)
            if _runs(said["pid"]):
                raise EngineError(f"process {said['pid']} goes on", fix=[f"kill {said['pid']}"])
    if not asked:
        raise NotFoundError("no server runs", fix=["spd serve --status"], code="no_server")
    return 0


def _runs(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def detach(session: Session, options: ServeOptions) -> int:
    """Start a server in the background, and return when it is ready. Raises EngineError where it ends."""
    folder = runtime_folder(session.runtime_folder, create=True)
    assert folder is not None
    words = [word for word in sys.argv[1:] if word != "--detach"]
    path = folder / f"serve-{os.getpid()}.log"
    with path.open("wb") as log, loading(f"starting {options.model}", session.console):
        child = subprocess.Popen(
            [sys.executable, "-m", "spd", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while child.poll() is None and not any(folder.glob(f"*-{child.pid}.sock")):
                session.guard.check()
                time.sleep(0.05)
        except BaseException:
            child.terminate()
            raise
    if child.poll() is not None:
        said = path.read_text(encoding="utf-8", errors="replace")[-LOG_LIMIT:].strip().splitlines()
        path.unlink()
        raise EngineError("the server ended at once", reason=said, fix=["spd serve, without --detach"])
    if not session.console.quiet:
        tell(path.read_text(encoding="utf-8", errors="replace").strip())
        tell(f"pid {child.pid}, log {path}; spd serve --stop ends it")
    return 0
