"""`spd serve` as a process of its own, for suites that ask it over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT

START_SECONDS = 120.0
Headers = Mapping[str, str]


def clean_environment(place: Path) -> dict[str, str]:
    """Return this process's environment with every folder that spd writes to moved to `place`."""
    names = ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HF_HOME")
    moved = {name: str(place / name.lower()) for name in names}
    for folder in moved.values():
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    return {**os.environ, **moved, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    """Return a port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A running server and a client of it."""

    port: int
    process: subprocess.Popen[bytes]

    def send(
        self, method: str, path: str, body: Any = None, *, seconds: float = 60.0
    ) -> tuple[int, Any]:
        """Return the status and the JSON (or the text) of a reply. Raises TimeoutError."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        finally:
            connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def post(self, path: str, body: Any, *, seconds: float = 60.0) -> tuple[int, Any]:
        """Return the status and the JSON of a reply to a body. Raises TimeoutError."""
        return self.send("POST", path, body, seconds=seconds)

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the process has used, all threads together."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_mib(self) -> float:
        """Return the MiB of memory that the process holds now."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024


@contextmanager
def serving(model: Path | str, place: Path, options: Sequence[str] = ()) -> Iterator[Server]:
    """Serve a model until the block ends; `place` takes the log and the folders of spd's own."""
    port = free_port()
    command = [sys.executable, "-m", "spd", "serve", str(model), "--port", str(port), *options]
    with (place / "serve.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=place, env=clean_environment(place), stdout=log, stderr=log
        )
    server = Server(port, process)
    try:
        _wait(server, place)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: Server, place: Path) -> None:
    """Wait until a server answers. Raises RuntimeError with the end of its log."""
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends and server.process.poll() is None:
        try:
            if server.send("GET", "/health", seconds=2.0)[0] == 200:
                return
        except OSError:
            time.sleep(0.05)
    log = (place / "serve.log").read_text("utf-8", "replace")
    raise RuntimeError(f"the server did not start: {log[-2000:]}")
