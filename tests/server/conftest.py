"""A server on loopback over the demo, in threads of this process, and a plain client for it."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from spd.cli.commands.serve import ServeOptions
from spd.cli.run_settings import plan_settings
from spd.cli.terminal.console import write_stderr_line
from spd.formats.chat_template import ChatTemplate
from spd.runtime.engine.driver import EngineThread
from spd.runtime.engine.grammar import GrammarCompiler, GrammarError
from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.engine.request import Event
from spd.server.run import Server, open_listener
from spd.server.service import Service
from tests.cli.conftest import model, spd_run

__all__ = ["model", "spd_run"]
"""Fixtures that tests of the command line have, too."""

SLOTS = 4
QUESTION = "What does os.path.join do?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@dataclass
class Served:
    """A server and a plain client of it."""

    service: Service
    port: int
    server: Server

    def send(
        self, method: str, path: str, body: Any = None, headers: Any = None
    ) -> tuple[int, Any]:
        """Return the status and the JSON of an answer, or its text if it is no JSON."""
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

    def ask(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        """Return the answer to a request that has to succeed."""
        status, answer = self.send("POST", path, body, headers)
        assert status == 200, answer
        return answer

    def chat(self, content: str = QUESTION, **fields: Any) -> dict[str, Any]:
        """Return a chat completion that has to succeed."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, **fields}
        return self.ask("/v1/chat/completions", body)

    def say(self, **fields: Any) -> str:
        """Return the text of the first choice of such a completion, which is greedy."""
        return self.chat(temperature=0, **fields)["choices"][0]["message"]["content"]

    def stream(self, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
        """Return the events of a streamed completion."""
        body = {"max_tokens": 16, **fields, "stream": True}
        if "chat" in path:
            body.setdefault("messages", MESSAGES)
        events = [
            line[6:] for line in self.ask(path, body).split("\n\n") if line.startswith("data: ")
        ]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def named_events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream of another API, each of which is named as it says
        itself.
        """
        stream = self.ask(path, {**body, "stream": True}).split("\n\n")
        lines = [event.split("\n") for event in stream if event]
        events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
        assert [name.removeprefix("event: ") for name, _ in lines] == [
            event["type"] for event in events
        ]
        return events


@contextmanager
def serving(*, waiting: int = 64, key: str | None = None, **options: Any) -> Iterator[Served]:
    """Yield a server of the demo."""
    serve_options = ServeOptions(concurrency=SLOTS, threads=1, api_key=key, **options)
    settings = plan_settings(serve_options.to_generate_options())

    def load(progress: Any) -> Any:
        from spd.runtime import Engine

        return Engine(settings.config, progress=progress)

    thread = EngineThread(load, lambda: (), on_out_of_memory=lambda error: None)
    thread.start()
    service = Service(settings, ["demo"], thread, waiting=waiting, report=write_stderr_line)
    listener = open_listener("127.0.0.1", 0)
    server = Server(service, serve_options.to_server_options(Path()))
    loop = threading.Thread(target=lambda: asyncio.run(server._serve([listener])), daemon=True)
    loop.start()
    try:
        while not server.started:
            assert loop.is_alive()
            loop.join(0.01)
        yield Served(service, listener.getsockname()[1], server)
    finally:
        server.start_draining()
        loop.join(20)
        assert thread.close(20)
        assert not loop.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for a file's tests; it drafts however busy the machine is."""
    with serving(adaptive=False) as server:
        yield server


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """Yield a bare connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        yield connection


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}"
)
"""A template with a place for tools, in the form of Hermes, and for thinking."""


class Scripted:
    """An engine thread that answers each request with the next text of a script, in small
    pieces.
    """

    def __init__(self, served: Served, texts: list[str], reason: str = "stop") -> None:
        self.texts = texts
        self.reason = reason
        self.requests = list[Any]()
        self.real = served.service.thread
        self._tokenizer = served.service.settings.vocabulary.need_tokenizer()

    def submit(self, request: Any, listener: Any) -> None:
        """Send the next text of the script to the listener at once."""
        self.requests.append(request)
        text = self.texts.pop(0)
        for at in range(0, len(text), 5):
            piece = text[at : at + 5]
            listener(Event(request.id, tuple(self._tokenizer.encode(piece)), piece))
        listener(Event(request.id, (), "", self.reason))

    @property
    def prompts(self) -> list[str]:
        """Return the rendered prompt of each request."""
        return [
            self._tokenizer.decode(request.prompt_ids, skip_special=False)
            for request in self.requests
        ]

    def metrics(self, name: str) -> RequestMetrics:
        """Return the same counters for any request."""
        return RequestMetrics(prompt_tokens=9, cached_tokens=4, completion_tokens=7)

    def end(self, name: str) -> None:
        """Do nothing: no request runs."""


def is_allowed(compiler: GrammarCompiler, grammar: Any, ids: list[int]) -> bool:
    """True if a grammar accepts a complete text."""
    matcher = compiler.compile(grammar, (258,))
    with suppress(GrammarError):
        for token in ids:
            matcher.accept_token(token)
        return bool(matcher.is_complete)
    return False


@contextmanager
def scripted(
    served: Served, *texts: str, reason: str = "stop", template: str = TEMPLATE
) -> Iterator[Scripted]:
    """Yield a server whose model thinks, knows tools and says these texts."""
    service = served.service
    script = Scripted(served, list(texts), reason)
    before = service.settings, service.thread
    chat_template = ChatTemplate("test", {"default": template}, {})
    vocabulary = dataclasses.replace(service.settings.vocabulary, template=chat_template)
    service.settings = dataclasses.replace(service.settings, vocabulary=vocabulary)
    service.thread = cast(EngineThread, script)
    try:
        yield script
    finally:
        service.settings, service.thread = before
