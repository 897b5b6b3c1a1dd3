"""Messages and Responses: the bodies that agents send, and replies as one body and as a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spd.conversation.tools.call_check import UNKNOWN_FORM_NOTE
from spd.server import replies
from spd.server.api_request import without_lines
from spd.server.app import CHANGING_LINE
from spd.server.messages import read_messages
from spd.server.responses import read_response
from tests.server.agent_bodies import (
    CALL,
    PLAIN,
    THINKING_AND_CALLS,
    TOOL,
    TWO_CALLS,
    USER,
    blocks_message,
    body_without_thinking,
    messages_body,
    response_body,
    tool_result,
    tool_use,
    without_ids,
)
from tests.server.conftest import TEMPLATE, Served, scripted


def test_messages_and_their_stream_agree(served: Served) -> None:
    with scripted(served, THINKING_AND_CALLS, THINKING_AND_CALLS) as script:
        reply = served.ask("/v1/messages?beta=true", messages_body())
        events = served.named_events("/v1/messages", **messages_body())
        assert script.prompts[0] == script.prompts[1]
    assert reply["stop_reason"] == "tool_use" and reply["role"] == "assistant"
    usage = {"input_tokens": 5, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0}
    assert reply["usage"] == {**usage, "output_tokens": 7}
    kinds = [block["type"] for block in reply["content"]]
    assert kinds == ["thinking", "text", "tool_use", "text", "tool_use"]
    assert (
        reply["content"][0]["thinking"].strip() == "Hm."
        and reply["content"][1]["text"] == "Let me."
    )
    assert reply["content"][2]["name"] == "read" and reply["content"][2]["input"] == CALL

    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 4
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[Any] = []
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block = blocks[event["index"]]
            delta = event["delta"]
            key = delta["type"].removesuffix("_delta").replace("input", "partial")
            block[key] = block.get(key, "") + delta[key]
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    assert without_ids(blocks) == without_ids(reply["content"])
    stopped = {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["delta"] == stopped and events[-2]["usage"] == reply["usage"]


def test_a_response_and_its_stream_agree(served: Served) -> None:
    with scripted(served, THINKING_AND_CALLS, THINKING_AND_CALLS):
        reply = served.ask("/v1/responses", response_body())
        events = served.named_events("/v1/responses", **response_body())
    kinds = [item["type"] for item in reply["output"]]
    assert kinds == ["reasoning", "message", "function_call", "message", "function_call"]
    assert (
        reply["usage"]["input_tokens_details"] == {"cached_tokens": 4}
        and reply["status"] == "completed"
    )
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert json.loads(reply["output"][2]["arguments"]) == CALL
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [
        (event["type"].removeprefix("response."), event.get("output_index")) for event in events
    ]
    assert [name for name, _ in (*names[:2], names[-1])] == ["created", "in_progress", "completed"]
    text = "output_text"
    called = "function_call_arguments"
    item = [
        "output_item.added",
        "content_part.added",
        f"{text}.delta",
        f"{text}.done",
        "content_part.done",
    ]
    assert list(dict.fromkeys(n for n, index in names if index == 1)) == [*item, "output_item.done"]
    second = ["output_item.added", f"{called}.delta", f"{called}.done", "output_item.done"]
    assert [name for name, index in names if index == 2] == second
    done = [event["item"] for event in events if event["type"].endswith("output_item.done")]
    assert done == events[-1]["response"]["output"] and without_ids(done) == without_ids(
        reply["output"]
    )
    for output_item in done:
        deltas = [
            e["delta"] for e in events if "delta" in e["type"] and e["item_id"] == output_item["id"]
        ]
        text = (
            output_item["arguments"]
            if output_item["type"] == "function_call"
            else output_item["content"][0]["text"]
        )
        assert "".join(deltas) == text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_reply_says_why_it_ends(served: Served, path: str) -> None:
    """A limit, a plain end, and a call that a limit cut, which is text; a fault in the API's
    form.
    """
    name = "max_tokens" if "mess" in path else "incomplete"
    with scripted(served, TWO_CALLS[:50], reason="length"):
        reply = served.ask(path, body_without_thinking(path))
    content = reply["content"] if "mess" in path else reply["output"][0]["content"]
    assert (reply.get("stop_reason") or reply["status"], content[0]["text"]) == (
        name,
        TWO_CALLS[:50],
    )
    with scripted(served, "Well"):
        reply = served.ask(path, body_without_thinking(path))
    assert (reply.get("stop_reason") or reply["status"]) == (
        "end_turn" if "mess" in path else "completed"
    )
    with scripted(served, "Well", reason="error"):
        last = served.named_events(path, **body_without_thinking(path))[-1]
    assert last["type"] == ("error" if "mess" in path else "response.failed")
    assert (last if "mess" in path else last["response"])["error"]["message"]


NO_CALL = "<tool_call>[1]</tool_call> So."


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize(("text", "reason"), [(TWO_CALLS[8:50], "length"), (NO_CALL, "stop")])
def test_a_malformed_call_is_text_with_a_note(served, path, text, reason) -> None:
    """Whole and streamed, in every API; a reply without one has none."""
    body = body_without_thinking(path)
    with scripted(served, text, text, reason=reason):
        reply = served.ask(path, body)
        events = (
            served.stream(path, **body) if "chat" in path else served.named_events(path, **body)
        )
    with scripted(served, TWO_CALLS):
        well_formed = served.ask(path, body)
    if "chat" in path:
        reply = reply["choices"][0]
        last = events[-1]["choices"][0]
        well_formed = well_formed["choices"][0]
        content = reply["message"]["content"]
    elif "resp" in path:
        last = events[-1]["response"]
        content = reply["output"][0]["content"][0]["text"]
    else:
        last = events[-2]
        content = reply["content"][0]["text"]
    (note,) = reply["notes"]
    assert content == text and "notes" not in well_formed and last["notes"] == [note]
    assert note.startswith("what follows <tool_call> is no whole call")
    assert served.service.counters["malformed_calls_total"] >= 2


CHAT = "/v1/chat/completions"
UNKNOWN = TEMPLATE.replace(
    "<tool_call>{{ c.function | tojson }}", "<tool_call>-[{{ c.function.name }}"
)


@pytest.mark.parametrize(
    ("text", "template", "choice", "expected"),
    [
        ("Well", UNKNOWN, "auto", [UNKNOWN_FORM_NOTE]),
        (TWO_CALLS, UNKNOWN, "auto", []),
        ("{}", UNKNOWN, "required", []),
        ("Well", UNKNOWN, "none", []),
        ("Well", TEMPLATE, "auto", []),
    ],
)
def test_a_form_that_is_not_known_is_noted(served, text, template, choice, expected) -> None:
    """Calls of such a form would remain text, though the template shows a mark of another form."""
    with scripted(served, text, template=template):
        reply = served.ask(CHAT, {**body_without_thinking(CHAT), "tool_choice": choice})
    assert reply["choices"][0].get("notes", []) == expected


def test_the_demo_answers_both(served: Served) -> None:
    """The text is that of chat completions; a stop string is named; a limit beyond the context
    is fine.
    """
    text = served.say(max_tokens=24)
    reply = served.ask("/v1/messages", PLAIN)
    assert (
        reply["content"] == [{"type": "text", "text": text}]
        and reply["stop_reason"] == "max_tokens"
    )
    long = {**PLAIN, "messages": [{"role": "user", "content": "word " * 200}]}
    served.ask("/v1/messages", long)
    start, *_, end, _ = served.named_events("/v1/messages", **long)
    cached_counts = [
        usage["cache_read_input_tokens"] for usage in (start["message"]["usage"], end["usage"])
    ]
    assert cached_counts[0] == cached_counts[1] > 0, (
        "how much is cached is told when the stream begins"
    )
    reply = served.ask(
        "/v1/responses", response_body(tools=[], temperature=0, max_output_tokens=24)
    )
    assert reply["output"][0]["content"][0]["text"] == text and reply["status"] == "incomplete"
    reply = served.ask(
        "/v1/messages", {**PLAIN, "max_tokens": 32000, "stop_sequences": ["zzz", text[10:16]]}
    )
    assert reply["stop_reason"] == "stop_sequence" and reply["stop_sequence"] == text[10:16]
    assert reply["content"][0]["text"] == text[:10]


def claude_turn() -> dict[str, Any]:
    """Return a body of Claude Code."""
    exact = {"type": "text", "text": "Be exact.", "cache_control": {"type": "ephemeral"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    blocks = [thought, "Yes.", tool_use(id="c1", input=CALL, caller={})]
    turns = [
        blocks_message("Read a."),
        {"role": "system", "content": "Agents: none."},
        blocks_message(*blocks, role="assistant"),
    ]
    turns.append(
        blocks_message(tool_result([{"type": "text", "text": "A"}], tool_use_id="c1"), "Go on.")
    )
    changing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}
    ignored_fields = {"metadata": {"user_id": "u"}, "context_management": {"edits": []}}
    return messages_body(
        system=[changing, exact], messages=turns, output_config={"effort": "high"}, **ignored_fields
    )


def codex_turn() -> dict[str, Any]:
    """Return a body of Codex with the same conversation."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Read a."}], "id": "msg_1"},
        {"type": "message", "role": "developer", "content": "Agents: none."},
        {"type": "reasoning", "summary": [], "encrypted_content": "Hm."},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": json.dumps(CALL)},
        {"type": "function_call_output", "call_id": "c1", "output": "A"},
        {"type": "message", "role": "user", "content": "Go on."},
    ]
    ignored_fields = {
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "client_metadata": {"x": "y"},
    }
    return response_body(
        instructions="Be exact.", input=items, prompt_cache_key="k", **ignored_fields
    )


