"""Requests that mean harm or make no sense: refused in the API's form, and the next one is answered."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import pytest

from spd.cli.serve.body import ApiError
from spd.cli.serve.http import READERS
from spd.cli.serve.messages import MESSAGES
from spd.cli.serve.responses import RESPONSES
from spd.cli.serve.wishes import CHAT, COMPLETION
from tests.cli.serve.conftest import Served, connected

M = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def schema(value: Any) -> dict[str, Any]:
    """A response format of a JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    """A message."""
    return {"messages": [{"role": "user", "content": content, **fields}]}


FIELDS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (user([{"type": "text"}]), "messages[0].content[0].text"),
    (user([{"type": "image_url", "image_url": {"url": "file:///etc"}}]), "messages[0].content[0].type"),
    (user("x", path="/etc"), "messages[0].path"),
    (user("x", tool_calls=[{}]), "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0]"),
    ({"model": "gpt-4"}, "model"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": math.inf}, None),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"n": 5}, "n"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop": "x" * 300}, None),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"logit_bias": {"999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"speculative": {"spec": "magic"}}, "speculative.spec"),
    ({"speculative": {"draft_max": 99}}, "speculative.draft_max"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (schema({"type": "flower"}), None),
    (schema({"$ref": "file:///etc/passwd"}), None),
    (schema({"type": "string", "pattern": "(((((a*)*)*)*)*)*(b|(" * 30}), None),
    (schema({"enum": ["x" * 100] * 2000}), None),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    (user("word " * 5000), "messages"),
    (user("\ud800"), None),
]


@pytest.mark.parametrize("number", range(len(FIELDS)))
def test_fields(served: Served, number: int) -> None:
    fields, param = FIELDS[number]
    body = {"messages": M, "max_tokens": 4, **fields}
    found, answer = served.send("POST", "/v1/chat/completions", body)
    assert found == (404 if "model" in fields else 400), answer
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
    if param is not None:
        assert answer["error"]["param"] == param, answer


@pytest.mark.parametrize(
    "wish", [{"pattern": "(a{1000}){1000}{1000}"}, {"minLength": 10**9}, {"maxLength": 10**9}]
)
def test_large_grammars_cost_little(served: Served, wish: dict[str, Any]) -> None:
    """They are expanded where the text comes to them."""
    body = {"messages": M, "max_tokens": 4, **schema({"type": "string", **wish})}
    assert served.send("POST", "/v1/chat/completions", body)[0] == 200


DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BODIES: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b"3",
    b'{"messages": ',
    b"\xff\xfe{}",
    b'{"messages": "\xc3("}',
    b"[" * 200_000,
    DEEP,
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b'{"messages": [' + b"[]," * 600_000 + b"[]]}",
    b'{"seed": ' + b"9" * 100_000 + b"}",
    b'{"x": NaN}',
    b'{"n": 1e400}',
    b'{"metadata": {"a": ' + b"[" * 150 + b"]" * 150 + b"}}",
    b" " * (17 << 20),
]


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_bodies(served: Served, number: int) -> None:
    found, answer = served.send("POST", "/v1/chat/completions", BODIES[number])
    assert found == (413 if len(BODIES[number]) > 16 << 20 else 400) and answer["error"]["message"]


HEADS: dict[str, list[dict[str, str]]] = {
    "403": [  # names of others, and web pages
        *({"Host": host} for host in ("evil.example", "evil.example:7373", "localhost.evil.example", "")),
        *({"Host": host} for host in ("localhost@evil.example", "192.168.1.2:7373")),
        *({"Origin": origin} for origin in ("https://evil.example", "http://localhost:1", "null")),
    ],
    "415": [{"Content-Encoding": "gzip"}],
    "400": [{"Content-Length": "x"}, {"X-Long": "x" * 40_000}],
    "413": [{"Content-Length": "9" * 11}],
}


@pytest.mark.parametrize("status", HEADS)
def test_heads(served: Served, status: str) -> None:
    for headers in HEADS[status]:
        fields = {"Host": f"localhost:{served.port}", "Content-Length": "2", **headers}
        head = "".join(f"{key}: {value}\r\n" for key, value in fields.items())
        with connected(served.port) as connection:
            connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n{{}}".encode())
            assert connection.recv(65536).split(b" ", 2)[1].decode() == status, headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v1/models/%00", 404),
        ("GET", "//evil", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("TRACE", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/health", 405),
        ("POST", "/v1/chat/completions/", 404),
    ],
)
def test_paths(served: Served, method: str, path: str, status: int) -> None:
    found, answer = served.send(method, path)
    assert found == status and answer["error"]["type"] == "invalid_request_error"


OTHERS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {},
        *({"prompt": prompt} for prompt in (3, [], [[]], [1, "x"], [10**9], ["x"] * 200)),
        *({"prompt": "x", **more} for more in ({"suffix": "y"}, {"best_of": 3}, {"messages": []})),
        {"prompt": "x", "echo": True},
    ],
    "/tokenize": [{}, {"prompt": 3}],
    "/detokenize": [{"tokens": [token]} for token in (-1, "x", 10**9)],
}


@pytest.mark.parametrize("path", OTHERS)
def test_other_paths(served: Served, path: str) -> None:
    for body in OTHERS[path]:
        found, answer = served.send("POST", path, body)
        assert found == 400 and answer["error"]["message"], body


def test_not_HTTP(served: Served) -> None:
    for data in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\0" * 1000):
        with connected(served.port) as connection:
            connection.sendall(data)
            assert b" 400 " in connection.recv(65536)


WRONG: list[Any] = ["x", 3.5, -(10**30), True, [], [[]], [{}], {}, {"type": []}, [None]]


@pytest.mark.parametrize("path", READERS)
def test_every_field_with_every_type(served: Served, path: str) -> None:
    """A value of any type is read, or refused as the API does it."""
    tables = (CHAT, COMPLETION, RESPONSES, MESSAGES)
    bases: list[dict[str, Any]] = [
        {"messages": M},
        {"prompt": "x"},
        {"input": "x"},
        {"messages": M, "max_tokens": 3},
    ]
    read, number = READERS[path], list(READERS).index(path)
    for name in tables[number]:
        for value in WRONG:
            with suppress(ApiError):
                assert read({**bases[number], name: value}, served.service).prompts


def test_the_server_still_answers(served: Served) -> None:
    """What came before has left nothing behind."""
    assert served.service.open == 0
    first, second = (served.chat(temperature=0)["choices"] for _ in range(2))
    assert first == second and json.dumps(first)
