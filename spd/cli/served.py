"""Servers of this machine's user, as commands use, list, start and stop them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.terminal.console import tell, write_stderr
from spd.cli.terminal.progress import clock, loading
from spd.cli.terminal.sink import Sink, to_json
from spd.errors import NotFoundError
from spd.formats.hub import resolve_model
from spd.runtime.plan.config import format_size
from spd.server.client import ServedEngine, find_servers
from spd.server.wire import identity, runtime_folder

if TYPE_CHECKING:
    from spd.cli.options import ReplyOptions
    from spd.cli.terminal.console import Session

STATUS_SCHEMA = "spd.serve.status/1"


def control(session: Session, model: str | None, *, stop: bool, as_json: bool) -> int:
    """Carry out --status, or --stop until servers have ended. Raises NotFoundError where none runs.

    model: whose servers are meant; None: all.
    """
    found = list(find_servers(session.runtime_folder, session.console.note))
    if model is not None:
        folder = os.path.realpath(resolve_model(model))
        found = [one for one in found if one[1]["made_of"]["model"][0] == folder]
    if not found:
        raise NotFoundError("no server runs", fix=["spd serve --detach"], code="no_server")
    for line, _ in found:
        line.close()
    if stop:
        for _, said in found:
            _stop(said)
    elif as_json:
        shown = {"schema": STATUS_SCHEMA, "servers": [_status(said) for _, said in found]}
        Sink.stdout().write(to_json(shown) + "\n")
    else:
        for _, said in found:
            Sink.stdout().write(_status_line(said) + "\n")
    return 0


def _status(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what --status --json shows of a server, of what it says of itself."""
    names = ("model", "url", "pid", "slots", "running", "requests", "memory_bytes", "idle_seconds")
    plan = said["plan"]
    return {**{name: said[name] for name in names}, "spec": plan["spec"], "ctx": plan["ctx"]}


def _status_line(said: Mapping[str, Any]) -> str:
    """Return what --status shows of a server."""
    state = f"idle {clock(said['idle_seconds'])}"
    if said["running"]:
        state = f"{said['running']} running"
    parts = [said["model"], said["url"], f"pid {said['pid']}", format_size(said["memory_bytes"])]
    parts += [f"{said['requests']:,} requests", state, f"drafts {said['plan']['spec']}"]
    return " · ".join(parts)


def _stop(said: Mapping[str, Any]) -> None:
    """Stop a server, and wait until it has ended."""
    tell(f"stopping {said['model']} at {said['url']}")
    command_line = Path(f"/proc/{said['pid']}/cmdline")
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(said["pid"], signal.SIGTERM)
        while command_line.read_bytes():  # empty once it is a zombie
            time.sleep(0.05)


def detach(session: Session, model: str) -> int:
    """Start a server in the background, and return when it is ready; where it ends, with what it said."""
    import subprocess

    folder = runtime_folder(session.runtime_folder)
    command = [sys.executable, "-m", "spd", *(word for word in sys.argv[1:] if word != "--detach")]
    path = folder / f"serve-{os.getpid()}.log"
    with path.open("wb") as log, loading(f"starting {model}", session.console):
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while child.poll() is None and not (folder / f"{child.pid}.sock").exists():
                time.sleep(0.05)
        except BaseException:
            child.terminate()
            raise
    said = path.read_text(encoding="utf-8", errors="replace")
    if (status := child.poll()) is not None:
        path.unlink()
        write_stderr(said or f"the server ended at once, with status {status}\n")
        return status if status > 0 else 128 - status
    if not session.console.quiet:
        write_stderr(f"{said}pid {child.pid}, log {path}; spd serve --stop ends it\n")
    return 0


def served_engine(session: Session, options: ReplyOptions, slots: int = 1) -> ServedEngine | None:
    """The engine of a server that has the one which these options ask for; None where none runs."""
    if options.no_server:
        return None
    from spd.cli.run_settings import engine_config

    named = options.model, options.draft_model, options.mtp
    for line, said in find_servers(session.runtime_folder, session.console.note):
        try:
            model, *_ = [resolve_model(name) for name in named if name is not None]
        except NotFoundError:
            return None  # and none serves it
        made_of = identity(engine_config(options, model))
        other = [name for name, value in said["made_of"].items() if made_of.get(name) != value]
        why = said["refuses"] or (f"another {', '.join(other)}" if other else None)
        if slots > said["slots"]:
            why = why or f"it decodes {said['slots']} together"
        session.console.detail(f"server  {said['url']}" + (f": not used: {why}" if why else ""))
        if why is None:
            return ServedEngine(line, model, {**said["plan"], "slots": slots})
        line.close()
    return None
