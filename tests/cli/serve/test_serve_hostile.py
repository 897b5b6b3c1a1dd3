"""Requests that mean harm or make no sense: refused in the API's form, and the next one is answered."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.cli.serve.conftest import Served, connected

M = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def schema(value: Any) -> dict[str, Any]:
    """A response format of a JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


FIELDS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "Hi"}, 400, "messages"),
    ({"messages": {}}, 400, "messages"),
    ({"messages": [3]}, 400, "messages[0]"),
    ({"messages": [{}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": 3, "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [3]}]}, 400, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0]"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}
            ]
        },
        400,
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "x", "path": "/etc"}]}, 400, "messages[0].path"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, 400, "messages[0].tool_calls[0]"),
    ({"model": "gpt-4"}, 404, "model"),
    ({"model": "../../etc/passwd"}, 404, "model"),
    ({"model": 3}, 400, "model"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": True}, 400, "temperature"),
    ({"temperature": 1e400}, 400, None),
    ({"temperature": math.nan}, 400, None),
    ({"temperature": math.inf}, 400, None),
    ({"temperature": 10**400}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 2}, 400, "top_p"),
    ({"top_p": []}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"top_k": 1.5}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"presence_penalty": 1000}, 400, "presence_penalty"),
    ({"frequency_penalty": {}}, 400, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -5}, 400, "max_tokens"),
    ({"max_tokens": 10**30}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
    ({"seed": "x"}, 400, "seed"),
    ({"seed": 2**70}, 400, "seed"),
    ({"n": 0}, 400, "n"),
    ({"n": 5}, 400, "n"),
    ({"n": 10**9}, 400, "n"),
    ({"stop": 3}, 400, "stop"),
    ({"stop": ["a", 3]}, 400, "stop"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"stop": "x" * 300}, 400, None),
    ({"stop_token_ids": [10**9]}, 400, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, 400, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, 400, "logit_bias"),
    ({"logit_bias": {"999999999": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"1": 10**400}}, 400, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, 400, "logit_bias"),
    ({"logprobs": 3}, 400, "logprobs"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
    ({"speculative": "fast"}, 400, "speculative"),
    ({"speculative": {"spec": "magic"}}, 400, "speculative.spec"),
    ({"speculative": {"draft_max": 99}}, 400, "speculative.draft_max"),
    ({"tools": "x"}, 400, "tools"),
    ({"tools": [3]}, 400, "tools[0]"),
    ({"tools": [{"type": "retrieval"}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, 400, "tools[1].function.name"),
    ({"tools": [TOOL] * 129}, 400, "tools"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, 400, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, 400, "tool_choice"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b", "parameters": {}}}]},
        400,
        "tools[0].function.name",
    ),
    ({"response_format": "json"}, 400, "response_format"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.name"),
    (schema({"type": "flower"}), 400, None),
    (schema({"$ref": "file:///etc/passwd"}), 400, None),
    (schema({"$ref": "http://127.0.0.1:1/x"}), 400, None),
    (schema({"type": "string", "pattern": "(((((a*)*)*)*)*)*(b|(" * 30}), 400, None),
    (schema({"enum": ["x" * 100] * 2000}), 400, None),
    ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": [1]}, 400, "chat_template_kwargs"),
    ({"lora": "/tmp/x"}, 400, "lora"),
    ({"__class__": "x"}, 400, "__class__"),
    ({"audio": {"voice": "x"}}, 400, "audio"),
    ({"modalities": ["audio"]}, 400, "modalities"),
    ({"functions": [{}]}, 400, "functions"),
    ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
]


@pytest.mark.parametrize("number", range(len(FIELDS)))
def test_fields(served: Served, number: int) -> None:
    fields, status, param = FIELDS[number]
    body = {"messages": M, "max_tokens": 4, **fields}
    found, answer = served.send("POST", "/v1/chat/completions", body)
    assert found == status, answer
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
BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"null", 400),
    (b"[]", 400),
    (b"3", 400),
    (b'{"messages": ', 400),
    (b"\xff\xfe{}", 400),
    (b'{"messages": "\xc3("}', 400),
    (b"[" * 200_000, 400),
    (DEEP, 400),
    (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400),
    (b'{"messages": [' + b"[]," * 600_000 + b"[]]}", 400),
    (b'{"seed": ' + b"9" * 100_000 + b"}", 400),
    (b'{"x": NaN}', 400),
    (b'{"messages": [' + b" " * (17 << 20) + b"]}", 413),
]


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_bodies(served: Served, number: int) -> None:
    body, status = BODIES[number]
    found, answer = served.send("POST", "/v1/chat/completions", body)
    assert found == status and answer["error"]["message"]


def test_depth_is_limited_in_fields_that_are_not_read(served: Served) -> None:
    for depth, status in ((90, 200), (150, 400)):
        inner = "[" * depth + "]" * depth
        body = f'{{"messages": {json.dumps(M)}, "max_tokens": 1, "metadata": {{"a": {inner}}}}}'
        found, answer = served.send("POST", "/v1/chat/completions", body)
        assert found == status and (status == 200 or "nested" in answer["error"]["message"])


HEADS: list[tuple[str, dict[str, str], str]] = [
    ("rebinding", {"Host": "evil.example"}, "403"),
    ("rebinding with a port", {"Host": "evil.example:7373"}, "403"),
    ("a name that begins like ours", {"Host": "localhost.evil.example"}, "403"),
    ("a user in the host", {"Host": "localhost@evil.example"}, "403"),
    ("no host", {"Host": ""}, "403"),
    ("another machine", {"Host": "192.168.1.2:7373"}, "403"),
    ("a web page", {"Origin": "https://evil.example"}, "403"),
    ("a page of another port", {"Origin": "http://localhost:1"}, "403"),
    ("a page of a file", {"Origin": "null"}, "403"),
    ("compressed", {"Content-Encoding": "gzip"}, "415"),
    ("a length that is none", {"Content-Length": "x"}, "400"),
    ("a length beyond all", {"Content-Length": "9" * 11}, "413"),
    ("a header beyond all", {"X-Long": "x" * 40_000}, "400"),
]


@pytest.mark.parametrize("name", [name for name, _, _ in HEADS])
def test_heads(served: Served, name: str) -> None:
    headers, status = next((one, two) for known, one, two in HEADS if known == name)
    fields = {"Host": f"localhost:{served.port}", "Content-Length": "2", **headers}
    head = "".join(f"{key}: {value}\r\n" for key, value in fields.items())
    with connected(served.port) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n{{}}".encode())
        assert connection.recv(65536).split(b" ", 2)[1].decode() == status


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": 3}),
        ("/v1/completions", {"prompt": [[]]}),
        ("/v1/completions", {"prompt": [1, "x"]}),
        ("/v1/completions", {"prompt": [10**9]}),
        ("/v1/completions", {"prompt": ["x"] * 200}),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}),
        ("/v1/completions", {"prompt": "x", "best_of": 3}),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": "x", "messages": []}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["x"]}),
        ("/detokenize", {"tokens": [10**9]}),
    ],
)
def test_other_paths(served: Served, path: str, body: Any) -> None:
    found, answer = served.send("POST", path, body)
    assert found == 400 and answer["error"]["message"]


def test_not_HTTP(served: Served) -> None:
    for data in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\0" * 1000):
        with connected(served.port) as connection:
            connection.sendall(data)
            assert b" 400 " in connection.recv(65536)


def test_the_server_still_answers(served: Served) -> None:
    """What came before has left nothing behind."""
    assert served.service.open == 0
    first, second = (served.chat(temperature=0)["choices"] for _ in range(2))
    assert first == second and json.dumps(first)
