"""Thinking and answer of a growing reply, cut apart at their marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from spd.conversation import channels
from spd.formats.thinking import KNOWN_MARKS, MarkPair, ThinkingMarks
from spd.runtime.engine.request import partial_match_length

if TYPE_CHECKING:
    pass


class ThinkingSplitter:
    """Cuts a growing reply into thinking and answer, without the marks between them.

    `inside` says that the prompt left thinking open; None that nothing is thinking. Marks of words
    count at the very beginning only, those that are tokens anywhere. The messages of gpt-oss and
    Muse-Glimmer, of which some are thinking, have headers. Line breaks next to a mark are dropped.
    """

    def __init__(self, inside: bool | None, marks: ThinkingMarks = KNOWN_MARKS) -> None:
        self.part: Literal["beginning", "header", "thinking", "answer"]
        self.part = "answer" if inside is None else "beginning"
        self._inside = bool(inside)
        self._marks = marks if inside is not None else ThinkingMarks(())
        self._tokens = tuple(pair for pair in self._marks.thinking if pair.are_tokens)
        self._held = ""
        self._label = ""
        """A word that is dropped where it comes next."""
        self._is_fresh = False
        """Whether line breaks are dropped: nothing has come behind a mark yet."""
        self._ends: tuple[str, ...] = ()
        """The marks that end thinking, an answer between marks, or a message."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thinking."""
        return self._inside if self.part == "beginning" else self.part == "thinking"

    @property
    def is_settled(self) -> bool:
        """True if nothing that comes can be thinking."""
        return self.part == "answer" and not self._tokens and self._ends is not channels.ENDS

    def feed(self, text: str, *, final: bool = False) -> list[tuple[bool, str]]:
        """Return (is thinking, text) in order; what may be a part of a mark is held back."""
        self._held += text
        parts: list[tuple[bool, str]] = []
        if self.part == "beginning" and not self._begin(final):
            return parts
        while self._header(parts, final) if self.part == "header" else self._body(parts, final):
            pass
        return parts

    def _begin(self, final: bool) -> bool:
        """Enter the part that a reply begins with; False while that may be a mark or not."""
        begun = self._held.lstrip()
        pairs = (*self._marks.thinking, *self._marks.answer)
        marks = [mark for pair in pairs for mark in (pair.opening, pair.closing)]
        heads = (*marks, channels.CHANNEL, channels.START)
        may_be = any(head.startswith(begun) and head != begun for head in heads)
        if not final and (may_be or channels.MAY_BEGIN.fullmatch(begun)):
            return False
        if channels.BEGINNING.match(begun):
            self.part = "header"
            self._ends = channels.ENDS
            return True
        opened = next((one for one in self._marks.thinking if begun.startswith(one.opening)), None)
        closed = next((one for one in self._marks.thinking if begun.startswith(one.closing)), None)
        if opened is not None:
            self._held = begun[len(opened.opening) :]
            self._think(opened)
        elif self._inside:
            self._think(*self._marks.thinking)
        elif closed is not None:  # of thinking that the prompt has closed already
            self._held = begun[len(closed.closing) :]
            self._answer()
        elif any(begun.startswith(pair.opening) for pair in self._marks.answer):
            self._answer()
        else:
            self.part = "answer"
        return True

    def _think(self, *pairs: MarkPair) -> None:
        """Go on with thinking, which the closing mark of any of the pairs ends."""
        self.part = "thinking"
        self._is_fresh = True
        self._label = pairs[0].label if len(pairs) == 1 else ""
        self._ends = tuple(pair.closing for pair in pairs)

    def _answer(self) -> None:
        """Go on with the answer behind thinking."""
        self.part = "answer"
        self._is_fresh = True
        self._label = ""
        self._ends = ()

    def _header(self, parts: list[tuple[bool, str]], final: bool) -> bool:
        """Take a message's header; says whether it is whole."""
        head, mark, rest = self._held.partition(channels.MESSAGE)
        if mark or final:
            self.part = "thinking" if channels.THINKS.search(head) else "answer"
            self._held = rest if mark else head
            if mark and (called := channels.CALLED.search(head)):
                parts.append((False, f"{channels.CALL}{called[1]}{mark}"))
        return bool(mark or final)

    def _body(self, parts: list[tuple[bool, str]], final: bool) -> bool:
        """Take text up to the next mark; says whether that has come."""
        if self._is_fresh and not self._freshen(final):
            return False
        marks = self._ends
        if self.part == "answer" and marks is not channels.ENDS:
            stray = (mark for pair in self._tokens for mark in (pair.opening, pair.closing))
            marks = (*marks, *stray)
        places = [(at, -len(mark), mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        at, _, end = min(places, default=(len(self._held), 0, ""))
        if not (end or final):
            at -= max((partial_match_length(mark, self._held) for mark in marks), default=0)
        said = self._held[:at]
        between_marks = bool(self._ends) and self._ends is not channels.ENDS
        if self.part == "thinking" or (between_marks and (end or not final)):
            # Line breaks are kept back until the next character shows that no mark follows.
            said = said.rstrip("\n")
        self._held = self._held[at + len(end) :] if end or final else self._held[len(said) :]
        parts.append((self.thinking, said))
        if end:
            self._cross(end)
        return bool(end)

    def _cross(self, mark: str) -> None:
        """Go on behind a mark that ended a part."""
        opened = next((pair for pair in self._tokens if pair.opening == mark), None)
        if self._ends is channels.ENDS:
            self.part = "header"
        elif self.part == "thinking":
            self._answer()
            self._ends = tuple(one.closing for one in self._marks.answer if one.opening == mark)
        elif mark in self._ends:  # of the answer
            self._ends = ()
        elif opened is not None:
            self._think(opened)

    def _freshen(self, final: bool) -> bool:
        """Drop what stands between a mark and the text behind it; False if more may come."""
        self._held = self._held.lstrip("\n")
        if self._label:
            if not final and self._label != self._held and self._label.startswith(self._held):
                return False
            self._held = self._held.removeprefix(self._label).lstrip("\n")
            self._label = ""
        if self.part == "answer" and not self._ends:
            for pair in self._marks.answer:
                if self._held.startswith(pair.opening):
                    self._held = self._held[len(pair.opening) :]
                    self._ends = (pair.closing,)
                    return self._freshen(final)
                if self._held and pair.opening.startswith(self._held) and not final:
                    return False
        if self._held:
            self._is_fresh = False
        return True


def split_thinking(
    text: str, inside: bool | None = False, marks: ThinkingMarks = KNOWN_MARKS
) -> tuple[str | None, str]:
    """The thinking of a whole reply, None where it has none, and its answer; `inside` as above."""
    parts = ThinkingSplitter(inside, marks).feed(text, final=True)
    thoughts = [part for thinking, part in parts if thinking]
    answer = "".join(part for thinking, part in parts if not thinking)
    return "".join(thoughts).strip("\n") if thoughts else None, answer
