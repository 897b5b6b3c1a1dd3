"""Servers of this machine's user, from outside: found, told of, started and stopped.

Each line on a socket is a JSON object. No torch here, nor anything else that takes time to import.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd import __version__, errors
from spd.cli.text.output import Sink, tell
from spd.cli.text.progress import clock, loading
from spd.errors import EngineError, NotFoundError, ResourceError, SpdError
from spd.formats.folder import ModelFolder
from spd.runtime.plan.config import show_size

if TYPE_CHECKING:
    from spd.cli.commands.serve import ServeOptions
    from spd.cli.text.output import Session
    from spd.runtime import EngineConfig

LINE_LIMIT = 64 << 20
ANSWER_SECONDS = 10.0
"""For which a server may take to let a client in, and to say how it is."""
STOP_SECONDS = 60.0


def runtime_folder(folder: Path, *, create: bool = False) -> Path | None:
    """The folder of sockets if it is this user's alone; None where there is none.

    Raises ResourceError for one that another user could reach, or that cannot be made.
    """
    try:
        if create:
            folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            return None
        raise ResourceError(f"cannot use {folder}: {error.strerror}", fix=["set XDG_RUNTIME_DIR"]) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ResourceError(
            f"{folder} is not a folder of yours alone",
            reason=["Another user could answer in the place of your server."],
            fix=[f"rm -r {folder}", "--no-server"],
            code="runtime_folder",
        )
    return folder


def socket_name(model: ModelFolder, process: int | str) -> str:
    """The name of a server's socket: of a model's folder, and of a process."""
    return f"{hashlib.sha256(os.path.realpath(model.path).encode()).hexdigest()[:16]}-{process}.sock"


def identity(config: EngineConfig) -> dict[str, Any]:
    """What an engine is made of, as JSON: this version, its wishes but for slots, and its folders' files."""
    shown = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del shown["slots"]
    for name in ("model", "draft_model", "mtp"):
        if shown[name] is not None:
            files = [
                (path.name, path.stat()) for path in sorted(Path(shown[name]).iterdir()) if path.is_file()
            ]
            stamps = [[name, each.st_size, each.st_mtime_ns, each.st_ino] for name, each in files]
            shown[name] = [os.path.realpath(shown[name]), *stamps]
    made_of: dict[str, Any] = json.loads(json.dumps({"version": __version__, **shown}))
    return made_of


class Line:
    """A connection that carries lines of JSON."""

    def __init__(self, path: Path) -> None:
        """Connect. Raises OSError; a socket that no server listens at is removed."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_SECONDS)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            if isinstance(error, ConnectionRefusedError):
                path.unlink(missing_ok=True)
            raise
        self._data = bytearray()

    def send(self, **message: Any) -> None:
        """Send one object. Raises EngineError where the server has gone."""
        try:
            self._socket.sendall(json.dumps(message, default=str).encode() + b"\n")
        except OSError:
            raise _lost() from None

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next object. Raises what the server refuses, and EngineError where it has gone or is late."""
        self._socket.settimeout(seconds)
        try:
            while (end := self._data.find(b"\n")) < 0:
                if not (more := self._socket.recv(1 << 20)):
                    raise _lost()
                self._data += more
            message: dict[str, Any] = json.loads(self._data[:end])
        except (OSError, ValueError):
            raise _lost() from None
        del self._data[: end + 1]
        if name := message.pop("refused", None):
            raise getattr(errors, name, SpdError)(message.pop("message"), **message)
        return message

    def pending(self, seconds: float) -> bool:
        """Whether an object has come, or comes within this time."""
        return b"\n" in self._data or bool(select.select([self._socket], (), (), seconds)[0])

    def close(self) -> None:
        """Hang up; the server aborts what is under way."""
        self._socket.close()


def _lost() -> EngineError:
    return EngineError("the server has ended", fix=["run it again; in a chat, /model NAME", "--no-server"])


def servers(session: Session, model: ModelFolder | None = None) -> Iterator[tuple[Line, dict[str, Any]]]:
    """A connection to each server, of one model or of all, and what it says of itself."""
    folder = runtime_folder(session.runtime_folder)
    pattern = "*.sock" if model is None else socket_name(model, "*")
    for path in [] if folder is None else sorted(folder.glob(pattern)):
        with suppress(OSError, EngineError):
            line = Line(path)
            line.send(do="status")
            yield line, line.receive(ANSWER_SECONDS)


def control(session: Session, options: ServeOptions) -> int:
    """Carry out --status or --stop. Raises NotFoundError where no server runs."""
    named = not {"model", "model_argument"}.isdisjoint(options.typed)
    found = list(servers(session, ModelFolder.named(options.model) if named else None))
    if not found:
        raise NotFoundError("no server runs", fix=["spd serve --detach"], code="no_server")
    for line, said in found:
        if options.stop:
            line.send(do="stop")
        line.close()
        if options.stop:
            _await_end(session, said)
        else:
            Sink.stdout().write(_status_line(said) + "\n")
    return 0


def _status_line(said: dict[str, Any]) -> str:
    state = f"{said['running']} running" if said["running"] else f"idle {clock(said['idle_seconds'])}"
    parts = [said["model"], said["url"], f"pid {said['pid']}", show_size(said["memory_bytes"])]
    return " · ".join([*parts, f"{said['requests']:,} requests", state, f"drafts {said['plan']['spec']}"])


def _await_end(session: Session, said: dict[str, Any]) -> None:
    """Wait until a server has ended, as it does when its replies have. Raises EngineError if it goes on."""
    tell(f"stopping {said['model']} at {said['url']}")
    ends, command_line = time.monotonic() + STOP_SECONDS, Path(f"/proc/{said['pid']}/cmdline")
    with suppress(FileNotFoundError, ProcessLookupError):
        while command_line.read_bytes():  # empty once it is a zombie
            session.guard.check()
            if time.monotonic() > ends:
                raise EngineError(f"process {said['pid']} goes on", fix=[f"kill {said['pid']}"])
            time.sleep(0.05)


def detach(session: Session, options: ServeOptions) -> int:
    """Start a server in the background, and return when it is ready. Raises EngineError where it ends."""
    import subprocess

    folder = runtime_folder(session.runtime_folder, create=True)
    assert folder is not None
    command = [sys.executable, "-m", "spd", *(word for word in sys.argv[1:] if word != "--detach")]
    path = folder / f"serve-{os.getpid()}.log"
    with path.open("wb") as log, loading(f"starting {options.model}", session.console):
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        quiet, name = session.console.quiet, f"*-{child.pid}.sock"
        try:
            while child.poll() is None:  # it says last that it serves, unless it is quiet
                if any(folder.glob(name)) if quiet else b"/v1 (" in path.read_bytes():
                    break
                session.guard.check()
                time.sleep(0.05)
        except BaseException:
            child.terminate()
            raise
    said = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if child.poll() is not None:
        path.unlink()
        raise EngineError("the server ended at once", reason=said, fix=["spd serve, without --detach"])
    for line in () if quiet else (*said, f"pid {child.pid}, log {path}; spd serve --stop ends it"):
        tell(line)
    return 0
