"""Orders and what comes back: sampling parameters, requests, events. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from spd.errors import UsageError
from spd.runtime.metrics import RequestMetrics

MAX_STOP_IDS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_LOGPROBS = 20
MAX_TOKENS = 2**24


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. temperature 0 is argmax; top_k 0 and logprobs None are off.

    Raises UsageError naming the parameter and its valid range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _between("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < 1e-3:
            raise UsageError(
                f"temperature {self.temperature} is too small to sample with",
                reason=["valid: 0 (greedy), or 0.001 to 100"],
            )
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _between("top_k", self.top_k, 0, 2**31 - 1)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _between("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _between("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _between("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None:
            _between("max_tokens", self.max_tokens, 1, MAX_TOKENS)
            if self.min_tokens > self.max_tokens:
                raise UsageError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        _between("seed", self.seed, 0, 2**63 - 1)
        if self.logprobs is not None:
            _between("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _between("number of stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_IDS)
        for token_id in self.stop_token_ids:
            _between("stop_token_ids", token_id, 0, 2**31 - 1)
        _between("number of stop", len(self.stop), 0, MAX_STOP_STRINGS)
        for text in self.stop:
            _between("length of a stop", len(text), 1, MAX_STOP_LENGTH)
        for token_id, bias in self.logit_bias:
            _between("logit_bias id", token_id, 0, 2**31 - 1)
            _between("logit_bias", bias, -1000.0, 1000.0)


def _between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not low <= value <= high or (open_low and value == low):
        start = f"above {low:g}" if open_low else f"{low:g}"
        shown = f"of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 2**99 else value
        raise UsageError(f"{name} {shown} is out of range", reason=[f"valid: {start} to {high:.12g}"])


@dataclass(frozen=True)
class GrammarText:
    """What a reply must look like: a JSON schema, a regular expression or a Lark grammar.

    With `after`, a token id, it applies behind the first such token: what comes before is thinking.
    Raises UsageError for another kind.
    """

    kind: Literal["schema", "regex", "lark"]
    text: str
    after: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("schema", "regex", "lark"):
            raise UsageError(f"grammar kind {self.kind} is not known", reason=["schema, regex or lark"])


@dataclass(frozen=True)
class ThinkingBudget:
    """How long a reply may think: `tokens` before token `end` is forced, which ends the thinking.

    Thinking begins behind token `begin` at the beginning of the reply, or with it where the prompt is
    `inside` already. Raises UsageError.
    """

    tokens: int
    end: int
    begin: int | None = None
    inside: bool = False

    def __post_init__(self) -> None:
        _between("thinking budget", self.tokens, 0, MAX_TOKENS)
        _between("thinking budget end", self.end, 0, 2**31 - 1)


@dataclass(frozen=True)
class Request:
    """One prompt in token ids, and how to continue it.

    `spans` are the lengths of the prompt's parts in order, each ("prompt" or "generated", length):
    text that an earlier request generated keeps its kind, so that its cache can be found again.
    Empty means one prompt span. At most `draft_max` tokens a round are speculated for it, 0 for none,
    None for as many as the engine does. It changes nothing but the speed.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    spans: tuple[tuple[str, int], ...] = ()
    draft_max: int | None = None
    grammar: GrammarText | None = None
    thinking: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        if self.draft_max is not None:
            _between("draft_max", self.draft_max, 0, 2**31 - 1)


@dataclass(frozen=True)
class TokenLogprob:
    """The model's own log-probability of a token, before any processing, and of the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """What one round brought one request; text holds whole characters only. A tuple: one is made a round.

    finish_reason is None while it goes on, then "stop", "length", "abort" or "error".
    `drafted` says for each token whether it was an accepted draft; `error` in words why one ended by it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    drafted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Completion:
    """Everything that one request brought; fields as in `Event`."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    metrics: RequestMetrics
    drafted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass
class CompletionParts:
    """A completion while its events come in."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def take(self, event: Event) -> None:
        """Add what an event brought."""
        self.token_ids += event.token_ids
        self.pieces.append(event.text)
        self.drafted += event.drafted
        self.logprobs += event.logprobs
        self.finish_reason, self.error = event.finish_reason, event.error

    def completion(self, request_id: str, metrics: RequestMetrics) -> Completion:
        """The whole."""
        return Completion(
            request_id,
            tuple(self.token_ids),
            "".join(self.pieces),
            self.finish_reason,
            metrics,
            tuple(self.drafted),
            tuple(self.logprobs),
            self.error,
        )
