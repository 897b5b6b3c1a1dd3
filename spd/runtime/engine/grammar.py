"""Structured output: the tokens that a grammar allows after each draft, and where a text has to
end.

`llguidance` parses grammars and follows them; it is imported with the first grammar. A thinking
budget is a grammar, too: it allows every token until it is spent, then only the end of thinking. So
the text is cut at the same place with and without speculation. No torch here. Source: llguidance's
Python interface, version 1.9.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from spd.runtime.engine.grammar_tokenizer import GrammarVocabulary
from spd.runtime.engine.large_stack import on_large_stack
from spd.runtime.engine.request import GrammarSpec, ThinkingBudget
from spd.runtime.engine.schema_text import (
    SHALLOW_BYTES,
    TOO_MANY_SYMBOLS,
    check_parts,
    check_patterns,
    check_text_size,
    closed_schema,
    grammar_error,
    library_schema_grammar,
    parser_limits,
    summarize_error,
    usable_schema,
    with_schemas,
)
from spd.runtime.round.limits import MASK_WORD_BITS, mask_width

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor

    from spd.formats.tokenizer import Tokenizer

THINKING_START_LIMIT = 2
"""First tokens of a reply among which its thinking has to begin."""
MAX_COMPILED = 64
"""Compiled grammars that are cached for later requests with the same text."""


class GrammarError(Exception):
    """A grammar without a continuation; the message says why."""


class Matcher(Protocol):
    """The methods of llguidance's LLMatcher that follow one text."""

    def is_stopped(self) -> bool:
        """True if the text is complete and no token may follow."""

    def is_accepting(self) -> bool:
        """True if the text may end here."""

    def is_error(self) -> bool:
        """True if an earlier call failed."""

    def get_error(self) -> str:
        """Return the message of the error; empty without one."""

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Advance by tokens up to the first one that is not allowed; return their number."""

    def deep_copy(self) -> Matcher:
        """Return a matcher in the same state."""

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens of the text that has to follow, as the tokenizer would write it."""

    def rollback(self, count: int, /) -> bool | None:
        """Undo the last `count` tokens."""

    def unsafe_compute_mask_ptr(self, pointer: int, size: int, /) -> None:
        """Write the mask of the next token to `size` bytes at an address."""


