"""OpenAI's chat completions: bodies of requests, replies, and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from spd.conversation.fields import (
    FLAG,
    OBJECT,
    TEXT,
    any_value,
    array_of,
    integer,
    joined_texts,
    object_of,
    one_of,
    open_object,
    refuse,
)
from spd.conversation.logprobs import LogprobEntry, TokenEntry, logprob_entry
from spd.conversation.messages import ROLES
from spd.conversation.reply import PartDelta, ReplyBuilder, ToolCall, tool_call
from spd.conversation.tool_choice import (
    FORMAT_FIELDS,
    FUNCTION_FIELDS,
    past_arguments,
    response_format_grammar,
)
from spd.runtime.round.sampling_params import MAX_LOGPROBS, MAX_TOKENS
from spd.server.api_request import (
    SHARED_FIELDS,
    ChatRequest,
    Generation,
    chat_generation,
    shared_fields,
    with_one_token_limit,
)
from spd.server.errors import ApiError
from spd.server.replies import Reply, sse_event

if TYPE_CHECKING:
    from spd.conversation.settings import Settings
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Event, Json
    from spd.runtime.engine.request import TokenLogprob


def _check_message(value: Json, name: str) -> dict[str, Any]:
    """Return a message as templates read it, with text in `content`. Raises FieldError."""
    checked = _message_fields(value, name)
    message = {key: field for key, field in checked.items() if field or key == "content"}
    refusal = message.pop("refusal", "")
    if "tool_calls" in message:
        message["tool_calls"] = [{**call, "type": "function"} for call in message["tool_calls"]]
    elif "content" not in message and message["role"] not in ("assistant", "tool"):
        refuse(f"{name}.content", "expected a string", "missing_required_parameter")
    return {"content": refusal, **message, "role": ROLES[message["role"]]}


_called_function = open_object({"name": TEXT, "arguments": past_arguments}, "name")
_refusal = open_object({"refusal": TEXT}, "refusal", refusal="text")
_message_fields = open_object(
    {
        "role": one_of(*ROLES),
        "content": joined_texts("text", refusal=_refusal),
        "tool_calls": array_of(
            open_object({"id": TEXT, "function": _called_function}, "function"), 1024
        ),
        **dict.fromkeys(("name", "tool_call_id", "reasoning_content", "reasoning"), TEXT),
        "refusal": TEXT,
        **dict.fromkeys(("function_call", "audio")),
    },
    "role",
    reasoning="reasoning_content",
)
_tool = open_object(
    {"type": one_of("function"), "function": open_object(FUNCTION_FIELDS, "name")},
    "type",
    "function",
)
CHAT_FIELDS = {
    **SHARED_FIELDS,
    "messages": array_of(_check_message, 100_000),
    "max_completion_tokens": integer(1, MAX_TOKENS),
    "logprobs": FLAG,
    "top_logprobs": integer(0, MAX_LOGPROBS),
    "response_format": open_object(FORMAT_FIELDS, "type"),
    "reasoning_effort": TEXT,
    "chat_template_kwargs": OBJECT,
    "tools": array_of(_tool, 128),
    "tool_choice": any_value,
    "parallel_tool_calls": FLAG,
    "continue_final_message": FLAG,
    "add_generation_prompt": FLAG,
}
"""Fields of a body, and the check of each."""
_check_body = object_of(CHAT_FIELDS)
"""Checks and returns the body of `/v1/chat/completions`."""


def read_chat(value: Json, settings: Settings) -> Generation:
    """Return the generation that a chat completion's body requests.

    Raises FieldError and ApiError.
    """
    body = with_one_token_limit(_check_body(value, ""), "max_completion_tokens")
    shared = shared_fields(body)
    if body.get("top_logprobs") and not body.get("logprobs"):
        refuse("top_logprobs", "it needs `logprobs` to be true")
    chat = ChatRequest(
        **shared,
        logprobs=body.get("top_logprobs", 0) if body.get("logprobs") else None,
        messages=body.get("messages", ()),
        tools=body.get("tools", ()),
        tool_choice=body.get("tool_choice", "auto"),
        parallel_tool_calls=body.get("parallel_tool_calls", True),
        response_format=response_format_grammar(body.get("response_format", {"type": "text"})),
        reasoning_effort=body.get("reasoning_effort"),
        template_variables=body.get("chat_template_kwargs", {}),
        continue_final_message=body.get("continue_final_message"),
        add_generation_prompt=body.get("add_generation_prompt"),
    )
    return chat_generation(chat, settings)


LOWEST_LOGPROB = -9999.0
"""The API's number for the logarithm of zero."""