def test_what_agents_send_is_one_conversation(served: Served) -> None:
    """A turn of Claude Code and one of Codex become the same messages."""
    called = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": CALL}}
    thoughts = {"reasoning_content": "Hm."}
    expected = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "Read a.\n\nAgents: none."},
        {"role": "assistant", "content": "Yes.", **thoughts, "tool_calls": [called]},
        {"role": "tool", "content": "A", "tool_call_id": "c1"},
        {"role": "user", "content": "Go on."},
    ]
    with scripted(served):
        from_claude = read_messages(claude_turn(), served.service.settings)
        from_codex = read_response(codex_turn(), served.service.settings)
    from_claude = without_lines(from_claude, (CHANGING_LINE,))
    for generation in (from_claude, from_codex):
        (prompt,) = generation.prompts
        assert list(prompt.messages) == expected
        assert prompt.variables is not None and prompt.variables["enable_thinking"] is True
        sent_tools: Any = prompt.variables["tools"]
        assert sent_tools[0]["function"]["name"] == "read"
        assert generation.tools is not None and generation.tools.functions["read"]["required"] == [
            "path"
        ]
    assert from_claude.params.max_tokens == 32000


def test_lines_that_change_are_left_out_by_a_rule(served: Served) -> None:
    """Only lines of instructions are left out, in every API, as if the client had never sent
    them.
    """
    instructions = [
        "Be exact.",
        "Be exact.\nTime: 12:01\nx-anthropic-billing-header: cch=1;",
        "Time: 12:02",
    ]
    rule = {"x-spd-changing": "Date:| Time:"}
    counted = list[int]()
    turn = {"role": "user", "content": "Time: now"}
    count = "/v1/messages/count_tokens"
    with scripted(served, *["Well"] * 11) as script:
        for system in instructions:
            bodies = {
                "/v1/messages": messages_body(system=system, messages=[turn]),
                "/v1/responses": response_body(instructions=system, input=[turn]),
                "/v1/chat/completions": {"messages": [{"role": "system", "content": system}, turn]},
            }
            for path, body in bodies.items():
                served.ask(path, body, rule)
            counted.append(served.ask(count, bodies["/v1/messages"], rule)["input_tokens"])
        served.ask("/v1/messages", bodies["/v1/messages"])
        parts = blocks_message("x-anthropic-billing-header: 1", instructions[0], role="system")
        served.ask("/v1/chat/completions", {"messages": [parts, turn]})
    ids = [request.prompt_ids for request in script.requests]
    prompts = script.prompts
    assert ids[10] == ids[2], "a part is no part of the line before it"
    assert (
        ids[:3] == ids[3:6] and ids[6:9] != ids[:3] and counted == [len(ids[0])] * 2 + [len(ids[6])]
    )
    assert prompts[8].startswith("<|im_start|>system\n<|im_end|>") and "Time: now" in prompts[8]
    assert "Time: 12:02" in prompts[9], "nothing is left out unasked"


