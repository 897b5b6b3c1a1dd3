"""Requests that mean harm or make no sense: refused in the API's form, and the next one is
answered."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from typing import Any

import pytest

from spd.conversation.fields import FieldError
from spd.server.app import ENDPOINTS
from spd.server.chat_completions import CHAT_FIELDS
from spd.server.completions import COMPLETION_FIELDS
from spd.server.errors import ApiError
from spd.server.messages import MESSAGES_FIELDS as MESSAGE
from spd.server.responses import RESPONSE_FIELDS
from tests.server.conftest import MESSAGES, Served, connected

CHAT_PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def schema(value: Any) -> dict[str, Any]:
    """Return a response format of a JSON schema."""
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    }


def user(content: Any, **fields: Any) -> dict[str, Any]:
    """Return a message."""
    return {"messages": [{"role": "user", "content": content, **fields}]}


LIMITED = {
    "temperature": (-1, True, 10**400),
    "logit_bias": ({"999999999": 1}, {"1": 2000}, {"x": 1}, {str(i): 1 for i in range(2000)}),
    "messages": ([],),
    "model": ("gpt-4",),
    "top_p": (0,),
    "top_k": (1.5,),
    "max_tokens": (0,),
    "n": (129,),
    "seed": (2**70,),
    "stop_token_ids": ([10**9],),
    "tool_choice": ("required",),
    "chat_template_kwargs": ({"tools": []},),
    "chat_template": ("{{ 1 }}",),
    "modalities": (["audio"],),
    "temprature": (0,),
}
"""Values that a field does not take."""
FIELDS: list[tuple[dict[str, Any], str | None]] = [
    *(({name: value}, name) for name, values in LIMITED.items() for value in values),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (user([{"type": "text"}]), "messages[0].content[0].text"),
    (
        user([{"type": "image_url", "image_url": {"url": "file:///etc"}}]),
        "messages[0].content[0].type",
    ),
    (user("x", tool_calls=[{}]), "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0]"),
    (user("word " * 5000), "messages"),
    (user("\ud800"), None),
    ({"temperature": math.inf}, None),
    ({"logit_bias": {"1": 10**400}}, "logit_bias.1"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"response_format": {"type": "text", "schema": {"type": "object"}}}, "response_format"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop": "x" * 300}, None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"speculative": {"spec": "magic"}}, "speculative.spec"),
    ({"speculative": {"draft_max": 99}}, "speculative.draft_max"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    *((schema(value), None) for value in ({"type": "flower"}, {"$ref": "file:///etc/passwd"})),
    (schema({"type": "string", "pattern": "(((((a*)*)*)*)*)*(b|(" * 30}), None),
    (schema({"enum": ["x" * 100] * 6000}), None),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS)
def test_wrong_fields_are_refused_by_name(
    served: Served, fields: dict[str, Any], param: str | None
) -> None:
    answer_status, answer = served.send(
        "POST", CHAT_PATH, {"messages": MESSAGES, "max_tokens": 4, **fields}
    )
    assert answer_status == (404 if "model" in fields else 400), answer
    assert answer["type"] == "error" and set(answer["error"]) == {
        "message",
        "type",
        "param",
        "code",
    }
    kind = "not_found_error" if "model" in fields else "invalid_request_error"
    assert answer["error"]["message"] and answer["error"]["type"] == kind
    assert param is None or answer["error"]["param"] == param, answer


def test_large_grammars_cost_little(served: Served) -> None:
    """They are expanded where the text comes to them."""
    for keywords in (
        {"pattern": "(a{1000}){1000}{1000}"},
        {"minLength": 10**9},
        {"maxLength": 10**9},
    ):
        served.chat(max_tokens=4, **schema({"type": "string", **keywords}))


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
    b" " * (17 << 20),
    b'{"metadata": {"a": ' + b"[" * 150 + b"]" * 150 + b"}}",
]


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_malformed_bodies_are_refused(served: Served, number: int) -> None:
    status, answer = served.send("POST", CHAT_PATH, BODIES[number])
    assert status == (413 if len(BODIES[number]) > 16 << 20 else 400) and answer["error"]["message"]


HEADS: dict[str, list[dict[str, str]]] = {
    "403": [  # names of others, and web pages
        *(
            {"Host": host}
            for host in ("evil.example", "evil.example:7373", "localhost.evil.example", "")
        ),
        *({"Host": host} for host in ("localhost@evil.example", "192.168.1.2:7373")),
        *({"Origin": origin} for origin in ("https://evil.example", "http://localhost:1", "null")),
    ],
    "400": [{"Content-Length": "x"}, {"X-Long": "x" * 40_000}],
}


@pytest.mark.parametrize("status", HEADS)
def test_hostile_heads_are_refused(served: Served, status: str) -> None:
    """And what is no HTTP."""

    def answered(data: bytes) -> str:
        with connected(served.port) as connection:
            connection.sendall(data)
            return connection.recv(65536).split(b" ", 2)[1].decode()

    for headers in HEADS[status]:
        fields = {"Host": f"localhost:{served.port}", "Content-Length": "2", **headers}
        head = "".join(f"{key}: {value}\r\n" for key, value in fields.items())
        assert answered(f"POST {CHAT_PATH} HTTP/1.1\r\n{head}\r\n{{}}".encode()) == status, headers
    for data in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\0" * 1000):
        assert answered(data) == "400"


PATHS = [
    *(
        ("GET", f"/{path}", 404)
        for path in ("../../etc/passwd", "v1/models/..%2f..%2fetc%2fpasswd", "/evil")
    ),
    ("GET", "/v1/models/%00", 404),
    ("GET", CHAT_PATH, 405),
    ("DELETE", "/v1/models", 405),
    ("POST", "/v1/embeddings", 404),
    ("POST", "/health", 405),
    ("POST", f"{CHAT_PATH}/", 404),
    ("TRACE", "/", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), PATHS)
def test_unknown_paths_and_methods_are_refused(
    served: Served, method: str, path: str, status: int
) -> None:
    answer_status, answer = served.send(method, path)
    assert answer_status == status
    assert answer["error"]["type"] == (
        "not_found_error" if status == 404 else "invalid_request_error"
    )


PROMPTS: list[Any] = [None, 3, [], [[]], [1, "x"], [10**9], ["x"] * 200]
OTHERS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        *({"prompt": prompt} for prompt in PROMPTS),
        *(
            {"prompt": "x", name: value}
            for name, value in (("suffix", "y"), ("best_of", 3), ("n", 129))
        ),
    ],
    "/tokenize": [{}, {"prompt": 3}],
    "/detokenize": [{"tokens": [token]} for token in (-1, "x", 10**9)],
}


@pytest.mark.parametrize("path", OTHERS)
def test_wrong_bodies_of_other_paths_are_refused(served: Served, path: str) -> None:
    for body in OTHERS[path]:
        status, answer = served.send("POST", path, body)
        assert status == 400 and answer["error"]["message"], body


WRONG: list[Any] = ["x", 3.5, -(10**30), True, [], [[]], [{}], {}, {"type": []}, [None]]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_reads_or_refuses_every_type(served: Served, path: str) -> None:
    """A value of any type is read, or refused as the API does it."""
    chat = {"messages": MESSAGES, "max_tokens": 3}
    bases: tuple[tuple[Any, dict[str, Any]], ...] = (
        (CHAT_FIELDS, chat),
        (COMPLETION_FIELDS, {"prompt": "x"}),
        (RESPONSE_FIELDS, {"input": "x"}),
        (MESSAGE, chat),
    )
    table, base = bases[list(ENDPOINTS).index(path)]
    for name, value in itertools.product(table, WRONG):
        with suppress(ApiError, FieldError):
            assert ENDPOINTS[path].read({**base, name: value}, served.service.settings).prompts


def test_the_server_still_answers(served: Served) -> None:
    """The hostile requests before this test have left no request behind."""
    assert served.service.open_requests == 0 and served.say() == served.say() != ""
