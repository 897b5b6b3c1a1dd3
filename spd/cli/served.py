"""Use, list, start and stop the running servers of this user."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.terminal.console import write_stderr, write_stderr_line
from spd.cli.terminal.progress import format_clock, loading
from spd.cli.terminal.sink import Sink, to_json
from spd.errors import NotFoundError
from spd.formats.hub import resolve_model
from spd.runtime.plan.config import format_size
from spd.server.client import ServedEngine, find_servers
from spd.server.wire import engine_identity, make_runtime_folder

if TYPE_CHECKING:
    from spd.cli.options import ReplyOptions
    from spd.cli.terminal.console import Session

STATUS_SCHEMA = "spd.serve.status/1"
"""The `schema` of the output of `spd serve --status --json`."""


def control_servers(session: Session, model: str | None, *, stop: bool, as_json: bool) -> int:
    """Print the status of servers, or stop them and wait; return 0.

    Raises NotFoundError if none runs. model: only the servers of this model; None means all.
    """
    server_infos = []
    for connection, server_info in list(find_servers(session.runtime_folder, session.console.note)):
        connection.close()
        server_infos.append(server_info)
    if model is not None:
        folder = os.path.realpath(resolve_model(model))
        server_infos = [info for info in server_infos if info["made_of"]["model"][0] == folder]
    if not server_infos:
        raise NotFoundError("no server runs", fix=["spd serve --detach"], code="no_server")
    if stop:
        for server_info in server_infos:
            _stop_server(server_info)
    elif as_json:
        result = {
            "schema": STATUS_SCHEMA,
            "servers": [_status_object(info) for info in server_infos],
        }
        Sink.stdout().write(to_json(result) + "\n")
    else:
        for server_info in server_infos:
            Sink.stdout().write_lines([_status_line(server_info)])
    return 0


def _status_object(server_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object of --status for one server."""
    names = ("model", "url", "pid", "slots", "running", "requests", "memory_bytes", "idle_seconds")
    plan = server_info["plan"]
    return {**{name: server_info[name] for name in names}, "spec": plan["spec"], "ctx": plan["ctx"]}


def _status_line(server_info: Mapping[str, Any]) -> str:
    """Return the line of --status for one server."""
    state = f"idle {format_clock(server_info['idle_seconds'])}"
    if server_info["running"]:
        state = f"{server_info['running']} running"
    parts = [
        server_info["model"],
        server_info["url"],
        f"pid {server_info['pid']}",
        format_size(server_info["memory_bytes"]),
    ]
    parts += [
        f"{server_info['requests']:,} requests",
        state,
        f"drafts {server_info['plan']['spec']}",
    ]
    return " · ".join(parts)


def _stop_server(server_info: Mapping[str, Any]) -> None:
    """Print which server is stopped, end it by SIGTERM and wait until its process has ended."""
    write_stderr_line(f"stopping {server_info['model']} at {server_info['url']}")
    command_line = Path(f"/proc/{server_info['pid']}/cmdline")
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(server_info["pid"], signal.SIGTERM)
        while command_line.read_bytes():  # empty once it is a zombie
            time.sleep(0.05)


def start_detached(session: Session, model: str) -> int:
    """Start a server of this command line in the background; print its log when it is ready.

    Return 0, or the exit status of a server that ended.
    """
    import subprocess

    folder = make_runtime_folder(session.runtime_folder)
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
    log_text = path.read_text(encoding="utf-8", errors="replace")
    status = child.poll()
    if status is not None:
        path.unlink()
        write_stderr(log_text or f"the server ended at once, with status {status}\n")
        return status if status > 0 else 128 - status
    if not session.console.quiet:
        end = f"pid {child.pid}, log {path}; spd serve --stop ends it"
        for line in [*log_text.splitlines(), end]:
            write_stderr_line(line)
    return 0


def served_engine(session: Session, options: ReplyOptions, slots: int = 1) -> ServedEngine | None:
    """Connect to the first running server that fits the options and has `slots`; None if none does.

    Writes with -v why a server is not used.
    """
    if options.no_server:
        return None
    from spd.cli.run_settings import engine_config

    for connection, server_info in find_servers(session.runtime_folder, session.console.note):
        try:
            model = resolve_model(options.model)
            if options.draft_model is not None:
                resolve_model(options.draft_model)  # Raises where it is not there.
        except NotFoundError:
            return None  # no server has a model that is not there
        requested_identity = engine_identity(engine_config(options, model))
        differing_fields = [
            name
            for name, value in server_info["made_of"].items()
            if requested_identity.get(name) != value
        ]
        refusal_reason = server_info["refuses"] or (
            f"another {', '.join(differing_fields)}" if differing_fields else None
        )
        if slots > server_info["slots"]:
            refusal_reason = refusal_reason or f"it decodes {server_info['slots']} together"
        session.console.detail(
            f"server  {server_info['url']}"
            + (f": not used: {refusal_reason}" if refusal_reason else "")
        )
        if refusal_reason is None:
            return ServedEngine(connection, model, {**server_info["plan"], "slots": slots})
        connection.close()
    return None
