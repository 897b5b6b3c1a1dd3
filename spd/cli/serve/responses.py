"""OpenAI's Responses API, without a store: its body as a wish, and how it tells a reply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spd.cli.serve import body as read
from spd.cli.serve import wishes
from spd.cli.serve.body import FLAG, TEXT, ApiError, blocks, refuse, some
from spd.cli.serve.replies import Part, Reply, sse
from spd.cli.serve.wishes import (
    FUNCTION,
    SAMPLING,
    Wish,
    function,
    past_arguments,
    wish_of,
)
from spd.cli.text.messages import ROLES

if TYPE_CHECKING:
    from spd.cli.serve.http import Service

KINDS = "input_text", "output_text", "text", "reasoning_text", "summary_text"
_refusal = some({"refusal": TEXT}, "refusal", refusal="text")
_texts = read.texts(*KINDS, refusal=_refusal)
_shown = read.texts(*KINDS, input_image=read.left_out, input_file=read.left_out)
CALL = {"call_id": TEXT, "name": TEXT, "arguments": past_arguments}
RESULT = {"call_id": TEXT, "output": _shown}
ITEMS = {
    "message": some({"role": read.one_of(*ROLES), "content": _texts}, "role", "content"),
    "reasoning": some({"encrypted_content": TEXT}, encrypted_content="reasoning_content"),
    "function_call": some(CALL, "call_id", "name", call_id="id"),
    "function_call_output": some(RESULT, *RESULT, call_id="tool_call_id", output="content"),
}
"""They become pieces of a message as `conversation` wants them."""
_items = blocks(ITEMS, usual="message")
_tools = read.listed(some({**FUNCTION, "type": TEXT, "tools": read.anything}, "type"), 1024)
RESPONSES = {
    **{name: SAMPLING[name] for name in ("temperature", "top_p")},
    "max_output_tokens": SAMPLING["max_tokens"],
    "model": TEXT,
    "input": lambda value, name: _items(
        [{"role": "user", "content": value}] if isinstance(value, str) else value, name
    ),
    "instructions": TEXT,
    "stream": FLAG,
    "tools": _tools,
    "tool_choice": read.anything,
    "parallel_tool_calls": FLAG,
    "text": some({"format": some(wishes.FORMAT, "type")}),
    "reasoning": some({"effort": TEXT}),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "background")),
}
"""Others are passed over, for agents send new ones with each version."""
_body = some(RESPONSES, "input", max_output_tokens="max_tokens")


def read_response(value: Any, service: Service) -> Wish:
    """A body as a wish. Raises ApiError."""
    body = _body(value, "")
    said = [{"role": "system", "content": body[name]} for name in ("instructions",) if name in body]
    chat = {**body, "asked": value, "messages": wishes.conversation([*said, *body["input"]])}
    chat["continue_final_message"] = False  # the API has no reply that is begun
    chat["tools"] = [tool for tool, _, _ in _flat(body.get("tools", ()))]
    chat["response_format"] = body.get("text", {}).get("format", {"type": "text"})
    chat["reasoning_effort"] = body.get("reasoning", {}).get("effort")
    return wish_of(chat, service, ResponseReply)


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
            yield function({**tool, "name": shown}), space, name


class ResponseReply(Reply):
    """As a response: each part of a reply is an item."""

    _number = -1

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body = self._wish.body["asked"]
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
            yield self._of(part, "content_part.added", part=_content(part))

    def _more(self, part: Part, text: str) -> bytes:
        return self._of(part, f"{_GROWS[part.kind]}.delta", delta=text)

    def _last(self, part: Part) -> Iterator[bytes]:
        key = "arguments" if part.kind == "call" else "text"
        yield self._of(part, f"{_GROWS[part.kind]}.done", **{key: part.text})
        if part.kind != "call":
            yield self._of(part, "content_part.done", part=_content(part))
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
        status = "incomplete" if choice.reason == "length" else "completed"
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
        ended = {"output": output, "usage": usage, "incomplete_details": why, **choice.noted}
        return self._response(status, **ended)

    def _of(self, part: Part, kind: str, /, **fields: Any) -> bytes:
        """An event of an item's content."""
        place = {"item_id": f"{_IDS[part.kind]}_{part.id}", "output_index": part.index}
        content = {"content_index": 0} if part.kind != "call" else {}
        logprobs: dict[str, Any] = {"logprobs": []} if kind.startswith("output_text") else {}
        return self._event(kind, **place, **content, **fields, **logprobs)

    def _item(self, part: Part, status: str = "completed") -> dict[str, Any]:
        """A part as an item of the output; a limit leaves the last one incomplete."""
        choice = self._choices[0]
        if choice.reason == "length" and part.index == len(choice.parts) - 1:
            status = "incomplete"
        item = {"id": f"{_IDS[part.kind]}_{part.id}", "type": _ITEMS[part.kind], "status": status}
        if part.kind == "call":
            given = _flat(self._wish.body["asked"].get("tools") or ())
            spaces = {tool["function"]["name"]: (space, name) for tool, space, name in given}
            space, name = spaces.get(part.name, ("", part.name))
            item |= {"namespace": space} if space else {}
            return {**item, "call_id": part.id, "name": name, "arguments": part.text}
        content = [_content(part)] if part.text else []
        if part.kind == "text":
            return {**item, "role": "assistant", "content": content}
        # Agents send back what is encrypted and nothing else; the server keeps nothing, so it is the text.
        return {**item, "summary": [], "content": content, "encrypted_content": part.text}


_IDS = {"text": "msg", "thinking": "rs", "call": "fc"}
_ITEMS = {"text": "message", "thinking": "reasoning", "call": "function_call"}
_GROWS = {"text": "output_text", "thinking": "reasoning_text", "call": "function_call_arguments"}
"""How kinds of parts are called: before their ids, as items, and as what grows in them."""


def _content(part: Part) -> dict[str, Any]:
    content = {"type": _GROWS[part.kind], "text": part.text}
    return content | {"annotations": [], "logprobs": []} if part.kind == "text" else content
