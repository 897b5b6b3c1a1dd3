"""Prompts that every engine gets alike: random ids, or spd's own where a checkpoint reads text."""

from __future__ import annotations

import random
from itertools import cycle, islice

from benchmarks.peers.options import Options
from spd.runtime.lab.prompt_set import BUILTIN_PROMPTS, encode_prompts, read_prompts

BYTES_AND_SPECIALS = 300
"""Ids below are bytes and special tokens in the recipes' vocabularies."""


def prompts(options: Options, count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Return `count` prompts of `options.prompt_tokens` ids; another seed gives others."""
    if options.text:
        lengths = [options.prompt_tokens]
        encoded = encode_prompts(
            options.model, read_prompts(BUILTIN_PROMPTS), lengths, options.tokens
        )
        return [
            list(question.ids)
            for question in islice(cycle(encoded), seed * count, (seed + 1) * count)
        ]
    draws = random.Random(seed)
    low = min(BYTES_AND_SPECIALS, vocab // 2)
    return [
        [draws.randrange(low, vocab) for _ in range(options.prompt_tokens)] for _ in range(count)
    ]
