"""Blocks and chunks of a context in attention, fixed by the absolute position. No torch here."""

from __future__ import annotations

KV_BLOCK = 512
"""Positions a block: torch's CPU flash attention reads keys in such blocks, and slots have whole
ones."""
SMALL_CHUNK = 128
"""Positions of a chunk of Triton's before `LARGE_FROM`: short contexts have many programs."""
LARGE_CHUNK = 512
"""Positions of a chunk of Triton's from `LARGE_FROM` on: long contexts have few parts to
combine."""
LARGE_FROM = 4096
"""The position from which chunks are large."""
CODE_CHUNKS = 2
"""Chunks of 16-bit numbers that have the bytes of one chunk of codes, which has their positions.

A chunk's first bytes take their time however many there are.
"""


def num_chunks(positions: int, *, rounded: bool = False) -> int:
    """Return the number of chunks that cover `positions`; rounded: of codes."""
    factor = CODE_CHUNKS if rounded else 1
    return -(-min(positions, LARGE_FROM) // (SMALL_CHUNK * factor)) + -(
        -max(positions - LARGE_FROM, 0) // (LARGE_CHUNK * factor)
    )
