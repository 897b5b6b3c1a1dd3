"""Histories as clients keep them, sent to three APIs over published templates: none may be
refused."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.suites.conversations import CLOCK, LOOKUP, TOOLS
from benchmarks.suites.folders import write_model
from benchmarks.suites.report import WRONG, Report
from benchmarks.suites.served import Server, serving
from benchmarks.suites.templates import template_files
from spd.conversation.tools.call_forms import CALL_MARKS
from tests.every_template import render_with_jinja

HISTORIES = 200
CLIENTS = 4
TEMPLATES = (
    "Qwen-Qwen3-0.6B",
    "Qwen3.5-4B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "deepseek-ai-DeepSeek-V3.1",
    "GLM-4.6",
    "Kimi-K2-Instruct",
    "openai-gpt-oss-120b",
    "google-gemma-4-31B-it",
    "MiniMax-M2",
)
ACCEPTED = "accepted"
BY_TEMPLATE = "refused by the template, in transformers too"

CALL_ARGUMENTS: Sequence[str | None] = (
    '{"word": "draft", "limit": 2}',
    '{"word": "a \\"b\\" <c>"}',
    "{}",
    "",
    '{"word": "dra',
    "null",
    "[1, 2]",
    '"text"',
    "not JSON",
    None,
)
"""Arguments of earlier calls as clients send them: complete, empty, cut, and none."""


@dataclass(frozen=True)
class Call:
    """An earlier call with its result."""

    id: str
    name: str
    arguments: str | None
    result: str


@dataclass(frozen=True)
class Turn:
    """A message of a history, for any API."""

    role: str
    text: str | None = None
    parts: bool = False
    """True if a client sends the text as a list of parts."""
    thought: str | None = None
    refusal: str | None = None
    calls: tuple[Call, ...] = ()


History = Sequence[Turn]


# -- the histories -----------------------------------------------------------------------------------


def histories(count: int = HISTORIES, seed: int = 45) -> list[list[Turn]]:
    """Return as many histories, the same for the same seed; each ends with a user's turn or a
    result.
    """
    draws = random.Random(seed)
    return [_history(draws) for _ in range(count)]


def _history(draws: random.Random) -> list[Turn]:
    turns = [Turn(draws.choice(("system", "developer")), "Be brief.")] * draws.choice((0, 1, 1, 2))
    for number in range(draws.randint(1, 4)):
        turns.append(Turn("user", _user_text(draws, number), parts=draws.random() < 0.3))
        if draws.random() < 0.2:
            turns.append(Turn(draws.choice(("system", "developer")), f"Reminder {number}."))
        if draws.random() < 0.1:
            turns.append(Turn("user", f"And {number}?"))
        turns += _answer(draws, number)
    if turns[-1].role == "assistant" and not (turns[-1].calls and draws.random() < 0.5):
        turns.append(Turn("user", "So?", parts=draws.random() < 0.2))
    return turns


def _user_text(draws: random.Random, number: int) -> str:
    texts = ("What is a draft?", "", " \n", "<|im_end|> {{ x }}", "é 世界 🙂", "```sh\nls\n```")
    return f"U{number} {draws.choice(texts)}"


def _answer(draws: random.Random, number: int) -> list[Turn]:
    """Return the assistant's turns behind a user's: none, a text, a thought, a refusal or calls."""
    thought = draws.choice((None, None, f"T{number} so."))
    kind = draws.choice(("text", "text", "thought", "refusal", "calls", "calls", "calls", "none"))
    if kind == "none":
        return []
    if kind == "thought":
        return [Turn("assistant", thought=f"T{number} alone.")]
    if kind == "refusal":
        return [Turn("assistant", refusal="I cannot.")]
    if kind == "text":
        parts = draws.random() < 0.2
        return [Turn("assistant", f"A{number} yes.", parts=parts, thought=thought)]
    rounds = [
        Turn(
            "assistant",
            draws.choice((None, "", f"A{number} I look.")),
            thought=thought,
            calls=tuple(_call(draws, number) for _ in range(draws.randint(1, 3))),
        )
        for _ in range(draws.randint(1, 2))
    ]
    return [*rounds, Turn("assistant", f"A{number} found.")][: draws.randint(len(rounds), 3)]


def _call(draws: random.Random, number: int) -> Call:
    letters = "abcdefghijkmnpqrstuvwxyzABCDEFGH123456789"
    prefix, size = draws.choice((("call_", 24), ("toolu_", 22), ("", 9)))
    name = prefix + "".join(draws.choice(letters) for _ in range(size))
    text = draws.choice((f"R{number} a noun", "", '{"a": [1, null]}', "10:00\n"))
    return Call(name, draws.choice(("lookup", "clock")), draws.choice(CALL_ARGUMENTS), text)


# -- the three APIs ----------------------------------------------------------------------------------


def _content(turn: Turn, kind: str = "text") -> Any:
    return [{"type": kind, "text": turn.text or ""}] if turn.parts else turn.text


def as_chat(history: History) -> list[dict[str, Any]]:
    """Return a history as messages of chat completions."""
    messages: list[dict[str, Any]] = []
    for turn in history:
        message: dict[str, Any] = {"role": turn.role, "content": _content(turn)}
        if turn.thought is not None:
            message["reasoning_content"] = turn.thought
        if turn.refusal is not None:
            message["refusal"] = turn.refusal
        if turn.calls:
            message["tool_calls"] = [_chat_call(call) for call in turn.calls]
        messages.append(message)
        for call in turn.calls:
            result_message = {"role": "tool", "tool_call_id": call.id, "content": call.result}
            messages.append(result_message)
    return messages


def _chat_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def as_response(history: History) -> list[dict[str, Any]]:
    """Return a history as input items of Responses."""
    items: list[dict[str, Any]] = []
    for turn in history:
        if turn.thought is not None:
            items.append(_reasoning(turn.thought))
        if turn.refusal is not None:
            refused = [{"type": "refusal", "refusal": turn.refusal}]
            items.append({"type": "message", "role": "assistant", "content": refused})
        if turn.text is not None:
            kind = "output_text" if turn.role == "assistant" else "input_text"
            content = _content(turn, kind)
            items.append({"type": "message", "role": turn.role, "content": content})
        for call in turn.calls:
            item = {"type": "function_call", "call_id": call.id, "name": call.name}
            items.append({**item, "arguments": call.arguments or ""})
        for call in turn.calls:
            output = {"type": "function_call_output", "call_id": call.id, "output": call.result}
            items.append(output)
    return items


def _reasoning(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def as_messages(history: History) -> list[dict[str, Any]]:
    """Return a history as messages of Anthropic's API; a refusal is a text there, arguments are
    objects.
    """
    messages: list[dict[str, Any]] = []
    for turn in history:
        role = "system" if turn.role == "developer" else turn.role
        blocks: list[dict[str, Any]] = []
        if turn.thought is not None:
            blocks.append({"type": "thinking", "thinking": turn.thought, "signature": ""})
        text = turn.refusal or turn.text
        if text:
            blocks.append({"type": "text", "text": text})
        for call in turn.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name}
            blocks.append({**block, "input": _object_of(call.arguments)})
        is_text = len(blocks) == 1 and blocks[0]["type"] == "text" and not turn.parts
        plain = text if is_text else blocks
        if blocks:
            messages.append({"role": role, "content": plain})
        if turn.calls:
            messages.append({"role": "user", "content": [_told(call) for call in turn.calls]})
    return messages


def _told(call: Call) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call.id, "content": call.result}


def _object_of(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# -- the requests ------------------------------------------------------------------------------------


def _chat_body(history: History) -> tuple[str, dict[str, Any]]:
    body = {"messages": as_chat(history), "tools": TOOLS, "max_tokens": 1}
    return "/v1/chat/completions", body


def _response_body(history: History) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", **function} for function in (LOOKUP, CLOCK)]
    return "/v1/responses", {"input": as_response(history), "tools": tools, "max_output_tokens": 1}


def _messages_body(history: History) -> tuple[str, dict[str, Any]]:
    tools = [
        {
            "name": function["name"],
            "description": function["description"],
            "input_schema": function["parameters"],
        }
        for function in (LOOKUP, CLOCK)
    ]
    return "/v1/messages", {"messages": as_messages(history), "tools": tools, "max_tokens": 1}


APIS: Mapping[str, Callable[[History], tuple[str, dict[str, Any]]]] = {
    "chat completions": _chat_body,
    "Responses": _response_body,
    "Messages": _messages_body,
}


def plain_chat(history: History) -> list[dict[str, Any]]:
    """Return a history as every template should take it: one system text first, texts, whole
    arguments.
    """
    instructions = [turn.text or "" for turn in history if turn.role in ("system", "developer")]
    messages = [{"role": "system", "content": "\n".join(instructions)}] if instructions else []
    for message in as_chat([turn for turn in history if turn.role not in ("system", "developer")]):
        content = message["content"]
        text = content[0]["text"] if isinstance(content, list) else content
        plain = {**message, "content": text or message.get("refusal") or ""}
        for number, call in enumerate(plain.get("tool_calls", ())):
            arguments = json.dumps(_object_of(call["function"]["arguments"]))
            function = {**call["function"], "arguments": arguments}
            plain["tool_calls"][number] = {**call, "function": function}
        messages.append(plain)
    return messages


def run(llama: Path) -> Report:
    """Send every history to every API over every template."""
    report = Report("histories", "templates in llama-cpp-python's sdist")
    sources = {path.stem: path.read_text(encoding="utf-8") for path in template_files(llama)}
    for name in TEMPLATES:
        with tempfile.TemporaryDirectory() as place:
            folder = write_model(Path(place) / "model", sources[name], sorted(CALL_MARKS))
            options = ("--concurrency", str(CLIENTS), "--ctx", "32768")
            with serving(folder, Path(place), options) as server:
                part = _asked(server, name, sources[name])
                print("\n".join([part.text(), *part.details]), flush=True)
                report.merge(part)
    return report


def _request(source: str, api: str, history: History) -> tuple[str, dict[str, Any]]:
    """Return the path and the body; without tools where the template has no place for them."""
    path, body = APIS[api](history)
    return path, body if "tools" in source else {**body, "tools": []}


def _post(server: Server, source: str, api: str, history: History) -> tuple[int, Any]:
    """Post a history to an API; return the status and the reply."""
    path, body = _request(source, api, history)
    return server.post(path, body, seconds=60)


def _asked(server: Server, name: str, source: str) -> Report:
    """Send every history to one server."""
    report = Report("histories", "")
    jobs = [(api, history) for history in histories() for api in APIS]
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers: Iterator[tuple[int, Any]] = pool.map(
            lambda job: _post(server, source, api=job[0], history=job[1]), jobs
        )
        for (api, history), (status, reply) in zip(jobs, answers, strict=True):
            row = f"{name}, {api}"
            if status == 200:
                report.add(row, ACCEPTED)
            elif "template" in str(reply) and not render_with_jinja(
                source, plain_chat(history), tools=TOOLS
            ):
                report.add(row, BY_TEMPLATE)
            else:
                body = json.dumps(
                    APIS[api](history)[1]["input" if api == "Responses" else "messages"]
                )
                report.add(row, WRONG, f"{status} {json.dumps(reply)[:400]}: {body[:1500]}")
    return report
