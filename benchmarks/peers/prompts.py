"""Prompts that every engine is given alike: random ids, for not every checkpoint can read text."""

from __future__ import annotations

import random

BYTES_AND_SPECIALS = 300
"""Ids below are bytes and special tokens in the recipes' vocabularies."""


def random_prompts(count: int, tokens: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `tokens` ids."""
    draws = random.Random(seed)
    low = min(BYTES_AND_SPECIALS, vocab // 2)
    return [[draws.randrange(low, vocab) for _ in range(tokens)] for _ in range(count)]
