"""Log-probabilities of tokens as JSON values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime.engine.request import TokenLogprob


def logprob_entry(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a token's log-probability, and those of the likeliest, with their text and bytes."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        data = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
        shown = {
            "token_id": token_id,
            "token": data.decode("utf-8", "replace"),
            "bytes": list(data),
        }
        return {**shown, "logprob": logprob}

    return {**named(entry.token_id, entry.logprob), "top": [named(*likely) for likely in entry.top]}
