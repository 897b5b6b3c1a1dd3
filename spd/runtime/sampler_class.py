"""Which steps of sampling a request needs. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from spd.runtime.request import SamplingParams


@dataclass(frozen=True)
class SamplerClass:
    """Which steps any active slot needs; the rest are skipped, which changes no bit of any row."""

    noise: bool = False
    truncation: bool = False
    penalties: bool = False
    bias: bool = False
    min_length: bool = False
    grammar: bool = False

    @staticmethod
    def of(params: SamplingParams) -> SamplerClass:
        """What one request's parameters need."""
        return SamplerClass(
            noise=params.temperature > 0,
            truncation=params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
            penalties=(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            != (1, 0, 0),
            bias=bool(params.logit_bias),
            min_length=params.min_tokens > 0,
        )

    def __or__(self, other: SamplerClass) -> SamplerClass:
        return SamplerClass(
            self.noise or other.noise,
            self.truncation or other.truncation,
            self.penalties or other.penalties,
            self.bias or other.bias,
            self.min_length or other.min_length,
            self.grammar or other.grammar,
        )
