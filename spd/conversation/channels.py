"""Replies of messages, each with a header: how gpt-oss and Muse-Glimmer think, call and answer."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from spd.runtime.engine.request import JSON_STYLE, GrammarSpec

if TYPE_CHECKING:
    from spd.runtime import Json

CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
START = "<|start|>"
"""Marks of a message's header: its channel, the end of the header, its beginning."""
MESSAGE_ENDS = (START, "<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>")
"""Marks that end a message."""
MESSAGES_BEGINNING = re.compile(
    r"\s*(?:<\|channel\|>|<\|start\|>|to=[\w.-]+\s*<\|(?:message|channel)\|>)"
)
"""The beginning of a reply of messages."""
PARTIAL_MESSAGES_BEGINNING = re.compile(r"t|to|to=[\w.-]*\s*(?:<[|a-z]{0,9})?")
"""A text that may become such a beginning."""
THINKING_HEADER = re.compile(r"(?s)\A(?!.*to=functions\.).*?(?:<\|channel\|>\s*analysis|to=self\b)")
"""A header of thinking; one on the analysis channel that calls a function is a call instead."""
CALLED_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
"""The function in the header of a call; the text behind the header does not repeat it."""
CALL_HEADER = f"{CHANNEL}commentary to=functions."
"""The beginning of a call's header as `ThinkingSplitter` passes it on, with the name behind it."""


class Channels(NamedTuple):
    """The headers of a model's messages before thinking and words, calls to NAME, and the
    answer.
    """

    thinking_headers: tuple[str, ...]
    separator: str
    """The text between messages."""
    call_header: str
    answer_header: str

    def thinking_grammar(self, tokens: Mapping[str, int]) -> str:
        """Return the Lark expression of messages before a call or an answer; it needs a rule
        TEXT.
        """
        heads = " | ".join(lark_literal(head, tokens) for head in self.thinking_headers)
        return f"(({heads}) TEXT {lark_literal(self.separator, tokens)})*"

    def schema_grammar(self, schema: GrammarSpec, tokens: Mapping[str, int]) -> GrammarSpec:
        """Return the grammar of a reply whose answer fits a JSON schema."""
        answer = lark_json(json.loads(schema.text))
        start = (
            f"{self.thinking_grammar(tokens)} {lark_literal(self.answer_header, tokens)} {answer}"
        )
        return dataclasses.replace(schema, kind="lark", text=f"start: {start}\nTEXT: /(.|\\n)*/")


HARMONY = Channels(
    (f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}commentary{MESSAGE}"),
    "<|end|><|start|>assistant",
    "",
    f"{CHANNEL}final{MESSAGE}",
)
MUSE = Channels(
    (f" to=self{MESSAGE}",), "<|eom|><|start|>assistant", f" to=NAME{MESSAGE}", f" to=user{MESSAGE}"
)
"""Channels of gpt-oss (the format Harmony), and of models whose templates have `<atem:` marks."""


def template_channels(template: str) -> Channels | None:
    """Return the channels of a chat template's model; None where it has none."""
    return HARMONY if CHANNEL in template else MUSE if "<atem:" in template else None


def lark_literal(text: str, tokens: Mapping[str, int]) -> str:
    """Return a text as a Lark expression; marks that are special tokens stand by their ids."""
    parts = enumerate(re.split(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})", text))
    words = (f"<[{tokens[part]}]>" if at % 2 else json.dumps(part) for at, part in parts if part)
    return " ".join(words)


def lark_json(schema: Json) -> str:
    """Return the Lark expression of a JSON value of a schema, with few blanks between its parts."""
    styled_schema = {"x-guidance": JSON_STYLE, **schema} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(styled_schema, ensure_ascii=False)}"
