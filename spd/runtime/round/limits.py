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
NUM_RESERVED_PAGES = 2
"""The pages that no sequence gets: the trash page and the zero page."""
CATCH_UP_TOKENS = 16
"""Tokens that a drafter's cache may lack, besides a round's drafts, before one pass adds them."""
MASK_WORD_BITS = 32
"""Token ids in a word of a mask."""

POOL_ENTRIES = 8
"""Ends of n-grams in a bucket of a pool's index, of which the oldest gives way to a new one."""
TOKENS_A_BUCKET = 4
"""Tokens of a pool for each bucket of its index, at most."""


def pool_buckets(tokens: int) -> int:
    """Return the buckets of the index of a pool of so many tokens, a power of two."""
    return 1 << max(0, (tokens // TOKENS_A_BUCKET - 1).bit_length())


def mask_width(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask over `vocab_size` token ids."""
    return -(-vocab_size // MASK_WORD_BITS)


def state_ring_depth(chunk: int, draft_max: int, modules: int) -> int:
    """Return the entries of a head's ring of target states.

    chunk: positions of a prompt chunk. draft_max: drafts of a round at most. modules: modules of
    the head. The ring has room for a prompt chunk, or for a catch-up and the verified rows of three
    rounds, and for the state before them. Three rounds: the one that is read, and at most two that
    were enqueued before its end was known.
    """
    catch_up = CATCH_UP_TOKENS + 3 * (draft_max + 1) + modules
    return max(chunk, CAPABILITIES["triton"].tail_rows, catch_up) + 1


def recurrent_ring_depth(window: int) -> int:
    """Return the rows of a slot's rings in recurrent layers, for passes of at most `window` rows.

    They hold the rows since the written state, up to a block and the pass before, while a pass
    writes its own. They are a multiple of `BLOCK`, so that a block does not wrap.
    """
    return -(-(BLOCK + 2 * window) // BLOCK) * BLOCK


def draft_window_rows(draft_max: int) -> int:
    """Return the most rows that a slot has in a pass of a draft model: those of a catch-up."""
    return CATCH_UP_TOKENS + 3 * (draft_max + 1)
