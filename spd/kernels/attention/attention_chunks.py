"""How the Triton attention cuts a context: chunks fixed by the absolute position. No torch here."""

from __future__ import annotations

SMALL_CHUNK, LARGE_CHUNK, LARGE_FROM = 128, 512, 4096
"""Positions a chunk, before LARGE_FROM and from there: many programs soon, few partial results later."""


def num_chunks(positions: int) -> int:
    """Chunks that cover `positions`."""
    return -(-min(positions, LARGE_FROM) // SMALL_CHUNK) + -(
        -max(positions - LARGE_FROM, 0) // LARGE_CHUNK
    )
