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
from tests.cli.serve.conftest import SLOTS, Served, connected, serving

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """A server in which two may wait, and that wants a key."""
    with serving(waiting=2, key="secret") as one:
        yield one


KEY = {"Authorization": "Bearer secret"}


def begin(served: Served, tokens: int = 3000, **fields: Any) -> http.client.HTTPConnection:
    """A stream whose head has come; what follows is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = {"messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True, "stream": True, **fields}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), KEY)
    assert connection.getresponse().status == 200
    return connection


def settle(served: Served, most: int = 0) -> float:
    """Wait until no more than `most` requests run or wait; for how long that was."""
    began = time.monotonic()
    while served.service.open > most:
        assert time.monotonic() - began < 30
        time.sleep(0.005)
    return time.monotonic() - began


def test_a_key_is_wanted(small: Served) -> None:
    for headers, status in ((None, 401), ({"Authorization": "Bearer wrong"}, 401), (KEY, 200)):
        found, answer = small.send("GET", "/v1/models", None, headers)
        assert found == status
        assert status == 200 or answer["error"]["code"] == "invalid_api_key"
    assert small.send("GET", "/v1/models", None, {"Authorization": "secret"})[0] == 401
    assert small.send("GET", "/health")[0] == 200


def test_a_full_queue_says_when_to_come_again(small: Served) -> None:
    open_ones = [begin(small) for _ in range(SLOTS + 2)]
    connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=10)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": MESSAGES}), KEY)
    response = connection.getresponse()
    assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
    assert json.loads(response.read())["error"]["type"] == "rate_limit_error"
    for one in open_ones:
        one.close()
    settle(small)
    body = {"messages": MESSAGES, "max_tokens": 2}
    assert small.send("POST", "/v1/chat/completions", body, KEY)[0] == 200


def test_leaving_frees_a_slot_within_a_round(small: Served) -> None:
    """All slots are taken by texts of thousands of tokens; one that leaves makes room at once."""
    open_ones = [begin(small) for _ in range(SLOTS)]
    waiting: list[Any] = []
    body = {"messages": MESSAGES, "max_tokens": 1}
    asking = threading.Thread(
        target=lambda: waiting.append(small.send("POST", "/v1/chat/completions", body, KEY))
    )
    asking.start()
    time.sleep(0.3)
    assert not waiting
    open_ones.pop().close()
    asking.join(5)
    assert waiting[0][0] == 200
    whole = http.client.HTTPConnection("127.0.0.1", small.port, timeout=60)
    body = {"messages": MESSAGES, "max_tokens": 3000, "ignore_eos": True}
    whole.request("POST", "/v1/chat/completions", json.dumps(body), KEY)
    while small.service.open < SLOTS:  # one leaves before its answer is whole
        time.sleep(0.005)
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
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        connection.sendall(f"{head}Authorization: Bearer secret\r\n\r\n".encode() + data)
        while small.service.open == 0:
            time.sleep(0.005)
        settle(small)
    assert small.service.counters['requests_total{reason="abort"}'] == before + 1


def test_slow_bodies_and_heads(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.3)
    with connected(small.port) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        connection.sendall(f"{head}Authorization: Bearer secret\r\n\r\n{{".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")
    with connected(small.port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: lo")
        assert connection.recv(1000) == b""
    with connected(small.port) as connection:
        assert connection.recv(1000) == b""


def test_one_fault_ends_no_other(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that the engine breaks on, though its check let it through: the others go on."""
    engine = small.service.engine
    add = engine.add

    def breaks(request: Any) -> None:
        if request.params.seed == 13:
            raise RuntimeError("a fault of one request: /root/secret")
        add(request)

    monkeypatch.setattr(engine, "add", breaks)
    with_fault = {"messages": MESSAGES, "seed": 13, "max_tokens": 4}
    other = begin(small, tokens=40)
    status, answer = small.send("POST", "/v1/chat/completions", with_fault, KEY)
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
    asked = "POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, KEY
    with ThreadPoolExecutor(SLOTS + 2) as pool:
        statuses = [answer[0] for answer in pool.map(lambda _: small.send(*asked), range(SLOTS + 2))]
    assert statuses == [200] * (SLOTS + 2) and len(used) == run.PREPARERS


def test_a_client_of_the_socket_keeps_a_server_from_being_idle() -> None:
    with serving(idle=0.3) as one:
        front: Any = SimpleNamespace(clients=1)
        one.server.warm = front, Path("x"), ""
        time.sleep(1.0)
        assert not one.server.should_exit
        front.clients = 0
        ends = time.monotonic() + 30
        while not one.server.should_exit:
            assert time.monotonic() < ends
            time.sleep(0.05)
        one.server.warm = None
