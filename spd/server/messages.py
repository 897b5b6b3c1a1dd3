"""Anthropic's Messages API: bodies of requests, and replies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
    response_format_grammar,
)
from spd.server.api_request import (
    ChatRequest,
    Generation,
    chat_generation,
    check_speculative,
    shared_fields,
)
from spd.server.errors import ApiError
from spd.server.replies import Reply, TokenCounts, sse_event

if TYPE_CHECKING:
    from spd.conversation.settings import Settings
    from spd.runtime import Json

_text = open_object({"text": TEXT}, "text", text="content")
CALL_FIELDS = {"id": TEXT, "name": TEXT, "input": past_arguments}
_named = open_object({"tool_name": function_name}, "tool_name", tool_name="text")
_parts = read.joined_texts(
    "text", image=read.placeholder_block, document=read.placeholder_block, tool_reference=_named
)
RESULT_FIELDS = {"tool_use_id": TEXT, "content": _parts}
BLOCK_CHECKS = {
    "text": _text,
    "thinking": open_object({"thinking": TEXT}, "thinking", thinking="reasoning_content"),
    "redacted_thinking": open_object({}),
    "tool_use": open_object(CALL_FIELDS, "id", "name", input="arguments"),
    "tool_result": open_object(RESULT_FIELDS, "tool_use_id", tool_use_id="tool_call_id"),
}
"""Blocks become pieces of a message for `join_pieces`."""
TURN_FIELDS = {
    "role": one_of("user", "assistant", "system"),
    "content": read.content_blocks(BLOCK_CHECKS),
}
TOOL_FIELDS = {**FUNCTION_FIELDS, "type": one_of("custom"), "input_schema": OBJECT}
TOOL_CHOICE_FIELDS = {
    "type": one_of("auto", "any", "tool", "none"),
    "name": TEXT,
    "disable_parallel_tool_use": FLAG,
}
THINKING_FIELDS = {
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
"""Fields of the API that are ignored, as unknown ones are: this server has nothing to do for
them."""
REFUSED_FIELDS = frozenset(
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
    "speculative": check_speculative,
    "model": TEXT,
    "messages": array_of(open_object(TURN_FIELDS, *TURN_FIELDS), 100_000),
    "system": read.content_blocks({"text": _text}),
    "stop_sequences": SAMPLING_FIELDS["stop"],
    "stream": FLAG,
    "tools": array_of(
        open_object(TOOL_FIELDS, "name", "input_schema", input_schema="parameters"), 1024
    ),
    "tool_choice": open_object(TOOL_CHOICE_FIELDS, "type"),
    "thinking": open_object(THINKING_FIELDS, "type"),
    "output_config": open_object({"effort": TEXT, "format": open_object(FORMAT_FIELDS, "type")}),
    **dict.fromkeys(REFUSED_FIELDS),
}
"""Other fields are ignored, for agents send new ones with each version."""
_check_body = open_object(MESSAGES_FIELDS, "messages", stop_sequences="stop")
"""Checks and returns the body of `/v1/messages`."""


def read_messages(value: Json, settings: Settings) -> Generation:
    """Return the generation that the body of a message requests. Raises FieldError and ApiError."""
    body: dict[str, Any] = _check_body(value, "")
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
        response_format=response_format_grammar(output.get("format", {"type": "text"})),
        reasoning_effort=output.get("effort", "medium") if thinks else "none",
        continue_final_message=continues,
        thinking_budget=thinking.get("budget_tokens") if thinks and can_end else None,
    )
    return chat_generation(chat, settings)


class MessagesReply(Reply):
    """A reply in the form of messages: each part is a block."""

    def _message_object(
        self, content: Sequence[object], usage: Mapping[str, int], **ended: object
    ) -> dict[str, object]:
        """Return a message. ended: fields of a message that has ended."""
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._service.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            **ended,
        }

    def start_chunks(self, cached: int) -> Iterator[bytes]:
        """Yield the first chunks of a stream."""
        usage = _usage_fields(TokenCounts(self._prompt_length, cached, completion=0, reasoning=0))
        yield self._event_chunk("message_start", message=self._message_object([], usage))
        yield self.ping_chunk()

    def ping_chunk(self) -> bytes:
        """Return the chunk of a stream that shows that it goes on."""
        return self._event_chunk("ping")

    def _part_start(self, part: Part) -> Iterator[bytes]:
        """Yield the chunks at a part's start."""
        yield self._event_chunk(
            "content_block_start", index=part.index, content_block=_content_block(part)
        )

    def _part_delta(self, part: Part, text: str) -> bytes:
        """Return the chunk of a piece of a part."""
        if part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            delta = {"type": f"{part.kind}_delta", part.kind: text}
        return self._event_chunk("content_block_delta", index=part.index, delta=delta)

    def _part_end(self, part: Part) -> Iterator[bytes]:
        """Yield the chunks at a part's end."""
        yield self._event_chunk("content_block_stop", index=part.index)

    def end_chunks(self) -> Iterator[bytes]:
        """Yield the last chunks of a stream."""
        ended = {
            "delta": self._stop_fields,
            "usage": _usage_fields(self._token_counts),
            **self._choices[0].notes_field,
        }
        yield self._event_chunk("message_delta", **ended)
        yield self._event_chunk("message_stop")

    def error_chunks(self, error: ApiError) -> Iterator[bytes]:
        """Yield the chunks behind an error."""
        yield sse_event(error.body, "error")

    def full_body(self) -> dict[str, object]:
        """Return the body of a reply that is not streamed."""
        blocks = [_content_block(part) for part in self._choices[0].parts]
        usage = _usage_fields(self._token_counts)
        notes = self._choices[0].notes_field
        return self._message_object(blocks, usage, **self._stop_fields, **notes)

    def _event_chunk(self, kind: str, **fields: object) -> bytes:
        """Return the chunk of an event of a kind."""
        return sse_event({"type": kind, **fields}, kind)

    @property
    def _stop_fields(self) -> dict[str, str | None]:
        """Return the reason why the reply ended."""
        choice = self._choices[0]
        stop = choice.stop_string if choice.finish_reason == "stop" else None
        reason = "stop_sequence" if stop is not None else "tool_use" if choice.calls else "end_turn"
        return {
            "stop_reason": "max_tokens" if choice.finish_reason == "length" else reason,
            "stop_sequence": stop,
        }


def _usage_fields(counts: TokenCounts) -> dict[str, int]:
    """Return counts of tokens by the API's names."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "output_tokens": counts.completion,
        "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": 0,
    }


def _content_block(part: Part) -> dict[str, object]:
    """Return a part as a block of a message's content."""
    if part.kind == "call":
        arguments: object = {}
        with suppress(ValueError):  # cut by a limit, as the stop reason says
            arguments = json.loads(part.text)
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}
    signed = {"signature": ""} if part.kind == "thinking" else {}
    return {"type": part.kind, part.kind: part.text, **signed}
