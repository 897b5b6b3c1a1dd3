"""Requests, and the events and outputs that they produce. No torch here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.round.sampling_params import (
    MAX_LOGPROBS,
    MAX_TOKENS,
    SamplingParams,
    check_range,
)

if TYPE_CHECKING:
    from spd.runtime.engine.json_schema import JsonObject

SEED_BITS = 53
"""Bits of a drawn or derived seed: a JSON reader that stores numbers as floats reads it exactly."""
JSON_WHITESPACE = r"(\n[ \t]{0,32}| ?)"
"""The expression for whitespace between the parts of a JSON text: a new line, a blank or nothing.

With unlimited whitespace weak models would never stop.
"""
JSON_STYLE: JsonObject = {"whitespace_pattern": JSON_WHITESPACE}
"""The options under a schema's `x-guidance` that set this whitespace."""


def derived_seed(*parts: int | str) -> int:
    """Return a seed of `SEED_BITS` bits for one reply among many, a hash of these parts alone."""
    import hashlib

    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS)


def partial_match_length(tag: str, text: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


@dataclass(frozen=True)
class ThinkingTokens:
    """The token ids that begin and end thinking; `inside` is True if the prompt has begun it."""

    begin: int | None
    end: int
    inside: bool = False


@dataclass(frozen=True)
class GrammarSpec:
    """The grammar of a reply: a JSON schema, a regular expression or a Lark grammar."""

    kind: Literal["schema", "regex", "lark"]
    text: str
    after: int | None = None
    """The token after whose first occurrence the grammar begins; the text before it is thinking."""
    optional: bool = False
    """True if the text before is not thinking, but a reply that may end without the grammar."""
    thinking: ThinkingTokens | None = None
    """The tokens between which an occurrence of `after` does not count."""


@dataclass(frozen=True)
class ThinkingBudget:
    """The length of a reply's thinking: at most `tokens`, then token `end` is forced, which ends
    it.

    Thinking begins after token `begin`, or with the reply where the prompt is `inside` already.
    Raises UsageError.
    """

    tokens: int
    end: int
    begin: int | None = None
    inside: bool = False

    def __post_init__(self) -> None:
        check_range("thinking budget", self.tokens, 0, MAX_TOKENS)


@dataclass(frozen=True)
class Request:
    """One prompt in token ids, and how to continue it."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    spans: tuple[tuple[str, int], ...] = ()
    """The parts of the prompt in order, each ("prompt" or "generated", length); empty: one prompt
    part.

    Text that an earlier request generated keeps its kind, so that its cache can be found again.
    """
    draft_max: int | None = None
    """Largest number of drafts a round; None: the engine's. It changes only the speed."""
    grammar: GrammarSpec | None = None
    thinking: ThinkingBudget | None = None
    prompt_logprobs: int | None = None
    """How many likeliest tokens to score at each position besides the prompt's token; None: no
    scores.

    Such a prompt is written anew, even if it is cached.
    """

    def __post_init__(self) -> None:
        if self.draft_max is not None:
            check_range("draft_max", self.draft_max, 0, 2**31 - 1)
        if self.prompt_logprobs is not None:
            check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)


@dataclass(frozen=True)
class TokenLogprob:
    """The model's own log-probability of a token, before any processing, and of the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The ids and log-probabilities of the likeliest tokens, the likeliest first."""


class Event(NamedTuple):
    """The output of one round for one request. A tuple, since one is made in every round."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    """Complete characters only."""
    finish_reason: str | None = None
    """None while the request goes on, then "stop", "length", "abort" or "error"."""
    drafted: tuple[bool, ...] = ()
    """True for each token that was an accepted draft."""
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    """The message of an error, or what a text lacks that ended before its grammar was complete."""
    stop: str | None = None
    """The stop string that ended the text: of those that its last token completed, the first to begin."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Those of the prompt's tokens but the first.

    In the first event of a request that asks for them.
    """


@dataclass
class RequestOutput:
    """The output of one request so far."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """The texts of the events, in order."""
    drafted: list[bool] = field(default_factory=list)
    """True for each token that was an accepted draft."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """The arrivals of tokens: seconds of `time.perf_counter`, and the number of tokens."""

    def add(self, event: Event) -> None:
        """Append the output of an event."""
        if event.token_ids:
            self.chunks.append((time.perf_counter(), len(event.token_ids)))
        self.token_ids += event.token_ids
        self.pieces.append(event.text)
        self.drafted += event.drafted
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason
        self.error = event.error

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


@dataclass
class Completion(RequestOutput):
    """The complete output of one request; fields as in `Event`."""

    request_id: str = field(kw_only=True)
    metrics: RequestMetrics = field(kw_only=True, default_factory=RequestMetrics)
