"""A small server of OpenAI's API on loopback: its replies are words of a hash, and it may change them."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOGGLE = "draft=true/false"
"""What switches the server's speculation."""


def digest(*parts: object) -> int:
    """Return a number that these parts alone decide."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "little")


@dataclass
class FakeServer:
    """The server's behaviour, and what it has been asked."""

    change: Callable[[FakeServer, dict[str, Any], list[str]], list[str]] = field(
        default=lambda server, body, words: words
    )
    """Called with each request's body and words; returns those of the reply."""
    answer: Callable[[BaseHTTPRequestHandler], None] | None = None
    """Sends another answer to a chat completion than the API's."""
    models: list[str] = field(default_factory=lambda: ["tiny"])
    drafts: tuple[int, int] | None = (8, 5)
    """Drafted and accepted tokens of a reply with speculation on, if they are reported."""
    counters: Callable[[FakeServer], bytes] | None = None
    """Returns what `/metrics` answers, if there is such a path."""
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    """Requests at a time, now and at most."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a chat completion; it takes a millisecond, so that requests meet."""
        time.sleep(0.001)
        prompt = body["messages"][0]["content"]
        seed = body["seed"] if body["temperature"] else 0
        numbers = range(body["max_tokens"])
        words = [f" w{digest(prompt, seed, number) % 97}" for number in numbers]
        words = self.change(self, body, words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice["message"] = {"role": "assistant", "content": "".join(words)}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [logprob_entry(word) for word in words]}
        answer = {"choices": [choice], "usage": {"completion_tokens": len(words)}}
        if body.get("draft") and self.drafts:
            answer["timings"] = {"draft_n": self.drafts[0], "draft_n_accepted": self.drafts[1]}
        return answer


def logprob_entry(word: str) -> dict[str, Any]:
    """Return a token with its log-probability; beside it only " lie" is likely."""
    top = [{"token": " lie", "logprob": -0.75}, {"token": word, "logprob": -0.5}]
    return {"token": word, "bytes": list(word.encode()), "logprob": -0.5, "top_logprobs": top}


class Handler(BaseHTTPRequestHandler):
    """Answers requests as the server's `fake` says."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        """Write no log."""

    def do_GET(self) -> None:
        """List the models, or send the counters."""
        fake: FakeServer = self.server.fake  # type: ignore[attr-defined]
        if self.path == "/metrics":
            counters = fake.counters
            send(self, counters(fake) if counters else b"", 200 if counters else 404)
            return
        send_json(self, {"data": [{"id": name} for name in fake.models]})

    def do_POST(self) -> None:
        """Answer a chat completion."""
        fake: FakeServer = self.server.fake  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            fake.bodies.append(body)
            fake.running += 1
            fake.most_running = max(fake.most_running, fake.running)
        try:
            reply = fake.reply(body)
        finally:
            with fake.lock:  # before the client has its answer
                fake.running -= 1
        if fake.key is not None and self.headers.get("Authorization") != f"Bearer {fake.key}":
            send_json(self, {"error": {"message": "no such key"}}, 401)
        elif fake.answer is not None:
            fake.answer(self)
        else:
            send_json(self, reply)


def send(
    handler: BaseHTTPRequestHandler, data: bytes, status: int = 200, **headers: object
) -> None:
    """Send an answer of these bytes. headers: with underscores for hyphens."""
    handler.send_response(status)
    for name, value in {"Content_Length": len(data), **headers}.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(data)


def send_json(handler: BaseHTTPRequestHandler, answer: object, status: int = 200) -> None:
    """Send an answer as JSON."""
    send(handler, json.dumps(answer).encode(), status)


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Run the server while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients may go away
    server.fake = fake  # type: ignore[attr-defined]
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
