"""Conversations as clients send them again, in the bodies of three APIs, and templates of
published kinds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
Body = dict[str, Any]
ARGUMENTS: tuple[Any, ...] = (
    '{"path": "a"}',
    "{}",
    "",
    "  ",
    '{"path": "a',
    "null",
    "[1]",
    '"text"',
    "17",
    "rm -rf /",
    '{"a": "\\ud83d"}',
    "[" * 200,
    '{"a": 1, "a": 2}',
    '{"a": NaN}',
    None,
    {"path": "a"},
    [1],
)
"""Arguments of past calls: whole, empty, cut by a limit, no object, not even JSON, an object
itself."""


@dataclass(frozen=True)
class Call:
    """A call of the assistant's; `result` is None where nothing answered it."""

    name: str
    arguments: Any
    id: str
    result: str | None


@dataclass(frozen=True)
class Turn:
    """A turn; `words` is None where it has no content."""

    role: str
    words: str | None
    thought: str = ""
    refusal: bool = False
    in_parts: bool = False
    calls: tuple[Call, ...] = field(default=())


def history(seed: int, *, calls: bool = True) -> list[Turn]:
    """Return a conversation: the same one for a seed. Its words are "w" and numbers."""
    draw = random.Random(seed)
    words = (f"w{seed}x{number}w" for number in range(1000))
    turns: list[Turn] = []
    for role in draw.choice(((), ("system",), ("developer",), ("system", "developer"))):
        turns.append(Turn(role, next(words)))
    if draw.random() < 0.1:
        turns.append(Turn("assistant", next(words)))
    for _ in range(draw.randint(1, 4)):
        for _ in range(draw.choice((1, 1, 1, 2))):
            turns.append(Turn("user", next(words), in_parts=draw.random() < 0.3))
        if draw.random() < 0.3:
            turns.append(Turn(draw.choice(("system", "developer")), next(words)))
        turns += _assistant(draw, words, calls)
    if draw.random() < 0.7 or any(turn.calls for turn in turns[-2:]):
        turns.append(Turn("user", next(words)))
    else:
        turns.append(Turn("assistant", next(words)))
    return turns


def _assistant(draw: random.Random, words: Any, calls: bool) -> list[Turn]:
    """Return a turn of one of the kinds that clients keep."""
    kind = draw.choice(("text", "text", "nothing", "thought", "refusal", "calls", "calls"))
    thought = next(words) if draw.random() < 0.4 or kind == "thought" else ""
    if kind == "calls" and calls:
        turns = tuple(
            Call(
                draw.choice(("read", "functions.read", "a b", "n" * 90)),
                draw.choice(ARGUMENTS),
                draw.choice((f"call_{draw.random()}", "abcdefghi", f"functions.read:{number}")),
                draw.choice((next(words), next(words), "", None)),
            )
            for number in range(draw.choice((1, 1, 2, 3)))
        )
        turn = Turn("assistant", draw.choice((None, "", next(words))), thought, calls=turns)
        return [turn, *([Turn("assistant", next(words))] * (draw.random() < 0.5))]
    if kind in ("nothing", "thought", "calls"):
        return [Turn("assistant", draw.choice((None, "")), thought)]
    is_refusal = kind == "refusal"
    return [Turn("assistant", next(words), thought, is_refusal, draw.random() < 0.5)]


def body_of(path: str, turns: list[Turn]) -> Body:
    """Return the body of a request about a conversation."""
    return {PATHS[0]: _chat, PATHS[1]: _responses, PATHS[2]: _messages}[path](turns)


def _chat(turns: list[Turn]) -> Body:
    messages: list[Body] = []
    for turn in turns:
        message: Body = {"role": turn.role, "content": turn.words}
        if turn.refusal and turn.in_parts:
            message["content"] = [{"type": "refusal", "refusal": turn.words}]
        elif turn.refusal:
            message |= {"content": None, "refusal": turn.words}
        elif turn.in_parts:
            message["content"] = [{"type": "text", "text": turn.words}]
        if turn.thought:
            message["reasoning_content"] = turn.thought
        if turn.calls:
            message["tool_calls"] = [_chat_call(call) for call in turn.calls]
        messages.append(message)
        for call in turn.calls:
            if call.result is not None:
                result = {"role": "tool", "tool_call_id": call.id, "content": call.result}
                messages.append(result)
    return {"messages": messages, "max_tokens": 1}


def _chat_call(call: Call) -> Body:
    function: Body = {"name": call.name}
    if call.arguments is not None:
        function["arguments"] = call.arguments
    return {"id": call.id, "type": "function", "function": function}


