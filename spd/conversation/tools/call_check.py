"""The form of tool calls of a chat template, checked with a call that the template renders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile

from spd.conversation.messages import for_template
from spd.conversation.thinking_splitter import ThinkingSplitter
from spd.conversation.tools.call_forms import FALLBACK_FORM, Form, call_form
from spd.conversation.tools.call_grammar import Tools
from spd.conversation.tools.call_parser import CallParser
from spd.errors import SpdError
from spd.formats.chat_template import ChatTemplate
from spd.runtime import JsonObject

UNKNOWN_FORM_NOTE = (
    "the form in which this model's chat template writes tool calls is not known: calls are looked"
    f" for between {FALLBACK_FORM.opening} and {FALLBACK_FORM.closing}, and others stay text"
)
PROBE_NAME = "lookup_word"
"""The function that a template is tried with; then its arguments, their schema, and a call."""
PROBE_ARGUMENTS: JsonObject = {"word": "two words", "count": 3}
PROBE_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
}
PROBE_TOOL: JsonObject = {
    "name": PROBE_NAME,
    "description": "Look a word up",
    "parameters": PROBE_SCHEMA,
}
PROBE_MESSAGE: JsonObject = {"role": "user", "content": "Hi"}
PROBE_CALL: JsonObject = {"id": "call00000", "type": "function"}


def checked_form(template: ChatTemplate) -> Form:
    """Return the form of a model's calls, by its chat template.

    `FALLBACK_FORM` where the template shows no form that is known, or writes a call that is not
    read in the form that it seems to show.
    """
    return _checked_form(_TemplateByText(template.tools_template, template))


@dataclass(frozen=True)
class _TemplateByText:
    """A template, compared by its text."""

    text: str
    template: ChatTemplate = field(compare=False)


@lru_cache(16)
def _checked_form(source: _TemplateByText) -> Form:
    """Render a call by a template and return the form in which it is read; results are cached."""
    form = call_form(source.text)
    reply = _rendered_call(source.template)
    return (
        form
        if not reply or _calls_in(reply, form) == [(PROBE_NAME, PROBE_ARGUMENTS)]
        else FALLBACK_FORM
    )


def _rendered_call(template: ChatTemplate) -> str:
    """Return the probe's call as the template renders it in a reply; empty if it renders none."""
    call = {
        **PROBE_CALL,
        "function": {"name": PROBE_NAME, "arguments": json.dumps(PROBE_ARGUMENTS)},
    }
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [PROBE_MESSAGE, for_template(turn, template.tools_template)]
    tools = [{"type": "function", "function": PROBE_TOOL}]
    with suppress(SpdError):
        prompt = template.render([PROBE_MESSAGE], tools=tools)
        rendered = template.render(messages, tools=tools, add_generation_prompt=False)
        pairs = zip(prompt, rendered, strict=False)
        common = rendered[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]
        if common.rfind("<") > common.rfind(">"):  # both go on with a mark
            common = common[: common.rfind("<")]
        reply = rendered[len(common) :]
        return reply if PROBE_NAME in reply else ""
    return ""


def _calls_in(reply: str, form: Form) -> Sequence[tuple[str, Mapping[str, object]]]:
    """Return the names and arguments of calls in a reply behind its thinking."""
    parser = CallParser(Tools({PROBE_NAME: PROBE_SCHEMA}, form))
    splitter = ThinkingSplitter(False)
    parts = (text for thinking, text in splitter.feed(reply, final=True) if not thinking)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    pieces += parser.feed("", final=True)
    calls = (piece for piece in pieces if piece.kind == "call")
    return [(call.name or "", json.loads(call.text)) for call in calls]
