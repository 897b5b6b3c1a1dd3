"""Sampling parameters as fields of JSON, checked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from spd.conversation import fields as read
from spd.conversation.fields import FLAG, OBJECT, TEXT, Check, array_of, integer, refuse
from spd.runtime.round.sampling_params import MAX_STOP_STRINGS, MAX_TOKENS

if TYPE_CHECKING:
    from spd.runtime import Json


TOKEN_IDS = array_of(integer(0, 2**31 - 1), 1 << 20)
"""The check of an array of token ids; that the vocabulary has them is checked later."""


def _stop_strings(value: Json, name: str) -> tuple[str, ...]:
    """Return stop strings, of which the body may have one or an array; empty ones are left out.

    Raises FieldError.
    """
    texts = array_of(TEXT, MAX_STOP_STRINGS)([value] if isinstance(value, str) else value, name)
    return tuple(text for text in texts if text)


def _logit_bias(value: Json, name: str) -> tuple[tuple[int, float], ...]:
    """Return pairs of a token id and what is added to its logit. Raises FieldError."""
    biases = OBJECT(value, name)
    if len(biases) > 1024:
        refuse(name, f"expected at most 1024 token ids, but got {len(biases):,}")
    return tuple(_token_bias(token, bias, name) for token, bias in biases.items())


def _token_bias(token: str, bias: Json, name: str) -> tuple[int, float]:
    """Return the token id that a key of `name` is, and its number. Raises FieldError."""
    if not re.fullmatch("[0-9]{1,9}", token, re.ASCII):
        refuse(name, f"its key {token[:40]!r} is not a token id")
    return int(token), read.number(bias, f"{name}.{token}")


SAMPLING_FIELDS: dict[str, Check[object]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), read.number),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), read.number),
    "top_k": integer(-1, 2**31 - 1),
    "max_tokens": integer(1, MAX_TOKENS),
    "min_tokens": integer(0, MAX_TOKENS),
    "ignore_eos": FLAG,
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": _stop_strings,
    "stop_token_ids": array_of(integer(0, 2**31 - 1), 16),
    "logit_bias": _logit_bias,
}
"""Checks of the fields of `SamplingParams`, by the same names; it checks their ranges itself."""
