"""A server under load: a bounded queue, clients that leave or dawdle, keys, and faults of one request."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spd.cli.serve import http as front
from spd.cli.serve import run
from tests.cli.conftest import until
from tests.cli.serve.conftest import MESSAGES, SLOTS, Served, connected, serving


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """A server in which two may wait, and that wants a key."""
    with serving(waiting=2, key="secret") as one:
        yield one


KEY = {"Authorization": "Bearer secret"}
CHAT = "/v1/chat/completions"


def head(length: int) -> bytes:
    """The head of a request whose body is so long."""
    lines = f"POST {CHAT} HTTP/1.1", "Host: localhost", f"Content-Length: {length}"
    return "\r\n".join((*lines, "Authorization: Bearer secret", "", "")).encode()


def begin(served: Served, tokens: int = 3000, **fields: Any) -> http.client.HTTPConnection:
    """A request that is answered for long; a stream's head has come, and what follows is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = {"messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True, "stream": True, **fields}
    connection.request("POST", CHAT, json.dumps(body), KEY)
    assert not body["stream"] or connection.getresponse().status == 200
    return connection


def settle(served: Served) -> float:
    """Wait until no more requests run or wait; for how long that was."""
    began = time.monotonic()
    until(lambda: served.service.open == 0)
    return time.monotonic() - began


def test_a_key_is_wanted(small: Served) -> None:
    for key in ("Bearer wrong", "secret", None):
        found, answer = small.send("GET", "/v1/models", None, {"Authorization": key} if key else None)
        assert (found, answer["error"]["code"]) == (401, "invalid_api_key")
    assert small.send("GET", "/v1/models", None, KEY)[0] == small.send("GET", "/health")[0] == 200


def test_a_full_queue_says_when_to_come_again(small: Served) -> None:
    open_ones = [begin(small) for _ in range(SLOTS + 2)]
    response = begin(small, stream=False).getresponse()
    assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
    assert json.loads(response.read())["error"]["type"] == "rate_limit_error"
    for one in open_ones:
        one.close()
    settle(small)
    small.ask(CHAT, {"messages": MESSAGES, "max_tokens": 2}, KEY)


def test_leaving_frees_a_slot_within_a_round(small: Served) -> None:
    """All slots are taken by texts of thousands of tokens; one that leaves makes room at once."""
    open_ones = [begin(small) for _ in range(SLOTS)]
    waiting: list[Any] = []
    asked = CHAT, {"messages": MESSAGES, "max_tokens": 1}, KEY
    asking = threading.Thread(target=lambda: waiting.append(small.ask(*asked)))
    asking.start()
    time.sleep(0.3)
    assert not waiting
    open_ones.pop().close()
    asking.join(5)
    assert waiting
    whole = begin(small, stream=False)
    until(lambda: small.service.open == SLOTS)  # one leaves before its answer is whole
    for one in (*open_ones, whole):
        one.close()
    assert settle(small) < 5


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_left(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "SEND_SECONDS", 0.3)
    before = small.service.counters.get('requests_total{reason="abort"}', 0)
    body = {"messages": MESSAGES, "max_tokens": 3000, "ignore_eos": True, "stream": True, "logprobs": True}
    data = json.dumps({**body, "top_logprobs": 20}).encode()  # large events, so that buffers fill
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", small.port))
        connection.sendall(head(len(data)) + data)
        until(lambda: small.service.open)
        settle(small)
    assert small.service.counters['requests_total{reason="abort"}'] == before + 1


def test_slow_bodies_and_heads(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.3)
    for sent, said in ((head(9) + b"{", b"HTTP/1.1 408"), (b"GET / HTTP/1.1\r\nHost: lo", b""), (b"", b"")):
        with connected(small.port) as connection:
            connection.sendall(sent)
            assert connection.recv(1000)[: len(said) or 1] == said


def test_one_fault_ends_no_other(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that the engine breaks on, though its check let it through: the others go on."""
    add = small.service.engine.add

    def breaks(request: Any) -> None:
        if request.params.seed == 13:
            raise RuntimeError("a fault of one request: /root/secret")
        add(request)

    monkeypatch.setattr(small.service.engine, "add", breaks)
    other = begin(small, tokens=40)
    status, answer = small.send("POST", CHAT, {"messages": MESSAGES, "seed": 13, "max_tokens": 4}, KEY)
    assert status == 500 and answer["error"]["type"] == "server_error"
    assert "secret" not in answer["error"]["message"]
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += other.sock.recv(65536)
    assert data.count(b"data: [DONE]") == 1 and data.count(b'"finish_reason":"length"') == 1
    settle(small)


def test_many_prompts_at_once_take_few_threads(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has memory of its own that the allocator keeps: 13 MiB where it encoded a long prompt."""
    used, prepare = set[int](), small.service.prepare

    def slowly(wish: Any) -> Any:
        used.add(threading.get_ident())
        time.sleep(0.1)  # so that all the others come meanwhile
        return prepare(wish)

    monkeypatch.setattr(small.service, "prepare", slowly)
    asked = CHAT, {"messages": MESSAGES, "max_tokens": 1}, KEY
    with ThreadPoolExecutor(SLOTS + 2) as pool:
        assert all(pool.map(lambda _: small.ask(*asked), range(SLOTS + 2)))
    assert len(used) == run.PREPARERS


def test_a_client_of_the_socket_keeps_a_server_from_being_idle() -> None:
    with serving(idle=0.3) as one:
        front: Any = SimpleNamespace(clients=1)
        one.server.warm = front, Path("x"), ""
        time.sleep(1.0)
        assert not one.server.should_exit
        front.clients = 0
        until(lambda: one.server.should_exit)
        one.server.warm = None
