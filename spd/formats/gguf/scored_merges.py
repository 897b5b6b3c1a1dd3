"""Merges of a SentencePiece vocabulary in short texts, without the list of all of them.

The library wants every merge that scores mean: half a million for Gemma, which takes longer to write down
than anything else before the first token. A short text meets a few hundred. So the library gives characters
and bytes here, and neighbours are merged by the same order; once enough text has come, the list is made.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import tokenizers

from spd.formats.encoder import encode_ids

FEW = 100_000
"""Characters in all that are merged here before the library has the whole list."""

Key = tuple[float, int, int, int]
Order = Callable[[int, int, int], Key]
"""The place of a merge among all, by the ids of what it makes and of its two parts."""


@dataclass
class ScoredMerges:
    """Encodes texts over a library that has the tokens and no merges."""

    library: tokenizers.Tokenizer
    texts: Sequence[str]
    """Tokens by id."""
    made: Set[int]
    """Ids of tokens that merges may make."""
    kept: Set[int]
    """Ids that merge with nothing: tokens that are found in a text before it is cut, bytes."""
    order: Order
    whole: Callable[[], tokenizers.models.BPE]
    """Makes the library's model with every merge."""
    left: int = FEW
    """Characters until that is wanted."""
    _has_all: bool = field(default=False, init=False)
    _ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._ids = {self.texts[number]: number for number in self.made}

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Return the ids of a text."""
        if not self._has_all:
            self.left -= len(text)
            if self.left >= 0:
                return self.merged(encode_ids(self.library, text, parse_special))
            self.library.model = self.whole()
            self._has_all = True
        return encode_ids(self.library, text, parse_special)

    def merged(self, ids: list[int]) -> list[int]:
        """Return ids of characters and bytes with neighbours merged, the first merge in order first."""
        symbols: list[int | None] = list(ids)
        before = list(range(-1, len(ids) - 1))
        after = list(range(1, len(ids) + 1))
        waiting: list[tuple[Key, int, int, int, int]] = []
        free = [number not in self.kept for number in ids]

        def propose(left: int, right: int) -> None:
            """Note the merge of two neighbours, if there is one."""
            if left < 0 or right == len(ids) or not (free[left] and free[right]):
                return
            first = symbols[left]
            second = symbols[right]
            assert first is not None and second is not None
            whole = self._ids.get(self.texts[first] + self.texts[second])
            if whole is not None:
                key = self.order(whole, first, second)
                heapq.heappush(waiting, (key, left, first, second, whole))

        for at in range(1, len(ids)):
            propose(at - 1, at)
        while waiting:
            _, left, first, second, whole = heapq.heappop(waiting)
            right = after[left]
            if symbols[left] != first or right == len(ids) or symbols[right] != second:
                continue
            symbols[left] = whole
            symbols[right] = None
            after[left] = after[right]
            if after[right] < len(ids):
                before[after[right]] = left
            propose(before[left], left)
            propose(left, after[left])
        return [number for number in symbols if number is not None]
