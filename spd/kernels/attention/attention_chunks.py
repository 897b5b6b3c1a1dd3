"""Blocks and chunks of a context in attention, fixed by the absolute position. No torch here."""

from __future__ import annotations

KV_BLOCK = 512
"""Positions a block: torch's CPU flash attention reads keys in such blocks, and slots have whole
ones."""
SMALL_CHUNK = 128
"""Positions of a chunk of Triton's before `TWICE_FROM`: short contexts have many programs."""
TWICE_FROM = 1024
"""The position from which chunks are twice as large."""
LARGE_FROM = 4096
"""The position from which they are four times as large: long contexts have few parts to combine."""
CODE_CHUNKS = 2
"""Chunks of 16-bit numbers that have the bytes of one chunk of codes, which has their positions.

A chunk's first bytes take their time however many there are.
"""


def small_chunk(*, rounded: bool = False) -> int:
    """Return the positions of the first chunks; rounded: of codes."""
    return SMALL_CHUNK * (CODE_CHUNKS if rounded else 1)


def num_chunks(positions: int, *, rounded: bool = False) -> int:
    """Return the number of chunks that cover `positions`; rounded: of codes."""
    size = small_chunk(rounded=rounded)
    small = min(positions, TWICE_FROM)
    twice = min(positions, LARGE_FROM) - small
    return -(-small // size) - (-twice // (2 * size)) - (-(positions - small - twice) // (4 * size))
