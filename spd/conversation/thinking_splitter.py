"""Thinking and answer of a growing reply, split at their marks."""

from __future__ import annotations

from typing import Literal

from spd.conversation import channels
from spd.formats.thinking import KNOWN_MARKS, MarkPair, ThinkingMarks
from spd.runtime.engine.request import partial_match_length


class ThinkingSplitter:
    """Splits a growing reply into thinking and answer, without the marks between them.

    inside_thinking: True if the prompt left thinking open; None if nothing of the reply is
    thinking. Marks of words count at the very beginning only, those that are tokens anywhere. The
    messages of gpt-oss and Muse-Glimmer, of which some are thinking, have headers. Line breaks next
    to a mark are dropped.
    """

    def __init__(self, inside_thinking: bool | None, marks: ThinkingMarks = KNOWN_MARKS) -> None:
        self.part: Literal["beginning", "header", "thinking", "answer"]
        self.part = "answer" if inside_thinking is None else "beginning"
        self._inside = bool(inside_thinking)
        self._marks = marks if inside_thinking is not None else ThinkingMarks(())
        self._token_pairs = tuple(pair for pair in self._marks.thinking if pair.are_tokens)
        self._buffer = ""
        self._label = ""
        """A word behind the opening mark that is dropped where it comes next."""
        self._skips_line_breaks = False
        """True right behind a mark: line breaks there are dropped."""
        self._end_marks: tuple[str, ...] = ()
        """The marks that end thinking, an answer between marks, or a message."""

    @property
    def is_thinking(self) -> bool:
        """True if the next text is thinking."""
        return self._inside if self.part == "beginning" else self.part == "thinking"

    @property
    def is_settled(self) -> bool:
        """True if no later text can be thinking."""
        has_messages = self._end_marks is channels.MESSAGE_ENDS
        return self.part == "answer" and not self._token_pairs and not has_messages

    def feed(self, text: str, *, final: bool = False) -> list[tuple[bool, str]]:
        """Take the reply's next text; return (is thinking, text) in order, without marks.

        A text that may become a mark is held back unless `final`.
        """
        self._buffer += text
        parts: list[tuple[bool, str]] = []
        if self.part == "beginning" and not self._enter_first_part(final):
            return parts
        while (
            self._read_header(parts, final)
            if self.part == "header"
            else self._read_body(parts, final)
        ):
            pass
        return parts

    def _enter_first_part(self, final: bool) -> bool:
        """Enter the first part of a reply; return False while its beginning may become a mark."""
        beginning = self._buffer.lstrip()
        pairs = (*self._marks.thinking, *self._marks.answer)
        marks = [mark for pair in pairs for mark in (pair.opening, pair.closing)]
        openings = (*marks, channels.CHANNEL, channels.START)
        may_be = any(opening.startswith(beginning) and opening != beginning for opening in openings)
        if not final and (may_be or channels.PARTIAL_MESSAGES_BEGINNING.fullmatch(beginning)):
            return False
        if channels.MESSAGES_BEGINNING.match(beginning):
            self.part = "header"
            self._end_marks = channels.MESSAGE_ENDS
            return True
        thinking = self._marks.thinking
        opened_pair = next((pair for pair in thinking if beginning.startswith(pair.opening)), None)
        closed_pair = next((pair for pair in thinking if beginning.startswith(pair.closing)), None)
        if opened_pair is not None:
            self._buffer = beginning[len(opened_pair.opening) :]
            self._enter_thinking(opened_pair)
        elif self._inside:
            self._enter_thinking(*self._marks.thinking)
        elif closed_pair is not None:  # of thinking that the prompt has closed already
            self._buffer = beginning[len(closed_pair.closing) :]
            self._enter_answer()
        elif any(beginning.startswith(pair.opening) for pair in self._marks.answer):
            self._enter_answer()
        else:
            self.part = "answer"
        return True

    def _enter_thinking(self, *pairs: MarkPair) -> None:
        """Begin thinking, which the closing mark of any of the pairs ends."""
        self.part = "thinking"
        self._skips_line_breaks = True
        self._label = pairs[0].label if len(pairs) == 1 else ""
        self._end_marks = tuple(pair.closing for pair in pairs)

    def _enter_answer(self) -> None:
        """Begin the answer behind thinking."""
        self.part = "answer"
        self._skips_line_breaks = True
        self._label = ""
        self._end_marks = ()

    def _read_header(self, parts: list[tuple[bool, str]], final: bool) -> bool:
        """Read a message's header; return True once it is complete.

        That of a call is appended to `parts`.
        """
        head, mark, content = self._buffer.partition(channels.MESSAGE)
        if mark or final:
            self.part = "thinking" if channels.THINKING_HEADER.search(head) else "answer"
            self._buffer = content if mark else head
            if mark and (function := channels.CALLED_FUNCTION.search(head)):
                parts.append((False, f"{channels.CALL_HEADER}{function[1]}{mark}"))
        return bool(mark or final)

    def _read_body(self, parts: list[tuple[bool, str]], final: bool) -> bool:
        """Append text up to the next mark to `parts`; return True once the mark has come."""
        if self._skips_line_breaks and not self._skip_line_breaks(final):
            return False
        marks = self._end_marks
        if self.part == "answer" and marks is not channels.MESSAGE_ENDS:
            unexpected_marks = (
                mark for pair in self._token_pairs for mark in (pair.opening, pair.closing)
            )
            marks = (*marks, *unexpected_marks)
        places = [(at, -len(mark), mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        at, _, end = min(places, default=(len(self._buffer), 0, ""))
        if not (end or final):
            at -= max((partial_match_length(mark, self._buffer) for mark in marks), default=0)
        content = self._buffer[:at]
        between_marks = bool(self._end_marks) and self._end_marks is not channels.MESSAGE_ENDS
        if self.part == "thinking" or (between_marks and (end or not final)):
            # Line breaks are held back until the next character shows that no mark follows.
            content = content.rstrip("\n")
        self._buffer = (
            self._buffer[at + len(end) :] if end or final else self._buffer[len(content) :]
        )
        parts.append((self.is_thinking, content))
        if end:
            self._pass_mark(end)
        return bool(end)

    def _pass_mark(self, mark: str) -> None:
        """Enter the part behind a mark that ended one."""
        opened_pair = next((pair for pair in self._token_pairs if pair.opening == mark), None)
        if self._end_marks is channels.MESSAGE_ENDS:
            self.part = "header"
        elif self.part == "thinking":
            self._enter_answer()
            self._end_marks = tuple(
                pair.closing for pair in self._marks.answer if pair.opening == mark
            )
        elif mark in self._end_marks:  # of the answer
            self._end_marks = ()
        elif opened_pair is not None:
            self._enter_thinking(opened_pair)

    def _skip_line_breaks(self, final: bool) -> bool:
        """Drop line breaks and a label behind a mark; return False if more of them may come."""
        self._buffer = self._buffer.lstrip("\n")
        if self._label:
            if not final and self._label != self._buffer and self._label.startswith(self._buffer):
                return False
            self._buffer = self._buffer.removeprefix(self._label).lstrip("\n")
            self._label = ""
        if self.part == "answer" and not self._end_marks:
            for pair in self._marks.answer:
                if self._buffer.startswith(pair.opening):
                    self._buffer = self._buffer[len(pair.opening) :]
                    self._end_marks = (pair.closing,)
                    return self._skip_line_breaks(final)
                if self._buffer and pair.opening.startswith(self._buffer) and not final:
                    return False
        if self._buffer:
            self._skips_line_breaks = False
        return True


def split_thinking(
    text: str, inside_thinking: bool | None = False, marks: ThinkingMarks = KNOWN_MARKS
) -> tuple[str | None, str]:
    """Return the thinking of a complete reply, None where it has none, and its answer.

    inside_thinking: as in `ThinkingSplitter`.
    """
    parts = ThinkingSplitter(inside_thinking, marks).feed(text, final=True)
    thoughts = [part for thinking, part in parts if thinking]
    answer = "".join(part for thinking, part in parts if not thinking)
    return "".join(thoughts).strip("\n") if thoughts else None, answer