class ChatLogprob(TokenEntry):
    """A token's log-probability as chat completions and Responses write it."""

    top_logprobs: list[TokenEntry]


def finite_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[LogprobEntry]:
    """Return log-probabilities with their tokens' texts, none below `LOWEST_LOGPROB`."""
    finite = [logprob_entry(entry, tokenizer) for entry in entries]
    for entry in finite:
        entry["logprob"] = max(entry["logprob"], LOWEST_LOGPROB)
        for likely in entry["top"]:
            likely["logprob"] = max(likely["logprob"], LOWEST_LOGPROB)
    return finite


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[ChatLogprob]:
    """Return log-probabilities as chat completions and Responses write them."""
    return [
        {
            "top_logprobs": entry["top"],
            "token_id": entry["token_id"],
            "token": entry["token"],
            "bytes": entry["bytes"],
            "logprob": entry["logprob"],
        }
        for entry in finite_logprobs(entries, tokenizer)
    ]


class Delta(TypedDict, total=False):
    """Text and calls that a chunk adds to a choice."""

    content: str
    reasoning_content: str
    tool_calls: list[ToolCall]


class ChatReply(Reply):
    """A reply in the form of chat completions."""

    kind = "chat.completion"
    prefix = "chatcmpl"

    def _completion_object(
        self, choices: Sequence[Mapping[str, object]], **extra_fields: object
    ) -> dict[str, object]:
        """Return a completion, or a chunk of it in a stream."""
        is_chunk = self._request.stream and self.kind == ChatReply.kind
        kind = f"{self.kind}.chunk" if is_chunk else self.kind
        head = {"id": f"{self.prefix}-{self._id}", "object": kind, "created": self._created}
        return {**head, "model": self._service.name, "choices": choices, **extra_fields}

    def _stream_option(self, name: str) -> bool:
        """True if the body sets an option of streams."""
        return bool(self._request.stream_options.get(name))

    def _choice_chunk(self, choice: ReplyBuilder, **fields: object) -> bytes:
        """Return a chunk of the stream with the new fields of a choice."""
        choice_fields = {"index": choice.index, "logprobs": None, "finish_reason": None, **fields}
        usage: dict[str, object] = {}
        if self._stream_option("continuous_usage_stats"):
            usage = {"usage": self._usage_so_far()}
        elif self._stream_option("include_usage"):
            usage = {"usage": None}
        return sse_event(self._completion_object([choice_fields], **usage))

    def _usage_so_far(self) -> dict[str, int]:
        """Return the tokens of all choices so far."""
        total = self._prompt_tokens + self._reply_tokens
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._reply_tokens}
        return {**usage, "total_tokens": total}

    def start_chunks(self, cached: int) -> Iterator[bytes]:
        """Yield the first chunks of a stream: each choice's role; `cached` is not shown."""
        for choice in self._choices:
            yield self._choice_chunk(choice, delta={"role": "assistant", "content": ""})

    def event_chunks(
        self, choice: ReplyBuilder, event: Event, grown: Sequence[PartDelta]
    ) -> Iterator[bytes]:
        """Yield the chunks of an event; the one with the finish reason has no text: clients drop
        it.
        """
        added = self._delta_fields(choice, grown)
        if any(added.values()) or event.logprobs:
            yield self._choice_chunk(
                choice, logprobs=self._logprobs(choice, event.logprobs), **added
            )
        if event.finish_reason is not None:
            ended = {**self._delta_fields(choice, ()), **choice.notes_field}
            yield self._choice_chunk(choice, finish_reason=self._finish_reason(choice), **ended)

    def _delta_fields(self, choice: ReplyBuilder, grown: Sequence[PartDelta]) -> dict[str, object]:
        """Return the text and calls that an event added, as a field of the choice."""
        delta: Delta = {}
        for part, text, begins in grown:
            if part.kind == "call":
                call: ToolCall = tool_call(part) if begins else {"function": {}}
                call["index"] = choice.calls.index(part)
                call["function"]["arguments"] = text
                delta.setdefault("tool_calls", []).append(call)
            elif part.kind == "text":
                delta["content"] = delta.get("content", "") + text
            else:
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
        return {"delta": delta}

    def end_chunks(self) -> Iterator[bytes]:
        """Yield the last chunks of a stream: usage if it is wanted, then `[DONE]`."""
        if self._stream_option("include_usage"):
            yield sse_event(self._completion_object([], **self._statistics()))
        yield b"data: [DONE]\n\n"

    def error_chunks(self, error: ApiError) -> Iterator[bytes]:
        """Yield the chunks of an error: its body, then `[DONE]`."""
        yield sse_event(error.body)
        yield b"data: [DONE]\n\n"

    def full_body(self) -> dict[str, object]:
        """Return the body of a reply that is not streamed."""
        return self._completion_object(
            [self._choice_fields(choice) for choice in self._choices], **self._statistics()
        )

    def _choice_fields(self, choice: ReplyBuilder) -> dict[str, object]:
        """Return a complete choice."""
        logprobs = self._full_logprobs(choice)
        fields = {
            "index": choice.index,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(choice),
        }
        return {**fields, **self._reply_fields(choice), **choice.notes_field}

    def _reply_fields(self, choice: ReplyBuilder) -> dict[str, object]:
        """Return the text and calls of a complete choice, as a field of it."""
        message = {**choice.message(), "refusal": None}
        if choice.calls:
            message["content"] = message["content"] or None
        return {"message": message}

    def _finish_reason(self, choice: ReplyBuilder) -> str | None:
        """Return the API's finish reason; a call of a function that the request named is a stop."""
        tools = self._generation.tools
        is_free = tools is not None and tools.named_function is None
        if choice.finish_reason == "stop" and is_free and choice.calls:
            return "tool_calls"
        return choice.finish_reason

    def _full_logprobs(self, choice: ReplyBuilder) -> Mapping[str, object] | None:
        """Return the log-probabilities of a complete choice in the API's form."""
        return self._logprobs(choice, choice.logprobs)

    def _logprobs(
        self, choice: ReplyBuilder, entries: Sequence[TokenLogprob]
    ) -> Mapping[str, object] | None:
        """Return log-probabilities in the API's form; None if the request wants none."""
        if self._generation.params.logprobs is None:
            return None
        tokenizer = self._service.settings.vocabulary.need_tokenizer()
        return {"content": chat_logprobs(entries, tokenizer), "refusal": None}

    def _statistics(self) -> dict[str, object]:
        """Return the tokens of all choices, and the times and acceptance of the first one."""
        all_metrics = self._metrics
        plan = self._service.plan
        prompt, cached, completion, reasoning = self._token_counts
        speculation = all_metrics[0].speculative_decoding(plan.spec, plan.shape.draft_max)
        drafted = sum(metrics_of_choice.draft_n for metrics_of_choice in all_metrics)
        accepted = sum(metrics_of_choice.draft_n_accepted for metrics_of_choice in all_metrics)
        details = {
            "reasoning_tokens": reasoning,
            "draft_tokens": drafted,
            "accepted_draft_tokens": accepted,
        }
        usage: dict[str, object] = {"prompt_tokens": prompt, "completion_tokens": completion}
        usage |= {
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        usage["completion_tokens_details"] = details
        metrics = {"speculative_decoding": speculation}
        return {"usage": usage, "timings": all_metrics[0].timings(), "metrics": metrics}
