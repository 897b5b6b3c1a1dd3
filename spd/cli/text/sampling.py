"""From flags to sampling parameters: the model's defaults, the seed, and what a shell cannot type.

Ranges are checked by `SamplingParams`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spd.cli.options import SamplingOptions
from spd.errors import UsageError

if TYPE_CHECKING:
    from spd.formats.model_config import GenerationConfig
    from spd.runtime import SamplingParams

BUILT_IN = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What holds where neither an option nor the model says anything."""
SAME = ("presence_penalty", "frequency_penalty", "min_tokens", "max_tokens", "ignore_eos")
"""Options that are parameters by the same names."""
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}


@dataclass(frozen=True)
class Resolved:
    """Sampling parameters, and where each of the model-dependent ones came from."""

    params: SamplingParams
    sources: dict[str, str]

    def words(self) -> dict[str, Any]:
        """Each parameter, and where it comes from."""
        return {
            name: f"{value} ({self.sources[name]})" if name in self.sources else value
            for name, value in vars(self.params).items()
        }


def resolve_sampling(
    options: SamplingOptions, model: GenerationConfig, vocab_size: int, *, logprobs: int | None = None
) -> Resolved:
    """Flags, then generation_config.json, then built-in values. Raises UsageError."""
    from spd.runtime import SamplingParams
    from spd.runtime.engine.request import SEED_BITS

    suggested = {name: getattr(model, name) for name in BUILT_IN}
    if model.do_sample is False:
        suggested["temperature"] = 0.0
    values: dict[str, Any] = {name: getattr(options, name) for name in SAME}
    sources = {"seed": "given" if options.seed is not None else "drawn"}
    for name, built_in in BUILT_IN.items():
        asked = ("given", getattr(options, name)), ("generation_config.json", suggested[name])
        found = (each for each in (*asked, ("default", built_in)) if each[1] is not None)
        sources[name], values[name] = next(found)
    stop_ids = tuple(options.stop_token_id or ())
    bias = tuple(parse_logit_bias(text) for text in options.logit_bias or ())
    check_ids(stop_ids, vocab_size, "stop_token_id")
    check_ids([token_id for token_id, _ in bias], vocab_size, "logit_bias")
    try:
        params = SamplingParams(
            **values,
            logit_bias=bias,
            stop_token_ids=stop_ids,
            stop=tuple(unescape(text) for text in options.stop or ()),
            seed=secrets.randbits(SEED_BITS) if options.seed is None else options.seed,
            logprobs=logprobs,
        )
    except UsageError as error:
        if sources.get(error.message.partition(" ")[0]) == "generation_config.json":
            why = "The value comes from the model's generation_config.json; an option overrides it."
            error.reason = (*error.reason, why)
        raise
    return Resolved(params, sources)


def parse_logit_bias(text: str) -> tuple[int, float]:
    """`ID=VALUE` as a token id and a bias. Raises UsageError."""
    left, equals, right = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return int(left), float(right)
    except ValueError:
        raise UsageError(f"logit_bias {text} is not ID=VALUE", fix=["--set logit_bias=42=-5"]) from None


def check_ids(ids: Sequence[int], vocab_size: int, flag: str) -> None:
    """Raise UsageError for a token id that the vocabulary does not have."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise UsageError(
                f"{flag}: token id {token_id} is not in the vocabulary",
                reason=[f"valid: 0 to {vocab_size - 1}"],
            )


def unescape(text: str) -> str:
    r"""Text with \n, \t, \r, \0 and \\ read as in Python; other backslashes stay."""
    return re.sub(r"\\([ntr0\\])", lambda match: ESCAPES[match[1]], text)
