"""Replies of messages, each with a header: how gpt-oss and Muse-Glimmer think, call and answer."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from spd.runtime.engine.request import JSON_STYLE, GrammarSpec

CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
START = "<|start|>"
ENDS = (START, "<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>")
"""What ends a message."""
BEGINNING = re.compile(r"\s*(?:<\|channel\|>|<\|start\|>|to=[\w.-]+\s*<\|(?:message|channel)\|>)")
"""How a reply of messages begins."""
MAY_BEGIN = re.compile(r"t|to|to=[\w.-]*\s*(?:<[|a-z]{0,9})?")
THINKS = re.compile(r"(?s)\A(?!.*to=functions\.).*?(?:<\|channel\|>\s*analysis|to=self\b)")
"""A header of thinking: a function that is called on the analysis channel is called."""
CALLED = re.compile(r"to=functions\.([\w.-]+)")
"""What a header of a call holds where nothing behind it tells the name."""
CALL = f"{CHANNEL}commentary to=functions."
"""What such a header begins with; behind it `ThinkingSplitter` leaves the name."""


class Channels(NamedTuple):
    """The headers of a model's messages before thinking and words, calls to NAME, and the answer."""

    before: tuple[str, ...]
    next: str
    """What stands between messages."""
    call: str
    answer: str

    def thinking_grammar(self, tokens: Mapping[str, int]) -> str:
        """The grammar of the messages before a call or an answer; it needs a rule TEXT."""
        heads = " | ".join(lark_literal(head, tokens) for head in self.before)
        return f"(({heads}) TEXT {lark_literal(self.next, tokens)})*"

    def schema_grammar(self, shape: GrammarSpec, tokens: Mapping[str, int]) -> GrammarSpec:
        """The grammar of a reply whose answer a schema holds."""
        answer = lark_json(json.loads(shape.text))
        start = f"{self.thinking_grammar(tokens)} {lark_literal(self.answer, tokens)} {answer}"
        return dataclasses.replace(shape, kind="lark", text=f"start: {start}\nTEXT: /(.|\\n)*/")


HARMONY = Channels(
    (f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}commentary{MESSAGE}"),
    "<|end|><|start|>assistant",
    "",
    f"{CHANNEL}final{MESSAGE}",
)
MUSE = Channels(
    (f" to=self{MESSAGE}",), "<|eom|><|start|>assistant", f" to=NAME{MESSAGE}", f" to=user{MESSAGE}"
)


def template_channels(template: str) -> Channels | None:
    """The channels of a chat template's model, if it has some."""
    return HARMONY if CHANNEL in template else MUSE if "<atem:" in template else None


def lark_literal(text: str, tokens: Mapping[str, int]) -> str:
    """Text for a grammar, with marks as tokens where they are such."""
    parts = enumerate(re.split(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})", text))
    words = (f"<[{tokens[part]}]>" if at % 2 else json.dumps(part) for at, part in parts if part)
    return " ".join(words)


def lark_json(schema: Any) -> str:
    """The grammar of a value, with little room for blanks."""
    held = {"x-guidance": JSON_STYLE, **schema} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(held, ensure_ascii=False)}"
