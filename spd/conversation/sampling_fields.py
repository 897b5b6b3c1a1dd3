"""Sampling parameters as fields of JSON, checked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from spd.conversation import fields as read
from spd.conversation.fields import FLAG, OBJECT, TEXT, array_of, integer, refuse
from spd.runtime.round.sampling_params import MAX_STOP_STRINGS, MAX_TOKENS

if TYPE_CHECKING:
    pass


IDS = array_of(integer(0, 2**31 - 1), 1 << 20)


def _stops(value: Any, name: str) -> tuple[str, ...]:
    texts = array_of(TEXT, MAX_STOP_STRINGS)([value] if isinstance(value, str) else value, name)
    return tuple(text for text in texts if text)


def _logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    if len(OBJECT(value, name)) > 1024:
        refuse(name, f"expected at most 1024 token ids, but got {len(value):,}")
    return tuple(_bias(token, bias, name) for token, bias in value.items())


def _bias(token: str, bias: Any, name: str) -> tuple[int, float]:
    if not re.fullmatch("[0-9]{1,9}", token, re.ASCII):
        refuse(name, f"its key {token[:40]!r} is not a token id")
    return int(token), read.number(bias, f"{name}.{token}")


SAMPLING_FIELDS = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), read.number),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), read.number),
    "top_k": integer(-1, 2**31 - 1),
    "max_tokens": integer(1, MAX_TOKENS),
    "min_tokens": integer(0, MAX_TOKENS),
    "ignore_eos": FLAG,
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": _stops,
    "stop_token_ids": array_of(integer(0, 2**31 - 1), 16),
    "logit_bias": _logit_bias,
}
"""Those that `SamplingParams` knows by the same names; it checks their ranges."""
