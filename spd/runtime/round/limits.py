"""Sizes shared by the round, the plan and the engine. No torch here."""

from __future__ import annotations

from spd.kernels.capabilities import CAPABILITIES
from spd.kernels.recurrent.state_blocks import BLOCK

PAGE_SIZE = 64
"""Positions of a page."""
TRASH_PAGE = 0
"""The page that takes rows which must not be kept."""
ZERO_PAGE = 1
"""The page that stays zero and pads gathers."""
NUM_RESERVED = 2
CATCH_UP = 16
"""Tokens that a drafter's cache may lack, besides a round's drafts, before one pass adds them."""
WORD = 32
"""Token ids in a word of a mask."""


def mask_width(vocab_size: int) -> int:
    """Return the words of a mask over `vocab_size` ids."""
    return -(-vocab_size // WORD)


def state_depth(chunk: int, draft_max: int, modules: int) -> int:
    """Return the entries of a ring of target states.

    It has room for a prompt chunk, or for a catch-up and the verified rows of three rounds, and for
    the state before them. Three rounds: the one that is read, and at most two that were enqueued
    before its end was known.
    """
    catch_up = CATCH_UP + 3 * (draft_max + 1) + modules
    return max(chunk, CAPABILITIES["triton"].tail_rows, catch_up) + 1


def ring_depth(window: int) -> int:
    """Return the rows of a slot's rings in recurrent layers, for passes of at most `window` rows.

    They hold the rows since the written state, up to a block and the pass before, while a pass
    writes its own. They are a multiple of `BLOCK`, so that a block does not wrap.
    """
    return -(-(BLOCK + 2 * window) // BLOCK) * BLOCK


def draft_window(draft_max: int) -> int:
    """Return the rows of a slot in a pass of a draft model at most: a catch-up has the most."""
    return CATCH_UP + 3 * (draft_max + 1)
