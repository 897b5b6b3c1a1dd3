"""Conversations as chat completions send them: what the suites of templates and histories are
made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

LOOKUP: Mapping[str, Any] = {
    "name": "lookup",
    "description": "Look a word up",
    "parameters": {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "limit": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["word"],
    },
}
CLOCK: Mapping[str, Any] = {
    "name": "clock",
    "description": "Tell the time",
    "parameters": {"type": "object", "properties": {}},
}
TOOLS: list[Message] = [{"type": "function", "function": function} for function in (LOOKUP, CLOCK)]


def system(text: str = "Answer in one sentence.") -> Message:
    """Return a system message."""
    return {"role": "system", "content": text}


def user(text: str = "What is a draft model?") -> Message:
    """Return a user message."""
    return {"role": "user", "content": text}


def reply(text: str = "A small model that proposes tokens.", **fields: Any) -> Message:
    """Return an assistant message."""
    return {"role": "assistant", "content": text, **fields}


def calling(*calls: tuple[str, object], text: str = "", first: int = 0, **fields: Any) -> Message:
    """Return an assistant message with calls: names and arguments, numbered from `first`.

    Ids have nine characters, as Mistral's templates want them. Arguments that are texts stay as
    they are.
    """
    written = [
        {
            "id": f"call{first + number:05}",
            "type": "function",
            "function": {"name": name, "arguments": _arguments(arguments)},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, "tool_calls": written, **fields}


def _arguments(arguments: object) -> object:
    is_object = isinstance(arguments, dict)
    return json.dumps(arguments, ensure_ascii=False) if is_object else arguments


def result(text: str = "A noun.", number: int = 0, name: str = "lookup") -> Message:
    """Return the result of the call with this number."""
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": text}


WORD = ("lookup", {"word": "draft", "limit": 2})
QUOTED = ("lookup", {"word": 'a "b" \\ <c> & é', "tags": ["x", "y z"]})
NOW: tuple[str, Mapping[str, Any]] = ("clock", {})
CODE = "Mend this:\n```python\nif a < b && c:\n\treturn '{}'\n```\n"
UNICODE = "Grüße, 世界 🙂 \u202eabc"

CONVERSATIONS: Mapping[str, Sequence[Message]] = {
    "one question": [user()],
    "a system text": [system(), user()],
    "an empty system text": [system(""), user()],
    "two turns": [system(), user(), reply(), user("Why?")],
    "four turns": [system(), user(), reply(), user("Why?"), reply("Speed."), user("How?")],
    "code": [system(), user(CODE), reply(CODE), user("Thanks")],
    "unicode": [system(UNICODE), user(UNICODE), reply(UNICODE), user(UNICODE)],
    "blanks around": [system("  A \n"), user("\n B \n"), reply(" C "), user(" D")],
    "braces": [user("{{ messages }} {% if x %} {# y #}"), reply("{{ 1 }}"), user("{}")],
    "a thought": [user(), reply(reasoning_content="Let me see.\nSo."), user("Why?")],
    "two thoughts": [
        user(),
        reply(reasoning_content="First."),
        user("Why?"),
        reply(reasoning_content="Second."),
        user("And?"),
    ],
    "a call": [user(), calling(WORD), result()],
    "a call with a text": [system(), user(), calling(WORD, text="I look."), result()],
    "a call without arguments": [user(), calling(NOW), result("10:00", name="clock")],
    "a call with quotes": [user(), calling(QUOTED), result('<b> & "c"')],
    "a result that is JSON": [user(), calling(WORD), result('{"a": [1, null], "b": "ä"}')],
    "an empty result": [user(), calling(WORD), result("")],
    "two calls": [
        user(),
        calling(WORD, NOW),
        result(),
        result("10:00", 1, "clock"),
    ],
    "calls in turn": [
        user(),
        calling(WORD),
        result(),
        calling(NOW, first=1),
        result("10:00", 1, "clock"),
    ],
    "a call, then a reply": [user(), calling(WORD), result(), reply(), user("Why?")],
    "a call behind a thought": [
        user(),
        calling(WORD, reasoning_content="I need it."),
        result(),
    ],
    "a call behind a thought, then a reply": [
        system(),
        user(),
        calling(WORD, reasoning_content="I need it."),
        result(),
        reply(reasoning_content="Found."),
        user("Why?"),
    ],
    "a call in a later turn": [user(), reply(), user("Again"), calling(WORD), result()],
}
