"""A budget of thinking: a grammar that allows everything until it is spent, then the end of thinking only.

So the budget cuts the same text with and without speculation. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from spd.runtime.engine.grammar import Grammar, set_bit
from spd.runtime.engine.request import ThinkingBudget

if TYPE_CHECKING:
    from torch import Tensor

BEGINNING = 2
"""Tokens of a reply among which its thinking has to begin."""


class _State(NamedTuple):
    """Where a text is: tokens generated, and tokens of thinking that are left."""

    part: Literal["beginning", "thinking", "answer"]
    tokens: int
    left: int

    @property
    def spent(self) -> bool:
        """Whether nothing but the end of thinking may follow."""
        return self.part == "thinking" and self.left <= 0


class BudgetedThinking:
    """A `Grammar` that ends thinking, around the one of the answer where there is one."""

    def __init__(self, budget: ThinkingBudget, inner: Grammar | None = None) -> None:
        self._budget, self._inner = budget, inner
        self._state = _State("thinking" if budget.inside else "beginning", 0, budget.tokens)

    @property
    def finished(self) -> bool:
        """See `Grammar`."""
        return self._inner is not None and self._inner.finished

    @property
    def complete(self) -> bool:
        """See `Grammar`."""
        return self._inner is None or self._inner.complete

    def masks(self, drafts: Sequence[int], rows: Tensor) -> int:
        """See `Grammar`."""
        legal = len(drafts)
        if self._inner is None:
            rows.fill_(-1)
        else:
            legal = self._inner.masks(drafts, rows)
        state = self._state
        for i in range(legal + 1):
            if state.spent:
                rows[i] = 0
                set_bit(rows[i], self._budget.end)
                if i < legal and drafts[i] != self._budget.end:
                    return i
            if i < legal:
                state = self._next(state, drafts[i])
        return legal

    def accept(self, token: int) -> None:
        """See `Grammar`."""
        if self._inner is not None:
            self._inner.accept(token)
        self._state = self._next(self._state, token)

    def _next(self, state: _State, token: int) -> _State:
        part, tokens, left = state
        if part == "thinking":
            return _State("answer" if token == self._budget.end else "thinking", tokens + 1, left - 1)
        if part == "beginning":
            if token == self._budget.begin:
                part = "thinking"
            elif tokens + 1 >= BEGINNING:
                part = "answer"
        return _State(part, tokens + 1, left)
