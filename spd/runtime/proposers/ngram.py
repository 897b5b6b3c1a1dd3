"""Prompt lookup: the drafts are the tokens after the longest earlier occurrence of the current
suffix, in the slot's own text or in a pool of others.

It is a fixed-shape program over committed tokens and drafts, so it is the same eager and captured.
Of equally long matches the most recent of the slot's own text is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from spd.kernels.interface import Kernels
from spd.kernels.round.pool_lookup import TextPool, bucket_numbers
from spd.runtime.round.limits import POOL_ENTRIES, pool_buckets
from spd.runtime.round.rows import SlotView
from spd.runtime.round.state import RoundState
from spd.runtime.round.transfer import to_device


class LookupPool:
    """Texts of ended requests and earlier sessions that lookup drafts from, the latest `size` tokens.

    An index by n-grams grows with it, so that a round reads one bucket of it, however large it is.
    All of it lies on the device, and is written between rounds.
    """

    def __init__(self, size: int, ngram: int, device: str) -> None:
        """size: tokens that are kept. ngram: tokens of the shortest match."""
        buckets = pool_buckets(size)
        self.device = device
        self.ngram = ngram
        shape = (buckets + 1, POOL_ENTRIES)
        self._buckets = torch.full(shape, -1, dtype=torch.int32, device=device)
        """The buckets, and one that is never read: it takes what is not entered."""
        self.texts = TextPool(
            torch.full((size,), -1, dtype=torch.long, device=device), self._buckets[:-1]
        )
        self._counts = torch.zeros(buckets, dtype=torch.long, device=device)
        """Entries that each bucket has had so far."""
        self._end = 0
        """Where the next text begins."""

    def add_text(self, ids: Sequence[int]) -> None:
        """Append a text, or the end of one that is as long as the pool, in place of the oldest."""
        tokens = self.texts.tokens
        size = tokens.shape[0]
        text = to_device([*ids[max(0, len(ids) - size + 1) :], -1], torch.long, self.device)
        places = (self._end + torch.arange(len(text), device=self.device)) % size
        tokens[places] = text
        self._end = (self._end + len(text)) % size
        if len(text) > self.ngram:
            ngrams = text[:-1].unfold(0, self.ngram, 1).flip(-1)
            self._index_ngrams(ngrams, places[self.ngram - 1 : -1])

    def _index_ngrams(self, ngrams: torch.Tensor, ends: torch.Tensor) -> None:
        """Enter n-grams int64 [N, n], the latest token first, which end at these places."""
        last = len(self._counts)
        numbers = bucket_numbers(ngrams, last)
        ordered, order = numbers.sort(stable=True)
        first = torch.searchsorted(ordered, ordered)
        behind = torch.searchsorted(ordered, ordered, right=True)
        turns = torch.arange(len(ordered), device=self.device)
        entries = (self._counts[ordered] + turns - first) % POOL_ENTRIES
        is_kept = turns >= behind - POOL_ENTRIES  # the others would be overwritten at once
        self._buckets[torch.where(is_kept, ordered, last), entries] = ends[order].int()
        self._counts.index_add_(0, numbers, torch.ones_like(numbers))


class NgramLookup(NamedTuple):
    """Prompt lookup for matches of the last tokens, from `shortest` to `longest` of them.

    Beside a model it replaces the drafts of a slot whose text ends with a match: there the model
    only costs time. Of another slot it continues the drafts where the text with them ends with one.
    """

    kernels: Kernels
    shortest: int
    longest: int
    max_model_drafts: int = 0
    """Drafts of a model in a round at most; in rounds with more lookup drafts alone."""
    may_draft_more: bool = False
    """True if it may draft more than the model: it then searches in all rounds."""
    pool: LookupPool | None = None
    """Other texts, of which a longer match than that of the slot's own text is used."""

    def remember_text(self, ids: Sequence[int]) -> None:
        """Add a text to the pool, if there is one."""
        if self.pool is not None:
            self.pool.add_text(ids)

    def draft(
        self, state: RoundState, k: int, model_drafts: int, views: Sequence[SlotView]
    ) -> None:
        """Draft up to k tokens a slot, where a model has drafted `model_drafts`.

        A slot without a match has the model's drafts, or none.
        """
        bound = min(max((view.bound for view in views), default=0), state.max_len)
        self._search_drafts(state, k, bound, keep=model_drafts > 0)
        if model_drafts and self.may_draft_more:
            self._search_drafts(state, k, bound, keep=True, behind=model_drafts)

    def _search_drafts(
        self, state: RoundState, k: int, bound: int, *, keep: bool, behind: int = 0
    ) -> None:
        """Run one search; see `Kernels.ngram_lookup` and `Kernels.pool_lookup`."""
        self.kernels.ngram_lookup(
            state=state,
            k=k,
            ngram_min=self.shortest,
            ngram_max=self.longest,
            bound=bound,
            keep_drafts=keep,
            behind=behind,
        )
        if self.pool is not None:
            self.kernels.pool_lookup(
                state=state,
                pool=self.pool.texts,
                k=k,
                ngram_min=self.shortest,
                ngram_max=self.longest,
                behind=behind,
            )
