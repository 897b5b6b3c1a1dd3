"""Every field of each API is done, refused by name, or on the page's list of those that are
passed over."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from spd.server import api_request, chat_completions, completions, messages, responses
from tests.server.conftest import MESSAGES, Served
from tests.server.test_serve_openai import PAGE, python_with

DONE = "done"
REFUSED = "refused"
PASSED_OVER = "passed over"
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
Field = tuple[str, Any]
OPENAI: dict[str, Field] = {
    "metadata": (PASSED_OVER, {"a": "b"}),
    "prompt_cache_key": (PASSED_OVER, "k"),
    "prompt_cache_options": (PASSED_OVER, {"mode": "implicit"}),
    "prompt_cache_retention": (PASSED_OVER, "24h"),
    "safety_identifier": (PASSED_OVER, "u"),
    "service_tier": (PASSED_OVER, "auto"),
    "store": (PASSED_OVER, True),
    "user": (PASSED_OVER, "u"),
    "model": (DONE, "demo"),
    "temperature": (DONE, 0.5),
    "top_p": (DONE, 0.5),
    "stream": (DONE, False),
}
SAMPLED: dict[str, Field] = {
    "frequency_penalty": (DONE, 0.5),
    "presence_penalty": (DONE, 0.5),
    "logit_bias": (DONE, {"5": 1}),
    "max_tokens": (DONE, 2),
    "seed": (DONE, 1),
    "stop": (DONE, ["x"]),
}
TABLES: dict[str, dict[str, Field]] = {
    "/v1/chat/completions": OPENAI
    | SAMPLED
    | {
        "audio": (REFUSED, {"voice": "a", "format": "wav"}),
        "function_call": (REFUSED, "auto"),
        "functions": (REFUSED, [TOOL]),
        "logprobs": (DONE, True),
        "max_completion_tokens": (DONE, 2),
        "messages": (DONE, MESSAGES),
        "modalities": (REFUSED, ["text", "audio"]),
        "moderation": (REFUSED, {"model": "m"}),
        "n": (DONE, 2),
        "parallel_tool_calls": (DONE, False),
        "prediction": (PASSED_OVER, {"type": "content", "content": "x"}),
        "reasoning_effort": (DONE, "low"),
        "response_format": (DONE, SCHEMA),
        "stream_options": (REFUSED, {"include_usage": True}),  # here without `stream`
        "tool_choice": (DONE, "none"),
        "tools": (DONE, []),
        "top_logprobs": (REFUSED, 2),  # here without `logprobs`
        "verbosity": (REFUSED, "low"),
        "web_search_options": (REFUSED, {"search_context_size": "low"}),
    },
    "/v1/completions": {name: OPENAI[name] for name in ("model", "temperature", "top_p", "user")}
    | SAMPLED
    | {
        "best_of": (REFUSED, 3),
        "echo": (DONE, True),
        "logprobs": (DONE, 2),
        "n": (DONE, 2),
        "prompt": (DONE, "x"),
        "stream": (DONE, False),
        "stream_options": (REFUSED, {"include_usage": True}),
        "suffix": (REFUSED, "y"),  # of this model, which has no tokens for it
    },
    "/v1/responses": OPENAI
    | {
        "access_programs": (PASSED_OVER, {"cyber": "standard"}),
        "background": (REFUSED, True),
        "background_options": (REFUSED, {"completion_window": "2h"}),
        "context_management": (PASSED_OVER, [{"type": "compaction"}]),
        "conversation": (REFUSED, "conv_1"),
        "image": (PASSED_OVER, {"context_compression": "auto"}),
        "include": (DONE, ["message.output_text.logprobs"]),
        "input": (DONE, "x"),
        "instructions": (DONE, "x"),
        "max_output_tokens": (DONE, 2),
        "max_tool_calls": (PASSED_OVER, 3),
        "moderation": (REFUSED, {"model": "m"}),
        "parallel_tool_calls": (DONE, False),
        "previous_response_id": (REFUSED, "resp_1"),
        "prompt": (REFUSED, {"id": "p"}),
        "reasoning": (DONE, {"effort": "low", "summary": "auto"}),
        "stream_options": (PASSED_OVER, {"include_obfuscation": False}),
        "text": (DONE, {"format": {"type": "text"}, "verbosity": "low"}),
        "tool_choice": (DONE, "none"),
        "tools": (DONE, []),
        "top_logprobs": (DONE, 2),
        "truncation": (REFUSED, "auto"),
    },
    "/v1/messages": {
        "cache_control": (PASSED_OVER, {"type": "ephemeral"}),
        "container": (REFUSED, "c"),
        "context_management": (PASSED_OVER, {"edits": []}),
        "diagnostics": (PASSED_OVER, {"previous_message_id": "m"}),
        "inference_geo": (PASSED_OVER, "eu"),
        "max_tokens": (DONE, 2),
        "mcp_servers": (REFUSED, [{"url": "http://x"}]),
        "messages": (DONE, MESSAGES),
        "metadata": (PASSED_OVER, {"user_id": "u"}),
        "model": (DONE, "demo"),
        "output_config": (DONE, {"effort": "low"}),
        "service_tier": (PASSED_OVER, "auto"),
        "speed": (PASSED_OVER, "fast"),
        "stop_sequences": (DONE, ["x"]),
        "stream": (DONE, False),
        "system": (DONE, "x"),
        "temperature": (DONE, 0.5),
        "thinking": (DONE, {"type": "disabled", "display": "omitted"}),
        "tool_choice": (DONE, {"type": "none"}),
        "tools": (DONE, []),
        "top_k": (DONE, 5),
        "top_p": (DONE, 0.5),
        "user_profile_id": (PASSED_OVER, "u"),
        "workspace_id": (PASSED_OVER, "w"),
    },
}
"""Each field with a value, as the official clients of July 2026 know them, and what is made of
it."""
READ: dict[str, tuple[Any, frozenset[str]]] = {
    "/v1/chat/completions": (chat_completions.CHAT_FIELDS, api_request.PASSED_OVER),
    "/v1/completions": (completions.COMPLETION_FIELDS, api_request.PASSED_OVER),
    "/v1/responses": (responses.RESPONSE_FIELDS, responses.PASSED_OVER),
    "/v1/messages": (messages.MESSAGES_FIELDS, messages.PASSED_OVER),
}
LISTED = PAGE[PAGE.index("**Passed over,**") : PAGE.index("**Refused, with")]


@pytest.mark.parametrize("path", TABLES)
def test_every_field_is_handled_as_listed(served: Served, path: str) -> None:
    chat: dict[str, object] = {"messages": MESSAGES, "max_tokens": 2}
    base = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(path, chat)
    table, passed_over = READ[path]
    for name, (handling, value) in TABLES[path].items():
        status, answer = served.send("POST", path, {**base, name: value})
        assert status == (400 if handling == REFUSED else 200), (name, answer)
        if handling == REFUSED:
            assert answer["error"]["param"] == name or f"`{name}`" in PAGE, (name, answer)
            assert name in answer["error"]["message"], answer
        assert (handling == PASSED_OVER) == (name in passed_over), name
        assert handling != DONE or table.get(name) is not None, name
    assert {name for name in passed_over if f"`{name}`" not in LISTED} == set()


@pytest.mark.openai
def test_the_tables_hold_what_the_official_clients_know() -> None:
    code = """
