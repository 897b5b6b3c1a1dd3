"""Structured output: which tokens a grammar allows after each draft, and where a text has to end.

`llguidance` parses and walks; it is imported with the first grammar. A budget of thinking is a
grammar, too: it allows everything until it is spent, then the end of thinking only, so it cuts the same text
with and without speculation. No torch here. Source: llguidance's Python interface, version 1.9.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from spd.runtime.engine.grammar_tokenizer import GrammarVocabulary
from spd.runtime.engine.large_stack import on_large_stack
from spd.runtime.engine.request import JSON_STYLE, GrammarSpec, ThinkingBudget
from spd.runtime.engine.schema_text import (
    SHALLOW_BYTES,
    TOO_MANY_SYMBOLS,
    check_parts,
    check_patterns,
    check_size,
    closed_schema,
    parser_limits,
    refused,
    summarize_error,
    usable_schema,
    with_schemas,
)
from spd.runtime.round.limits import WORD, mask_width

if TYPE_CHECKING:
    from torch import Tensor

    from spd.formats.tokenizer import Tokenizer

BEGINNING = 2  # tokens of a reply among which its thinking has to begin
KEPT = 64  # compiled grammars that are kept for the next request with the same text


class GrammarError(Exception):
    """A grammar that cannot go on, in words."""


class Grammar:
    """One text's way through a grammar, over an llguidance matcher, through a budget of thinking, or both.

    `ends` are the ids that end a text, allowed where the grammar may be complete. With `text.after` the
    grammar begins behind that token, and everything is allowed before; between the tokens of
    `text.thinking` that one does not count.
    """

    def __init__(
        self,
        matcher: Any,
        text: GrammarSpec | None = None,
        own_ends: Collection[int] = (),
        ends: Collection[int] = (),
        budget: ThinkingBudget | None = None,
    ) -> None:
        """matcher, text: None where there is nothing but a budget."""
        self._matcher = matcher
        self._own_ends = tuple(own_ends)
        self._ends = frozenset(ends)
        self._budget = budget
        self._after = None if text is None else text.after
        self._optional = text is not None and text.optional
        self._thinking = None if text is None else text.thinking
        self._thinks = self._thinking is not None and self._thinking.inside
        self.began = matcher is not None and self._after is None
        self._left = budget.tokens if budget is not None and budget.inside else None
        """Tokens of thinking that are left; None outside of it."""
        self._count = 0  # tokens that were accepted

    @property
    def finished(self) -> bool:
        """Whether nothing may follow: the text is complete."""
        return self.began and bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        if self._matcher is None or not self.began:
            return self._matcher is None or self._optional
        return self.finished or bool(self._matcher.is_accepting())

    def masks(self, drafts: Sequence[int], rows: Tensor) -> int:
        """Write a mask for the row of each draft and one more; returns how many drafts lead legally.

        rows int32 [n > len(drafts), words], bit v & 31 of word v >> 5 set where token v is allowed. The
        state is afterwards what it was. Raises GrammarError.
        """
        rows.fill_(-1)
        legal = len(drafts) if self._matcher is None else self._guided(drafts, rows)
        left = self._left
        for i in range(legal + 1 if self._budget is not None else 0):
            assert self._budget is not None
            if left is not None and left <= 0:
                rows[i] = 0
                rows[i, self._budget.end // WORD] = _bit(self._budget.end)
                if i < legal and drafts[i] != self._budget.end:
                    return i
            if i < legal:
                left = self._left_behind(left, drafts[i], self._count + i)
        return legal

    def _guided(self, drafts: Sequence[int], rows: Tensor) -> int:
        began = self.began
        consumed = 0
        legal = len(drafts)
        thinks = self._thinks
        for i, draft in enumerate((*drafts, None)):
            if began and self._matcher.is_stopped():
                legal = min(legal, i)  # the text ends before this row, whatever is drawn in it
                break
            if began:
                self._write(rows[i])
            if draft is None:
                break
            if not began:
                began = draft == self._after and not thinks
                thinks = self._thinks_behind(thinks, draft, self._count + i)
            elif draft in self._ends or not self._matcher.try_consume_tokens([draft]):
                legal = i + (draft in self._ends and self._matcher.is_accepting())
                break
            else:
                consumed += 1
        if consumed:
            self._matcher.rollback(consumed)
        self._raise_error()
        return legal

    def _write(self, row: Tensor) -> None:
        """The mask of the state as it is."""
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        self._raise_error()
        for token in self._own_ends:
            row[token // WORD] &= ~_bit(token)
        if self._matcher.is_accepting():
            for token in self._ends:
                row[token // WORD] |= _bit(token)

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar failed: {summarize_error(self._matcher.get_error())}")

    def accept(self, token: int) -> None:
        """Go on by a committed token that ends nothing. Raises GrammarError if it is not allowed."""
        if not self.began:
            self.began = self._matcher is not None and token == self._after and not self._thinks
            self._thinks = self._thinks_behind(self._thinks, token, self._count)
        elif not self._matcher.try_consume_tokens([token]):
            self._raise_error()
            raise GrammarError(f"token {token} is not allowed by the grammar")
        self._left = self._left_behind(self._left, token, self._count)
        self._count += 1

    def begins_behind(self, tokens: Sequence[int]) -> bool:
        """True if the grammar begins behind the last of these tokens, which come next."""
        thinks = self._thinks
        for index, token in enumerate(tokens[:-1], self._count):
            thinks = self._thinks_behind(thinks, token, index)
        return tokens[-1] == self._after and not thinks

    def _thinks_behind(self, thinks: bool, token: int, index: int) -> bool:
        """True if the text is thinking behind its token of this index, `thinks` before it."""
        if self._thinking is None or token == self._thinking.end:
            return False
        return thinks or (token == self._thinking.begin and index < BEGINNING)

    def _left_behind(self, left: int | None, token: int, index: int) -> int | None:
        """Tokens of thinking that are left behind the reply's token of this index, `left` before it."""
        if self._budget is None or token == self._budget.end:
            return None
        if left is None:
            return (
                self._budget.tokens if token == self._budget.begin and index < BEGINNING else None
            )
        return left - 1