def test_namespaces_of_codex_are_flattened(served: Served) -> None:
    """Namespaces are flattened, and tools that only OpenAI can run are left out."""
    inner = {"type": "function", "name": "ask", "parameters": TOOL}
    tools = [
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "x"}},
        *({"type": "namespace", "name": name, "tools": [inner]} for name in ("team", "other")),
        {"type": "web_search", "external_web_access": False},
    ]
    call = '<tool_call>{"name": "ask", "arguments": {"path": "a"}}</tool_call>'
    with scripted(served, call + call.replace("ask", "other__ask")) as script:
        reply = served.ask("/v1/responses", body_without_thinking("/v1/responses", tools=tools))
    (text,) = script.prompts
    assert "web_search" not in text and "patch" not in text and "ask" in text
    calls = [(call["type"], call["name"], call["namespace"]) for call in reply["output"]]
    assert calls == [("function_call", "ask", "team"), ("function_call", "ask", "other")]


ALTERNATING = (
    "{% set ns = namespace(user=true) %}{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if m.role != 'system' and (m.role == 'user') != ns.user %}"
    "{{ raise_exception('roles must alternate user/assistant/user') }}{% endif %}"
    "{% set ns.user = m.role != 'user' %}{% endfor %}"
)
"""As the templates of Mistral's models begin."""


