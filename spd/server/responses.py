"""OpenAI's Responses API, without a store: bodies of requests, and replies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spd.conversation import fields as read
from spd.conversation.fields import (
    FLAG,
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
    response_format,
)
from spd.runtime.round.sampling_params import MAX_LOGPROBS
from spd.server.api_request import (
    SPECULATIVE,
    ChatRequest,
    Generation,
    chat_generation,
    shared_fields,
    with_one_limit,
)
from spd.server.chat_completions import ChatLogprob, chat_logprobs
from spd.server.errors import ApiError
from spd.server.replies import Reply, sse

if TYPE_CHECKING:
    from spd.conversation.settings import PreparedRequest, Settings
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Event
    from spd.runtime.engine.request import TokenLogprob
    from spd.server.service import Service

KINDS = "input_text", "output_text", "text", "reasoning_text", "summary_text"
_refusal = open_object({"refusal": TEXT}, "refusal", refusal="text")
_texts = read.joined_texts(*KINDS, refusal=_refusal)
_shown = read.joined_texts(
    *KINDS, input_image=read.placeholder_block, input_file=read.placeholder_block
)
CALL = {"call_id": TEXT, "name": TEXT, "arguments": past_arguments}
RESULT = {"call_id": TEXT, "output": _shown}
ITEMS = {
    "message": open_object({"role": read.one_of(*ROLES), "content": _texts}, "role", "content"),
    "reasoning": open_object({"encrypted_content": TEXT}, encrypted_content="reasoning_content"),
    "function_call": open_object(CALL, "call_id", "name", call_id="id"),
    "function_call_output": open_object(RESULT, *RESULT, call_id="tool_call_id", output="content"),
}
"""They become pieces of a message as `conversation` wants them."""
_items = content_blocks(ITEMS, default_type="message")
_tools = read.array_of(
    open_object({**FUNCTION_FIELDS, "type": TEXT, "tools": read.any_value}, "type"), 1024
)
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""What `include` may name: log-probabilities, thinking, which always comes, results of tools not run here."""
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
"""Fields of the API that ask for nothing that this server could do. Unknown ones are passed over, too."""
REFUSED = frozenset(
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


def _truncation(value: Any, name: str) -> str:
    if read.one_of("auto", "disabled")(value, name) == "auto":
        refuse(name, "a prompt beyond the context is refused, and nothing of it is left out")
    return "disabled"


RESPONSE_FIELDS = {
    **SAMPLING_FIELDS,
    "speculative": SPECULATIVE,
    "max_output_tokens": SAMPLING_FIELDS["max_tokens"],
    "include": read.array_of(read.one_of(*INCLUDED), 32),
    "top_logprobs": integer(0, MAX_LOGPROBS),
    "truncation": _truncation,
    "model": TEXT,
    "input": lambda value, name: _items(
        [{"role": "user", "content": value}] if isinstance(value, str) else value, name
    ),
    "instructions": TEXT,
    "stream": FLAG,
    "tools": _tools,
    "tool_choice": read.any_value,
    "parallel_tool_calls": FLAG,
    "text": open_object({"format": open_object(FORMAT_FIELDS, "type")}),
    "reasoning": open_object({"effort": TEXT}),
    **dict.fromkeys(REFUSED),
}
"""Others are passed over, for agents send new ones with each version."""
_body = open_object(RESPONSE_FIELDS, "input")


@dataclass(frozen=True, kw_only=True)
class ResponseRequest(ChatRequest):
    """A request for a response, which repeats some fields of its body."""

    body: Mapping[str, Any]
    """As it was sent."""


def read_response(value: Any, settings: Settings) -> Generation:
    """Return what the body of a response asks for. Raises FieldError and ApiError."""
    body = with_one_limit(_body(value, ""), "max_output_tokens")
    pieces = list(body["input"])
    if "instructions" in body:
        pieces.insert(0, {"role": "system", "content": body["instructions"]})
    names_logprobs = bool(body.get("top_logprobs")) or LOGPROBS in body.get("include", ())
    chat = ResponseRequest(
        **shared_fields(body),
        body=value,
        logprobs=body.get("top_logprobs", 0) if names_logprobs else None,
        messages=tuple(join_pieces(pieces)),
        tools=tuple(tool for tool, _, _ in _flat(body.get("tools", ()))),
        tool_choice=body.get("tool_choice", "auto"),
        parallel_tool_calls=body.get("parallel_tool_calls", True),
        response_format=response_format(body.get("text", {}).get("format", {"type": "text"})),
        reasoning_effort=body.get("reasoning", {}).get("effort"),
        continue_final_message=False,  # the API has no reply that is begun
    )
    return chat_generation(chat, settings)


def _flat(
    tools: Iterable[Mapping[str, Any]], space: str = "", taken: set[str] | None = None
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Functions as chat completions write them, each with its namespace and its name there.

    A name that is there already stands behind its namespace. What OpenAI's servers would run is left out.
    """
    taken = set() if taken is None else taken
    for tool in tools:
        if tool["type"] == "namespace":
            yield from _flat(_tools(tool.get("tools") or [], "tools"), tool.get("name", ""), taken)
        elif tool["type"] == "function":
            name = tool.get("name") or refuse(
                "tools", "a name is missing", "missing_required_parameter"
            )
            shown = f"{space}__{name}"[:64] if space and name in taken else name
            taken.add(shown)
            yield function_tool({**tool, "name": shown}), space, name


class TextLogprobs:
    """Which of a reply's log-probabilities belong to which piece of its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._data = b""  # of all tokens
        self._at = 0  # where the last piece ended in it
        self._rest: deque[tuple[int, int, TokenLogprob]] = deque()
        """Tokens of which no piece was taken, with their places in the data."""

    def add(self, entries: Iterable[TokenLogprob]) -> None:
        """Add the next tokens."""
        for entry in entries:
            start = len(self._data)
            self._data += self._tokenizer.token_bytes(entry.token_id)
            self._rest.append((start, len(self._data), entry))

    def take(self, text: str) -> list[TokenLogprob]:
        """Return the tokens of the next piece; what stands before it, such as a mark, is left out."""
        piece = text.encode()
        begin = self._data.find(piece, self._at)
        if begin < 0:  # it holds what stands for bytes that are no text
            return []
        self._at = begin + len(piece)
        taken: list[TokenLogprob] = []
        while self._rest and self._rest[0][0] < self._at:
            start, end, entry = self._rest.popleft()
            if end > max(start, begin):
                taken.append(entry)
        return taken


class ResponseReply(Reply):
    """As a response: each part of a reply is an item."""

    _number = -1

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
        """Log-probabilities of each part of text, by its number."""
        self._latest: deque[list[ChatLogprob]] = deque()
        """Those of the pieces of text that are to be streamed next."""

    def _score(self, event: Event, grown: Sequence[PartDelta]) -> None:
        self._latest.clear()
        self._text_logprobs.add(event.logprobs)
        for part, text, _ in grown:
            if part.kind == "call":
                continue
            entries = chat_logprobs(self._text_logprobs.take(text), self._tokenizer)
            if part.kind == "text":
                self._logprobs.setdefault(part.index, []).extend(entries)
                self._latest.append(entries)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body = self._body
        usual = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        names = (*usual, "instructions", "max_output_tokens", "temperature", "top_p")
        head = {"id": f"resp_{self._name}", "object": "response", "created_at": self._created}
        told = {name: usual.get(name) if body.get(name) is None else body[name] for name in names}
        rest = dict[str, Any](
            error=None, incomplete_details=None, output=[], usage=None, store=False
        )
        return {**head, **told, "model": self._service.name, "status": status, **rest, **more}

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._number += 1
        kind = f"response.{kind}"
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)

    def begin(self, cached: int) -> Iterator[bytes]:
        yield self._event("created", response=self._response("in_progress"))
        yield self.ping()

    def ping(self) -> bytes:
        return self._event("in_progress", response=self._response("in_progress"))

    def _first(self, part: Part) -> Iterator[bytes]:
        yield self._event(
            "output_item.added", output_index=part.index, item=self._item(part, "in_progress")
        )
        if part.kind != "call":
            yield self._of(part, "content_part.added", part=_content(part, []))

    def _more(self, part: Part, text: str) -> bytes:
        logprobs = {"logprobs": self._latest.popleft()} if part.kind == "text" else {}
        return self._of(part, f"{_GROWS[part.kind]}.delta", delta=text, **logprobs)

    def _last(self, part: Part) -> Iterator[bytes]:
        key = "arguments" if part.kind == "call" else "text"
        logprobs = self._logprobs.get(part.index, [])
        said = {"logprobs": logprobs} if part.kind == "text" else {}
        yield self._of(part, f"{_GROWS[part.kind]}.done", **{key: part.text}, **said)
        if part.kind != "call":
            yield self._of(part, "content_part.done", part=_content(part, logprobs))
        yield self._event("output_item.done", output_index=part.index, item=self._item(part))

    def end(self) -> Iterator[bytes]:
        response = self.whole()
        yield self._event(response["status"], response=response)

    def fail(self, error: ApiError) -> Iterator[bytes]:
        said = {"code": "server_error", "message": error.message}
        yield self._event("failed", response=self._response("failed", error=said))

    def whole(self) -> dict[str, Any]:
        choice = self._choices[0]
        prompt, cached, completion, reasoning = self._counts
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        output = [self._item(one) for one in choice.parts]
        usage: dict[str, Any] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
        }
        usage |= {
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": reasoning},
        }
        usage["total_tokens"] = prompt + completion
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended = {"output": output, "usage": usage, "incomplete_details": why, **choice.notes_field}
        return self._response(status, **ended)

    def _of(self, part: Part, kind: str, /, **fields: Any) -> bytes:
        """An event of an item's content."""
        place = {"item_id": f"{_IDS[part.kind]}_{part.id}", "output_index": part.index}
        content = {"content_index": 0} if part.kind != "call" else {}
        return self._event(kind, **place, **content, **fields)

    def _item(self, part: Part, status: str = "completed") -> dict[str, Any]:
        """A part as an item of the output; a limit leaves the last one incomplete."""
        choice = self._choices[0]
        if choice.finish_reason == "length" and part.index == len(choice.parts) - 1:
            status = "incomplete"
        item = {"id": f"{_IDS[part.kind]}_{part.id}", "type": _ITEMS[part.kind], "status": status}
        if part.kind == "call":
            given = _flat(self._body.get("tools") or ())
            spaces = {tool["function"]["name"]: (space, name) for tool, space, name in given}
            space, name = spaces.get(part.name, ("", part.name))
            item |= {"namespace": space} if space else {}
            return {**item, "call_id": part.id, "name": name, "arguments": part.text}
        content = [_content(part, self._logprobs.get(part.index, []))] if part.text else []
        if part.kind == "text":
            return {**item, "role": "assistant", "content": content}
        # Agents send back what is encrypted and nothing else; the server keeps nothing, so it is the text.
        return {**item, "summary": [], "content": content, "encrypted_content": part.text}


_IDS = {"text": "msg", "thinking": "rs", "call": "fc"}
_ITEMS = {"text": "message", "thinking": "reasoning", "call": "function_call"}
_GROWS = {"text": "output_text", "thinking": "reasoning_text", "call": "function_call_arguments"}
"""How kinds of parts are called: before their ids, as items, and as what grows in them."""


def _content(part: Part, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = {"type": _GROWS[part.kind], "text": part.text}
    return content | {"annotations": [], "logprobs": logprobs} if part.kind == "text" else content