def _bit(token: int) -> int:
    """The word in which only this token is allowed, as an int32."""
    bit = 1 << (token % WORD)
    return bit - (1 << WORD) if bit >> (WORD - 1) else bit


class GrammarCompiler:
    """Compiles grammars for one vocabulary, in any thread, and keeps the latest."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """tokenizer: the one that encodes the prompts; None where no grammar can be asked for."""
        self._encoder = tokenizer
        self.vocab_size = vocab_size
        self._tokenizer: Any = None
        self._kept = lru_cache(KEPT)(self._read)
        self._lock = threading.Lock()

    def compile(
        self, text: GrammarSpec | None, ends: Collection[int], budget: ThinkingBudget | None = None
    ) -> Grammar | None:
        """A grammar at its beginning. Raises UsageError for one that cannot be read."""
        if text is None:
            return None if budget is None else Grammar(None, budget=budget)
        check_size(text.kind, text.text)
        kept = self._kept(text.kind, text.text)
        with self._lock:
            matcher = kept.deep_copy()
        return Grammar(matcher, text, self._tokenizer.eos_tokens, ends, budget)

    def _read(self, kind: str, text: str) -> Any:
        """Return a matcher at the beginning of a grammar. Raises UsageError."""
        if len(text) <= SHALLOW_BYTES:
            return self._checked(kind, text)
        return on_large_stack(lambda: self._checked(kind, text))

    def _checked(self, kind: str, text: str) -> Any:
        """Return a matcher as `_read` does, on the stack of the thread that asks."""
        if self._tokenizer is None:
            if self._encoder is None:
                raise refused(kind, "the model has no tokenizer")
            size = mask_width(self.vocab_size) * WORD
            self._tokenizer = GrammarVocabulary(self._encoder, size).library()
        check_patterns(kind, text)
        check_parts(kind, text)
        matcher = self._matcher(kind, with_schemas(kind, text, closed_schema))
        if matcher.is_error() and TOO_MANY_SYMBOLS not in matcher.get_error():
            # perhaps by a schema that has to be looked at by itself
            matcher = self._matcher(kind, with_schemas(kind, text, usable_schema))
        if matcher.is_error():
            raise refused(kind, matcher.get_error())
        beginning = matcher.deep_copy()
        beginning.compute_bitmask()
        if beginning.is_error():
            raise refused(kind, "no text begins as it says")
        return matcher

    def _matcher(self, kind: str, prepared: str) -> Any:
        """Return a matcher of a grammar whose schemas are prepared; it may be in error."""
        from llguidance import LLMatcher

        grammar = _grammar(kind, prepared)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())


def _grammar(kind: str, text: str) -> str:
    """Return a grammar as llguidance takes it. Raises UsageError."""
    from llguidance import LLMatcher

    try:
        if kind == "schema":
            style = JSON_STYLE if text.lstrip().startswith("{") else None
            return LLMatcher.grammar_from_json_schema(text, style)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        return LLMatcher.grammar_from_lark(text)
    except (ValueError, RuntimeError) as error:
        raise refused(kind, str(error)) from None
