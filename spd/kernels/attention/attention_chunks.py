"""How attention cuts a context: blocks and chunks fixed by the absolute position. No torch here."""

from __future__ import annotations

KV_BLOCK = 512
"""Positions a block: torch's CPU flash attention walks keys in such blocks, and slots have whole ones."""
SMALL_CHUNK = 128
LARGE_CHUNK = 512
LARGE_FROM = 4096
"""Positions a chunk of Triton's, before LARGE_FROM and from there: many programs soon, few parts later."""


def num_chunks(positions: int) -> int:
    """Chunks that cover `positions`."""
    return -(-min(positions, LARGE_FROM) // SMALL_CHUNK) + -(
        -max(positions - LARGE_FROM, 0) // LARGE_CHUNK
    )
