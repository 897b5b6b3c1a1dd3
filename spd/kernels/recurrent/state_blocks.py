"""The positions of written states of recurrent layers. Imports no torch: the plan reads it."""

from __future__ import annotations

BLOCK = 16
"""Positions between two written states of a recurrent layer; those at multiples are borders."""


def last_border(position: int) -> int:
    """Return the last border up to a position."""
    return position // BLOCK * BLOCK
