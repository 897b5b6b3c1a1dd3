"""Messages of a conversation as chat templates read them: text in `content`, calls as objects.

Histories come from other programs and other models. A message that a template cannot read is put
into a form that it can, so that one odd turn does not make every later request fail.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spd.conversation.channels import CHANNEL
from spd.errors import CheckpointError, UsageError
from spd.formats.json_file import parse_json
from spd.formats.thinking import make_past_turn

Message = Mapping[str, Any]
"""A message as chat templates read it: `role`, `content`, and further fields of any type."""
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""The roles of the APIs, and their names in chat templates."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that hold text, and the field that holds it."""
BLANK_LINE = "\n\n"
_JOINS_ARGUMENTS = re.compile(
    r"""(?s)(?!.*arguments['"\]]*\s*\|\s*tojson).*\+\s*[\w.'"\[\]]*arguments\b"""
)
"""A template that puts arguments into its text as they are, as DeepSeek's own do."""
_ALTERNATES = "must alternate"
_ONE_CALL = "single tool-calls"
_NINE_CHARACTERS = "length 9"
"""Texts of refusals in templates: roles alternate, one call a message, ids of nine characters."""


def read_arguments(value: object) -> object:
    """Return the arguments of a past call: an object if they are one, else the value as it was
    sent.

    value: usually JSON text; None where the call has no arguments.
    """
    if value is None:
        return {}
    if not isinstance(value, str):
        return value
    if not value.strip():
        return {}
    try:
        loaded = parse_json(value, "arguments")
    except CheckpointError:  # cut short by a limit, nested too deep, or no JSON at all
        return value
    if loaded is None:
        return {}
    return loaded if isinstance(loaded, dict) else value


def for_template(message: Message, template: str) -> dict[str, Any]:
    """Return a message with arguments of calls and thinking in the form that the template reads."""
    changed = dict(message)
    calls = changed.get("tool_calls") or ()
    if (thought := changed.get("reasoning_content")) is not None:
        content = changed.get("content")
        if thought and (content is None or isinstance(content, str)):
            changed.update(make_past_turn(thought, content or "", template))
        else:
            changed["thinking"] = thought
        if CHANNEL in template and calls and changed["content"]:
            # Such a template takes thinking or content beside a call, not both.
            changed["thinking"] += "\n" + changed.pop("content")
    if calls:
        joins = _JOINS_ARGUMENTS.match(template) is not None
        changed["tool_calls"] = [_call_for_template(call, joins) for call in calls]
    return changed


