"""What is counted while a request runs, and the records a trace is made of. No torch here.

A step (round) is one forward of the target that verifies k >= 0 drafts. The first token comes out of
a round too, so completion_tokens = rounds + draft_n_accepted. Names follow llama.cpp's `timings` and
vLLM's `metrics.speculative_decoding`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RoundRecord:
    """One request's share of one round; `position` is that of the first drafted token."""

    request: str
    round: int
    position: int
    method: str
    draft: list[int]
    sampled: list[int]
    accepted: int
    committed: list[int]
    ms: dict[str, float]
    """Draft, verify, rest, and host: the gap between the round before and this one, by the device's clock."""
    draft_forwards: int
    k: int
    """Drafts a slot that the round had room for; `draft` may hold fewer."""


@dataclass
class RequestMetrics:
    """Counters of one request. Accepted counts only emitted drafts; `_raw` counts all that matched."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    load_ms: float = 0.0
    """Of the engine, before the request: with `first_token_ms` what a cold start takes."""
    queue_ms: float = 0.0
    """From arrival to the first work on the prompt."""
    preemptions: int = 0
    prompt_ms: float = 0.0
    first_token_ms: float = 0.0
    predicted_ms: float = 0.0
    rounds: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    draft_n_accepted_raw: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def count_round(self, drafted: int, accepted_raw: int, accepted: int) -> None:
        """Add one round's drafts: how many were verified, matched, and matched and emitted."""
        self.rounds += 1
        self.draft_n += drafted
        self.draft_n_accepted_raw += accepted_raw
        self.draft_n_accepted += accepted
        _grow(self.acceptance_histogram, accepted + 1)
        self.acceptance_histogram[accepted] += 1
        _grow(self.accepted_per_position, accepted)
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    @property
    def decode_tokens_per_second(self) -> float:
        """1 / TPOT: tokens after the first round's over the time after it."""
        return 1000.0 * self.tokens_after_first / self.predicted_ms if self.predicted_ms > 0 else 0.0

    tokens_after_first: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens a round, the recovered or bonus token included."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted and emitted drafts over verified drafts."""
        return self.draft_n_accepted / self.draft_n if self.draft_n else 0.0

    def usage(self) -> dict[str, Any]:
        """OpenAI-shaped token counts."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def timings(self) -> dict[str, Any]:
        """llama.cpp-shaped timings; milliseconds."""
        return {
            "prompt_n": self.prompt_tokens - self.cached_tokens,
            "cache_n": self.cached_tokens,
            "load_ms": round(self.load_ms, 3),
            "prompt_ms": round(self.prompt_ms, 3),
            "first_token_ms": round(self.first_token_ms, 3),
            "predicted_n": self.completion_tokens,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_per_second": round(self.decode_tokens_per_second, 3),
            "draft_n": self.draft_n,
            "draft_n_accepted": self.draft_n_accepted,
            "draft_n_accepted_raw": self.draft_n_accepted_raw,
        }

    def speculative_decoding(self, method: str, k: int, *, imposed: bool = False) -> dict[str, Any]:
        """vLLM-shaped speculation metrics; says whether acceptance was earned or imposed."""
        return {
            "method": method,
            "num_spec_tokens": k,
            "num_spec_steps": self.rounds,
            "num_draft_tokens": self.draft_n,
            "num_accepted_draft_tokens": self.draft_n_accepted,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "draft_acceptance_rate": round(self.draft_acceptance_rate, 4),
            "acceptance_histogram": list(self.acceptance_histogram),
            "accepted_per_position": list(self.accepted_per_position),
            "acceptance": "imposed" if imposed else "natural",
        }


def _grow(counts: list[int], size: int) -> None:
    counts.extend([0] * (size - len(counts)))
