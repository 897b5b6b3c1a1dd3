"""Merges of a SentencePiece vocabulary in short texts, without the list of all merges.

The library needs every merge that the scores imply: half a million for Gemma, which take longer to
build than anything else before the first token. A short text needs a few hundred. So the library
splits a text into characters and bytes here, and neighbours are merged in the same order; after
enough text the list is built.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import tokenizers

from spd.formats.encoder import encode_ids

MAX_MERGED_CHARACTERS = 100_000
"""Characters in all that are merged here before the library gets the full list."""

MergeKey = tuple[float, int, int, int]
"""The rank of a merge: the least one is done first."""
MergeOrder = Callable[[int, int, int], MergeKey]
"""Returns the rank of a merge, by the ids of the merged token and of its two parts."""


@dataclass
class ScoredMerges:
    """Encodes texts with a library that has the tokens, and no merges until it has seen enough."""

    library: tokenizers.Tokenizer
    texts: Sequence[str]
    """Tokens by id."""
    mergeable: Set[int]
    """Ids of tokens that a merge may result in."""
    unmergeable: Set[int]
    """Ids that never merge: tokens that are matched in a text before it is cut, and bytes."""
    order: MergeOrder
    """Ranks the merges."""
    build_full_model: Callable[[], tokenizers.models.BPE]
    """Builds the library's model with all merges."""
    remaining: int = MAX_MERGED_CHARACTERS
    """Characters until the full model is built; `encode` counts it down."""
    _has_full_model: bool = field(default=False, init=False)
    _ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Set the ids of the mergeable tokens by their texts."""
        self._ids = {self.texts[number]: number for number in self.mergeable}

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Return the ids of a text; build the library's full model after enough text, once.

        parse_special: see `encode_ids`.
        """
        if not self._has_full_model:
            self.remaining -= len(text)
            if self.remaining >= 0:
                return self.merge_ids(encode_ids(self.library, text, parse_special))
            self.library.model = self.build_full_model()
            self._has_full_model = True
        return encode_ids(self.library, text, parse_special)

    def merge_ids(self, ids: list[int]) -> list[int]:
        """Return ids of characters and bytes with neighbours merged, in the order of ranks.

        The given list stays as it is.
        """
        symbols: list[int | None] = list(ids)
        before = list(range(-1, len(ids) - 1))
        after = list(range(1, len(ids) + 1))
        queue: list[tuple[MergeKey, int, int, int, int]] = []
        can_merge = [number not in self.unmergeable for number in ids]

        def propose(left: int, right: int) -> None:
            """Queue the merge of the symbols at two neighbouring positions, if there is one."""
            if left < 0 or right == len(ids) or not (can_merge[left] and can_merge[right]):
                return
            first = symbols[left]
            second = symbols[right]
            assert first is not None and second is not None
            merged = self._ids.get(self.texts[first] + self.texts[second])
            if merged is not None:
                key = self.order(merged, first, second)
                heapq.heappush(queue, (key, left, first, second, merged))

        for position in range(1, len(ids)):
            propose(position - 1, position)
        while queue:
            _, left, first, second, merged = heapq.heappop(queue)
            right = after[left]
            if symbols[left] != first or right == len(ids) or symbols[right] != second:
                continue
            symbols[left] = merged
            symbols[right] = None
            after[left] = after[right]
            if after[right] < len(ids):
                before[after[right]] = left
            propose(before[left], left)
            propose(left, after[left])
        return [number for number in symbols if number is not None]
