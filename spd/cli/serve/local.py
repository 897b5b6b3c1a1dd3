"""Servers of this machine's user: where their sockets are, what tells one from another, and what is said.

Each line is a JSON object. No torch here, nor anything else that takes time to import: `spd generate` asks
through this.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd import __version__
from spd.errors import EngineError, ResourceError

if TYPE_CHECKING:
    from spd.formats.folder import ModelFolder
    from spd.runtime import EngineConfig

LINE_LIMIT = 64 << 20
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 10.0
"""For which a server may take to say whether it will serve, or how it is."""
OF_ONE_RUN = ("slots",)
"""Wishes that change neither a text nor a plan as a request sees it."""


def runtime_folder(folder: Path, *, create: bool = False) -> Path | None:
    """The folder of sockets if it is this user's alone; None where there is none.

    Raises ResourceError for one that another user could reach, or that cannot be made.
    """
    try:
        if create:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        found = folder.lstat()
    except FileNotFoundError:
        if not create:
            return None
        raise ResourceError(f"{folder.parent} is not there", fix=["set XDG_RUNTIME_DIR"]) from None
    except OSError as error:
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


def sockets(folder: Path, model: ModelFolder | None = None) -> list[Path]:
    """Sockets of servers, of one model or of all; nothing is asked."""
    return sorted(folder.glob("*.sock" if model is None else socket_name(model, "*")))


def identity(config: EngineConfig) -> dict[str, Any]:
    """What an engine is made of: this version, its wishes, and its folders' files by size and time."""
    wishes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    shown = {name: value for name, value in wishes.items() if name not in OF_ONE_RUN}
    for name in ("model", "draft_model", "mtp"):
        if shown[name] is not None:
            shown[name] = [os.path.realpath(shown[name]), *_files(Path(shown[name]))]
    return {"version": __version__, **shown}


def _files(folder: Path) -> list[list[Any]]:
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [[name, each.st_size, each.st_mtime_ns, each.st_ino] for name, each in found]


class Line:
    """A connection that carries lines of JSON."""

    def __init__(self, path: Path) -> None:
        """Connect. Raises OSError; a socket that no server listens at is removed."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(CONNECT_SECONDS)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            if isinstance(error, ConnectionRefusedError):
                path.unlink(missing_ok=True)
            raise
        self._file = self._socket.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        """Send one object. Raises OSError."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next object. Raises EngineError where the server has gone or takes longer."""
        self._socket.settimeout(seconds)
        try:
            line = self._file.readline(LINE_LIMIT)
            message: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
        except (OSError, ValueError):
            message = {}
        if not message:
            raise EngineError("the server ended while it answered", fix=["run it again", "--no-server"])
        return message

    def close(self) -> None:
        """Hang up; the server aborts what is under way."""
        self._file.close()
        self._socket.close()


def statuses(folder: Path, model: ModelFolder | None = None) -> Iterator[tuple[Line, dict[str, Any]]]:
    """A connection to each server, of one model or of all, and what it says of itself."""
    for path in sockets(folder, model):
        with suppress(OSError, EngineError):
            line = Line(path)
            try:
                line.send({"do": "status"})
                yield line, line.receive(ANSWER_SECONDS)
            finally:
                line.close()
