"""Orders and what comes back: sampling parameters, requests, events. No torch here."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.round.sampling_params import (
    MAX_LOGPROBS,
    MAX_TOKENS,
    SamplingParams,
    check_range,
)

SEED_BITS = 53
"""Of a seed that is drawn or derived: a JSON reader that holds numbers as floats keeps it as it is."""
JSON_STYLE: Any = {"whitespace_pattern": r"(\n[ \t]{0,32}| ?)"}
"""Between the parts of a JSON text nothing, a blank or a new line: weak models would never stop."""


def derived_seed(*parts: int | str) -> int:
    """The seed of one reply among many: it depends on nothing but these parts."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS)


def partial_match_length(tag: str, text: str) -> int:
    """Length of the longest end of `text` that begins `tag`: what may yet become it."""
    return next(
        (size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])),
        0,
    )


@dataclass(frozen=True)
class ThinkingTokens:
    """The tokens that `begin` and `end` thinking; `inside` says that the prompt has begun it."""

    begin: int | None
    end: int
    inside: bool = False


@dataclass(frozen=True)
class GrammarSpec:
    """What a reply must look like: a JSON schema, a regular expression or a Lark grammar."""

    kind: Literal["schema", "regex", "lark"]
    text: str
    after: int | None = (
        None  # it applies behind the first such token: what comes before is thinking
    )
    optional: bool = False  # what comes before is instead a text that is whole without it
    thinking: ThinkingTokens | None = None  # between these, `after` does not count


@dataclass(frozen=True)
class ThinkingBudget:
    """How long a reply may think: `tokens` before token `end` is forced, which ends the thinking.

    Thinking begins behind token `begin`, or with the reply where the prompt is `inside` already. Raises
    UsageError.
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
    """Its parts in order, each ("prompt" or "generated", length); empty: one of the prompt. Text that an
    earlier request generated keeps its kind, so that its cache can be found again."""
    draft_max: int | None = None
    """Tokens a round that are speculated at most; None: as the engine does. It changes only the speed."""
    grammar: GrammarSpec | None = None
    thinking: ThinkingBudget | None = None
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens to score at each place of the prompt beside its own; None: no scores.
    Such a prompt is written anew, whatever of it is cached."""

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


class Event(NamedTuple):
    """What one round brought one request. A tuple: one is made a round."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str  # whole characters only
    finish_reason: str | None = (
        None  # None while it goes on, then "stop", "length", "abort" or "error"
    )
    drafted: tuple[bool, ...] = ()  # for each token whether it was an accepted draft
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    """In words why it ended by one, or what the text lacks that ended before its grammar was complete."""
    stop: str | None = None
    """The stop string that ended it: of those that its last token completed, the one that begins first."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens but the first; with the first event of a request that asks for them."""


@dataclass
class RequestOutput:
    """What has come of one request so far."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, in seconds of `time.perf_counter`, and how many."""

    def take(self, event: Event) -> None:
        """Add what an event brought."""
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
        """The whole text so far."""
        return "".join(self.pieces)


@dataclass
class Completion(RequestOutput):
    """Everything that one request brought; fields as in `Event`."""

    request_id: str = field(kw_only=True)
    metrics: RequestMetrics = field(kw_only=True, default_factory=RequestMetrics)