@pytest.mark.parametrize("begin", ["", ALTERNATING])
def test_a_template_whose_roles_alternate_takes_what_agents_send(
    served: Served, begin: str
) -> None:
    """A word behind a result, as of Claude Code, and two turns in a row, as OpenCode asks for a
    title.
    """
    body = messages_body(
        messages=[
            USER,
            blocks_message(tool_use(), role="assistant"),
            blocks_message(tool_result("A"), "Go on."),
        ]
    )
    chat = {"messages": [{"role": "system", "content": "Title:"}, USER, {**USER, "content": "Ho"}]}
    with scripted(served, "Well", "Well", template=begin + TEMPLATE) as script:
        served.ask("/v1/messages", body)
        served.ask("/v1/chat/completions", chat)
    end = "<|im_end|>\n"
    turn = "<|im_start|>user\n"
    done = f"<|im_start|>assistant\nDone.{end}" if begin else ""
    assert f"A{end}{done}{turn}Go on.{end}" in script.prompts[0]
    assert (f"{turn}Hi\n\nHo{end}" if begin else f"{turn}Hi{end}{turn}Ho{end}") in script.prompts[1]


def test_an_image_that_a_tool_brought_ends_no_conversation(served: Served) -> None:
    """An agent sends it again with each request; the model is told that it was left out."""
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"},
    }
    brought = tool_result([{"type": "text", "text": "red.png:"}, image, {"type": "document"}])
    parts = [
        {"type": "input_text", "text": "red.png:"},
        {"type": "input_image", "image_url": "data:"},
    ]
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    with scripted(served, "Well", "Well") as script:
        served.ask(
            "/v1/messages",
            messages_body(
                messages=[
                    USER,
                    blocks_message(tool_use(), role="assistant"),
                    blocks_message(brought),
                ]
            ),
        )
        served.ask("/v1/responses", response_body(input=[USER, call, output]))
    placeholder = "left out, for this model reads nothing but text]"
    assert f"red.png:\n[image: {placeholder}\n[document: {placeholder}" in script.prompts[0]
    assert f"[input_image: {placeholder}" in script.prompts[1]


MESSAGES_AS_JSON = "{{ messages | tojson }}"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("signs", "text", "rendered"),
    [
        ("<|tool_call>", "<|channel>thought\nHm.<channel|>Well", '"arguments": {"path": "a"}'),
        ("<|channel|>functions", f"{ANALYSIS}{FINAL}Well", '"thinking": "Hm.\\nYes."'),
        (
            "<｜tool▁calls▁begin｜> + call.arguments",
            "Hm.</think>Well",
            r'"arguments": "{\"path\": \"a\"}"',
        ),
    ],
)
@pytest.mark.parametrize("tools", [0, 1])
def test_models_that_think_in_channels_or_want_texts(served, signs, text, rendered, tools) -> None:
    """Gemma 4, gpt-oss and DeepSeek, with tools and without."""
    template = f"{{# {signs} tools #}}{MESSAGES_AS_JSON}{'<think>' if 'think>' in text else ''}"
    called = blocks_message(
        {"type": "thinking", "thinking": "Hm."}, "Yes.", tool_use(input=CALL), role="assistant"
    )
    body = messages_body(
        messages=[USER, called, blocks_message(tool_result("A"))],
        tools=messages_body()["tools"][:tools],
    )
    with scripted(served, text, template=template) as script:
        reply = served.ask("/v1/messages", body)
    assert [block[block["type"]] for block in reply["content"]] == ["Hm.", "Well"]
    assert rendered in script.prompts[0]


def test_a_stream_says_that_it_goes_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ping is sent while no event comes, so that a client that disconnects is noticed."""
    monkeypatch.setattr(replies, "PING_SECONDS", 0.0005)
    events = served.named_events("/v1/messages", **PLAIN)
    assert [event["type"] for event in events].count("ping") > 2
    events = served.named_events(
        "/v1/responses", **response_body(tools=[], temperature=0, max_output_tokens=24)
    )
    assert [event["type"] for event in events].count("response.in_progress") > 2
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    stream = served.ask("/v1/chat/completions", {**PLAIN, "stream": True})
    assert stream.count(": ping") > 2 and stream.endswith("data: [DONE]\n\n")
