"""Thinking beside its text: how many tokens it took, and grammars that begin behind it."""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spd.cli.text.channels import BEGINNING, channels_of, json_of
from spd.cli.text.prompt import SWITCH, Asked, ThinkingSplitter, closes_thinking, parted
from spd.formats.thinking import KNOWN, MarkPair, ThinkingMarks, past_turn, reads_thoughts
from spd.runtime.engine.request import GrammarText, ThinkingTokens

if TYPE_CHECKING:
    from spd.cli.text.job import Vocabulary


class ThinkingCount:
    """Counts the tokens of thinking in a reply, with its closing mark and without its opening one.

    Tokens are looked at one by one, so the count does not depend on how many a round brings.
    """

    def __init__(
        self,
        inside: bool | None,
        token_bytes: Callable[[int], bytes],
        marks: ThinkingMarks = KNOWN,
    ) -> None:
        self._splitter = ThinkingSplitter(inside, marks)
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.tokens = 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Add the reply's next tokens."""
        for token in token_ids:
            if self._splitter.is_settled:
                return
            self.tokens += self._splitter.thinking
            self._splitter.feed(self._decoder.decode(self._token_bytes(token)))


class MarkedText:
    """A reply's text with its special tokens, which have no text, each in its place.

    The text may lag behind the tokens: what may begin a stop string is held back.
    """

    def __init__(self, marks: Mapping[int, str], token_bytes: Callable[[int], bytes]) -> None:
        """marks: token ids without a text, and what is put in their places."""
        self._marks, self._token_bytes = marks, token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ahead = 0
        """Characters that tokens have brought and that have not come as text."""
        self._waiting: list[tuple[int, str]] = []
        """Marks, each behind so many of those characters."""

    def take(self, token_ids: Sequence[int], text: str) -> str:
        """Return the next text with its marks, after the next tokens."""
        if not self._marks:
            return text
        for token in token_ids:
            if (mark := self._marks.get(token)) is not None:
                self._waiting.append((self._ahead, mark))
            else:
                self._ahead += len(self._decoder.decode(self._token_bytes(token)))
        marked, place = "", 0
        while self._waiting and self._waiting[0][0] <= len(text):
            at, mark = self._waiting.pop(0)
            marked += text[place:at] + mark
            place = at
        self._ahead -= len(text)
        self._waiting = [(at - len(text), mark) for at, mark in self._waiting]
        return marked + text[place:]


def past_reply(reply: str, inside: bool, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return an earlier reply as a message, with its thinking in the form that the template reads.

    `inside` says that the reply's prompt had opened thinking. A template that knows nothing of thoughts, or
    looks for them in the text, gets the text as it is; but marks that are tokens are no words in it.
    """
    template, marks = vocabulary.need_template().default, vocabulary.marks
    thought, answer = parted(reply, inside, marks)
    is_apart = marks.thinking[0].are_tokens or BEGINNING.match(reply) or reads_thoughts(template)
    if thought is None or not is_apart:
        return {"role": "assistant", "content": reply}
    return {"role": "assistant", **past_turn(thought, answer, template)}


_START = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\\n]|\\.)+/|\bstart\b')
"""The rule that a Lark grammar begins with, and texts in which its name means nothing."""


def behind_thinking(
    grammar: GrammarText, vocabulary: Vocabulary, asked: Asked, prompt: str, inside: bool
) -> tuple[GrammarText, bool]:
    """Return a grammar that begins behind a reply's thinking, and whether the reply begins inside it.

    `prompt` is the end of the rendered prompt. A model that is sure to think may write anything up to
    the token that ends it. One that may think begins with that or with the answer.
    """
    template = vocabulary.need_template()
    if (channels := channels_of(template.default)) is not None:
        is_schema = grammar.kind == "schema"
        special = vocabulary.need_tokenizer().special_tokens
        return (channels.held(grammar, special) if is_schema else grammar), inside
    pair = vocabulary.marks.thinking[0]
    tokens = vocabulary.thinking_tokens
    if grammar.after is not None:  # it begins with a mark, which in thinking is only words
        apart = None if tokens is None else ThinkingTokens(*tokens, inside)
        return dataclasses.replace(grammar, thinking=apart), inside
    if grammar.optional and not inside:
        return grammar, inside
    if inside:
        if tokens is None:
            return _composed(grammar, pair, tokens, "opened"), True
        return dataclasses.replace(grammar, after=tokens[1]), True
    if closes_thinking(prompt, vocabulary.marks):
        return grammar, False
    if template.switch is None:
        may_think = pair.opening in template.default or pair.closing in template.default
    else:
        switched = (asked.variables or {}).get(SWITCH)
        may_think = template.thinks_by_default if switched is None else bool(switched)
        if may_think and tokens is not None and not pair.are_tokens:  # it always thinks then
            return dataclasses.replace(grammar, after=tokens[1]), True
    return (_composed(grammar, pair, tokens, "maybe") if may_think else grammar), False


def _composed(
    grammar: GrammarText, pair: MarkPair, tokens: tuple[int | None, int] | None, thinking: str
) -> GrammarText:
    """Return a grammar of thinking and answer.

    thinking: "opened" where the prompt has begun it, "maybe" where it may be left out.
    """
    if grammar.kind == "schema":
        answer = f"answer: {json_of(json.loads(grammar.text))}"
    elif grammar.kind == "regex":
        escaped = re.sub(r"\\.|/", lambda one: one[0] if len(one[0]) > 1 else r"\/", grammar.text)
        answer = f"answer: /{escaped}/"
    else:
        answer = _START.sub(lambda one: "answer" if one[0] == "start" else one[0], grammar.text)
    if tokens is not None and tokens[0] is not None:
        rules = [f"thought: <[{tokens[0]}]> THOUGHT <[{tokens[1]}]>", "THOUGHT: /(.|\\n)*/"]
    else:
        opening = "" if thinking == "opened" else f"\\s*{_in_pattern(pair.opening)}"
        rules = [f"thought[lazy]: /{opening}(.|\\n)*{_in_pattern(pair.closing)}/"]
    start = (
        "start: thought BREAKS answer"
        if thinking == "opened"
        else "start: (thought BREAKS)? answer"
    )
    text = "\n".join([start, *rules, "BREAKS: /\\n{0,2}/", answer])
    return dataclasses.replace(grammar, kind="lark", text=text)


def _in_pattern(mark: str) -> str:
    """Return a mark as it stands in a regular expression between slashes."""
    return re.escape(mark).replace("/", r"\/")
