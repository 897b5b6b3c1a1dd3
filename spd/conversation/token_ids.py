"""Token ids that a user has given."""

from __future__ import annotations

from collections.abc import Sequence

from spd.errors import UsageError


def check_token_ids(ids: Sequence[int], vocab_size: int, flag: str) -> None:
    """Raise UsageError for a token id that is not from 0 to below `vocab_size`.

    flag: the option that holds the ids, for the message.
    """
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            message = f"{flag}: token id {token_id} is not in the vocabulary"
            raise UsageError(message, reason=[f"valid: 0 to {vocab_size - 1}"])
