"""Sampling parameters: those of the user over those that the model suggests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spd.conversation.token_ids import check_token_ids
from spd.errors import UsageError
from spd.formats.names import GENERATION_FILE
from spd.runtime.engine.request import SEED_BITS
from spd.runtime.round.sampling_params import SamplingParams

if TYPE_CHECKING:
    from spd.formats.model_config import GenerationConfig


SAMPLING_DEFAULTS = {
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Values where neither an option nor the model sets one."""


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options of a user; None leaves a value to the model's generation_config.json."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


PASSED_THROUGH_OPTIONS = (
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "max_tokens",
    "ignore_eos",
)
"""Options that become parameters by the same names, whatever the model suggests."""


@dataclass(frozen=True)
class ResolvedSampling:
    """Sampling parameters, and where each of the model-dependent ones came from."""

    params: SamplingParams
    sources: dict[str, str]

    def describe(self) -> dict[str, object]:
        """Return each parameter; one that depends on the model is a text that names its source."""
        with_sources = {
            name: f"{getattr(self.params, name)} ({source})"
            for name, source in self.sources.items()
        }
        return vars(self.params) | with_sources


def resolve_sampling(
    options: SamplingOptions, generation_config: GenerationConfig, vocab_size: int
) -> ResolvedSampling:
    """Return the parameters: a user's options, then generation_config.json, then the defaults.

    Without a seed among the options, one is drawn. vocab_size: ids from it on are refused. Raises
    UsageError for a value that is not valid.
    """
    import secrets

    suggested = {name: getattr(generation_config, name) for name in SAMPLING_DEFAULTS}
    if generation_config.do_sample is False:
        suggested["temperature"] = 0.0
    values: dict[str, Any] = {name: getattr(options, name) for name in PASSED_THROUGH_OPTIONS}
    sources = {"seed": "given" if options.seed is not None else "drawn"}
    for name, default in SAMPLING_DEFAULTS.items():
        candidates = {
            "given": getattr(options, name),
            GENERATION_FILE: suggested[name],
            "default": default,
        }
        source = next(source for source, value in candidates.items() if value is not None)
        sources[name] = source
        values[name] = candidates[source]
    check_token_ids(options.stop_token_ids, vocab_size, "stop_token_id")
    check_token_ids([token_id for token_id, _ in options.logit_bias], vocab_size, "logit_bias")
    try:
        params = SamplingParams(
            **values,
            logit_bias=options.logit_bias,
            stop_token_ids=options.stop_token_ids,
            stop=options.stop,
            seed=secrets.randbits(SEED_BITS) if options.seed is None else options.seed,
            logprobs=options.logprobs,
        )
    except UsageError as error:
        if sources.get(error.message.partition(" ")[0]) == GENERATION_FILE:
            hint = (
                "The value comes from the model's generation_config.json; an option overrides it."
            )
            error.reason = (*error.reason, hint)
        raise
    return ResolvedSampling(params, sources)
