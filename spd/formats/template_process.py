"""The parent's end of the template worker: starts it, asks it, kills it when it overruns.

A killed or dead worker is started anew by the next request. The worker ends by itself when this process
does, because its input ends.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spd.errors import EngineError
from spd.formats.json_file import shown

# The worker's own limit is CPU time, which a busy machine does not use up; this clock is for the rest.
WALL_SECONDS = 5.0
WALL_SECONDS_PER_INPUT_BYTE = 1e-6
START_SECONDS = 30.0  # generous: a loaded machine may take long to start an interpreter
REPLY_LIMIT = 1 << 30  # bytes

_BOOTSTRAP = "import sys; sys.path += sys.argv[1:]; from spd.formats.template_worker import main; main()"


class TemplateProcess:
    """One worker, asked by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Callable[[], object] | None = None

    def render(self, source: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer (see `template_worker.render`), or {"error": "limit"} when it had to be killed.

        Raises `EngineError` when the worker cannot be started.
        """
        request = json.dumps({"source": source, "variables": dict(variables)}, default=_plain).encode()
        with self._lock:
            try:
                seconds = WALL_SECONDS + WALL_SECONDS_PER_INPUT_BYTE * len(request)
                reply = _exchange(self._running(), request, seconds)
            except BaseException:  # interrupted: the answer still to come must not meet another question
                self._stop()
                raise
            if reply is None or reply.get("error") == "memory":
                self._stop()
            return reply or {"error": "limit", "message": "takes too much time or memory", "line": None}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        # -I keeps the working directory and PYTHON* variables out of the worker's imports.
        command = [sys.executable, "-I", "-c", _BOOTSTRAP, *_import_paths()]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is not for the worker
            )
        except OSError as error:
            raise EngineError(f"cannot start the chat template worker: {error.strerror or error}") from None
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        if _exchange(process, None, START_SECONDS) is None:
            self._stop()
            raise EngineError(f"cannot start the chat template worker: {shown(sys.executable)} ended at once")
        return process

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = None


def _import_paths() -> list[str]:
    """The folders from which this process imports what the worker needs."""
    specs = [importlib.util.find_spec(name) for name in ("spd.errors", "jinja2", "markupsafe")]
    files = [Path(spec.origin).resolve() for spec in specs if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(str(file.parents[1]) for file in files))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _exchange(
    process: subprocess.Popen[bytes], request: bytes | None, seconds: float
) -> dict[str, Any] | None:
    """Send a frame, wait for one; `None` when the worker died or had to be killed."""
    assert process.stdin is not None and process.stdout is not None
    decided = threading.Lock()  # whoever takes it first, the answer or the clock, has won

    def overrun() -> None:
        if decided.acquire(blocking=False):
            process.kill()

    alarm = threading.Timer(seconds, overrun)
    alarm.daemon = True
    alarm.start()
    try:
        if request is not None:
            process.stdin.write(len(request).to_bytes(4, "little") + request)
            process.stdin.flush()
        length = int.from_bytes(process.stdout.read(4), "little")
        data = process.stdout.read(length) if 0 < length <= REPLY_LIMIT else b""
        reply: dict[str, Any] = json.loads(data)
        return reply if decided.acquire(blocking=False) else None
    except (OSError, ValueError):
        return None
    finally:
        alarm.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # it held bytes that a dead worker will never read
                continue
