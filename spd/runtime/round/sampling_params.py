"""A request's sampling parameters, and the sampling steps that they need. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from spd.errors import UsageError

MAX_STOP_IDS = 16
NUM_STOP_IDS = MAX_STOP_IDS + 8
"""Stop ids of a request, together with those that end every text of a model."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters of a stop string
MAX_LOGPROBS = 20
MAX_TOKENS = 2**24
"""The highest value of `max_tokens` and `min_tokens`."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. temperature 0 is argmax; top_k 0 and logprobs None are off.

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
        check_range("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < 1e-3:
            raise UsageError(
                f"temperature {self.temperature} is too small to sample with",
                reason=["valid: 0 (greedy), or 0.001 to 100"],
            )
        check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_range("top_k", self.top_k, 0, 2**31 - 1)
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        check_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        check_range("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None:
            check_range("max_tokens", self.max_tokens, 1, MAX_TOKENS)
            if self.min_tokens > self.max_tokens:
                raise UsageError(
                    f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}"
                )
        check_range("seed", self.seed, 0, 2**63 - 1)
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        check_range("number of stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_IDS)
        for token_id in self.stop_token_ids:
            check_range("stop_token_ids", token_id, 0, 2**31 - 1)
        check_range("number of stop", len(self.stop), 0, MAX_STOP_STRINGS)
        for text in self.stop:
            check_range("length of a stop", len(text), 1, MAX_STOP_LENGTH)
        for token_id, bias in self.logit_bias:
            check_range("logit_bias id", token_id, 0, 2**31 - 1)
            check_range(f"logit_bias of token {token_id}", bias, -1000.0, 1000.0)


@dataclass(frozen=True)
class SamplingSteps:
    """The sampling steps that an active slot needs.

    Skipping the others changes no bit of any row.
    """

    noise: bool = False
    """True if tokens are sampled, at a temperature above 0."""
    truncation: bool = False
    """True with top-k, top-p or min-p."""
    penalties: bool = False
    bias: bool = False
    min_length: bool = False
    """True if stop ids are excluded up to a minimal length."""
    grammar: bool = False
    """True if a grammar's masks apply."""

    @staticmethod
    def from_params(params: SamplingParams) -> SamplingSteps:
        """Return the steps that one request's parameters need."""
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return SamplingSteps(
            noise=params.temperature > 0,
            truncation=params.temperature > 0
            and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
            penalties=penalties != (1, 0, 0),
            bias=bool(params.logit_bias),
            min_length=params.min_tokens > 0,
        )

    def __or__(self, other: SamplingSteps) -> SamplingSteps:
        return SamplingSteps(
            noise=self.noise or other.noise,
            truncation=self.truncation or other.truncation,
            penalties=self.penalties or other.penalties,
            bias=self.bias or other.bias,
            min_length=self.min_length or other.min_length,
            grammar=self.grammar or other.grammar,
        )


def check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise UsageError with the parameter's name and range, for a value outside of the range."""
    if not low <= value <= high or (open_low and value == low):
        valid_range = f"valid: {'above ' * open_low}{low:g} to {high}".removesuffix(".0")
        value_text = str(value)
        if isinstance(value, int) and abs(value) > 2**99:
            value_text = f"of {value.bit_length()} bits"
        raise UsageError(f"{name} {value_text} is out of range", reason=[valid_range])
