"""How the Triton attention cuts a context: chunks fixed by the absolute position. No torch here."""

from __future__ import annotations

SMALL_CHUNK, LARGE_CHUNK, LARGE_FROM = 128, 512, 4096
"""Positions a chunk, before LARGE_FROM and from there: many programs soon, few partial results later."""


def num_chunks(
    positions: int, small: int = SMALL_CHUNK, large: int = LARGE_CHUNK, large_from: int = LARGE_FROM
) -> int:
    """Chunks that cover `positions`."""
    return -(-min(positions, large_from) // small) + -(-max(positions - large_from, 0) // large)
