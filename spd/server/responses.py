"""OpenAI's Responses API, without a store: bodies of requests, and replies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spd.conversation import fields as read
from spd.conversation.fields import (
    FLAG,
    OBJECT,
    TEXT,
    content_blocks,
    integer,
    open_object,
    refuse,
)
from spd.conversation.messages import ROLES, join_pieces
from spd.conversation.reply import Part, PartDelta
from spd.conversation.sampling_fields import SAMPLING_FIELDS
from spd.conversation.tool_choice import (
    FORMAT_FIELDS,
    FUNCTION_FIELDS,
    function_tool,
    past_arguments,
    response_format_grammar,
)
from spd.runtime.round.sampling_params import MAX_LOGPROBS
from spd.server.api_request import (
    ChatRequest,
    Generation,
    chat_generation,
    check_speculative,
    shared_fields,
    with_one_token_limit,
)
from spd.server.chat_completions import ChatLogprob, chat_logprobs
from spd.server.errors import ApiError
from spd.server.replies import Reply, sse_event

if TYPE_CHECKING:
    from spd.conversation.settings import PreparedRequest, Settings
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Event, Json
    from spd.runtime.engine.request import TokenLogprob
    from spd.server.service import Service

TEXT_TYPES = "input_text", "output_text", "text", "reasoning_text", "summary_text"
_refusal = open_object({"refusal": TEXT}, "refusal", refusal="text")
_texts = read.joined_texts(*TEXT_TYPES, refusal=_refusal)
_output_texts = read.joined_texts(
    *TEXT_TYPES, input_image=read.placeholder_block, input_file=read.placeholder_block
)
CALL_FIELDS = {"call_id": TEXT, "name": TEXT, "arguments": past_arguments}
RESULT_FIELDS = {"call_id": TEXT, "output": _output_texts}
ITEM_CHECKS = {
    "message": open_object({"role": read.one_of(*ROLES), "content": _texts}, "role", "content"),
    "reasoning": open_object({"encrypted_content": TEXT}, encrypted_content="reasoning_content"),
    "function_call": open_object(CALL_FIELDS, "call_id", "name", call_id="id"),
    "function_call_output": open_object(
        RESULT_FIELDS, *RESULT_FIELDS, call_id="tool_call_id", output="content"
    ),
}
"""Items become pieces of a message for `join_pieces`."""
_check_items = content_blocks(ITEM_CHECKS, default_type="message")
_check_tools = read.array_of(
    open_object({**FUNCTION_FIELDS, "type": TEXT, "tools": read.any_value}, "type"), 1024
)
LOGPROBS_VALUE = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS_VALUE,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of `include`: log-probabilities, thinking, which is always sent, and results of tools that
are not run here."""
PASSED_OVER = frozenset(
    {
        "access_programs",
        "context_management",
        "image",
        "max_tool_calls",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""Fields of the API that are ignored, as unknown ones are: this server has nothing to do for
them."""
REFUSED_FIELDS = frozenset(
    {
        "background",
        "background_options",
        "conversation",
        "logprobs",
        "messages",
        "moderation",
        "n",
        "previous_response_id",
        "prompt",
        "response_format",
    }
)
"""Fields of this API, and of the others, that are refused by name."""


def _check_truncation(value: Json, name: str) -> str:
    """Return disabled. Raises FieldError for auto."""
    if read.one_of("auto", "disabled")(value, name) == "auto":
        refuse(name, "a prompt beyond the context is refused, and nothing of it is left out")
    return "disabled"


RESPONSE_FIELDS = {
    **SAMPLING_FIELDS,
    "speculative": check_speculative,
    "max_output_tokens": SAMPLING_FIELDS["max_tokens"],
    "include": read.array_of(read.one_of(*INCLUDABLE), 32),
    "top_logprobs": integer(0, MAX_LOGPROBS),
    "truncation": _check_truncation,
    "model": TEXT,
    "input": lambda value, name: _check_items(
        [{"role": "user", "content": value}] if isinstance(value, str) else value, name
    ),
    "instructions": TEXT,
    "stream": FLAG,
    "tools": _check_tools,
    "tool_choice": read.any_value,
    "parallel_tool_calls": FLAG,
    "text": open_object({"format": open_object(FORMAT_FIELDS, "type")}),
    "reasoning": open_object({"effort": TEXT}),
    **dict.fromkeys(REFUSED_FIELDS),
}
"""Other fields are ignored, for agents send new ones with each version."""
_check_body = open_object(RESPONSE_FIELDS, "input")
"""Checks and returns the body of `/v1/responses`."""


@dataclass(frozen=True, kw_only=True)
class ResponseRequest(ChatRequest):
    """A request for a response; the response repeats some fields of its body."""

    body: Mapping[str, Any]
    """As it was sent."""


def read_response(value: Json, settings: Settings) -> Generation:
    """Return the generation that the body of a response requests.

    Raises FieldError and ApiError.
    """
    body = with_one_token_limit(_check_body(value, ""), "max_output_tokens")
    pieces = list(body["input"])
    if "instructions" in body:
        pieces.insert(0, {"role": "system", "content": body["instructions"]})
    names_logprobs = bool(body.get("top_logprobs")) or LOGPROBS_VALUE in body.get("include", ())
    chat = ResponseRequest(
        **shared_fields(body),
        body=OBJECT(value, ""),
        logprobs=body.get("top_logprobs", 0) if names_logprobs else None,
        messages=tuple(join_pieces(pieces)),
        tools=tuple(tool for tool, _, _ in _flattened_tools(body.get("tools", ()))),
        tool_choice=body.get("tool_choice", "auto"),
        parallel_tool_calls=body.get("parallel_tool_calls", True),
        response_format=response_format_grammar(
            body.get("text", {}).get("format", {"type": "text"})
        ),
        reasoning_effort=body.get("reasoning", {}).get("effort"),
        continue_final_message=False,  # the API cannot begin a reply
    )
    return chat_generation(chat, settings)


def _flattened_tools(
    tools: Iterable[Mapping[str, Any]], namespace: str = "", used_names: set[str] | None = None
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield functions as chat completions write them, each with its namespace and its name in that.

    A name that is used already gets its namespace as a prefix. Tools that OpenAI's servers run are
    left out.
    """
    used_names = set() if used_names is None else used_names
    for tool in tools:
        if tool["type"] == "namespace":
            members = _check_tools(tool.get("tools") or [], "tools")
            yield from _flattened_tools(members, tool.get("name", ""), used_names)
        elif tool["type"] == "function":
            name = tool.get("name") or refuse(
                "tools", "a name is missing", "missing_required_parameter"
            )
            full_name = f"{namespace}__{name}"[:64] if namespace and name in used_names else name
            used_names.add(full_name)
            yield function_tool({**tool, "name": full_name}), namespace, name


class TextLogprobs:
    """Assigns a reply's log-probabilities to the pieces of its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._data = b""  # of all tokens
        self._position = 0  # where the last piece ended in it
        self._pending: deque[tuple[int, int, TokenLogprob]] = deque()
        """Tokens that belong to no piece yet, each with its begin and end in `_data`."""

    def add_tokens(self, entries: Iterable[TokenLogprob]) -> None:
        """Append the log-probabilities of the next tokens."""
        for entry in entries:
            start = len(self._data)
            self._data += self._tokenizer.token_bytes(entry.token_id)
            self._pending.append((start, len(self._data), entry))

    def pop_piece(self, text: str) -> list[TokenLogprob]:
        """Remove and return the tokens of the next piece; text before it, such as a mark, is
        left out.
        """
        piece = text.encode()
        begin = self._data.find(piece, self._position)
        if begin < 0:  # the piece has replacement characters for bytes that are no text
            return []
        self._position = begin + len(piece)
        entries: list[TokenLogprob] = []
        while self._pending and self._pending[0][0] < self._position:
            start, end, entry = self._pending.popleft()
            if end > max(start, begin):
                entries.append(entry)
        return entries


class ResponseReply(Reply):
    """A reply in the form of responses: each part is an item."""

    _sequence_number = -1

    def __init__(
        self, service: Service, generation: Generation, prepared: Sequence[PreparedRequest]
    ) -> None:
        super().__init__(service, generation, prepared)
        request = generation.request
        assert isinstance(request, ResponseRequest)
        self._body = request.body
        self._tokenizer = service.settings.vocabulary.need_tokenizer()
        self._text_logprobs = TextLogprobs(self._tokenizer)
        self._logprobs: dict[int, list[ChatLogprob]] = {}
        """Log-probabilities of each part that is text, by its number."""
        self._pending_logprobs: deque[list[ChatLogprob]] = deque()
        """Log-probabilities of the pieces of text that are streamed next."""

    def _assign_logprobs(self, event: Event, grown: Sequence[PartDelta]) -> None:
        """Assign an event's log-probabilities to the pieces of text that it added."""
        self._pending_logprobs.clear()
        self._text_logprobs.add_tokens(event.logprobs)
        for part, text, _ in grown:
            if part.kind == "call":
                continue
            entries = chat_logprobs(self._text_logprobs.pop_piece(text), self._tokenizer)
            if part.kind == "text":
                self._logprobs.setdefault(part.index, []).extend(entries)
                self._pending_logprobs.append(entries)

    def _response_object(self, status: str, **extra_fields: object) -> dict[str, object]:
        """Return a response, with the fields of the body that it repeats."""
        body = self._body
        defaults = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        names = (*defaults, "instructions", "max_output_tokens", "temperature", "top_p")
        head = {"id": f"resp_{self._id}", "object": "response", "created_at": self._created}
        repeated_fields = {
            name: defaults.get(name) if body.get(name) is None else body[name] for name in names
        }
        return {
            **head,
            **repeated_fields,
            "model": self._service.name,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            "store": False,
            **extra_fields,
        }

    def _event_chunk(self, kind: str, /, **fields: object) -> bytes:
        """Return the next event, with its number in the stream."""
        self._sequence_number += 1
        kind = f"response.{kind}"
        return sse_event({"type": kind, "sequence_number": self._sequence_number, **fields}, kind)

    def start_chunks(self, cached: int) -> Iterator[bytes]:
        """Yield the first chunks of a stream."""
        yield self._event_chunk("created", response=self._response_object("in_progress"))
        yield self.ping_chunk()

    def ping_chunk(self) -> bytes:
        """Return the chunk of a stream that shows that it goes on."""
        return self._event_chunk("in_progress", response=self._response_object("in_progress"))

    def _part_start(self, part: Part) -> Iterator[bytes]:
        """Yield the chunks at a part's start; `part` is a copy that has no text yet."""
        yield self._event_chunk(
            "output_item.added",
            output_index=part.index,
            item=self._item_object(part, "in_progress"),
        )
        if part.kind != "call":
            yield self._part_event(part, "content_part.added", part=_item_content(part, []))

    def _part_delta(self, part: Part, text: str) -> bytes:
        """Return the chunk of a piece of a part."""
        logprobs = {"logprobs": self._pending_logprobs.popleft()} if part.kind == "text" else {}
        return self._part_event(part, f"{_CONTENT_TYPES[part.kind]}.delta", delta=text, **logprobs)

    def _part_end(self, part: Part) -> Iterator[bytes]:
        """Yield the chunks at a part's end."""
        key = "arguments" if part.kind == "call" else "text"
        logprobs = self._logprobs.get(part.index, [])
        logprobs_field = {"logprobs": logprobs} if part.kind == "text" else {}
        kind = f"{_CONTENT_TYPES[part.kind]}.done"
        yield self._part_event(part, kind, **{key: part.text}, **logprobs_field)
        if part.kind != "call":
            yield self._part_event(part, "content_part.done", part=_item_content(part, logprobs))
        yield self._event_chunk(
            "output_item.done", output_index=part.index, item=self._item_object(part)
        )

    def end_chunks(self) -> Iterator[bytes]:
        """Yield the last chunks of a stream."""
        yield self._event_chunk(self._final_status, response=self.full_body())

    def error_chunks(self, error: ApiError) -> Iterator[bytes]:
        """Yield the chunks behind an error."""
        error_fields = {"code": "server_error", "message": error.message}
        yield self._event_chunk(
            "failed", response=self._response_object("failed", error=error_fields)
        )

    @property
    def _final_status(self) -> str:
        """Return the status of the ended response."""
        is_cut = self._choices[0].finish_reason == "length"
        return "incomplete" if is_cut else "completed"

    def full_body(self) -> dict[str, object]:
        """Return the body of a reply that is not streamed."""
        choice = self._choices[0]
        counts = self._token_counts
        status = self._final_status
        usage: dict[str, object] = {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached},
            "output_tokens": counts.completion,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning},
            "total_tokens": counts.prompt + counts.completion,
        }
        return self._response_object(
            status,
            output=[self._item_object(part) for part in choice.parts],
            usage=usage,
            incomplete_details=(
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            **choice.notes_field,
        )

    def _part_event(self, part: Part, kind: str, /, **fields: object) -> bytes:
        """Return an event about an item's content."""
        place = {"item_id": f"{_ID_PREFIXES[part.kind]}_{part.id}", "output_index": part.index}
        content = {"content_index": 0} if part.kind != "call" else {}
        return self._event_chunk(kind, **place, **content, **fields)

    def _item_object(self, part: Part, status: str = "completed") -> dict[str, object]:
        """Return a part as an item of the output; a limit leaves the last item incomplete."""
        choice = self._choices[0]
        is_last = part.index == len(choice.parts) - 1
        if status == "completed" and choice.finish_reason == "length" and is_last:
            status = "incomplete"
        item: dict[str, object] = {
            "id": f"{_ID_PREFIXES[part.kind]}_{part.id}",
            "type": _ITEM_TYPES[part.kind],
            "status": status,
        }
        if part.kind == "call":
            flattened = _flattened_tools(self._body.get("tools") or ())
            names = {
                tool["function"]["name"]: (namespace, name) for tool, namespace, name in flattened
            }
            namespace, name = names.get(part.name, ("", part.name))
            if namespace:
                item["namespace"] = namespace
            return {**item, "call_id": part.id, "name": name, "arguments": part.text}
        content = [_item_content(part, self._logprobs.get(part.index, []))] if part.text else []
        if part.kind == "text":
            return {**item, "role": "assistant", "content": content}
        # Agents send back the encrypted content alone; the server stores none, so it is the text.
        return {**item, "summary": [], "content": content, "encrypted_content": part.text}


_ID_PREFIXES = {"text": "msg", "thinking": "rs", "call": "fc"}
_ITEM_TYPES = {"text": "message", "thinking": "reasoning", "call": "function_call"}
_CONTENT_TYPES = {
    "text": "output_text",
    "thinking": "reasoning_text",
    "call": "function_call_arguments",
}
"""Names of the kinds of parts: before their ids, as items, and as content that grows in them."""


def _item_content(part: Part, logprobs: Sequence[ChatLogprob]) -> dict[str, object]:
    """Return the content of a part's item."""
    content: dict[str, object] = {"type": _CONTENT_TYPES[part.kind], "text": part.text}
    if part.kind == "text":
        content |= {"annotations": [], "logprobs": logprobs}
    return content
