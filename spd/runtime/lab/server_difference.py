"""Where two replies of a server differ first, and the margin of the two tokens. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypedDict

from spd.errors import SpdError
from spd.runtime.lab.api_client import TOP_LOGPROBS, ApiReply, TokenEntry
from spd.runtime.lab.server_check import Mode, Question, ServerCheck, Setting

EXCERPT = 24
"""Characters of a text that are shown before and after the place."""


class TextDifference(TypedDict):
    """The first difference of a question's text with speculation on from that with it off."""

    prompt: str
    temperature: float
    seed: int
    concurrency: int
    position: int
    """Characters before it."""
    before: str
    expected: str
    found: str
    token: int | None
    """Tokens before the first one that differs; None if log-probabilities do not tell."""
    margin: float | None
    """Log-probability of the expected token less that of the one found, with speculation off."""


def describe_differences(check: ServerCheck, limit: int, *, asks: bool) -> Iterator[TextDifference]:
    """Yield the first differences of texts between the modes, at most `limit`.

    asks: True if the server is asked for log-probabilities, without which tokens are not known.
    """
    changed = ((setting, question) for setting in check.settings for question in setting.changed())
    for setting, question in islice(changed, limit):
        difference = _text_difference(setting, question)
        if asks:
            _add_token(difference, check, setting, question)
        yield difference


def _text_difference(setting: Setting, question: Question) -> TextDifference:
    """Return the first difference of a question's first replies, without tokens."""
    replies = setting.replies[question]
    off = replies["off"][0]
    on = replies["on"][0]
    characters = enumerate(zip(off.text, on.text, strict=False))
    shorter = min(len(off.text), len(on.text))
    position = next((number for number, (a, b) in characters if a != b), shorter)
    is_end = off.text == on.text
    excerpt = slice(position, position + EXCERPT)
    return {
        "prompt": question.prompt.name,
        "temperature": question.temperature,
        "seed": question.seed,
        "concurrency": setting.concurrency,
        "position": position,
        "before": off.text[max(0, position - EXCERPT) : position],
        "expected": off.finish_reason if is_end else off.text[excerpt],
        "found": on.finish_reason if is_end else on.text[excerpt],
        "token": None,
        "margin": None,
    }


def _add_token(
    difference: TextDifference, check: ServerCheck, setting: Setting, question: Question
) -> None:
    """Set number and margin of the first token that differs, where the server tells them."""
    replies = setting.replies[question]
    off = _entries(check, question, "off", replies["off"][0])
    on = _entries(check, question, "on", replies["on"][0])
    pairs = enumerate(zip(off, on, strict=False))
    token = next((number for number, (a, b) in pairs if a.data != b.data), None)
    if token is not None:
        difference["token"] = token
        other = off[token].top.get(on[token].data)
        difference["margin"] = None if other is None else round(off[token].logprob - other, 6)


def _entries(
    check: ServerCheck, question: Question, mode: Mode, expected: ApiReply
) -> Sequence[TokenEntry]:
    """Return the tokens of a reply that is asked for again; none if it is another."""
    try:
        reply = check.ask(question, mode, logprobs=True, top_logprobs=TOP_LOGPROBS)
    except SpdError:  # the server has no log-probabilities
        return ()
    return reply.entries if reply.key == expected.key else ()
