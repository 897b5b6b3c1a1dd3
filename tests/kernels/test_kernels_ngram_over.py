"""Prompt lookup over drafts that are there already, and what it says of its matches."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.test_kernels_ngram_lookup import NAMES, compiled, op, random_text  # noqa: F401
from tests.prompt_lookup import search

WIDTH, WIDE = 150, 12
THERE, COUNT, MATCH = -7, 9, -5
"""What stands in drafts, their numbers and matches before."""


def match_length(text: list[int], longest: int) -> int:
    """Of the suffix that has occurred before, by trying every end."""
    last, best = len(text) - 1, 0
    for end in range(last):
        size = 0
        while size < longest and size <= end and text[end - size] == text[last - size]:
            size += 1
        best = max(best, size)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_a_match_takes_the_place_of_drafts(op: Any, device: str, seed: int) -> None:  # noqa: F811
    """Of every slot apart: silent ones keep all, those without a match their drafts."""
    rng = random.Random(seed)
    slots, shortest, longest = 6, rng.randint(1, 5), rng.randint(5, 9)
    over = seed % 3 > 0
    texts = [random_text(rng) for _ in range(slots)]
    active = torch.tensor([rng.random() < 0.8 for _ in range(slots)])
    tokens = torch.zeros(slots, WIDTH, dtype=torch.long)
    for s, text in enumerate(texts):
        tokens[s, : len(text)] = torch.tensor(text)
    length = torch.tensor([len(text) for text in texts])
    for k in (0, 1, 4, WIDE):
        counts = torch.tensor([rng.choice((0, COUNT)) for _ in range(slots)])
        state = [
            tokens,
            length,
            active,
            torch.full((slots, WIDE), THERE),
            counts,
            torch.full((slots,), MATCH),
        ]
        rows = [tensor.clone().to(device) for tensor in state]
        asked = SimpleNamespace(**dict(zip(NAMES, rows, strict=True)))
        op.ngram_lookup(asked, k, shortest, longest, int(length.max()), over=over)
        for s, text in enumerate(texts):
            draft, count, matched = (rows[i][s].tolist() for i in (3, 4, 5))
            size = match_length(text, longest) if active[s] else 0
            found = size if size >= shortest else 0
            if not over or (found and active[s]):
                expected = search(text, k, shortest, longest) if found else []
                assert (draft[:k], count) == (expected + [0] * (k - len(expected)), len(expected))
            else:
                assert (draft[:k], count) == ([THERE] * k, counts[s])
            assert draft[k:] == [THERE] * (WIDE - k)
            assert matched == (found if active[s] else MATCH)