import json
from openai.types.chat import completion_create_params as chat
from openai.types import completion_create_params as completion
from openai.types.responses import response_create_params as response
from anthropic.types import message_create_params as message
kinds = {"/v1/chat/completions": chat.CompletionCreateParamsBase,
    "/v1/completions": completion.CompletionCreateParamsBase,
    "/v1/responses": response.ResponseCreateParamsBase,
    "/v1/messages": message.MessageCreateParamsBase}
print(json.dumps({path: [*kind.__annotations__] for path, kind in kinds.items()}))
"""
    command = [python_with("anthropic"), "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    for path, names in json.loads(ran.stdout).items():
        assert set(names) <= TABLES[path].keys(), path


def test_responses_have_log_probabilities(served: Served) -> None:
    """Those of the text, whole and streamed; none where none are asked for."""
    fields = {"input": MESSAGES[0]["content"], "temperature": 0, "max_output_tokens": 12}
    chat = served.chat(temperature=0, max_tokens=12, logprobs=True, top_logprobs=2)
    expected = chat["choices"][0]["logprobs"]["content"]
    for logprob_fields in (
        {"top_logprobs": 2},
        {"top_logprobs": 2, "include": [responses.LOGPROBS_VALUE]},
    ):
        reply = served.ask("/v1/responses", {**fields, **logprob_fields})
        (content,) = reply["output"][0]["content"]
        assert content["logprobs"] == expected
        assert "".join(one["token"] for one in content["logprobs"]) == content["text"]
        events = served.named_events("/v1/responses", **fields, **logprob_fields)
        deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
        assert [entry for delta in deltas for entry in delta] == expected
        (done,) = (e for e in events if e["type"] == "response.output_text.done")
        assert done["logprobs"] == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
        assert done["logprobs"] == expected
    body = {**fields, "include": [responses.LOGPROBS_VALUE]}
    (content,) = served.ask("/v1/responses", body)["output"][0]["content"]
    assert [entry["top_logprobs"] for entry in content["logprobs"]] == [[]] * 12
    (content,) = served.ask("/v1/responses", fields)["output"][0]["content"]
    assert content["logprobs"] == []
    status, answer = served.send("POST", "/v1/responses", {**fields, "include": ["logprobs"]})
    assert status == 400 and answer["error"]["param"] == "include[0]"


def test_errors_name_fields_and_no_flags(served: Served) -> None:
    """Errors of the engine and of the tokenizer do so, too."""
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "flower"}}}
    bodies = [
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": form}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logit_bias": {"77": -2000}}),
        ("/v1/completions", {"prompt": [10**6]}),
        ("/v1/completions", {"prompt": "x" * 10**6}),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}),
    ]
    for path, body in bodies:
        status, answer = served.send("POST", path, body)
        message = answer["error"]["message"]
        assert status == 400 and not re.search(r"(?<!\w)--\w", message), message
    path, body = bodies[1]
    assert "77" in served.send("POST", path, body)[1]["error"]["message"]
