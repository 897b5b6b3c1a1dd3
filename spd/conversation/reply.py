"""A reply while it grows: thinking, text and tool calls in order."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from spd.conversation.thinking import UNANSWERED_NOTE, MarkedText, ThinkingCounter
from spd.conversation.thinking_splitter import ThinkingSplitter
from spd.conversation.tools.call_check import UNKNOWN_FORM_NOTE
from spd.conversation.tools.call_forms import CALL_MARKS, FALLBACK_FORM
from spd.conversation.tools.call_grammar import Tools
from spd.conversation.tools.call_parser import CallParser, Piece
from spd.formats.thinking import KNOWN_MARKS, ThinkingMarks
from spd.runtime.engine.request import TokenLogprob

if TYPE_CHECKING:
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Event


class CalledFunction(TypedDict, total=False):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict, total=False):
    """A call as chat completions write it; in a stream only its first piece has a name."""

    id: str
    type: str
    function: CalledFunction
    index: int


@dataclass
class Part:
    """Thinking, text, or a call with its arguments as `text`; `index` is its place in the reply."""

    kind: Literal["thinking", "text", "call"]
    index: int
    text: str = ""
    name: str = ""
    id: str = ""


PartDelta = tuple[Part, str, bool]
"""A part, the text that an event added to it, and True if the part begins with that text."""


def tool_call(part: Part) -> ToolCall:
    """Return a call as chat completions write it, with its arguments so far and without `index`."""
    return {
        "id": part.id,
        "type": "function",
        "function": {"name": part.name, "arguments": part.text},
    }


class ReplyBuilder:
    """Builds one reply from events: its parts in order."""

    def __init__(
        self,
        index: int,
        inside_thinking: bool | None,
        tools: Tools | None,
        tokenizer: Tokenizer,
        *,
        marks: ThinkingMarks = KNOWN_MARKS,
        notes: Sequence[str] = (),
    ) -> None:
        """Begin an empty reply.

        inside_thinking: True if it begins inside thinking; None if nothing of it is thinking.
        notes: about how the reply was made, for the client.
        """
        self.index = index
        self._tools = tools
        self._notes = notes
        self.stop_string: str | None = None
        """The stop string that ended the reply; None if none did."""
        self._parser = CallParser(tools) if tools else None
        self._splitter = ThinkingSplitter(inside_thinking, marks)
        self._thinking_counter = ThinkingCounter(inside_thinking, tokenizer.token_bytes, marks)
        special = tokenizer.special_tokens.items() if tools else ()
        textless_marks = {
            i: mark for mark, i in special if mark in CALL_MARKS and not tokenizer.token_bytes(i)
        }
        self._marked_text = MarkedText(textless_marks, tokenizer.token_bytes)
        self.parts: list[Part] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        """stop or length; None while the reply grows."""
        self._is_unanswered = False
        """True if the reply ended while thinking, without an answer."""

    @property
    def reasoning_tokens(self) -> int:
        """Return the number of its tokens that are thinking."""
        return self._thinking_counter.tokens

    def add_event(self, event: Event) -> list[PartDelta]:
        """Add an event: its text, its log-probabilities and its end.

        Return what parts have grown by.
        """
        final = event.finish_reason is not None
        self.logprobs += event.logprobs
        self.finish_reason = "stop" if event.finish_reason == "abort" else event.finish_reason
        self._thinking_counter.add(event.token_ids)
        self.stop_string = event.stop
        pieces: list[Piece] = []
        text = self._marked_text.add(event.token_ids, event.text)
        for thinking, part in self._splitter.feed(text, final=final):
            if thinking or self._parser is None:
                pieces.append(Piece("thinking" if thinking else "text", part))
            else:
                pieces += self._parser.feed(part)
        if final and self._parser is not None:
            pieces += self._parser.feed("", final=True)
        grown = [self._append_piece(piece) for piece in pieces if piece.text or piece.name]
        if final and self._splitter.is_thinking:
            grown += [self._append_piece(piece) for piece in self._calls_ending_thinking()]
        if final and (self._splitter.is_thinking or self.text_of("thinking")):
            self._is_unanswered = not self.calls and not self.text_of("text").strip()
        return grown

    def _calls_ending_thinking(self) -> list[Piece]:
        """Return the calls at the end of thinking: they count where the model stops behind them."""
        if self._tools is None or self.finish_reason != "stop":
            return []
        functions = self._tools.functions
        parser = CallParser(self._tools)
        pieces = [*parser.feed(self.text_of("thinking")), *parser.feed("", final=True)]
        first = len(pieces)
        while first and (pieces[first - 1].kind == "call" or not pieces[first - 1].text.strip()):
            first -= 1
        calls = [piece for piece in pieces[first:] if piece.kind == "call"]
        return calls if all(call.name in functions for call in calls if call.name) else []

    def _append_piece(self, piece: Piece) -> PartDelta:
        """Append a piece to the last part, or begin a new part with it; return the change."""
        begins = bool(piece.name) or not self.parts or self.parts[-1].kind != piece.kind
        if begins:
            name = piece.id  # Kimi's templates write the id in the place of the name
            if not name or name in [call.id for call in self.calls]:
                name = secrets.token_hex(5)[1:]  # Mistral expects nine characters
            self.parts.append(
                Part(
                    kind=piece.kind, index=len(self.parts), text="", name=piece.name or "", id=name
                )
            )
        self.parts[-1].text += piece.text
        return self.parts[-1], piece.text, begins

    def text_of(self, kind: str) -> str:
        """Return the text of all parts of a kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def calls(self) -> list[Part]:
        """Return the parts that are calls."""
        return [part for part in self.parts if part.kind == "call"]

    @property
    def malformed_call_notes(self) -> Sequence[str]:
        """Return notes about malformed calls of an ended reply, which are text."""
        return (
            self._parser.notes
            if self._parser is not None and self.finish_reason is not None
            else ()
        )

    @property
    def notes_field(self) -> dict[str, list[str]]:
        """Return the field `notes` of an ended reply; an empty dictionary if there are none."""
        notes = [*self._notes, *self.malformed_call_notes]
        if self._is_unanswered:
            notes.append(UNANSWERED_NOTE)
        tools = self._tools
        is_guessed = tools is not None and tools.form is FALLBACK_FORM and not tools.required
        if is_guessed and not self.calls:
            notes.append(UNKNOWN_FORM_NOTE)
        return {"notes": notes} if notes else {}

    def message(self) -> dict[str, Any]:
        """Return the reply so far as the message of a chat: answer, thinking and calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text_of("text")}
        if thought := self.text_of("thinking"):
            message["reasoning_content"] = thought.strip("\n")
        if self.calls:
            message["tool_calls"] = [tool_call(part) for part in self.calls]
        return message