class Grammar:
    """The state of one text in a grammar: in a matcher of llguidance, in a thinking budget, or
    both.

    `end_ids` are the ids that end a text, which are allowed where the grammar may be complete. With
    `spec.after` the grammar begins after that token, and everything is allowed before it; between
    the tokens of `spec.thinking` that token does not count.
    """

    def __init__(
        self,
        matcher: Matcher | None,
        spec: GrammarSpec | None = None,
        library_end_ids: Collection[int] = (),
        end_ids: Collection[int] = (),
        budget: ThinkingBudget | None = None,
    ) -> None:
        """Begin a text.

        matcher, spec: None where there is only a budget. library_end_ids: the ids by which
        llguidance ends a text, which no mask allows.
        """
        self._matcher = matcher
        self._library_end_ids = tuple(library_end_ids)
        self._end_ids = frozenset(end_ids)
        self._budget = budget
        self._after = None if spec is None else spec.after
        self._optional = spec is not None and spec.optional
        self._thinking = None if spec is None else spec.thinking
        self._is_thinking = self._thinking is not None and self._thinking.inside
        self.has_begun = matcher is not None and self._after is None
        self._remaining = budget.tokens if budget is not None and budget.inside else None
        """Tokens of the budget that remain; None while the text is not thinking."""
        self._count = 0
        """Accepted tokens."""

    @property
    def is_finished(self) -> bool:
        """True if the text is complete and no token may follow."""
        return self.has_begun and self._matcher is not None and self._matcher.is_stopped()

    @property
    def is_complete(self) -> bool:
        """True if the text may end here."""
        if self._matcher is None or not self.has_begun:
            return self._matcher is None or self._optional
        return self.is_finished or self._matcher.is_accepting()

    def copy(self) -> Grammar:
        """Return a grammar in the same state that advances by itself."""
        twin = copy.copy(self)
        if self._matcher is not None:
            twin._matcher = self._matcher.deep_copy()
        return twin

    def write_draft_mask(self, row: Tensor) -> None:
        """Write a mask for the next draft to row int32 [1, words], in place.

        Where only one text may follow, its next token alone is allowed. Raises GrammarError.
        """
        if self.is_finished:
            raise GrammarError("the text is complete")
        forced = []
        if self._forces and self._matcher is not None:
            forced = self._matcher.compute_ff_tokens()
        if forced:
            row.zero_()
            row[0, forced[0] // MASK_WORD_BITS] = _token_bit(forced[0])
        else:
            self.write_masks((), row)

    @property
    def _forces(self) -> bool:
        """True if the matcher alone says what may follow."""
        return self._matcher is not None and self.has_begun and self._budget is None

    def write_masks(self, drafts: Sequence[int], rows: Tensor) -> int:
        """Write a mask for the row of each draft and one more; return how many leading drafts are
        allowed.

        rows int32 [n > len(drafts), words], in place: bit v & 31 of word v >> 5 is set where token
        v is allowed. The grammar's state is the same afterwards. Raises GrammarError.
        """
        rows.fill_(-1)
        num_legal = len(drafts)
        if self._matcher is not None:
            num_legal = self._write_matcher_masks(self._matcher, drafts, rows)
        budget = self._budget
        if budget is None:
            return num_legal
        remaining = self._remaining
        for i in range(num_legal + 1):
            if remaining is not None and remaining <= 0:
                rows[i] = 0
                rows[i, budget.end // MASK_WORD_BITS] = _token_bit(budget.end)
                if i < num_legal and drafts[i] != budget.end:
                    return i
            if i < num_legal:
                remaining = self._remaining_after(remaining, drafts[i], self._count + i)
        return num_legal

    def force_drafts(self, drafts: Sequence[int], limit: int) -> list[int]:
        """Return the leading drafts that are allowed, and behind them what the grammar forces.

        At most `limit` tokens. The forced ones are those of the only text that may follow; other
        tokens may be allowed there that begin it. The grammar's state is the same afterwards.
        Raises GrammarError.
        """
        matcher = self._matcher
        if matcher is None or not self._forces:
            return [*drafts]
        tokens = [*drafts[:limit]]
        ends = [number for number, draft in enumerate(tokens) if draft in self._end_ids]
        if ends:
            tokens = tokens[: ends[0]]  # `write_masks` tests whether the text may end there
        num_consumed = matcher.try_consume_tokens(tokens)
        if num_consumed == len(tokens) and ends:
            matcher.rollback(num_consumed)
            return [*drafts]
        del tokens[num_consumed:]
        while len(tokens) < limit and not matcher.is_stopped():
            forced = matcher.compute_ff_tokens()[: limit - len(tokens)]
            count = matcher.try_consume_tokens(forced)
            tokens += forced[:count]
            if not count:
                break
        matcher.rollback(len(tokens))
        self._raise_error(matcher)
        return tokens

    def _write_matcher_masks(self, matcher: Matcher, drafts: Sequence[int], rows: Tensor) -> int:
        """Write the masks of the matcher alone; see `write_masks`."""
        has_begun = self.has_begun
        num_consumed = 0
        num_legal = len(drafts)
        is_thinking = self._is_thinking
        for i, draft in enumerate((*drafts, None)):
            if has_begun and matcher.is_stopped():
                num_legal = min(num_legal, i)  # the text ends before this row
                break
            if has_begun:
                self._write_matcher_mask(matcher, rows[i])
            if draft is None:
                break
            if not has_begun:
                has_begun = draft == self._after and not is_thinking
                is_thinking = self._is_thinking_after(is_thinking, draft, self._count + i)
            elif draft in self._end_ids or not matcher.try_consume_tokens([draft]):
                num_legal = i + (draft in self._end_ids and matcher.is_accepting())
                break
            else:
                num_consumed += 1
        if num_consumed:
            matcher.rollback(num_consumed)
        self._raise_error(matcher)
        return num_legal

    def _write_matcher_mask(self, matcher: Matcher, row: Tensor) -> None:
        """Write the mask of the matcher's current state, in place."""
        words = row.numel()
        matcher.unsafe_compute_mask_ptr(row.data_ptr(), words * row.element_size())
        self._raise_error(matcher)
        # Of a tensor an element takes ten times as long, more than the mask itself.
        mask = (ctypes.c_int32 * words).from_address(row.data_ptr())
        for token in self._library_end_ids:
            mask[token // MASK_WORD_BITS] &= ~_token_bit(token)
        if matcher.is_accepting():
            for token in self._end_ids:
                mask[token // MASK_WORD_BITS] |= _token_bit(token)

    def _raise_error(self, matcher: Matcher) -> None:
        """Raise GrammarError if the matcher is in error."""
        if matcher.is_error():
            raise GrammarError(f"the grammar failed: {summarize_error(matcher.get_error())}")

    def accept_token(self, token: int) -> None:
        """Advance by a committed token that is no end. Raises GrammarError if it is not allowed."""
        if not self.has_begun:
            is_opening = token == self._after and not self._is_thinking
            self.has_begun = self._matcher is not None and is_opening
            self._is_thinking = self._is_thinking_after(self._is_thinking, token, self._count)
        elif self._matcher is not None and not self._matcher.try_consume_tokens([token]):
            self._raise_error(self._matcher)
            raise GrammarError(f"token {token} is not allowed by the grammar")
        self._remaining = self._remaining_after(self._remaining, token, self._count)
        self._count += 1

    def begins_after(self, tokens: Sequence[int]) -> bool:
        """True if the grammar begins after the last of the next `tokens`."""
        is_thinking = self._is_thinking
        for index, token in enumerate(tokens[:-1], self._count):
            is_thinking = self._is_thinking_after(is_thinking, token, index)
        return tokens[-1] == self._after and not is_thinking

    def _is_thinking_after(self, is_thinking: bool, token: int, index: int) -> bool:
        """True if the text is thinking after token `index`; is_thinking: whether it was before."""
        if self._thinking is None or token == self._thinking.end:
            return False
        begins = token == self._thinking.begin and index < THINKING_START_LIMIT
        return is_thinking or begins

    def _remaining_after(self, remaining: int | None, token: int, index: int) -> int | None:
        """Return the budget that remains after token `index`; `remaining` is the one before it."""
        if self._budget is None or token == self._budget.end:
            return None
        if remaining is None:
            begins = token == self._budget.begin and index < THINKING_START_LIMIT
            return self._budget.tokens if begins else None
        return remaining - 1


def _token_bit(token: int) -> int:
    """Return the mask word in which only this token is allowed, as an int32."""
    bit = 1 << (token % MASK_WORD_BITS)
    return bit - (1 << MASK_WORD_BITS) if bit >> (MASK_WORD_BITS - 1) else bit


class GrammarCompiler:
    """Compiles grammars for one vocabulary, in any thread, and caches the latest."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """tokenizer: the one that encodes the prompts; without one no grammar can be compiled."""
        self._encoder = tokenizer
        self.vocab_size = vocab_size
        self._library_tokenizer: LLTokenizer | None = None
        self._initial_matchers = lru_cache(MAX_COMPILED)(self._initial_matcher)
        self._lock = threading.Lock()

    def compile(
        self,
        spec: GrammarSpec | None,
        end_ids: Collection[int],
        budget: ThinkingBudget | None = None,
    ) -> Grammar | None:
        """Return the state of a grammar, or of a thinking budget alone, before its first token.

        end_ids: the ids that end a text. Compiled grammars are cached. None where neither is given.
        Raises UsageError for a grammar that cannot be parsed.
        """
        if spec is None:
            return None if budget is None else Grammar(None, budget=budget)
        check_text_size(spec.kind, spec.text)
        initial = self._initial_matchers(spec.kind, spec.text)
        with self._lock:
            matcher = initial.deep_copy()
        library_end_ids = self._load_tokenizer(spec.kind).eos_tokens
        return Grammar(
            matcher=matcher,
            spec=spec,
            library_end_ids=library_end_ids,
            end_ids=end_ids,
            budget=budget,
        )

    def _load_tokenizer(self, kind: str) -> LLTokenizer:
        """Return llguidance's form of the vocabulary, which is made once.

        Raises UsageError without a tokenizer.
        """
        if self._library_tokenizer is None:
            if self._encoder is None:
                raise grammar_error(kind, "the model has no tokenizer")
            size = mask_width(self.vocab_size) * MASK_WORD_BITS
            self._library_tokenizer = GrammarVocabulary(self._encoder, size).library()
        return self._library_tokenizer

    def _initial_matcher(self, kind: str, text: str) -> LLMatcher:
        """Compile a grammar, on a large stack where its text is long; return a matcher before its
        first token.

        Raises UsageError for a grammar that cannot be used.
        """
        if len(text) <= SHALLOW_BYTES:
            return self._checked_matcher(kind, text)
        return on_large_stack(lambda: self._checked_matcher(kind, text))

    def _checked_matcher(self, kind: str, text: str) -> LLMatcher:
        """Return a matcher as `_initial_matcher` does, on the stack of the calling thread."""
        self._load_tokenizer(kind)
        check_patterns(kind, text)
        check_parts(kind, text)
        matcher = self._new_matcher(kind, with_schemas(kind, text, closed_schema))
        if matcher.is_error() and TOO_MANY_SYMBOLS not in matcher.get_error():
            # One of its schemas may be unusable closed: try each of them alone.
            matcher = self._new_matcher(kind, with_schemas(kind, text, usable_schema))
        if matcher.is_error():
            raise grammar_error(kind, matcher.get_error())
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise grammar_error(kind, "no text begins as it says")
        return matcher

    def _new_matcher(self, kind: str, prepared_text: str) -> LLMatcher:
        """Return a matcher of a grammar whose schemas are prepared; it may be in error."""
        from llguidance import LLMatcher

        grammar = _library_grammar(kind, prepared_text)
        tokenizer = self._load_tokenizer(kind)
        return LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())


def _library_grammar(kind: str, text: str) -> str:
    """Return a grammar in llguidance's own form. Raises UsageError."""
    from llguidance import LLMatcher

    try:
        if kind == "schema":
            return library_schema_grammar(text)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        return LLMatcher.grammar_from_lark(text)
    except (ValueError, RuntimeError) as error:
        raise grammar_error(kind, str(error)) from None
