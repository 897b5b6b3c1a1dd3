"""A server on loopback over the demo, in threads of this process, and a plain client for it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from spd.cli.commands.serve import ServeOptions
from spd.cli.serve.run import Server, listen
from spd.cli.serve.service import Service
from spd.cli.text.job import plan_settings
from spd.runtime.engine.driver import EngineThread

SLOTS = 4


@dataclass
class Served:
    """A server and how to ask it."""

    service: Service
    port: int
    server: Server

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON, or text where it is none."""
        data = body if isinstance(body, bytes | str | None) else json.dumps(body)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def chat(self, content: str = "What does os.path.join do?", **fields: Any) -> dict[str, Any]:
        """A chat completion that has to succeed."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, **fields}
        status, answer = self.send("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    def stream(self, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
        """The events of a streamed completion."""
        body = {"max_tokens": 16, **fields, "stream": True}
        if "chat" in path:
            body.setdefault("messages", [{"role": "user", "content": "What does os.path.join do?"}])
        status, text = self.send("POST", path, body)
        assert status == 200, text
        events = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


@contextmanager
def serving(*, waiting: int = 64, key: str | None = None, **options: Any) -> Iterator[Served]:
    """A server of the demo."""
    wanted = ServeOptions(concurrency=SLOTS, threads=1, api_key=key, **options)
    settings = plan_settings(wanted.as_generate())

    def load(progress: Any) -> Any:
        from spd.runtime import Engine

        return Engine(settings.config, progress=progress)

    thread = EngineThread(load, lambda: (), short=lambda error: None)
    thread.start()
    service = Service(settings, "demo", thread, waiting=waiting)
    listener = listen("127.0.0.1", 0)
    server = Server(service, wanted)
    loop = threading.Thread(target=lambda: asyncio.run(server._serve([listener])), daemon=True)
    loop.start()
    try:
        while not server.started:
            assert loop.is_alive()
            loop.join(0.01)
        yield Served(service, listener.getsockname()[1], server)
    finally:
        server.drain()
        loop.join(20)
        assert thread.close(20)
        assert not loop.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for a file's tests; it drafts however busy the machine is."""
    with serving(adaptive=False) as one:
        yield one


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """A bare connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        yield connection
