"""Log-probabilities of tokens as JSON values."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime.engine.request import TokenLogprob


class TokenEntry(TypedDict):
    """A token with its log-probability."""

    token_id: int
    token: str
    bytes: list[int]
    logprob: float


class LogprobEntry(TokenEntry):
    """A sampled token, and the likeliest tokens at its position."""

    top: list[TokenEntry]


def logprob_entry(entry: TokenLogprob, tokenizer: Tokenizer | None) -> LogprobEntry:
    """Return a token's log-probability, and those of the likeliest, with their text and bytes."""
    top = [_token_entry(token_id, logprob, tokenizer) for token_id, logprob in entry.top]
    return {**_token_entry(entry.token_id, entry.logprob, tokenizer), "top": top}


def _token_entry(token_id: int, logprob: float, tokenizer: Tokenizer | None) -> TokenEntry:
    """Return a token's id, text, bytes and log-probability.

    Without a tokenizer the text is empty.
    """
    data = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
    return {
        "token_id": token_id,
        "token": data.decode("utf-8", "replace"),
        "bytes": list(data),
        "logprob": logprob,
    }