def _call_for_template(call: Message, joins_arguments: bool) -> Message:
    """Return a call with arguments in the form that the template reads."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    arguments = read_arguments(function.get("arguments"))
    if joins_arguments:
        arguments = arguments if isinstance(arguments, str) else _as_json(arguments)
    elif not isinstance(arguments, dict):
        arguments = {"arguments": arguments}  # templates walk over names and values
    return {**call, "function": {**function, "arguments": arguments}}


def _as_json(value: object) -> str:
    """Return a value as JSON text, with letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def with_system_first(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with one system message at most, which is the first.

    Those at the beginning are joined. A later one becomes a turn of the user: many templates refuse
    it there, and some leave it out without a word.
    """
    ordered: list[Message] = []
    for message in messages:
        if message["role"] != "system" or not ordered:
            ordered.append(message)
        elif len(ordered) == 1 and ordered[0]["role"] == "system":
            text = BLANK_LINE.join(filter(None, (ordered[0]["content"], message["content"])))
            ordered[0] = {**ordered[0], "content": text}
        else:
            ordered.append({**message, "role": "user"})
    return ordered


def in_template_order(messages: Sequence[Message], template: str) -> list[Message]:
    """Return the messages in an order, and with ids of calls, that the template does not refuse."""
    ordered = list(messages)
    if _ONE_CALL in template:
        ordered = _with_one_call_each(ordered)
    if _ALTERNATES in template:
        ordered = _alternating(ordered, counts_calls="tool_calls" not in template)
    if _NINE_CHARACTERS in template:
        ordered = [_with_short_ids(message) for message in ordered]
    return ordered


def _alternating(messages: Iterable[Message], *, counts_calls: bool) -> list[Message]:
    """Return messages with neighbours of one role joined, and turns added that a template expects.

    counts_calls: True if a message of calls is a turn of the assistant for the template.
    """
    ordered: list[Message] = []
    for message in messages:
        previous = ordered[-1] if ordered else None
        role = message["role"]
        previous_role = "" if previous is None else previous["role"]
        if role == previous_role == "user":
            ordered.pop()
            assert previous is not None
            message = {**message, "content": _joined(previous, message)}
        elif (
            role == previous_role == "assistant"
            and previous is not None
            and not previous.get("tool_calls")
        ):
            ordered.pop()
            message = {**previous, **message, "content": _joined(previous, message)}
        elif role == "user" and (previous_role == "tool" or _is_unanswered(previous, counts_calls)):
            ordered.append({"role": "assistant", "content": "Done."})
        elif role == "assistant" and previous_role in ("", "system"):
            ordered.append({"role": "user", "content": ""})
        ordered.append(message)
    return ordered


def _is_unanswered(previous: Message | None, counts_calls: bool) -> bool:
    """True if a message holds calls that are no turn of the assistant for the template."""
    return previous is not None and bool(previous.get("tool_calls")) and not counts_calls


def _joined(first: Message, second: Message) -> str:
    """Return the contents of two messages with a blank line between them."""
    return BLANK_LINE.join(filter(None, (first["content"], second["content"])))


def _with_one_call_each(messages: Iterable[Message]) -> list[Message]:
    """Return messages in which each call has a message of its own with its result behind it."""
    ordered: list[Message] = []
    waiting: list[Message] = []  # messages of one call each, whose results come next
    for message in messages:
        if waiting and message["role"] == "tool":
            name = message.get("tool_call_id")
            matches = (turn for turn in waiting if turn["tool_calls"][0].get("id") == name)
            call = next(matches, waiting[0])
            waiting.remove(call)
            ordered += [call, message]
            continue
        ordered += waiting
        calls = message.get("tool_calls") or ()
        waiting = [{**message, "tool_calls": [call], "content": ""} for call in calls]
        if waiting:
            waiting[0] = {**waiting[0], "content": message["content"]}
        else:
            ordered.append(message)
    return ordered + waiting


def _with_short_ids(message: Message) -> Message:
    """Return a message whose calls have ids of nine letters and digits."""
    changed = dict(message)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
    if message["role"] == "tool":
        changed["tool_call_id"] = _short_id(message.get("tool_call_id"))
    return changed


def _short_id(name: object) -> str:
    """Return an id of nine letters and digits; one that has this form stays as it is."""
    text = str(name or "")
    if re.fullmatch("[a-zA-Z0-9]{9}", text):
        return text
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:9]


def read_message(message: object, location: str, example: str) -> Message:
    """Return a message of a file with its content as one text.

    The message may have the forms of OpenAI's API: content null or missing, content in parts.
    Raises UsageError that names `location`.
    """
    if not isinstance(message, dict):
        raise UsageError(f"{location} is not an object", fix=[example])
    role = message.get("role")
    if not isinstance(role, str):
        raise UsageError(f"{location} has no text in `role`", fix=[example])
    content = message.get("content")
    if content is None and role in ("assistant", "tool"):
        content = message.get("refusal") or ""
    if isinstance(content, list):
        content = "\n".join(_text_of_part(part, location, example) for part in content)
    if not isinstance(content, str):
        raise UsageError(f"{location} has no text in `content`", fix=[example])
    if (calls := message.get("tool_calls")) is not None:
        _check_calls(calls, location, example)
    fields = {key: value for key, value in message.items() if value is not None}
    return {**fields, "role": ROLES.get(role, role), "content": content}


def _text_of_part(part: object, location: str, example: str) -> str:
    """Return the text of a content part. Raises UsageError that names `location`."""
    kind = part.get("type") if isinstance(part, dict) else None
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if isinstance(part, dict) and field is not None else None
    if not isinstance(text, str):
        message = f"{location} has a part of `content` that holds no text"
        raise UsageError(message, reason=["Images, audio and files are not read."], fix=[example])
    return text


def _check_calls(calls: object, location: str, example: str) -> None:
    """Raise UsageError that names `location` unless calls are a list of objects."""
    is_list = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    if not is_list:
        raise UsageError(f"{location} has no list of objects in `tool_calls`", fix=[example])


EXAMPLE_CHAT = '[{"role": "user", "content": "Hello"}]'
"""A valid list of messages, shown beside an error."""


def check_text(text: str, source: str) -> str:
    """Return the text as it is if it has no lone surrogates, which stand for undecodable bytes.

    source: where the text comes from. Raises UsageError that names it for any other text.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        lone = f"a lone U+{ord(text[error.start]):04X} at character {error.start}"
        raise UsageError(f"{source} is not Unicode text: {lone}", fix=["give UTF-8 text"]) from None
    return text


def check_messages(value: object, source: str) -> tuple[Message, ...]:
    """Return a JSON value as the messages of a chat, each as `read_message` reads it.

    Raises UsageError that names its source for any other value, and for text with lone surrogates.
    """
    if not isinstance(value, list) or not value:
        raise UsageError(f"{source} holds no list of messages", fix=[EXAMPLE_CHAT])
    messages: list[Message] = []
    for number, message in enumerate(value):
        location = f"{source}: message {number}"
        messages.append(read_message(message, location, EXAMPLE_CHAT))
        check_text(json.dumps(messages[-1], ensure_ascii=False), location)
    return tuple(messages)


def join_pieces(pieces: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the messages that pieces of another API's conversation make: instructions, then turns.

    A piece has a `role` with `content`, or is a thought (`reasoning_content`), a call (`id`, `name`
    and `arguments`) or a call's result (`tool_call_id`). Neighbours of one role become one message.
    A later system message becomes a part of the user's turn: many templates refuse anything else.
    """
    messages: list[dict[str, Any]] = []
    for piece in pieces:
        text = piece.get("content", "")
        if "tool_call_id" in piece:
            messages.append(
                {"role": "tool", "content": text, "tool_call_id": piece["tool_call_id"]}
            )
            continue
        is_call = "id" in piece and "name" in piece
        is_assistant = "reasoning_content" in piece or is_call
        role = "assistant" if is_assistant else ROLES[piece.get("role", "assistant")]
        if role == "system" and any(earlier["role"] != "system" for earlier in messages):
            role = "user"
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": ""})
        message = messages[-1]
        if thought := piece.get("reasoning_content"):
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        if is_call:
            function = {"name": piece["name"], "arguments": piece.get("arguments")}
            call = {"id": piece["id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        message["content"] += "\n\n" * bool(message["content"] and text) + text
    return messages
