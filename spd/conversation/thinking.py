"""Thinking in replies: its number of tokens, its budget, and special tokens in the text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spd.conversation.channels import MESSAGES_BEGINNING
from spd.conversation.thinking_splitter import ThinkingSplitter, split_thinking
from spd.errors import IncompatibleError
from spd.formats.thinking import (
    KNOWN_MARKS,
    ThinkingMarks,
    make_past_turn,
    separates_thinking,
)
from spd.runtime.engine.request import ThinkingBudget

if TYPE_CHECKING:
    from spd.conversation.vocabulary import Vocabulary

UNANSWERED_NOTE = "the reply ended while thinking, without an answer"
"""The note of a reply without an answer."""


class ThinkingCounter:
    """Counts the tokens of thinking in a reply, with its closing mark and without its opening one.

    Tokens are decoded one by one, so the count does not depend on how many a round brings.
    """

    def __init__(
        self,
        inside_thinking: bool | None,
        token_bytes: Callable[[int], bytes],
        marks: ThinkingMarks = KNOWN_MARKS,
    ) -> None:
        self._splitter = ThinkingSplitter(inside_thinking, marks)
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Count those of the reply's next tokens that are thinking."""
        for token in token_ids:
            if self._splitter.is_settled:
                return
            self.tokens += self._splitter.is_thinking
            self._splitter.feed(self._decoder.decode(self._token_bytes(token)))


class MarkedText:
    """A reply's text with marks in the places of special tokens, which have no text.

    The parsers of tool calls and channels read it; without marks it is the text as it comes. The text
    may lag behind the tokens: a text that may begin a stop string is held back.
    """

    def __init__(self, marks: Mapping[int, str], token_bytes: Callable[[int], bytes]) -> None:
        """Begin an empty text. marks: maps token ids without a text to their marks."""
        self._marks = marks
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ahead = 0
        """Characters of tokens whose text has not been added yet."""
        self._waiting: list[tuple[int, str]] = []
        """Marks, each with the number of those characters before it."""

    def add(self, token_ids: Sequence[int], text: str) -> str:
        """Take the reply's next tokens and text; return the text with the marks before its end."""
        if not self._marks:
            return text
        for token in token_ids:
            if (mark := self._marks.get(token)) is not None:
                self._waiting.append((self._ahead, mark))
            else:
                self._ahead += len(self._decoder.decode(self._token_bytes(token)))
        marked = ""
        place = 0
        while self._waiting and self._waiting[0][0] <= len(text):
            at, mark = self._waiting.pop(0)
            marked += text[place:at] + mark
            place = at
        self._ahead -= len(text)
        self._waiting = [(at - len(text), mark) for at, mark in self._waiting]
        return marked + text[place:]


def past_reply_message(reply: str, inside_thinking: bool, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return an earlier reply as a message, with its thinking in the form that the template reads.

    inside_thinking: True if the reply's prompt had opened thinking. A template that reads no
    thoughts, or looks for them in the text, gets the text as it is; but marks that are tokens are
    left out of it.
    """
    template = vocabulary.need_template().default
    marks = vocabulary.marks
    thought, answer = split_thinking(reply, inside_thinking, marks)
    is_separate = (
        marks.thinking[0].are_tokens
        or MESSAGES_BEGINNING.match(reply)
        or separates_thinking(template)
    )
    if thought is None or not is_separate:
        return {"role": "assistant", "content": reply}
    return {"role": "assistant", **make_past_turn(thought, answer, template)}


def thinking_budget(
    think: str, vocabulary: Vocabulary, inside_thinking: bool, spent: Sequence[int] = ()
) -> ThinkingBudget | None:
    """Return the budget that --think N leaves behind `spent` tokens; None for another value of
    --think.

    Raises IncompatibleError where no token ends thinking.
    """
    if not think.isdigit() or (spent and not inside_thinking):
        return None
    if (pair := vocabulary.thinking_tokens) is None:
        closing = vocabulary.marks.thinking[0].closing
        message = (
            f"at most {think} tokens of thinking: for models that end it with a token {closing}"
        )
        reason = ["This vocabulary has none."]
        fix = ["on, off or hide in place of the number"]
        raise IncompatibleError(message, reason=reason, fix=fix, code="no_thinking")
    begin, end = pair
    remaining = int(think) - sum(token != begin for token in spent)
    return ThinkingBudget(max(0, remaining), end, begin, inside_thinking)
