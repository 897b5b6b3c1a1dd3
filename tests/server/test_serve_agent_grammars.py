"""Grammars constrain calls and formats that agents request."""

from __future__ import annotations

import dataclasses
import json

import pytest

from spd.conversation.channels import HARMONY
from spd.conversation.tools.call_forms import FORMS
from spd.conversation.tools.call_grammar import Tools
from spd.errors import UsageError
from spd.formats.folder import ModelFolder
from spd.runtime.engine.grammar import GrammarCompiler
from spd.runtime.engine.json_schema import JsonObject
from spd.runtime.engine.request import GrammarSpec
from spd.server.responses import read_response
from tests.cli.conftest import SPECIALS, write_tokenizer
from tests.server.agent_bodies import (
    TOOL,
    TWO_CALLS,
    body_without_thinking,
    response_body,
)
from tests.server.conftest import Served, is_allowed, scripted
from tests.server.test_serve_agents import (
    ANALYSIS,
    CHAT,
    FINAL,
    MESSAGES_AS_JSON,
)


def test_calls_that_no_grammar_holds_are_noted(served: Served, monkeypatch, capsys) -> None:
    """In the reply, and once on standard error."""
    monkeypatch.setattr("spd.runtime.engine.schema_text.MAX_BYTES", 1024)
    tokenizer = served.service.settings.vocabulary.need_tokenizer()
    mark_ids = {"<tool_call>": tokenizer.special_tokens["<|im_start|>"]}
    monkeypatch.setattr(tokenizer, "token_to_id", mark_ids.get)
    wide = {"type": "object", "properties": {f"property {at}": {} for at in range(100)}}
    tool = {"type": "function", "function": {"name": "read", "parameters": wide}}
    with scripted(served, TWO_CALLS, TWO_CALLS):
        replies = [
            served.ask(CHAT, {**body_without_thinking(CHAT), "tools": [tool]}) for _ in range(2)
        ]
    note = "calls of tools are not held to their schemas: "
    note += "the grammar of the tools or the format cannot be used: it is longer than 1 KiB"
    assert [reply["choices"][0]["notes"] for reply in replies] == [[note], [note]]
    assert replies[0]["choices"][0]["message"]["tool_calls"]
    assert "".join(capsys.readouterr().err.split()) == "".join(f"note: {note}".split())


def test_calls_that_may_come_are_held_where_a_grammar_can(served, monkeypatch) -> None:
    """Behind the mark's token; what no grammar can hold is not refused unless it is to be
    strict.
    """
    tokenizer = served.service.settings.vocabulary.need_tokenizer()
    mark_ids = {"<tool_call>": tokenizer.special_tokens["<|im_start|>"]}
    monkeypatch.setattr(tokenizer, "token_to_id", mark_ids.get)
    other = {**TOOL, "properties": {"path": {"$ref": "file:///etc"}}}
    turns = {
        "oneOf": [
            {"type": "string", "enum": ["all"]},
            {"type": "string", "pattern": "^[1-9][0-9]*$"},
        ]
    }
    loose = {**TOOL, "properties": {"path": {"type": "string"}, "turns": turns}}
    cases = [(TOOL, True, True), (loose, False, True), (loose, True, None), (other, False, True)]
    for schema, strict, is_constrained in (*cases, (other, True, None), (TOOL, False, False)):
        tools = [{"type": "function", "name": "read", "parameters": schema, "strict": strict}]
        if is_constrained is False:  # a grammar that is too long
            monkeypatch.setattr("spd.runtime.engine.schema_text.MAX_BYTES", 100)
        with scripted(served):
            generation = read_response(response_body(tools=tools), served.service.settings)
            assert (
                generation.tools is not None
                and generation.tools.trigger_token == mark_ids["<tool_call>"]
            )
            if is_constrained is None:
                with pytest.raises(UsageError, match="cannot be used"):
                    served.service.prepare_generation(generation)
                continue
            prepared, ((request, inside),) = served.service.prepare_generation(generation)
        assert bool(prepared.notes) == (is_constrained is False)
        grammar = request.grammar and dataclasses.replace(request.grammar, thinking=None)
        assert inside and grammar == (generation.tools.grammar if is_constrained else None)


NUMBER: JsonObject = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize("answer", ['{"a": 3}', TWO_CALLS])
def test_codex_asks_for_a_format_beside_its_tools(served: Served, answer: str) -> None:
    """`codex exec --output-schema` sends both in each request: a reply is a call, or follows the
    schema.
    """
    body = response_body(
        text={"format": {"type": "json_schema", "name": "x", "strict": True, "schema": NUMBER}}
    )
    with scripted(served, f"Hm.\n</think>\n{answer}") as script:
        last = served.ask("/v1/responses", body)["output"][-1]
    assert script.requests[0].grammar is not None and '"a"' in script.requests[0].grammar.text
    assert (
        last["content"][0]["text"].strip() == answer
        if answer[0] == "{"
        else last["type"] == "function_call"
    )


def test_gpt_oss_answers_in_a_format_through_its_channels(served, model) -> None:
    """It may think first; an answer stands in its own channel, and it or a call follows the
    schema.
    """
    body = body_without_thinking(
        "/v1/responses", tools=[], text={"format": {"type": "json_schema", "schema": NUMBER}}
    )
    final = f'{FINAL}{{"a": 3}}'
    with scripted(
        served, ANALYSIS + final, template=f"{{# <|channel|>functions #}}{MESSAGES_AS_JSON}"
    ) as script:
        reply = served.ask("/v1/responses", body)
    assert [item["content"][0]["text"] for item in reply["output"]] == ["Hm.", '{"a": 3}']
    write_tokenizer(model, (*SPECIALS, "<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
    tokenizer = ModelFolder.from_path(model).tokenizer
    requested = script.requests[0].grammar
    compiler = GrammarCompiler(tokenizer, 264)
    assert requested.kind == "lark" and "final" in requested.text
    free = Tools(
        {"read": NUMBER}, FORMS["gpt-oss"], strict=True, tokens=tokenizer.special_tokens
    ).grammar
    answer = HARMONY.schema_grammar(
        GrammarSpec("schema", json.dumps(NUMBER)), tokenizer.special_tokens
    )
    call = '<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"a": 3}'
    twice = ANALYSIS + ANALYSIS.replace("analysis", "commentary")
    for grammar, candidate, is_valid in (
        *((answer, text, True) for text in (ANALYSIS + final, final)),
        *((answer, text, False) for text in (final.replace("3", '"x"'), '{"a": 3}', ANALYSIS)),
        *((free, text, True) for text in (ANALYSIS + final.replace("3", '"x"'), twice + call)),
        *(
            (free, text, False)
            for text in (twice + call.replace("3", '"x"'), call.replace("read", "write"))
        ),
    ):
        assert (
            is_allowed(compiler, grammar, tokenizer.encode(candidate, parse_special=True))
            is is_valid
        ), candidate
