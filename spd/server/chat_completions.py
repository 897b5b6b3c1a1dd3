"""OpenAI's chat completions: bodies of requests, replies, and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spd.conversation.fields import (
    FLAG,
    OBJECT,
    TEXT,
    any_value,
    array_of,
    integer,
    joined_texts,
    one_of,
    open_object,
    refuse,
    strict_object,
)
from spd.conversation.logprobs import LogprobEntry, TokenEntry, logprob_entry
from spd.conversation.messages import ROLES
from spd.conversation.reply import PartDelta, ReplyBuilder, tool_call
from spd.conversation.tool_choice import (
    FORMAT_FIELDS,
    FUNCTION_FIELDS,
    past_arguments,
    response_format,
)
from spd.runtime.round.sampling_params import MAX_LOGPROBS, MAX_TOKENS
from spd.server.api_request import (
    SHARED_FIELDS,
    ChatRequest,
    Generation,
    chat_generation,
    shared_fields,
    with_one_limit,
)
from spd.server.errors import ApiError
from spd.server.replies import Reply, sse

if TYPE_CHECKING:
    from spd.conversation.settings import Settings
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Event
    from spd.runtime.engine.request import TokenLogprob


def _message(value: Any, name: str) -> dict[str, Any]:
    """Return a message with text in `content`. Raises FieldError."""
    checked = _message_fields(value, name)
    message = {key: one for key, one in checked.items() if one or key == "content"}
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
    "messages": array_of(_message, 100_000),
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
_chat = strict_object(CHAT_FIELDS)


def read_chat(value: Any, settings: Settings) -> Generation:
    """Return what a chat completion's body asks for. Raises FieldError and ApiError."""
    body = with_one_limit(_chat(value, ""), "max_completion_tokens")
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
        response_format=response_format(body.get("response_format", {"type": "text"})),
        reasoning_effort=body.get("reasoning_effort"),
        template_variables=body.get("chat_template_kwargs", {}),
        continue_final_message=body.get("continue_final_message"),
        add_generation_prompt=body.get("add_generation_prompt"),
    )
    return chat_generation(chat, settings)


LOWEST_LOGPROB = -9999.0
"""The API's word for the logarithm of nothing."""


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


class ChatReply(Reply):
    """As chat completions."""

    kind = "chat.completion"
    prefix = "chatcmpl"

    def _object(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        is_chunk = self._request.stream and self.kind == ChatReply.kind
        kind = f"{self.kind}.chunk" if is_chunk else self.kind
        head = {"id": f"{self.prefix}-{self._name}", "object": kind, "created": self._created}
        return {**head, "model": self._service.name, "choices": choices, **more}

    def _stream_option(self, name: str) -> bool:
        """True if the body asks for an option of streams."""
        return bool(self._request.stream_options.get(name))

    def _chunk(self, choice: ReplyBuilder, **fields: Any) -> bytes:
        """Return an event with what is new of a choice."""
        told = {"index": choice.index, "logprobs": None, "finish_reason": None, **fields}
        usage: dict[str, Any] = {}
        if self._stream_option("continuous_usage_stats"):
            usage = {"usage": self._usage_so_far()}
        elif self._stream_option("include_usage"):
            usage = {"usage": None}
        return sse(self._object([told], **usage))

    def _usage_so_far(self) -> dict[str, int]:
        total = self._prompt_tokens + self._reply_tokens
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._reply_tokens}
        return {**usage, "total_tokens": total}

    def begin(self, cached: int) -> Iterator[bytes]:
        for choice in self._choices:
            yield self._chunk(choice, delta={"role": "assistant", "content": ""})

    def grow(
        self, choice: ReplyBuilder, event: Event, grown: Sequence[PartDelta]
    ) -> Iterator[bytes]:
        """See `Reply.grow`; the chunk that tells why a choice ended holds no text: clients drop it."""
        added = self._added(choice, grown)
        if any(added.values()) or event.logprobs:
            yield self._chunk(choice, logprobs=self._logprobs(choice, event.logprobs), **added)
        if event.finish_reason is not None:
            ended = {**self._added(choice, ()), **choice.notes_field}
            yield self._chunk(choice, finish_reason=self._reason(choice), **ended)

    def _added(self, choice: ReplyBuilder, grown: Sequence[PartDelta]) -> dict[str, Any]:
        """What an event added, as its field."""
        delta = dict[str, Any]()
        for part, text, begins in grown:
            if part.kind == "call":
                shown = tool_call(part) if begins else {"function": {}}
                shown = {**shown, "index": choice.calls.index(part)}
                shown["function"]["arguments"] = text
                delta.setdefault("tool_calls", []).append(shown)
            else:
                key = "content" if part.kind == "text" else "reasoning_content"
                delta[key] = delta.get(key, "") + text
        return {"delta": delta}

    def end(self) -> Iterator[bytes]:
        if self._stream_option("include_usage"):
            yield sse(self._object([], **self._figures()))
        yield b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> Iterator[bytes]:
        yield sse(error.body)
        yield b"data: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        return self._object([self._ended(one) for one in self._choices], **self._figures())

    def _ended(self, choice: ReplyBuilder) -> dict[str, Any]:
        """Return a whole choice."""
        logprobs = self._logprobs(choice, choice.logprobs)
        told = {"index": choice.index, "logprobs": logprobs, "finish_reason": self._reason(choice)}
        return {**told, **self._all(choice), **choice.notes_field}

    def _all(self, choice: ReplyBuilder) -> dict[str, Any]:
        """All of a choice, as its field."""
        message = {**choice.message(), "refusal": None}
        if choice.calls:
            message["content"] = message["content"] or None
        return {"message": message}

    def _reason(self, choice: ReplyBuilder) -> str | None:
        """How it ended, as the API says it; a call that was asked for by name is a stop."""
        tools = self._generation.tools
        is_free = tools is not None and tools.named_function is None
        if choice.finish_reason == "stop" and is_free and choice.calls:
            return "tool_calls"
        return choice.finish_reason

    def _logprobs(
        self, choice: ReplyBuilder, entries: Sequence[TokenLogprob]
    ) -> dict[str, Any] | None:
        """Log-probabilities in the API's form."""
        if self._generation.params.logprobs is None:
            return None
        tokenizer = self._service.settings.vocabulary.need_tokenizer()
        return {"content": chat_logprobs(entries, tokenizer), "refusal": None}

    def _figures(self) -> dict[str, Any]:
        """Tokens of all choices; times and acceptance of the first one."""
        each = self._metrics
        plan = self._service.plan
        prompt, cached, completion, reasoning = self._counts
        speculation = each[0].speculative_decoding(plan.spec, plan.shape.draft_max)
        drafted = sum(one.draft_n for one in each)
        accepted = sum(one.draft_n_accepted for one in each)
        details = {
            "reasoning_tokens": reasoning,
            "draft_tokens": drafted,
            "accepted_draft_tokens": accepted,
        }
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        usage |= {
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        usage["completion_tokens_details"] = details
        metrics = {"speculative_decoding": speculation}
        return {"usage": usage, "timings": each[0].timings(), "metrics": metrics}
