"""Sizes that the round, its plan and its host agree on. No torch here."""

from __future__ import annotations

from spd.kernels.capabilities import CAPABILITIES

PAGE_SIZE = 64
TRASH_PAGE = 0
ZERO_PAGE = 1
NUM_RESERVED = 2
"""Page 0 takes rows that must not be kept, page 1 stays zero and pads gathers."""
CATCH_UP = 16  # tokens that a drafter's cache may lack, besides a round's drafts, before one pass adds them
WORD = 32  # token ids a word of a mask


def mask_width(vocab_size: int) -> int:
    """Words of a mask over that many ids."""
    return -(-vocab_size // WORD)


def state_depth(chunk: int, draft_max: int, modules: int) -> int:
    """Places of a ring of states: a prompt chunk, or a catch-up beside verifications, and the one before.

    Those are the round's that is read and of two, at most, that were enqueued before its end was known.
    """
    return (
        max(chunk, CAPABILITIES["triton"].tail_rows, CATCH_UP + 3 * (draft_max + 1) + modules) + 1
    )


def ring_depth(draft_max: int) -> int:
    """Rows of a slot that recurrent layers keep in addition to its state.

    A pass applies those of the one before while it writes its own; one that brings a drafter up has most.
    """
    return 2 * (CATCH_UP + 3 * (draft_max + 1))
