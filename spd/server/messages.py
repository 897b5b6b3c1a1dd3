"""Anthropic's Messages API: bodies of requests, and replies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spd.conversation import fields as read
from spd.conversation.fields import (
    FLAG,
    OBJECT,
    TEXT,
    array_of,
    one_of,
    open_object,
    refuse,
)
from spd.conversation.messages import join_pieces
from spd.conversation.reply import Part
from spd.conversation.sampling_fields import SAMPLING_FIELDS
from spd.conversation.tool_choice import (
    FORMAT_FIELDS,
    FUNCTION_FIELDS,
    function_name,
    function_tool,
    past_arguments,
    response_format,
)
from spd.server.api_request import (
    SPECULATIVE,
    ChatRequest,
    Generation,
    chat_generation,
    shared_fields,
)
from spd.server.errors import ApiError
from spd.server.replies import Reply, sse

if TYPE_CHECKING:
    from spd.conversation.settings import Settings

_text = open_object({"text": TEXT}, "text", text="content")
CALL = {"id": TEXT, "name": TEXT, "input": past_arguments}
_named = open_object({"tool_name": function_name}, "tool_name", tool_name="text")
_parts = read.joined_texts(
    "text", image=read.placeholder_block, document=read.placeholder_block, tool_reference=_named
)
RESULT = {"tool_use_id": TEXT, "content": _parts}
BLOCKS = {
    "text": _text,
    "thinking": open_object({"thinking": TEXT}, "thinking", thinking="reasoning_content"),
    "redacted_thinking": open_object({}),
    "tool_use": open_object(CALL, "id", "name", input="arguments"),
    "tool_result": open_object(RESULT, "tool_use_id", tool_use_id="tool_call_id"),
}
"""They become pieces of a message as `conversation` wants them."""
MESSAGE = {"role": one_of("user", "assistant", "system"), "content": read.content_blocks(BLOCKS)}
TOOL = {**FUNCTION_FIELDS, "type": one_of("custom"), "input_schema": OBJECT}
CHOICE = {
    "type": one_of("auto", "any", "tool", "none"),
    "name": TEXT,
    "disable_parallel_tool_use": FLAG,
}
THINKING = {
    "type": one_of("enabled", "disabled", "adaptive"),
    "budget_tokens": SAMPLING_FIELDS["max_tokens"],
}
PASSED_OVER = frozenset(
    {
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields of the API that ask for nothing that this server could do. Unknown ones are passed over, too."""
REFUSED = frozenset(
    {
        "container",
        "logprobs",
        "max_completion_tokens",
        "mcp_servers",
        "n",
        "response_format",
        "stop",
        "top_logprobs",
    }
)
"""Fields of this API, and of the others, that are refused by name."""
MESSAGES_FIELDS = {
    **SAMPLING_FIELDS,
    "speculative": SPECULATIVE,
    "model": TEXT,
    "messages": array_of(open_object(MESSAGE, *MESSAGE), 100_000),
    "system": read.content_blocks({"text": _text}),
    "stop_sequences": SAMPLING_FIELDS["stop"],
    "stream": FLAG,
    "tools": array_of(open_object(TOOL, "name", "input_schema", input_schema="parameters"), 1024),
    "tool_choice": open_object(CHOICE, "type"),
    "thinking": open_object(THINKING, "type"),
    "output_config": open_object({"effort": TEXT, "format": open_object(FORMAT_FIELDS, "type")}),
    **dict.fromkeys(REFUSED),
}
"""Others are passed over, for agents send new ones with each version."""
_body = open_object(MESSAGES_FIELDS, "messages", stop_sequences="stop")


def read_messages(value: Any, settings: Settings) -> Generation:
    """Return what the body of a message asks for. Raises FieldError and ApiError."""
    body = _body(value, "")
    turns = [{"role": "system", "content": body.get("system", ())}, *body["messages"]]
    pieces = ({**block, "role": turn["role"]} for turn in turns for block in turn["content"])
    messages = join_pieces(pieces)
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    if continues and (messages[-1].get("tool_calls") or not messages[-1]["content"]):
        refuse("messages", "the last one is the assistant's, and holds no text to go on from")
    choice = body.get("tool_choice", {"type": "auto"})
    kind = choice["type"]
    output = body.get("output_config", {})
    thinking = body.get("thinking", {"type": "disabled"})
    thinks = thinking["type"] != "disabled"
    can_end = settings.vocabulary.thinking_tokens is not None
    chat = ChatRequest(
        **shared_fields(body),
        messages=tuple(messages),
        tools=tuple(function_tool(tool) for tool in body.get("tools", ())),
        tool_choice={"any": "required", "tool": choice}.get(kind, kind),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
        response_format=response_format(output.get("format", {"type": "text"})),
        reasoning_effort=output.get("effort", "medium") if thinks else "none",
        continue_final_message=continues,
        thinking_budget=thinking.get("budget_tokens") if thinks and can_end else None,
    )
    return chat_generation(chat, settings)


class MessagesReply(Reply):
    """As messages: each part of a reply is a block."""

    def _message(self, content: Sequence[Any], *counts: int, **ended: Any) -> dict[str, Any]:
        head = {"id": f"msg_{self._name}", "type": "message", "role": "assistant"}
        ends = {"stop_reason": None, "stop_sequence": None, "usage": _usage(*counts), **ended}
        return {**head, "model": self._service.name, "content": content, **ends}

    def begin(self, cached: int) -> Iterator[bytes]:
        yield self._event("message_start", message=self._message([], self._size, cached, 0))
        yield self.ping()

    def ping(self) -> bytes:
        return self._event("ping")

    def _first(self, part: Part) -> Iterator[bytes]:
        yield self._event("content_block_start", index=part.index, content_block=_block(part))

    def _more(self, part: Part, text: str) -> bytes:
        called = part.kind == "call"
        kind, field = (
            ("input_json_delta", "partial_json") if called else (f"{part.kind}_delta", part.kind)
        )
        return self._event(
            "content_block_delta", index=part.index, delta={"type": kind, field: text}
        )

    def _last(self, part: Part) -> Iterator[bytes]:
        yield self._event("content_block_stop", index=part.index)

    def end(self) -> Iterator[bytes]:
        ended = {
            "delta": self._ended,
            "usage": _usage(*self._counts[:3]),
            **self._choices[0].notes_field,
        }
        yield self._event("message_delta", **ended)
        yield self._event("message_stop")

    def fail(self, error: ApiError) -> Iterator[bytes]:
        yield sse(error.body, "error")

    def whole(self) -> dict[str, Any]:
        blocks = [_block(part) for part in self._choices[0].parts]
        return self._message(
            blocks, *self._counts[:3], **self._ended, **self._choices[0].notes_field
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, **fields}, kind)

    @property
    def _ended(self) -> dict[str, Any]:
        """Why the reply ended."""
        choice = self._choices[0]
        stop = choice.stop if choice.finish_reason == "stop" else None
        reason = "stop_sequence" if stop is not None else "tool_use" if choice.calls else "end_turn"
        return {
            "stop_reason": "max_tokens" if choice.finish_reason == "length" else reason,
            "stop_sequence": stop,
        }


def _usage(prompt: int, cached: int, completion: int) -> dict[str, int]:
    usage = {"input_tokens": prompt - cached, "output_tokens": completion}
    return {**usage, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def _block(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        called: dict[str, Any] = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        with suppress(ValueError):  # cut by a limit, as the reason says
            called["input"] = json.loads(part.text)
        return called
    signed = {"signature": ""} if part.kind == "thinking" else {}
    return {"type": part.kind, part.kind: part.text, **signed}
