"""Anthropic's Messages API: its body as a wish, and how it tells a reply."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spd.cli.serve import body as read
from spd.cli.serve import wishes
from spd.cli.serve.body import FLAG, OBJECT, TEXT, ApiError, listed, one_of, refuse, some
from spd.cli.serve.replies import Part, Reply, sse
from spd.cli.serve.wishes import FUNCTION, SAMPLING, Wish, conversation, function, name_of, wish_of

if TYPE_CHECKING:
    from spd.cli.serve.http import Service

_text = some({"text": TEXT}, "text", text="content")
CALL = {"id": TEXT, "name": TEXT, "input": wishes.past_arguments}
_named = some({"tool_name": name_of}, "tool_name", tool_name="text")
_parts = read.texts("text", image=read.left_out, document=read.left_out, tool_reference=_named)
RESULT = {"tool_use_id": TEXT, "content": _parts}
BLOCKS = {
    "text": _text,
    "thinking": some({"thinking": TEXT}, "thinking", thinking="reasoning_content"),
    "redacted_thinking": some({}),
    "tool_use": some(CALL, "id", "name", input="arguments"),
    "tool_result": some(RESULT, "tool_use_id", tool_use_id="tool_call_id"),
}
"""They become pieces of a message as `conversation` wants them."""
MESSAGE = {"role": one_of("user", "assistant", "system"), "content": read.blocks(BLOCKS)}
TOOL = {**FUNCTION, "type": one_of("custom"), "input_schema": OBJECT}
CHOICE = {
    "type": one_of("auto", "any", "tool", "none"),
    "name": TEXT,
    "disable_parallel_tool_use": FLAG,
}
THINKING = {
    "type": one_of("enabled", "disabled", "adaptive"),
    "budget_tokens": SAMPLING["max_tokens"],
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
MESSAGES = {
    **SAMPLING,
    "speculative": wishes.SHARED["speculative"],
    "model": TEXT,
    "messages": listed(some(MESSAGE, *MESSAGE), 100_000),
    "system": read.blocks({"text": _text}),
    "stop_sequences": SAMPLING["stop"],
    "stream": FLAG,
    "tools": listed(some(TOOL, "name", "input_schema", input_schema="parameters"), 1024),
    "tool_choice": some(CHOICE, "type"),
    "thinking": some(THINKING, "type"),
    "output_config": some({"effort": TEXT, "format": some(wishes.FORMAT, "type")}),
    **dict.fromkeys(REFUSED),
}
"""Others are passed over, for agents send new ones with each version."""
_body = some(MESSAGES, "messages", stop_sequences="stop")


def read_messages(value: Any, service: Service) -> Wish:
    """A body as a wish. Raises ApiError."""
    body = _body(value, "")
    turns = [{"role": "system", "content": body.get("system", ())}, *body["messages"]]
    said = conversation(
        {**block, "role": turn["role"]} for turn in turns for block in turn["content"]
    )
    continues = bool(said) and said[-1]["role"] == "assistant"
    if continues and (said[-1].get("tool_calls") or not said[-1]["content"]):
        refuse("messages", "the last one is the assistant's, and holds no text to go on from")
    chat = {
        **body,
        "continue_final_message": continues,
        "messages": said,
        "tools": [function(tool) for tool in body.get("tools", ())],
    }
    choice = body.get("tool_choice", {"type": "auto"})
    chat["tool_choice"] = {"any": "required", "tool": choice}.get(choice["type"], choice["type"])
    chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    config, wanted = body.get("output_config", {}), body.get("thinking", {"type": "disabled"})
    chat["response_format"] = config.get("format", {"type": "text"})
    thinks = wanted["type"] != "disabled"
    chat["reasoning_effort"] = config.get("effort", "medium") if thinks else "none"
    can_end = service.settings.vocabulary.thinking_tokens is not None
    chat["think"] = wanted.get("budget_tokens") if thinks and can_end else None
    return wish_of(chat, service, MessagesReply)


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
        ended = {"delta": self._ended, "usage": _usage(*self._counts[:3]), **self._choices[0].noted}
        yield self._event("message_delta", **ended)
        yield self._event("message_stop")

    def fail(self, error: ApiError) -> Iterator[bytes]:
        yield sse(error.body, "error")

    def whole(self) -> dict[str, Any]:
        blocks = [_block(part) for part in self._choices[0].parts]
        return self._message(blocks, *self._counts[:3], **self._ended, **self._choices[0].noted)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, **fields}, kind)

    @property
    def _ended(self) -> dict[str, Any]:
        """Why the reply ended."""
        choice = self._choices[0]
        stop = choice.stop if choice.reason == "stop" else None
        reason = "stop_sequence" if stop is not None else "tool_use" if choice.calls else "end_turn"
        return {
            "stop_reason": "max_tokens" if choice.reason == "length" else reason,
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