def _responses(turns: list[Turn]) -> Body:
    items: list[Body] = []
    for turn in turns:
        if turn.thought:
            items.append({"type": "reasoning", "summary": [], "encrypted_content": turn.thought})
        if turn.words is not None:
            kind = "output_text" if turn.role == "assistant" else "input_text"
            part = {"type": kind, "text": turn.words}
            if turn.refusal:
                part = {"type": "refusal", "refusal": turn.words}
            content = [part] if turn.in_parts or turn.refusal else turn.words
            items.append({"type": "message", "role": turn.role, "content": content})
        for call in turn.calls:
            named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            items.append({"type": "function_call", **named})
        for call in turn.calls:
            if call.result is not None:
                output = {"call_id": call.id, "output": call.result}
                items.append({"type": "function_call_output", **output})
    return {"input": items, "max_output_tokens": 1}


def _messages(turns: list[Turn]) -> Body:
    messages: list[Body] = []
    system: list[Body] = []
    for turn in turns:
        if turn.role in ("system", "developer"):
            if messages:
                messages.append({"role": "system", "content": turn.words})
            else:
                system.append({"type": "text", "text": turn.words})
            continue
        blocks: list[Body] = []
        if turn.thought:
            blocks.append({"type": "thinking", "thinking": turn.thought, "signature": ""})
        if turn.words is not None:
            blocks.append({"type": "text", "text": turn.words})
        for call in turn.calls:
            use = {"id": call.id, "name": call.name, "input": call.arguments}
            blocks.append({"type": "tool_use", **use})
        messages.append({"role": turn.role, "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": call.result}
            for call in turn.calls
            if call.result is not None
        ]
        if results:
            messages.append({"role": "user", "content": results})
    return {"messages": messages, "system": system, "max_tokens": 1}


_REPLY = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
_END = "<|im_end|>\n"


def _turns(calls: str, check: str = "", content: str = "{{ m.content }}") -> str:
    """Return a template of turns; check: what stands before each, calls: what follows its
    content.
    """
    turn = f"<|im_start|>{{{{ m.role }}}}\n{content}{calls}{_END}"
    return f"{{% for m in messages %}}{check}{turn}{{% endfor %}}{_REPLY}"


_EACH = "{% for c in m.tool_calls or [] %}"
_SYSTEM_FIRST = (
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message comes first') }}{% endif %}"
)
_ALTERNATING = (
    "{% set ns = namespace(user=true) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != ns.user %}"
    "{{ raise_exception('roles must alternate user/assistant/user') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}{% endfor %}"
)
_NINE = (
    "{% if c.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be strings with length 9!') }}{% endif %}"
)
_GEMMA = (
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ first if loop.first }}{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
)
_ONE_CALL = (
    "{% if (m.tool_calls or []) | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
)
_BOTH = (
    "{% if m.tool_calls and m.thinking and m.content %}{{ raise_exception("
    "'Cannot pass both content and thinking in an assistant message with tool calls!') }}{% endif %}"
)
_THINKS = (
    "{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}"
)
TEMPLATES = {
    "chatml": _turns(""),
    "hermes": _turns(_EACH + "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"),
    "system first, arguments walked": _turns(
        _EACH
        + "<tool_call><function={{ c.function.name }}>{% for k, v in c.function.arguments | items %}"
        "<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function></tool_call>{% endfor %}",
        _SYSTEM_FIRST,
    ),
    "mistral": _ALTERNATING
    + _turns(_EACH + _NINE + "[TOOL_CALLS]{{ c.function.name }}{% endfor %}{# tool_calls #}"),
    "llama": _turns(_EACH + "{{ c.function.arguments | tojson }}{% endfor %}", _ONE_CALL),
    "gemma": _GEMMA + _REPLY,
    "deepseek": _turns(
        _EACH
        + "{{ '<call>' + c.function.name + '\n' + c.function.arguments + '</call>' }}{% endfor %}"
    ),
    "channels": _turns(
        _EACH + "<|channel|>commentary to=functions.{{ c.function.name }}{% endfor %}",
        _BOTH,
        "{{ m.thinking }}{{ m.content }}",
    ),
    "thinking": _turns("", "", _THINKS + "{{ m.content.split('</think>')[-1].lstrip('\n') }}"),
    "joined content": _turns(
        _EACH + "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}{% endfor %}",
        _SYSTEM_FIRST,
        "{{ '\n' + m.content }}",
    ),
}
"""Templates with what published ones refuse, or fail on."""
WITHOUT_CALLS = frozenset({"gemma"})
"""Templates that have no word for a call."""
