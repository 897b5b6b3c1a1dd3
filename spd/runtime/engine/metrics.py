"""The metrics of a request. No torch here.

A step (round) is one forward of the target that verifies k >= 0 drafts. The first token comes from
a round too, so completion_tokens = rounds + draft_n_accepted, less one where a draft ends the
reply. Names follow llama.cpp's `timings` and vLLM's `metrics.speculative_decoding`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

BEFORE_FIRST_TOKEN = ("load_ms", "prompt_ms", "queue_ms", "first_token_ms")
"""The times up to the first token."""
Fields: TypeAlias = "dict[str, int | float | str | list[int] | dict[str, int] | None]"
"""Metrics under the names of another program's JSON."""


@dataclass(slots=True)
class RequestMetrics:
    """Counters and times, in milliseconds, of one request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt whose cache was there before."""
    completion_tokens: int = 0
    load_ms: float = 0.0
    """Time that the engine took to load; with `first_token_ms` it is the time of a cold start."""
    queue_ms: float = 0.0
    """Time from arrival to the first work on the prompt."""
    preemptions: int = 0
    prompt_ms: float = 0.0
    """Time of the passes that wrote the prompt."""
    first_token_ms: float = 0.0
    """Time from arrival to the first tokens."""
    predicted_ms: float = 0.0
    """Time from the first tokens to the last."""
    first_tokens: int = 0
    """Tokens of the first round that committed some."""
    outcomes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Rounds, by how many drafts were verified, and how many of these were accepted and emitted."""
    draft_n_accepted_raw: int = 0
    """Drafts that equal the target's tokens, those that a stop cut off included."""
    draft_n_masked: int = 0
    """Drafts that a grammar forced, or that were drawn among the tokens that it allows."""
    rounds_waited: int = 0
    """Rounds that began after the host had read the round before and written a grammar's masks."""
    draft_fault: str = ""
    """Why drafts did not help, set at the end: "chance", "context" or "cost"; empty if they did."""
    break_even: float = 0.0
    """Tokens a round from which drafts paid, by measured times; 0 where nothing was judged."""

    @property
    def rounds(self) -> int:
        """Rounds that the request took part in and that have been read."""
        return sum(self.outcomes.values())

    @property
    def num_draft_rounds(self) -> int:
        """Rounds that verified at least one draft for this request."""
        return sum(times for (drafts, _), times in self.outcomes.items() if drafts)

    @property
    def draft_n(self) -> int:
        """Verified drafts."""
        return sum(drafts * times for (drafts, _), times in self.outcomes.items())

    @property
    def draft_n_accepted(self) -> int:
        """Accepted and emitted drafts."""
        return sum(accepted * times for (_, accepted), times in self.outcomes.items())

    @property
    def acceptance_histogram(self) -> list[int]:
        """Rounds in which 0, 1, ... drafts were accepted and emitted."""
        counts = [0] * max((accepted + 1 for _, accepted in self.outcomes), default=0)
        for (_, accepted), times in self.outcomes.items():
            counts[accepted] += times
        return counts

    @property
    def accepted_per_position(self) -> list[int]:
        """Rounds in which the first, second, ... draft was accepted and emitted."""
        counts = self.acceptance_histogram
        return [sum(counts[position:]) for position in range(1, len(counts))]

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens a second after the first round's tokens: 1 / TPOT."""
        tpot_ms = self.time_per_output_token_ms
        return 1000.0 / tpot_ms if tpot_ms else 0.0

    @property
    def time_per_output_token_ms(self) -> float:
        """TPOT: the time after the first round's tokens, divided by the tokens after them."""
        later_tokens = self.completion_tokens - self.first_tokens
        return self.predicted_ms / later_tokens if later_tokens else 0.0

    @property
    def inter_token_latency_ms(self) -> float:
        """Mean ITL: the time from one emission to the next, which may have several tokens."""
        gaps = self.rounds - 1
        return self.predicted_ms / gaps if gaps > 0 else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens a round, rounds without drafts included."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a round with drafts, the recovered or bonus token included, as vLLM defines it.

        That is 1 + accepted drafts, divided by the rounds with drafts.
        """
        return 1 + self.draft_n_accepted / self.num_draft_rounds if self.num_draft_rounds else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted and emitted drafts, divided by verified drafts."""
        return self.draft_n_accepted / self.draft_n if self.draft_n else 0.0

    @property
    def draft_masked_share(self) -> float:
        """Share of the drafts that a grammar forced or masked; those of a last round count too."""
        return min(1.0, self.draft_n_masked / self.draft_n) if self.draft_n else 0.0

    def draft_note(self, method: str) -> str | None:
        """Return one line about drafts that did not help, and why; None where they did."""
        undrafted = f"{self.rounds - self.num_draft_rounds} of {self.rounds} rounds had no drafts"
        if self.draft_fault == "chance":
            first = sum(self.accepted_per_position[:1])
            return (
                f"{method}: {first} of {self.num_draft_rounds} first drafts were accepted, as by chance: "
                "the drafter may be another model's, or its taps, norm or vocabulary are others"
            )
        if self.draft_fault == "context":
            return f"{method}: {undrafted}, for the drafter's context has ended"
        if self.draft_fault == "cost":
            return (
                f"{method}: drafts do not pay here: {undrafted}, {self.draft_acceptance_rate:.0%} "
                f"of the drafts were accepted; with {self.tokens_per_round:.2f} tokens a round "
                f"they would have to bring {self.break_even:.2f}"
            )
        return None

    def usage(self) -> Fields:
        """Return the token counts under the names of OpenAI's API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def timings(self) -> Fields:
        """Return the timings in milliseconds under the names of llama.cpp."""
        return {
            "prompt_n": self.prompt_tokens - self.cached_tokens,
            "cache_n": self.cached_tokens,
            **{name: round(getattr(self, name), 3) for name in BEFORE_FIRST_TOKEN},
            "inter_token_ms": round(self.inter_token_latency_ms, 3),
            "preemptions": self.preemptions,
            "predicted_n": self.completion_tokens,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_per_second": round(self.decode_tokens_per_second, 3),
            "draft_n": self.draft_n,
            "draft_n_accepted": self.draft_n_accepted,
            "draft_n_accepted_raw": self.draft_n_accepted_raw,
        }

    def speculative_decoding(self, method: str, k: int, *, imposed: bool = False) -> Fields:
        """Return the metrics of speculation under the names of vLLM.

        imposed: True if acceptance is synthetic, which the field "acceptance" tells.
        """
        return {
            "method": method,
            "num_spec_tokens": k,
            "num_spec_steps": self.rounds,
            "num_drafts": self.num_draft_rounds,
            "num_draft_tokens": self.draft_n,
            "num_accepted_draft_tokens": self.draft_n_accepted,
            "num_masked_draft_tokens": self.draft_n_masked,
            "num_waiting_spec_steps": self.rounds_waited,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "draft_acceptance_rate": round(self.draft_acceptance_rate, 4),
            "acceptance_histogram": self.acceptance_histogram,
            "accepted_per_position": self.accepted_per_position,
            "acceptance": "imposed" if imposed else "natural",
            "note": self.draft_note(method),
        }
